"""Nodes that are forks of a process which has imported what all of them need.

Rules of this file: nothing waits; whatever goes wrong with a template, the node becomes a program
of its own. Linux only.

Theory of operation. A template is `python -P -m dbctl node TEMPLATE`: a node up to the line of its
input that says which one it is (dbctl/node/template.py). It is asked over a socket, its standard
input, with a node's name, input and log; it forks, and the fork forks the node and ends, so that
the node becomes the child of the agent, the nearest subreaper: its end is seen and its number kept
as of what the agent started itself. The answer comes after that. One question at a time is on its
way, each with a pipe of its own: where no answer comes, the pipe is closed before anybody else is
asked, and a node that was forked all the same finds the end of its input and ends.

One template a command and environment, since numpy's libraries read theirs once. It is not kept:
it ends when it has not been asked for some seconds, and the next node of its kind starts another.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import BinaryIO

from dbctl.process import FORKED, TEMPLATE, log, one_line, prctl
from dbctl.wire_processes import Start

PR_SET_CHILD_SUBREAPER = 36
DYING_S = 1.0  # what a killed template may take before it is left to end by itself

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


@dataclass(eq=False)
class Question:
    """What is to be forked. `stdin`: this end of the node's input, while the question is asked."""

    order: Start
    log_fd: int
    stdin: int | None = None
    is_dropped: bool = False

    def close_input(self) -> None:
        if self.stdin is not None:
            os.close(self.stdin)
            self.stdin = None

    def take_input(self) -> BinaryIO:
        assert self.stdin is not None
        stdin, self.stdin = os.fdopen(self.stdin, "wb", buffering=0), None
        return stdin


Answer = tuple[Question, Forked | None]


@dataclass(eq=False)
class Template:
    """The process, this end of what it is asked by, and what is asked. `proven`: it has forked."""

    process: subprocess.Popen[bytes]
    line: socket.socket
    waiting: deque[Question] = field(default_factory=deque)
    asked: Question | None = None
    answer_by: float = inf
    proven: bool = False

    def ask(self, question: Question) -> None:
        """OSError: it has ended, or no pipe can be made; `question` is asked all the same."""
        self.asked = question
        theirs, question.stdin = os.pipe()
        try:
            files = (theirs, question.log_fd)
            socket.send_fds(self.line, [question.order.node.encode()], files)
        finally:
            os.close(theirs)

    def answer(self) -> int | None:
        """The new node's number, 0: no fork came of it; None: not yet. OSError: it has ended."""
        try:
            word = self.line.recv(FORKED.size)
        except BlockingIOError:
            return None
        if len(word) != FORKED.size:
            raise ConnectionResetError("it has ended")
        number: int = FORKED.unpack(word)[0]
        return number

    def end(self) -> None:
        self.line.close()
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # asleep in the kernel
            self.process.wait(DYING_S)


class Forks:
    """The templates of one agent. `answer_s`: how long one may take, its import with it."""

    def __init__(self, name: str, answer_s: float) -> None:
        self.name = name
        self._answer_s = answer_s
        self._templates: dict[Kind, Template] = {}
        self._useless: set[Kind] = set()

    def takes(self, order: Start) -> bool:
        """Whether this is dbctl's own command for a node (launch/base.py), and forks work."""
        words = ("-P", "-m", "dbctl", "node", order.node)
        is_plain = order.argv[1:] == words and len(order.node) <= len(TEMPLATE)
        return is_plain and _kind(order) not in self._useless

    def ask(self, order: Start, log_fd: int) -> Question:
        """`look` tells what became of it. OSError: no such program, no more processes or memory.

        `log_fd` has to stay open until then.
        """
        template = self._templates.get(_kind(order)) or self._begin(order)
        question = Question(order, log_fd)
        template.waiting.append(question)
        return question

    def drop(self, question: Question) -> None:
        """Nobody wants it any more: it is not in an answer, and its node, if there is one, ends.

        Its log may be closed from here on.
        """
        question.is_dropped = True
        question.close_input()
        for template in self._templates.values():
            if question in template.waiting:
                template.waiting.remove(question)

    def look(self, now: float) -> list[Answer]:
        """What was answered since the last look; without a Forked it has to be a program."""
        answers: list[Answer] = []
        for kind in list(self._templates):
            answers += self._go_on(kind, now)
        return [(question, forked) for question, forked in answers if not question.is_dropped]

    def _go_on(self, kind: Kind, now: float) -> Iterator[Answer]:
        template = self._templates[kind]
        try:
            while template.asked or template.waiting:
                if template.asked is None:
                    template.answer_by = now + self._answer_s
                    template.ask(template.waiting.popleft())
                question, number = template.asked, template.answer()
                assert question is not None
                if number is None and now < template.answer_by:
                    return
                if number is None:
                    raise TimeoutError(f"no answer in {self._answer_s:g} s")
                template.asked = None
                yield question, self._made(question, number)
                template.proven = True
        except OSError as error:
            yield from self._give_up(kind, error)

    def _made(self, question: Question, number: int) -> Forked | None:
        if question.is_dropped:
            return None  # its input has ended, and so does it
        if number > 0:
            return Forked(number, question.take_input())
        question.close_input()
        return None

    def _give_up(self, kind: Kind, error: OSError) -> Iterator[Answer]:
        """A template has failed. One that had worked gets a successor, once."""
        template = self._templates.pop(kind)
        questions = [q for q in (template.asked, *template.waiting) if q and not q.is_dropped]
        for question in questions:
            question.close_input()
        template.end()
        if template.proven and questions:
            with contextlib.suppress(OSError):
                self._begin(questions[0].order).waiting.extend(questions)
                return
        if not template.proven:
            self._useless.add(kind)
            why = one_line(error)
            log(self.name, f"nodes are not forked from here on, a template failed: {why}")
        yield from ((question, None) for question in questions)

    def _begin(self, order: Start) -> Template:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as undo:
            undo.enter_context(ours)
            ours.setblocking(False)
            process = subprocess.Popen(
                (*order.argv[:-1], TEMPLATE),
                env=environment(order),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            undo.pop_all()
        made = self._templates[_kind(order)] = Template(process, ours)
        return made

    def reap(self, running: Container[int]) -> None:
        """Templates that have ended unasked, and what is left of nodes that are gone.

        Never one of `running`: who watches those reaps them. Nor while a question is on its way: a
        node may have died before its number is told, and until then it must be nobody else's.
        """
        for kind, template in list(self._templates.items()):
            is_idle = template.asked is None and not template.waiting
            if is_idle and template.process.poll() is not None:
                self._templates.pop(kind).end()
        if any(template.asked is not None for template in self._templates.values()):
            return
        with contextlib.suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                mine = any(t.process.pid == found.si_pid for t in self._templates.values())
                if mine or found.si_pid in running:
                    break
                os.waitpid(found.si_pid, 0)

    def close(self) -> None:
        while self._templates:
            _, template = self._templates.popitem()
            for question in (template.asked, *template.waiting):
                if question is not None:
                    question.close_input()
            template.end()


def forks_here(name: str, answer_s: float) -> Forks | None:
    """For a process that is nothing but an agent: from now on it is the parent of the orphans among
    its descendants. None where the system has no such thing.
    """
    if not sys.platform.startswith("linux") or prctl(PR_SET_CHILD_SUBREAPER, 1) != 0:
        return None
    return Forks(name, answer_s)


def environment(order: Start) -> dict[str, str]:
    """Of a node."""
    return {**os.environ, **dict(order.env)}


def _kind(order: Start) -> Kind:
    return order.argv[:-1], order.env
