"""One ssh and the lines that are exchanged with the program at its other end.

Rules of this file: every wait has an end; the words are others' (dbctl/launch/ssh_words.py), and so
is what is made of the answers.

Theory of operation. `text` goes to standard input as soon as ssh is started, which passes it on
when it can; then a line `WORD {JSON}` is expected on standard output, and what a login file prints
before it is skipped. Standard error, ssh's own and the program's, is appended to a log. Exit status
255 may be ssh's or the command's: an error has both their words. A server that takes no more
beginners (MaxStartups) closes the connection before the first word; that is tried again with
growing pauses. A refused port is not: nobody is there. All talks are waited for in one loop, which
no single one holds up: a talk whose output has ended is looked at now and then until its ssh has,
for the exit status. An ssh is killed with its process group, to which a ProxyCommand belongs.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from msgspec import Struct

from dbctl.errors import LaunchError, reason
from dbctl.experiment.specs import HostSpec
from dbctl.launch.base import NotReady, SaidLine, ending
from dbctl.launch.ssh_words import (
    CLUSTER_STOPPED,
    NO_SSH,
    SSH_FAILED,
    again_after_s,
    closed_early,
    diagnose,
)
from dbctl.process import signals_held, tail

LOOK_S = 0.25
ENDING_LOOK_S = 0.02
ENDING_LIMIT_S = 1.0  # from the end of the output to that of ssh, whose exit status is wanted
READY_LIMIT_S = 30.0  # of the first line of what was started there
AGAIN_LIMIT_S = 30.0  # since the first try: a server that is still busy then may never be free


class Talk:
    """`words`: the ssh; `text`: what it is told first, or a file that is all it is ever told;
    `make_said`: what is expected first.

    `name` is what errors call the other end. `socket` is forwarded by ssh to here: "" or a path.
    `of_cluster`: a keeper is at the other end.
    `heard` are the fields of the line that is expected now, once it came; `error` is set where
    it never will.
    """

    def __init__(
        self,
        name: str,
        host: HostSpec,
        words: Sequence[str],
        *,
        text: str | Path,
        make_said: Callable[[], SaidLine],
        log_path: Path,
        socket: str = "",
        of_cluster: bool = False,
    ) -> None:
        self.name = name
        self.host = host
        self.log_path = log_path
        self.process: subprocess.Popen[bytes] | None = None
        self.asked_s = self.heard_s = 0.0
        self.heard: dict[str, Any] | None = None
        self.error: LaunchError | None = None
        self._words = list(words)
        self._text = text
        self._make_said = make_said
        self._said = make_said()
        self._socket = socket
        self._of_cluster = of_cluster
        self._log_start = 0
        self._n_tries = 0
        self._again_until = 0.0
        self._begin_at = 0.0
        self._fault = ""  # why nothing more is to be heard; from then on ssh is to end
        self._ends_by = 0.0

    @property
    def waits(self) -> bool:
        return self.error is None and self.heard is None

    @property
    def is_ending(self) -> bool:
        return self.waits and bool(self._fault)

    def start(self) -> None:
        self._n_tries += 1
        self._again_until = self._again_until or time.monotonic() + AGAIN_LIMIT_S
        self.asked_s = time.time()
        self._said = self._make_said()
        self._remove_socket()  # ssh leaves it, and does not take it over
        try:
            with ExitStack() as stack:
                log = stack.enter_context(open(self.log_path, "ab"))
                self._log_start = log.tell()
                given: int | IO[bytes] = subprocess.PIPE
                if isinstance(self._text, Path):
                    given = stack.enter_context(open(self._text, "rb"))
                stack.enter_context(signals_held())
                self.process = subprocess.Popen(
                    self._words,
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                    bufsize=0,
                )
        except OSError as error:
            self.error = self._not_started(error)
            return
        if isinstance(self._text, str):
            self._tell(self._text)

    def _not_started(self, error: OSError) -> LaunchError:
        if isinstance(error, FileNotFoundError) and error.filename == self._words[0]:
            what, do = NO_SSH
            text = f"ssh {what}"
            return LaunchError(self.name, text, about="ssh", cure=do, host=self.host.name)
        return self.failed(f"ssh could not be started: {reason(error)}")

    def _tell(self, text: str) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        # Far less than a pipe holds; where nobody reads, the end of the process says why.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(text.encode())

    def ask(self, text: str, word: str, *, form: type[Struct] | None = None) -> None:
        """One more line; the word of the one that answers it, and the form of its fields."""
        self.heard, self._said = None, SaidLine(word, form=form)
        self._tell(text)

    def fd(self) -> int:
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def begin_if_due(self, now: float) -> bool:
        """Whether it can be read; starts it, or starts it again, when it is time."""
        if self.process is None and now >= self._begin_at:
            self.start()
        return self.process is not None and not self._fault

    def read(self, now: float) -> None:
        """Takes what its output has; after its end it `is_ending`."""
        try:
            self.heard = self._said.feed(os.read(self.fd(), 65536))
            self.heard_s = time.time()
        except NotReady as error:
            self.let_go()
            self._fault, self._ends_by = str(error), now + ENDING_LIMIT_S

    def look_for_end(self, now: float, deadline: float) -> None:
        """Of one that `is_ending`: its error once ssh has ended; or a later try is set."""
        status = self.status()
        if status is None and now < min(deadline, self._ends_by):
            return
        fault, self._fault = self._fault, ""
        early = status == SSH_FAILED and not self._said.data
        if early and closed_early(tail(self.log_path, self._log_start)):
            self._begin_at = now + again_after_s(self._n_tries)
            if self._begin_at < min(deadline, self._again_until):
                self.end(0.0)
                return
        self.error = self.failed(fault, status)

    def be_late(self) -> None:
        """Its error, if what has come by now has none and is not what was expected."""
        now = time.monotonic()
        if self.process is not None and not self._fault and _has_come(self.fd()):
            self.read(now)
        if self.is_ending:
            self.look_for_end(now, now)
        if self.waits:
            self.error = self.failed(str(self._said.late()))

    def failed(self, what: str, status: int | None = None) -> LaunchError:
        said = tail(self.log_path, self._log_start)
        parts = [what]
        if status is not None:
            whose = "ssh " if status == SSH_FAILED else ""
            parts[0] += f" ({whose}{ending(status)})"
        words = f"{what}\n{said}"
        found = diagnose(self.host, status, words, of_cluster=self._of_cluster)
        if found.fault == CLUSTER_STOPPED:
            # Somebody wanted that: how the agent and ssh took it is of no interest.
            text = f"ended: {found.fault}"
            return LaunchError(self.name, text, about=found.about, host=self.host.name)
        if found.fault:
            parts.append(found.fault)
        return LaunchError(
            self.name,
            "; ".join(parts),
            about=found.about,
            cure=found.cure,
            host=self.host.name,
            log_path=str(self.log_path),
            log_tail=said,
        )

    def status(self) -> int | None:
        """The exit status of the ssh, once it has ended by itself."""
        return None if self.process is None else self.process.poll()

    def hear_no_more(self) -> None:
        """The output is of no interest any more; what is at the other end goes on."""
        assert self.process is not None
        assert self.process.stdout is not None
        self.process.stdout.close()

    def let_go(self) -> None:
        """Its standard input ends, and with it what is at the other end."""
        if self.process is not None:
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    pipe.close()

    def end(self, timeout_s: float) -> None:
        """Waits for ssh, which waits for the other end; else kills it and what it started."""
        self.let_go()
        if self.process is not None:
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                # Before ssh is reaped: until then the number is nobody else's.
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self.process = None
        self._remove_socket()

    def _remove_socket(self) -> None:
        if self._socket:
            Path(self._socket).unlink(missing_ok=True)


def hear(
    talks: Sequence[Talk],
    deadline: float,
    *,
    interrupted: Callable[[], bool] = lambda: False,
) -> None:
    """Until each has said what is expected of it; whoever is late by then has failed."""
    while left := [talk for talk in talks if talk.waits]:
        now = time.monotonic()
        if now >= deadline or interrupted():
            break
        _turn(left, now, deadline)
    for talk in left:
        talk.be_late()


def _turn(waiting: Sequence[Talk], now: float, deadline: float) -> None:
    """Begins what is due again, and reads what has come, for at most LOOK_S."""
    poll = select.poll()
    reading = {}
    limit_s = LOOK_S
    for talk in waiting:
        if talk.is_ending:
            talk.look_for_end(now, deadline)
            limit_s = ENDING_LOOK_S
        elif talk.begin_if_due(now):
            poll.register(talk.fd(), select.POLLIN)
            reading[talk.fd()] = talk
    for fd, _ in poll.poll(1000.0 * limit_s):
        reading[fd].read(now)


def _has_come(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def end_all(talks: Sequence[Talk], timeout_s: float) -> None:
    """First all are let go, then each is waited for."""
    for talk in talks:
        talk.let_go()
    deadline = time.monotonic() + timeout_s
    for talk in talks:
        talk.end(max(0.0, deadline - time.monotonic()))
