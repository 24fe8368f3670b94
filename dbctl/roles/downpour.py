"""The Downpour SGD client: one model replica's loop (paper A, section 4.1 and appendix 7.1).

Rules of this file: pure (roles/base.py). Theory of operation, with `step` from 0:

    if step mod n_fetch == 0: fetch             overlap: asked for one step earlier
    g          <- gradient(parameters, next mini-batch)
    accrued    <- accrued + g                   in a push slot
    parameters <- parameters - alpha g          skipped when a fetch replaces them anyway
    if step mod n_push == 0: push accrued
    step       <- step + 1

A worker is in one phase at a time; `_enter` is the table. The arithmetic is in roles/local.py.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import isfinite, sqrt
from typing import Any

from dbctl.model.exchange import Exchange
from dbctl.optim.gradients import clip_to, first_bad, is_finite, square_sum
from dbctl.roles.base import (
    CONTROLLER,
    NEVER,
    NOW,
    Allocate,
    Array,
    BatchResult,
    Done,
    Effects,
    Gradient,
    Send,
)
from dbctl.roles.conversation import Conversation
from dbctl.roles.local import LocalCopy
from dbctl.roles.totals import Totals
from dbctl.shards import ShardSpan
from dbctl.wire import BEGINNING, Finish, Grant, Halt, Message, Peer, Position


@dataclass(frozen=True, kw_only=True)
class DownpourStart:
    """What a worker begins with. `rate(n)` is the rule's rate at a shard's n-th update."""

    gradient: Gradient
    shards: Sequence[ShardSpan]
    rate: Callable[[int], float]
    n_fetch: int = 1
    n_push: int = 1
    overlap: bool = True
    clip: float | None = None
    slots: int = 2
    position: Position = BEGINNING
    origin: int = 0  # the place in the flat vector of the gradient's first element
    partition: int = 0
    partners: Mapping[int, str] = field(default_factory=dict)  # the replica's other workers
    tensors: Sequence[str] = ()  # of the whole network, in order; none: the gradient's own
    dtype: str = "float32"


class Phase(Enum):
    JOINING = "joining"  # not all shards have welcomed us
    IDLE = "waiting"  # for a grant
    FETCHING = "fetching"  # for answers
    SLOT = "slot"  # for an acknowledgement that frees a push slot
    COMPUTE = "compute"
    COMPUTED = "computed"  # push what is due
    FLUSH = "flush"  # for the last acknowledgements
    FINISHED = "finished"
    HALTED = "halted"


_AT_REST = {Phase.IDLE: "waiting", Phase.FINISHED: "finished", Phase.HALTED: "halted"}
_REPORT_S = 0.5


class Downpour:
    def __init__(self, start: DownpourStart, *, allocate: Allocate, resend_s: float = 0.25) -> None:
        self._start = start
        self._gradient = start.gradient
        self.local = LocalCopy(
            start.shards,
            origin=start.origin,
            n_elements=max((span.stop for _, span in start.gradient.tensors), default=0),
            dtype=start.dtype,
            rate=start.rate,
            slots=start.slots,
            later=start.n_push > 1,
            read_own=start.overlap,
            allocate=allocate,
            resend_s=resend_s,
        )
        self.at = start.position
        self._phase = Phase.JOINING
        self._fresh = True  # the next step begins with a fetch, whatever its number
        self._talk = Conversation(
            start.partition, start.partners, allocate=allocate, resend_s=resend_s
        )
        self._grant = Grant(0, start.position.step)
        self._granted_from = start.position.step
        self._halt: Halt | None = None
        self._mark: tuple[int, int] | None = None
        self._marked = 0
        self._since = 0.0
        self._waited_s = 0.0
        self._report_at = NEVER
        self._asked_at = -1
        self._fetched_step = -1  # the step that the last fetch was asked for
        self._started = False
        self._totals = Totals()

    # ---------------------------------------------------------------------------------- messages

    @property
    def due(self) -> float:
        if self._runnable() or self._holding():
            return NOW
        return min(self.local.due, self._talk.due, self._report_at)

    def start(self, now: float) -> Effects:
        self._report_at = now + _REPORT_S
        return self.local.hello(now)

    def receive(self, now: float, sender: Peer, message: Message) -> Effects:
        match message:
            case Grant():
                return self._on_grant(now, message)
            case Halt():
                self._halt = self._halt or message
                return []
            case Finish():
                return [Done("finished")]
        self.local.receive(now, sender.node, message)
        return self._talk.receive(sender.node, message)

    def _on_grant(self, now: float, grant: Grant) -> Effects:
        if grant.number <= self._grant.number:
            return []
        self._granted_from = self.at.step
        self._grant = grant
        if grant.mark > self._marked:
            self._mark = (grant.mark, grant.mark_step)
        return []

    # -------------------------------------------------------------------------------------- work

    def _runnable(self) -> bool:
        match self._phase:
            case Phase.JOINING:
                return self.local.joined
            case Phase.IDLE:
                return self._must_end() or self.at.step < self._until()
            case Phase.FETCHING:
                return self.local.complete
            case Phase.SLOT:
                return self.local.has_slot
            case Phase.COMPUTE:
                return self._talk.can_go_on
            case Phase.COMPUTED:
                return True
            case Phase.FLUSH:
                return self.local.acked >= self.local.pushed
            case Phase.FINISHED:
                return self._halt is not None or self.at.step < self._until()
            case Phase.HALTED:
                return False

    def _holding(self) -> bool:
        """An answer can be copied. Not while its parameters are in use by the step in hand."""
        return self._phase not in (Phase.COMPUTE, Phase.COMPUTED) and self.local.holding

    def _until(self) -> int:
        return max(self._grant.until, self._halt.until if self._halt is not None else 0)

    def _must_end(self) -> bool:
        if self._halt is not None and (self._talk.alone or self.at.step >= self._halt.until):
            return True
        return self._grant.last and self.at.step >= self._grant.until

    def step(self, now: float) -> Effects:
        """Goes on until a phase waits, something is to be sent, or a batch is computed."""
        effects = self.local.resend(now) + self._talk.resend(now)
        if self._holding():
            effects += self.local.copy_answers(now)
        while not effects and self._runnable():
            if self._phase is Phase.COMPUTE:
                effects += self._compute(now)
                break
            effects += self._enter(now)
        if now >= self._report_at:
            effects += self._report(now)
        return effects

    def _enter(self, now: float) -> Effects:
        match self._phase:
            case Phase.JOINING:
                self._phase = Phase.IDLE
                return self._report(now)
            case Phase.IDLE:
                if self._must_end():
                    return self._flush(now)
                return self._begin_step(now)
            case Phase.FETCHING:
                self._totals.fetch_wait_s += now - self._since
                self._phase, self._since = Phase.SLOT, now
                return []
            case Phase.SLOT:
                self._totals.push_wait_s += now - self._since
                if self._halt is not None and self._talk.alone:
                    return self._flush(now)
                effects = self._ask_ahead(now)
                self._talk.begin(self._one_gradient())
                self._phase, self._since = Phase.COMPUTE, now
                return effects
            case Phase.COMPUTED:
                return self._end_step(now)
            case Phase.FLUSH:
                halted = self._halt is not None and self._must_end()
                self._phase = Phase.HALTED if halted else Phase.FINISHED
                return self._report(now)
            case Phase.FINISHED:
                # More steps were granted, or the partitions of a replica stop at a later one.
                if self.at.step < self._until() and not self._must_end():
                    self._phase, self._since = Phase.IDLE, now
                    return []
                return self._flush(now)
            case _:
                raise AssertionError(self._phase)

    # ---------------------------------------------------------------------------- one step's parts

    def _begin_step(self, now: float) -> Effects:
        self._since = now
        fetch = self._fresh or self.at.step % self._start.n_fetch == 0
        self._phase = Phase.FETCHING if fetch else Phase.SLOT
        self._fresh = False
        if not fetch or self._fetched_step == self.at.step:
            return []
        self._fetched_step = self.at.step
        return self.local.ask(now, after=self.local.pushed)

    def _ask_ahead(self, now: float) -> Effects:
        """With overlap, the fetch of the next step: it must hold the last push but one."""
        if not self._start.overlap or (self.at.step + 1) % self._start.n_fetch:
            return []
        self._fetched_step = self.at.step + 1
        return self.local.ask(now, after=self.local.pushed - 1)

    def _compute(self, now: float) -> Effects:
        effects, over = self._talk.go_on(now)
        if over:
            self._phase = Phase.COMPUTED
        return effects

    def _one_gradient(self) -> Generator[Exchange, Any, None]:
        """Computes, checks, clips and accrues; what partitions must agree on, they agree on."""
        out = self.local.begin()
        result = yield from self._gradient.compute(self.at, self.local.parameters, out)
        finite = isfinite(result.loss_sum) and is_finite(out)
        squares = self._squares(out) if self._start.clip is not None else []
        shares = yield from self._talk.agree([result.loss_sum, float(finite), *squares])
        # All refuse or none: a replica pushes a whole gradient (reliability.md, G14).
        if not all(share[1] for share in shares):
            self._refuse(None if finite else out)
            return
        if self._start.clip is not None:
            # Tensor by tensor in order, partition by partition within one.
            of_tensors = zip(*(share[2:] for share in shares), strict=True)
            norm = sqrt(sum(sum(parts) for parts in of_tensors))
            clip_to(out, norm=norm, limit=self._start.clip)
        # A fetch before the next step replaces the copy: moving it would be for nothing.
        self.local.add(out, step=(self.at.step + 1) % self._start.n_fetch != 0)
        self._totals.accepted(BatchResult(sum(share[0] for share in shares), result.rows))

    def _squares(self, out: Array) -> list[float]:
        """The sum of squares of each of the network's tensors, 0.0 of those held elsewhere."""
        own = {name: square_sum(out[span.slice()]) for name, span in self._gradient.tensors}
        return [own.get(name, 0.0) for name in self._start.tensors or own]

    def _refuse(self, out: Array | None) -> None:
        """A non-finite gradient goes nowhere (reliability.md, G14); the next step fetches anew."""
        where = "another partition"
        if out is not None:
            where = first_bad(out, self._gradient.tensors) or "the loss"
        self._totals.refused_one(f"step {self.at.step}, {where}")
        self._fresh = True

    def _end_step(self, now: float) -> Effects:
        self._totals.compute_s += now - self._since - (self._talk.waited_s - self._waited_s)
        self._waited_s = self._talk.waited_s
        step, spe = self.at.step, self._gradient.steps_per_epoch
        epoch, index = self.at.epoch, self.at.index + 1
        if index >= spe:
            epoch, index = epoch + 1, 0
            self._totals.end_epoch()
        self.at = Position(step + 1, epoch, index)
        self._phase = Phase.IDLE
        effects = self._push(now) if step % self._start.n_push == 0 else []
        if self._wants_report() or not self._runnable():
            effects += self._report(now)
        return effects

    def _wants_report(self) -> bool:
        """At once: the first step, a refused gradient, half of the grant used."""
        if not self._started or self._totals.news:
            self._started, self._totals.news = True, False
            return True
        half = (self._granted_from + self._grant.until) // 2
        if self.at.step < half or self._asked_at == self._grant.number or self._grant.last:
            return False
        self._asked_at = self._grant.number
        return True

    def _push(self, now: float) -> Effects:
        mark = 0
        if self._mark is not None and self.at.step >= self._mark[1] and self.local.n_accrued:
            mark = self._marked = self._mark[0]
            self._mark = None
        return self.local.push(now, self.at, mark=mark)

    def _flush(self, now: float) -> Effects:
        """The end: at its stop a run pushes what is unpushed; stopped by a signal it does not."""
        push = self._halt is None or self._halt.push
        effects = self._push(now) if push else []
        self._phase, self._since = Phase.FLUSH, now
        return effects

    # ----------------------------------------------------------------------------------- reports

    def _report(self, now: float) -> Effects:
        self._report_at = now + _REPORT_S
        state = "joining" if self._phase is Phase.JOINING else "running"
        report = self._totals.report(
            _AT_REST.get(self._phase, state),
            self.at,
            until=self._grant.until,
            local=self.local,
            talk=self._talk,
        )
        return [Send(CONTROLLER, report)]
