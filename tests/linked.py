"""What the tests of the link share: links in a private directory, and a stranger beside them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from dbctl.envelope import PROTOCOL_VERSION, Envelope, encode
from dbctl.transport.line import socket_name
from dbctl.transport.link import Link
from dbctl.wire import Message, Peer, Position, Push
from dbctl.wire_processes import Beat

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
        listen = f"ipc://{folder}/{socket_name(Peer(node, incarnation))}" if listens else None
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
        given = {
            "version": PROTOCOL_VERSION,
            "run": RUN,
            "sender": "x",
            "incarnation": 1,
            "to": "shard-0",
        }
        self.send(encode(Envelope(message=message, **(given | changes))), *more)
