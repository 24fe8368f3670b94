"""Nodes that are forks of one process which has imported what all of them need.

Rules of this file: whatever goes wrong with a template, the node is started as a program of its
own; only what says that no process can be started at all (OSError of a fork) is told. Linux only.

Theory of operation. A template is `python -P -m dbctl node TEMPLATE`: a node up to the line of its
input that says which one it is (dbctl/node/template.py). It is asked over a socket, its standard
input, with a node's name, input and log; it forks, and the fork forks the node and ends, so that
the node becomes the child of the agent, the nearest subreaper: its end is seen and its number kept
as of what the agent started itself. The answer comes after that. What a template has read and not
answered leaves a node whose input has ended, and it ends.

One template a command and environment, since numpy's libraries read theirs once. It is not kept:
it ends when it has not been asked for some seconds, and the next node of its kind starts another.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Container
from dataclasses import dataclass, field
from typing import BinaryIO

from dbctl.process import TEMPLATE, log, one_line
from dbctl.wire_processes import Start

ANSWER_S = 10.0  # how long its import may take
PID = struct.Struct("i")  # an answer: the node's number, or an errno below zero

PR_SET_CHILD_SUBREAPER = 36

Kind = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]


class Forked:
    """A child of this process that it did not start itself, as a Popen."""

    def __init__(self, pid: int, stdin: BinaryIO) -> None:
        self.pid = pid
        self.stdin: BinaryIO | None = stdin
        self.returncode: int | None = None

    def wait(self) -> int:
        """Reaps it; its status, negative for a signal."""
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


@dataclass
class Template:
    """The process, and this end of what it is asked by."""

    process: subprocess.Popen[bytes]
    line: socket.socket

    def ask(self, order: Start, files: tuple[int, int]) -> int:
        """The number of the new node. EOFError: it has ended, or does not answer."""
        try:
            socket.send_fds(self.line, [order.node.encode()], files)
            answer = self.line.recv(PID.size)
        except OSError as error:
            raise EOFError(one_line(error)) from error
        if len(answer) != PID.size:
            raise EOFError("it has ended")
        number: int = PID.unpack(answer)[0]
        if number < 0:
            raise OSError(-number, os.strerror(-number))
        return number

    def end(self) -> None:
        self.line.close()
        self.process.kill()
        self.process.wait()


@dataclass
class Forks:
    """The templates of one agent."""

    name: str
    _templates: dict[Kind, Template] = field(default_factory=dict)
    _useless: set[Kind] = field(default_factory=set)

    def start(self, order: Start, log_fd: int) -> Forked | None:
        """A fork as `order` asks for; None if it has to be a program of its own.

        OSError: no such program, no more processes or memory.
        """
        kind = (order.argv[:-1], order.env)
        if not _is_plain(order) or kind in self._useless:
            return None
        theirs, ours = os.pipe()
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, ours)
            try:
                number = self._number(kind, order, (theirs, log_fd))
            finally:
                os.close(theirs)
            if number is None:
                return None
            undo.pop_all()
        return Forked(number, os.fdopen(ours, "wb", buffering=0))

    def _number(self, kind: Kind, order: Start, files: tuple[int, int]) -> int | None:
        known = self._templates.get(kind)
        if known is not None:
            with contextlib.suppress(EOFError):  # it was not asked for so long that it ended
                return known.ask(order, files)
            self._templates.pop(kind).end()
        template = self._templates[kind] = _begin(order)
        try:
            return template.ask(order, files)
        except EOFError as error:
            self._templates.pop(kind).end()
            self._useless.add(kind)
            log(self.name, f"nodes are not forked from here on, a template failed: {error}")
            return None

    def reap(self, running: Container[int]) -> None:
        """Templates that have ended, and what is left of nodes that are gone.

        Never one of `running`: who watches those reaps them.
        """
        for kind, template in list(self._templates.items()):
            if template.process.poll() is not None:
                self._templates.pop(kind).end()
        with contextlib.suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                mine = any(t.process.pid == found.si_pid for t in self._templates.values())
                if mine or found.si_pid in running:
                    break
                os.waitpid(found.si_pid, 0)

    def close(self) -> None:
        while self._templates:
            self._templates.popitem()[1].end()


def forks_here(name: str) -> Forks | None:
    """For a process that is nothing but an agent: from now on it is the parent of the orphans among
    its descendants. None where the system has no such thing.
    """
    if not sys.platform.startswith("linux"):
        return None
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        return None
    return Forks(name)


def _is_plain(order: Start) -> bool:
    """Whether this is dbctl's own command for a node (launch/base.py)."""
    words = ("-P", "-m", "dbctl", "node", order.node)
    return order.argv[1:] == words and len(order.node) <= len(TEMPLATE)


def _begin(order: Start) -> Template:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, contextlib.ExitStack() as undo:
        undo.enter_context(ours)
        process = subprocess.Popen(
            (*order.argv[:-1], TEMPLATE),
            env={**os.environ, **dict(order.env)},
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        undo.pop_all()
    ours.settimeout(ANSWER_S)
    return Template(process, ours)
