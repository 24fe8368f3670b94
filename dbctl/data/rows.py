"""Rows: the x of a source, wherever they are, read in blocks or taken by number.

Rules of this file: rows come out as they are stored, (n, features), not scaled. Nobody holds more
than one block and the rows that were asked for.

Theory of operation: `ArrayRows` is an array in memory or mapped from a file; mapped rows cost no
memory of our own and all processes of a host share them, so they are never copied. `StreamRows`
is a compressed file that can only be read from the front: `take` reads it once and keeps what is
wanted, so a replica never holds the rows of the others. `SyntheticRows` (synthetic.py) computes
its rows.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from math import prod
from typing import IO, Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from dbctl.data.files import expect_end, file_id, fill, open_file

Array = NDArray[Any]
Indices = NDArray[np.int64]

BLOCK_BYTES = 4 << 20


class Rows(ABC):
    """`shape` is (rows, features), `dtype` how they are stored; `mapped`: taking rows is cheap.

    `extent`: where they lie in a file, if they are mapped. `np.asarray(rows)` reads them all.
    """

    shape: tuple[int, int]
    dtype: np.dtype[Any]
    mapped: bool = False
    extent: Extent | None = None

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def rows_a_block(self) -> int:
        return max(1, BLOCK_BYTES // (self.shape[1] * self.dtype.itemsize))

    @abstractmethod
    def blocks(self) -> Iterator[Array]:
        """All rows in order, (n, features) a block, each valid until the next is asked for."""

    @abstractmethod
    def take(self, indices: Indices) -> Array:
        """Rows `indices`, in that order, in an array of their own: (len(indices), features)."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.take(np.arange(len(self), dtype=np.int64)).astype(dtype or self.dtype)


@dataclass(frozen=True)
class Stored:
    """An array (n, ...) in a file, its header checked against the file, its elements not yet read.

    `load(n)` gives the first n rows; `path` is for messages.
    """

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    load: Callable[[int], Rows]


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Where an array (rows, features) is in a file: from byte `offset_bytes` on, in `order`.

    `file_id`, device and inode: another file may have that path by now. `key`: open_file's.
    """

    path: str
    key: str
    file_id: tuple[int, int]
    offset_bytes: int
    shape: tuple[int, int]
    order: Literal["C", "F"]


@final
class ArrayRows(Rows):
    """Rows of an array (n, ...), in memory or mapped; a row is flattened."""

    def __init__(self, array: Array, extent: Extent | None = None) -> None:
        self.extent = extent
        # A memmap's own methods are slower than those of the plain array over the same memory.
        self.mapped = isinstance(array, np.memmap)
        self.array = np.asarray(array).reshape(len(array), prod(array.shape[1:]))
        self.shape = (self.array.shape[0], self.array.shape[1])
        self.dtype = self.array.dtype

    def prefetch(self, start: int, stop: int) -> None:
        """Rows that will be wanted soon: the kernel reads ahead those of a mapped file."""
        if self.mapped and self.array.flags.c_contiguous:
            will_need(self.array[start:stop])

    def blocks(self) -> Iterator[Array]:
        for start in range(0, len(self), self.rows_a_block):
            yield self.array[start : start + self.rows_a_block]

    def take(self, indices: Indices) -> Array:
        return self.array.take(indices, axis=0)


def map_rows(
    path: str,
    key: str,
    *,
    dtype: np.dtype[Any],
    offset_bytes: int,
    shape: tuple[int, ...],
    order: Literal["C", "F"] = "C",
    n: int,
) -> ArrayRows:
    """The first `n` of the array `shape` in a file that has its length, mapped read-only."""
    with open_file(path, key) as file:
        array: Any = np.memmap(file, dtype, "r", offset_bytes, shape, order)
        extent = Extent(
            path=path,
            key=key,
            file_id=file_id(file),
            offset_bytes=offset_bytes,
            shape=(shape[0], prod(shape[1:])),
            order=order,
        )
    # In Fortran's order a row of several dimensions is put together in memory.
    in_file = order == "C" or len(shape) < 3
    return ArrayRows(array[:n], extent if in_file else None)


def will_need(array: Array) -> None:
    """Asks the kernel to read the pages of a contiguous part of a mapping, without waiting.

    Advice at most: where the system has none, or takes none, the pages are read when used.
    """
    mapping: Any = array
    while mapping is not None and not isinstance(mapping, mmap.mmap):
        mapping = getattr(mapping, "base", None)
    if mapping is None or not array.size or not hasattr(mmap, "MADV_WILLNEED"):
        return
    offset = array.ctypes.data - np.frombuffer(mapping, np.uint8).ctypes.data
    first = offset // mmap.PAGESIZE * mmap.PAGESIZE
    with suppress(OSError, ValueError):
        mapping.madvise(mmap.MADV_WILLNEED, first, offset + array.nbytes - first)


@final
class StreamRows(Rows):
    """`n` rows at the front of a stream that `reopen` opens at its first row.

    `whole`: the stream ends with the last row, and that is checked at the end of each reading.
    `verified` says that it has been, so that nobody needs to read the file once more to know.
    """

    def __init__(
        self,
        path: str,
        reopen: Callable[[], IO[bytes]],
        *,
        shape: tuple[int, int],
        dtype: np.dtype[Any],
        whole: bool,
    ) -> None:
        self.path = path
        self.shape = shape
        self.dtype = dtype
        self.verified = False
        self._reopen = reopen
        self._whole = whole

    def blocks(self) -> Iterator[Array]:
        buffer = np.empty((min(self.rows_a_block, len(self)), self.shape[1]), self.dtype)
        raw = buffer.view(np.uint8).reshape(-1).data
        row_bytes = self.shape[1] * self.dtype.itemsize
        with closing(self._reopen()) as stream:
            for start in range(0, len(self), self.rows_a_block):
                n = min(self.rows_a_block, len(self) - start)
                fill(stream, raw[: n * row_bytes], self.path)
                yield buffer[:n]
            if self._whole:
                expect_end(stream, self.path)
        self.verified = True

    def take(self, indices: Indices) -> Array:
        order = np.argsort(indices, kind="stable")
        wanted = indices[order]
        out = np.empty((len(indices), self.shape[1]), self.dtype)
        start = 0
        for block in self.blocks():
            stop = start + len(block)
            first, last = np.searchsorted(wanted, (start, stop))
            out[order[first:last]] = block[wanted[first:last] - start]
            start = stop
        return out
