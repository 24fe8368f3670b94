"""dbctl/transport/porch.py: who is hung up where too many begin at once; times are arguments."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import zmq

from dbctl.transport.porch import MOST_WAITING, PROMPT_S, Porch


class Crowd:
    """Connections to a listener of this process; `came` are its ends of them."""

    def __init__(self, at_end: ExitStack) -> None:
        self._at_end = at_end
        self._listener = at_end.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
        self.porch = Porch()
        self.came: list[socket.socket] = []

    def come(self, now: float) -> None:
        address = self._listener.getsockname()
        self._at_end.enter_context(socket.create_connection(address))
        self.came.append(self._at_end.enter_context(self._listener.accept()[0]))
        self.porch.hear(zmq.EVENT_ACCEPTED, self.came[-1].fileno(), now)

    def hung_up(self) -> list[int]:
        """Which of those that came, by number."""
        return [i for i, c in enumerate(self.came) if self.porch.callers[c.fileno()].hung_up]


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    with ExitStack() as at_end:
        yield Crowd(at_end)


def test_of_a_crowd_the_newest_is_hung_up_and_who_was_about_to_come_in_is_not(crowd: Crowd) -> None:
    """Replicas of one host that start at once: it has said nothing yet, and comes again."""
    for _ in range(MOST_WAITING + 2):
        crowd.come(0.0)
    assert crowd.hung_up() == [MOST_WAITING, MOST_WAITING + 1]
    crowd.porch.hear(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0, PROMPT_S / 2)
    crowd.come(PROMPT_S / 2)
    assert crowd.hung_up() == [MOST_WAITING, MOST_WAITING + 1], "one is in: there is room"


def test_who_is_in_and_has_not_said_anything_yet_is_let_be(crowd: Crowd) -> None:
    """Its first words may be on their way."""
    crowd.come(0.0)
    crowd.porch.hear(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0, 0.9 * PROMPT_S)
    for _ in range(MOST_WAITING):
        crowd.come(1.0 * PROMPT_S)
    assert crowd.hung_up() == []
    crowd.come(1.2 * PROMPT_S)
    assert crowd.hung_up() == [MOST_WAITING + 1]
    crowd.come(2.1 * PROMPT_S)
    assert crowd.hung_up() == [1, MOST_WAITING + 1]


def test_who_takes_longer_than_a_handshake_makes_room_for_a_newcomer(crowd: Crowd) -> None:
    for _ in range(MOST_WAITING):
        crowd.come(0.0)
    for number in range(1, 4):
        crowd.come(1.1 * PROMPT_S)
        assert crowd.hung_up() == list(range(number))
