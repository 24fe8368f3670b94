"""The nodes that an agent has started: processes of one host, how they end and what is told of it.

Rules of this file: it signals only processes that it started, and only while they are not reaped:
their number cannot belong to anybody else before. It knows no link: its answers are messages.

Theory of operation. Commands are totals: Start of what runs is answered by Started, of what is over
by Exited, so either may be lost or repeated. A node is one process group; a dead leader is looked
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

from dbctl.forks import Forked, Forks
from dbctl.process import SPEC_BYTES_MAX, one_line, tail
from dbctl.transport.line import NODE_NAME
from dbctl.wire import Exited, Peer
from dbctl.wire_processes import Kill, Start, Started

GENTLE_S = 2.0  # from a gentle Kill to SIGKILL
CANNOT_START = 127  # the status of a node that could not be started, as the shell's

Key = tuple[str, int]


@dataclass
class Child:
    """One node's process. `log_start`: where this incarnation's text begins in its log."""

    process: subprocess.Popen[bytes] | Forked
    log_path: Path
    log_start: int
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
    """The processes of this host, by node and incarnation, and how the ended ones ended."""

    logs: Path
    forks: Forks | None = None  # None: each node is a program of its own
    running: dict[Key, Child] = field(default_factory=dict)
    ended: dict[Key, Exited] = field(default_factory=dict)

    def start(self, order: Start) -> Started | Exited | None:
        """Starts what is asked for; says what became of it. None: a newer incarnation is known."""
        key = (order.node, order.incarnation)
        if key in self.running:
            return Started(*key, self.running[key].process.pid)
        if key in self.ended:
            return self.ended[key]
        for node, incarnation in [*self.running, *self.ended]:
            if node == order.node and incarnation > order.incarnation:
                return None
        for (node, _), child in self.running.items():
            if node == order.node:  # an earlier life: it may change nothing any more
                child.signal_group(signal.SIGKILL)
        try:
            child = self.running[key] = spawn(order, self.logs, self.forks)
        except (OSError, ValueError) as error:
            word = f"cannot start {order.argv[0] if order.argv else 'nothing'}: {one_line(error)}"
            self.ended[key] = Exited(*key, CANNOT_START, "", word)
            return self.ended[key]
        return Started(*key, child.process.pid)

    def kill(self, order: Kill, now: float) -> Exited | None:
        """Ends one process group; what is over already is told again."""
        key = (order.node, order.incarnation)
        child = self.running.get(key)
        if child is None:
            return self.ended.get(key)
        if not order.gently:
            child.signal_group(signal.SIGKILL)
        elif child.kill_at > now + GENTLE_S:  # a repeated order does not put the end off
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
        return {node for node, _ in (*self.running, *self.ended)}

    def due(self) -> float:
        """When `kill_due` has to be called."""
        return min((child.kill_at for child in self.running.values()), default=inf)

    def kill_due(self, now: float) -> None:
        for child in self.running.values():
            if child.kill_at <= now:
                child.signal_group(signal.SIGKILL)
                child.kill_at = inf

    def end_all(self, *, gently: bool) -> None:
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
            text = tail(child.log_path, child.log_start)
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


def spawn(order: Start, logs: Path, forks: Forks | None = None) -> Child:
    """One node: own session, spec on its standard input, both outputs appended to its log.

    OSError: no such program, no more processes or memory, an unwritable log. ValueError: a name
    that is no node's, a spec that does not fit a pipe, a null character.
    """
    if not NODE_NAME.fullmatch(order.node):
        raise ValueError(f"{order.node!r} is not a node's name")
    if not order.argv:
        raise ValueError("no command")
    spec = order.spec.encode() + b"\n"
    if len(spec) > SPEC_BYTES_MAX:
        raise ValueError(f"a spec of {len(spec)} bytes, expected at most {SPEC_BYTES_MAX}")
    log_path = logs / f"{order.node}.log"
    with open(log_path, "ab") as output:
        log_start = output.tell()
        forked = None if forks is None else forks.start(order, output.fileno())
        process = forked or subprocess.Popen(
            order.argv,
            env={**os.environ, **dict(order.env)},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            bufsize=0,
        )
    child = Child(process, log_path, log_start)
    assert process.stdin is not None
    try:
        # The pipe holds the whole line, so this never waits for a child that does not read.
        if len(spec) > 1 << 16:
            fcntl.fcntl(process.stdin, fcntl.F_SETPIPE_SZ, len(spec))
        process.stdin.write(spec)
        if order.nice:
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, process.pid, min(19, own + order.nice))
    except BrokenPipeError:
        pass  # it is dead already: its own log says why, reap() reports it
    except OSError:
        child.signal_group(signal.SIGKILL)
        process.wait()
        process.stdin.close()
        raise
    return child
