"""TCP of one process: who is let in, whom it connects to, and what became of either.

Rules of this file: everything runs in the link thread; nothing blocks. Of strangers it makes lines
to be counted (`trouble`), of a peer that this process cannot get through to an end (`give_up`).

Theory of operation. libzmq tells nobody that a handshake failed: a client with a wrong key for its
server connects again for ever, one that is refused gives up, and both look like a network that is
slow. So every socket has a monitor. A life that refuses our key may only not have heard of it yet:
it is tried again; whoever is not through within `reach_s` has failed, and so has this node. After
that a connection that breaks is libzmq's to make again, and a dead peer the controller's to see.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import zmq

from dbctl.errors import LaunchError
from dbctl.keys import Tcp
from dbctl.transport.curve import Guard
from dbctl.transport.porch import Porch
from dbctl.transport.sockets import (
    TCP,
    Context,
    Socket,
    open_dealer,
    open_monitor,
    open_router,
    receive,
)
from dbctl.wire import Peer

REDIAL_S = 0.5
LOOK_S = 0.25  # how late the end of `reach_s` is seen
EVENTS_A_TURN = 256
# A monitor's first frame: event, value (zmq_socket_monitor(3)). pyzmq's own reader brings asyncio.
_EVENT = struct.Struct("=hi")

REFUSED = "refuses our key"
BROKEN = (
    "breaks off the handshake: it has another key than we were told, is another program, or too "
    "many connections begin there at once"
)
SILENT = "cannot be reached"


@dataclass(eq=False)
class Dial:
    """One connection made from here. `failing_since`: inf once the handshake succeeded."""

    peer: Peer
    endpoint: str
    failing_since: float
    word: str = SILENT
    reached: bool = False
    redial_at: float = inf
    retries: int = 0  # in a row, without a connection

    def hear(self, event: int, now: float) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.failing_since, self.reached = inf, True
        elif event == zmq.EVENT_CONNECTED:
            self.retries = 0
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self.retries += 1
            # It was there once and is gone: that is not for this end to judge.
            if self.reached and self.retries > 1:
                self.failing_since = inf
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._fail(REFUSED, now, again=True)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._fail(BROKEN, now, again=True)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._fail(BROKEN, now, again=False)

    def _fail(self, word: str, now: float, *, again: bool) -> None:
        self.word = word
        self.failing_since = min(self.failing_since, now)
        # After these two libzmq does not connect again by itself.
        if again:
            self.redial_at = now + REDIAL_S


class Doors:
    """`poller` is the switch's; `trouble(kind, text)` and `give_up(peer, what)` as said above."""

    def __init__(
        self,
        tcp: Tcp,
        *,
        context: Context,
        poller: zmq.Poller,
        reach_s: float,
        trouble: Callable[[str, str], None],
        give_up: Callable[[Peer, str], None],
    ) -> None:
        self.guard = Guard(tcp)
        self._context = context
        self._poller = poller
        self._reach_s = reach_s
        self._trouble = trouble
        self._give_up = give_up
        self._zap = self.guard.open(context)
        poller.register(self._zap, zmq.POLLIN)
        self._porch = Porch()
        self._peers: dict[Socket, Peer | None] = {}
        self._monitors: dict[Socket, Socket] = {}
        self._dials: dict[Socket, Dial] = {}

    # ------------------------------------------------------------ ways in and out

    def listen(self, node: str) -> tuple[Socket, str]:
        """LaunchError: not an address of this host."""
        address = self.guard.tcp.address
        host = f"[{address}]" if ":" in address else address
        socket, endpoint = open_router(
            self._context, f"{TCP}{host}:0", node=node, tcp=self.guard.tcp, watch=self._watch
        )
        self._peers[socket] = None
        return socket, endpoint

    def connect(self, peer: Peer, endpoint: str) -> Socket:
        """LaunchError: that is no endpoint, or nobody said which key that life has."""
        key = self.guard.key_of(peer)
        if key is None or bool(key) != self.guard.tcp.encrypted:
            raise LaunchError(str(peer), f"is at {endpoint}, but not in the list of keys")
        socket = open_dealer(
            self._context,
            endpoint,
            node=str(peer),
            tcp=self.guard.tcp,
            server_key=key,
            watch=self._watch,
        )
        self._peers[socket] = peer
        self._dials[socket] = Dial(peer, endpoint, failing_since=time.monotonic())
        return socket

    def close(self, socket: Socket) -> None:
        """Before `socket` itself is closed; nothing if it is not one of these."""
        if self._peers.pop(socket, None) is None:
            return
        self._dials.pop(socket)
        monitor = next(m for m, watched in self._monitors.items() if watched is socket)
        del self._monitors[monitor]
        self._poller.unregister(monitor)
        socket.disable_monitor()
        monitor.close()

    def _watch(self, socket: Socket) -> None:
        monitor = open_monitor(socket)
        self._monitors[monitor] = socket
        self._poller.register(monitor, zmq.POLLIN)

    # ------------------------------------------------------------ who speaks

    def check(self, socket: Socket, claimed: Peer, frame: zmq.Frame) -> None:
        """Refused: who sent this is another, or is not in the list in force."""
        if socket in self._peers:
            connected_to = self._peers[socket]
            self.guard.check(claimed, frame, connected_to=connected_to)
            if connected_to is None and self._porch.waiting:
                self._porch.heard(int(frame.get(zmq.SRCFD)))

    # ------------------------------------------------------------ what libzmq tells

    def take(self, source: Any) -> bool:
        """Whether `source`, which has something to read, was one of this class's own."""
        if source is self._zap:
            for line in self.guard.answer():
                self._trouble("key", line)
            return True
        socket = self._monitors.get(source)
        if socket is None:
            return False
        now = time.monotonic()
        for _ in range(EVENTS_A_TURN):
            frames = None if source.closed else receive(source)
            if frames is None:
                break
            event, value = _EVENT.unpack(frames[0].bytes)
            self._hear(socket, event, value=value, now=now)
        return True

    def _hear(self, socket: Socket, event: int, *, value: int, now: float) -> None:
        dial = self._dials.get(socket)
        if dial is not None:
            dial.hear(event, now)
            return
        line = self._porch.hear(event, value, now)
        if line is not None:
            self._trouble("handshake", line)

    def step(self, now: float) -> float:
        """Connects again where libzmq does not; gives up where it took too long.

        Returns within how many seconds to call it again, inf where nothing is under way.
        """
        again_s = inf
        for socket, dial in self._dials.items():
            if now - dial.failing_since > self._reach_s:
                dial.failing_since = dial.redial_at = inf
                self._give_up(dial.peer, f"{dial.word} ({dial.endpoint})")
            elif now >= dial.redial_at:
                dial.redial_at = inf
                with contextlib.suppress(zmq.ZMQError):  # the broken one is mostly gone already
                    socket.disconnect(dial.endpoint)
                socket.connect(dial.endpoint)
            if dial.failing_since < inf:
                again_s = LOOK_S
        return again_s
