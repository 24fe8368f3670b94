"""Every ZeroMQ option of dbctl, in one place (docs/reliability.md, section 3 has the reasons).

Rules of this file: only DEALER and ROUTER, only `ipc://` and `tcp://`; every option is set before
bind or connect; a socket that did not come from `open_router` or `open_dealer` does not exist.

A DEALER talks to one peer, a ROUTER to all that connected to it. Nobody sets a routing id: who a
peer is stands in each message's header, and on ipc the private 0700 directory is the guard; on tcp
it is the key (transport/curve.py). Sends and receives never block: `send` says False where the
pipe is full, `Gone` where nobody is there. Inside the process, and nowhere else, libzmq speaks to
two more sockets: the handler that it asks about keys, a ROUTER, and monitors, which are PAIRs.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket as unix
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import zmq

from dbctl.envelope import HEADER_BYTES, PIECE_BYTES
from dbctl.errors import LaunchError
from dbctl.keys import Tcp

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
# A half-open connection (a host that lost power, a cable) is the kernel's to see, since libzmq's
# heartbeats are off: what is sent must be acknowledged within 10 s, and an idle connection is asked
# after 4 s, five times. libzmq then connects anew; who is dead is for beats and leases to say.
TCP_OPTIONS: dict[int, int] = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 4,
    zmq.TCP_KEEPALIVE_INTVL: 1,
    zmq.TCP_KEEPALIVE_CNT: 5,
    zmq.TCP_MAXRT: 10_000,
    zmq.CONNECT_TIMEOUT: 3_000,
}
TCP = "tcp://"
ZAP_DOMAIN = b"dbctl"
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
MONITORED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

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


Watch = Callable[[Socket], None]


def open_router(
    context: Context,
    endpoint: str,
    *,
    node: str,
    tcp: Tcp | None = None,
    watch: Watch | None = None,
) -> tuple[Socket, str]:
    """A bound ROUTER and the endpoint it has (the real port where `endpoint` says port 0).

    `tcp`: what tcp:// needs. `watch` gets the socket before it is bound. LaunchError names `node`
    and says why it cannot listen there.
    """
    if endpoint.startswith(TCP):
        _check_address(endpoint, node)
    elif endpoint.startswith("ipc://"):
        _check_ipc_path(endpoint.removeprefix("ipc://"), node)
    else:
        raise LaunchError(node, f"cannot listen on {endpoint!r}: expected ipc:// or tcp://")
    socket = configure(context.socket(zmq.ROUTER))
    try:
        if endpoint.startswith(TCP):
            _configure_tcp(socket, tcp, server_key="")
        if watch is not None:
            watch(socket)
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        what = f"cannot listen on {endpoint}: {error}"
        if error.errno == errno.EADDRNOTAVAIL:
            what += "; give its host the `address` that is its own"
        raise LaunchError(node, what) from error
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)


def open_dealer(
    context: Context,
    endpoint: str,
    *,
    node: str,
    tcp: Tcp | None = None,
    server_key: str = "",
    watch: Watch | None = None,
) -> Socket:
    """A DEALER that connects, and connects again, to `endpoint`; it need not be there yet.

    `tcp` and the listener's public key are what tcp:// needs; `watch` as in `open_router`.
    """
    socket = configure(context.socket(zmq.DEALER))
    try:
        if endpoint.startswith(TCP):
            _configure_tcp(socket, tcp, server_key=server_key)
        if watch is not None:
            watch(socket)
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise LaunchError(node, f"cannot connect to {endpoint!r}: {error}") from error
    return socket


def open_zap(context: Context) -> Socket:
    """The socket that libzmq asks about keys, inside this process."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(ZAP_ENDPOINT)
    return socket


def open_monitor(socket: Socket) -> Socket:
    """The socket that tells what becomes of the connections of `socket`, inside this process."""
    monitor: Socket = socket.get_monitor_socket(MONITORED)
    monitor.setsockopt(zmq.LINGER, 0)
    return monitor


def _configure_tcp(socket: Socket, tcp: Tcp | None, *, server_key: str) -> None:
    """What a socket over tcp has besides; `server_key` is "" for one that listens."""
    assert tcp is not None, "tcp:// needs a key, or the setting that says there is none"
    for option, value in TCP_OPTIONS.items():
        socket.setsockopt(option, value)
    if socket.type == zmq.ROUTER:
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    if not tcp.encrypted:
        return
    socket.setsockopt(zmq.CURVE_PUBLICKEY, tcp.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, tcp.secret.encode())
    if socket.type == zmq.ROUTER:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
    else:
        assert server_key, "whose key the listener must have is known, or nobody connects"
        socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())


def _check_address(endpoint: str, node: str) -> None:
    """Only an address of this host: never all of them, never what a name happens to mean here."""
    host = endpoint.removeprefix(TCP).rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError as error:
        raise LaunchError(
            node, f"cannot listen on {endpoint}: expected an IP address of this host, found {host}"
        ) from error
    if address.is_unspecified or address.is_multicast:
        raise LaunchError(
            node, f"cannot listen on {endpoint}: expected one address of this host, not all of them"
        )


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
    """Hands one message to ZeroMQ; False: its pipe is full, none of it was sent. Gone: no peer.

    A frame of 64 KiB or more is not copied: ZeroMQ sends what its memory holds *then*. Nobody
    writes there before the message has had its effect: a push slot waits for its Ack, what Params
    and CutPart show for its Return, boxes for the next pass, a table of Evaluated for the next
    Evaluate. A copy that is still on its way then (it was sent again) is old by its number, and
    its receiver ignores it, whatever it has become.
    """
    try:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno == errno.EHOSTUNREACH:
            raise Gone from error
        raise
    return True


def receive(socket: Socket, max_frames: int = MAX_FRAMES) -> list[zmq.Frame] | None:
    """The next message's frames, or None; of one with too many, the first `max_frames` + 1."""
    try:
        frame: zmq.Frame = socket.recv(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    frames = [frame]
    while frame.more:
        frame = socket.recv(copy=False)
        if len(frames) <= max_frames:
            frames.append(frame)
    return frames
