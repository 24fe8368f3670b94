"""dbctl/transport/doors.py, porch.py, curve.py over real sockets: who gets in, who does not (G12).

Between hosts identity is the key, on every message, by the list now in force (docs/reliability.md).
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from linked import RUN, WAIT_S, arrive, push, until
from tcp_linked import HOST, Delay, Net, Outsider, Proxy, net, raw, settled, wait_for

from dbctl.envelope import Inline
from dbctl.errors import LaunchError, PeerError
from dbctl.keys import Tcp
from dbctl.roles.base import PlainBuffer, View
from dbctl.transport.curve import Guard, make_keys
from dbctl.transport.link import Link
from dbctl.transport.memory import SharedBuffer
from dbctl.transport.porch import MOST_WAITING
from dbctl.wire import Ack, Boxes, Fetch, Grant, Halt, Message, Need, Params, Peer, Push
from dbctl.wire_processes import Beat, Lease

__all__ = ["net"]  # a fixture

FETCH = Fetch(1, 7, 0, 0)
MIB = 1 << 20


# ---------------------------------------------------------------- those who may


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("encrypted", [True, False])
def test_there_and_back(address: str, encrypted: bool) -> None:
    net = Net(address=address, encrypted=encrypted)
    shard, worker = net.pair()
    assert address in shard.tcp_endpoint
    worker.send("shard-0", FETCH)
    assert arrive(shard) == [(Peer("worker-0.0", 1), FETCH)]
    shard.send("worker-0.0", Ack(1, 7, 3))
    assert arrive(worker) == [(Peer("shard-0", 1), Ack(1, 7, 3))]
    assert shard.counts == worker.counts == {}
    net.close()


def test_shared_memory_goes_in_pieces_to_another_host_and_by_name_to_the_same(
    net: Net, tmp_path: Path
) -> None:
    """One link holds both kinds of connections at once and chooses by where the peer is."""
    tmp_path.chmod(0o700)
    buffer = SharedBuffer(3 * MIB // 4, "<f4")
    buffer.array[:] = np.arange(len(buffer.array))
    shard, far = net.pair(allow=None)
    near_shard = Link(
        run=RUN,
        node="shard-1",
        incarnation=1,
        listen=f"ipc://{tmp_path}/shard-1",
        on_trouble=net.said.append,
    ).start()
    net.links.append(near_shard)
    far.connect("shard-1", 1, near_shard.endpoint)
    for to in ("shard-0", "shard-1"):
        far.send(to, push(View(buffer, 0, len(buffer.array))))
    [(_, over_tcp)], [(_, over_ipc)] = arrive(shard), arrive(near_shard)
    for message in (over_tcp, over_ipc):
        assert isinstance(message, Push)
        np.testing.assert_array_equal(message.payload, buffer.array)
    buffer.array[0] = -1
    assert over_ipc.payload[0] == -1, "the sender's memory"
    assert over_tcp.payload[0] == 0, "of one's own"
    # A shard answers where it was asked, and knows that its asker maps nothing of it.
    shard.send("worker-0.0", Params(1, 1, 1, 0, 0, 0, View(buffer, 0, 10)))
    [(_, answer)] = arrive(far)
    assert answer.payload[0] == -1
    assert net.said == []
    buffer.close()


def test_what_a_far_controller_is_sent_goes_in_pieces_too(net: Net) -> None:
    buffer = SharedBuffer(10, "<f4")
    link = net.link("shard-0", knows=[], far=["controller"])
    packed = link._packer.pack("controller", push(View(buffer, 0, 10)))
    assert len(packed[0]) == 2
    assert len(link._packer.pack("worker-0.0", push(View(buffer, 0, 10)))[0]) == 1
    link.replace_keys(net.rows(("worker-0.0", 1)))
    for to in ("controller", "worker-0.0"):
        assert len(link._packer.pack(to, push(View(buffer, 0, 10)))[0]) == 2
    buffer.close()


# ---------------------------------------------------------------- those who may not


def outsider(net: Net, shard: Link, keys: tuple[str, str] | None) -> Outsider:
    return Outsider(shard.tcp_endpoint, keys=keys, server_key=net.keys[Peer("shard-0", 1)][0])


def no_key(net: Net, shard: Link) -> Outsider:
    return outsider(net, shard, None)


def unknown_key(net: Net, shard: Link) -> Outsider:
    return outsider(net, shard, make_keys())


def old_key(net: Net, shard: Link) -> Outsider:
    shard.replace_keys(net.rows(("worker-0.0", 2), ("worker-1.0", 1)))
    settled(shard)
    return outsider(net, shard, net.keys[Peer("worker-0.0", 1)])


def wrong_server_key(net: Net, shard: Link) -> Outsider:
    keys = net.keys[Peer("worker-0.0", 1)]
    return Outsider(shard.tcp_endpoint, keys=keys, server_key=make_keys()[0])


STRANGERS: dict[str, tuple[Callable[[Net, Link], Outsider], str, str]] = {
    # Which end sees first that they do not speak alike decides the words after that.
    "no key": (no_key, "handshake", "refused a connection from "),
    "unknown key": (unknown_key, "key", "127.0.0.1 came with a key of nobody in this run"),
    "old key": (old_key, "key", "127.0.0.1 came with the old key of worker-0.0#1"),
    "wrong server key": (wrong_server_key, "handshake", "it does not have this node's key"),
}


@pytest.mark.parametrize("name", list(STRANGERS))
def test_a_stranger_is_neither_heard_nor_told(net: Net, name: str) -> None:
    """G12: it writes nothing, reads nothing, and is refused in one line."""
    come, kind, words = STRANGERS[name]
    shard = net.link("shard-0", knows=["worker-0.0", "worker-1.0"])
    with come(net, shard) as stranger:
        for _ in range(5):
            stranger.say(FETCH)
        wait_for(shard, kind)
        other = net.link("worker-1.0", knows=["shard-0"])
        other.connect("shard-0", 1, shard.tcp_endpoint)
        other.send("shard-0", FETCH)
        assert arrive(shard) == [(other.me, FETCH)], "who may gets in meanwhile"
        shard.send("worker-0.0", Ack(1, 1, 1))
        assert not stranger.hears()
        assert shard.receive(0) == []
    lines = [line for line in net.said if "no way to worker-0.0" not in line]
    assert any(words in line for line in lines)
    # It comes again and again, and one that has hung up by then has no address any more.
    assert len(lines) <= 3
    assert all(line.startswith("shard-0: ") for line in lines)


def test_another_name_than_ones_own_is_refused(net: Net) -> None:
    """A valid replica's key with another node's name, or another life's (libzmq knows neither)."""
    shard, worker = net.pair()
    with outsider(net, shard, net.keys[worker.me]) as liar:
        for claim in ({"sender": "worker-1.0"}, {"incarnation": 2}, {"sender": "controller"}):
            liar.say(FETCH, **claim)
        wait_for(shard, "identity", 3)
        liar.say(FETCH)
        assert arrive(shard) == [(worker.me, FETCH)]
    assert shard.counts == {"identity": 3}
    assert [line for line in net.said if "worker-0.0#1 says that it is worker-1.0#1" in line]


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_life_that_is_over_is_not_heard_on_the_connection_it_has(encrypted: bool) -> None:
    """G6: ZAP looks only at handshakes; this one was long ago."""
    net = Net(encrypted=encrypted)
    shard, worker = net.pair()
    worker.send("shard-0", FETCH)
    arrive(shard)
    shard.replace_keys(net.rows(("worker-0.0", 2), ("worker-1.0", 1)))
    settled(shard)
    worker.send("shard-0", FETCH)
    wait_for(shard, "revoked")
    assert shard.receive(0) == []
    reborn = net.link("worker-0.0", 2, knows=["shard-0"])
    reborn.connect("shard-0", 1, shard.tcp_endpoint)
    reborn.send("shard-0", FETCH)
    assert arrive(shard) == [(reborn.me, FETCH)]
    net.close()


