"""visitors.py: nobody's slowness holds a keeper up, and nobody's descriptors exhaust it."""

from __future__ import annotations

import json
import os
import selectors
import socket
import time

import pytest

from dbctl.visitors import N_DESCRIPTORS, Answers, Visitor
from tests.one_keeper import LIMIT_S


def test_descriptors_that_come_one_after_the_other_are_bounded_too() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    left, right = socket.socketpair()
    with left, right:
        visitor = Visitor(left, 0.0)
        for _ in range(N_DESCRIPTORS):
            socket.send_fds(right, [b"x"], [0])
            assert visitor.read() is None
        socket.send_fds(right, [b"x"], [0])
        with pytest.raises(ValueError, match="expected 2 descriptors with the request, found 3"):
            visitor.read()
        assert visitor.descriptors == []
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_who_does_not_read_an_answer_holds_nobody_up() -> None:
    """It takes what a connection holds; the rest goes as it is read, or not at all."""
    with selectors.DefaultSelector() as selector:
        answers = Answers(selector, 2)
        pairs = [socket.socketpair() for _ in range(3)]
        answer = {"runs": "x" * 2_000_000}
        begin = time.monotonic()
        for number, (there, _) in enumerate(pairs):
            answers.give(Visitor(there, 0.0), answer, until=10.0 + number)
        assert time.monotonic() - begin < 1.0
        assert [there.fileno() < 0 for there, _ in pairs] == [True, False, False], "at most two"
        assert answers.due() == 11.0
        read, here = bytearray(), pairs[2][1]
        here.settimeout(LIMIT_S)
        while not read.endswith(b"\n"):
            read += here.recv(1 << 20)
            for key, _ in selector.select(0.0):
                key.data()
        assert json.loads(read) == answer
        assert pairs[2][0].fileno() < 0, "it has all"
        answers.drop(10.9)
        assert pairs[1][0].fileno() >= 0
        answers.drop(11.0)
        assert pairs[1][0].fileno() < 0
        assert not selector.get_map()
        for _, here in pairs:
            here.close()
