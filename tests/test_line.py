"""dbctl/transport/line.py, and how a link uses it: messages from loop to loop."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from linked import RUN, Make, arrive, folder, make, until

from dbctl.envelope import PROTOCOL_VERSION, Envelope, Inline, encode
from dbctl.keys import Tcp
from dbctl.roles.base import PlainBuffer, View
from dbctl.transport.line import Line, socket_name
from dbctl.transport.link import DIRECT, Link
from dbctl.transport.memory import SharedBuffer, describe
from dbctl.wire import (
    BEGINNING,
    Ack,
    Boxes,
    Fetch,
    Message,
    Need,
    Params,
    Peer,
    Push,
    Return,
)

__all__ = ["folder", "make"]  # fixtures


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[tuple[Line, Line]]:
    """Two, of which the first can write to the second."""
    writer, reader = Line(), Line()
    reader.listen(tmp_path / "reader")
    writer.connect("reader", tmp_path / "reader")
    yield writer, reader
    writer.close()
    reader.close()
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------- the pipe


def test_frames_come_whole_and_in_order(lines: tuple[Line, Line], tmp_path: Path) -> None:
    writer, reader = lines
    frames = [os.urandom(size) for size in (1, 0, 4094, 300)]
    assert [writer.send("reader", frame) for frame in frames] == [True] * 4
    mode = (tmp_path / "reader.line").stat().st_mode
    assert stat.S_ISFIFO(mode)
    assert stat.S_IMODE(mode) == 0o600
    assert reader.read() == frames
    assert reader.read() == []


def test_a_frame_that_a_read_cuts_is_put_together(
    lines: tuple[Line, Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = lines
    monkeypatch.setattr("dbctl.transport.line.READ_BYTES", 5)
    writer.send("reader", b"first")
    writer.send("reader", b"second")
    assert [reader.read() for _ in range(3)] == [[], [b"first"], [b"second"]]


def test_a_frame_longer_than_the_kernel_writes_whole_is_not_taken(
    lines: tuple[Line, Line],
) -> None:
    assert not lines[0].send("reader", bytes(4095))
    assert lines[1].read() == []


def test_a_full_pipe_takes_nothing_more_and_loses_nothing(lines: tuple[Line, Line]) -> None:
    writer, reader = lines
    n_taken = 0
    while writer.send("reader", b"%04d" % n_taken):
        n_taken += 1
    got = []
    while found := reader.read():
        got += found
    assert got == [b"%04d" % i for i in range(n_taken)]
    assert writer.send("reader", b"again")


def test_whoever_is_not_there_or_ended_gets_nothing(tmp_path: Path) -> None:
    writer, reader = Line(), Line()
    writer.connect("nobody", tmp_path / "nobody")
    (tmp_path / "file.line").write_text("no pipe")
    writer.connect("file", tmp_path / "file")
    reader.listen(tmp_path / "reader")
    writer.connect("reader", tmp_path / "reader")
    reader.close()
    assert [writer.send(name, b"x") for name in ("nobody", "file", "reader", "reader")] == [
        False
    ] * 4
    writer.close()
    assert (tmp_path / "file.line").read_text() == "no pipe"


def test_a_wait_ends_by_a_ring_before_or_after_it_began_and_by_its_timeout() -> None:
    line = Line()
    line.ring()
    line.ring()
    began = time.monotonic()
    line.wait(5.0)
    threading.Timer(0.05, line.ring).start()
    line.wait(5.0)
    assert 0.04 < time.monotonic() - began < 4.0
    line.wait(0.01)
    assert time.monotonic() - began < 4.0
    line.close()


def test_who_expects_an_answer_looks_for_it_before_sleeping(lines: tuple[Line, Line]) -> None:
    writer, _ = lines
    waits: list[float | None] = []

    class Poll:
        def poll(self, timeout_ms: float | None) -> list[tuple[int, int]]:
            waits.append(timeout_ms)
            return []

    writer._poll = Poll()  # type: ignore[assignment]
    writer.wait(0.5)
    assert waits == [500]
    writer.send("reader", b"x")
    writer.wait(0.5)
    assert waits == [500, 500]
    writer.send("reader", b"x", expects=True)
    writer.send("reader", b"x")
    writer.wait(0.5)
    assert len(waits) > 4
    assert waits[2:] == [0] * (len(waits) - 3) + [500]
    writer.wait(None)
    assert waits[-1] is None


# ------------------------------------------------------------------------------- the link


def two(make: Make) -> tuple[Link, Link]:
    """Two that are connected both ways, and have spoken."""
    first, second = make("worker-0.0"), make("worker-0.1")
    first.connect("worker-0.1", 1, second.endpoint)
    second.connect("worker-0.0", 1, first.endpoint)
    opening = SharedBuffer(4, "<f4")
    first.send("worker-0.1", boxes(0, opening))
    second.send("worker-0.0", boxes(0, opening))
    assert len(arrive(first) + arrive(second)) == 2
    opening.close()
    return first, second


def boxes(number: int, buffer: SharedBuffer | PlainBuffer) -> Boxes:
    return Boxes(number, "states", 0, View(buffer, 0, 3))


def without_threads(link: Link, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the link still gives its thread, which does not get it."""
    given: list[object] = []
    monkeypatch.setattr(link, "_submit", given.append)
    return given


