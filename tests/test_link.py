"""dbctl/transport/link.py and switch.py: the thread that owns the sockets of a process."""

from __future__ import annotations

import os
import pickle
import socket as unix
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from dbctl import wire
from dbctl.errors import LaunchError
from dbctl.roles.base import PlainBuffer, View
from dbctl.transport.link import Link
from dbctl.transport.memory import SharedBuffer
from dbctl.wire import (
    Ack,
    Beat,
    Envelope,
    Fetch,
    Inline,
    Lease,
    Message,
    Params,
    Peer,
    Position,
    Push,
    Shared,
)

RUN = "run-1"
WAIT_S = 5.0

Make = Callable[..., Link]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def make(folder: Path) -> Iterator[Make]:
    """Starts links that listen in `folder` and ends them, and nothing of them is left."""
    links: list[Link] = []

    def make(node: str, incarnation: int = 1, *, listens: bool = True, **rest: Any) -> Link:
        listen = f"ipc://{folder}/{node}-{incarnation}" if listens else None
        given = {"run": RUN, "on_trouble": lambda text: None, "beat_s": 0.03} | rest
        link = Link(node=node, incarnation=incarnation, listen=listen, **given)
        links.append(link)
        return link.start()

    yield make
    for link in links:
        link.close(0.0)
    assert not list(folder.iterdir())


def arrive(link: Link, n: int = 1) -> list[tuple[Peer, Message]]:
    """The next `n` messages that are no beats."""
    got: list[tuple[Peer, Message]] = []
    deadline = time.monotonic() + WAIT_S
    while len(got) < n and time.monotonic() < deadline:
        got += [x for x in link.receive(0.2) if not isinstance(x[1], Beat)]
    assert len(got) == n, got
    return got


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def push(view: Any, seq: int = 1) -> Push:
    return Push(1, seq, 0, 0, 1, Position(), 0, 0, view)


def pair(make: Make, **rest: Any) -> tuple[Link, Link]:
    """A shard, and a worker that is connected to it."""
    shard, worker = make("shard-0", **rest), make("worker-0.0", **rest)
    worker.connect("shard-0", 1, shard.endpoint)
    return shard, worker


