"""The gradient of portions: added up, that of the whole batch (paper A, section 4.2; rung 6)."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbctl.bundles import Batch
from dbctl.data import rows as data_rows
from dbctl.data.dataset import Dataset
from dbctl.data.order import sample_rows
from dbctl.data.rows import will_need
from dbctl.data.sources import open_source
from dbctl.experiment.specs import DigitsSource, NpySource, SourceSpec
from dbctl.model.cut import cut_network
from dbctl.model.initial import initial_values
from dbctl.model.layers.dense import DenseSpec
from dbctl.model.layers.dropout import DropoutSpec
from dbctl.model.network import LayerSpec, NetworkSpec, n_parameters, tensors
from dbctl.model.passes import Network
from dbctl.node.compute import Share
from dbctl.node.portions import NetworkPortions
from dbctl.region import Range
from dbctl.roles.base import Array, BatchResult, PlainBuffer

ROWS = 103
DIGITS = DigitsSource(split="train", scale=0.0625, rows=ROWS)
SPEC = NetworkSpec(
    input=(64,),
    layers=(DenseSpec(units=13, activation="sigmoid"), DenseSpec(units=10)),
    loss="softmax",
)
DROPPING = NetworkSpec(input=(64,), layers=(DropoutSpec(rate=0.5), *SPEC.layers), loss="softmax")


def make(
    *,
    portion: int,
    send_every: int = 1,
    spec: NetworkSpec = SPEC,
    source: SourceSpec = DIGITS,
    dtype: str = "float64",
    seed: int = 5,
    batch: int | None = None,
) -> NetworkPortions:
    rows = Dataset(open_source(source), source, dtype=dtype)
    at_once = min(portion, len(rows))
    share = Share(cut_network(spec), 0, batch_size=at_once, allocate=PlainBuffer, dtype=dtype)
    return NetworkPortions(
        share, rows, seed=seed, portion=portion, send_every=send_every, batch=batch
    )


def point(spec: NetworkSpec = SPEC, dtype: str = "float64") -> Array:
    found = initial_values(spec, 5, Range(0, n_parameters(spec)), dtype=dtype)
    found.flags.writeable = False
    return found


def compute(gradient: NetworkPortions, portion: int, *, at: Array, sample: int = 0) -> Any:
    """The gradient of one portion, and its BatchResult."""
    out = np.full_like(at, np.nan)
    passing = gradient.compute(at, out, sample=sample, portion=portion)
    with pytest.raises(StopIteration) as end:
        next(passing)
    return out, end.value.value


def whole(indices: Any, dtype: str = "float64") -> tuple[Array, float]:
    """Mean gradient and mean loss over rows, in one pass of the network."""
    rows = Dataset(open_source(DIGITS), DIGITS, dtype=dtype)
    x = rows.batch(indices, np.empty((64, len(indices)), dtype))
    network, out = (
        Network(SPEC, batch_size=len(indices), dtype=dtype),
        np.empty(len(point()), dtype),
    )
    loss = network.gradient(point(dtype=dtype), x, rows.targets(indices), out=out)
    return out, loss / len(indices)


# ------------------------------------------------------------------------- the batch's gradient


@pytest.mark.parametrize(
    ("portion", "send_every"), [(1, 1), (7, 3), (8, 100), (51, 2), (52, 1), (103, 1), (500, 4)]
)
@pytest.mark.parametrize(("dtype", "within"), [("float64", 1e-10), ("float32", 1e-6)])
def test_bundles_add_up_to_the_full_batch_gradient(
    portion: int, send_every: int, dtype: str, within: float
) -> None:
    """Means over rows, not over portions: the last portion and bundle are short."""
    gradient = make(portion=portion, send_every=send_every, dtype=dtype)
    sums, losses, rows = np.zeros(n_parameters(SPEC)), 0.0, 0
    for bundle in range(Batch(ROWS, portion, send_every).n_bundles):
        for number in gradient.portions(0, bundle):
            out, result = compute(gradient, number, at=point(dtype=dtype))
            sums += out
            losses, rows = losses + result.loss_sum, rows + result.rows
    expected, loss = whole(np.arange(ROWS), dtype)
    assert rows == ROWS
    np.testing.assert_allclose(sums / ROWS, expected, rtol=0, atol=within * np.abs(expected).max())
    assert losses / ROWS == pytest.approx(loss, rel=within)


def test_a_portion_depends_on_its_number_only() -> None:
    """Not on what was computed before, nor by whom: copies of a bundle are the same bits."""
    first, second = make(portion=9, send_every=2), make(portion=9, send_every=5)
    expected = [compute(first, p, at=point())[0].tobytes() for p in range(12)]
    found = {p: compute(second, p, at=point())[0].tobytes() for p in (11, 3, 0, 3, 7)}
    assert found == {p: expected[p] for p in found}


def test_tensors_are_those_of_the_share() -> None:
    names = [name for name, _ in make(portion=9).tensors]
    assert names == [tensor.name for tensor in tensors(SPEC)]


# ------------------------------------------------------------------------------------- dropout


def test_dropout_is_a_function_of_seed_and_portion(tmp_path: Path) -> None:
    """So the loss is a function of the parameters, whoever computes it and how often."""
    at = point(DROPPING)

    def found(portion: int, *, seed: int = 5) -> bytes:
        gradient = make(portion=ROWS // 2, spec=DROPPING, seed=seed)
        compute(gradient, 0, at=at)
        out: Array = compute(gradient, portion, at=at)[0]
        return out.tobytes()

    assert found(1) == found(1)
    assert found(1) != found(1, seed=6)

    source = open_source(DIGITS)
    np.save(tmp_path / "x.npy", np.asarray(source.x)[[3, 3]])
    np.save(tmp_path / "y.npy", source.y[[3, 3]])
    same_rows = NpySource(x=str(tmp_path / "x.npy"), y=str(tmp_path / "y.npy"), scale=0.0625)
    two = make(portion=1, spec=DROPPING, source=same_rows)
    assert compute(two, 0, at=at)[1] != compute(two, 1, at=at)[1]
    two = make(portion=1, source=same_rows)
    assert compute(two, 0, at=point())[1] == compute(two, 1, at=point())[1]


# ------------------------------------------------------------------------------------- samples


def test_a_sampled_batch_is_the_mean_over_its_rows() -> None:
    gradient = make(portion=8, send_every=2, batch=30)
    for sample in (1, 2, 1):
        indices = sample_rows(ROWS, 5, sample=sample, size=30)
        expected, loss = whole(indices)
        results = [compute(gradient, p, at=point(), sample=sample) for p in range(4)]
        assert [result.rows for _, result in results] == [8, 8, 8, 6]
        np.testing.assert_allclose(sum(out for out, _ in results) / 30, expected, atol=1e-12)
        assert sum(result.loss_sum for _, result in results) / 30 == pytest.approx(loss)
    assert list(gradient.portions(1, 1)) == [2, 3]
    assert list(gradient.portions(0, 6)) == [12]


def test_a_sample_of_a_batch_that_is_all_rows_is_an_error_of_the_program() -> None:
    with pytest.raises(AssertionError, match="sample 1 of a batch that is all rows"):
        make(portion=8).portions(1, 0)


def test_a_portion_may_be_larger_than_the_data() -> None:
    gradient = make(portion=10**9)
    assert compute(gradient, 0, at=point())[1].rows == ROWS


# ------------------------------------------------------------------------------------ prefetch


class Advised:
    """What the kernel was told, as (row, row), in place of telling it."""

    def __init__(self, x: Array) -> None:
        self._x, self.told = x, list[tuple[int, int]]()

    def __call__(self, part: Array) -> None:
        row_bytes = self._x.strides[0]
        start = (part.ctypes.data - self._x.ctypes.data) // row_bytes
        self.told.append((start, start + len(part)))


@pytest.fixture
def mapped(tmp_path: Path) -> SourceSpec:
    np.save(tmp_path / "x.npy", np.arange(1000 * 64, dtype="u1").reshape(1000, 64))
    np.save(tmp_path / "y.npy", np.arange(1000) % 10)
    return NpySource(x=str(tmp_path / "x.npy"), y=str(tmp_path / "y.npy"), scale=0.001)


def advised(gradient: NetworkPortions, monkeypatch: pytest.MonkeyPatch) -> Advised:
    told = Advised(gradient._rows._x.array)  # type: ignore[attr-defined]
    monkeypatch.setattr(data_rows, "will_need", told)
    return told


def test_a_bundle_s_rows_in_a_mapped_file_are_asked_for(
    mapped: SourceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradient = make(portion=10, send_every=5, source=mapped)
    told = advised(gradient, monkeypatch)
    gradient.prefetch(0, 3)
    gradient.prefetch(0, 19)
    assert told.told == [(150, 200), (950, 1000)]


def test_rows_that_are_spread_are_not_asked_for_and_those_that_are_close_are(
    mapped: SourceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse = make(portion=10, send_every=5, source=mapped, batch=100)
    told = advised(sparse, monkeypatch)
    sparse.prefetch(1, 0)
    assert told.told == []
    dense = make(portion=10, send_every=5, source=mapped, batch=900)
    told = advised(dense, monkeypatch)
    dense.prefetch(1, 2)
    rows = sample_rows(1000, 5, sample=1, size=900)[100:150]
    assert told.told == [(rows[0], rows[-1] + 1)]


def test_no_more_is_asked_for_than_a_limit(
    mapped: SourceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dbctl.data.dataset.PREFETCH_BYTES", 64 * 12)
    gradient = make(portion=10, send_every=5, source=mapped)
    told = advised(gradient, monkeypatch)
    gradient.prefetch(0, 1)
    assert told.told == [(50, 62)]


def test_rows_that_are_not_together_in_a_file_are_not_asked_for(
    mapped: SourceSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory; own rows of a replica; in Fortran's order, where a row is spread."""

    def told(part: Array) -> None:
        raise AssertionError("nothing to read ahead")

    monkeypatch.setattr(data_rows, "will_need", told)
    make(portion=10).prefetch(0, 1)
    Dataset(open_source(mapped), mapped, rows=np.arange(0, 1000, 2)).prefetch(0, 10)
    path = tmp_path / "x.npy"
    np.save(path, np.asfortranarray(np.load(path)))
    make(portion=10, source=mapped).prefetch(0, 1)


