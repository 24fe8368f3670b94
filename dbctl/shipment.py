"""Data on its way to a host: who asks for which bytes, when, and what may be answered. Pure.

Rules of this file: no file, no clock, no numpy; time comes in as an argument. A receiver holds at
most CREDIT_BYTES that it cannot write yet, and that is also all that is ever on its way to it; what
a sender has to answer is bounded by the same.

Theory of operation. A shipment is a file of known size, named by the SHA-256 of its bytes. The
receiver asks, a window of pieces ahead of what has come, and writes only in order: so what it has
is a prefix, whose length says where it goes on after whatever broke it off. The window follows the
line. A piece that came back within QUICK_S widens it by one, one that took SLOW_S narrows it: what
queues in front of a lease (controller to agent, the same connection) is about SLOW_S of the line's
time, whether it carries a megabit or ten gigabits a second. Nothing is lost but what a full queue
dropped; when nothing comes for a while what is missing is asked for again, one piece at first and
with growing pauses, so that a line that stands still is not filled with repetitions.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from math import inf
from typing import Any, final

import msgspec

from dbctl.wire_ship import ReadShipment, ShipmentPart

PIECE_BYTES = 128 << 10  # a second of a line of 1 Mbit/s
WINDOW_MOST = 32
CREDIT_BYTES = WINDOW_MOST * PIECE_BYTES
WINDOW_FIRST = 1
QUICK_S = 0.5
SLOW_S = 1.0
AGAIN_S = 4.0
AGAIN_TIMES = 4.0  # of what a piece took
AGAIN_MOST_S = 30.0


class Shipment(msgspec.Struct, frozen=True):
    """A file: the SHA-256 of its bytes, as hex, and how many they are."""

    digest: str
    size: int


class Shipped(msgspec.Struct, frozen=True, kw_only=True):
    """What a node is told of its rows: features `x` and targets `y`, each a .npy file.

    A worker's hold its replica's rows, in rising order; of batch methods, and an evaluator's, all.
    `rows`: how many the whole set has. `directory` is where its host keeps them; ~/ is the user's
    home there.
    """

    x: Shipment
    y: Shipment
    rows: int
    directory: str


@final
class Receiver:
    """Asks for bytes `at` to the end of a shipment; `at` moves as they come in order."""

    def __init__(self, shipment: Shipment, *, at: int) -> None:
        assert 0 <= at <= shipment.size, f"byte {at} of {shipment.size}"
        self.shipment = shipment
        self.at = at
        self._ahead = at  # the first byte that nobody asked for yet
        self._window = WINDOW_FIRST
        self._asked: dict[int, float | None] = {}  # where a piece begins -> when, if asked once
        self._missing: set[int] = set()  # pieces that nothing came of, asked for anew in their turn
        self._early: dict[int, Any] = {}  # what came before the piece in front of it
        self._heard_at = -inf
        self._pause_s = AGAIN_S

    @property
    def done(self) -> bool:
        return self.at == self.shipment.size

    @property
    def due(self) -> float:
        """When `ask` has something to say if nothing comes until then."""
        return self._heard_at + self._pause_s if self._asked else -inf

    def ask(self, now: float) -> list[ReadShipment]:
        """What to say now."""
        if self._asked and now >= self.due:
            self._missing.update(self._asked)
            self._asked.clear()
            self._window = 1
            self._pause_s = min(2.0 * self._pause_s, AGAIN_MOST_S)
        found = []
        while (start := self._next()) is not None:
            if not self._asked:
                self._heard_at = now
            self._asked[start] = None if start in self._missing else now
            self._missing.discard(start)
            found.append(self._piece(start))
            self._ahead = max(self._ahead, start + found[-1].n)
        return found

    def _next(self) -> int | None:
        """The piece to be asked for now: first those that are missing."""
        n_open = len(self._asked)
        if self._missing:
            return min(self._missing) if n_open < self._window else None
        n_open += len(self._early)
        more = self._ahead < self.shipment.size and n_open < self._window
        return self._ahead if more else None

    def take(self, now: float, part: ShipmentPart) -> list[Any]:
        """The payloads that are next to be written, in order; nothing for what was not asked."""
        start = part.start
        if part.digest != self.shipment.digest or not self._waits_for(start):
            return []
        if len(part.payload) != self._piece(start).n:
            return []
        asked_at = self._asked.pop(start, None)
        self._missing.discard(start)
        self._heard_at = now
        if asked_at is not None:  # else nobody knows which time this answers
            self._adapt(now - asked_at)
        self._early[start] = part.payload
        ready = []
        while self.at in self._early:
            ready.append(self._early.pop(self.at))
            self.at += len(ready[-1])
        return ready

    def _waits_for(self, start: int) -> bool:
        return start in self._asked or start in self._missing

    def _adapt(self, took_s: float) -> None:
        self._pause_s = min(max(AGAIN_S, AGAIN_TIMES * took_s), AGAIN_MOST_S)
        if took_s <= QUICK_S:
            self._window = min(self._window + 1, WINDOW_MOST)
        elif took_s >= SLOW_S:
            self._window = max(self._window - 1, 1)

    def _piece(self, start: int) -> ReadShipment:
        n = min(PIECE_BYTES, self.shipment.size - start)
        return ReadShipment(self.shipment.digest, start, n)


Wanted = tuple[str, ReadShipment]


@final
class Sender:
    """What is to be answered, one node after the other; what of it is not their own is dropped.

    `allowed`: of each node the shipments that it may read, by digest. `sent_bytes` counts what was
    given out by `next`, by node and digest.
    """

    def __init__(self, allowed: Mapping[str, Mapping[str, Shipment]]) -> None:
        self._allowed = allowed
        self._waiting: OrderedDict[str, deque[ReadShipment]] = OrderedDict()
        self.sent_bytes: dict[tuple[str, str], int] = {}

    def ask(self, node: str, asked: ReadShipment) -> bool:
        """Whether it will be answered: it is the node's own, within the file, not waiting yet."""
        shipment = self._allowed.get(node, {}).get(asked.digest)
        if shipment is None or not 0 < asked.n <= PIECE_BYTES:
            return False
        if not 0 <= asked.start <= shipment.size - asked.n:
            return False
        queue = self._waiting.get(node, ())
        if len(queue) >= WINDOW_MOST or asked in queue:
            return False
        self._waiting.setdefault(node, deque()).append(asked)
        return True

    def next(self) -> Wanted | None:
        """What to read and send now; None: nothing waits."""
        if not self._waiting:
            return None
        node, queue = self._waiting.popitem(last=False)
        asked = queue.popleft()
        if queue:
            self._waiting[node] = queue
        key = (node, asked.digest)
        self.sent_bytes[key] = self.sent_bytes.get(key, 0) + asked.n
        return node, asked