def test_boxes_go_past_the_link_threads(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = two(make)
    given = without_threads(first, monkeypatch)
    buffer = SharedBuffer(4, "<f4")
    buffer.array[:] = range(4)
    first.send("worker-0.1", boxes(1, buffer))
    assert not given
    [(peer, message)] = arrive(second)
    assert isinstance(message, Boxes)
    assert (str(peer), message.number) == ("worker-0.0#1", 1)
    assert message.payload.tolist() == [0, 1, 2]
    assert not message.payload.flags.writeable
    buffer.array[0] = 7
    assert message.payload[0] == 7, "the sender's memory, not a copy"
    buffer.close()


@pytest.mark.parametrize(
    ("message", "expects"),
    [
        (Boxes(1, "states", 0), True),
        (Fetch(1, 1, 0, 0), True),
        (Push(1, 1, 0, 0, 1, BEGINNING, 0, 0), False),
        (Params(1, 1, 1, 1, 0, 0), False),
        (Ack(1, 1, 1), False),
        (Return(1), False),
    ],
)
def test_an_answer_is_looked_for_after_what_is_answered_at_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, message: Message, expects: bool
) -> None:
    assert type(message) in DIRECT
    first, _ = two(make)
    first._line._expects = False
    given = without_threads(first, monkeypatch)
    first.send("worker-0.1", message)
    assert not given
    assert first._line._expects == expects


@pytest.mark.parametrize("message", [Need(1, "states", 0), boxes(1, PlainBuffer(4, "<f4"))])
def test_all_else_goes_by_the_threads(
    make: Make, monkeypatch: pytest.MonkeyPatch, message: Message
) -> None:
    """A message of another kind keeps its place among others; a payload of our own is no header."""
    first, second = two(make)
    given = without_threads(first, monkeypatch)
    first.send("worker-0.1", message)
    assert len(given) == 1
    monkeypatch.undo()
    first.send("worker-0.1", message)
    assert type(arrive(second)[0][1]) is type(message)


