"""Synthetic rows are functions of seed, split and number, whoever asks for which of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbctl.data.sources import open_source
from dbctl.data.synthetic import SyntheticRows
from dbctl.experiment.specs import SyntheticSource
from tests.reference import serial_normals, serial_words


def spec_of(**changes: object) -> SyntheticSource:
    return SyntheticSource(**{"rows": 50, "features": 7, "classes": 3, "seed": 4, **changes})  # type: ignore[arg-type]


def test_rows_equal_their_slow_twin() -> None:
    """7 features take 14 words, 4 steps of the counter a row: normal j from words 2j, 2j + 1."""
    spec = spec_of(noise=0.5)
    centres = serial_normals(serial_words(4, "synthetic centres", 0, 2 * 3 * 7))
    got = SyntheticRows(spec).take(np.array([31, 0, 2]))
    for values, row in zip(got, (31, 0, 2), strict=True):
        normals = serial_normals(serial_words(4, "synthetic train", 16 * row, 14))
        centre = centres[7 * (row % 3) : 7 * (row % 3) + 7]
        expected = [c + 0.5 * n for c, n in zip(centre, normals, strict=True)]
        np.testing.assert_allclose(values, expected, rtol=1e-6)


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.integers(0, 49), max_size=20))
def test_any_rows_are_those_of_the_whole(rows: list[int]) -> None:
    whole = np.asarray(SyntheticRows(spec_of()))
    got = SyntheticRows(spec_of()).take(np.array(rows, np.int64))
    assert got.tobytes() == whole[rows].tobytes()


def test_blocks_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.asarray(SyntheticRows(spec_of()))
    monkeypatch.setattr("dbctl.data.rows.BLOCK_BYTES", 100)
    blocks = list(SyntheticRows(spec_of()).blocks())
    assert len(blocks) == 17
    assert np.concatenate(blocks).tobytes() == whole.tobytes()


def test_more_rows_begin_with_the_fewer() -> None:
    few, many = (np.asarray(SyntheticRows(spec_of(rows=n))) for n in (5, 500))
    assert few.tobytes() == many[:5].tobytes()


def test_splits_and_seeds_differ_and_splits_share_their_centres() -> None:
    splits = [spec_of(rows=3000, split=s, noise=0.1) for s in ("train", "test")]
    train, test, other = (
        np.asarray(SyntheticRows(s)) for s in (*splits, spec_of(rows=3000, seed=5))
    )
    assert not np.any(train == test)
    assert not np.any(train == other)
    for c in range(3):
        np.testing.assert_allclose(train[c::3].mean(0), test[c::3].mean(0), atol=0.03)


def test_noise_is_normal() -> None:
    """Mean, deviation and fourth moment of 70,000 standard normals, 5 deviations allowed."""
    x = np.asarray(SyntheticRows(spec_of(rows=10000, classes=1)), np.float64)
    noise = (x - x.mean(0)).ravel()
    assert abs(np.square(noise).mean() - 1) < 5 * np.sqrt(2 / noise.size)
    assert abs((noise**4).mean() - 3) < 5 * np.sqrt(96 / noise.size)


def test_no_noise_leaves_the_centres() -> None:
    source = open_source(spec_of(noise=0.0))
    x = np.asarray(source.x)
    assert len(np.unique(x, axis=0)) == 3
    assert source.y.tolist() == [i % 3 for i in range(50)]
    assert source.kind == "labels"


def test_many_rows_are_not_kept() -> None:
    assert not SyntheticRows(spec_of()).mapped
    assert SyntheticRows(spec_of(rows=10_000_000)).mapped
