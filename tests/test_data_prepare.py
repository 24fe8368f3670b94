"""Scale and standardize: as defined, element by element, and robust where numbers are awkward."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbctl.data.prepare import Preparation, Statistics, statistics
from dbctl.data.rows import ArrayRows
from dbctl.data.sources import Source, open_source
from dbctl.errors import DataError
from tests.data_files import write_npy
from tests.reference import serial_mean_and_deviation


def source_of(x: Any) -> Source:
    x = np.asarray(x)
    return Source("made", ArrayRows(x), np.zeros(len(x), np.int64), x.shape[1:])


def prepared(x: Any, dtype: str = "float32", **how: Any) -> Any:
    x = np.asarray(x)
    preparation = Preparation(
        x.dtype, np.dtype(dtype), scale=how.get("scale"), statistics=how.get("statistics")
    )
    out = np.empty(x.shape, preparation.working)
    preparation.apply(x, out)
    return out.astype(dtype)


def clusters(offset: float, dtype: str, rows: int = 300) -> Any:
    rng = np.random.default_rng(3)
    return (offset + rng.normal(size=(rows, 3)) * [1, 10, 0.25]).astype(dtype)


@pytest.mark.parametrize("dtype", ["u1", "i2", "f4", "f8", ">f4"])
def test_statistics_equal_their_slow_twin(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several blocks, and far from 0, where a sum of squares would lose all digits."""
    monkeypatch.setattr("dbctl.data.rows.BLOCK_BYTES", 100)
    x = clusters(100.0 if dtype == "u1" else 1e4, dtype)
    got = statistics(source_of(x))
    for j in range(3):
        mean, deviation = serial_mean_and_deviation(x[:, j].astype(float).tolist())
        assert got.mean[j] == pytest.approx(mean, rel=1e-13)
        assert got.deviation[j] == pytest.approx(deviation, rel=1e-9)


def test_a_feature_that_is_always_the_same_counts_as_deviation_1() -> None:
    got = statistics(source_of([[5.0, 1.0], [5.0, 3.0]]))
    assert got.mean.tolist() == [5.0, 2.0]
    assert got.deviation.tolist() == [1.0, 1.0]
    assert prepared([[5.0, 3.0]], statistics=got).tolist() == [[0.0, 1.0]]


def test_a_bad_row_does_not_spoil_the_others() -> None:
    """returnn#1568: one row with NaN is refused by the worker, the rest is trained on."""
    good = [[1.0, 2.0], [3.0, 6.0]]
    got = statistics(source_of([good[0], [np.nan, 1e9], good[1], [0.0, np.inf]]))
    assert got.mean.tolist() == [2.0, 4.0]
    assert got.deviation.tolist() == [1.0, 2.0]


def test_statistics_that_cannot_be() -> None:
    with pytest.raises(DataError, match="no row has only finite numbers"):
        statistics(source_of([[np.nan, 1.0]]))
    with pytest.raises(DataError, match="feature 1 is too large to be squared; use scale"):
        statistics(source_of([[1.0, 1e300], [2.0, -1e300]]))


@pytest.mark.parametrize("dtype", ["u1", "i2", "i4", "f4", "f8", ">i4"])
@pytest.mark.parametrize("wanted", ["float32", "float64"])
def test_standardize_keeps_its_digits(dtype: str, wanted: str) -> None:
    """A large mean must not cost any: x - float32(mean) alone would be wrong by 0.03 here."""
    x = clusters(100.0 if dtype == "u1" else 30_000.0 if dtype == "i2" else 4e6, dtype)
    got = statistics(source_of(x))
    exact = (x.astype(np.longdouble) - got.mean) / got.deviation
    tolerance = 4e-7 if wanted == "float32" else 1e-9
    np.testing.assert_allclose(
        prepared(x, wanted, statistics=got), exact, rtol=tolerance, atol=1e-9
    )


@pytest.mark.parametrize("dtype", ["u1", "i2", "f4", "f8"])
def test_scale(dtype: str) -> None:
    x = clusters(100.0, dtype)
    expected = x.astype(float) * 0.00392
    np.testing.assert_allclose(prepared(x, scale=0.00392), expected, rtol=3e-7)
    np.testing.assert_array_equal(prepared(x), x.astype(np.float32))


def test_statistics_are_kept_bit_for_bit(tmp_path: Path) -> None:
    got = statistics(source_of(clusters(1e4, "f8")))
    path = str(tmp_path / "statistics.npz")
    for _ in range(2):
        got.save(path)
    again = Statistics.load(path)
    assert again.mean.tobytes() == got.mean.tobytes()
    assert again.deviation.tobytes() == got.deviation.tobytes()
    assert [file.name for file in tmp_path.iterdir()] == ["statistics.npz"]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"mean": np.zeros(2)}, "has no array 'deviation'"),
        ({"mean": np.zeros(2), "deviation": np.ones(3)}, "found 3 for 2"),
        ({"mean": np.zeros(2), "deviation": np.zeros(2)}, "deviations above 0"),
        ({"mean": np.full(2, np.nan), "deviation": np.ones(2)}, "expected finite means"),
        ({"mean": np.zeros(2, "f4"), "deviation": np.ones(2)}, "expected mean as float64"),
    ],
)
def test_statistics_that_are_none(tmp_path: Path, arrays: Any, words: str) -> None:
    np.savez(tmp_path / "s.npz", **arrays)
    with pytest.raises(DataError, match=words):
        Statistics.load(str(tmp_path / "s.npz"))


def test_a_cut_file_of_statistics(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    Statistics(np.zeros(2), np.ones(2)).save(str(path))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match="truncated or damaged"):
        Statistics.load(str(path))


def test_scale_and_statistics_are_alternatives() -> None:
    with pytest.raises(AssertionError, match="alternatives"):
        prepared([[1.0]], scale=1.0, statistics=Statistics(np.zeros(1), np.ones(1)))


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """The controller reads it: a mapping would end that by SIGBUS."""
    source = open_source(write_npy(tmp_path, np.ones((5000, 4)), np.zeros(5000, np.int64)))
    os.truncate(source.path, 5000)
    with pytest.raises(DataError, match=r"x\.npy: was changed while it was in use"):
        statistics(source)
