"""The run directory: what one run leaves on disk, and who may write to it.

    runs/NAME/TIMESTAMP/          or the directory that --run-dir names
        experiment.yaml           as it was given, byte for byte
        resolved.yaml             with every default and --set
        run.json                  who runs it, since when, and where it listens
        status.json               the newest state, replaced several times a second
        metrics.jsonl             one JSON object a line, only ever appended: dbctl/metrics.py
        logs/NODE.log             what each process wrote
        checkpoints/              dbctl/checkpoint/
        .lock                     held (flock) by the one controller that may write

Rules of this file: text is UTF-8 whatever the locale; a file is replaced whole by a rename. Paths
the user gave are theirs to mend (UsageError); a disk that fails later is RunError.

Theory of operation. The lock decides whether a run is going on: the kernel frees it with its
holder. run.json names the holder for people, by PID, start time and boot: a PID alone may be
another process by now. Of two controllers that `create` one directory, one is refused by the lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dbctl import __version__
from dbctl.errors import RunError, UsageError, file_at_fault, reason
from dbctl.process import boot_id
from dbctl.proctree import start_of

_RUN = "run.json"
_LOCK = ".lock"
_BEGUN = (".*.tmp", "standardize.npz*")  # half written, and what the data say
_NAME_LIMIT_BYTES = 200  # a file name may have 255; an experiment's name has 100 characters

_Read = TypeVar("_Read")


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """run.json. `pid_start` is in clock ticks since boot (proc(5), stat field 22)."""

    dbctl: str
    run: str
    pid: int
    pid_start: int
    boot: str
    host: str
    started: str  # ISO 8601 with the offset from UTC
    control: str  # the controller's socket
    command: tuple[str, ...]
    initialize_from: str | None = None  # DIRECTORY@STEP of another run
    encryption: str | None = None  # on, off: between hosts

    @classmethod
    def of_this_process(cls, run: str, *, control: str, command: Sequence[str]) -> RunInfo:
        """Of the process that calls, now. Bytes of `command` that are no text are escaped."""
        return cls(
            dbctl=__version__,
            run=run,
            pid=os.getpid(),
            pid_start=start_of(os.getpid()) or 0,
            boot=boot_id(),
            host=os.uname().nodename,
            started=datetime.now().astimezone().isoformat(timespec="seconds"),
            control=control,
            command=tuple(os.fsencode(a).decode("utf-8", "backslashreplace") for a in command),
        )

    def is_alive(self) -> bool:
        """Whether that very process still runs, as far as this machine can see."""
        return self.boot == boot_id() and self.pid_start == start_of(self.pid)


class RunDir:
    """One run directory, made by `create` or `open_`; a context manager that frees its lock.

    Of one that `create` made and an exception leaves before it is a run only the lock file stays:
    the next try is not refused for it. What is no part of a run is left alone.
    """

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        self._is_new = is_new
        self.path = path
        self.experiment = path / "experiment.yaml"
        self.resolved = path / "resolved.yaml"
        self.metrics = path / "metrics.jsonl"
        self.status = path / "status.json"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self._lock_fd = -1

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._is_new and not (self.path / _RUN).exists():
            self._remove()
        self.close()

    def _remove(self) -> None:
        """What there may be by now of a run; never the lock, which another may just be opening."""
        parts = (found for pattern in _BEGUN for found in self.path.glob(pattern))
        for file in (self.experiment, self.resolved, self.metrics, *parts):
            with contextlib.suppress(OSError):
                file.unlink()
        for directory in (self.logs, self.checkpoints):
            with contextlib.suppress(OSError):  # not empty: somebody else's
                directory.rmdir()

    def lock(self) -> None:
        """Takes the run for this controller; UsageError names the one that has it."""
        if self._lock_fd >= 0:
            return
        path = self.path / _LOCK
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise UsageError(
                f"{self.path}: this run is going on, {self._holder()}; stop it first"
            ) from error
        except OSError as error:
            os.close(fd)
            raise RunError(f"{path}: cannot be locked: {reason(error)}") from error
        self._lock_fd = fd

    def close(self) -> None:
        """Gives the lock back."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def log_path(self, node: str) -> Path:
        """Where a node's process writes what it says."""
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", node), f"not a node's name: {node!r}"
        return self.logs / f"{node}.log"

    def write_experiment(self, data: bytes) -> None:
        _replace(self.experiment, data, durable=True)

    def write_resolved(self, text: str) -> None:
        _replace(self.resolved, text.encode(), durable=True)

    def read_resolved(self) -> str:
        """RunError where it is missing or no text."""
        try:
            return self.resolved.read_text(encoding="utf-8")
        except OSError as error:
            raise RunError(f"{self.resolved}: cannot be read: {reason(error)}") from error
        except UnicodeDecodeError as error:
            raise RunError(f"{self.resolved}: not UTF-8: {error}") from error

    def write_info(self, info: RunInfo) -> None:
        """Makes this a run directory."""
        data = msgspec.json.format(msgspec.json.encode(info), indent=2) + b"\n"
        _replace(self.path / _RUN, data, durable=True)

    def read_info(self) -> RunInfo:
        """RunError where run.json is missing or damaged."""
        return _read_json(self.path / _RUN, RunInfo)

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Replaces status.json; not flushed to the disk, it is of worth while the run lives."""
        _replace(self.status, msgspec.json.encode(status) + b"\n", durable=False)

    def read_status(self) -> dict[str, Any]:
        """The newest status; empty where the run has not written one."""
        if not self.status.exists():
            return {}
        return _read_json(self.status, dict[str, Any])

    def _holder(self) -> str:
        try:
            info = self.read_info()
        except RunError:
            return "just being started by another process"
        return f"process {info.pid} on {info.host} since {info.started}"


def create(
    path: Path | None, name: str, *, root: Path = Path("runs"), now: datetime | None = None
) -> RunDir:
    """A new run directory, locked: `path`, or `root`/NAME/TIMESTAMP where it is None.

    `path` may be new or empty. UsageError where it holds a run or anything else, or cannot be made.
    Two runs of one second get different directories.
    """
    try:
        found = _new_directory(root, name, now) if path is None else _given_directory(Path(path))
        run_dir = RunDir(found, is_new=True)
        with contextlib.ExitStack() as undo:
            undo.callback(run_dir.close)
            run_dir.lock()
            _check_free(found, locked=True)
            undo.push(run_dir.__exit__)
            run_dir.logs.mkdir()
            run_dir.checkpoints.mkdir()
            undo.pop_all()
    except OSError as error:
        raise _cannot_make(root if path is None else path, error) from error
    return run_dir


def check_new(path: Path | None, name: str, *, root: Path = Path("runs")) -> None:
    """Makes nothing; UsageError where `create` would refuse the same now."""
    place = root / _directory_name(name) if path is None else Path(path)
    try:
        if path is not None:
            _check_given(place)
        missing = place
        for there in (place, *place.parents):
            if there.exists():
                break
            missing = there
        if not there.is_dir():
            raise _error(errno.EEXIST if there == place else errno.ENOTDIR, place)
        if not os.access(there, os.W_OK | os.X_OK):
            sealed = os.statvfs(there).f_flag & os.ST_RDONLY
            number = errno.EROFS if sealed else errno.EACCES
            if there == path:
                raise _cannot_write(path, _error(number, path / _LOCK))
            raise _error(number, missing)
    except OSError as error:
        raise _cannot_make(root if path is None else place, error) from error


def _error(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))


def open_(path: Path) -> RunDir:
    """The directory of an earlier run, not locked; UsageError where it is none."""
    path = Path(path)
    try:
        names = os.listdir(path)
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such directory, expected that of a run") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be opened: {reason(error)}") from error
    if _RUN not in names:
        raise UsageError(
            f"{path}: not a run directory, it has no {_RUN}; expected one like runs/NAME/TIMESTAMP"
        )
    return RunDir(path)


# ------------------------------------------------------------------------- directories, files


def _directory_name(name: str) -> str:
    """An experiment's name as a directory's: spaces, quotes and é stay, separators do not.

    What the file system's encoding cannot hold becomes `?`.
    """
    text = "".join("_" if c == "/" or unicodedata.category(c) == "Cc" else c for c in name)
    coding = sys.getfilesystemencoding()
    octets = text.encode(coding, "replace")[:_NAME_LIMIT_BYTES]
    text = octets.decode(coding, "ignore").strip()
    return "_" + text if not text or text.startswith((".", "-")) else text


def _new_directory(root: Path, name: str, now: datetime | None) -> Path:
    parent = root / _directory_name(name)
    parent.mkdir(parents=True, exist_ok=True)
    stamp = (now or datetime.now()).strftime("%Y-%m-%d_%H-%M-%S")
    for number in count(1):
        path = parent / (stamp if number == 1 else f"{stamp}_{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("count() ends")


def _cannot_make(where: Path, error: OSError) -> UsageError:
    return UsageError(f"{where}: cannot make a run directory: {reason(error)}")


def _cannot_write(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{path}: cannot be written: {reason(error)}")


def _given_directory(path: Path) -> Path:
    _check_given(path)  # before the lock file is made in what may not be ours
    path.mkdir(parents=True, exist_ok=True)
    return path


def _check_given(path: Path) -> None:
    if re.search("[\ud800-\udfff]", str(path)):  # records name it, and are UTF-8
        raise UsageError(f"{path}: has bytes that are not UTF-8; give another --run-dir")
    if path.exists():
        if not path.is_dir():
            raise UsageError(f"{path}: not a directory; give --run-dir a new or an empty one")
        _check_free(path)


def _check_free(path: Path, *, locked: bool = False) -> None:
    """UsageError where something is in it; `locked`: by this process."""
    names = set(os.listdir(path)) - {_LOCK}
    if _RUN in names:
        way = "go on with `dbctl resume`"
        if not any(path.glob("checkpoints/*")):
            way = "it saved nothing: once it has ended remove the directory"
        raise UsageError(f"{path}: holds a run already; {way}, or give another --run-dir")
    # Who has made something holds the lock already, so that the look at it disturbs no start.
    if names and not locked and _is_locked(path):
        raise UsageError(
            f"{path}: taken by another run, which is just starting; give another --run-dir"
        )
    if names:
        raise UsageError(
            f"{path}: not empty, it has {min(names)!r}; give --run-dir a new or an empty one"
        )


def _is_locked(path: Path) -> bool:
    """Whether a controller holds the lock of the directory now."""
    try:
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def _replace(path: Path, data: bytes, *, durable: bool) -> None:
    """The whole file or the one before it, whenever this is killed; RunError where it fails."""
    temporary = path.with_name(f".{path.name}.tmp")
    with file_at_fault(path, "written"):
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        if durable:
            fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def _read_json(path: Path, kind: type[_Read]) -> _Read:
    with file_at_fault(path, "read"):
        data = path.read_bytes()
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RunError(f"{path}: damaged: {error}") from error
