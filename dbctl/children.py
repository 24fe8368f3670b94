"""The nodes that an agent has started: processes of one host, how they end and what is told of it.

Rules of this file: it signals only processes that it started or had forked, and only while they are
not reaped: their number cannot belong to anybody else before. It knows no link: its answers are
messages.

Theory of operation. Commands are totals: Start of what runs is answered by Started, of what is over
by Exited, so either may be lost or repeated; of what is being forked it is answered when that is
done. A node is one process group; a dead leader is looked
at without reaping it, its group is killed while its number is still its own, and only then is it
reaped. A node is ended by closing its standard input, as if the agent were gone, and by SIGKILL
where that is not enough.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import BinaryIO

from dbctl.errors import reason
from dbctl.forks import Forked, Forks, Question, environment
from dbctl.process import SPEC_BYTES_MAX, one_line, tail
from dbctl.transport.line import NODE_NAME
from dbctl.wire import Exited, Peer
from dbctl.wire_processes import Kill, Start, Started

GENTLE_S = 2.0  # from a gentle Kill to SIGKILL
CANNOT_START = 127  # the status of a node that could not be started, as the shell's

Key = tuple[str, int]


@dataclass(frozen=True)
class Log:
    """Where a node's outputs go, and where this incarnation's begin in it."""

    path: Path
    start: int


@dataclass
class Child:
    """One node's process."""

    process: subprocess.Popen[bytes] | Forked
    log: Log
    kill_at: float = inf
    word: str = ""

    def signal_group(self, number: int) -> None:
        """To the whole group; only while the leader is not reaped (this file's rule)."""
        assert self.process.returncode is None
        # Nobody may be left in it, or (macOS) only the dead leader.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def close_input(self) -> None:
        """A node ends by that, in the middle of a long product too (node/loop.py), if it can."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def has_ended(self) -> bool:
        """Whether the leader is dead; it is not reaped by this."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, flags) is not None


