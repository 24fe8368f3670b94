"""dbctl/data/packing.py: the bytes of a .npy file that is nowhere, and their digests."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbctl.data import packing, rows
from dbctl.data.packing import RowsFile, digests, label_rows, unpack
from dbctl.data.rows import ArrayRows, Rows
from dbctl.data.sources import open_source
from dbctl.errors import DataError
from tests.data_files import X, Y, idx_bytes, write_idx, write_npy, write_npz

DTYPES = ["u1", "i1", "<i2", ">i2", ">f4", "<f4", "<f8", "<f2", "<i8"]


def whole(file: RowsFile, of: ArrayRows, step: int) -> bytes:
    """The file, read `step` bytes at a time."""
    starts = range(0, file.size, step)
    return b"".join(file.read(of, s, min(step, file.size - s)).tobytes() for s in starts)


def load(data: bytes) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("picked", [None, [0], [1, 4, 9], list(range(10))])
def test_it_is_what_numpy_would_have_saved(dtype: str, picked: list[int] | None) -> None:
    array = np.arange(70).reshape(10, 7).astype(dtype)
    of = ArrayRows(array)
    file = RowsFile(of, None if picked is None else np.array(picked))
    expected = array if picked is None else array[picked]
    for step in (1, 13, 100, 10_000):
        found = load(whole(file, of, step))
        assert found.dtype == expected.dtype.newbyteorder("<")
        assert (found == expected).all()
    saved = io.BytesIO()
    np.save(saved, expected.astype(expected.dtype.newbyteorder("<")))
    assert whole(file, of, 64) == saved.getvalue()


def test_labels_take_the_fewest_bytes_and_are_flat() -> None:
    for most, dtype in ((9, "u1"), (256, "<u2"), (70_000, "<u4"), (2**40, "<u8")):
        y = np.array([0, most, 3], np.int64)
        of = label_rows(y)
        found = load(whole(RowsFile(of, np.array([1, 2]), flat=True), of, 50))
        assert found.dtype == dtype
        assert found.tolist() == [most, 3]


@pytest.mark.parametrize("block_bytes", [1, 20, 10_000])
def test_digests_of_all_files_in_one_reading(
    block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "BLOCK_BYTES", block_bytes)
    spec = write_npz(tmp_path, x=np.arange(77.0).reshape(11, 7), y=np.arange(11) % 3)
    stream = open_source(spec).x
    n_read = 0
    blocks = type(stream).blocks

    def counted(self: Rows) -> Any:
        nonlocal n_read
        n_read += 1
        return blocks(self)

    monkeypatch.setattr(type(stream), "blocks", counted)
    subsets = [np.array([0, 5, 10]), np.array([1, 2]), None, np.arange(11)]
    files = [RowsFile(stream, one) for one in subsets]
    found = digests(stream, files)
    assert n_read == 1
    of = unpack(stream, "x", str(tmp_path))
    assert found == [hashlib.sha256(whole(file, of, 31)).hexdigest() for file in files]
    assert found[2] == found[3]
    assert len(set(found)) == 3


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_compressed_source_has_the_digests_of_the_raw_one(suffix: str, tmp_path: Path) -> None:
    source = open_source(write_idx(tmp_path, idx_bytes(X), idx_bytes(Y), suffix))
    [found] = digests(source.x, [RowsFile(source.x)])
    raw = ArrayRows(X)
    assert found == hashlib.sha256(whole(RowsFile(raw), raw, 50)).hexdigest()


def test_unpacking_leaves_no_file_and_maps(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    x = np.arange(600, dtype=np.float32).reshape(100, 6)
    stream = open_source(write_npz(tmp_path, x=x, y=np.zeros(100, np.int64))).x
    of = unpack(stream, "x", str(there))
    assert of.mapped
    assert list(there.iterdir()) == []
    assert (of.take(np.array([99, 3])) == x[[99, 3]]).all()
    plain = open_source(write_npy(tmp_path, x, np.zeros(100, np.int64))).x
    assert unpack(plain, "x", "/nowhere") is plain


def test_no_room_to_unpack_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = open_source(write_npz(tmp_path, x=np.zeros((9, 4)), y=np.zeros(9, np.int64))).x

    def full(*words: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packing.os, "posix_fallocate", full)
    with pytest.raises(
        DataError, match=r"data.npz: cannot be unpacked into .*: no space .* 288 bytes"
    ):
        unpack(stream, "data.npz", str(tmp_path))

    def no_inode(**words: Any) -> None:
        raise OSError(28, "No space left on device", f"{tmp_path}/tmp1")

    monkeypatch.setattr(packing.tempfile, "TemporaryFile", no_inode)
    with pytest.raises(DataError, match=r"\(.*/tmp1\), or no inodes \(`df -i`\); make room") as e:
        unpack(stream, "data.npz", str(tmp_path))
    assert "bytes" not in str(e.value)


def test_nowhere_to_unpack_is_told(tmp_path: Path) -> None:
    stream = open_source(write_npz(tmp_path, x=np.zeros((9, 4)), y=np.zeros(9, np.int64))).x
    with pytest.raises(DataError, match="cannot be unpacked into /nowhere"):
        unpack(stream, "data.npz", "/nowhere")
