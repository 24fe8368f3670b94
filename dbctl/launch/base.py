"""What a launcher is: it brings up one agent on each host, and nothing else.

Rules of this package: launchers do not know each other; what they say to a program is a list of
words, never a shell string; every wait has an end. The controller speaks to an agent through its
endpoint; the launcher's own hold on it is the agent's standard input, whose end ends the agent.

Theory of operation. `start_async` only starts programs, so that the controller reads files and
imports libraries while they load; `wait_ready` waits for each agent's READY line on its standard
output (whatever a login shell prints before it is skipped); `start` is both. `stop` lets go of the
standard input and waits; what does not end is killed. The seam carries no more than this, so that
ssh, Slurm or Ray are one small file each.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct, ValidationError, convert

import dbctl
from dbctl.envelope import PROTOCOL_VERSION
from dbctl.errors import LaunchError
from dbctl.plan import NodeSpec
from dbctl.process import escape, one_line
from dbctl.wire_processes import Start

if TYPE_CHECKING:
    from dbctl.examine import Facts

RUNTIME_PREFIX = "dbctl-"
# An address of a socket holds 107 bytes; worker-9999.9999.9999.sock and more must fit behind this.
RUNTIME_BYTES_MAX = 107 - 36
READY_BYTES_MAX = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Answer:
    """`facts`: of the host itself; `reached`: what is wrong with the way to each other host, or "".

    Between `asked_s` and `heard_s`, by the clock here in seconds since 1970, its facts were said.
    """

    facts: Facts
    reached: Mapping[str, str]
    asked_s: float
    heard_s: float


@dataclass(frozen=True)
class AgentHandle:
    """An agent that said READY: its name, its host for people, its endpoint for `Link.connect`.

    What its host knows it by: `inside` is the endpoint for its nodes, `runtime` their directory for
    sockets, `python` the program that runs them ("": as here). `keeps_logs`: its nodes' logs are
    written there, and come over the link. `shares_memory`: what its nodes hand out can be mapped
    here; else it is sent. `answer`: what it said of its host, where it was asked.
    """

    name: str
    host: str
    endpoint: str
    pid: int
    incarnation: int = 1
    inside: str = ""
    runtime: str = ""
    python: str = ""
    keeps_logs: bool = False
    shares_memory: bool = True
    answer: Answer | None = None


class Launcher(Protocol):
    def start_async(self) -> None:
        """Starts the programs and returns at once. LaunchError: a program is not there."""

    def wait_ready(self) -> list[AgentHandle]:
        """One agent a host, in bounded time. LaunchError: host, remote words, log path."""

    def start(self) -> list[AgentHandle]:
        """`start_async`, then `wait_ready`."""

    def failure(self) -> LaunchError | None:
        """What to raise once an agent has ended that nobody asked to; None as long as all live."""

    def all_ended(self) -> bool:
        """Whether no agent runs any more; nothing is waited for."""

    def stop(self, timeout_s: float) -> None:
        """Ends every agent within about `timeout_s`; called twice, or before `start`, too."""


class Gathering(Launcher, Protocol):
    """A launcher that tells of every host by itself, those that failed too."""

    def wait_all(self) -> list[AgentHandle | LaunchError]:
        """Of each host its agent, or why there is none; in bounded time."""


def python_command(part: str, *words: str) -> tuple[str, ...]:
    """The command of one of dbctl's own processes under this very Python.

    -P: what lies in the user's directory (`queue.py`, `numpy/`) is never imported from there.
    """
    return (sys.executable, "-P", "-m", "dbctl", part, *words)


def python_environment() -> dict[str, str]:
    """What a process of a run needs besides this one's environment: the same dbctl as here."""
    root = str(Path(dbctl.__file__).resolve().parent.parent)
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def thread_variables(threads: int) -> tuple[tuple[str, str], ...]:
    """What tells numpy's libraries their count of threads: they read it once, when loaded."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return tuple((name, str(threads)) for name in names)


def start_order(
    spec: NodeSpec,
    *,
    nice: int = 0,
    env: tuple[tuple[str, str], ...] = (),
    python: str = "",
) -> Start:
    """What the controller tells an agent to start for `spec`; `env` wins.

    `python`: the interpreter of the agent's host; "": this process's own.
    """
    import msgspec

    command = python_command("node", spec.node)
    return Start(
        node=spec.node,
        incarnation=spec.incarnation,
        argv=(python or command[0], *command[1:]),
        env=(*thread_variables(spec.threads), *env),
        spec=msgspec.json.encode(spec).decode(),
        nice=nice,
    )


def make_runtime() -> str:
    """A new private (0700) directory for a run's sockets, its name short enough for them.

    Under $XDG_RUNTIME_DIR, else the directory for temporary files, else /tmp where those are too
    long or not ours to write. OSError: nowhere.
    """
    candidates = [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"]
    length = len(f"/{RUNTIME_PREFIX}12345678")
    for base in candidates:
        if not os.path.isabs(base) or len(os.fsencode(base)) + length > RUNTIME_BYTES_MAX:
            continue
        try:
            return tempfile.mkdtemp(prefix=RUNTIME_PREFIX, dir=base)
        except OSError:
            if base == candidates[-1]:
                raise
    raise OSError(f"no directory for sockets in any of {candidates}")


class NotReady(Exception):
    """No READY line: the message says what was seen instead."""


class SaidLine:
    """Looks for a line `WORD {JSON}` in what a program's standard output brings, chunk by chunk."""

    def __init__(
        self,
        word: str,
        data: bytes = b"",
        *,
        form: type[Struct] | None = None,
        limit: int = READY_BYTES_MAX,
    ) -> None:
        """`form`: what the fields must be that it names; others may come too."""
        self.word = word
        self.data = data
        self._form = form
        self._limit = limit

    def feed(self, chunk: bytes) -> dict[str, object] | None:
        """The line's fields once it is there; `chunk` is empty at the output's end.

        NotReady: the end, too much else, or a line that is none.
        """
        self.data += chunk
        *lines, _ = self.data.split(b"\n")
        start = self.word.encode() + b" "
        for line in lines:
            if line.startswith(start):
                return self._fields(line.removeprefix(start))
        if not chunk:
            raise NotReady(f"ended before it was ready{_words(self.data)}")
        if len(self.data) > self._limit:
            what = f"said {len(self.data)} bytes, none of them {self.word}"
            raise NotReady(f"{what}{_words(self.data[:1000])}")
        return None

    def _fields(self, line: bytes) -> dict[str, object]:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise NotReady(f"said a {self.word} line that is none{_words(line)}")
        self.check(fields, line)
        return fields

    def check(self, fields: dict[str, object], line: bytes) -> None:
        """NotReady: they are of another form."""
        if self._form is not None:
            try:
                convert(fields, self._form)
            except ValidationError as error:
                what = f"said a {self.word} line that is none ({one_line(error)})"
                raise NotReady(f"{what}{_words(line)}") from None

    def late(self) -> NotReady:
        return NotReady(f"did not say {self.word} in time{_words(self.data)}")


