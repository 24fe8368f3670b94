"""One host looks at itself before a run: what is installed, what is free, which data it has.

Rules of this file: it looks and judges nothing (dbctl/run/findings.py does); whatever is wrong is a
text among the facts, and no exception. Every look has an end. What it makes (a file in the work
directory, a socket) it removes.

Theory of operation. The questions come with what an agent is told at its start and the facts go
with its READY line, so a look costs no connection. Whether hosts reach each other only they can
tell: each listens on its own address, at a port that the system gives; all are then told the ports
of the others, and each says whom it could connect to. Nobody accepts: the system answers for a
socket that listens, and a stranger who connects meanwhile gets nothing.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import select
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from dbctl.data.files import TooSlow, file_digest
from dbctl.errors import DataError
from dbctl.process import one_line

# What an agent and its nodes import, by distribution.
REQUIRED = {
    "annotated-types": "annotated_types",
    "msgspec": "msgspec",
    "numpy": "numpy",
    "pyzmq": "zmq",
    "safetensors": "safetensors",
    "threadpoolctl": "threadpoolctl",
}
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
PROBE_BYTES = 1 << 16  # what logs need at the least
FILES_LIMIT_S = 8.0  # for the digests of all data files
REACH_LIMIT_S = 4.0
BACKLOG = 128
MEMINFO = Path("/proc/meminfo")
THREADS_MAX = (Path("/proc/sys/kernel/pid_max"), Path("/proc/sys/kernel/threads-max"))
OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


class Question(Struct, frozen=True, kw_only=True):
    """What a host is asked. `address`: where it is to listen, "" if none comes to it from outside;
    `files`: data files whose digests are wanted.
    """

    workdir: str
    address: str = ""
    files: tuple[str, ...] = ()


class FileFacts(Struct, frozen=True, kw_only=True):
    """`fault`: why there is no digest; `late`: it would have taken too long."""

    path: str
    size: int = 0
    digest: str = ""
    fault: str = ""
    late: bool = False


class Facts(Struct, frozen=True, kw_only=True):
    """What a host found. Sizes in bytes; None where the system does not say.

    `packages`: version by distribution, "" where it is missing. `clock`: seconds since 1970 when
    this was said. `port`: where it listens, 0 if it does not. Faults are texts, or "".
    """

    python: str
    packages: dict[str, str]
    curve: bool
    cores: int
    memory: int | None
    open_files: int
    memfd: bool
    workdir: str
    workdir_fault: str
    free: int | None
    threads: dict[str, str]
    clock: Annotated[float, Meta(ge=0.0, le=1e11)]  # no NaN, which differs from nothing
    address_fault: str = ""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    files: tuple[FileFacts, ...] = ()


class Examination:
    """Looks at once; listens until `close`, which must not come before all have tried."""

    def __init__(self, question: Question) -> None:
        self._listener: socket.socket | None = None
        address_fault = self._listen(question.address) if question.address else ""
        workdir = Path(question.workdir).expanduser()
        workdir_fault = probe(workdir)
        self.facts = Facts(
            python=platform.python_version(),
            packages=packages(),
            curve=_has_curve(),
            cores=len(os.sched_getaffinity(0)),
            memory=available_bytes(),
            open_files=_open_files(),
            memfd=hasattr(os, "memfd_create"),
            workdir=str(workdir),
            workdir_fault=workdir_fault,
            free=_free_bytes(workdir),
            threads={name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
            address_fault=address_fault,
            port=self._listener.getsockname()[1] if self._listener is not None else 0,
            files=look_at(question.files),
            clock=time.time(),
        )

    def _listen(self, address: str) -> str:
        """What is wrong, or ""."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._listener = socket.socket(family, socket.SOCK_STREAM)
            self._listener.bind((address, 0))
            self._listener.listen(BACKLOG)
        except OSError as error:
            self.close()
            return error.strerror or one_line(error)
        return ""

    def __enter__(self) -> Examination:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


# ----------------------------------------------------------------------------------- what is here


def packages() -> dict[str, str]:
    """The version of each of REQUIRED, "" where it is missing."""
    return {name: _version(name, module) for name, module in REQUIRED.items()}


