"""dbctl/data/file_rows.py: the same rows as mapped ones; an error where those would be fatal."""

from __future__ import annotations

import gc
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbctl.data import file_rows, rows
from dbctl.data.file_rows import FileRows, unmapped
from dbctl.data.idx import open_idx
from dbctl.data.npy import open_npy
from dbctl.data.rows import ArrayRows, Rows
from dbctl.errors import DataError
from tests.data_files import idx_bytes

N = 40
WHOLE = np.arange(N * 6).reshape(N, 2, 3)
FORMS = {
    "C": WHOLE.reshape(N, 6).astype(">i4"),
    "F": np.asfortranarray(WHOLE.reshape(N, 6).astype(np.float64)),
    "pixels": WHOLE.astype(np.uint8),
    "flat": WHOLE[:, 0, 0].astype(np.float32),
}


def mapped(folder: Path, array: np.ndarray[Any, Any], n: int = N) -> Rows:
    np.save(folder / "x.npy", array)
    return open_npy(str(folder / "x.npy"), "data.*.x").load(n)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rows, file_rows):
        monkeypatch.setattr(module, "BLOCK_BYTES", 300)
    monkeypatch.setattr(file_rows, "NEAR_BYTES", 20)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [N, 17])
def test_they_are_the_mapped_ones(tmp_path: Path, form: str, n: int) -> None:
    there = mapped(tmp_path, FORMS[form], n)
    found = unmapped(there)
    assert isinstance(found, FileRows)
    assert (found.shape, found.dtype, found.mapped) == (there.shape, there.dtype, False)
    for picked in ([], [0], [n - 1], [3, 3, 2], [0, 1, 2, 9, 12, 13, 16], range(n), range(0, n, 5)):
        some = np.array(picked, np.int64)
        assert found.take(some).tolist() == there.take(some).tolist()
    blocks = [block.copy() for block in found.blocks()]
    assert len(blocks) > 1 or form in ("pixels", "flat")
    assert np.concatenate(blocks).tolist() == np.asarray(there).tolist()


def test_an_idx_file(tmp_path: Path) -> None:
    (tmp_path / "images").write_bytes(idx_bytes(FORMS["pixels"]))
    found = unmapped(open_idx(str(tmp_path / "images"), "data.*.images").load(11))
    assert isinstance(found, FileRows)
    assert (np.asarray(found) == FORMS["pixels"].reshape(N, 6)[:11]).all()


def test_what_is_not_mapped_as_it_lies_stays_what_it_is(tmp_path: Path) -> None:
    in_memory = ArrayRows(np.zeros((3, 2)))
    assert unmapped(in_memory) is in_memory
    turned = mapped(tmp_path, np.asfortranarray(WHOLE))
    assert unmapped(turned) is turned
    assert (np.asarray(turned) == WHOLE.reshape(N, 6)).all()


@pytest.mark.parametrize("form", ["C", "F"])
def test_a_file_that_is_cut_is_an_error(tmp_path: Path, form: str) -> None:
    """A mapping would end the process by SIGBUS."""
    found = unmapped(mapped(tmp_path, FORMS[form]))
    os.truncate(tmp_path / "x.npy", 200)
    said = r"x\.npy: was changed while it was in use: it ends at byte 200, expected .* start anew"
    with pytest.raises(DataError, match=said):
        list(found.blocks())
    with pytest.raises(DataError, match=said):
        found.take(np.array([0, N - 1]))


def test_a_file_that_takes_its_place_changes_nothing_or_is_told(tmp_path: Path) -> None:
    there = mapped(tmp_path, FORMS["C"])
    found = unmapped(there)
    np.save(tmp_path / "new.npy", FORMS["C"] + 1)
    os.replace(tmp_path / "new.npy", tmp_path / "x.npy")
    assert (np.asarray(found) == FORMS["C"]).all()
    with pytest.raises(DataError, match=r"x\.npy: was changed .*another file was put in its place"):
        unmapped(there)


def test_little_is_read_beside_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    n = 1 << 24
    found = unmapped(mapped(tmp_path, np.zeros((n, 1), np.uint8), n))
    for some in (np.arange(0, n, 4096), np.array([0, n - 1])):
        tracemalloc.start()
        assert not found.take(some).any()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 6 << 20


def test_the_descriptor_goes_with_the_rows(tmp_path: Path) -> None:
    found = unmapped(mapped(tmp_path, FORMS["C"]))
    assert isinstance(found, FileRows)
    fd = found._fd
    os.fstat(fd)
    del found
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
