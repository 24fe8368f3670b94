"""Whoever should get nowhere: attacks on the nodes of a run that others see, and what came of them.

As a program, inside a host of tests/cluster/netns.py:

    python -m tests.cluster.stranger ATTACK...

reads one line of JSON, `Target` as an object, lets each attack go at every endpoint, floods all at
once and then the others, and prints a line of JSON for each: its name, how often it connected, what
it heard. With `uid` it is another user by then. It has what a stranger can have, and given keys.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket as network
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from dbctl.envelope import PROTOCOL_VERSION, Envelope, Inline, encode
from dbctl.transport.curve import make_keys
from dbctl.wire import (
    BEGINNING,
    Cut,
    CutPart,
    Evaluate,
    Finish,
    Gone,
    Grant,
    Halt,
    Message,
    Params,
    Push,
)
from dbctl.wire_processes import Kill, Lease, Peers

MIB = 1 << 20
STAY_S = 4.0  # longer than a handshake may take
N_SILENT = 200
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + b"\x00" + bytes(31)
FORBIDDEN: tuple[Message, ...] = (
    *(Finish(), Halt(False), Grant(1 << 30, 0, last=True), Lease(1 << 30), Peers(())),
    *(Cut(1), Gone("worker-0.0", 1), Kill("shard-0", 1), Evaluate(1)),
    Params(1, 1, 1, 0, 0, 0),
    CutPart(1, "parameters", 1, 1, 0, 0, ()),
)


@dataclass(kw_only=True)
class Target:
    """`nodes`: endpoint of each that listens; `server_keys`: their public keys, which may be known.

    `owner`, `own`, `secret`: a life of the run and its key pair, for attacks that have them.
    """

    run: str
    nodes: dict[str, str]
    server_keys: dict[str, str]
    owner: str = ""
    own: str = ""
    secret: str = ""
    uid: int = 0

    def envelope(self, node: str, message: Message, **changes: Any) -> bytes:
        given: dict[str, Any] = {"sender": self.owner or "worker-0.0", "incarnation": 1, "to": node}
        return encode(
            Envelope(version=PROTOCOL_VERSION, run=self.run, message=message, **(given | changes))
        )


@dataclass
class Found:
    attack: str
    n: int = 0
    heard: list[str] = field(default_factory=list)


# ---------------------------------------------------------------- with bytes


def connected(endpoint: str) -> network.socket:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    line = network.create_connection((host.strip("[]"), int(port)), timeout=5.0)
    line.setsockopt(network.IPPROTO_TCP, network.TCP_NODELAY, 1)
    return line


def pour(found: Found, endpoint: str, parts: Iterator[bytes], wait_s: float = 0.3) -> None:
    """Says it all, as far as it is listened to; what is answered besides a greeting is heard."""
    with contextlib.suppress(OSError), connected(endpoint) as line:
        found.n += 1
        line.settimeout(wait_s)
        for part in parts:
            line.sendall(part)
        answer = b""
        while data := line.recv(1 << 16):
            answer += data
            if len(answer) > 64 and b"ERROR" not in answer[64:]:
                found.heard.append(repr(answer[64:200]))


def silent(found: Found, target: Target, node: str) -> None:
    with contextlib.ExitStack() as at_end:
        for _ in range(N_SILENT):
            at_end.enter_context(connected(target.nodes[node]))
            found.n += 1
        time.sleep(STAY_S)


def noise(found: Found, target: Target, node: str) -> None:
    for size in (1, 9, 64, 500, 5_000, 200_000) * 5:
        pour(found, target.nodes[node], iter([os.urandom(size)]), wait_s=0.05)
    web = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    old = [b"\x01\x00", b"\x0d\x00" + b"worker-0.0#1"]  # ZMTP 1.0, an anonymous and a named peer
    older = [b"\xff" + bytes(8) + b"\x7f\x01\x05", b"\x00\x00"]  # ZMTP 2.0, as a DEALER
    null = [b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + b"\x00" + bytes(31)]
    ready = [b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"]
    for parts in ([web], old, older, null, null + ready):
        pour(found, target.nodes[node], iter(parts))


def oversize(found: Found, target: Target, node: str) -> None:
    for size in (2 * MIB, 1 << 31, (1 << 63) - 1, (1 << 64) - 1):
        for flags in (b"\x02", b"\x03", b"\x06"):
            frame = flags + size.to_bytes(8, "big") + bytes(1_000)
            pour(found, target.nodes[node], iter([GREETING, frame]))


def endless(found: Found, target: Target, node: str) -> None:
    """Frames of the greatest size that is taken, and never a whole one; 100 at once."""

    def one() -> None:
        frame = b"\x06" + MIB.to_bytes(8, "big")
        parts = [GREETING, frame, *[bytes(MIB // 16)] * 15]
        pour(found, target.nodes[node], iter(parts), wait_s=STAY_S)

    together([one] * 100)


# ---------------------------------------------------------------- with ZeroMQ


def speak(
    found: Found,
    target: Target,
    node: str,
    *,
    keys: tuple[str, str] | None,
    server_key: str = "",
    frames: list[list[bytes]],
) -> None:
    context: zmq.Context[Any] = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IPV6, 1)
        if keys is not None:
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys[0].encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys[1].encode())
            server_key = server_key or target.server_keys[node]
            socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
        socket.connect(target.nodes[node])
        found.n += 1
        # A key that is refused may leave the socket without anybody to send to, for ever.
        socket.setsockopt(zmq.SNDTIMEO, 700)
        with contextlib.suppress(zmq.Again):
            for message in frames:
                socket.send_multipart(message)
        while socket.poll(700):
            found.heard.append(repr(socket.recv_multipart()[0][:200]))
    finally:
        context.destroy(linger=0)


def hostile(target: Target, node: str) -> list[list[bytes]]:
    """A push of ones, in one piece, and all that only the controller may say, in its name too."""
    push = Push(1, 1 << 20, 7, 0, 1, BEGINNING, 0, 0)  # no slice begins there
    frame = encode(
        Envelope(
            version=PROTOCOL_VERSION,
            run=target.run,
            sender=target.owner or "worker-0.0",
            incarnation=1,
            to=node,
            message=push,
            payload=Inline(1 << 40, 0, 1, 4, "<f4"),
        )
    )
    return [
        *([target.envelope(node, message)] for message in FORBIDDEN),
        *([target.envelope(node, message, sender="controller")] for message in FORBIDDEN),
        [target.envelope("controller", Finish())],
        [frame, b"\x00\x00\x80\x3f" * 4],
        [os.urandom(100)],
    ]


def no_key(found: Found, target: Target, node: str) -> None:
    speak(found, target, node, keys=None, frames=hostile(target, node))


def wrong_key(found: Found, target: Target, node: str) -> None:
    speak(found, target, node, keys=make_keys(), frames=hostile(target, node))


def own_key(found: Found, target: Target, node: str) -> None:
    """The key of a life that is, or was, in the run: a message in its own name is not in these."""
    keys = (target.own, target.secret)
    speak(found, target, node, keys=keys, frames=hostile(target, node))


def wrong_server_key(found: Found, target: Target, node: str) -> None:
    keys, other = (target.own, target.secret), make_keys()[0]
    speak(found, target, node, keys=keys, server_key=other, frames=hostile(target, node))


# ---------------------------------------------------------------- as another user of the host


def local_user(found: Found, target: Target, node: str) -> None:
    """Looks for the run's sockets, memory and secrets on its host; `heard` is what it got at."""
    assert os.getuid() != 0, "it is another user"
    for directory in Path("/tmp").glob("dbctl-*"):
        attempt(found, f"listed {directory}", lambda d=directory: os.listdir(d))
        for name in ("agent-0.sock", "agent-1.sock", f"{node}.1.sock"):
            attempt(found, f"connected {directory / name}", lambda p=directory / name: reach(p))
        attempt(found, f"removed {directory}", lambda d=directory: os.rmdir(d))
    for pid in nodes_here():
        for name in ("environ", "mem", "maps", "fd", "cwd", "root", "auxv", "stack"):
            path = f"/proc/{pid}/{name}"
            how = os.listdir if name == "fd" else os.readlink if name in ("cwd", "root") else read
            attempt(found, f"opened {path}", lambda how=how, path=path: how(path))
        for descriptor in range(64):
            path = f"/proc/{pid}/fd/{descriptor}"
            attempt(found, f"opened {path}", lambda path=path: read(path))
        for number in (0, 2, 9, 15, 19):
            attempt(found, f"signal {number} to {pid}", lambda n=number, p=pid: os.kill(p, n))


