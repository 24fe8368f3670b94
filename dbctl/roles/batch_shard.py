"""A shard of a batch method: its slices hold named vectors, and the coordinator commands them.

Rules of this file: pure (roles/base.py). Theory of operation (docs/protocol.md, section 8):
workers, readers and cuts are served by roles/shard.py, as in Downpour. Commands are numbered
without gaps from 1 and come from the controller alone, one at a time: command `last + 1` is filed
when it comes, carried out in a step by every slice, and answered by the slices' scalars, added in
order. Command `last` is answered again from memory, any other is ignored: so each may be lost,
repeated or late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dbctl.optim.commands import PARAMETERS, Scalars
from dbctl.region import Range
from dbctl.rights import CONTROLLER
from dbctl.roles.base import NOW, Allocate, Array, Effects, Send
from dbctl.roles.batch_slice import BatchSlice
from dbctl.roles.handouts import Handouts
from dbctl.roles.shard import Shard
from dbctl.roles.slice import divide
from dbctl.wire import Message, Peer
from dbctl.wire_batch import Begin, Collect, Execute, Executed


@dataclass(frozen=True, kw_only=True)
class BatchShardStart:
    """What a batch method's shard begins with: initial values, or its part of a checkpoint.

    values: the parameters of `span`; state: saved vectors by name, each as long. kept: the names
    that a cut saves, PARAMETERS first. `decays` and `partitions` as in ShardStart. version: what
    readers are told before the first evaluation of this life, which is number 1.
    """

    name: str
    span: Range
    values: Array
    state: dict[str, Array] = field(default_factory=dict)
    kept: Sequence[str] = (PARAMETERS,)
    decays: Sequence[tuple[Range, float]] = ()
    partitions: Sequence[Range] = ()
    version: int = 0
    term: int = 1

    def slices(self, *, allocate: Allocate, handouts: Handouts) -> list[BatchSlice]:
        found = []
        for span, decays in divide(self.span, self.partitions, self.decays):
            own = span.shift(-self.span.start).slice()
            found.append(
                BatchSlice(
                    span,
                    self.values[own],
                    {name: vector[own] for name, vector in self.state.items()},
                    kept=self.kept,
                    decays=decays,
                    version=self.version,
                    allocate=allocate,
                    handouts=handouts,
                )
            )
        return found


class BatchShard:
    def __init__(
        self,
        start: BatchShardStart,
        *,
        allocate: Allocate,
        report_s: float = 1.0,
        resend_s: float = 0.5,
        lends: bool = False,
    ) -> None:
        self.shard = Shard(
            start, allocate=allocate, report_s=report_s, resend_s=resend_s, lends=lends
        )
        self._last = Executed(0, ())
        self._filed: Execute | Begin | Collect | None = None

    @property
    def due(self) -> float:
        return NOW if self._filed is not None else self.shard.due

    def start(self, now: float) -> Effects:
        return self.shard.start(now)

    def receive(self, now: float, sender: Peer, message: Message) -> Effects:
        if not isinstance(message, Execute | Begin | Collect):
            return self.shard.receive(now, sender, message)
        if sender.node != CONTROLLER:
            return []
        if message.number == self._last.number + 1:
            self._filed = message
        elif message.number == self._last.number:
            return [Send(CONTROLLER, self._last)]
        return []

    def step(self, now: float) -> Effects:
        """Carries out the command that was filed, or does a step of the shard."""
        command = self._filed
        if command is None:
            return self.shard.step(now)
        self._filed = None
        answers = [_carry_out(held, command) for held in self.shard.slices]
        scalars = tuple(sum(column) for column in zip(*answers, strict=True))
        self._last = Executed(command.number, scalars)
        return [Send(CONTROLLER, self._last)]


def _carry_out(held: BatchSlice, command: Execute | Begin | Collect) -> Scalars:
    match command:
        case Execute():
            return held.execute(command)
        case Begin():
            return held.begin(command)
        case Collect():
            return held.collect(command)
