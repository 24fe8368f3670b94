"""idx files, the format of MNIST: a magic number, the dimensions, big-endian elements.

Rules of this file: the header is compared with the file before anything is allocated; raw files are
memory-mapped, .gz ones streamed.

Format (http://yann.lecun.com/exdb/mnist): two zero bytes, a byte for the type, a byte for the count
of dimensions, then one big-endian uint32 a dimension, then the elements, last dimension innermost.
"""

from __future__ import annotations

import struct
from math import prod
from typing import IO, cast

import numpy as np

from dbctl.data.files import (
    GzipStream,
    check_expansion,
    is_gzip,
    open_file,
    size_of,
    take_bytes,
)
from dbctl.data.rows import Rows, Stored, StreamRows, map_rows
from dbctl.errors import DataError

DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
MAX_DIMENSIONS = 8


def open_idx(path: str, key: str) -> Stored:
    """The array in an idx file, .gz or not (its first bytes tell, not its name).

    `key` is the experiment's key that names it. Raises DataError: no such file, wrong magic, a
    length that the file does not have.
    """
    with open_file(path, key) as file:
        size = size_of(file)
        compressed = is_gzip(file)
        stream = cast(IO[bytes], GzipStream(file)) if compressed else file
        dtype, shape, header_bytes = _read_header(stream, path)
        total = header_bytes + prod(shape) * dtype.itemsize
        if compressed:
            check_expansion(path, claimed=total, stored=size)
        elif total != size:
            what = "truncated" if size < total else "has extra bytes"
            raise DataError(
                path,
                f"{what}: its header {_shape_text(shape)} needs {total:,} bytes, "
                f"found {size:,}; get the file again",
            )

    def reopen() -> IO[bytes]:
        stream = cast(IO[bytes], GzipStream(open_file(path, key)))
        take_bytes(stream, header_bytes, path)
        return stream

    def load(n: int) -> Rows:
        if compressed:
            rows, whole = (n, prod(shape[1:])), n == shape[0]
            return StreamRows(path, reopen, shape=rows, dtype=dtype, whole=whole)
        return map_rows(path, key, dtype=dtype, offset_bytes=header_bytes, shape=shape, n=n)

    return Stored(path, dtype, shape, load)


def _read_header(stream: IO[bytes], path: str) -> tuple[np.dtype[np.generic], tuple[int, ...], int]:
    """Element type, shape and length of the header in bytes."""
    magic = take_bytes(stream, 4, path)
    if magic[:2] != b"\0\0" or magic[2] not in DTYPES or not 1 <= magic[3] <= MAX_DIMENSIONS:
        raise DataError(
            path,
            f"not an idx file: expected a magic number like 00000803 (images) or 00000801 "
            f"(labels), found {magic.hex()}; for other formats use source: npz, npy or csv",
        )
    n = magic[3]
    shape = struct.unpack(f">{n}I", take_bytes(stream, 4 * n, path))
    if prod(shape) == 0:
        raise DataError(path, f"empty: its header says {_shape_text(shape)}; give a file with rows")
    return np.dtype(DTYPES[magic[2]]), shape, 4 + 4 * n


def _shape_text(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{n:,}" for n in shape)