class Ready(Struct, frozen=True, kw_only=True):
    """What a READY line says besides its version; what is in `facts` is judged where it is asked
    for (dbctl/launch/ssh.py).
    """

    endpoint: str
    pid: int = 0
    python: str = ""
    memory: str = ""
    facts: dict[str, Any] = {}


class ReadyLine(SaidLine):
    """An agent's READY line; NotReady: it is of another version, too."""

    def __init__(self) -> None:
        super().__init__("READY", form=Ready)

    def check(self, fields: dict[str, object], line: bytes) -> None:
        """The version first: lines of others may have another form."""
        if not isinstance(fields.get("endpoint"), str):
            raise NotReady(f"said a READY line that is none{_words(line)}")
        here = (dbctl.__version__, PROTOCOL_VERSION)
        there = (fields.get("version"), fields.get("protocol"))
        if there != here:
            raise NotReady(
                f"is dbctl {there[0]} with protocol {there[1]}, expected {here[0]} with {here[1]}: "
                "install the same version on every host"
            )
        super().check(fields, line)


def read_ready(process: subprocess.Popen[bytes], deadline: float) -> dict[str, object]:
    """The fields of the agent's READY line; lines before it are skipped, and shown in NotReady.

    `deadline` on the monotonic clock. The process must have been started with stdout=PIPE and
    bufsize=0.
    """
    assert process.stdout is not None
    fd = process.stdout.fileno()
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    ready = ReadyLine()
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0.0 or not poll.poll(1000.0 * left_s):
            raise ready.late()
        fields = ready.feed(os.read(fd, 65536))
        if fields is not None:
            return fields


def _words(data: bytes) -> str:
    text = escape(data.decode("utf-8", "backslashreplace")).strip()
    return f"; it said: {text}" if text else ""


def ending(status: int | None) -> str:
    """How a process ended, for people; None: it has not."""
    if status is None:
        return "it was still there"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
