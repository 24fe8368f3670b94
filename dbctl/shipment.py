"""Data on its way to a host: who asks for which bytes, and what may be answered. Pure.

Rules of this file: no file, no clock, no numpy; time comes in as an argument. A receiver holds at
most CREDIT_BYTES that it cannot write yet, and that is also all that is ever on its way to it; what
a sender has to answer is bounded by the same.

Theory of operation. A shipment is a file of known size, named by the SHA-256 of its bytes. The
receiver asks for pieces at the pace of the line (pace.py), ahead of what has come, and writes only
in order: so what it has is a prefix, whose length says where it goes on after whatever broke it
off.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any, final

import msgspec

from dbctl.pace import PIECE_BYTES, WINDOW_MOST, Pace
from dbctl.wire_ship import ReadShipment, ShipmentPart

CREDIT_BYTES = WINDOW_MOST * PIECE_BYTES


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
        self._ahead = at  # the first byte that is not wanted yet
        self._pace: Pace[int] = Pace()  # of where pieces begin
        self._early: dict[int, Any] = {}  # what came before the piece in front of it

    @property
    def done(self) -> bool:
        return self.at == self.shipment.size

    @property
    def due(self) -> float:
        """When `ask` has something to say if nothing comes until then."""
        return self._pace.again_at

    def ask(self, now: float) -> list[ReadShipment]:
        """What to say now."""
        end = min(self.at + CREDIT_BYTES, self.shipment.size)
        while self._ahead < end:
            self._pace.want(self._ahead)
            self._ahead += self._piece(self._ahead).n
        return [self._piece(start) for start in self._pace.due(now)]

    def take(self, now: float, part: ShipmentPart) -> list[Any]:
        """The payloads that are next to be written, in order; nothing for what was not asked."""
        start = part.start
        if part.digest != self.shipment.digest or len(part.payload) != self._piece(start).n:
            return []
        if not self._pace.came(now, start):
            return []
        self._early[start] = part.payload
        ready = []
        while self.at in self._early:
            ready.append(self._early.pop(self.at))
            self.at += len(ready[-1])
        return ready

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