def test_forget_takes_the_key_too(net: Net) -> None:
    shard, worker = net.pair()
    worker.send("shard-0", FETCH)
    arrive(shard)
    shard.forget(worker.me)
    settled(shard)
    worker.send("shard-0", FETCH)
    wait_for(shard, "revoked")
    with outsider(net, shard, net.keys[worker.me]) as again:
        again.say(FETCH)
        wait_for(shard, "key")
    assert shard.receive(0) == []


def test_whoever_was_connected_to_says_only_its_own(net: Net) -> None:
    """A shard is a peer like any other: what it claims to a worker is checked as well."""
    shard, worker = net.pair(allow=None)
    worker.send("shard-0", FETCH)
    arrive(shard)
    shard._packer.me = Peer("shard-1", 1)
    shard.send("worker-0.0", Ack(1, 1, 1))
    wait_for(worker, "identity")
    shard._packer.me = shard.me
    worker.replace_keys(())
    settled(worker)
    shard.send("worker-0.0", Ack(1, 1, 1))
    wait_for(worker, "revoked")
    assert worker.receive(0) == []


@pytest.mark.parametrize(
    "message",
    [Grant(1, 1_000), Halt(False), Ack(1, 1, 1), Params(1, 1, 1, 0, 0, 0), Need(1, "x", 0)],
    ids=lambda message: type(message).__name__,
)
def test_a_replicas_key_is_not_good_for_what_a_replica_may_not_say(net: Net, message: Any) -> None:
    shard, worker = net.pair()
    worker.send("shard-0", message)
    wait_for(shard, "role")
    assert shard.receive(0) == []
    worker.send("shard-0", FETCH)
    assert arrive(shard) == [(worker.me, FETCH)]
    assert len(net.said) == 1


