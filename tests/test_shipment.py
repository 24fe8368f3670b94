"""dbctl/shipment.py: every byte comes once and in order, whatever the line does; memory is bounded.

The line here is seeded: it delays, loses, repeats and reorders what is asked and what is answered.
"""

from __future__ import annotations

import heapq
from itertools import pairwise
from random import Random

import pytest

from dbctl import shipment as module
from dbctl.pace import AGAIN_MOST_S, PIECE_BYTES, WINDOW_MOST
from dbctl.shipment import CREDIT_BYTES, Receiver, Sender, Shipment
from dbctl.wire_ship import ReadShipment, ShipmentPart

DIGEST = "d" * 64
NODE = "worker-0.0"


def small_pieces(monkeypatch: pytest.MonkeyPatch, n: int = 10) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", n)


class Line:
    """A node and a controller, and what is on its way between them, in virtual seconds.

    `rate`: bytes a second that the way to the node carries, one piece after the other.
    """

    def __init__(self, data: bytes, *, seed: int = 0, at: int = 0, rate: float = 1e9) -> None:
        self.data = data
        self.random = Random(seed)
        shipment = Shipment(DIGEST, len(data))
        self.receiver = Receiver(shipment, at=at)
        self.sender = Sender({NODE: {DIGEST: shipment}})
        self.rate, self.free_at = rate, 0.0
        self.drop = self.repeat = self.delay_s = 0.0
        self.now = 0.0
        self.got = bytearray(data[:at])
        self.n_asked = 0
        self.most_held = 0
        self.longest_s = 0.0  # that a piece was on its way
        self._heap: list[tuple[float, int, object]] = []
        self._n = 0

    def _post(self, message: object, delay_s: float) -> None:
        copies = 0 if self.random.random() < self.drop else 1
        copies += self.random.random() < self.repeat
        for _ in range(copies):
            self._n += 1
            at = self.now + delay_s + self.random.random() * self.delay_s
            heapq.heappush(self._heap, (at, self._n, message))

    def _ask(self) -> None:
        for asked in self.receiver.ask(self.now):
            self.n_asked += 1
            self._post(asked, 0.001)

    def run(self, limit_s: float = 1e5) -> None:
        self._ask()
        while not self.receiver.done:
            assert self.now < limit_s, f"{self.receiver.at} of {len(self.data)} bytes have come"
            at, message = self.receiver.due, None
            if self._heap and self._heap[0][0] <= at:
                at, _, message = heapq.heappop(self._heap)
            self.now = max(self.now, at)
            if isinstance(message, ReadShipment):
                self._answer(message)
            elif isinstance(message, ShipmentPart):
                for payload in self.receiver.take(self.now, message):
                    self.got += payload
            self._ask()

    def _answer(self, asked: ReadShipment) -> None:
        self.sender.ask(NODE, asked)
        while (wanted := self.sender.next()) is not None:
            _, one = wanted
            self.free_at = max(self.free_at, self.now) + one.n / self.rate
            self.longest_s = max(self.longest_s, self.free_at - self.now)
            payload = self.data[one.start : one.start + one.n]
            self._post(ShipmentPart(one.digest, one.start, payload), self.free_at - self.now)


