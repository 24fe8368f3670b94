"""dbctl/transport/link.py: the thread that owns the sockets of a process, seen from the loop."""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from linked import RUN, Make, arrive, folder, make, pair, push, until

from dbctl.errors import LaunchError, RunError
from dbctl.roles.base import PlainBuffer, View
from dbctl.transport.link import Link
from dbctl.transport.memory import SharedBuffer
from dbctl.wire import (
    Ack,
    Cut,
    Fetch,
    Message,
    Params,
    Peer,
    Push,
)

__all__ = ["folder", "make"]  # fixtures

ACK = Ack(1, 1, 1)


# ---------------------------------------------------------------- there and back


def test_there_and_back_by_the_way_it_came(make: Make) -> None:
    shard, worker = pair(make)
    worker.send("shard-0", Fetch(1, 7, 0, 0))
    assert arrive(shard) == [(Peer("worker-0.0", 1), Fetch(1, 7, 0, 0))]
    shard.send("worker-0.0", Ack(1, 7, 3))
    assert arrive(worker) == [(Peer("shard-0", 1), Ack(1, 7, 3))]


def test_order_is_kept_and_nothing_is_lost_between_two_that_live(make: Make) -> None:
    """Many more than the high water marks hold, both ways, while nobody reads."""
    shard, worker = pair(make)
    for number in range(1_500):
        worker.send("shard-0", Cut(number))
    got = arrive(shard, 1_500)
    assert [message.number for _, message in got] == list(range(1_500))
    for number in range(1_500):
        shard.send("worker-0.0", Cut(number))
    got = arrive(worker, 1_500)
    assert [message.number for _, message in got] == list(range(1_500))
    assert shard.counts == worker.counts == {}


def test_what_is_sent_before_the_peer_is_up_waits_for_it(make: Make, folder: Path) -> None:
    worker = make("worker-0.0")
    worker.connect("shard-0", 1, f"ipc://{folder}/shard-0.1.sock")
    worker.send("shard-0", Ack(1, 1, 1))
    time.sleep(0.05)
    assert len(arrive(make("shard-0"))) == 1


@pytest.mark.parametrize("bulk", ["memory", "inline"])
@pytest.mark.parametrize("n_elements", [0, 5, 1 << 18, (5 << 18) + 3])
def test_a_payload_arrives_equal_and_read_only(make: Make, bulk: str, n_elements: int) -> None:
    shard, worker = pair(make, bulk=bulk)
    buffer = SharedBuffer(n_elements + 10, "<f4")
    buffer.array[:] = np.arange(n_elements + 10)
    view = View(buffer, 3, n_elements + 3)
    worker.send("shard-0", push(view))
    [(_, message)] = arrive(shard)
    assert isinstance(message, Push)
    np.testing.assert_array_equal(message.payload, view.array)
    assert not message.payload.flags.writeable
    shares = np.shares_memory(message.payload, view.array)
    assert not shares, "another mapping or a copy, never the owner's own array"
    if n_elements:
        buffer.array[3] = -1
        assert (message.payload[0] == -1) == (bulk == "memory")
    shard.send("worker-0.0", Params(1, 1, 1, 0, 0, 0, View(buffer, 0, 10)))
    [(_, answer)] = arrive(worker)
    assert isinstance(answer, Params)
    np.testing.assert_array_equal(answer.payload, buffer.array[:10])
    buffer.close()


def test_plain_buffers_and_arrays_go_inline(make: Make) -> None:
    shard, worker = pair(make)
    plain = PlainBuffer(10, "<f8")
    plain.array[:] = 2
    array = np.ones(10, "<f4")
    worker.send("shard-0", push(View(plain, 0, 5)))
    worker.send("shard-0", push(array, seq=2))
    array[:] = 7
    (_, first), (_, second) = arrive(shard, 2)
    assert (first.payload.tolist(), second.payload.tolist()) == ([2.0] * 5, [1.0] * 10)