def _version(name: str, module: str) -> str:
    """Of a distribution, whose module is not imported for it."""
    from importlib.metadata import PackageNotFoundError, version  # it brings the parser of mails

    if find_spec(module) is None:
        return ""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def _has_curve() -> bool:
    try:
        from dbctl.transport.curve import make_keys

        make_keys()
    except Exception:  # no pyzmq, a broken one, or one that was built without
        return False
    return True


def available_bytes() -> int | None:
    """Memory, by the kernel's own estimate."""
    try:
        for line in MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return None


def _open_files() -> int:
    """The hard limit, which agents and nodes raise theirs to; -1: none."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return -1 if hard == resource.RLIM_INFINITY else hard


def threads_allowed() -> tuple[int, str]:
    """How many the system lets this user have, and that in words; a very large number: any.

    The least of what the kernel and the user's limit (not root's) allow in all, and the control
    groups besides those that there are.
    """
    in_all = [(_number(path), str(path)) for path in THREADS_MAX]
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.geteuid() != 0 and soft != resource.RLIM_INFINITY:
        in_all.append((soft, "`ulimit -u`"))
    found = [(most, f"at most {most:,} are allowed ({where})") for most, where in in_all]
    for group in _groups():
        limit = group / "pids.max"
        most = max(0, _number(limit) - _number(group / "pids.current", 0))
        found.append((most, f"{most:,} more are allowed ({limit})"))
    return min(found)


def _groups() -> Iterator[Path]:
    """Directories of the control groups that count this process, also those above its own."""
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds == "" or "pids" in kinds.split(","):
            place = GROUPS / kinds / path.lstrip("/")
            yield from (p for p in (place, *place.parents) if p.is_relative_to(GROUPS))


def _number(path: Path, otherwise: int = 2**62) -> int:
    """What the file says; `otherwise` where it is not there, or says `max`."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return otherwise


def probe(workdir: Path) -> str:
    """Makes `workdir` if need be and writes a file there; what is wrong, or ""."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=workdir) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or one_line(error)
    return ""


def _free_bytes(directory: Path) -> int | None:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(directory).free
    return None


def look_at(paths: tuple[str, ...]) -> tuple[FileFacts, ...]:
    """The digest of each file, in the time that all of them have."""
    deadline = time.monotonic() + FILES_LIMIT_S
    return tuple(_look(path, deadline) for path in paths)


def _look(path: str, deadline: float) -> FileFacts:
    size = 0
    try:
        size = os.stat(path).st_size
        digest = file_digest(path, "data", late=lambda: time.monotonic() > deadline).hex()
    except TooSlow:
        return FileFacts(path=path, size=size, late=True)
    except DataError as error:
        return FileFacts(path=path, fault=error.message.partition(";")[0])
    except (OSError, ValueError) as error:
        fault = getattr(error, "strerror", "") or one_line(error)
        return FileFacts(path=path, fault=fault.lower())
    return FileFacts(path=path, size=size, digest=digest)


# ------------------------------------------------------------------------------- whom it reaches


def reach(others: Mapping[str, tuple[str, int]], limit_s: float = REACH_LIMIT_S) -> dict[str, str]:
    """Connects to all at once, for at most `limit_s`; what is wrong with each, or ""."""
    found: dict[str, str] = {}
    waiting: dict[int, tuple[str, socket.socket]] = {}
    poll = select.poll()
    with contextlib.ExitStack() as at_end:
        for name, (address, port) in others.items():
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                way = at_end.enter_context(socket.socket(family, socket.SOCK_STREAM))
                way.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    way.connect((address, port))
            except OSError as error:
                found[name] = error.strerror or one_line(error)
                continue
            waiting[way.fileno()] = (name, way)
            poll.register(way, select.POLLOUT)
        deadline = time.monotonic() + limit_s
        while waiting and (left_s := deadline - time.monotonic()) > 0.0:
            for fd, _ in poll.poll(1000.0 * left_s):
                name, way = waiting.pop(fd)
                poll.unregister(fd)
                number = way.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                found[name] = os.strerror(number) if number else ""
    found |= {name: f"no answer within {limit_s:g} s" for name, _ in waiting.values()}
    return found
