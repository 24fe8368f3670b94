"""`python -m dbctl agent`: starts, watches and ends the processes of one run on one host.

Rules of this file: no numpy; it computes nothing and knows no role. It signals only processes that
it started, and only while they are not reaped: their number cannot belong to anybody else before.

Theory of operation. The link (one thread, every socket) relays what nodes and controller say to
each other and answers the nodes' beats while the agent's own lease is in force. What is said to the
agent itself waits in the link's queue, where the loop sleeps; signals, the deaths of children among
them, wake it there, and so does the end of standard input. So it is awake within a millisecond of
whatever happened.

Commands are totals: Start of what runs is answered by Started, of what is over by Exited, so either
may be lost or repeated. A node is one process group; a dead leader is looked at without reaping it,
its group is killed while its number is still its own, and only then is it reaped.

A node is ended by closing its standard input, as if the agent were gone, and by SIGKILL where that
is not enough. SIGTERM, SIGHUP and SIGINT are the controller's to answer: who sends one to every
process of a run (systemd, a batch system) gets a final checkpoint, which takes agent and nodes.

It ends at the end of its standard input (its parent is gone), at the end of its lease, or on
Finish: all its nodes gently, SIGKILL a second later, and the private directory goes.

An agent of another host is told its options as JSON on standard input (`--stdin`) and looks at that
host first (dbctl/greeting.py). It makes its directories itself, and sends the logs of its nodes to
the controller (dbctl/logs.py).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path

from dbctl.agent_options import LET_GO, make_directories, parse, told
from dbctl.greeting import Greeting
from dbctl.logs import LogSender
from dbctl.process import (
    SPEC_BYTES_MAX,
    beat_s,
    clear_runtime,
    end_with_parent,
    leave_signals,
    log,
    one_line,
    raise_descriptor_limit,
    tail,
)
from dbctl.transport.line import NODE_NAME
from dbctl.transport.link import Link
from dbctl.wire import Exited, Finish, Message, Peer
from dbctl.wire_logs import LogFiled
from dbctl.wire_processes import Failed, Kill, Start, Started

CONTROLLER = "controller"
GENTLE_S = 2.0  # from a gentle Kill to SIGKILL
END_GENTLE_S = 1.0  # the same when the agent itself ends: lease + 2 s is the promise
END_KILL_S = 0.8  # how long the killed may take to be reaped
LOOK_S = 0.25  # how late the end of the lease is seen
LAST_LOGS_S = 2.0  # how long the rest of the logs may take once all nodes have ended
CANNOT_START = 127  # the status of a node that could not be started, as the shell's

_now = time.monotonic
Key = tuple[str, int]


@dataclass
class Child:
    """One node's process. `log_start`: where this incarnation's text begins in its log."""

    process: subprocess.Popen[bytes]
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
            child = self.running[key] = spawn(order, self.logs)
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
        return new


def spawn(order: Start, logs: Path) -> Child:
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
        process = subprocess.Popen(
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


class Agent:
    """The loop. `serve` returns why it is over; `end` leaves nothing running. `on_orders` is called
    when something has come.
    """

    def __init__(
        self, link: Link, children: Children, *, name: str, logs: LogSender | None = None
    ) -> None:
        self.link = link
        self.children = children
        self.name = name
        self.logs = logs
        self.on_orders: Callable[[], None] = lambda: None
        self.over = ""

    def handle_signals(self) -> None:
        """From here on a child's death wakes `serve`."""
        signal.signal(signal.SIGCHLD, lambda number, frame: self.link.wake())

    def serve(self) -> str:
        while not self.over:
            now = _now()
            if not self.link.lease_in_force(now):
                return "the lease ran out: nothing was heard of the controller"
            kill_at = min((c.kill_at for c in self.children.running.values()), default=inf)
            messages = self.link.receive(max(0.0, min(kill_at - now, LOOK_S)))
            if self.link.closed_by_parent:
                return LET_GO
            if messages:
                self.on_orders()
            for peer, message in messages:
                # This process may have been stopped: without a lease it carries out no order.
                if not self.link.lease_in_force(_now()):
                    break
                # After Finish too, what was filed is heard: the rest of a log would wait for it.
                if not self.over or isinstance(message, LogFiled):
                    self._take(peer, message)
            # After the messages: a node's own word (Failed) came before its death.
            self._report(self.children.reap())
            self.children.kill_due(_now())
            self._send_logs()
        return self.over

    def _take(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Failed):
            child = self.children.running.get((peer.node, peer.incarnation))
            if child is not None:
                child.word = message.what
        elif peer.node != CONTROLLER:
            log(self.name, f"ignored {type(message).__name__} of {peer}")
        elif isinstance(message, Start):
            answer = self.children.start(message)
            log(self.name, f"start {message.node}#{message.incarnation}: {answer}")
            if answer is not None:
                self.link.send(CONTROLLER, answer)
        elif isinstance(message, Kill):
            log(self.name, f"kill {message.node}#{message.incarnation}, gently {message.gently}")
            self._report([e for e in [self.children.kill(message, _now())] if e is not None])
        elif isinstance(message, LogFiled) and self.logs is not None:
            self.logs.take(message)
        elif isinstance(message, Finish):
            self.over = "finished"
        else:
            log(self.name, f"ignored {type(message).__name__} of {peer}: no order for an agent")

    def _report(self, exits: list[Exited]) -> None:
        for exited in exits:
            log(self.name, f"{exited.node}#{exited.incarnation} ended, status {exited.status}")
            self.link.send(CONTROLLER, exited)

    def _send_logs(self) -> bool:
        """Says what is due of the nodes' logs; whether a piece is still on its way."""
        if self.logs is None:
            return False
        piece = self.logs.due({node for node, _ in self._known()}, _now())
        if piece is not None:
            self.link.send(CONTROLLER, piece)
        return self.logs.waits

    def _known(self) -> list[Key]:
        return [*self.children.running, *self.children.ended]

    def end_logs(self) -> None:
        """All nodes have ended: the rest of their logs, and then no copy stays here."""
        assert self.logs is not None
        deadline = _now() + LAST_LOGS_S
        while self._send_logs() and _now() < deadline:
            for peer, message in self.link.receive(0.05):
                self._take(peer, message)
        self.logs.remove({node for node, _ in self._known()})

    def end(self) -> None:
        """Gently, a second, SIGKILL; whatever this agent started is dead and reaped, or (asleep in
        the kernel) killed. Stopped processes die of SIGKILL too."""
        for gently, limit_s in ((True, END_GENTLE_S), (False, END_KILL_S)):
            self.children.end_all(gently=gently)
            deadline = _now() + limit_s
            # Looked at, not waited for: this must work whatever became of the link.
            while self.children.running and _now() < deadline:
                self._report(self.children.reap())
                time.sleep(0.005)
        for (node, _), child in self.children.running.items():
            log(self.name, f"{node} (pid {child.process.pid}) was killed but does not end")


