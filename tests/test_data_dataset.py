"""Batches of a replica's rows: batch innermost, the same bits wherever the rows are kept."""

from __future__ import annotations

import gzip
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbctl.data.dataset import Dataset
from dbctl.data.order import batch_rows, epoch_order, steps_per_epoch, subset
from dbctl.data.prepare import statistics
from dbctl.data.sources import open_source
from dbctl.errors import DataError
from dbctl.experiment.specs import (
    DigitsSource,
    IdxSource,
    NpySource,
    NpzSource,
    SourceSpec,
    SyntheticSource,
)

N, FEATURES = 40, 6
FASHION = Path("/usr/share/datasets/fashion-mnist")


def write(folder: Path, x: Any, y: Any, form: str, **how: Any) -> SourceSpec:
    """A source of one of the forms, holding x and y."""
    a, b = str(folder / "a"), str(folder / "b")
    if form in ("idx", "gz"):
        pack = gzip.compress if form == "gz" else bytes
        for path, values in ((a, x), (b, y)):
            head = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
            Path(path).write_bytes(pack(head + values.astype("u1").tobytes()))
        return IdxSource(images=a, labels=b, **how)
    if form == "npz":
        np.savez(a, x=x, y=y)
        return NpzSource(path=a + ".npz", x="x", y="y", **how)
    np.save(a, np.asfortranarray(x) if form == "npy F" else x)
    np.save(b, y)
    return NpySource(x=a + ".npy", y=b + ".npy", **how)


def data(dtype: str = "u1") -> tuple[Any, Any]:
    rng = np.random.default_rng(5)
    return rng.integers(0, 256, (N, FEATURES)).astype(dtype), np.arange(N) % 10


def whole_batch(dataset: Dataset) -> Any:
    out = np.empty((dataset.features, len(dataset)), dataset.dtype)
    return dataset.batch(np.arange(len(dataset)), out)


@pytest.mark.parametrize("form", ["idx", "gz", "npy", "npy F", "npz"])
@pytest.mark.parametrize("how", [{}, {"scale": 0.00392}, {"standardize": True}])
def test_batches_of_replicas_are_columns_of_the_whole(tmp_path: Path, form: str, how: Any) -> None:
    """Bit for bit, for every way of keeping rows."""
    x, y = data()
    spec = write(tmp_path, x, y, form, **how)
    source = open_source(spec)
    known = statistics(source) if spec.standardize else None
    whole = whole_batch(Dataset(source, spec, statistics=known))
    if not how:
        np.testing.assert_array_equal(whole, x.T)
    for replica in range(3):
        rows = subset(N, 7, replica=replica, replicas=3)
        dataset = Dataset(open_source(spec), spec, statistics=known, rows=rows)
        assert len(dataset) == len(rows)
        order = epoch_order(len(dataset), 7, replica=replica, epoch=0)
        for index in range(steps_per_epoch(len(order), 4)):
            picked = batch_rows(order, index, 4)
            out = np.full((FEATURES, len(picked)), np.nan, np.float32)
            assert dataset.batch(picked, out) is out
            assert out.tobytes() == whole[:, rows[picked]].tobytes()
            assert dataset.targets(picked).tolist() == y[rows[picked]].tolist()
            assert dataset.targets(picked).dtype == np.int64


@pytest.mark.parametrize("stored", ["u1", "i2", "f2", "f4", "f8", "i4", ">f4"])
@pytest.mark.parametrize("how", [{"scale": 0.3}, {"standardize": True}])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_mapped_and_kept_rows_give_the_same_bits(
    tmp_path: Path, stored: str, how: Any, dtype: str
) -> None:
    """A mapped row is prepared batch by batch, another may be prepared once."""
    x, y = data(stored)
    found = []
    for form in ("npy", "npz"):
        spec = write(tmp_path, x, y, form, **how)
        source = open_source(spec)
        known = statistics(source) if spec.standardize else None
        found.append(whole_batch(Dataset(source, spec, statistics=known, dtype=dtype)))
    assert found[0].dtype == dtype
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize("form", ["npy", "npz"])
def test_float_targets_are_outputs_by_rows(tmp_path: Path, form: str) -> None:
    x, _ = data()
    y = np.random.default_rng(0).normal(size=(N, 3))
    spec = write(tmp_path, x, y, form)
    rows = subset(N, 7, replica=1, replicas=2)
    dataset = Dataset(open_source(spec), spec, rows=rows)
    got = dataset.targets(np.array([5, 0]))
    assert got.flags.c_contiguous
    np.testing.assert_array_equal(got, y[rows[[5, 0]]].T.astype(np.float32))


