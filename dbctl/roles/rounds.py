"""How a worker goes from phase to phase, whatever its method: the loop, the time, the reports.

Rules of this file: pure (roles/base.py). Theory of operation: a worker is in one phase at a time,

    JOINING, IDLE, then round and round: FETCHING, SLOT, COMPUTE, COMPUTED; in the end FLUSH, rest

and its method (roles/downpour.py, roles/batch_worker.py) is a table: `can_go_on` says whether what
the phase waits for is there, `enter` what comes next. The same for every method is here: what is
received and sent again, what a phase waits for where the method has no word in it, the pass that
is computed together with other partitions, where the seconds went, and what is reported when.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from dbctl.model.exchange import Exchange
from dbctl.rights import CONTROLLER
from dbctl.roles.base import (
    NEVER,
    Allocate,
    Done,
    Effects,
    Gradient,
    PortionGradient,
    Send,
)
from dbctl.roles.conversation import Conversation
from dbctl.roles.local import LocalCopy
from dbctl.roles.totals import Totals
from dbctl.roles.verdict import MEND
from dbctl.shards import ShardSpan
from dbctl.wire import Finish, Message, Peer, Position

REPORT_S = 0.5


@dataclass(frozen=True, kw_only=True)
class WorkerStart:
    """What a worker of any method begins with."""

    gradient: Gradient | PortionGradient
    shards: Sequence[ShardSpan]
    slots: int = 2
    origin: int = 0  # the place in the flat vector of the gradient's first element
    partition: int = 0
    partners: Mapping[int, str] = field(default_factory=dict)  # the replica's other workers
    dtype: str = "float32"


class Phase(Enum):
    JOINING = "joining"  # not all shards have welcomed us
    IDLE = "idle"  # to be told what to do
    FETCHING = "fetching"  # for answers
    SLOT = "slot"  # for an acknowledgement that frees a push slot
    COMPUTE = "compute"
    COMPUTED = "computed"  # what becomes of it
    FLUSH = "flush"  # for the last acknowledgements
    FINISHED = "finished"  # at rest, unless more is granted
    HALTED = "halted"  # at rest for good


_SAID = (Phase.JOINING, Phase.FINISHED, Phase.HALTED)  # reported by their own names


class Phased(Protocol):
    """A method's worker. `until` is what it was told last: a report asks for what follows."""

    at: Position

    @property
    def until(self) -> int: ...

    def can_go_on(self) -> bool:
        """The phase in hand has what it waits for."""

    def enter(self, now: float) -> Effects:
        """What follows a phase that can be left: any but JOINING and COMPUTE."""


@runtime_checkable
class Blemished(Protocol):
    """A gradient that can look at the rows of its last pass; it is asked after a refusal only."""

    def blemish(self) -> str:
        """What is not finite in them, or ""."""


class Rounds:
    """`rate`, `later`, `read_own`, `in_place` are those of the local copy (roles/local.py)."""

    def __init__(
        self,
        start: WorkerStart,
        *,
        rate: Callable[[int], float],
        later: bool,
        read_own: bool,
        in_place: bool = False,
        allocate: Allocate,
        resend_s: float,
    ) -> None:
        self.local = LocalCopy(
            start.shards,
            origin=start.origin,
            n_elements=max((span.stop for _, span in start.gradient.tensors), default=0),
            dtype=start.dtype,
            rate=rate,
            slots=start.slots,
            later=later,
            read_own=read_own,
            in_place=in_place,
            allocate=allocate,
            resend_s=resend_s,
        )
        self.talk = Conversation(
            start.partition, start.partners, allocate=allocate, resend_s=resend_s
        )
        self.totals = Totals()
        self._gradient = start.gradient
        self.phase = Phase.JOINING
        self._since = 0.0
        self._exchanged_s = 0.0  # spent in exchanges when the last pass was over
        self._report_at = NEVER

    # ---------------------------------------------------------------------------------- messages

    @property
    def due(self) -> float:
        """What is to be done by the clock, whatever the phase."""
        return min(self.local.due, self.talk.due, self._report_at)

    def start(self, now: float) -> Effects:
        self._report_at = now + REPORT_S
        return self.local.hello(now)

    def receive(self, now: float, sender: Peer, message: Message) -> Effects:
        """Whatever is not of the method's own."""
        if isinstance(message, Finish):
            return [Done("finished")]
        self.local.receive(now, sender.node, message)
        return self.talk.receive(sender.node, message)

    def resend(self, now: float) -> Effects:
        return self.local.resend(now) + self.talk.resend(now)

    # ------------------------------------------------------------------------------------ phases

    def can_go_on(self) -> bool:
        """Phased.can_go_on, where the method has no word in it."""
        match self.phase:
            case Phase.JOINING:
                return self.local.joined
            case Phase.FETCHING:
                return self.local.complete
            case Phase.SLOT:
                return self.local.has_slot
            case Phase.COMPUTE:
                return self.talk.can_go_on
            case Phase.COMPUTED:
                return True
            case Phase.FLUSH:
                return self.local.acked >= self.local.pushed
            case Phase.IDLE | Phase.FINISHED | Phase.HALTED:
                return False

    def go_on(self, now: float, effects: Effects, worker: Phased) -> Effects:
        """Until a phase waits, something is to be sent, or a gradient is computed; then reports."""
        while not effects and worker.can_go_on():
            if self.phase is Phase.COMPUTE:
                effects = self._compute(now)
                break
            if self.phase is Phase.JOINING:
                self.to(now, Phase.IDLE)
                effects = self.report(now, worker)
            else:
                effects = worker.enter(now)
        if now >= self._report_at:
            effects = effects + self.report(now, worker)
        return effects

    def to(self, now: float, phase: Phase) -> None:
        """Leaves the phase in hand for another one, and counts how long it took."""
        took_s = now - self._since
        match self.phase:
            case Phase.FETCHING:
                self.totals.fetch_wait_s += took_s
            case Phase.SLOT:
                self.totals.push_wait_s += took_s
            case Phase.COMPUTED:
                self.totals.compute_s += took_s - (self.talk.waited_s - self._exchanged_s)
                self._exchanged_s = self.talk.waited_s
        self.phase, self._since = phase, now

    def compute(self, now: float, work: Generator[Exchange, Any, Any]) -> None:
        """From SLOT on: a pass, whose result is in `talk.result` in phase COMPUTED."""
        self.to(now, Phase.COMPUTE)
        self.talk.begin(work)

    def _compute(self, now: float) -> Effects:
        refused = self.totals.refused
        effects, over = self.talk.go_on(now)
        if over:
            # Not by `to`: a pass is as long as it is until the next `now`.
            self.phase = Phase.COMPUTED
        if (
            self.totals.refused > refused
            and isinstance(self._gradient, Blemished)
            and (what := self._gradient.blemish())
        ):
            self.totals.refused_where += f", where {what}; {MEND}"
        return effects

    # ----------------------------------------------------------------------------------- reports

    def report(self, now: float, worker: Phased) -> Effects:
        self._report_at = now + REPORT_S
        report = self.totals.report(
            self._state(worker), worker.at, until=worker.until, local=self.local, talk=self.talk
        )
        return [Send(CONTROLLER, report)]

    def _state(self, worker: Phased) -> str:
        if self.phase in _SAID:
            return self.phase.value
        waits = self.phase is Phase.IDLE and not worker.can_go_on()
        return "waiting" if waits else "running"
