"""A worker's local copy of the parameters, and the gradient that it accrues for the shards.

Rules of this file: pure (roles/base.py). Theory of operation (paper A, appendix 7.1): an answer of
a shard replaces its part of the copy; between fetches each gradient g moves it by -alpha g; the sum
of the gradients since the last push lies in a push slot, from which it is sent to all shards at
once. Ours: alpha is the rule's rate at the version last fetched. With `read_own` the copy is made
to hold this worker's own later pushes and what is accrued: parameters = answer - alpha (those),
since a fetch that was asked for early would lose the worker's own last steps (docs/paper.md, A2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dbctl.optim.gradients import accrue, accrue_and_step, local_step, step_from
from dbctl.region import Range
from dbctl.roles.base import NEVER, Allocate, Array, Buffer, Effects, View
from dbctl.roles.worker import Channel, Slots
from dbctl.shards import ShardSpan
from dbctl.wire import Message, Position, Push


class LocalCopy:
    """Elements `origin` to `origin + n_elements` of the flat vector.

    A partition may hold none (it only pools, or others hold the weights it shares): no shards then.

    `rate(n)`: the rule's rate at a shard's n-th update. `later`: a push may sum gradients.
    `in_place`: of few replicas, where who pushes holds nothing and nothing moves the copy.
    Then there is none where one shard has it all: its answer is read where it lies, until the push.
    """

    def __init__(
        self,
        shards: Sequence[ShardSpan],
        *,
        origin: int,
        n_elements: int,
        dtype: str,
        rate: Callable[[int], float],
        slots: int,
        later: bool,
        read_own: bool,
        in_place: bool,
        allocate: Allocate,
        resend_s: float,
    ) -> None:
        self._channels = [
            Channel(s.node, Range(s.start, s.stop), resend_s=resend_s) for s in shards
        ]
        self._in_place = in_place and len(self._channels) == 1
        self._origin = origin
        self._by_shard = {channel.shard: channel for channel in self._channels}
        self._slots = Slots(slots, n_elements, dtype=dtype, allocate=allocate)
        self._rate = rate
        self._read_own = read_own
        self.parameters: Array = np.zeros(n_elements, dtype)
        # Where a gradient is computed that is looked at before it is added to earlier ones.
        self._scratch: Array = np.zeros(n_elements if later else 0, dtype)
        self._slot: Buffer | None = None
        self._bases: list[int] = []
        self._missing: set[str] = set()
        self.n_accrued = 0
        self.pushed = 0
        self.bytes_pushed = 0
        self.bytes_fetched = 0

    # ------------------------------------------------------------------------------- channels

    @property
    def due(self) -> float:
        # As Channel.due, asked for around each message: no generator, nor in `holding`.
        due = NEVER
        for channel in self._channels:
            due = min(due, channel.due)
        return due

    @property
    def joined(self) -> bool:
        """Every shard has welcomed this worker."""
        return all(channel.term for channel in self._channels)

    @property
    def versions(self) -> list[int]:
        """Of the last answer taken, shard by shard."""
        return [channel.version for channel in self._channels]

    @property
    def acked(self) -> int:
        """The last push that every shard has acknowledged."""
        return min((channel.acked for channel in self._channels), default=self.pushed)

    def hello(self, now: float) -> Effects:
        return [effect for channel in self._channels for effect in channel.hello(now)]

    def receive(self, now: float, shard: str, message: Message) -> None:
        channel = self._by_shard.get(shard)
        if channel is not None:
            channel.receive(now, message)

    def resend(self, now: float) -> Effects:
        return [e for c in self._channels if now >= c.due for e in c.resend(now)]

    # -------------------------------------------------------------------------------- fetching

    def ask(self, now: float, *, after: int) -> Effects:
        """A fetch of everything, once push `after` of this worker is in it."""
        self._missing = set(self._by_shard)
        self._let_go()
        return [e for channel in self._channels for e in channel.ask(now, after=after)]

    @property
    def complete(self) -> bool:
        """Every answer of the last fetch has been copied."""
        return not self._missing

    @property
    def holding(self) -> bool:
        """A hand-out lies here that can be copied."""
        for channel in self._channels:  # noqa: SIM110
            if channel.answer is not None:
                return True
        return False

    def copy_answers(self, now: float) -> Effects:
        """Copies what has come and gives it back at once, whatever else is waited for; or keeps it.

        Whoever holds one shard's buffer while waiting for another's answer, an acknowledgement or a
        grant can stop all others for ever.
        """
        effects: Effects = []
        for channel in self._channels:
            answer = channel.answer
            if answer is None:
                continue
            self._missing.discard(channel.shard)
            if self._in_place:
                self.parameters = channel.keep()
                self.bytes_fetched += self.parameters.nbytes
                continue
            part = self.parameters[channel.span.slice(self._origin)]
            own = self._later_than(answer.holds, channel) if self._read_own else []
            step_from(part, answer.payload, own, rate=self._rate(answer.version))
            self.bytes_fetched += part.nbytes
            effects += channel.give_back(now)
        return effects

    def rest(self, now: float) -> Effects:
        """No fetch or push follows for a while: what was kept is given back by its own word."""
        self._let_go()
        return [e for channel in self._channels for e in channel.say_returned(now)]

    def _let_go(self) -> None:
        if self._in_place:
            for channel in self._channels:
                channel.let_go()

    def _later_than(self, holds: int, channel: Channel) -> list[Array]:
        """What this worker has done since its push `holds`: later pushes, and what is accrued."""
        later = self._slots.later_than(holds)
        if self.n_accrued and self._slot is not None:
            later.append(self._slot)
        return [buffer.array[channel.span.slice(self._origin)] for buffer in later]

    # -------------------------------------------------------------------------------- accruing

    @property
    def has_slot(self) -> bool:
        """There is a slot to accrue in, or one that every shard has acknowledged."""
        return self._slot is not None or self._slots.available(self.acked)

    def begin(self) -> Array:
        """Where the next gradient is to be computed: the push slot itself if it is the first."""
        if self._slot is None:
            self._slot = self._slots.take()
        return self._slot.array if self.n_accrued == 0 else self._scratch

    def add(self, gradient: Array, *, step: bool) -> None:
        """Accrues what was computed where `begin` said; with `step` the copy moves as well."""
        assert self._slot is not None
        first = self.n_accrued == 0
        self.n_accrued += 1
        if first:
            self._bases = [channel.version for channel in self._channels]
        if not step:
            if not first:
                accrue(self._slot.array, gradient)
            return
        for channel in self._channels:
            at, alpha = channel.span.slice(self._origin), self._rate(channel.version)
            if first:
                local_step(self.parameters[at], gradient[at], alpha)
            else:
                accrue_and_step(self._slot.array[at], gradient[at], self.parameters[at], rate=alpha)

    def discard(self) -> None:
        """Forgets what is accrued; its slot is used for what comes next."""
        self.n_accrued = 0

    def push(self, now: float, position: Position, *, mark: int) -> Effects:
        """Sends what is accrued to every shard; nothing if every gradient was refused.

        A push that is not made uses no seq: the next one carries the position.
        """
        if self.n_accrued == 0:
            return []
        assert self._slot is not None
        self.pushed += 1
        self._slots.pushed(self._slot, self.pushed)
        self._let_go()
        effects: Effects = []
        for channel, base in zip(self._channels, self._bases, strict=True):
            span = channel.span
            push = Push(
                channel.term,
                self.pushed,
                span.start,
                base,
                self.n_accrued,
                position,
                mark,
                channel.returned,
                View(self._slot, span.start - self._origin, span.stop - self._origin),
            )
            effects += channel.push(now, push)
            self.bytes_pushed += len(span) * self.parameters.itemsize
        self._slot = None
        self.n_accrued = 0
        return effects