@dataclass
class Children:
    """The processes of this host, by node and incarnation, and how the ended ones ended.

    `waiting`: what is being forked, and the open log of each.
    """

    logs: Path
    forks: Forks | None = None  # None: each node is a program of its own
    running: dict[Key, Child] = field(default_factory=dict)
    ended: dict[Key, Exited] = field(default_factory=dict)
    waiting: dict[Key, tuple[Question, BinaryIO]] = field(default_factory=dict)

    def start(self, order: Start) -> Started | Exited | None:
        """Starts what is asked for; says what became of it.

        None: nothing yet, see `forked`; or never, as a newer incarnation is known.
        """
        key = (order.node, order.incarnation)
        if key in self.running:
            return Started(*key, self.running[key].process.pid)
        if key in self.ended:
            return self.ended[key]
        if key in self.waiting:
            return None
        for node, incarnation in [*self.running, *self.ended, *self.waiting]:
            if node == order.node and incarnation > order.incarnation:
                return None
        for node, incarnation in [*self.running, *self.waiting]:
            if node == order.node:  # an earlier life: it may change nothing any more
                self._kill((node, incarnation))
        try:
            check(order)
            with contextlib.ExitStack() as at_end:
                output = at_end.enter_context(open(self.logs / f"{order.node}.log", "ab"))
                if self.forks is None or not self.forks.takes(order):
                    return self._run(order, output, None)
                self.waiting[key] = (self.forks.ask(order, output.fileno()), output)
                at_end.pop_all()
                return None
        except (OSError, ValueError) as error:
            return self._not_started(order, error)

    def forked(self, now: float) -> list[Started | Exited]:
        """What became of the nodes that were to be forked, since the last call."""
        if self.forks is None:
            return []
        answers: list[Started | Exited] = []
        for question, fork in self.forks.look(now):
            order = question.order
            _, output = self.waiting.pop((order.node, order.incarnation))
            try:
                with output:
                    answers.append(self._run(order, output, fork))
            except (OSError, ValueError) as error:
                answers.append(self._not_started(order, error))
        return answers

    def _run(self, order: Start, output: BinaryIO, fork: Forked | None) -> Started:
        """`fork`, or a program, becomes the node. OSError, ValueError: it does not."""
        log = Log(self.logs / f"{order.node}.log", output.tell())
        child = Child(fork or program(order, output), log)
        hand_over(child, order)
        self.running[order.node, order.incarnation] = child
        return Started(order.node, order.incarnation, child.process.pid)

    def _not_started(self, order: Start, error: Exception) -> Exited:
        key = (order.node, order.incarnation)
        word = f"cannot start {order.argv[0] if order.argv else 'nothing'}: {one_line(error)}"
        log = os.fspath(self.logs / f"{order.node}.log")
        if isinstance(error, OSError) and error.filename == log:  # the program is not at fault
            word = f"its log cannot be written: {reason(error)}"
        self.ended[key] = Exited(*key, CANNOT_START, "", word)
        return self.ended[key]

    def _kill(self, key: Key) -> Exited | None:
        """At once; how it ended, if it had not begun."""
        if key in self.running:
            self.running[key].signal_group(signal.SIGKILL)
            return None
        question, output = self.waiting.pop(key)
        output.close()
        assert self.forks is not None
        self.forks.drop(question)
        self.ended[key] = Exited(*key, -signal.SIGKILL, "", "")
        return self.ended[key]

    def kill(self, order: Kill, now: float) -> Exited | None:
        """Ends one process group; what is over already is told again."""
        key = (order.node, order.incarnation)
        child = self.running.get(key)
        if key in self.waiting or (child is not None and not order.gently):
            return self._kill(key)
        if child is None:
            return self.ended.get(key)
        if child.kill_at > now + GENTLE_S:  # a repeated order does not put the end off
            child.close_input()
            child.kill_at = now + GENTLE_S
        return None

    def note(self, peer: Peer, word: str) -> None:
        """A node's own word about why it ends, to be told with its end."""
        child = self.running.get((peer.node, peer.incarnation))
        if child is not None:
            child.word = word

    @property
    def nodes(self) -> set[str]:
        """All that were ever to be started here."""
        return {node for node, _ in (*self.running, *self.ended, *self.waiting)}

    def due(self) -> float:
        """When `kill_due` has to be called."""
        return min((child.kill_at for child in self.running.values()), default=inf)

    def kill_due(self, now: float) -> None:
        for child in self.running.values():
            if child.kill_at <= now:
                child.signal_group(signal.SIGKILL)
                child.kill_at = inf

    def end_all(self, *, gently: bool) -> None:
        for key in list(self.waiting):
            self._kill(key)
        for child in self.running.values():
            if gently:
                child.close_input()
            else:
                child.signal_group(signal.SIGKILL)

    def reap(self) -> list[Exited]:
        """What ended since the last call; the rest of each group is killed before."""
        new = []
        for key, child in list(self.running.items()):
            if not child.has_ended():
                continue
            child.signal_group(signal.SIGKILL)
            status = child.process.wait()
            child.close_input()
            text = tail(child.log.path, child.log.start)
            self.ended[key] = Exited(*key, status, text, child.word)
            new.append(self.ended[key])
            del self.running[key]
        if self.forks is not None:
            self.forks.reap({child.process.pid for child in self.running.values()})
        return new

    def close(self) -> None:
        """Once all have ended: nothing that could start another is left."""
        if self.forks is not None:
            self.forks.close()


def check(order: Start) -> None:
    """ValueError: a name that is no node's, a spec that does not fit a pipe, no command."""
    if not NODE_NAME.fullmatch(order.node):
        raise ValueError(f"{order.node!r} is not a node's name")
    if not order.argv:
        raise ValueError("no command")
    size = len(_line(order))
    if size > SPEC_BYTES_MAX:
        raise ValueError(f"a spec of {size} bytes, expected at most {SPEC_BYTES_MAX}")


def program(order: Start, output: BinaryIO) -> subprocess.Popen[bytes]:
    """The node as a program: own session, a pipe as its input, both outputs appended to `output`.

    OSError: no such program, no more processes or memory. ValueError: a null character.
    """
    return subprocess.Popen(
        order.argv,
        env=environment(order),
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        start_new_session=True,
        bufsize=0,
    )


def hand_over(child: Child, order: Start) -> None:
    """Gives a node its place in the queue for processors, and its spec. OSError: it is ended."""
    stdin = child.process.stdin
    assert stdin is not None
    spec = _line(order)
    try:
        if order.nice:  # before the spec: a thread that has begun keeps what it began with
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, child.process.pid, min(19, own + order.nice))
        # The pipe holds the whole line, so this never waits for a child that does not read.
        if len(spec) > 1 << 16:
            fcntl.fcntl(stdin, fcntl.F_SETPIPE_SZ, len(spec))
        stdin.write(spec)
    except (BrokenPipeError, ProcessLookupError):
        pass  # it is dead already: its own log says why, reap() reports it
    except OSError:
        child.signal_group(signal.SIGKILL)
        child.process.wait()
        stdin.close()
        raise


def _line(order: Start) -> bytes:
    return order.spec.encode() + b"\n"