def test_bad_numbers_go_through_and_stay_in_their_row(tmp_path: Path) -> None:
    """A row with NaN is the worker's to refuse; beyond float32 is infinite, without a warning."""
    x = np.ones((4, 2))
    x[1, 0], x[2, 1] = np.nan, 1e300
    for form in ("npy", "npz"):
        spec = write(tmp_path, x, np.zeros(4, int), form)
        got = whole_batch(Dataset(open_source(spec), spec))
        np.testing.assert_array_equal(got, [[1, np.nan, 1, 1], [1, 1, np.inf, 1]])


def test_the_first_row_that_is_not_finite_is_named_as_the_file_has_it(tmp_path: Path) -> None:
    x = np.ones((6, 2))
    x[4, 0], x[2, 1] = np.nan, 1e300
    for form in ("npy", "npz"):
        spec = write(tmp_path, x, np.zeros(6, int), form)
        source = open_source(spec)
        dataset = Dataset(source, spec, rows=np.array([5, 4, 2, 0]))
        named = f"of {source.path!r} has"
        assert dataset.blemish(np.array([3, 1, 2])) == (
            f"row 4 (from 0) {named} nan in float32 as feature 0"
        )
        assert (
            dataset.blemish(np.array([2])) == f"row 2 (from 0) {named} inf in float32 as feature 1"
        )
        assert dataset.blemish(np.array([0, 3])) == ""
        assert Dataset(source, spec).blemish(np.arange(6)).startswith("row 2 (from 0)")


def test_a_replica_without_rows() -> None:
    spec = SyntheticSource(rows=2, features=3, classes=2)
    rows = subset(2, 7, replica=2, replicas=3)
    dataset = Dataset(open_source(spec), spec, rows=rows)
    assert len(dataset) == 0
    assert steps_per_epoch(len(dataset), 32) == 0


def test_rows_and_shapes_that_cannot_be() -> None:
    spec = DigitsSource(split="test")
    dataset = Dataset(open_source(spec), spec, rows=np.arange(5))
    out = np.empty((64, 1), np.float32)
    for row in (-1, 5):
        with pytest.raises(AssertionError, match="no such row"):
            dataset.batch(np.array([row]), out)
    with pytest.raises(AssertionError, match=r"out is \(64, 1\)"):
        dataset.batch(np.array([0, 1]), out)
    with pytest.raises(AssertionError, match="standardize needs statistics"):
        Dataset(open_source(spec), DigitsSource(split="test", standardize=True))


def test_synthetic_kept_and_made_anew_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SyntheticSource(rows=N, features=FEATURES, classes=4, scale=0.5)
    rows = subset(N, 7, replica=0, replicas=2)
    kept = whole_batch(Dataset(open_source(spec), spec, rows=rows))
    monkeypatch.setattr("dbctl.data.synthetic.KEEP_BYTES", 0)
    source = open_source(spec)
    assert source.x.mapped
    assert whole_batch(Dataset(source, spec, rows=rows)).tobytes() == kept.tobytes()


def test_a_damaged_stream_is_found_while_rows_are_kept(tmp_path: Path) -> None:
    x, y = data()
    spec = write(tmp_path, x, y, "gz")
    path = tmp_path / "a"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="truncated or damaged"):
        Dataset(open_source(spec), spec, rows=np.array([0]))


def test_memory_is_that_of_the_own_rows(tmp_path: Path) -> None:
    """One of 8 replicas over 32 MiB of bytes, compressed: its 4 MiB and a block, not more."""
    x = np.zeros((1 << 15, 1 << 10), np.uint8)
    spec = write(tmp_path, x, np.zeros(1 << 15), "gz")
    rows = subset(1 << 15, 7, replica=0, replicas=8)
    del x
    tracemalloc.start()
    try:
        Dataset(open_source(spec), spec, rows=rows)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 14 << 20


def test_a_batch_makes_no_large_arrays() -> None:
    spec = DigitsSource(split="train", scale=0.0625)
    dataset = Dataset(open_source(spec), spec)
    indices = np.arange(1000)
    out = np.empty((64, 1000), np.float32)
    dataset.batch(indices, out)
    tracemalloc.start()
    try:
        dataset.batch(indices, out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < out.nbytes // 4


@pytest.mark.skipif(not FASHION.exists(), reason="Debian package dataset-fashion-mnist")
def test_one_of_two_replicas_of_fashion_mnist_loads_in_a_moment() -> None:
    spec = IdxSource(
        images=str(FASHION / "train-images-idx3-ubyte.gz"),
        labels=str(FASHION / "train-labels-idx1-ubyte.gz"),
        scale=0.00392,
    )
    start = time.perf_counter()
    source = open_source(spec)
    dataset = Dataset(source, spec, rows=subset(source.rows, 7, replica=0, replicas=2))
    # 0.25 s of processor here; ten times that for a busy machine.
    assert time.perf_counter() - start < 2.5
    assert len(dataset) == 30000
    out = np.empty((784, 100), np.float32)
    dataset.batch(np.arange(100), out)
    assert out.max() == pytest.approx(255 * 0.00392)
