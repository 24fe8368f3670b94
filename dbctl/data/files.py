"""Data files, opened read-only, and bytes out of them in bounded pieces.

Rules of this file: a file is opened for reading only, and only if it is a regular one. What a
header claims is compared with the file before memory is taken for it. Text out of a file is
escaped before it goes into a message.

Theory of operation: an uncompressed file says its size, so a header is right or wrong at once. A
compressed one does not: what its header claims is believed up to `MAX_RATIO` times the bytes on
disk, memory is taken for that and never for more, and after the last expected byte the stream must
end, which also makes its checksum be looked at.
"""

from __future__ import annotations

import io
import os
import stat
import zipfile
import zlib
from collections.abc import Callable
from hashlib import sha256
from typing import IO

from dbctl.errors import DataError
from dbctl.process import one_line

# A deflated stream grows at most 1,032 times, and real data seldom 20 times. Small files may have
# any ratio: a column of equal labels has hundreds. Both limits are ours.
MAX_RATIO = 200
FREE_BYTES = 64 << 20

CHUNK_BYTES = 1 << 18  # compressed bytes read at once
PIECE_BYTES = 1 << 20  # bytes decompressed at once
# A file up to this size is hashed whole; of a larger one its size and both ends.
DIGEST_BYTES = 256 << 20
END_BYTES = 1 << 20
GZIP_MAGIC = b"\x1f\x8b"

# What the reading of a damaged or foreign compressed file raises.
DAMAGE = (OSError, zlib.error, EOFError, zipfile.BadZipFile, NotImplementedError, RuntimeError)

# Where well-known files come from, by the beginning of their path.
ORIGINS = {
    "/usr/share/datasets/fashion-mnist": "the Debian package dataset-fashion-mnist holds it: "
    "apt-get install dataset-fashion-mnist",
}


def open_file(path: str, key: str) -> IO[bytes]:
    """Open a regular file for reading; `key` is the key of the experiment file that names it.

    Raises DataError that says what to do: another path, a package, a sister file with or without
    .gz.
    """
    try:
        # Without O_NONBLOCK the opening of a named pipe waits for a writer that never comes.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise DataError(path, f"no such file; {_origin(path, key)}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = f"cannot be read ({reason.lower()}); check its owner and mode, or {key}"
        raise DataError(path, message) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(path, f"not a regular file; give the path of a file in {key}")
    return open(descriptor, "rb")


def _origin(path: str, key: str) -> str:
    for start, origin in ORIGINS.items():
        if path.startswith(start):
            return f"{origin}; or give another path in {key}"
    other = path.removesuffix(".gz") if path.endswith(".gz") else path + ".gz"
    if os.path.exists(other):
        return f"there is {other}: give that in {key}"
    # The controller names the split. A node, maybe on another host, does not know which it is.
    where = " (it is looked up on the host that reads it)" if "*" in key else ""
    return f"give another path in {key}{where}"


def size_of(file: IO[bytes]) -> int:
    """Size in bytes of an open file on disk."""
    return os.fstat(file.fileno()).st_size


def file_id(file: IO[bytes]) -> tuple[int, int]:
    """Device and inode of an open file: no other that exists has both."""
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino


class TooSlow(Exception):
    """A file was not read in its time. No TimeoutError: that is also what a lost file server is."""


def file_digest(path: str, key: str, *, late: Callable[[], bool] = lambda: False) -> bytes:
    """SHA-256 over a file's size and bytes; of a large file over its size and both ends.

    Asked `late` before each MiB: then TooSlow. Raises DataError.
    """
    hashed = sha256()
    with open_file(path, key) as file:
        size = size_of(file)
        hashed.update(f"{size} ".encode())
        try:
            if size > DIGEST_BYTES:
                hashed.update(file.read(END_BYTES))
                file.seek(-END_BYTES, os.SEEK_END)
            while data := file.read(END_BYTES):
                if late():
                    raise TooSlow
                hashed.update(data)
        except OSError as error:
            message = f"cannot be read ({one_line(error)}); check the disk, or {key}"
            raise DataError(path, message) from None
    return hashed.digest()


def is_gzip(file: IO[bytes]) -> bool:
    """Whether an open file begins as a gzip stream does; the position goes back to 0."""
    start = file.read(2)
    file.seek(0)
    return start == GZIP_MAGIC


def shown(text: object, limit: int = 60) -> str:
    """`text` escaped and cut, fit for a message: a file must not steer the terminal."""
    safe = ascii(text)
    return safe if len(safe) <= limit else safe[: limit - 3] + "..."


class GzipStream(io.RawIOBase):
    """The bytes of a gzip file, decompressed no further than asked for.

    gzip.GzipFile does the same in pieces of 8 KiB on Python 3.11, at half the speed. Raises
    EOFError when the file ends inside a member, zlib.error when it is damaged or has other bytes
    after it.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._inflate = zlib.decompressobj(wbits=31)
        self._pending = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        assert len(buffer), "zlib takes a limit of 0 for no limit"
        while True:
            data = self._inflate.decompress(self._pending, len(buffer))
            self._pending = self._inflate.unconsumed_tail
            if data:
                buffer[: len(data)] = data
                return len(data)
            if self._inflate.eof:
                self._pending = self._inflate.unused_data or self._file.read(CHUNK_BYTES)
                if not self._pending:
                    return 0
                self._inflate = zlib.decompressobj(wbits=31)  # bgzip and cat write several members
            elif not self._pending:
                self._pending = self._file.read(CHUNK_BYTES)
                if not self._pending:
                    raise EOFError("the compressed file ends too early")

    def close(self) -> None:
        self._file.close()
        super().close()


def fill(stream: IO[bytes], buffer: memoryview, path: str) -> None:
    """Read exactly `len(buffer)` bytes into `buffer`. Raises DataError where they end."""
    at = 0
    try:
        while at < len(buffer):
            n = stream.readinto(buffer[at : at + PIECE_BYTES])  # type: ignore[attr-defined]
            if not n:
                raise EOFError(f"expected {len(buffer) - at:,} bytes more")
            at += n
    except DAMAGE as error:
        raise damaged(path, error) from error


def take_bytes(stream: IO[bytes], n: int, path: str) -> bytes:
    """The next `n` bytes; for headers."""
    data = bytearray(n)
    fill(stream, memoryview(data), path)
    return bytes(data)


def expect_end(stream: IO[bytes], path: str) -> None:
    """The stream must end here, its checksum with it."""
    try:
        more = stream.readinto(memoryview(bytearray(1)))  # type: ignore[attr-defined]
    except DAMAGE as error:
        raise damaged(path, error) from error
    if more:
        message = "holds more bytes than its header says; it is damaged, or of another kind"
        raise DataError(path, message)


def damaged(path: str, error: Exception) -> DataError:
    """The DataError for a compressed or cut file that could not be read to its end."""
    reason = str(error).lower()[:200] or type(error).__name__  # zipfile's may quote the file
    return DataError(path, f"truncated or damaged: {reason}; get or make the file again")


def check_expansion(path: str, *, claimed: int, stored: int) -> None:
    """Whether a header's claim of `claimed` bytes may be believed of `stored` compressed ones.

    Raises DataError before anything is allocated.
    """
    limit = max(FREE_BYTES, MAX_RATIO * stored)
    if claimed > limit:
        raise DataError(
            path,
            f"its header promises {claimed:,} bytes out of {stored:,} compressed ones; at most "
            f"{limit:,} are believed; if the data is right, store it uncompressed",
        )