@pytest.mark.parametrize("told", [False, True])
def test_who_is_spoken_to_answers_by_its_own_line(
    make: Make, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """A shard connects to nobody; a worker's pipe is beside its socket, a newer life's too.

    That of a replica that is started again: also where the shard was told of the older one's end.
    """
    shard = make("shard-0")
    for incarnation in (1, 2):
        worker = make("worker-0.0", incarnation)
        worker.connect("shard-0", 1, shard.endpoint)
        worker.send("shard-0", Fetch(1, 1, 0, 0))
        assert arrive(shard) == [(worker.me, Fetch(1, 1, 0, 0))]
        shard.send("worker-0.0", Ack(1, 1, 1))  # the first goes the way it came
        assert arrive(worker) == [(shard.me, Ack(1, 1, 1))]
        with monkeypatch.context() as patch:
            given = [without_threads(link, patch) for link in (shard, worker)]
            for seq in range(2, 5):
                worker.send("shard-0", Fetch(1, seq, 0, 0))
                assert arrive(shard) == [(worker.me, Fetch(1, seq, 0, 0))]
                shard.send("worker-0.0", Ack(1, seq, 1))
                assert arrive(worker) == [(shard.me, Ack(1, seq, 1))]
            assert given == [[], []]
        if told:
            shard.forget(worker.me)
            assert not shard._line._to


@pytest.mark.parametrize("name", ["../worker-0", "x/y", "", "Worker", "w\0"])
def test_no_path_is_made_of_what_is_no_nodes_name(name: str) -> None:
    with pytest.raises(ValueError, match="is not a node's name"):
        socket_name(Peer(name, 1))


def test_a_full_line_gives_way_to_the_socket(make: Make) -> None:
    first, second = two(make)
    buffer = SharedBuffer(4, "<f4")
    for number in range(1_500):  # more than a pipe holds
        first.send("worker-0.1", boxes(number, buffer))
    got = {message.number for _, message in arrive(second, 1_500)}  # type: ignore[attr-defined]
    assert got == set(range(1_500))
    buffer.close()


def test_a_life_that_is_over_is_not_heard_nor_written_to(make: Make) -> None:
    first, second = two(make)
    buffer = SharedBuffer(4, "<f4")
    second.forget(first.me)
    first.send("worker-0.1", boxes(1, buffer))
    until(lambda: not second.receive(0.01) and second.counts.get("old", 0) == 1)
    assert not second._line.send("worker-0.0", b"x")
    second.connect("worker-0.0", 1, first.endpoint)  # told late
    assert not second._line.send("worker-0.0", b"x")
    newer = make("worker-0.0", 2)
    second.connect("worker-0.0", 2, newer.endpoint)
    newer.connect("worker-0.1", 1, second.endpoint)
    newer.send("worker-0.1", boxes(2, buffer))
    [(peer, message)] = arrive(second)
    assert (peer.incarnation, message.number) == (2, 2)  # type: ignore[attr-defined]
    assert second._line.send("worker-0.0", b"x"), "the next life has a line, too"
    buffer.close()


def test_what_is_no_partners_word_is_dropped_and_counted(make: Make) -> None:
    _, second = two(make)
    buffer = SharedBuffer(4, "<f4")
    shared = describe(View(buffer, 0, 3))
    good = Envelope(
        PROTOCOL_VERSION, RUN, "worker-0.0", 1, "worker-0.1", Boxes(1, "states", 0), shared
    )
    fields = {f: getattr(good, f) for f in good.__struct_fields__}
    ended = SharedBuffer(4, "<f4")
    liar = describe(View(ended, 0, 3))
    ended.close()

    def say(**changes: object) -> bytes:
        return encode(Envelope(**(fields | changes)))

    bad = {
        "line": [say(to="x"), say(message=Need(1, "states", 0), payload=None)],
        "run": [say(run="another")],
        "undecodable": [b"", b"\xff" * 9],
        "payload": [say(payload=Inline(1, 0, 1, 3, "<f4")), say(payload=liar)],
    }
    line = Line()
    line.connect("worker-0.1", Path(second.endpoint.removeprefix("ipc://")))
    for frames in bad.values():
        assert all(line.send("worker-0.1", frame) for frame in frames)
    line.send("worker-0.1", say())
    [(_, message)] = arrive(second)
    assert isinstance(message, Boxes)
    assert np.array_equal(message.payload, np.zeros(3))
    until(lambda: second.counts == {kind: len(frames) for kind, frames in bad.items()})
    line.close()
    buffer.close()


def test_who_is_not_connected_is_heard_as_by_a_socket(make: Make) -> None:
    """The first of two partners is told of the other only when that is up, and may hear it first.

    Its first word comes by the socket, so that it can be answered; a newer life of a node ends the
    older one, as any message of it does.
    """
    first, second = make("worker-0.0"), make("worker-0.1")
    first.connect("worker-0.1", 1, second.endpoint)
    buffer = SharedBuffer(4, "<f4")
    for number in range(3):
        first.send("worker-0.1", boxes(number, buffer))
    got = [message.number for _, message in arrive(second, 3)]  # type: ignore[attr-defined]
    assert sorted(got) == [0, 1, 2]
    second.send("worker-0.0", boxes(9, buffer))
    assert arrive(first)[0][1].number == 9  # type: ignore[attr-defined]
    newer = make("worker-0.0", 2)
    newer.connect("worker-0.1", 1, second.endpoint)
    newer.send("worker-0.1", boxes(3, buffer))
    assert arrive(second)[0][0].incarnation == 2
    first.send("worker-0.1", boxes(4, buffer))
    until(lambda: not second.receive(0.01) and second.counts == {"old": 1})
    buffer.close()


def test_a_link_that_listens_on_tcp_or_not_at_all_has_no_line(make: Make, folder: Path) -> None:
    make("worker-0.0", listens=False)
    assert not list(folder.iterdir())
    tcp = Tcp(address="127.0.0.1", keys=(("worker-0.1", 1, ""),))
    with Link(run=RUN, node="shard-0", incarnation=1, listen=None, tcp=tcp) as link:
        link.connect("worker-0.1", 1, link.tcp_endpoint)
        assert not link._line.send("worker-0.1", b"x")