def some(n: int, seed: int = 1) -> bytes:
    return Random(seed).randbytes(n)


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 1000])
def test_every_byte_comes_in_order(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    line = Line(some(size))
    line.run()
    assert line.got == line.data
    assert line.n_asked == -(-size // 10), "nothing is asked for twice on a good line"
    assert sum(line.sender.sent_bytes.values()) == size


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_lost_repeated_or_late_every_byte_comes_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pieces(monkeypatch)
    line = Line(some(2000, seed), seed=seed, at=10 * (seed % 7))
    line.drop, line.repeat, line.delay_s = 0.1 * (seed % 4), 0.2, [0.01, 3.0][seed % 2]
    line.run()
    assert line.got == line.data


def test_what_is_there_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on from any byte, not from a piece's beginning only."""
    small_pieces(monkeypatch)
    line = Line(some(1000), at=333)
    line.run()
    assert line.got == line.data
    assert sum(line.sender.sent_bytes.values()) == 667
    assert Receiver(Shipment(DIGEST, 5), at=5).ask(0.0) == []


def test_the_credit_is_kept_and_reached() -> None:
    """What was asked for and is not written, early pieces with it, is at most 4 MiB."""
    assert CREDIT_BYTES == 4 << 20
    receiver = Receiver(Shipment(DIGEST, 100 * PIECE_BYTES), at=0)
    asked = receiver.ask(0.0)
    assert len(asked) == 1
    receiver.take(0.1, ShipmentPart(DIGEST, 0, bytes(PIECE_BYTES)))
    first, *waiting = receiver.ask(0.1)
    most = 0
    while waiting:  # all but the first piece come
        one = waiting.pop()
        assert receiver.take(0.1, ShipmentPart(DIGEST, one.start, bytes(one.n))) == []
        waiting += receiver.ask(0.1)
        most = max([most, *(one.start + one.n for one in waiting)])
    assert most == first.start + CREDIT_BYTES
    ready = receiver.take(0.2, ShipmentPart(DIGEST, first.start, bytes(first.n)))
    assert len(ready) == WINDOW_MOST
    assert receiver.at == most


@pytest.mark.parametrize("megabit", [0.25, 0.5, 1, 5, 20, 100, 10_000])
def test_a_lease_behind_it_never_waits_long(megabit: float) -> None:
    """What is in front of a lease is what is on its way: far less than a lease of 10 s, and a line
    that carries much is used. Nothing is asked for twice."""
    n_pieces = 24 if megabit < 20 else 120
    line = Line(bytes(n_pieces * PIECE_BYTES), rate=megabit * 125e3)
    line.run()
    floor = PIECE_BYTES / line.rate
    assert line.longest_s < max(1.5, 2.1 * floor), "two pieces, or about a second"
    ideal = len(line.data) / line.rate
    assert line.now < 1.1 * ideal + 0.2, "the line is kept busy"
    assert line.n_asked - n_pieces <= (2 if megabit < 0.5 else 0)


def test_a_line_that_slows_down_is_not_filled() -> None:
    line = Line(bytes(100 * PIECE_BYTES), rate=100e6)
    ask = line._ask

    def slowing() -> None:
        if line.receiver.at > 40 * PIECE_BYTES:
            line.rate = 125e3
        ask()

    line._ask = slowing  # type: ignore[method-assign]
    line.run()
    assert line.got == line.data
    assert sum(line.sender.sent_bytes.values()) <= 104 * PIECE_BYTES, "few pieces went twice"


def test_a_line_that_stands_still_is_not_filled_with_repetitions() -> None:
    receiver = Receiver(Shipment(DIGEST, 100 * PIECE_BYTES), at=0)
    now = 0.0
    for _ in range(200):  # it has been quick: the window is wide
        asked = receiver.ask(now)
        for one in asked[: 0 if len(asked) > 40 else None]:
            if receiver.at < 40 * PIECE_BYTES:
                receiver.take(now, ShipmentPart(DIGEST, one.start, bytes(one.n)))
    assert receiver._pace.window == WINDOW_MOST
    times = []
    while receiver.due < 300.0:
        now = receiver.due
        again = receiver.ask(now)
        assert [one.start for one in again] == [receiver.at], "the oldest one, alone"
        times.append(now)
    gaps = [b - a for a, b in pairwise(times)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == AGAIN_MOST_S
    assert len(times) < 20
    # When it goes on, what was on its way counts, and the rest is asked for.
    start = receiver.at + PIECE_BYTES
    assert receiver.take(301.0, ShipmentPart(DIGEST, start, bytes(PIECE_BYTES))) == []
    assert start not in [one.start for one in receiver.ask(301.0)]


@pytest.mark.parametrize(
    "part",
    [
        ShipmentPart("e" * 64, 0, bytes(10)),
        ShipmentPart(DIGEST, 0, bytes(9)),
        ShipmentPart(DIGEST, 0, bytes(11)),
        ShipmentPart(DIGEST, 5, bytes(10)),
        ShipmentPart(DIGEST, 900, bytes(10)),
        ShipmentPart(DIGEST, -10, bytes(10)),
    ],
)
def test_what_was_not_asked_for_is_not_taken(
    part: ShipmentPart, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pieces(monkeypatch)
    receiver = Receiver(Shipment(DIGEST, 1000), at=0)
    receiver.ask(0.0)
    assert receiver.take(0.1, part) == []
    assert receiver.at == 0
    assert receiver.take(0.1, ShipmentPart(DIGEST, 0, b"0123456789")) == [b"0123456789"]


@pytest.mark.parametrize(
    ("node", "asked"),
    [
        ("worker-1.0", ReadShipment(DIGEST, 0, 10)),  # another replica's rows
        ("shard-0", ReadShipment(DIGEST, 0, 10)),
        (NODE, ReadShipment("e" * 64, 0, 10)),
        (NODE, ReadShipment("../../etc/passwd", 0, 10)),
        (NODE, ReadShipment(DIGEST, -1, 10)),
        (NODE, ReadShipment(DIGEST, 991, 10)),
        (NODE, ReadShipment(DIGEST, 1 << 70, 10)),
        (NODE, ReadShipment(DIGEST, 0, 0)),
        (NODE, ReadShipment(DIGEST, 0, -5)),
        (NODE, ReadShipment(DIGEST, 0, PIECE_BYTES + 1)),
    ],
)
def test_a_sender_gives_nobody_what_is_not_its_own(node: str, asked: ReadShipment) -> None:
    other = Shipment("f" * 64, 1 << 30)
    sender = Sender({NODE: {DIGEST: Shipment(DIGEST, 1000)}, "worker-1.0": {other.digest: other}})
    assert not sender.ask(node, asked)
    assert sender.next() is None
    assert sender.ask(NODE, ReadShipment(DIGEST, 990, 10))


def test_a_sender_holds_little_and_is_fair() -> None:
    whole = Shipment(DIGEST, 1 << 30)
    sender = Sender({"a": {DIGEST: whole}, "b": {DIGEST: whole}})
    assert sender.ask("a", ReadShipment(DIGEST, 0, 1))
    assert not sender.ask("a", ReadShipment(DIGEST, 0, 1)), "it waits already"
    taken = [sender.ask("a", ReadShipment(DIGEST, i, 1)) for i in range(1, 100)]
    assert sum(taken) == WINDOW_MOST - 1
    assert sender.ask("b", ReadShipment(DIGEST, 7, 1))
    order = [wanted[0] for wanted in iter(sender.next, None)]
    assert order == ["a", "b"] + ["a"] * (WINDOW_MOST - 1)
    assert sender.sent_bytes == {("a", DIGEST): WINDOW_MOST, ("b", DIGEST): 1}
