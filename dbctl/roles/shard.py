"""One parameter-server shard: it holds a slice of the parameters and applies what workers push.

Rules of this file: pure (roles/base.py). Theory of operation (paper A, section 4.1;
docs/protocol.md): a worker says Hello and is welcomed. Its pushes are numbered without gaps; the
shard files push `last + 1` only, whole, applies filed pushes one a `step` in the order they came,
and acknowledges after applying, so a repeated push is never applied twice and an acknowledged one
is never lost while the shard lives. A fetch waits until the push that it names was applied, and is
answered with a hand-out of the current buffer. A marked push makes the shard hand out a cut.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from dbctl.optim.gradients import is_finite
from dbctl.region import Range
from dbctl.roles.base import NEVER, NOW, Allocate, Array, Buffer, Effects, Send, View
from dbctl.roles.handouts import Handouts, ParameterBuffers
from dbctl.wire import (
    Ack,
    Cut,
    CutPart,
    Fetch,
    Gone,
    Hello,
    Message,
    Params,
    Peer,
    Position,
    Push,
    Return,
    ShardReport,
    Welcome,
    WorkerRow,
)

CONTROLLER = "controller"
MAX_STALENESS_BIN = 255


class UpdateRule(Protocol):
    """What a shard asks of a rule (optim/rules.py): element-wise, state beside the parameters."""

    def rate(self, n: int) -> float: ...

    def update(
        self,
        parameters: Array,
        gradient: Array,
        state: dict[str, Array],
        *,
        n: int,
        rate: float,
        out: Array,
        decay: float = 0.0,
    ) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ShardStart:
    """What a shard begins with: fresh initial values, or its part of a checkpoint.

    `decays` are (elements of the slice, L2 coefficient) in order, covering the slice once.
    """

    name: str
    span: Range
    values: Array
    state: dict[str, Array]
    rule: UpdateRule
    decays: Sequence[tuple[Range, float]] = ()
    version: int = 0
    term: int = 1
    staleness_scaling: bool = False


@dataclass(slots=True)
class _Client:
    """What the shard knows of one life of one worker or reader."""

    peer: Peer
    applied: int = 0
    filed: int = 0
    position: Position = field(default_factory=Position)
    answered: int = 0
    answer: Params | None = None
    waiting: Fetch | None = None
    over: bool = False  # declared dead: what still comes of it changes nothing


class Shard:
    def __init__(
        self, start: ShardStart, *, allocate: Allocate, report_s: float = 1.0, resend_s: float = 0.5
    ) -> None:
        self._name = start.name
        self._span = start.span
        self._rule = start.rule
        self._decays = list(start.decays) or [(Range(0, len(start.span)), 0.0)]
        self._staleness_scaling = start.staleness_scaling
        self._allocate = allocate
        self._handouts = Handouts()
        self._parameters = ParameterBuffers(
            start.values, allocate=allocate, handouts=self._handouts
        )
        self.state = start.state
        self.version = start.version
        self.term = start.term
        self._clients: dict[str, _Client] = {}
        self._queue: deque[tuple[_Client, Push]] = deque()
        self._cut_number = 0
        self._cut_parts: list[CutPart] = []
        self._copies: list[Buffer] = []
        self._updates = 0
        self._bytes_in = 0
        self._bytes_out = 0
        self._refused = 0
        self.lost: Counter[str] = Counter()
        self._staleness: Counter[tuple[str, int]] = Counter()
        self._report_s = report_s
        self._report_at = NEVER
        self._resend_s = resend_s
        self._resend_at = NEVER

    @property
    def values(self) -> Array:
        """The current parameters, (len(span),): for tests; never to be written."""
        return self._parameters.current.array

    @property
    def due(self) -> float:
        if self._queue and self._parameters.writable() is not None:
            return NOW
        return min(self._report_at, self._resend_at)

    def start(self, now: float) -> Effects:
        self._report_at = now
        return []

    # -------------------------------------------------------------------------------- messages

    def receive(self, now: float, sender: Peer, message: Message) -> Effects:
        match message:
            case Hello():
                return self._on_hello(sender, message)
            case Gone(node, incarnation):
                return self._on_gone(Peer(node, incarnation))
            case Cut(number):
                return self._cut(now, number) if number > self._cut_number else []
            case Return(returned):
                return self._on_return(now, sender, returned)
        client = self._clients.get(sender.node)
        if client is None or client.peer != sender or client.over:
            return []  # a life that is over, or one that has not said Hello to this term
        match message:
            case Fetch(term) if term == self.term:
                return self._on_fetch(client, message)
            case Push(term) if term == self.term:
                return self._on_push(client, message)
        return []

    def _on_hello(self, sender: Peer, hello: Hello) -> Effects:
        client = self._clients.get(sender.node)
        if client is not None and client.peer.incarnation > sender.incarnation:
            return []
        if client is not None and client.peer == sender and client.over:
            return []
        if client is None or client.peer != sender:
            if client is not None:
                self._forget(client.peer)
            client = self._clients[sender.node] = _Client(sender)
        if hello.first - 1 > client.filed:
            # Acknowledged once, but by a life of this shard that is over: lost, and counted.
            self.lost[sender.node] += hello.first - 1 - client.filed
            client.applied = client.filed = hello.first - 1
        return [Send(sender.node, Welcome(self.term, client.applied, self.version))]

    def _on_gone(self, peer: Peer) -> Effects:
        client = self._clients.get(peer.node)
        if client is not None and client.peer.incarnation <= peer.incarnation:
            self._forget(client.peer)
            client.over = True
        return []

    def _forget(self, peer: Peer) -> None:
        self._handouts.forget(peer)
        self._queue = deque((c, push) for c, push in self._queue if c.peer != peer)
        client = self._clients[peer.node]
        client.filed = client.applied
        client.answer = client.waiting = None

    def _on_return(self, now: float, sender: Peer, returned: int) -> Effects:
        self._handouts.take_back(sender, returned)
        if sender.node == CONTROLLER:
            self._cut_parts = [part for part in self._cut_parts if part.handout > returned]
            if not self._cut_parts:
                self._resend_at = NEVER
        return []

    def _on_fetch(self, client: _Client, fetch: Fetch) -> Effects:
        self._handouts.take_back(client.peer, fetch.returned)
        if fetch.number <= client.answered:
            answer = client.answer
            if answer is None or answer.number != fetch.number:
                return []
            if not self._handouts.is_out(client.peer, answer.handout):
                return []
            return [Send(client.peer.node, answer)]
        client.waiting = fetch
        return self._answer(client)

    def _answer(self, client: _Client) -> Effects:
        fetch = client.waiting
        if fetch is None or client.applied < fetch.after:
            return []
        buffer = self._parameters.current
        client.waiting = None
        client.answered = fetch.number
        client.answer = Params(
            self.term,
            fetch.number,
            self._handouts.hand_out(client.peer, buffer),
            self.version,
            client.applied,
            self._span.start,
            View(buffer, 0, len(self._span)),
        )
        self._bytes_out += buffer.array.nbytes
        return [Send(client.peer.node, client.answer)]

    def _on_push(self, client: _Client, push: Push) -> Effects:
        self._handouts.take_back(client.peer, push.returned)
        if push.seq <= client.applied:
            return [Send(client.peer.node, Ack(self.term, client.applied, self.version))]
        if push.seq == client.filed + 1 and self._fits(push):
            client.filed = push.seq
            self._queue.append((client, push))
        return []

    def _fits(self, push: Push) -> bool:
        if not isinstance(push.payload, np.ndarray):
            return False
        stop = push.start + len(push.payload)
        return self._span.start <= push.start and stop <= self._span.stop

    # ------------------------------------------------------------------------------------ work

    def step(self, now: float) -> Effects:
        """Applies one push, or sends what is due again."""
        effects: Effects = []
        target = self._parameters.writable() if self._queue else None
        if target is not None:
            effects += self._apply(now, target)
        if now >= self._report_at:
            self._report_at = now + self._report_s
            effects.append(self._report())
        if now >= self._resend_at:
            self._resend_at = now + self._resend_s
            effects += [Send(CONTROLLER, part) for part in self._cut_parts]
        return effects

    def _apply(self, now: float, target: Buffer) -> Effects:
        client, push = self._queue.popleft()
        staleness = max(0, self.version - push.base)
        self._bytes_in += push.payload.nbytes
        if is_finite(push.payload):
            self._update(push, target, staleness)
            self._staleness[client.peer.node, min(staleness, MAX_STALENESS_BIN)] += 1
        else:
            self._refused += 1  # the worker checks first; this is the guard (reliability.md, G14)
        client.applied = push.seq
        client.position = push.position
        effects: Effects = [
            Send(client.peer.node, Ack(self.term, client.applied, self.version)),
            *self._answer(client),
        ]
        if push.mark > self._cut_number:
            effects += self._cut(now, push.mark)
        return effects

    def _update(self, push: Push, target: Buffer, staleness: int) -> None:
        rate = self._rule.rate(self.version)
        if self._staleness_scaling:
            rate /= max(1, staleness)
        current, out = self._parameters.current.array, target.array
        offset = push.start - self._span.start
        pushed = Range(offset, offset + len(push.payload))
        for part, decay in self._decays:
            both = part.intersection(pushed)
            if not both:
                continue
            at = both.slice()
            self._rule.update(
                current[at],
                push.payload[both.slice(offset)],
                {name: vector[at] for name, vector in self.state.items()},
                n=self.version,
                rate=rate,
                out=out[at],
                decay=decay,
            )
        if target is not self._parameters.current:
            for rest in (Range(0, pushed.start), Range(pushed.stop, len(self._span))):
                out[rest.slice()] = current[rest.slice()]
        self._parameters.publish(target)
        self.version += 1
        self._updates += 1

    # ------------------------------------------------------------------------- cuts and reports

    def _cut(self, now: float, number: int) -> Effects:
        """Hands out the current parameters and a copy of the optimiser state (paper A2; ours)."""
        self._cut_number = number
        controller = Peer(CONTROLLER, 1)
        # Whoever asks for a cut has given back every earlier one; a lost Return is made good here.
        self._handouts.take_back_all(controller)
        vectors: list[tuple[str, Buffer]] = [("parameters", self._parameters.current)]
        for index, (name, vector) in enumerate(self.state.items()):
            if index == len(self._copies):
                self._copies.append(self._allocate(len(vector), vector.dtype.str))
            np.copyto(self._copies[index].array, vector)
            vectors.append((name, self._copies[index]))
        self._cut_parts = [
            CutPart(
                number,
                name,
                len(vectors),
                self._handouts.hand_out(controller, buffer),
                self._span.start,
                self.version,
                self.table(),
                View(buffer, 0, len(self._span)),
            )
            for name, buffer in vectors
        ]
        self._resend_at = now + self._resend_s
        return [*(Send(CONTROLLER, part) for part in self._cut_parts), self._report()]

    def table(self) -> tuple[WorkerRow, ...]:
        """The dedup table: for each worker that pushed, its last applied push and its position."""
        return tuple(
            WorkerRow(name, client.peer.incarnation, client.applied, client.position)
            for name, client in sorted(self._clients.items())
            if client.applied
        )

    def _report(self) -> Send:
        staleness = tuple(
            (worker, value, count) for (worker, value), count in sorted(self._staleness.items())
        )
        return Send(
            CONTROLLER,
            ShardReport(
                self.term,
                self.version,
                self._updates,
                self._bytes_in,
                self._bytes_out,
                self._refused,
                self.table(),
                staleness,
            ),
        )
