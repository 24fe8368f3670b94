"""A whole cluster in one thread: roles over a seeded network that misbehaves.

Rules of this file: no process, socket, thread or real clock; all randomness comes from `seed`, so a
history that failed runs again the same way. Theory of operation: a heap of events in virtual time.
Each message passes the wire's encoding. A payload travels as the sender's own memory (read-only, as
shared memory does) or in pieces, each of which is delayed, lost and repeated on its own. A node
takes messages as they arrive and is stepped when its role is due, unless it is paused or dead.
It is the simulator, the debugger, and the fastest way to run the tests.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from dbctl.envelope import (
    PROTOCOL_VERSION,
    Envelope,
    Inline,
    decode,
    encode,
    with_payload,
    without_payload,
)
from dbctl.rights import CONTROLLER
from dbctl.roles.base import NEVER, Array, Done, Effect, Effects, Record, Role, Save, Send, View
from dbctl.transport.pieces import Assembler, cut
from dbctl.wire import Exited, Finish, Message, Peer


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Chances are per message or piece; times in virtual seconds. The default is a good network."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay_s: float = 0.001  # uniform up to this: messages overtake each other
    in_pieces: float = 0.0  # chance that a payload travels in pieces
    piece_bytes: int = 64
    step_s: float = 0.001  # a step takes up to this
    death_seen_s: float = 0.05


@dataclass(slots=True)
class _Node:
    role: Role
    peer: Peer
    assembler: Assembler
    serial: int = 0
    free_at: float = 0.0
    paused_until: float = 0.0
    wake_at: float = NEVER  # the step event that is in the heap
    finished: bool = False


class Network:
    """`watch(now, sender, to, message)` sees what is sent; `on_save` gets complete cuts."""

    def __init__(
        self,
        seed: int,
        faults: Faults | None = None,
        *,
        watch: Callable[[float, Peer, str, Message], None] | None = None,
        on_save: Callable[[float, Save], Effects] | None = None,
        on_record: Callable[[float, Record], None] | None = None,
    ) -> None:
        self._random = Random(seed)
        self.faults = faults or Faults()
        self._watch = watch
        self._on_save = on_save
        self._on_record = on_record
        self._nodes: dict[str, _Node] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._n_events = 0
        self._arrived: dict[tuple[str, str], int] = {}
        self._n_sent = 0
        self.now = 0.0
        self.happened: Counter[str] = Counter()
        self.done: dict[str, Done] = {}

    # ------------------------------------------------------------------------------------- nodes

    def add(self, name: str, role: Role, *, incarnation: int = 1) -> None:
        """A node, or its next life: it starts at once."""
        node = _Node(
            role,
            Peer(name, incarnation),
            Assembler(max_messages=2, piece_bytes=self.faults.piece_bytes),
        )
        self._nodes[name] = node
        self._effects(node, role.start(self.now))
        self._schedule_step(node)

    def role(self, name: str) -> Role:
        return self._nodes[name].role

    def alive(self, name: str) -> bool:
        return name in self._nodes

    def kill(self, name: str) -> None:
        """SIGKILL: nothing more comes of it; the controller learns it a little later."""
        node = self._nodes.pop(name, None)
        if node is None:
            return
        self.happened["kill"] += 1
        exited = Exited(name, node.peer.incarnation, -9, "")
        self._at(self.now + self.faults.death_seen_s, lambda: self._tell(exited))

    def pause(self, name: str, seconds: float) -> None:
        """SIGSTOP and, later, SIGCONT: its messages wait."""
        if name in self._nodes:
            self.happened["pause"] += 1
            self._nodes[name].paused_until = self.now + seconds

    def at(self, time: float, action: Callable[[], None]) -> None:
        """A test's own event."""
        self._at(time, action)

    def _tell(self, exited: Exited) -> None:
        controller = self._nodes.get(CONTROLLER)
        if controller is not None:
            effects = controller.role.receive(self.now, Peer("agent-0", 1), exited)
            self._effects(controller, effects)
            self._schedule_step(controller)

    def perform(self, name: str, effects: Effects) -> None:
        """Effects that a test got from a role by calling it directly."""
        node = self._nodes[name]
        self._effects(node, effects)
        self._schedule_step(node)

    # -------------------------------------------------------------------------------------- time

    def run(self, *, until: Callable[[], bool] | None = None, limit_s: float = 1e6) -> bool:
        """Runs events until `until` holds or nothing is left; False if `limit_s` came first."""
        while self._heap:
            if until is not None and until():
                return True
            time, _, action = heapq.heappop(self._heap)
            if time > limit_s:
                return False
            self.now = time
            action()
        return until is None or until()

    def _at(self, time: float, action: Callable[[], None]) -> None:
        self._n_events += 1
        heapq.heappush(self._heap, (time, self._n_events, action))

    def _schedule_step(self, node: _Node) -> None:
        if node.finished or self._nodes.get(node.peer.node) is not node:
            return
        earliest = max(self.now, node.free_at, node.paused_until)
        if earliest >= node.wake_at:
            return  # it wakes by then, whatever its role says: asking takes longer
        time = max(earliest, node.role.due)
        if time < node.wake_at:
            node.wake_at = time
            self._at(time, lambda: self._step(node, time))

    def _step(self, node: _Node, scheduled: float) -> None:
        if node.wake_at != scheduled or self._nodes.get(node.peer.node) is not node:
            return
        node.wake_at = NEVER
        if node.finished:
            return
        if node.paused_until <= self.now and node.role.due <= self.now:
            effects = node.role.step(self.now)
            node.free_at = self.now + self._random.random() * self.faults.step_s
            self._effects(node, effects)
        self._schedule_step(node)

    # ---------------------------------------------------------------------------------- messages

    def _effects(self, node: _Node, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._send(node, effect.to, effect.message)
                case Record():
                    if self._on_record is not None:
                        self._on_record(self.now, effect)
                case Save():
                    if self._on_save is not None:
                        self._effects(node, self._on_save(self.now, effect))
                case Done():
                    self._finished(node, effect)

    def _finished(self, node: _Node, done: Done) -> None:
        node.finished = True
        self.done[node.peer.node] = done
        if node.peer.node == CONTROLLER:
            for name, other in list(self._nodes.items()):
                if name != CONTROLLER and not other.finished:
                    self._effects(other, other.role.receive(self.now, node.peer, Finish()))

    def _send(self, node: _Node, to: str, message: Message) -> None:
        if self._watch is not None:
            self._watch(self.now, node.peer, to, message)
        payload: Any = getattr(message, "payload", None) if message.carries_payload else None
        if payload is None:
            self._carry(node, to, message)
            return
        array: Array = payload.array if isinstance(payload, View) else payload
        bare = without_payload(message)
        if self._random.random() < self.faults.in_pieces:
            node.serial += 1
            for piece, of, data in cut(array, self.faults.piece_bytes):
                inline = Inline(node.serial, piece, of, len(array), array.dtype.str)
                self._carry(node, to, bare, inline=inline, payload=bytes(data))
        else:
            shared = array.view()
            shared.flags.writeable = False
            self._carry(node, to, bare, payload=shared)

    def _carry(
        self, node: _Node, to: str, bare: Any, *, inline: Inline | None = None, payload: Any = None
    ) -> None:
        """One message or piece on its way: lost, once, or twice."""
        frame = encode(Envelope(PROTOCOL_VERSION, "run", *node.peer, to, bare, inline))
        kind = "piece" if inline is not None else "message"
        random = self._random.random
        if random() < self.faults.drop:
            self.happened[f"{kind} lost"] += 1
            return
        self._n_sent += 1
        number, pair = self._n_sent, (node.peer.node, to)
        copies = 1
        if random() < self.faults.duplicate:
            self.happened[f"{kind} repeated"] += 1
            copies = 2
        for _ in range(copies):
            time = self.now + random() * self.faults.delay_s
            self._at(time, lambda: self._deliver(number, pair, frame, payload=payload))

    def _deliver(self, number: int, pair: tuple[str, str], frame: bytes, *, payload: Any) -> None:
        if number < self._arrived.get(pair, 0):
            self.happened["overtaken"] += 1
        else:
            self._arrived[pair] = number
        self._arrive(pair[1], frame, payload)

    def _arrive(self, to: str, frame: bytes, payload: Any) -> None:
        node = self._nodes.get(to)
        if node is None or node.finished:
            return
        if node.paused_until > self.now:
            self._at(node.paused_until, lambda: self._arrive(to, frame, payload))
            return
        envelope = decode(frame)
        sender = envelope.peer
        message: Message = envelope.message
        if envelope.payload is not None:
            assert isinstance(envelope.payload, Inline)
            whole = node.assembler.add(sender, envelope.payload, payload)
            if whole is None:
                return
            message = with_payload(message, whole)
        elif payload is not None:
            message = with_payload(message, payload)
        self._effects(node, node.role.receive(self.now, sender, message))
        self._schedule_step(node)
