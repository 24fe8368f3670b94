"""dbctl/transport/switch.py: relay, beats and leases, and what is not believed of a frame."""

from __future__ import annotations

import os
import pickle
import resource
import socket as unix
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from linked import RUN, WAIT_S, Make, Stranger, arrive, folder, make, pair, push, until

from dbctl.envelope import PROTOCOL_VERSION, Envelope, Inline, Shared, encode
from dbctl.keys import Tcp
from dbctl.roles.base import View
from dbctl.transport.link import Link
from dbctl.transport.memory import SharedBuffer
from dbctl.wire import Ack, Fetch, Message, Params, Peer
from dbctl.wire_processes import Beat, Lease

__all__ = ["folder", "make"]  # fixtures


# ---------------------------------------------------------------- agent and controller


def cluster(make: Make, **rest: Any) -> tuple[Link, Link, Link]:
    agent = make("agent-0", relay=True, **rest)
    controller = make("controller", listens=False, **rest)
    controller.connect("agent-0", 1, agent.endpoint)
    worker = make("worker-0.0", keeper="agent-0", keeper_endpoint=agent.endpoint, **rest)
    return agent, controller, worker


def no_more_descriptors() -> bool:
    """ZeroMQ, which ends a process that has none left for a connection, has made all of them."""
    before = os.listdir("/proc/self/fd")
    time.sleep(0.2)
    return os.listdir("/proc/self/fd") == before


def test_beats_need_no_descriptor(make: Make) -> None:
    """Strangers may have taken all that a process may have; the first beat after that ended it."""
    _, controller, worker = cluster(make, beat_s=0.02)
    controller.answer_beats = True
    controller.send("agent-0", Lease(0))
    until(lambda: worker.lease_until > time.monotonic() + 9.0)
    until(no_more_descriptors)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = os.dup(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 1, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        before = worker.lease_until
        until(lambda: worker.lease_until > before + 0.2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(taken)


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
    header = encode(Envelope(PROTOCOL_VERSION, RUN, "x", 1, "shard-0", Params(1, 1, 1, 1, 1, 1)))
    at = header.rindex(b"\xc0\xc0")
    return header[:at] + b"\x91" * depth + header[at:]


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (os.environ["DBCTL_TEST_BOMB"],)


def hostile() -> dict[str, tuple[str, Callable[[Stranger], None]]]:
    good = encode(Envelope(PROTOCOL_VERSION, RUN, "x", 1, "shard-0", ACK))
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
        "version": ("version", lambda s: s.say(ACK, version=PROTOCOL_VERSION + 1)),
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
def test_it_is_dropped_and_said_in_few_lines(
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
    assert 1 <= len(said) <= (17 if name == "random" else 2)
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
    good = encode(
        Envelope(PROTOCOL_VERSION, RUN, "x", 1, "shard-0", push(None), Inline(1, 0, 1, 4, "<f4"))
    )
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
    until(lambda: shard.counts == {"role": 1})


def test_memory_of_another_host_is_refused(folder: Path, make: Make) -> None:
    """Over tcp a pid means nothing here."""
    tcp = Tcp(address="127.0.0.1", keys=(("worker-0.0", 1, ""),))
    link = Link(run=RUN, node="shard-0", incarnation=1, listen=None, tcp=tcp)
    buffer = SharedBuffer(10, "<f4")
    with link:
        worker = make("worker-0.0", tcp=Tcp(keys=(("shard-0", 1, ""),)))
        worker._packer.far = frozenset()
        worker.connect("shard-0", 1, link.tcp_endpoint)
        worker.send("shard-0", push(View(buffer, 0, 10)))
        until(lambda: link.counts == {"payload": 1})
    buffer.close()
