"""Data that a host was sent: files named by the SHA-256 of their bytes, in a directory of its own.

Rules of this file: a file is used only after its bytes were found to have its name, each time. It
comes into being by a rename; what is still coming has another name. Nobody waits here: the caller
says how.

    DIRECTORY (0700)/DIGEST.npy     whole
    DIRECTORY (0700)/DIGEST.part    on its way: a prefix, its length says where it goes on

Theory of operation: who wants a file that is not there locks its `.part`, so that of several
processes, of one run or of several, one receives it and the others find it. The lock goes with the
process; the next one goes on where it stood. A file that does not have its name's bytes any more is
removed under that lock and sent anew. Who has it mapped meanwhile keeps what it had.

All of it may be removed at any time that nobody reads it: it is sent again. Each use sets the
time of a file's last change.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from dbctl.errors import DataError, reason
from dbctl.shipment import Shipment

LOOK_S = 0.1  # how often is looked whether another one has let go of a lock
FULL = (errno.ENOSPC, errno.EDQUOT)

Pause = Callable[[float], object]


class Cache:
    """`directory` is made with its parents if it is not there; ~/ is the user's home.

    DataError: it cannot be, or it is somebody else's.
    """

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory).expanduser()
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.directory.stat()
            if found.st_uid != os.getuid():
                raise self._fault("belongs to another user; give this host another workdir")
            if found.st_mode & 0o077:
                self.directory.chmod(0o700)
        except OSError as error:
            raise self._fault(f"cannot be used for data: {reason(error)}") from error

    def _fault(self, what: str) -> DataError:
        return DataError(str(self.directory), what)

    def path(self, shipment: Shipment) -> Path:
        return self.directory / f"{shipment.digest}.npy"

    def find(self, shipment: Shipment) -> Path | None:
        """The file, verified; None: it is not there, or it is damaged."""
        path = self.path(shipment)
        try:
            if path.stat().st_size != shipment.size or _digest(path) != shipment.digest:
                return None
            os.utime(path)
        except OSError:
            return None
        return path

    @contextlib.contextmanager
    def partial(self, shipment: Shipment, pause: Pause) -> Iterator[Partial | None]:
        """What there is of a file, to be added to; None: it is there, whole, by now.

        `pause(seconds)` is called again and again while another process receives it.
        """
        part = self.path(shipment).with_suffix(".part")
        while True:
            try:
                fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise DataError(str(part), f"cannot be written: {reason(error)}") from error
            try:
                wait_for_lock(fd, part, pause)
                if not _is_at(fd, part):
                    continue  # the one before has finished it, or given it up
                if self.find(shipment) is not None:
                    part.unlink()
                    yield None
                    return
                with contextlib.suppress(FileNotFoundError):
                    self.path(shipment).unlink()
                yield Partial(fd, part, shipment)
                return
            finally:
                os.close(fd)


class Partial:
    """The beginning of a file; `size` bytes of it are there. It is locked."""

    def __init__(self, fd: int, path: Path, shipment: Shipment) -> None:
        self.path = path
        self.size = os.fstat(fd).st_size
        self._fd = fd
        self._shipment = shipment
        if self.size > shipment.size:
            self.begin_anew()
        os.lseek(fd, 0, os.SEEK_END)
        self._check_room()

    def _check_room(self) -> None:
        if self._free() < self._shipment.size - self.size:
            raise self._full()

    def _free(self) -> int:
        there = os.fstatvfs(self._fd)
        return there.f_bavail * there.f_frsize

    def _full(self) -> DataError:
        needed = self._shipment.size - self.size
        return DataError(
            str(self.path),
            f"no room for it: {needed:,} bytes more are needed, {self._free():,} are free; make "
            f"some (other files of {self.path.parent} may go, they are sent again when wanted), or "
            "give the host a workdir elsewhere",
        )

    def append(self, data: memoryview) -> None:
        """DataError: it cannot be written; where the disk is full nothing of it stays."""
        while data:
            try:
                n = os.write(self._fd, data)
            except OSError as error:
                if error.errno in FULL:
                    full = self._full()
                    self.path.unlink(missing_ok=True)
                    raise full from error
                message = f"cannot be written: {reason(error)}"
                raise DataError(str(self.path), message) from error
            self.size += n
            data = data[n:]

    def begin_anew(self) -> None:
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self.size = 0

    def finish(self) -> bool:
        """Whether it is what its name says; then it has its place."""
        final = self.path.with_suffix(".npy")
        try:
            os.fsync(self._fd)
            if _digest(self.path) != self._shipment.digest:
                return False
            os.rename(self.path, final)
            _sync_directory(final.parent)
        except OSError as error:
            raise DataError(str(self.path), f"cannot be kept: {reason(error)}") from error
        return True


def wait_for_lock(fd: int, path: Path, pause: Pause) -> None:
    """Takes the exclusive lock of an open file or directory; it goes when `fd` is closed."""
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pause(LOOK_S)
        except OSError as error:
            raise DataError(str(path), f"cannot be locked: {reason(error)}") from error


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