def test_what_is_refused_does_not_become_the_way_to_answer(net: Net) -> None:
    """Else one forbidden word of who has a replica's key would bring it that replica's answers."""
    shard = net.link("shard-0", knows=["worker-0.0"])
    with outsider(net, shard, net.keys[Peer("worker-0.0", 1)]) as liar:
        for message in (Grant(1, 1_000), Lease(1)):
            liar.say(message)
        liar.say(FETCH, to="worker-1.0")
        wait_for(shard, "role", 2)
        wait_for(shard, "misaddressed")
        # The replica itself has not come yet: there is no other way that would hide this one.
        shard.send("worker-0.0", Ack(1, 7, 3))
        settled(shard)
        assert not liar.hears()
        liar.say(FETCH)
        assert arrive(shard) == [(Peer("worker-0.0", 1), FETCH)]
        shard.send("worker-0.0", Ack(1, 7, 3))
        assert liar.hears(), "it has the key: what it may say is heard"


def test_a_stolen_key_does_not_bring_the_answers_while_its_owner_speaks(net: Net) -> None:
    """It may speak as that replica, and hears no parameters for it."""
    shard, worker = net.pair()
    with outsider(net, shard, net.keys[worker.me]) as thief:
        for number in range(1, 4):
            for say in (partial(worker.send, "shard-0"), thief.say):
                say(FETCH)
                assert arrive(shard) == [(worker.me, FETCH)]
            shard.send("worker-0.0", Ack(1, number, 3))
            assert arrive(worker) == [(Peer("shard-0", 1), Ack(1, number, 3))]
        assert not thief.hears()


def test_it_relays_nothing_for_another_host(net: Net) -> None:
    shard, worker = net.pair()
    with outsider(net, shard, net.keys[worker.me]) as liar:
        liar.say(FETCH, to="worker-1.0")
        wait_for(shard, "misaddressed")


# ---------------------------------------------------------------- floods


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + b"\x00" + bytes(31)


def silent(endpoint: str, at_end: ExitStack) -> None:
    for _ in range(200):
        at_end.enter_context(raw(endpoint))


def noise(endpoint: str, at_end: ExitStack) -> None:
    for _ in range(50):
        at_end.enter_context(raw(endpoint)).sendall(os.urandom(2_000))


def oversize(endpoint: str, at_end: ExitStack) -> None:
    for _ in range(50):
        line = at_end.enter_context(raw(endpoint))
        line.sendall(GREETING + b"\x06" + (2 << 30).to_bytes(8, "big") + bytes(1_000))


