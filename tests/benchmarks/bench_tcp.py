"""How fast 4 MB payloads go over tcp, with and without CURVE, beside plain pyzmq.

    python tests/benchmarks/bench_tcp.py [--seconds 1] [--rounds 5]

Two processes on one host and the loopback. `pyzmq`: a DEALER sends the payload to a ROUTER in
messages of 1 MiB, which are thrown away; `link`: a worker pushes, the shard's link checks who sent
each piece, puts them together and hands the array over. Both have two payloads under way, and wait
for an acknowledgement of each. Medians of rounds in which the ways take turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import zmq

from dbctl.keys import Tcp
from dbctl.roles.base import View
from dbctl.transport.curve import make_keys
from dbctl.transport.link import Link
from dbctl.transport.memory import allocate
from dbctl.wire import Ack, Finish, Position, Push

N_ELEMENTS = 1 << 20
PAYLOAD_BYTES = 4 * N_ELEMENTS
PIECE_BYTES = 1 << 20
WINDOW = 2
Keys = tuple[str, str]
NO_KEYS: Keys = ("", "")


def curve(socket: Any, own: Keys, server_key: str = "") -> None:
    if own == NO_KEYS:
        return
    socket.curve_publickey, socket.curve_secretkey = (key.encode() for key in own)
    if server_key:
        socket.curve_serverkey = server_key.encode()
    else:
        socket.curve_server = True


def plain_server(pipe: Connection, own: Keys, _: str) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    curve(socket, own)
    socket.bind("tcp://127.0.0.1:0")
    pipe.send(socket.last_endpoint.decode())
    received = 0
    while True:
        route, data = socket.recv_multipart(copy=False)
        if len(data) == 0:
            break
        received += len(data)
        if received == PAYLOAD_BYTES:
            received = 0
            socket.send_multipart([route.bytes, b"ack"])
    context.destroy(linger=0)


def plain_client(endpoint: str, own: Keys, server_key: str) -> tuple[Callable[[], None], Any]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    curve(socket, own, server_key)
    socket.connect(endpoint)
    data = memoryview(allocate(N_ELEMENTS, "<f4").array).cast("B")
    under_way = [0]

    def transfer() -> None:
        for at in range(0, PAYLOAD_BYTES, PIECE_BYTES):
            socket.send(data[at : at + PIECE_BYTES])
        under_way[0] += 1
        if under_way[0] == WINDOW:
            socket.recv()
            under_way[0] -= 1

    def close() -> None:
        socket.send(b"")
        context.destroy(linger=1000)

    return transfer, close


def link_server(pipe: Connection, own: Keys, other: str) -> None:
    tcp = Tcp(address="127.0.0.1", public=own[0], secret=own[1], keys=(("worker-0.0", 1, other),))
    with Link(run="bench", node="shard-0", incarnation=1, listen=None, tcp=tcp) as link:
        pipe.send(link.tcp_endpoint)
        while True:
            for peer, message in link.receive(None):
                if isinstance(message, Finish):
                    return
                assert isinstance(message, Push)
                link.send(peer.node, Ack(1, message.seq, 0))


def link_client(endpoint: str, own: Keys, server_key: str) -> tuple[Callable[[], None], Any]:
    tcp = Tcp(public=own[0], secret=own[1], keys=(("shard-0", 1, server_key),))
    link = Link(run="bench", node="worker-0.0", incarnation=1, listen=None, tcp=tcp).start()
    link.connect("shard-0", 1, endpoint)
    slots = [allocate(N_ELEMENTS, "<f4") for _ in range(WINDOW)]
    state = {"seq": 0, "acked": 0}

    def transfer() -> None:
        state["seq"] += 1
        view = View(slots[state["seq"] % WINDOW], 0, N_ELEMENTS)
        link.send("shard-0", Push(1, state["seq"], 0, 0, 1, Position(), 0, 0, view))
        while state["seq"] - state["acked"] >= WINDOW:
            state["acked"] += len(link.receive(10.0))

    def close() -> None:
        link.send("shard-0", Finish())
        link.close()

    return transfer, close


class Way:
    def __init__(self, server: Any, client: Any, *, encrypted: bool) -> None:
        keys = [make_keys() if encrypted else NO_KEYS for _ in range(2)]
        here, there = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=server, args=(there, keys[0], keys[1][0])
        )
        self._process.start()
        self.transfer, self._close = client(here.recv(), keys[1], keys[0][0])
        self.transfer()

    def rate(self, seconds: float) -> float:
        """Megabytes a second."""
        start, n = time.perf_counter(), 0
        while (taken := time.perf_counter() - start) < seconds:
            self.transfer()
            n += 1
        return n * PAYLOAD_BYTES / taken / 1e6

    def close(self) -> None:
        self._close()
        self._process.join(5.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ways = {
        "pyzmq tcp": Way(plain_server, plain_client, encrypted=False),
        "link tcp": Way(link_server, link_client, encrypted=False),
        "pyzmq curve": Way(plain_server, plain_client, encrypted=True),
        "link curve": Way(link_server, link_client, encrypted=True),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            found[name].append(way.rate(options.seconds))
    for name, rates in found.items():
        print(f"{name:<14}{statistics.median(rates):>8.0f} MB/s")
    for kind in ("tcp", "curve"):
        ratio = statistics.median(
            link / plain
            for link, plain in zip(found[f"link {kind}"], found[f"pyzmq {kind}"], strict=True)
        )
        print(f"link : pyzmq, {kind:<6}{ratio:>8.2f}")
    for way in ways.values():
        way.close()


if __name__ == "__main__":
    main()