def test_advice_is_by_whole_pages_and_may_be_refused(mapped: SourceSpec) -> None:
    x: Any = np.load(mapped.x, mmap_mode="r")  # type: ignore[union-attr]
    given: list[tuple[int, ...]] = []

    class Mapping(mmap.mmap):
        def madvise(self, *advice: int) -> None:
            given.append(advice)
            raise OSError("not here")

    with Path(mapped.x).open("rb") as file:  # type: ignore[union-attr]
        mapping = Mapping(file.fileno(), 0, access=mmap.ACCESS_READ)
    array: Array = np.ndarray((1000, 64), "u1", mapping, x.offset)
    will_need(array[100:200])
    [(option, start, length)] = given
    assert (option, start % mmap.PAGESIZE) == (mmap.MADV_WILLNEED, 0)
    first, last = x.offset + 100 * 64, x.offset + 200 * 64
    assert start <= first < start + mmap.PAGESIZE
    assert start + length == last
    will_need(np.zeros(10))  # no mapping
    will_need(np.asarray(x)[:0])
    will_need(np.asarray(x)[3:500])  # the kernel itself


def test_results_are_those_of_a_gradient(mapped: SourceSpec) -> None:
    gradient = make(portion=10, source=mapped)
    out, result = compute(gradient, 99, at=point())
    assert isinstance(result, BatchResult)
    assert result.rows == 10
    assert np.abs(out).max() <= result.bound < 1e6
    assert result.bound == 10 * gradient._share.bound, "the passes give that of the mean"


def test_a_gradient_that_is_too_large_becomes_infinite_without_a_warning() -> None:
    """The worker refuses it (docs/reliability.md, G14)."""
    layers: tuple[LayerSpec, ...] = (DenseSpec(units=10),)
    spec = NetworkSpec(input=(64,), layers=layers, loss="squared")
    gradient = make(portion=50, spec=spec, dtype="float32")
    at = np.full(n_parameters(spec), 1e37, "float32")
    out, result = compute(gradient, 0, at=at)
    assert not np.isfinite(out).all()
    assert not result.bound < 1e30
