"""`python -m dbctl agent`: starts, watches and ends the processes of one run on one host.

Rules of this file: no numpy; it computes nothing and knows no role. What it starts, and how that
ends, is children.py's.

Theory of operation. The link (one thread, every socket) relays what nodes and controller say to
each other and answers the nodes' beats while the agent's own lease is in force. What is said to the
agent itself waits in the link's queue, where the loop sleeps; signals, the deaths of children among
them, wake it there, and so does the end of standard input. So it is awake within a millisecond of
whatever happened.

SIGTERM, SIGHUP and SIGINT are the controller's to answer: who sends one to every process of a run
(systemd, a batch system) gets a final checkpoint, which takes agent and nodes.

It ends at the end of its standard input (its parent is gone), at the end of its lease, or on
Finish: all its nodes gently, SIGKILL a second later, and the private directory goes.

An agent of another host is told its options as JSON on standard input (`--stdin`) and looks at that
host first (dbctl/greeting.py). It makes its directories itself, and sends the logs of its nodes to
the controller (dbctl/logs.py).
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dbctl.agent_options import LET_GO, make_directories, parse, told
from dbctl.children import Children
from dbctl.forks import forks_here
from dbctl.greeting import Greeting
from dbctl.logs import LogSender
from dbctl.process import (
    beat_s,
    clear_runtime,
    end_with_parent,
    escape_line,
    leave_signals,
    log,
    one_line,
    raise_descriptor_limit,
)
from dbctl.rights import CONTROLLER
from dbctl.transport.link import Link
from dbctl.wire import Exited, Finish, Message, Peer
from dbctl.wire_logs import LogFiled
from dbctl.wire_processes import Failed, Kill, Start, Started

END_GENTLE_S = 1.0  # from the end of all inputs to SIGKILL: lease + 2 s is the promise
END_KILL_S = 0.8  # how long the killed may take to be reaped
LOOK_S = 0.25  # how late the end of the lease is seen
LOOK_FORKED_S = 0.002  # how late it is seen that a node was forked
FORK_S = 5.0  # how long a template may take; no more than half a lease, which the controller waits
LAST_LOGS_S = 2.0  # how long the rest of the logs may take once all nodes have ended

_now = time.monotonic


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
            look_s = LOOK_FORKED_S if self.children.waiting else LOOK_S
            messages = self.link.receive(max(0.0, min(self.children.due() - now, look_s)))
            if self.link.closed_by_parent:
                said = (m for peer, m in messages if peer.node == CONTROLLER)
                return "finished" if any(isinstance(m, Finish) for m in said) else LET_GO
            if messages:
                self.on_orders()
            for peer, message in messages:
                # This process may have been stopped: without a lease it carries out no order.
                if not self.link.lease_in_force(_now()):
                    break
                # After Finish too, what was filed is heard: the rest of a log would wait for it.
                if not self.over or isinstance(message, LogFiled):
                    self._take(peer, message)
            for answer in self.children.forked(_now()):
                log(self.name, _became(answer))
                self.link.send(CONTROLLER, answer)
            # After the messages: a node's own word (Failed) came before its death.
            self._report(self.children.reap())
            self.children.kill_due(_now())
            self._send_logs()
        return self.over

    def _take(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Failed):
            self.children.note(peer, message.what)
        elif peer.node != CONTROLLER:
            log(self.name, f"ignored {type(message).__name__} of {peer}")
        elif isinstance(message, Start):
            answer = self.children.start(message)
            if answer is not None:
                log(self.name, _became(answer))
                self.link.send(CONTROLLER, answer)
            elif (message.node, message.incarnation) not in self.children.waiting:
                node = f"{message.node}#{message.incarnation}"
                log(self.name, f"{node} is not started: a later life of it is known")
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
        piece = self.logs.due(self.children.nodes, _now())
        if piece is not None:
            self.link.send(CONTROLLER, piece)
        return self.logs.waits

    def end_logs(self) -> None:
        """All nodes have ended: the rest of their logs, and then no copy stays here."""
        assert self.logs is not None
        deadline = _now() + LAST_LOGS_S
        while self._send_logs() and _now() < deadline:
            for peer, message in self.link.receive(0.05):
                self._take(peer, message)
        self.logs.remove(self.children.nodes)

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
        self.children.close()


def _became(answer: Started | Exited) -> str:
    """What an order to start came to, as the log says it."""
    node = f"{answer.node}#{answer.incarnation}"
    match answer:
        case Started(pid=pid):
            return f"{node} started with pid {pid}"
        case Exited(status=status, word=word):
            return f"{node} is over, status {status}" + (word and f": {escape_line(word)}")


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
    forks = forks_here(options.name, min(FORK_S, options.lease / 2))
    children = Children(Path(options.logs), forks)
    agent = Agent(link, children, name=options.name, logs=logs)
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