class Stranger:
    """A raw DEALER in the same directory: sends whatever frames it likes."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(endpoint)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=500)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def say(self, message: Any, *more: bytes, **changes: Any) -> None:
        given = {"version": 1, "run": RUN, "sender": "x", "incarnation": 1, "to": "shard-0"}
        self.send(wire.encode(Envelope(message=message, **(given | changes))), *more)


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
    for seq in range(1_500):
        worker.send("shard-0", Ack(1, seq, 0))
    got = arrive(shard, 1_500)
    assert [message.seq for _, message in got] == list(range(1_500))
    for seq in range(1_500):
        shard.send("worker-0.0", Ack(1, seq, 0))
    got = arrive(worker, 1_500)
    assert [message.seq for _, message in got] == list(range(1_500))
    assert shard.counts == worker.counts == {}


def test_what_is_sent_before_the_peer_is_up_waits_for_it(make: Make, folder: Path) -> None:
    worker = make("worker-0.0")
    worker.connect("shard-0", 1, f"ipc://{folder}/shard-0-1")
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
    shard, worker = pair(make)
    worker.send("shard-0", Ack(1, 1, 1))
    arrive(shard)
    worker.close()
    until(lambda: bool(shard.send("worker-0.0", Ack(1, 1, 1)) or shard.counts))
    assert set(shard.counts) <= {"unreachable", "unroutable"}
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
    until(lambda: shard.counts == {"old": 1})
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
    until(lambda: shard.counts == {"old": 1})
    assert len(shard._switch._mappings) == 0
    buffer.close()


# ---------------------------------------------------------------- agent and controller


def cluster(make: Make, **rest: Any) -> tuple[Link, Link, Link]:
    agent = make("agent-0", relay=True, **rest)
    controller = make("controller", listens=False, **rest)
    controller.connect("agent-0", 1, agent.endpoint)
    worker = make("worker-0.0", keeper="agent-0", keeper_endpoint=agent.endpoint, **rest)
    return agent, controller, worker


def test_the_agent_relays_both_ways(make: Make) -> None:
    agent, controller, worker = cluster(make)
    controller.send("agent-0", Ack(0, 0, 0))
    assert arrive(agent) == [(Peer("controller", 1), Ack(0, 0, 0))]
    worker.send("controller", Ack(1, 1, 1))
    assert arrive(controller) == [(Peer("worker-0.0", 1), Ack(1, 1, 1))]
    controller.send("worker-0.0", Ack(2, 2, 2))
    assert arrive(worker) == [(Peer("controller", 1), Ack(2, 2, 2))]
    agent.send("controller", Ack(3, 3, 3))
    assert arrive(controller) == [(Peer("agent-0", 1), Ack(3, 3, 3))]


def test_a_relayed_payload_is_its_owners_memory(make: Make) -> None:
    agent, controller, worker = cluster(make)
    controller.send("agent-0", Ack(0, 0, 0))
    arrive(agent)
    buffer = SharedBuffer(1_000, "<f4")
    worker.send("controller", push(View(buffer, 0, 1_000)))
    [(_, message)] = arrive(controller)
    buffer.array[5] = 5
    assert message.payload[5] == 5
    buffer.close()


def test_a_node_that_does_not_relay_refuses(make: Make) -> None:
    shard, worker = pair(make)
    with Stranger(shard.endpoint) as stranger:
        stranger.say(Ack(1, 1, 1), to="worker-0.0")
        until(lambda: shard.counts == {"misaddressed": 1})
    assert worker.receive(0.05) == []


def test_nobody_is_sent_its_own_message(make: Make) -> None:
    agent, _, _ = cluster(make)
    with Stranger(agent.endpoint) as stranger:
        stranger.say(Ack(1, 1, 1), sender="loop", to="loop")
        until(lambda: agent.counts.get("unroutable", 0) > 0)


def test_beats_arrive_and_leases_come_back_without_any_loop(make: Make) -> None:
    """Nobody calls `receive`: a loop in a long product keeps its lease."""
    agent, controller, worker = cluster(make, lease_s=0.6)
    controller.answer_beats = True
    controller.send("agent-0", Ack(0, 0, 0))
    worker.steps = 42
    time.sleep(0.9)
    now = time.monotonic()
    for link in (agent, worker):
        assert link.lease_in_force(now)
        assert link.lease_until <= now + 0.6
    beats = [(peer.node, beat) for peer, beat in controller.receive(0)]
    steps = [beat.steps for node, beat in beats if node == "worker-0.0"]
    assert steps[-1] == 42
    assert [beat for node, beat in beats if node == "agent-0"]
    assert [beat for _, beat in beats][-1].rss_bytes > 1 << 20
    assert not [m for _, m in worker.receive(0) if isinstance(m, Lease)]


def test_a_node_gets_its_lease_from_the_relay(make: Make) -> None:
    """The controller here answers the agent alone."""
    agent, controller, worker = cluster(make, lease_s=0.6)
    controller.send("agent-0", Ack(0, 0, 0))
    deadline = time.monotonic() + 1.2
    while time.monotonic() < deadline:
        for peer, message in controller.receive(0.05):
            if peer.node == "agent-0" and isinstance(message, Beat):
                controller.send("agent-0", Lease(message.number))
    assert agent.lease_in_force(time.monotonic())
    assert worker.lease_in_force(time.monotonic())


def test_leases_end_when_the_controller_does(make: Make) -> None:
    """G11: at second hand no later than at first."""
    agent, controller, worker = cluster(make, lease_s=0.4)
    controller.answer_beats = True
    controller.send("agent-0", Ack(0, 0, 0))
    time.sleep(0.5)
    assert worker.lease_in_force(time.monotonic())
    controller.close(0.0)
    ended = time.monotonic()
    assert max(agent.lease_until, worker.lease_until) <= ended + 0.4
    time.sleep(0.5)
    assert max(agent.lease_until, worker.lease_until) <= ended + 0.4
    assert not worker.lease_in_force(time.monotonic())


def test_who_reports_to_nobody_has_no_lease_to_lose(make: Make) -> None:
    link = make("shard-0", lease_s=0.01)
    time.sleep(0.05)
    assert link.lease_in_force(time.monotonic())


def test_a_lease_from_a_stranger_is_refused(make: Make) -> None:
    _, _, worker = cluster(make, lease_s=0.5)
    before = worker.lease_until
    with Stranger(worker.endpoint) as stranger:
        for number in range(20):
            stranger.say(Lease(number), to="worker-0.0")
        until(lambda: worker.counts.get("role", 0) == 20)
    assert worker.lease_until == before


# ---------------------------------------------------------------- what is not believed

ACK = Ack(1, 1, 1)
HERE = Shared(os.getpid(), 0, 1, 1 << 40, 0, 1 << 30, "<f4")


def nested(depth: int) -> bytes:
    header = wire.encode(Envelope(1, RUN, "x", 1, "shard-0", Params(1, 1, 1, 1, 1, 1)))
    at = header.rindex(b"\xc0\xc0")
    return header[:at] + b"\x91" * depth + header[at:]


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (os.environ["DBCTL_TEST_BOMB"],)


def hostile() -> dict[str, tuple[str, Callable[[Stranger], None]]]:
    good = wire.encode(Envelope(1, RUN, "x", 1, "shard-0", ACK))
    inline = Inline(1, 0, 1, 4, "<f4")
    return {
        "random": ("undecodable", lambda s: s.send(os.urandom(300))),
        "cut": ("undecodable", lambda s: s.send(good[:-3])),
        "longer": ("undecodable", lambda s: s.send(good + b"x")),
        "empty": ("undecodable", lambda s: s.send(b"")),
        "pickle": ("undecodable", lambda s: s.send(pickle.dumps(Bomb()))),
        "huge length": ("undecodable", lambda s: s.send(b"\x97\x01\xdb\xff\xff\xff\xff")),
        "nested": ("undecodable", lambda s: s.send(nested(60_000))),
        "json": ("undecodable", lambda s: s.send(b'{"version": 1}')),
        "frames": ("frames", lambda s: s.send(good, b"a", b"b", b"c")),
        "header": ("header", lambda s: s.send(bytes(70_000))),
        "version": ("version", lambda s: s.say(ACK, version=2)),
        "run": ("run", lambda s: s.say(ACK, run="other")),
        "no name": ("sender", lambda s: s.say(ACK, sender="")),
        "long name": ("sender", lambda s: s.say(ACK, sender="x" * 1_000)),
        "no life": ("sender", lambda s: s.say(ACK, incarnation=-1)),
        "payload of none": ("payload", lambda s: s.say(ACK, bytes(16), payload=inline)),
        "frame of none": ("payload", lambda s: s.say(ACK, b"x")),
        "missing frame": ("payload", lambda s: s.say(push(None), payload=inline)),
        "short frame": ("payload", lambda s: s.say(push(None), bytes(9), payload=inline)),
        "payload in header": ("payload", lambda s: s.say(push([1, 2]))),
        "object dtype": (
            "payload",
            lambda s: s.say(push(None), bytes(16), payload=Inline(1, 0, 1, 2, "|O8")),
        ),
        "16 GiB": (
            "payload",
            lambda s: s.say(push(None), bytes(16), payload=Inline(1, 0, 1 << 14, 1 << 32, "<f4")),
        ),
        "our own descriptor": ("payload", lambda s: s.say(push(None), payload=HERE)),
        "misaddressed": ("misaddressed", lambda s: s.say(ACK, to="nobody")),
    }


@pytest.mark.parametrize("name", list(hostile()))
def test_it_is_dropped_and_said_once(
    make: Make, tmp_path_factory: pytest.TempPathFactory, monkeypatch: Any, name: str
) -> None:
    """cases: random bytes, cut frames, a huge length, a pickle: nothing runs, nobody dies."""
    bomb = tmp_path_factory.mktemp("bomb") / "went-off"
    monkeypatch.setenv("DBCTL_TEST_BOMB", str(bomb))
    kind, attack = hostile()[name]
    said: list[str] = []
    shard = make("shard-0", on_trouble=said.append)
    with Stranger(shard.endpoint) as stranger:
        for _ in range(20):
            attack(stranger)
        stranger.say(ACK)
        assert arrive(shard) == [(Peer("x", 1), ACK)]
    assert shard.counts == {kind: 20}
    assert len(said) == 1
    assert said[0].startswith("shard-0: ")
    assert said[0].isprintable()
    assert len(said[0]) < 400
    assert not bomb.exists()


def test_an_answer_can_be_hostile_too(make: Make, folder: Path) -> None:
    """A peer that this process connected to has no more rights than one that came."""
    worker = make("worker-0.0")
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{folder}/fake")
    worker.connect("shard-0", 1, f"ipc://{folder}/fake")
    worker.send("shard-0", ACK)
    route = router.recv_multipart()[0]
    for _ in range(20):
        router.send_multipart([route, os.urandom(100)])
    until(lambda: worker.counts == {"undecodable": 20})
    context.destroy(linger=0)
    (folder / "fake").unlink()


def test_a_frame_that_claims_2_gib_costs_nothing(make: Make) -> None:
    """reliability, section 3: MAXMSGSIZE. By hand, as ZMTP 3 puts it on the line."""
    shard = make("shard-0")
    with unix.socket(unix.AF_UNIX) as line:
        line.settimeout(WAIT_S)
        line.connect(shard.endpoint.removeprefix("ipc://"))
        line.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31))
        ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
        line.sendall(bytes([4, len(ready)]) + ready)
        line.sendall(b"\x02" + (2 << 30).to_bytes(8, "big") + b"x" * 1_000)
        while line.recv(1 << 16):
            pass
    with Stranger(shard.endpoint) as stranger:
        stranger.say(ACK)
        assert arrive(shard) == [(Peer("x", 1), ACK)]


def test_bytes_that_are_not_zeromq_cost_nothing(make: Make) -> None:
    shard = make("shard-0")
    for _ in range(10):
        with unix.socket(unix.AF_UNIX) as line:
            line.connect(shard.endpoint.removeprefix("ipc://"))
            line.sendall(os.urandom(1_000))
    with Stranger(shard.endpoint) as stranger:
        stranger.say(ACK)
        assert arrive(shard) == [(Peer("x", 1), ACK)]


def test_every_message_decodes_from_noise_or_is_refused(make: Make) -> None:
    """One byte of a good header flipped at a time: delivered or dropped, the thread lives."""
    shard = make("shard-0")
    good = wire.encode(Envelope(1, RUN, "x", 1, "shard-0", push(None), Inline(1, 0, 1, 4, "<f4")))
    with Stranger(shard.endpoint) as stranger:
        for at in range(len(good)):
            for value in (0x00, 0xC1, 0xDD, 0xFF):
                stranger.send(good[:at] + bytes([value]) + good[at + 1 :], bytes(16))
        stranger.say(Ack(9, 9, 9), sender="y")
        deadline = time.monotonic() + WAIT_S
        last: list[Message] = []
        while Ack(9, 9, 9) not in last and time.monotonic() < deadline:
            last = [message for _, message in shard.receive(0.2)]
    assert Ack(9, 9, 9) in last


def test_commands_are_allowed_by_role(make: Make) -> None:
    shard, worker = pair(make, allow=lambda peer, message: not isinstance(message, Fetch))
    worker.send("shard-0", Fetch(1, 1, 1, 1))
    worker.send("shard-0", ACK)
    assert arrive(shard) == [(worker.me, ACK)]
    assert shard.counts == {"role": 1}


def test_memory_of_another_host_is_refused(folder: Path, make: Make) -> None:
    """Over tcp a pid means nothing here."""
    link = Link(run=RUN, node="shard-0", incarnation=1, listen="tcp://127.0.0.1:0")
    buffer = SharedBuffer(10, "<f4")
    with link:
        worker = make("worker-0.0")
        worker.connect("shard-0", 1, link.endpoint)
        worker.send("shard-0", push(View(buffer, 0, 10)))
        until(lambda: link.counts == {"payload": 1})
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


def test_the_context_manager_closes(folder: Path) -> None:
    with Link(run=RUN, node="a", incarnation=1, listen=f"ipc://{folder}/a") as link:
        assert link.endpoint == f"ipc://{folder}/a"
        assert (folder / "a").exists()
    assert not list(folder.iterdir())


def test_header_of_every_message_fits() -> None:
    """The largest header of ours is a shard's table: 200 workers still fit its 64 KiB."""
    row = wire.WorkerRow("worker-100.100", 3, 1 << 40, Position(1 << 40, 1 << 20, 1 << 20))
    staleness = tuple(("worker-100.100", s, 1 << 30) for s in range(600))
    report = wire.ShardReport(1, 1 << 40, 1 << 40, 1 << 50, 1 << 50, 0, (row,) * 200, staleness)
    header = wire.encode(Envelope(1, RUN, "shard-0", 1, "controller", report))
    assert len(header) <= 64 << 10
    assert msgspec.msgpack.decode(header)