def test_without_memfd_everything_goes_inline(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    shard, worker = pair(make)
    assert worker.bulk == "inline"
    worker.send("shard-0", push(View(PlainBuffer(9, "<f4"), 0, 9)))
    assert arrive(shard)[0][1].payload.tolist() == [0.0] * 9


def test_a_stopped_shard_does_not_make_its_worker_grow(make: Make) -> None:
    """cases: a shard stopped with fast replicas; G15. The shard's loop reads nothing."""
    shard, worker = pair(make, bulk="inline", assembly_bytes=8 << 20)
    plain = PlainBuffer(1 << 18, "<f4")
    for seq in range(200):
        worker.send("shard-0", push(View(plain, 0, 1 << 18), seq))
    until(lambda: shard.counts.get("overflow", 0) > 0)
    until(lambda: shard.counts.get("overflow", 0) + shard._unread.qsize() >= 200)
    assert shard._unread.qsize() <= 10
    assert len(shard.receive(0)) <= 10
    worker.send("shard-0", Ack(1, 1, 1))
    assert isinstance(arrive(shard)[-1][1], Ack)


def test_no_way_to_a_node_is_counted(make: Make) -> None:
    shard, _ = pair(make)
    shard.send("worker-9.0", Ack(1, 1, 1))
    until(lambda: shard.counts == {"unroutable": 1})


def test_a_peer_that_went_is_counted_and_nobody_dies(make: Make) -> None:
    said: list[str] = []
    shard, worker = pair(make, on_trouble=said.append)
    worker.send("shard-0", Ack(1, 1, 1))
    arrive(shard)
    worker.close()
    until(lambda: bool(shard.send("worker-0.0", Ack(1, 1, 1)) or shard.counts))
    assert set(shard.counts) <= {"unreachable", "unroutable"}
    assert not [line for line in said if "gone" in line], "an end in order is no trouble"
    other = make("worker-1.0")
    other.connect("shard-0", 1, shard.endpoint)
    other.send("shard-0", Ack(1, 2, 2))
    assert arrive(shard) == [(Peer("worker-1.0", 1), Ack(1, 2, 2))]


def test_receive_waits_no_longer_than_told_and_wakes(make: Make) -> None:
    link = make("shard-0")
    start = time.monotonic()
    assert link.receive(0) == []
    assert link.receive(0.05) == []
    assert time.monotonic() - start < 1.0
    threading.Timer(0.05, link.wake).start()
    assert link.receive(None) == []


# ---------------------------------------------------------------- lives


def test_a_newer_life_takes_over_and_the_older_is_not_heard(make: Make) -> None:
    """cases: restarted under its old identity while pushes fly (libzmq#2037)."""
    shard, old = pair(make)
    old.send("shard-0", Ack(1, 1, 0))
    assert arrive(shard)[0][0].incarnation == 1
    new = make("worker-0.0", 2)
    new.connect("shard-0", 1, shard.endpoint)
    new.send("shard-0", Ack(1, 2, 0))
    assert arrive(shard)[0][0].incarnation == 2
    old.send("shard-0", Ack(1, 3, 0))
    until(lambda: shard.receive(0.0) == [] and shard.counts == {"old": 1})
    shard.send("worker-0.0", Ack(1, 4, 0))
    assert len(arrive(new)) == 1
    assert old.receive(0.05) == []


def test_connect_to_a_newer_life_replaces_the_connection(make: Make) -> None:
    shard, worker = pair(make)
    worker.send("shard-0", Ack(1, 1, 0))
    arrive(shard)
    reborn = make("shard-0", 2)
    worker.connect("shard-0", 2, reborn.endpoint)
    worker.connect("shard-0", 1, shard.endpoint)
    worker.send("shard-0", Ack(1, 2, 0))
    assert arrive(reborn) == [(Peer("worker-0.0", 1), Ack(1, 2, 0))]
    assert shard.receive(0.05) == []


def test_forget_fences_that_life(make: Make) -> None:
    """G6: a node declared dead changes nothing afterwards."""
    shard, worker = pair(make)
    buffer = SharedBuffer(10, "<f4")
    worker.send("shard-0", push(View(buffer, 0, 10)))
    arrive(shard)
    shard.forget(worker.me)
    worker.send("shard-0", push(View(buffer, 0, 10), 2))
    until(lambda: shard.receive(0.0) == [] and shard.counts == {"old": 1})
    assert len(shard._mappings) == 0
    assert len(shard._switch._mappings) == 0
    buffer.close()


# ---------------------------------------------------------------- start and end


def test_it_cannot_listen(folder: Path, make: Make) -> None:
    make("shard-0")
    with pytest.raises(LaunchError, match="another process listens"):
        make("shard-0")
    with pytest.raises(LaunchError, match="shard-1 cannot listen"):
        Link(run=RUN, node="shard-1", incarnation=1, listen=f"ipc://{folder}/no/x").start()


def test_close_sends_what_waits(make: Make) -> None:
    """Fewer than the high water mark: libzmq gives up a full pipe whose sender hangs up."""
    shard, worker = pair(make)
    for seq in range(15):
        worker.send("shard-0", Ack(1, seq, 0))
    worker.close(2.0)
    assert len(arrive(shard, 15)) == 15


def test_close_is_bounded_when_nobody_takes_it(make: Make, folder: Path) -> None:
    """cases: shards killed, then Ctrl-C with pushes queued (libzmq#2586)."""
    worker = make("worker-0.0", bulk="inline")
    worker.connect("shard-0", 1, f"ipc://{folder}/nobody")
    plain = PlainBuffer(1 << 20, "<f4")
    for seq in range(10):
        worker.send("shard-0", push(View(plain, 0, 1 << 20), seq))
    start = time.monotonic()
    worker.close(0.2)
    assert time.monotonic() - start < 1.0
    worker.close()
    worker.send("shard-0", ACK)


def test_a_closed_link_leaves_no_thread_no_descriptor_no_file(make: Make, folder: Path) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    pair_before = open_files(), set(threading.enumerate())
    for incarnation in range(1, 4):
        shard, worker = make("shard-0", incarnation), make("worker-0.0", incarnation)
        worker.connect("shard-0", incarnation, shard.endpoint)
        worker.send("shard-0", ACK)
        arrive(shard)
        worker.close()
        shard.close()
    assert not list(folder.iterdir())
    assert (open_files(), set(threading.enumerate())) == pair_before


def test_the_parents_end_is_seen(make: Make) -> None:
    reader, writer = os.pipe()
    link = make("worker-0.0", watch_fd=reader)
    os.write(writer, b"not the end")
    assert link.receive(0.05) == []
    assert not link.closed_by_parent
    threading.Timer(0.05, os.close, [writer]).start()
    assert link.receive(None) == []
    assert link.closed_by_parent
    os.close(reader)


def test_a_defect_in_the_thread_reaches_the_loop(make: Make) -> None:
    def broken(peer: Peer, message: Message) -> bool:
        raise ZeroDivisionError

    shard, worker = pair(make, allow=broken)
    worker.send("shard-0", ACK)
    with pytest.raises(ZeroDivisionError):
        shard.receive(None)
    with pytest.raises(ZeroDivisionError):
        shard.send("worker-0.0", ACK)


@pytest.mark.parametrize("by", ["socket", "line"])
def test_without_a_descriptor_for_what_came_the_loop_is_told(make: Make, by: str) -> None:
    """Whoever waits for a buffer that is only dropped does so for ever."""
    shard, worker = pair(make)
    buffer = SharedBuffer(10, "<f4")
    worker.send("shard-0", Cut(1))
    arrive(shard)  # all connections are made: ZeroMQ may need no descriptor any more
    if by == "line":
        worker.send("shard-0", push(View(buffer, 0, 10)))
        arrive(shard)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = os.dup(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 1, limits[1]))
    try:
        worker.send("shard-0", push(View(buffer, 0, 10), seq=2))
        with pytest.raises(RunError, match=r"no descriptor left for the memory of worker-0\.0#1"):
            arrive(shard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(taken)
        buffer.close()


def test_the_context_manager_closes(folder: Path) -> None:
    with Link(run=RUN, node="a", incarnation=1, listen=f"ipc://{folder}/a") as link:
        assert link.endpoint == f"ipc://{folder}/a"
        assert (folder / "a").exists()
    assert not list(folder.iterdir())
