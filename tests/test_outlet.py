"""dbctl/transport/outlet.py: a bounded queue before a socket; order kept, messages whole."""

from __future__ import annotations

from typing import Any

import pytest

from dbctl.transport import outlet as outlet_module
from dbctl.transport.outlet import MAX_RELAYED_BYTES, MAX_WAITING, Outlet


class Line:
    """Stands for a socket: takes `room` messages."""

    def __init__(self, room: int = 0) -> None:
        self.room = room
        self.taken: list[list[bytes]] = []

    def send(self, frames: list[bytes]) -> bool:
        if self.room <= 0:
            return False
        self.room -= 1
        self.taken.append(list(frames))
        return True


@pytest.fixture(autouse=True)
def lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlet_module, "send", lambda line, frames: line.send(frames))


def opened(room: int = 0, **rest: Any) -> tuple[Line, Outlet]:
    line = Line(room)
    return line, Outlet(line, **rest)  # type: ignore[arg-type]


def test_a_routers_frames_begin_with_the_route() -> None:
    line, outlet = opened(2, route=b"r")
    outlet.post([[b"header", b"data"]])
    assert line.taken == [[b"r", b"header", b"data"]]


def test_order_is_kept_through_a_full_socket() -> None:
    line, outlet = opened(1)
    for letter in (b"a", b"b", b"c"):
        assert outlet.post([[letter]])
    line.room = 1
    assert not outlet.flush()
    outlet.post([[b"d"]])
    line.room = 9
    assert outlet.flush()
    assert line.taken == [[b"a"], [b"b"], [b"c"], [b"d"]]
    assert outlet.n_waiting == 0


def test_the_pieces_of_a_message_are_taken_whole_or_not_at_all() -> None:
    line, outlet = opened()
    assert outlet.post([[b"x"]] * (MAX_WAITING - 2))
    assert not outlet.post([[b"1"], [b"2"], [b"3"]])
    assert outlet.post([[b"1"], [b"2"]])
    assert not outlet.post([[b"y"]])
    assert outlet.n_waiting == MAX_WAITING
    line.room = MAX_WAITING + 1
    outlet.flush()
    assert outlet.post([[b"z"]])
    assert line.taken[-3:] == [[b"1"], [b"2"], [b"z"]]


def test_what_is_relayed_has_a_credit() -> None:
    """So that leases are never queued behind more data than that."""
    line, outlet = opened()
    piece = 1 << 20
    taken = [outlet.post([[b"x"]], relayed_bytes=piece) for _ in range(10)]
    assert sum(taken) * piece == MAX_RELAYED_BYTES
    line.room = 1
    outlet.flush()
    assert outlet.post([[b"x"]], relayed_bytes=piece)
    assert outlet.post([[b"own"]])
