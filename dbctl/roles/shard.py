"""One parameter-server shard: it holds a slice of the parameters and applies what workers push.

Rules of this file: pure (roles/base.py). Theory of operation (paper A, section 4.1;
docs/protocol.md): a worker says Hello and is welcomed. Its pushes are numbered without gaps; the
shard files push `last + 1` only, whole, applies filed pushes one a `step` in the order they came,
and acknowledges after applying, so a repeated push is never applied twice and an acknowledged one
is never lost while the shard lives. A fetch waits until the push that it names was applied, and is
answered with a hand-out of the current buffer. A marked push makes the shard hand out a cut. What
becomes of a push, and what a fetch gets, is the slice's to say: roles/slice.py for Downpour,
roles/batch_slice.py for batch methods.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

from dbctl.optim.team import ALONE, Team
from dbctl.region import Range
from dbctl.rights import CONTROLLER
from dbctl.roles.base import NEVER, NOW, Allocate, Array, Effects, Send, View
from dbctl.roles.cut_parts import CutParts
from dbctl.roles.handouts import Handouts
from dbctl.roles.slice import Outcome, ShardSlice, Slice, UpdateRule, divide
from dbctl.wire import (
    Ack,
    Cut,
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
from dbctl.wire_files import ReadPart

MAX_STALENESS_BIN = 255
MAX_STALENESS_COUNTS = 1000  # in one report: a header is bounded (envelope.HEADER_BYTES)


S = TypeVar("S", bound=ShardSlice)
S_co = TypeVar("S_co", bound=ShardSlice, covariant=True)


class Start(Protocol[S_co]):
    """What a shard begins with: its term, and its slices in the order of the flat vector."""

    @property
    def term(self) -> int: ...

    def slices(self, *, allocate: Allocate, handouts: Handouts) -> Sequence[S_co]: ...


@dataclass(frozen=True, kw_only=True)
class ShardStart:
    """What a shard begins with: fresh initial values, or its part of a checkpoint.

    `decays` are (elements of the span, L2 coefficient) in order, covering it once. `partitions`:
    the ranges of the flat vector that the partitions of a replica hold; none where it is whole.
    `team`: what checks and updates a long slice.
    """

    name: str
    span: Range
    values: Array
    state: dict[str, Array]
    rule: UpdateRule
    decays: Sequence[tuple[Range, float]] = ()
    partitions: Sequence[Range] = ()
    version: int = 0
    term: int = 1
    staleness_scaling: bool = False
    team: Team = ALONE

    def slices(self, *, allocate: Allocate, handouts: Handouts) -> list[Slice]:
        found = []
        for span, decays in divide(self.span, self.partitions, self.decays):
            own = span.shift(-self.span.start).slice()
            found.append(
                Slice(
                    span,
                    self.values[own],
                    {name: vector[own] for name, vector in self.state.items()},
                    rule=self.rule,
                    decays=decays,
                    version=self.version,
                    allocate=allocate,
                    handouts=handouts,
                    team=self.team,
                    staleness_scaling=self.staleness_scaling,
                )
            )
        return found


@dataclass(slots=True)
class _Client:
    """What the shard knows of one life of one worker or reader."""

    peer: Peer
    applied: int = 0
    filed: int = 0
    position: Position = field(default_factory=Position)
    slice: ShardSlice | None = None  # that of its partition, from its first fetch or push on
    answered: int = 0
    answer: Params | None = None
    waiting: Fetch | None = None
    over: bool = False  # declared dead: what still comes of it changes nothing


class Shard(Generic[S]):
    """`slices`: in the order of the flat vector. `lends`: as CutParts'."""

    def __init__(
        self,
        start: Start[S],
        *,
        allocate: Allocate,
        report_s: float = 1.0,
        resend_s: float = 0.5,
        lends: bool = False,
    ) -> None:
        self._handouts = Handouts()
        self.slices = start.slices(allocate=allocate, handouts=self._handouts)
        self._slices = {held.span.start: held for held in self.slices}
        self.term = start.term
        self._clients: dict[str, _Client] = {}
        self._queue: deque[tuple[_Client, ShardSlice, Push]] = deque()
        controller = Peer(CONTROLLER, 1)
        self._cuts = CutParts(self._handouts, controller=controller, resend_s=resend_s, lends=lends)
        self._updates = 0
        self._bytes_in = 0
        self._bytes_out = 0
        self._refused = 0
        self.lost: Counter[str] = Counter()
        self._staleness: Counter[tuple[str, int]] = Counter()
        self._n_told = 0  # how many of the staleness counts the last reports held
        self._report_s = report_s
        self._report_at = NEVER

    @property
    def values(self) -> Array:
        """The current parameters, (len(span),): for tests; never to be written."""
        arrays = [s.current.array for s in self.slices]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    @property
    def state(self) -> dict[str, Array]:
        """The optimiser state of the whole span: for tests."""
        states = [s.state for s in self.slices]
        return {name: np.concatenate([s[name] for s in states]) for name in states[0]}

    @property
    def version(self) -> int:
        """The greatest of the slices' counts of updates."""
        return max(s.version for s in self.slices)

    @property
    def due(self) -> float:
        if self._next() is not None:
            return NOW
        return min(self._report_at, self._cuts.due)

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
                return [e for s in self.slices for e in self._cut(now, s, number)]
            case Return(returned):
                return self._on_return(sender, returned)
            case ReadPart():
                return self._cuts.read(message)
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
            client = self._next_life(client, sender)
        if hello.first - 1 > client.filed:
            # Acknowledged once, but by a life of this shard that is over: lost, and counted.
            self.lost[sender.node] += hello.first - 1 - client.filed
            client.applied = client.filed = hello.first - 1
        return [Send(sender.node, Welcome(self.term, client.applied, self.version))]

    def _on_gone(self, peer: Peer) -> Effects:
        client = self._clients.get(peer.node)
        if client is None or client.peer.incarnation < peer.incarnation:
            # Its own Hello may still come, late.
            client = self._next_life(client, peer)
        if client.peer == peer:
            self._forget(client)
            client.over = True
        return [self._report()]

    def _next_life(self, before: _Client | None, peer: Peer) -> _Client:
        """A client that has pushed nothing: until it does, it stands where the last life did."""
        client = self._clients[peer.node] = _Client(peer)
        if before is not None:
            self._forget(before)
            client.position, client.slice = before.position, before.slice
        return client

    def _forget(self, client: _Client) -> None:
        """Its hand-outs are back, what it has queued is dropped."""
        self._handouts.forget(client.peer)
        self._queue = deque(filed for filed in self._queue if filed[0] is not client)
        client.filed = client.applied
        client.answer = client.waiting = None

    def _on_return(self, sender: Peer, returned: int) -> Effects:
        self._handouts.take_back(sender, returned)
        if sender.node == CONTROLLER:
            self._cuts.returned(returned)
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
        client.slice = self._slices.get(fetch.start)
        client.waiting = fetch
        return self._answer(client)

    def _answer(self, client: _Client) -> Effects:
        fetch, held = client.waiting, client.slice
        if fetch is None or held is None or client.applied < fetch.after:
            return []
        buffer = held.handed_to(client.peer.node)
        client.waiting = None
        client.answered = fetch.number
        client.answer = Params(
            self.term,
            fetch.number,
            self._handouts.hand_out(client.peer, buffer),
            held.version,
            client.applied,
            held.span.start,
            View(buffer, 0, len(held.span)),
        )
        self._bytes_out += buffer.array.nbytes
        return [Send(client.peer.node, client.answer)]

    def _on_push(self, client: _Client, push: Push) -> Effects:
        self._handouts.take_back(client.peer, push.returned)
        if push.seq <= client.applied:
            return [Send(client.peer.node, Ack(self.term, client.applied, self.version))]
        found = self._slices.get(push.start)
        if push.seq == client.filed + 1 and found is not None and found.fits(push):
            client.filed = push.seq
            client.slice = found
            self._queue.append((client, found, push))
        return []

    # ------------------------------------------------------------------------------------ work

    def step(self, now: float) -> Effects:
        """Applies one push, or sends what is due again."""
        effects: Effects = []
        ready = self._next()
        if ready is not None:
            effects += self._apply(now, ready)
        if now >= self._report_at:
            self._report_at = now + self._report_s
            effects.append(self._report())
        if now >= self._cuts.due:
            effects += self._cuts.send_again(now)
        return effects

    def _next(self) -> int | None:
        """The place in the queue of the first filed push that its slice can take."""
        tried: set[int] = set()
        for place, (_, held, _) in enumerate(self._queue):
            if held.span.start in tried:
                continue
            tried.add(held.span.start)
            if held.ready:
                return place
        return None

    def _apply(self, now: float, place: int) -> Effects:
        client, held, push = self._queue[place]
        del self._queue[place]
        staleness = max(0, held.version - push.base)
        self._bytes_in += push.payload.nbytes
        match held.take(push, staleness=staleness):
            case Outcome.APPLIED:
                self._updates += 1
                self._staleness[client.peer.node, min(staleness, MAX_STALENESS_BIN)] += 1
            case Outcome.REFUSED:
                # The worker checks first; this is the guard (reliability.md, G14).
                self._refused += 1
        client.applied = push.seq
        client.position = push.position
        effects: Effects = [
            Send(client.peer.node, Ack(self.term, client.applied, held.version)),
            *self._answer(client),
        ]
        return effects + (self._cut(now, held, push.mark) if push.mark else [])

    # ------------------------------------------------------------------------- cuts and reports

    def _cut(self, now: float, held: ShardSlice, number: int) -> Effects:
        parts = self._cuts.make(
            now, number, held, n_slices=len(self.slices), table=self.table(held)
        )
        return [*parts, self._report()] if parts else []

    def table(self, held: ShardSlice | None = None) -> tuple[WorkerRow, ...]:
        """The dedup table, of one slice or all: each worker's last applied push, its position."""
        return tuple(
            WorkerRow(name, client.peer.incarnation, client.applied, client.position)
            for name, client in sorted(self._clients.items())
            if name.startswith("worker-") and (held is None or client.slice is held)
        )

    def _report(self) -> Send:
        counts = sorted(self._staleness.items())
        part = counts[self._n_told : self._n_told + MAX_STALENESS_COUNTS]
        self._n_told += MAX_STALENESS_COUNTS
        if self._n_told >= len(counts):
            self._n_told = 0
        staleness = tuple((worker, value, count) for (worker, value), count in part)
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
                tuple(sorted(name for name, client in self._clients.items() if client.over)),
            ),
        )
