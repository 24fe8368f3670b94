"""The one exception tree, split by who is at fault.

    DbctlError                  exit  what the user reads it as
     +-- UsageError             2     the command line
     +-- ExperimentError        2     a file: experiment, hosts, --set (holds every problem found)
     +-- DataError              2     a data file: missing, damaged, of another shape
     +-- PlanError              2     the request: it cannot be placed or cut as asked
     +-- LaunchError            3     a process: it did not come up or it ended too early
     +-- PeerError              1     a peer: it sent what the protocol does not allow
     +-- CheckpointError        1     a checkpoint: incomplete, damaged, of another model
     +-- RunError               1     the run: it began and could not go on

Rules of this file: a class holds the parts of its message, ``__str__`` builds the sentence: what
was expected, what was found, where, what to do; lower case, no full stop. Programming errors are
assertions and are never caught.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


class DbctlError(Exception):
    """Root of the tree. `exit_code` is what the command line ends with."""

    exit_code: ClassVar[int] = 1


class UsageError(DbctlError):
    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One fault of a file: where (`line` and `column` from 1; 0 = not known) and what is wrong."""

    file: str
    line: int
    column: int
    key: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{place}: {self.key + ': ' if self.key else ''}{self.message}"


class ExperimentError(DbctlError):
    """Everything wrong in one file, in the order of its lines."""

    exit_code = 2

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__(problems)
        self.problems = sorted(problems, key=lambda p: (p.file, p.line, p.column))

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class DataError(DbctlError):
    """A data file is not what the experiment says. `path` names it."""

    exit_code = 2

    def __init__(self, path: str, message: str) -> None:
        super().__init__(path, message)
        self.path = path
        self.message = message

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class PlanError(DbctlError):
    exit_code = 2


class LaunchError(DbctlError):
    """A process did not come up, or ended before its work was done.

    Of a host that did not come up: `about`, what of it is at fault, and `cure`, what to do.
    """

    exit_code = 3

    def __init__(
        self,
        node: str,
        what: str,
        *,
        about: str = "",
        cure: str = "",
        host: str = "",
        log_path: str = "",
        log_tail: str = "",
    ) -> None:
        super().__init__(node, what)
        self.node = node
        self.what = what
        self.about = about
        self.cure = cure
        self.host = host
        self.log_path = log_path
        self.log_tail = log_tail

    def __str__(self) -> str:
        text = f"{self.node}{' on ' + self.host if self.host else ''} {self.what}"
        if self.cure:
            text += f"; {self.cure}"
        if self.log_tail:
            text += "\n" + "\n".join(f"    {line}" for line in self.log_tail.splitlines())
        if self.log_path:
            text += f"\n  its log: {self.log_path}"
        return text


class PeerError(DbctlError):
    """A message that the protocol does not allow. `peer` is whoever it came from."""

    def __init__(self, peer: str, message: str) -> None:
        super().__init__(peer, message)
        self.peer = peer
        self.message = message

    def __str__(self) -> str:
        return f"{self.peer}: {self.message}"


class CheckpointError(DbctlError):
    """A checkpoint cannot be read or written. `path` names the file or directory."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(path, message)
        self.path = path
        self.message = message

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class RunError(DbctlError):
    pass


def reason(error: OSError) -> str:
    """What the system said, as half a sentence: `no space left on device (manifest.json)`.

    It says so of inodes too, and bytes may be free: then they are what there is none left of.
    """
    text = (error.strerror or str(error) or type(error).__name__).lower()
    if error.errno == errno.ENOSPC and error.filename and _without_inodes(error.filename):
        text = "no inodes left on device"
    return f"{text} ({error.filename})" if error.filename else text


def _without_inodes(path: str | bytes) -> bool:
    """Whether no file more can be made beside `path`."""
    try:
        there = os.statvfs(os.path.dirname(os.path.abspath(os.fsdecode(path))))
    except (OSError, ValueError):
        return False
    # Where inodes are made of free bytes, as by ZFS, a full disk has none of either.
    return there.f_files > 0 and there.f_favail == 0 and there.f_bavail > 0


@contextlib.contextmanager
def file_at_fault(path: Path, done: str) -> Iterator[None]:
    """An OSError is a RunError: `path` cannot be `done` (read, written)."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path}: cannot be {done}: {reason(error)}") from error
