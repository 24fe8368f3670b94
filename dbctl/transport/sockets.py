"""Every ZeroMQ option of dbctl, in one place (docs/reliability.md, section 3 has the reasons).

Rules of this file: only DEALER and ROUTER, only `ipc://` and `tcp://`; every option is set before
bind or connect; a socket that did not come from `open_router` or `open_dealer` does not exist.

A DEALER talks to one peer, a ROUTER to all that connected to it. Nobody sets a routing id: who a
peer is stands in each message's header, and on ipc the private 0700 directory is the guard. Sends
and receives never block: `send` says False where the pipe is full, `Gone` where nobody is there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket as unix
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import zmq

from dbctl.envelope import HEADER_BYTES, PIECE_BYTES
from dbctl.errors import LaunchError

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Frame: TypeAlias = bytes | memoryview | zmq.Frame

MAX_FRAMES = 4
"""Frames of one ZeroMQ message: routing id, header, payload, and one to spare."""

IPC_PATH_BYTES = 108
"""sizeof(sockaddr_un.sun_path) with its closing zero."""

OPTIONS: dict[int, int] = {
    zmq.MAXMSGSIZE: PIECE_BYTES + HEADER_BYTES,
    zmq.SNDHWM: 16,
    zmq.RCVHWM: 16,
    # Not libzmq's own heartbeats: they abort this process when a peer goes while its messages wait
    # (libzmq#3937, #4364). Nodes beat by messages, and whoever is silent for a lease is given up.
    zmq.HEARTBEAT_IVL: 0,
    zmq.HANDSHAKE_IVL: 3_000,
    zmq.LINGER: 0,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 5_000,
    zmq.IPV6: 1,
}
DEALER_OPTIONS: dict[int, int] = {zmq.IMMEDIATE: 1}
ROUTER_OPTIONS: dict[int, int] = {zmq.ROUTER_MANDATORY: 1, zmq.ROUTER_HANDOVER: 0}


class Gone(Exception):
    """Nobody is at the other end of a ROUTER's route."""


def configure(socket: Socket) -> Socket:
    """Sets every option that this kind of socket has; before bind or connect."""
    assert socket.type in (zmq.DEALER, zmq.ROUTER), f"only DEALER and ROUTER, not {socket.type!r}"
    kind = DEALER_OPTIONS if socket.type == zmq.DEALER else ROUTER_OPTIONS
    for option, value in (OPTIONS | kind).items():
        socket.setsockopt(option, value)
    return socket


def open_router(context: Context, endpoint: str, *, node: str) -> tuple[Socket, str]:
    """A bound ROUTER and the endpoint it has (the real port where `endpoint` says port 0).

    LaunchError names `node` and says why it cannot listen there.
    """
    if endpoint.startswith("ipc://"):
        _check_ipc_path(endpoint.removeprefix("ipc://"), node)
    elif not endpoint.startswith("tcp://"):
        raise LaunchError(node, f"cannot listen on {endpoint!r}: expected ipc:// or tcp://")
    socket = configure(context.socket(zmq.ROUTER))
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise LaunchError(node, f"cannot listen on {endpoint}: {error}") from error
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)


def open_dealer(context: Context, endpoint: str, *, node: str) -> Socket:
    """A DEALER that connects, and connects again, to `endpoint`; it need not be there yet."""
    socket = configure(context.socket(zmq.DEALER))
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise LaunchError(node, f"cannot connect to {endpoint!r}: {error}") from error
    return socket


def _check_ipc_path(path: str, node: str) -> None:
    """Refuses what libzmq would cut short, take from another process, or leave open to others."""
    size = len(os.fsencode(path))
    if size >= IPC_PATH_BYTES:
        raise LaunchError(
            node,
            f"cannot listen on {path}: the path has {size} bytes, expected fewer than "
            f"{IPC_PATH_BYTES}; set TMPDIR or XDG_RUNTIME_DIR to a shorter directory",
        )
    folder = Path(path).parent
    try:
        mode = stat.S_IMODE(folder.stat().st_mode)
    except OSError as error:
        raise LaunchError(node, f"cannot listen on {path}: {error}") from error
    if mode & 0o077:
        raise LaunchError(
            node, f"cannot listen in {folder}: expected mode 0700, found 0{mode:o}; chmod it"
        )
    # libzmq removes whatever is at the path, also the socket of a process that lives.
    with contextlib.closing(unix.socket(unix.AF_UNIX, unix.SOCK_STREAM)) as probe:
        if probe.connect_ex(path) == 0:
            raise LaunchError(node, f"cannot listen on {path}: another process listens there")


def send(socket: Socket, frames: Sequence[Frame]) -> bool:
    """Hands one message to ZeroMQ; False: its pipe is full, none of it was sent. Gone: no peer."""
    try:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno == errno.EHOSTUNREACH:
            raise Gone from error
        raise
    return True


def receive(socket: Socket) -> list[zmq.Frame] | None:
    """The next message's frames, or None; of one with too many, the first MAX_FRAMES + 1."""
    try:
        frame: zmq.Frame = socket.recv(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    frames = [frame]
    while frame.more:
        frame = socket.recv(copy=False)
        if len(frames) <= MAX_FRAMES:
            frames.append(frame)
    return frames