def main(argv: list[str]) -> int:
    """Runs an agent to its end; 0 whatever ended it, the reason is in its log."""
    leave_signals()  # its nodes inherit it: none is without between its birth and its first line
    try:
        if argv == ["--stdin"]:
            this = told()
            options, greeting = this.options, Greeting(this.options, this)
            if not greeting.may_start:
                greeting.hold_alone()
                return 0
            make_directories(options)
        else:
            this, options = None, parse(argv)
            greeting = Greeting(options, None)
    except (OSError, ValueError) as error:
        log("agent", f"cannot begin: {one_line(error)}")
        return 1
    logs = LogSender(Path(options.logs)) if this else None
    try:
        if greeting.begin():
            take_orders(options, greeting, logs=logs)
    except BrokenPipeError:
        log(options.name, "ends: nobody reads what it says")
    finally:
        greeting.close()
        clear_runtime(options.runtime)
        if logs is not None:
            logs.remove(())  # the directory, if it was never written in
    return 0


def take_orders(options: argparse.Namespace, greeting: Greeting, *, logs: LogSender | None) -> None:
    """From the last word of the greeting to the end. BrokenPipeError: nobody reads it."""
    raise_descriptor_limit()
    end_with_parent(signal.SIGCONT)  # a stopped agent must wake to see that its parent is gone
    link = Link(
        run=options.run,
        node=options.name,
        incarnation=1,
        listen=f"ipc://{options.runtime}/{options.name}.sock",
        lease_s=options.lease,
        beat_s=beat_s(options.lease),
        relay=True,
        bulk="inline",
        watch_fd=0,
        on_trouble=partial(log, options.name),
    )
    agent = Agent(link, Children(Path(options.logs)), name=options.name, logs=logs)
    agent.handle_signals()
    agent.on_orders = greeting.close
    link.start()
    try:
        greeting.end()
        log(options.name, f"ends: {agent.serve()}")
    finally:
        agent.end()
        if agent.over == "finished" and logs is not None:
            agent.end_logs()
        link.close(1.0 if agent.over == "finished" else 0.0)
