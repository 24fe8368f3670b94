"""numpy's own files: .npy memory-mapped, members of .npz streamed.

Rules of this file: never pickle; only plain numbers of at most 8 bytes; the header is compared with
the file before anything is allocated; a member is read once a reading, and grows within bounds.
"""

from __future__ import annotations

import struct
import zipfile
from math import prod
from tokenize import TokenError
from typing import IO, Any, Literal

import numpy as np
from numpy.lib import format as npy_format

from dbctl.data.files import (
    DAMAGE,
    check_expansion,
    damaged,
    expect_end,
    fill,
    open_file,
    shown,
    size_of,
    take_bytes,
)
from dbctl.data.rows import ArrayRows, Rows, Stored, StreamRows, map_rows
from dbctl.errors import DataError

# zipfile decodes names and unpacks lengths of a damaged archive without looking.
ZIP_DAMAGE = (*DAMAGE, ValueError, struct.error)
MAGIC = b"\x93NUMPY"
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what numpy writes


def open_npy(path: str, key: str) -> Stored:
    """The array in a .npy file, to be memory-mapped. `key` is the experiment's key that names it.

    Raises DataError: no such file, wrong magic, objects in it, a length that the file does not
    have.
    """
    with open_file(path, key) as file:
        dtype, shape, fortran = _read_header(file, path)
        offset = file.tell()
        _check_size(path, shape, dtype, header_bytes=offset, size=size_of(file))

    def load(n: int) -> Rows:
        order: Literal["C", "F"] = "F" if fortran else "C"
        return map_rows(path, key, dtype=dtype, offset_bytes=offset, shape=shape, order=order, n=n)

    return Stored(path, dtype, shape, load)


def open_npz(path: str, key: str, *, member: str) -> Stored:
    """The array `member` of a .npz file, to be streamed.

    Raises DataError: not a zip archive, no such member, objects in it, a length that the member
    does not have, an expansion beyond `files.MAX_RATIO`.
    """
    where = f"{path}[{shown(member)[1:-1]}]"
    with open_file(path, key) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                info = _find(archive, path, member)
                check_expansion(
                    where, claimed=info.file_size, stored=min(info.compress_size, size_of(file))
                )
                with archive.open(info) as stream:
                    dtype, shape, fortran = _read_header(stream, where)
                    header_bytes = stream.tell()
        except ZIP_DAMAGE as error:
            raise damaged(path, error) from error
    size = info.file_size
    _check_size(where, shape, dtype, header_bytes=header_bytes, size=size)

    def reopen() -> IO[bytes]:
        try:
            # The open member keeps the archive's file open, and closes it.
            with zipfile.ZipFile(path) as archive:
                stream = archive.open(info.filename)
        except ZIP_DAMAGE as error:
            raise damaged(path, error) from error
        take_bytes(stream, header_bytes, where)
        return stream

    def load(n: int) -> Rows:
        if fortran and len(shape) > 1:
            return ArrayRows(_read_transposed(reopen(), where, shape=shape, dtype=dtype)[:n])
        rows = (n, prod(shape[1:]))
        return StreamRows(where, reopen, shape=rows, dtype=dtype, whole=n == shape[0])

    return Stored(where, dtype, shape, load)


def _find(archive: zipfile.ZipFile, path: str, member: str) -> zipfile.ZipInfo:
    names = archive.namelist()
    name = member + ".npy" if member + ".npy" in names else member
    if name not in names:
        held = ", ".join(shown(n.removesuffix(".npy"), 30) for n in names[:20]) or "nothing"
        raise DataError(path, f"has no array {shown(member)}; it holds {held}")
    info = archive.getinfo(name)
    if info.compress_type not in METHODS or info.flag_bits & 1:
        raise DataError(
            path,
            f"array {shown(member)} is encrypted or compressed in a way numpy does not use; "
            f"write the file with numpy.savez or numpy.savez_compressed",
        )
    return info


def _read_header(stream: IO[bytes], path: str) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """Element type, shape, whether in Fortran's order; the stream is at the first element then."""
    start = stream.read(6)
    if start != MAGIC:
        raise DataError(
            path,
            f"not an array in numpy's format: expected it to begin with {MAGIC.hex()}, "
            f"found {start.hex() or 'nothing'}; write it with numpy.save (never a pickle)",
        )
    version = tuple(stream.read(2))
    readers: dict[tuple[int, ...], Any] = {
        (1, 0): npy_format.read_array_header_1_0,
        (2, 0): npy_format.read_array_header_2_0,
    }
    if version not in readers:
        raise DataError(path, f"expected .npy version 1.0 or 2.0, found {version}")
    try:
        shape, fortran, dtype = readers[version](stream)
    except (ValueError, TypeError, SyntaxError, TokenError) as error:
        raise DataError(path, f"damaged header ({shown(error)}); write the file again") from error
    if dtype.hasobject:
        raise DataError(
            path,
            "holds Python objects, which are never loaded (that would run the file's code); "
            "save an array of numbers",
        )
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise DataError(
            path,
            f"expected integers or floats of at most 8 bytes, found dtype {shown(dtype)}; "
            f"convert it with numpy's astype",
        )
    if not shape or prod(shape) == 0 or min(shape) < 0:
        raise DataError(path, f"expected rows, found an array of shape {shape}; give one with rows")
    return np.dtype(np.uint8) if dtype.kind == "b" else dtype, shape, fortran


def _check_size(
    path: str, shape: tuple[int, ...], dtype: np.dtype[Any], *, header_bytes: int, size: int
) -> None:
    total = header_bytes + prod(shape) * dtype.itemsize
    if total != size:
        what = "truncated" if size < total else "has extra bytes"
        raise DataError(
            path,
            f"{what}: its header, {dtype} of shape {shape}, needs {total:,} bytes, "
            f"found {size:,}; write the file again",
        )


def _read_transposed(
    stream: IO[bytes], path: str, *, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Any:
    """A member in Fortran's order, whole: its rows are not together in the stream."""
    with stream:
        array = np.empty(shape[::-1], dtype)
        fill(stream, array.view(np.uint8).reshape(-1).data, path)
        expect_end(stream, path)
    return array.transpose()