def endless(endpoint: str, at_end: ExitStack) -> None:
    """Frames of the greatest size that is taken, never finished."""
    for _ in range(150):
        line = at_end.enter_context(raw(endpoint))
        line.settimeout(0.05)
        try:
            line.sendall(GREETING + b"\x06" + MIB.to_bytes(8, "big"))
            for _ in range(15):
                line.sendall(bytes(MIB // 16))
        except OSError:
            continue


def insist(worker: Link, shard: Link) -> tuple[Peer, Message]:
    """Says it again until it is heard, as roles do: of a crowd one is hung up as it comes in."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        worker.send(shard.me.node, FETCH)
        got = [x for x in shard.receive(0.25) if not isinstance(x[1], Beat)]
        if got:
            return got[0]
    raise AssertionError("it was never heard")


@pytest.mark.parametrize("flood", [silent, noise, oversize, endless])
def test_a_flood_costs_little_and_keeps_nobody_out(
    net: Net, flood: Callable[[str, ExitStack], None]
) -> None:
    """G12: less than 64 MiB. Without HANDSHAKE_IVL 120 silent connections kept a client out."""
    shard = net.link("shard-0", knows=["worker-0.0"])
    gc.collect()
    before = rss_bytes()
    with ExitStack() as at_end:
        flood(shard.tcp_endpoint, at_end)
        began = time.monotonic()
        worker = net.link("worker-0.0", knows=["shard-0"])
        worker.connect("shard-0", 1, shard.tcp_endpoint)
        assert insist(worker, shard) == (worker.me, FETCH)
        assert time.monotonic() - began < 4.0
        assert rss_bytes() - before < 64 * MIB
        wait_for(shard, "handshake", 30)
    assert 1 <= len(net.said) < 8, "a flood is not a flood of lines"
    assert all("refused a connection from " in line for line in net.said)
    assert rss_bytes() - before < 64 * MIB


def test_a_crowd_of_replicas_on_a_slow_line_comes_in(net: Net) -> None:
    """A handshake is two round trips of 0.12 s; and what each says first is heard: it says it once.

    When whoever took longer than 0.25 s was hung up for a newcomer, none of 40 ever came in.
    """
    names = [f"worker-{replica}.0" for replica in range(40)]
    shard = net.link("shard-0", knows=names)
    workers = [net.link(name, knows=["shard-0"], reach_s=10.0) for name in names]
    with ExitStack() as at_end:
        line = Delay(shard.tcp_endpoint, delay_s=0.06)
        at_end.callback(line.close)
        for worker in workers:
            worker.connect("shard-0", 1, line.endpoint)
            worker.send("shard-0", FETCH)
        heard: set[str] = set()
        deadline = time.monotonic() + 10.0
        while len(heard) < len(names) and time.monotonic() < deadline:
            heard |= {peer.node for peer, _ in shard.receive(0.1)}
        assert len(heard) == len(names), f"{len(heard)} in; {dict(shard.counts)}"


def test_connections_that_say_nothing_take_few_descriptors(net: Net) -> None:
    """Else some thousand of them leave none for a shard's own files, and end it."""
    shard = net.link("shard-0", knows=["worker-0.0"])
    worker = net.link("worker-0.0", knows=["shard-0"])
    worker.connect("shard-0", 1, shard.tcp_endpoint)
    worker.send("shard-0", FETCH)
    assert arrive(shard) == [(worker.me, FETCH)]
    before = len(os.listdir("/proc/self/fd"))
    with ExitStack() as at_end:
        for _ in range(300):
            at_end.enter_context(raw(shard.tcp_endpoint))
        until(lambda: len(os.listdir("/proc/self/fd")) - before <= 300 + MOST_WAITING)
        worker.send("shard-0", FETCH)
        assert arrive(shard) == [(worker.me, FETCH)], "who is in stays in"
    assert shard.counts["handshake"] >= 300 - MOST_WAITING
    assert "more than 16 connections begin at once" in net.said[0]


def test_a_replica_that_just_came_in_is_not_hung_up_for_strangers_of_its_address(net: Net) -> None:
    shard = net.link("shard-0", knows=["worker-0.0"])
    with ExitStack() as at_end:
        for i in range(120):
            at_end.enter_context(raw(shard.tcp_endpoint))
            if i == 60:
                worker = net.link("worker-0.0", knows=["shard-0"])
                worker.connect("shard-0", 1, shard.tcp_endpoint)
                worker.send("shard-0", FETCH)
                assert arrive(shard) == [(worker.me, FETCH)]
                known = list(shard._switch._routes._callers)
        until(lambda: shard.counts["handshake"] >= 120 - MOST_WAITING)
        worker.send("shard-0", FETCH)
        assert arrive(shard) == [(worker.me, FETCH)]
        assert known == list(shard._switch._routes._callers), "by the same connection"


def test_each_stranger_is_told_of_whoever_came_before(net: Net) -> None:
    shard = net.link("shard-0", knows=["worker-0.0"])
    with unknown_key(net, shard) as first:
        first.say(FETCH)
        wait_for(shard, "key")
    shard.replace_keys(net.rows(("worker-0.0", 2)))
    settled(shard)
    with outsider(net, shard, net.keys[Peer("worker-0.0", 1)]) as second:
        second.say(FETCH)
        wait_for(shard, "key", 2)
    assert ["nobody in this run" in line for line in net.said] == [True, False]
    assert "the old key of worker-0.0#1" in net.said[1]


def test_a_known_replica_cannot_flood_memory_either(net: Net) -> None:
    """Payloads that are begun and never finished, by who has a key: bounded by assembly_bytes."""
    shard, worker = net.pair(assembly_bytes=8 * MIB)
    worker.send("shard-0", FETCH)
    arrive(shard)
    before = rss_bytes()
    with outsider(net, shard, net.keys[worker.me]) as hostile:
        piece = bytes(MIB)
        for serial in range(100):
            inline = Inline(serial, 0, 8, 2 * MIB, "<f4")
            hostile.say(push(None), piece, payload=inline)
        hostile.say(FETCH)
        assert arrive(shard) == [(worker.me, FETCH)]
    assert rss_bytes() - before < 64 * MIB


# ---------------------------------------------------------------- what an eavesdropper sees


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_capture_holds_no_parameters_unless_encryption_is_off(encrypted: bool) -> None:
    net = Net(encrypted=encrypted)
    shard = net.link("shard-0", knows=["worker-0.0"])
    proxy = Proxy(shard.tcp_endpoint)
    worker = net.link("worker-0.0", knows=["shard-0"])
    worker.connect("shard-0", 1, proxy.endpoint)
    buffer = SharedBuffer(1 << 16, "<f4")
    buffer.array[:] = np.random.default_rng(3).normal(size=len(buffer.array))
    worker.send("shard-0", push(View(buffer, 0, len(buffer.array))))
    arrive(shard)
    shard.send("worker-0.0", Params(1, 1, 1, 0, 0, 0, View(buffer, 0, len(buffer.array))))
    arrive(worker)
    captured = proxy.seen
    assert len(captured) > 2 * buffer.size_bytes, "both ways went through the proxy"
    secret = buffer.array.tobytes()
    runs = {secret[at : at + 16] for at in range(0, len(secret), 16)}
    found = sum(captured[at : at + 16] in runs for at in range(len(captured) - 15))
    assert (found > 0) == (not encrypted)
    assert (b"shard-0" in captured) == (not encrypted)
    net.close()
    proxy.close()
    buffer.close()


# ---------------------------------------------------------------- who cannot get through


def fails(link: Link, within_s: float = 6.0) -> str:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            link.receive(0.2)
        except PeerError as error:
            link.receive(0)  # once: the node can still say why it ends
            return str(error)
    raise AssertionError(f"no error within {within_s} s")


def test_a_refused_node_says_who_refuses_it(net: Net) -> None:
    shard = net.link("shard-0", knows=[])
    worker = net.link("worker-0.0", knows=["shard-0"])
    worker.connect("shard-0", 1, shard.tcp_endpoint)
    assert fails(worker) == f"shard-0#1: refuses our key ({shard.tcp_endpoint})"
    assert shard.counts["key"] > 1, "it was tried again meanwhile"


def test_a_key_that_is_told_late_is_in_time(net: Net) -> None:
    """A restarted worker may know of a shard before the shard knows of it."""
    shard = net.link("shard-0", knows=[])
    worker = net.link("worker-0.0", knows=["shard-0"], reach_s=5.0)
    worker.connect("shard-0", 1, shard.tcp_endpoint)
    worker.send("shard-0", FETCH)
    wait_for(shard, "key")
    shard.replace_keys(net.rows(("worker-0.0", 1)))
    assert arrive(shard) == [(worker.me, FETCH)]


def test_a_wrong_server_key_is_an_error_in_bounded_time(net: Net) -> None:
    shard = net.link("shard-0", knows=["worker-0.0"])
    mistaken = (("shard-0", 1, make_keys()[0]),)
    worker = net.link("worker-0.0", knows=[], tcp=net.tcp("worker-0.0", knows=mistaken))
    worker.connect("shard-0", 1, shard.tcp_endpoint)
    assert "shard-0#1: breaks off the handshake: it has another key" in fails(worker)


def test_nobody_there_is_an_error_in_bounded_time(net: Net) -> None:
    with raw_listener() as endpoint:
        pass
    worker = net.link("worker-0.0", knows=["shard-0"])
    worker.connect("shard-0", 1, endpoint)
    assert fails(worker) == f"shard-0#1: cannot be reached ({endpoint})"


def test_a_listener_that_says_nothing_is_an_error_in_bounded_time(net: Net) -> None:
    with raw_listener() as endpoint:
        worker = net.link("worker-0.0", knows=["shard-0"])
        worker.connect("shard-0", 1, endpoint)
        assert "shard-0#1: " in fails(worker)


def test_a_peer_that_was_reached_and_died_is_no_error_of_this_node(net: Net) -> None:
    """Who is dead is for the controller to see, by beats and leases."""
    shard, worker = net.pair()
    worker.send("shard-0", FETCH)
    arrive(shard)
    shard.close(0.0)
    deadline = time.monotonic() + 2.5
    while time.monotonic() < deadline:
        assert worker.receive(0.1) == []


def test_who_is_not_in_the_list_is_not_connected_to(net: Net) -> None:
    worker = net.link("worker-0.0", knows=["shard-0"])
    worker.connect("shard-1", 1, "tcp://127.0.0.1:9")
    wait_for(worker, "endpoint")
    assert "not in the list of keys" in net.said[0]
    plain = Link(run=RUN, node="x", incarnation=1, listen=None, on_trouble=net.said.append)
    net.links.append(plain.start())
    plain.connect("shard-1", 1, "tcp://127.0.0.1:9")
    wait_for(plain, "endpoint")


class raw_listener:
    """Accepts in the kernel and says nothing."""

    def __enter__(self) -> str:
        import socket

        self.socket = socket.create_server((HOST, 0))
        return f"tcp://{HOST}:{self.socket.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self.socket.close()


# ---------------------------------------------------------------- secrets, mutants


def test_a_secret_is_in_no_text() -> None:
    public, secret = make_keys()
    tcp = Tcp(address=HOST, public=public, secret=secret, keys=(("shard-0", 1, public),))
    for text in (repr(tcp), str(tcp), f"{tcp}", repr([tcp])):
        assert secret not in text


def bare_curve(socket: Any, tcp: Tcp, *, server_key: str) -> None:
    """Encryption as in sockets.py, without ZAP's domain."""
    assert not server_key
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, tcp.secret.encode())


def test_mutant_without_zap_is_caught(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/reliability.md, section 3: CURVE alone lets any key in."""
    monkeypatch.setattr("dbctl.transport.sockets._configure_tcp", bare_curve)
    monkeypatch.setattr("dbctl.transport.sockets.ZAP_ENDPOINT", "inproc://nobody")
    shard = net.link("shard-0", knows=["worker-0.0"])
    with unknown_key(net, shard) as stranger:
        stranger.say(FETCH)
        wait_for(shard, "revoked")  # it is in, and every message of it is refused all the same
    assert shard.counts == {"revoked": 1}, "nobody was refused at the door"


def test_mutant_with_a_handler_of_no_domain_lets_nobody_in(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dbctl.transport.sockets.ZAP_DOMAIN", b"other")
    shard = net.link("shard-0", knows=["worker-0.0"])
    with outsider(net, shard, net.keys[Peer("worker-0.0", 1)]) as known:
        known.say(FETCH)
        wait_for(shard, "key")
    assert shard.receive(0) == []


def test_mutant_without_the_check_of_each_message_is_caught(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Guard, "check", lambda *_, **__: None)
    shard, worker = net.pair()
    with outsider(net, shard, net.keys[worker.me]) as liar:
        liar.say(FETCH, sender="worker-1.0")
        assert arrive(shard) == [(Peer("worker-1.0", 1), FETCH)], "the lie was believed"


def test_no_address_but_ones_own(net: Net) -> None:
    for address in ("0.0.0.0", "::", "*", "localhost", "192.0.2.1"):
        with pytest.raises(LaunchError, match="shard-0 cannot listen on tcp://"):
            net.link("shard-0", knows=[], tcp=Tcp(address=address))


def test_boxes_of_a_partner_come_over_tcp(net: Net) -> None:
    one = net.link("worker-0.0", knows=["worker-0.1"])
    two = net.link("worker-0.1", knows=["worker-0.0"])
    one.connect("worker-0.1", 1, two.tcp_endpoint)
    two.connect("worker-0.0", 1, one.tcp_endpoint)
    buffer = PlainBuffer(5, "<f4")
    for link, to in ((one, "worker-0.1"), (two, "worker-0.0")):
        link.send(to, Boxes(1, "states", 0, View(buffer, 0, 5)))
    for link in (one, two):
        [(_, message)] = arrive(link)
        assert isinstance(message, Boxes)
    until(lambda: one.counts == two.counts == {})
