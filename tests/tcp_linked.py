"""What the tests of TCP share: links of hosts that are all this one, and strangers with sockets.

A stranger's ZeroMQ sockets have a context of their own; what it says is as raw as it likes.
"""

from __future__ import annotations

import selectors
import socket as network
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import zmq
from linked import RUN

from dbctl.envelope import PROTOCOL_VERSION, Envelope, encode
from dbctl.keys import KeyRow, Tcp
from dbctl.rights import Rights
from dbctl.transport.curve import make_keys
from dbctl.transport.link import Link
from dbctl.wire import Peer

HOST = "127.0.0.1"


class Net:
    """Makes links that talk over TCP, each told of the keys of some others. Ends them all."""

    def __init__(self, *, encrypted: bool = True, address: str = HOST) -> None:
        self.encrypted = encrypted
        self.address = address
        self.keys: dict[Peer, tuple[str, str]] = defaultdict(
            make_keys if encrypted else lambda: ("", "")
        )
        self.said: list[str] = []
        self.links: list[Link] = []

    def rows(self, *lives: tuple[str, int]) -> tuple[KeyRow, ...]:
        return tuple((*life, self.keys[Peer(*life)][0]) for life in lives)

    def tcp(self, node: str, incarnation: int = 1, *, knows: tuple[KeyRow, ...] = ()) -> Tcp:
        public, secret = self.keys[Peer(node, incarnation)]
        return Tcp(address=self.address, public=public, secret=secret, keys=knows)

    def link(self, node: str, incarnation: int = 1, *, knows: list[str], **rest: Any) -> Link:
        """A link of that life, which knows first lives of nodes, or `node#n`."""
        lives = [(name.partition("#")[0], int(name.partition("#")[2] or "1")) for name in knows]
        given = {
            "run": RUN,
            "on_trouble": self.said.append,
            "allow": Rights(node, partners=[n for n in knows if n.startswith("worker")]).may,
            "reach_s": 1.0,
            "tcp": self.tcp(node, incarnation, knows=self.rows(*lives)),
        }
        link = Link(node=node, incarnation=incarnation, listen=None, **(given | rest))
        self.links.append(link)
        return link.start()

    def pair(self, **rest: Any) -> tuple[Link, Link]:
        """A shard, and a worker that is connected to it."""
        shard = self.link("shard-0", knows=["worker-0.0", "worker-1.0"], **rest)
        worker = self.link("worker-0.0", knows=["shard-0"], **rest)
        worker.connect("shard-0", 1, shard.tcp_endpoint)
        return shard, worker

    def close(self) -> None:
        for link in self.links:
            link.close(0.0)


@pytest.fixture
def net() -> Iterator[Net]:
    net = Net()
    yield net
    net.close()


class Outsider:
    """A raw DEALER with any keys, or none."""

    def __init__(self, endpoint: str, *, keys: tuple[str, str] | None, server_key: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IPV6, 1)
        if keys is not None:
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys[0].encode())
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys[1].encode())
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
        self.socket.connect(endpoint)

    def __enter__(self) -> Outsider:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)

    def say(self, message: Any, *more: bytes, **changes: Any) -> None:
        given = {
            "version": PROTOCOL_VERSION,
            "run": RUN,
            "sender": "worker-0.0",
            "incarnation": 1,
            "to": "shard-0",
        }
        self.socket.send_multipart([encode(Envelope(message=message, **(given | changes))), *more])

    def hears(self, wait_s: float = 0.2) -> bool:
        return bool(self.socket.poll(1000 * wait_s))


def raw(endpoint: str) -> network.socket:
    """A TCP connection to `endpoint`, of which nothing is said yet."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    line = network.create_connection((host.strip("[]"), int(port)), timeout=5.0)
    line.setsockopt(network.IPPROTO_TCP, network.TCP_NODELAY, 1)
    return line


class Proxy:
    """Stands between two nodes and keeps every byte that goes either way."""

    def __init__(self, endpoint: str) -> None:
        self._target = endpoint
        self._listener = network.create_server((HOST, 0))
        self.endpoint = f"tcp://{HOST}:{self._listener.getsockname()[1]}"
        self._bytes: list[bytes] = []
        self._threads: list[threading.Thread] = []
        self._open: list[network.socket] = []
        self._start(self._accept)

    @property
    def seen(self) -> bytes:
        return b"".join(self._bytes)

    def close(self) -> None:
        self._listener.shutdown(network.SHUT_RDWR)
        self._listener.close()
        for end in self._open:
            end.close()
        for thread in self._threads:
            thread.join()

    def _start(self, target: Any, *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = raw(self._target)
            self._open += [near, far]
            self._start(self._copy, near, far)
            self._start(self._copy, far, near)

    def _copy(self, source: network.socket, target: network.socket) -> None:
        source.settimeout(0.1)
        with ExitStack() as at_end:
            at_end.callback(target.close)
            while True:
                try:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    self._bytes.append(data)
                    target.sendall(data)
                except TimeoutError:
                    continue
                except OSError:
                    return


class Delay:
    """Stands between nodes: whatever goes either way, also an end, comes `delay_s` later."""

    def __init__(self, endpoint: str, *, delay_s: float) -> None:
        self._target, self._delay_s = endpoint, delay_s
        self._listener = network.create_server((HOST, 0), backlog=500)
        self.endpoint = f"tcp://{HOST}:{self._listener.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._ends = [self._listener]
        self._due: deque[tuple[float, network.socket, bytes]] = deque()
        self._over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._over = True
        self._thread.join()
        self._selector.close()
        for end in self._ends:
            end.close()

    def _run(self) -> None:
        while not self._over:
            for key, _ in self._selector.select(0.005):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.fileobj, key.data)  # type: ignore[arg-type]
            while self._due and self._due[0][0] <= time.monotonic():
                _, end, data = self._due.popleft()
                with suppress(OSError):
                    if data:
                        end.sendall(data)
                    else:
                        end.shutdown(network.SHUT_WR)

    def _accept(self) -> None:
        near, far = self._listener.accept()[0], raw(self._target)
        self._ends += [near, far]
        self._selector.register(near, selectors.EVENT_READ, far)
        self._selector.register(far, selectors.EVENT_READ, near)

    def _read(self, source: network.socket, target: network.socket) -> None:
        data = b""
        with suppress(OSError):
            data = source.recv(1 << 16)
        if not data:
            self._selector.unregister(source)
        self._due.append((time.monotonic() + self._delay_s, target, data))


def settled(link: Link) -> None:
    """Until the link thread has done what it was asked so far."""
    done = threading.Event()
    link._submit(done.set)
    assert done.wait(5.0)


def wait_for(link: Link, kind: str, n: int = 1) -> None:
    """Until `n` messages or connections of a kind were dropped."""
    deadline = time.monotonic() + 8.0
    while link.counts.get(kind, 0) < n:
        link._check()  # a defect in its thread
        assert time.monotonic() < deadline, f"no {n} x {kind} in {link.counts}"
        time.sleep(0.01)