def nodes_here() -> list[int]:
    """What of the run is on this host: command lines are for everybody."""
    numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in numbers}
    found = [pid for pid, words in commands.items() if b"dbctl" in words]
    assert found
    return found


def attempt(found: Found, what: str, action: Callable[[], object]) -> None:
    found.n += 1
    with contextlib.suppress(OSError):
        action()
        found.heard.append(what)


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(10)


def reach(path: Path) -> None:
    with network.socket(network.AF_UNIX, network.SOCK_STREAM) as line:
        line.connect(str(path))


FLOODS = ("silent", "noise", "oversize", "endless")
ATTACKS: dict[str, Callable[[Found, Target, str], None]] = {
    attack.__name__: attack
    for attack in (
        *(silent, noise, oversize, endless),
        *(no_key, wrong_key, own_key, wrong_server_key, local_user),
    )
}


def together(actions: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    target = Target(**json.loads(sys.stdin.readline()))
    if target.uid:
        make_keys()  # what is imported late is imported now: another user may not read it
        network.getaddrinfo("127.0.0.1", 1)
        os.setgroups([])
        os.setgid(target.uid)
        os.setuid(target.uid)

    def run(found: Found, node: str) -> Callable[[], None]:
        return lambda: ATTACKS[found.attack](found, target, node)

    # Floods keep out whoever comes from the same address, so the others come after them.
    for stage in (True, False):
        names = [name for name in sys.argv[1:] if (name in FLOODS) == stage]
        pairs = [(Found(name), node) for name in names for node in target.nodes]
        together([run(*pair) for pair in pairs])
        for found, _ in pairs:
            print(json.dumps([found.attack, found.n, found.heard]))


if __name__ == "__main__":
    main()
