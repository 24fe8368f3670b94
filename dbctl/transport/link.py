"""The link: a thread that owns every socket of a process, and two queues where the loop meets it.

Rules of this file: the loop calls `send` and `receive`, which never touch a socket; what the thread
does is in `switch`. A role that computes for seconds still answers beats, keeps its lease, and
finds its messages read.

    loop:  link.send(to, message)  ->  queue, eventfd  ->  thread: ZeroMQ
    loop:  link.receive(timeout)   <-  queue, eventfd  <-  thread: checked, put together, mapped
    loop:  link.send(to, Push)     ->  pipe  ->  the other's loop: checked, mapped  (line.py)

Between two processes of a host a payload in a `SharedBuffer` is not sent: its description is. What
others wait for in every step (`DIRECT`) goes there from loop to loop, past both threads; where that
cannot be, it goes as all else does. Whoever is spoken to answers by a pipe too: the first message
of a life comes by a socket, where the link thread judges it, and the pipe is beside that socket.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType

from dbctl.envelope import Envelope, Shared, with_payload
from dbctl.errors import PeerError
from dbctl.keys import KeyRow, Tcp
from dbctl.transport.line import Line, socket_name
from dbctl.transport.memory import Mappings, has_memfd
from dbctl.transport.parcel import Packer, Refused, unpack
from dbctl.transport.settings import Settings
from dbctl.transport.switch import Switch
from dbctl.wire import Ack, Boxes, Fetch, Message, Params, Peer, Push, Return

MAX_UNREAD = 4096
IDLE_S = 60.0
IPC = "ipc://"
# They may overtake what was sent earlier, and are sent again or asked for when lost.
DIRECT = frozenset({Boxes, Fetch, Params, Push, Ack, Return})
ANSWERED = frozenset({Boxes, Fetch})  # at once; a partition gives while it is given

_log = logging.getLogger("dbctl.link")


class Link:
    """One process's way to all others.

    `run`, `node`, `incarnation`: who this is, in every header. `listen`: where others of this host
    connect (ipc:// in a 0700 directory); None for a process that only connects. `tcp`: address and
    keys for those of other hosts (`tcp_endpoint` is where they connect), None where there are none.
    `far`: nodes of other hosts that are reached through the keeper; payloads for them, and for all
    whose keys are in `tcp`, go inline. `reach_s`: how long a node may take to let this one in.
    `keeper`, `keeper_endpoint`: the host's agent, to which everything goes that has no other way.
    `relay`: this is an agent, and passes on what is for others. `bulk`: `memory`, or `inline` to
    send every payload through the sockets. `allow`: which messages a peer may send, asked in the
    link thread. `watch_fd`: a descriptor whose end means that the parent is gone.
    `assembly_bytes`: bounds what is received inline, both unfinished and unread (64 MiB, the most
    that a stranger may cost); a run whose largest payload is sent inline needs twice that payload.
    `on_trouble` gets one line for each kind of message that was dropped.

    The loop sets `steps` to what it has done; each beat carries it. `answer_beats = True` makes
    this the giver of leases (the controller): the link answers each Beat for this node by itself.
    """

    def __init__(
        self,
        *,
        run: str,
        node: str,
        incarnation: int,
        listen: str | None,
        keeper: str | None = None,
        keeper_endpoint: str | None = None,
        beat_s: float = 1.0,
        lease_s: float = 10.0,
        relay: bool = False,
        bulk: str = "memory",
        allow: Callable[[Peer, Message], bool] | None = None,
        watch_fd: int | None = None,
        assembly_bytes: int = 64 << 20,
        tcp: Tcp | None = None,
        far: Iterable[str] = (),
        reach_s: float = 10.0,
        on_trouble: Callable[[str], None] | None = None,
    ) -> None:
        assert (keeper is None) == (keeper_endpoint is None), "a keeper is a name and an endpoint"
        self.me = Peer(node, incarnation)
        self.bulk = "memory" if bulk == "memory" and has_memfd() else "inline"
        self.steps = 0
        self.closed_by_parent = False
        self.endpoint = ""
        self.tcp_endpoint = ""
        self._listen = listen
        self._keeper_endpoint = keeper_endpoint
        self._watch_fd = watch_fd
        self._packer = Packer(run=run, me=self.me, bulk=self.bulk)
        self._far = frozenset(far)
        self._packer.far = self._far | _nodes_of(tcp.keys if tcp is not None else ())
        self._unread: SimpleQueue[tuple[Peer, Message, int]] = SimpleQueue()
        # Each is written by one thread only: the difference is what waits for the loop.
        self._bytes_put = 0
        self._bytes_taken = 0
        self._assembly_bytes = assembly_bytes
        self._thread: threading.Thread | None = None
        self._close_at: float | None = None
        self._failure: BaseException | None = None
        self._given_up: PeerError | None = None
        self._settings = Settings(
            run=run,
            me=self.me,
            keeper=keeper,
            beat_s=beat_s,
            lease_s=lease_s,
            relay=relay,
            assembly_bytes=assembly_bytes,
            tcp=tcp,
            reach_s=reach_s,
            give_up=self._give_up,
            allow=allow or _allow_all,
            on_trouble=on_trouble or _log.warning,
            deliver=self._deliver,
            steps=lambda: self.steps,
            parent_gone=self._parent_gone,
        )
        self._switch = Switch(self._settings)
        self._line = Line()
        # Lives by node: those that are heard directly, and the last that was forgotten.
        self._partners: dict[str, int] = {}
        self._ended: dict[str, int] = {}
        self._spoken: set[str] = set()
        self._mappings = Mappings()

    def __enter__(self) -> Link:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # What a failing process still has to say is not waited for.
        self.close(1.0 if error is None else 0.0)

    # ------------------------------------------------------------ life

    def start(self) -> Link:
        """Binds, connects the keeper, starts the thread. LaunchError: it cannot listen there."""
        assert self._thread is None, "a link is started once"
        try:
            if self._listen is not None:
                self._switch.listen(self._listen)
                if self._listen.startswith(IPC) and not self._settings.relay:
                    self._line.listen(_file_of(self._listen))
            self._switch.listen_apart()
        except BaseException:
            self.close(0.0)
            raise
        self.endpoint = self._switch.endpoint
        self.tcp_endpoint = self._switch.tcp_endpoint
        if self._keeper_endpoint is not None:
            assert self._settings.keeper is not None
            self._switch.connect(self._settings.keeper, None, self._keeper_endpoint)
        if self._watch_fd is not None:
            self._switch.watch_parent(self._watch_fd)
        self._thread = threading.Thread(target=self._run, name=f"link {self.me}", daemon=True)
        self._thread.start()
        return self

    def close(self, linger_s: float = 1.0) -> None:
        """Sends what waits for at most `linger_s`, closes all, ends the thread; twice is fine."""
        if self._close_at is not None:
            return
        self._close_at = time.monotonic() + linger_s
        if self._thread is None:
            self._switch.shut(0.0)
        else:
            self._switch.submit(lambda: None)
            self._thread.join()
        self._switch.release()
        self._line.close()
        self._mappings = Mappings()

    def _run(self) -> None:
        try:
            while self._close_at is None or (
                self._switch.waiting() and time.monotonic() < self._close_at
            ):
                left = IDLE_S if self._close_at is None else self._close_at - time.monotonic()
                self._switch.turn(left)
        except BaseException as error:  # handed to the loop, which raises it
            self._failure = error
        finally:
            left = 0.0 if self._close_at is None else self._close_at - time.monotonic()
            self._switch.shut(max(left, 0.0))
            self.wake()

    # ------------------------------------------------------------ the loop's side

    def send(self, to: str, message: Message) -> None:
        """Queues `message` for node `to`; never blocks, and never fails for the peer's sake.

        A payload is a `View` (its buffer is left alone until acknowledged or handed back) or an
        array (copied). A message with no way to its node is dropped and counted: roles send again.
        """
        self._check()
        frames = self._packer.pack(to, message)
        if type(message) in DIRECT and len(frames) == len(frames[0]) == 1:
            expects = type(message) in ANSWERED
            if to in self._spoken and self._line.send(to, frames[0][0], expects=expects):
                return
            # The first goes by the socket: the other may know no way to answer but the way it came.
            self._spoken.add(to)
        self._submit(partial(self._switch.post, to, frames))

    def receive(self, timeout_s: float | None) -> list[tuple[Peer, Message]]:
        """Everything that has come; waits for the first for `timeout_s` (None: for ever).

        Empty at the timeout, at `wake`, and when the parent is gone. Payloads are flat read-only
        arrays; a shared one is its owner's memory, good until the role hands it back. PeerError,
        once: a node of another host did not let this one in.
        """
        messages = self._arrived()
        if not messages:
            self._line.wait(timeout_s)
            messages = self._arrived()
        self._check()
        if self._given_up is not None:
            error, self._given_up = self._given_up, None
            raise error
        return messages

    def _arrived(self) -> list[tuple[Peer, Message]]:
        messages = [item for frame in self._line.read() for item in self._heard(frame)]
        try:
            while True:
                peer, message, held_bytes = self._unread.get_nowait()
                self._bytes_taken += held_bytes
                if type(message) in DIRECT and self._is_newer(peer):
                    self._answer_directly(peer)
                messages.append((peer, message))
        except Empty:
            return messages

    def _is_newer(self, peer: Peer) -> bool:
        """Than every life of that node that is, or was, heard directly."""
        known = max(self._partners.get(peer.node, 0), self._ended.get(peer.node, 0))
        return known < peer.incarnation

    def _answer_directly(self, peer: Peer) -> None:
        """It has connected to here; if it is of this host, its own socket is beside this one's."""
        if self._line.listens and peer.node not in self._packer.far:
            with contextlib.suppress(ValueError):  # no node's name: nothing of it goes into a path
                self._converse(peer, _file_of(self.endpoint).with_name(socket_name(peer)))

    def _converse(self, peer: Peer, file: Path) -> None:
        self._partners[peer.node] = peer.incarnation
        self._spoken.discard(peer.node)
        self._line.connect(peer.node, file)

    def _heard(self, frame: bytes) -> list[tuple[Peer, Message]]:
        """What a partner said by the line; the link thread judges what others say there."""
        try:
            envelope = unpack([memoryview(frame)], self._settings.run)
            if type(envelope.message) not in DIRECT or envelope.to != self.me.node:
                what = type(envelope.message).__name__
                raise Refused("line", f"{envelope.peer} said {what} to {envelope.to} directly")
            known = self._partners.get(envelope.sender) == envelope.incarnation
            if known and self._settings.allow(envelope.peer, envelope.message):
                return [(envelope.peer, self._mapped(envelope))]
            self._submit(partial(self._switch.overhear, envelope))
        except Refused as refused:
            self._submit(partial(self._switch.trouble, refused.kind, refused.text))
        except PeerError as error:
            self._submit(partial(self._switch.trouble, "payload", str(error)))
        return []

    def _mapped(self, envelope: Envelope) -> Message:
        if isinstance(envelope.payload, Shared):
            array = self._mappings.open(envelope.payload, envelope.peer)
            return with_payload(envelope.message, array)
        return envelope.message

    def wake(self) -> None:
        """Ends a `receive` that waits; from any thread, and from a signal handler."""
        self._line.ring()

    def connect(self, node: str, incarnation: int, endpoint: str) -> None:
        """Connects to that life of `node`, in place of an older one."""
        peer = Peer(node, incarnation)
        if not self._is_newer(peer) and self._partners.get(node) != incarnation:
            return
        if endpoint.startswith(IPC) and self._is_newer(peer):
            self._converse(peer, _file_of(endpoint))
        self._submit(partial(self._switch.connect, node, incarnation, endpoint))

    def replace_keys(self, rows: tuple[KeyRow, ...]) -> None:
        """From here on these lives may speak over TCP, and no others."""
        self._packer.far = self._far | _nodes_of(rows)
        self._submit(partial(self._switch.replace_keys, rows))

    def forget(self, peer: Peer) -> None:
        """That life of a node is over: drop what is held for it, take nothing more of it."""
        self._ended[peer.node] = max(self._ended.get(peer.node, 0), peer.incarnation)
        if self._partners.get(peer.node, 0) <= peer.incarnation:
            self._partners.pop(peer.node, None)
            self._line.forget(peer.node)
        self._mappings.forget(peer)
        self._submit(partial(self._switch.forget, peer))

    @property
    def lease_until(self) -> float:
        """Seconds of `time.monotonic()`."""
        return self._switch.lease.until

    def lease_in_force(self, now: float) -> bool:
        return self._switch.lease.in_force(now)

    @property
    def answer_beats(self) -> bool:
        return self._switch.answer_beats

    @answer_beats.setter
    def answer_beats(self, answer: bool) -> None:
        self._switch.answer_beats = answer

    @property
    def counts(self) -> dict[str, int]:
        """How many messages were dropped, by kind."""
        return dict(self._switch.counts)

    def _submit(self, command: Callable[[], None]) -> None:
        if self._close_at is None:
            self._switch.submit(command)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ------------------------------------------------------------ the thread's side

    def _deliver(self, peer: Peer, message: Message, held_bytes: int) -> bool:
        unread_bytes = self._bytes_put - self._bytes_taken
        if self._unread.qsize() >= MAX_UNREAD or unread_bytes > self._assembly_bytes:
            return False
        self._bytes_put += held_bytes
        self._unread.put((peer, message, held_bytes))
        self._line.ring()
        return True

    def _give_up(self, peer: Peer, what: str) -> None:
        self._given_up = PeerError(str(peer), what)
        self.wake()

    def _parent_gone(self) -> None:
        self.closed_by_parent = True
        self.wake()


def _file_of(endpoint: str) -> Path:
    return Path(endpoint.removeprefix(IPC))


def _nodes_of(rows: Iterable[KeyRow]) -> frozenset[str]:
    return frozenset(node for node, _, _ in rows)


def _allow_all(peer: Peer, message: Message) -> bool:
    return True
