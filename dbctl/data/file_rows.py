"""Rows of an array in a file, read and not mapped: for whoever must outlive the file's being cut.

Rules of this file: what is read goes into memory of our own, a few MiB at the most beside what was
asked for. A file that has become shorter is a DataError: a mapping of it would end the process by
SIGBUS, and the controller reads the data of a run for as long as hosts are sent them.

Theory of operation: the descriptor stays open with the rows, so a file that is put in place of this
one changes nothing. Rows that lie near each other are read together, what is between them too: a
page is read whole anyway.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, final

import numpy as np

from dbctl.data.files import file_id, open_file
from dbctl.data.rows import BLOCK_BYTES, Array, Extent, Indices, Rows
from dbctl.errors import DataError, reason

NEAR_BYTES = 4096


@final
class FileRows(Rows):
    """The first `n` rows of what is at `extent`."""

    def __init__(self, extent: Extent, *, n: int, dtype: np.dtype[Any]) -> None:
        self.shape = (n, extent.shape[1])
        self.dtype = dtype
        self._extent = extent
        self._row_bytes = self.shape[1] * dtype.itemsize
        with open_file(extent.path, extent.key) as file:
            if file_id(file) != extent.file_id:
                raise self._changed("another file was put in its place")
            self._fd = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._fd)

    def blocks(self) -> Iterator[Array]:
        for start in range(0, len(self), self.rows_a_block):
            yield self._read_rows(start, min(start + self.rows_a_block, len(self)))

    def take(self, indices: Indices) -> Array:
        out = np.empty((len(indices), self.shape[1]), self.dtype)
        at_once = max(1, BLOCK_BYTES // (self._row_bytes + NEAR_BYTES))
        for start in range(0, len(indices), at_once):
            self._take_some(indices[start : start + at_once], out[start : start + at_once])
        return out

    def _take_some(self, indices: Indices, out: Array) -> None:
        steps = np.diff(indices)
        apart = (steps <= 0) | ((steps - 1) * self._row_bytes > NEAR_BYTES)
        cuts = [0, *(np.flatnonzero(apart) + 1).tolist(), len(indices)]
        for first, last in pairwise(cuts):
            start = int(indices[first])
            rows = self._read_rows(start, int(indices[last - 1]) + 1)
            out[first:last] = rows[indices[first:last] - start]

    def _read_rows(self, start: int, stop: int) -> Array:
        """Rows [start, stop), one behind the other."""
        n_stored, features = self._extent.shape
        if self._extent.order == "C":
            return self._read(start * features, (stop - start) * features).reshape(-1, features)
        columns = (self._read(j * n_stored + start, stop - start) for j in range(features))
        return np.stack(list(columns), axis=1)

    def _read(self, first: int, n: int) -> Array:
        """Elements [first, first + n) as they are stored."""
        out = np.empty(n, self.dtype)
        left = out.view(np.uint8).data
        at = self._extent.offset_bytes + first * self.dtype.itemsize
        while left:
            try:
                n_read = os.preadv(self._fd, [left], at)
            except OSError as error:
                raise DataError(self._extent.path, f"cannot be read: {reason(error)}") from error
            if not n_read:
                size = os.fstat(self._fd).st_size
                raise self._changed(f"it ends at byte {size:,}, expected {at + len(left):,}")
            left = left[n_read:]
            at += n_read
        return out

    def _changed(self, what: str) -> DataError:
        return DataError(
            self._extent.path,
            f"was changed while it was in use: {what}; leave it alone while a run reads it, and "
            "start anew",
        )


def unmapped(rows: Rows) -> Rows:
    """The same rows, read where they were mapped."""
    if rows.extent is None:
        return rows
    return FileRows(rows.extent, n=len(rows), dtype=rows.dtype)
