"""What the link thread does: it owns every socket of the process, checks, relays, beats, delivers.

Rules of this file: everything but `submit` runs in the link thread; nothing blocks but the one
poll; nothing that a peer sends raises out of `turn`: it is dropped, counted, and told as far as it
is news. What does come out of `turn` is a defect of ours, or that this process lacks what it takes
to map what came (RunError), and ends the process (`Link` hands it over).

Theory of operation: `turn` polls the sockets, the eventfd by which the loop wakes it, and the
descriptor whose end means that the parent is gone. A message for this node is delivered; one for
another is passed on as it came if this is a relay. Beats and leases never wait for the loop.
A full ROUTER has no event for one peer, so what waits for such a peer is tried each millisecond.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from dbctl.envelope import Envelope, Shared, with_payload
from dbctl.errors import LaunchError, PeerError
from dbctl.keys import KeyRow
from dbctl.rights import CONTROLLER
from dbctl.roles.base import Array
from dbctl.transport.doors import Doors
from dbctl.transport.lease import Lease as LeaseClock
from dbctl.transport.memory import Mappings
from dbctl.transport.outlet import Outlet
from dbctl.transport.parcel import Packer, Refused, unpack
from dbctl.transport.pieces import Assembler
from dbctl.transport.routes import Routes
from dbctl.transport.settings import Settings
from dbctl.transport.sockets import (
    TCP,
    Context,
    Frame,
    Gone,
    Socket,
    open_dealer,
    open_router,
    receive,
)
from dbctl.transport.told import Told
from dbctl.wire import Message, Peer
from dbctl.wire_processes import Beat, Lease

READS_A_TURN = 64
RETRY_S = 0.001
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Switch:
    """The sockets of one process. `counts` says what was dropped, by kind."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.counts: Counter[str] = Counter()
        self._told = Told()
        self.answer_beats = False
        self.lease = LeaseClock(settings.lease_s, now=time.monotonic())
        self.endpoint = ""
        self.tcp_endpoint = ""
        self._context: Context = zmq.Context(io_threads=1)
        self._poller = zmq.Poller()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        # Kept open: a beat must not fail for want of a descriptor.
        self._statm_fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._watch_fd: int | None = None
        self._commands: deque[Callable[[], None]] = deque()
        self._signalled = False
        self._routes = Routes(settings.keeper)
        self._routers: set[Socket] = set()
        self._dealers: dict[Socket, Outlet] = {}
        self._local: set[Socket] = set()
        self._full: set[Outlet] = set()
        self._mappings = Mappings()
        self._assembler = Assembler(max_bytes=settings.assembly_bytes)
        self._packer = Packer(run=settings.run, me=settings.me, bulk="inline")
        self._doors: Doors | None = None
        if settings.tcp is not None:
            self._doors = Doors(
                settings.tcp,
                context=self._context,
                poller=self._poller,
                reach_s=settings.reach_s,
                trouble=self.trouble,
                give_up=settings.give_up,
            )
        self._next_beat = time.monotonic()
        # A controller has a lease from nobody, and so has a link that reports to nobody.
        self._beats = settings.me.node != CONTROLLER and bool(settings.keeper or settings.relay)
        if not self._beats:
            self.lease.until = math.inf

    # ------------------------------------------------------------ from any thread

    def submit(self, command: Callable[[], None]) -> None:
        """Has `command` run in the link thread, after those submitted before."""
        self._commands.append(command)
        if not self._signalled:
            self._signalled = True
            os.eventfd_write(self._wake_fd, 1)

    # ------------------------------------------------------------ before the thread, and in it

    def listen(self, endpoint: str) -> None:
        """On ipc:// for this host's others."""
        socket, self.endpoint = open_router(self._context, endpoint, node=self.settings.me.node)
        self._routers.add(socket)
        self._watch(socket, self.endpoint)

    def listen_apart(self) -> None:
        """On tcp:// for those of other hosts, if there are any who connect to this one."""
        if self._doors is not None and self._doors.guard.tcp.address:
            socket, self.tcp_endpoint = self._doors.listen(self.settings.me.node)
            self._routers.add(socket)
            self._watch(socket, self.tcp_endpoint)

    def replace_keys(self, rows: tuple[KeyRow, ...]) -> None:
        if self._doors is not None:
            self._doors.guard.replace(rows)

    def connect(self, node: str, incarnation: int | None, endpoint: str) -> None:
        """A connection to that life of `node`, in place of one to an older life."""
        if incarnation is not None:
            self._supersede(Peer(node, incarnation))
            if not self._routes.admit(Peer(node, incarnation)):
                return
        if node in self._routes.connections:
            return
        try:
            socket = self._open(node, incarnation, endpoint)
        except LaunchError as error:
            self.trouble("endpoint", str(error))
            return
        outlet = Outlet(socket, incarnation=incarnation)
        self._routes.connections[node] = self._dealers[socket] = outlet
        self._watch(socket, endpoint)

    def _open(self, node: str, incarnation: int | None, endpoint: str) -> Socket:
        if not endpoint.startswith(TCP):
            return open_dealer(self._context, endpoint, node=node)
        if self._doors is None or incarnation is None:
            raise LaunchError(node, f"is at {endpoint}, but this node was told nothing about tcp")
        return self._doors.connect(Peer(node, incarnation), endpoint)

    def watch_parent(self, fd: int) -> None:
        self._watch_fd = fd
        self._poller.register(fd, zmq.POLLIN)

    def forget(self, peer: Peer) -> None:
        """That life is over: its memory, its pieces and its ways go, and nothing more is taken."""
        self._mappings.forget(peer)
        self._assembler.forget(peer)
        if self._doors is not None:
            self._doors.guard.revoke(peer)
        outlet = self._routes.end(peer)
        if outlet is not None:
            self.counts["ended"] += outlet.n_waiting
            self._full.discard(outlet)
            self._poller.unregister(outlet.socket)
            self._local.discard(outlet.socket)
            del self._dealers[outlet.socket]
            if self._doors is not None:
                self._doors.close(outlet.socket)
            outlet.socket.close(linger=0)

    def post(self, to: str, messages: list[list[Any]]) -> None:
        """Sends frames that `Packer` made to where `to` is reached."""
        outlet = self._routes.find(to)
        if outlet is None:
            self.trouble("unroutable", f"no way to {to}")
            return
        self._push(outlet, messages)

    def waiting(self) -> bool:
        """Whether something has not yet been given to ZeroMQ."""
        return bool(self._commands) or any(outlet.n_waiting for outlet in self._routes.outlets())

    def turn(self, timeout_s: float) -> None:
        """Waits for at most `timeout_s` for something to do, and does what there is."""
        now = time.monotonic()
        if self._beats:
            if now >= self._next_beat:
                self._beat(now)
            timeout_s = min(timeout_s, self._next_beat - now)
        if self._doors is not None:
            timeout_s = min(timeout_s, self._doors.step(now))
        if any(outlet.route is not None for outlet in self._full):
            timeout_s = min(timeout_s, RETRY_S)
        ready = dict(self._poller.poll(math.ceil(max(timeout_s, 0.0) * 1000)))
        if ready.pop(self._wake_fd, None):
            os.eventfd_read(self._wake_fd)
        # Before the queue is emptied, so that a command that comes later signals again; and before
        # anything is read, so that what came after `forget` is judged after it.
        self._signalled = False
        while self._commands:
            self._commands.popleft()()
        for source, event in ready.items():
            if source == self._watch_fd:
                self._read_parent()
            elif self._doors is not None and self._doors.take(source):
                continue
            elif isinstance(source, zmq.Socket) and event & zmq.POLLIN and not source.closed:
                self._read(source)
        for outlet in list(self._full):
            self._flush(outlet)

    def shut(self, linger_s: float) -> None:
        """Closes everything; waits for at most `linger_s` for what ZeroMQ still holds."""
        self._context.destroy(linger=math.ceil(linger_s * 1000))
        self._mappings = Mappings()
        if self.endpoint.startswith("ipc://"):
            Path(self.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    def release(self) -> None:
        """The last thing, once no thread can call `submit`."""
        os.close(self._wake_fd)
        os.close(self._statm_fd)

    # ------------------------------------------------------------ receiving

    def _watch(self, socket: Socket, endpoint: str) -> None:
        self._poller.register(socket, zmq.POLLIN)
        if endpoint.startswith("ipc://"):
            self._local.add(socket)

    def _read(self, socket: Socket) -> None:
        for _ in range(READS_A_TURN):
            frames = None if socket.closed else receive(socket)
            if frames is None:
                return
            route = frames.pop(0).bytes if socket in self._routers else None
            try:
                self._take(socket, route, frames)
            except Refused as refused:
                self.trouble(refused.kind, refused.text)
            except PeerError as error:
                self.trouble("payload", str(error))

    def _take(self, socket: Socket, route: bytes | None, frames: list[zmq.Frame]) -> None:
        """One message: checked, its way back noted, then answered, passed on or delivered."""
        envelope = unpack([frame.buffer for frame in frames], self.settings.run)
        peer = envelope.peer
        if self._doors is not None:
            self._doors.check(socket, peer, frames[0])
        self._admit(peer)
        if socket.closed:
            return
        # What it may not say does not even become the way to answer it.
        self._check_rights(envelope)
        way = self._dealers[socket] if route is None else self._routes.caller(socket, route)
        self._routes.hear(peer.node, way, time.monotonic())
        if envelope.to != self.settings.me.node:
            self._pass_on(envelope, way, frames)
        elif isinstance(envelope.message, Lease):
            self._renew(envelope)
        else:
            self._deliver(envelope, frames, is_local=socket in self._local)

    def overhear(self, envelope: Envelope) -> None:
        """One message, to this node, that came past the sockets from nobody whom the loop knows."""
        try:
            self._admit(envelope.peer)
            self._check_rights(envelope)
            self._deliver(envelope, [], is_local=True)
        except Refused as refused:
            self.trouble(refused.kind, refused.text)
        except PeerError as error:
            self.trouble("payload", str(error))

    def _admit(self, peer: Peer) -> None:
        self._supersede(peer)
        if not self._routes.admit(peer):
            raise Refused("old", f"a message of {peer}, whose life is over")

    def _supersede(self, peer: Peer) -> None:
        older = self._routes.superseded(peer)
        if older is not None:
            self.forget(older)

    def _check_rights(self, envelope: Envelope) -> None:
        peer, message = envelope.peer, envelope.message
        if envelope.to != self.settings.me.node:
            if not self.settings.relay:
                raise Refused("misaddressed", f"{peer} sent to {envelope.to}")
        elif isinstance(message, Lease):
            if peer.node not in (CONTROLLER, self.settings.keeper):
                raise Refused("role", f"{peer} may not give a lease")
        elif not self.settings.allow(peer, message):
            raise Refused("role", f"{peer} may not send {type(message).__name__}")

    def _deliver(self, envelope: Envelope, frames: list[zmq.Frame], *, is_local: bool) -> None:
        peer, message = envelope.peer, envelope.message
        if isinstance(message, Beat) and self.answer_beats:
            self._send(peer.node, Lease(message.number))
        held_bytes = 0
        whole: Message = message
        if envelope.payload is not None:
            array: Array | None
            if not isinstance(envelope.payload, Shared):
                array = self._assembler.add(peer, envelope.payload, frames[1].buffer)
                held_bytes = 0 if array is None else array.nbytes
            elif is_local:
                array = self._mappings.open(envelope.payload, peer)
            else:
                raise Refused("payload", f"{peer} names memory of another host")
            if array is None:
                return
            whole = with_payload(message, array)
        if not self.settings.deliver(peer, whole, held_bytes):
            self.trouble("overflow", "messages come faster than they are worked on; dropped")

    # ------------------------------------------------------------ relay, beats, leases

    def _pass_on(self, envelope: Envelope, way: Outlet, frames: list[zmq.Frame]) -> None:
        if isinstance(envelope.message, Beat) and envelope.to == CONTROLLER:
            self.lease.hear(envelope.sender, envelope.message.number)
        outlet = self._routes.find(envelope.to)
        if outlet is None or outlet is way:
            raise Refused("unroutable", f"no way to {envelope.to} for {envelope.peer}")
        self._push(outlet, [list(frames)], relayed_bytes=sum(len(frame) for frame in frames))

    def _beat(self, now: float) -> None:
        # From now, not from when it was due: after a pause there is one beat, not a burst.
        self._next_beat = now + self.settings.beat_s
        if self._routes.find(CONTROLLER) is not None:
            number = self.lease.beat(now)
            self._send(CONTROLLER, Beat(number, self.settings.steps(), self._rss_bytes()))

    def _rss_bytes(self) -> int:
        return int(os.pread(self._statm_fd, 256, 0).split()[1]) * PAGE_BYTES

    def _renew(self, envelope: Envelope) -> None:
        assert isinstance(envelope.message, Lease)
        answers = self.lease.renew(envelope.message.number, time.monotonic())
        for node, number in answers.items():
            self._send(node, Lease(number))

    def _read_parent(self) -> None:
        assert self._watch_fd is not None
        try:
            ended = not os.read(self._watch_fd, 1 << 16)
        except OSError:
            ended = True
        if ended:
            self._poller.unregister(self._watch_fd)
            self._watch_fd = None
            self.settings.parent_gone()

    # ------------------------------------------------------------ sending

    def _send(self, to: str, message: Message) -> None:
        self.post(to, self._packer.pack(to, message))

    def _push(self, outlet: Outlet, messages: list[list[Frame]], *, relayed_bytes: int = 0) -> None:
        try:
            if not outlet.post(messages, relayed_bytes=relayed_bytes):
                self.trouble("full", "a peer takes messages slower than they come; dropped")
        except Gone:
            self._lose(outlet)
            return
        if outlet.n_waiting and outlet not in self._full:
            self._full.add(outlet)
            self._poll_for(outlet, zmq.POLLIN | zmq.POLLOUT)

    def _flush(self, outlet: Outlet) -> None:
        try:
            if not outlet.flush():
                return
        except Gone:
            self._lose(outlet)
            return
        self._full.discard(outlet)
        self._poll_for(outlet, zmq.POLLIN)

    def _poll_for(self, outlet: Outlet, events: int) -> None:
        if outlet.route is None:
            self._poller.modify(outlet.socket, events)

    def _lose(self, outlet: Outlet) -> None:
        self._full.discard(outlet)
        self._routes.lose(outlet)
        self.trouble("unreachable", outlet.describe_loss())

    def trouble(self, kind: str, text: str) -> None:
        """Counts what was dropped, and tells of it as far as it is news (told.py); "" is none."""
        self.counts[kind] += 1
        line = self._told.line(kind, text) if text else None
        if line is not None:
            self.settings.on_trouble(f"{self.settings.me.node}: {line}")
