"""Rows of a source as .npy files that are nowhere: their bytes are made as they are asked for.

Rules of this file: bytes are those of the rows as they are stored, little-endian, behind numpy's
own header, so that what reads them prepares the same numbers to the same bits. Nobody holds more
than a block and what was asked for. A source's file is read, not mapped (data/file_rows.py).

Theory of operation: the rows of a file are in rising order, whichever subset they are, so that a
source is read from front to back: once for the digests of all its files, and again, from any byte
on, for those that somebody lacks. A compressed source can be read from the front only; where its
bytes are asked for it is first unpacked into a file without a name.
"""

from __future__ import annotations

import errno
import io
import os
import tempfile
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, final

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from dbctl.data.file_rows import FileRows
from dbctl.data.rows import Array, ArrayRows, Indices, Rows
from dbctl.errors import DataError, reason

Bytes = NDArray[np.uint8]
Readable = ArrayRows | FileRows  # from anywhere, not from the front only


@final
class RowsFile:
    """The .npy file of rows `indices` (rising; None: all) of `rows`. `size` is in bytes.

    `flat`: rows of one number each, as a file of shape (n,). Else its shape is (n, features).
    """

    def __init__(self, rows: Rows, indices: Indices | None = None, *, flat: bool = False) -> None:
        n = len(rows) if indices is None else len(indices)
        self.dtype = rows.dtype.newbyteorder("<")
        self.header = _header(self.dtype, (n,) if flat else (n, rows.shape[1]))
        self.row_bytes = rows.shape[1] * self.dtype.itemsize
        self.size = len(self.header) + n * self.row_bytes
        self._indices = indices

    def within(self, start: int, stop: int) -> Indices:
        """Of the source's rows [start, stop) those that are the file's, counted from `start`."""
        if self._indices is None:
            return np.arange(stop - start, dtype=np.int64)
        first, last = np.searchsorted(self._indices, (start, stop))
        return self._indices[first:last] - start

    def read(self, rows: Readable, start: int, n: int) -> Bytes:
        """Bytes [start, start + n) of the file; `rows` are those that it was made for."""
        assert 0 <= start <= start + n <= self.size, f"bytes {start} to {start + n} of {self.size}"
        out = np.empty(n, np.uint8)
        head = self.header[start : start + n]
        out[: len(head)] = np.frombuffer(head, np.uint8)
        if len(head) < n:
            at, stop = start + len(head) - len(self.header), start + n - len(self.header)
            first, last = at // self.row_bytes, -(-stop // self.row_bytes)
            picked = np.arange(first, last) if self._indices is None else self._indices[first:last]
            raw = self.as_bytes(rows.take(picked))
            out[len(head) :] = raw[at - first * self.row_bytes : stop - first * self.row_bytes]
        return out

    def as_bytes(self, rows: Array) -> Bytes:
        """Rows as they are in the file, one behind the other."""
        return np.ascontiguousarray(rows, self.dtype).reshape(-1).view(np.uint8)


def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    out = io.BytesIO()
    fields = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    npy_format.write_array_header_1_0(out, fields)
    return out.getvalue()


def digests(
    rows: Rows, files: Sequence[RowsFile], *, between: Callable[[], None] = lambda: None
) -> list[str]:
    """The SHA-256 of each file, as hex; `rows`, those of all of them, are read once.

    `between` is called before each block: what it raises ends this.
    """
    hashed = [sha256(file.header) for file in files]
    start = 0
    for block in rows.blocks():
        between()
        stop = start + len(block)
        for file, total in zip(files, hashed, strict=True):
            total.update(file.as_bytes(block[file.within(start, stop)]).data)
        start = stop
    return [total.hexdigest() for total in hashed]


def label_rows(y: Array) -> ArrayRows:
    """Labels, int64 (rows,), in the fewest bytes that hold them: (rows, 1)."""
    return ArrayRows(y.astype(np.min_scalar_type(int(y.max())))[:, None])


def unpack(rows: Rows, path: str, directory: str) -> Readable:
    """The rows from a file in `directory` that has no name there, and goes with its last reader.

    Rows that can be read from anywhere are given back as they are. DataError: no room, or a damaged
    source; `path` is the source's.
    """
    if isinstance(rows, Readable):
        return rows
    size = rows.shape[0] * rows.shape[1] * rows.dtype.itemsize
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            for block in rows.blocks():
                file.write(block.reshape(-1).view(np.uint8).data)
            file.flush()
            mapped: Any = np.memmap(file, rows.dtype, "r", shape=rows.shape)
            return ArrayRows(mapped)
    except OSError as error:
        what = f"cannot be unpacked into {directory}: {reason(error)}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            # With a name it is the file that cannot be made, however few bytes it is to have.
            needed = "or no inodes (`df -i`)" if error.filename else f"{size:,} bytes are needed"
            what += f", {needed}; make room, or store the data uncompressed"
        raise DataError(path, what) from error
