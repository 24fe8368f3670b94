"""Rows are shared out and ordered by functions of the seed, and each is seen once an epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbctl.data.order import (
    batch_rows,
    epoch_order,
    permutation,
    ranks,
    sample_rows,
    steps_per_epoch,
    subset,
)
from tests.reference import serial_permutation

GOLDEN_ROWS = [4, 1, 5, 3, 9, 6, 2, 0, 8, 7]
GOLDEN_ORDER = [9, 5, 7, 6, 2, 0, 8, 4, 1, 3]
GOLDEN_SAMPLE = [1, 2, 5, 11, 12, 13]


def epoch_of_all(n: int, seed: int, *, replicas: int, batch_size: int, epoch: int) -> list[int]:
    """The rows of the source in one epoch of every replica, mini-batch by mini-batch."""
    seen: list[int] = []
    for replica in range(replicas):
        rows = subset(n, seed, replica=replica, replicas=replicas)
        order = epoch_order(len(rows), seed, replica=replica, epoch=epoch)
        for index in range(steps_per_epoch(len(rows), batch_size)):
            batch = batch_rows(order, index, batch_size)
            assert 1 <= len(batch) <= batch_size
            seen += rows[batch].tolist()
    return seen


@settings(max_examples=200, deadline=None)
@given(
    n=st.integers(1, 200),
    seed=st.integers(0, 2**63 - 1),
    replicas=st.integers(1, 20),
    batch_size=st.integers(1, 250),
    epoch=st.integers(0, 1000),
)
def test_each_row_once_an_epoch(
    n: int, seed: int, replicas: int, batch_size: int, epoch: int
) -> None:
    seen = epoch_of_all(n, seed, replicas=replicas, batch_size=batch_size, epoch=epoch)
    assert sorted(seen) == list(range(n))


@pytest.mark.parametrize(
    ("n", "replicas", "batch_size"), [(1003, 4, 64), (3, 8, 64), (5, 2, 64), (1, 1, 1)]
)
def test_counts_that_do_not_divide(n: int, replicas: int, batch_size: int) -> None:
    """pytorch#38174: 1003 rows, 4 replicas, batch 64; fewer rows than replicas; than a batch."""
    seen = epoch_of_all(n, 7, replicas=replicas, batch_size=batch_size, epoch=3)
    assert sorted(seen) == list(range(n))


def test_a_replica_without_rows_has_no_steps() -> None:
    rows = subset(3, 7, replica=3, replicas=8)
    assert rows.shape == (0,)
    assert rows.dtype == np.int64
    assert steps_per_epoch(len(rows), 64) == 0
    assert epoch_order(0, 7, replica=3, epoch=0).shape == (0,)


def test_the_first_batch_differs_between_replicas_and_passes_and_is_the_same_for_a_seed() -> None:
    """pytorch#5059."""

    def first(seed: int, replica: int, epoch: int) -> list[int]:
        rows = subset(1000, seed, replica=replica, replicas=2)
        order = epoch_order(len(rows), seed, replica=replica, epoch=epoch)
        return rows[batch_rows(order, 0, 32)].tolist()

    firsts = [first(s, r, e) for s in (7, 8) for r in (0, 1) for e in (0, 1)]
    assert len({tuple(batch) for batch in firsts}) == 8
    assert first(7, 1, 1) == first(7, 1, 1)
    positions = [epoch_order(500, 7, replica=r, epoch=0).tolist() for r in (0, 1)]
    assert positions[0] != positions[1]


def test_rows_belong_to_a_replica_in_every_epoch() -> None:
    """Row i of one seeded permutation belongs to replica i mod R."""
    whole = subset(101, 7, replica=0, replicas=1)
    for replica in range(3):
        assert subset(101, 7, replica=replica, replicas=3).tolist() == whole[replica::3].tolist()


@settings(max_examples=30, deadline=None)
@given(n=st.integers(0, 60), seed=st.integers(0, 2**63 - 1))
def test_permutation_equals_its_slow_twin(n: int, seed: int) -> None:
    assert permutation(n, seed, "rows").tolist() == serial_permutation(n, seed, "rows")


def test_the_order_of_a_seed_never_changes() -> None:
    """Resume goes on in the middle of an epoch (reliability.md, G18): these are for good."""
    assert subset(10, 7, replica=0, replicas=1).tolist() == GOLDEN_ROWS
    assert epoch_order(10, 7, replica=1, epoch=2).tolist() == GOLDEN_ORDER


def test_an_order_is_even() -> None:
    """Each row is first about equally often: 2,000 epochs of 10 rows, 5 deviations allowed."""
    firsts = np.bincount([epoch_order(10, 1, replica=0, epoch=e)[0] for e in range(2000)])
    assert np.all(np.abs(firsts - 200) < 5 * np.sqrt(2000 * 0.1 * 0.9))


def test_steps_per_epoch() -> None:
    assert [steps_per_epoch(n, 4) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
    with pytest.raises(AssertionError, match="no mini-batch 2"):
        batch_rows(np.arange(5), 2, 4)


# -------------------------------------------------------------------- samples of batch methods


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_sample_is_rows_without_repetition_in_rising_order(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 60))
    size, seed = data.draw(st.integers(1, n)), data.draw(st.integers(0, 2**63 - 1))
    sample = data.draw(st.integers(1, 1000))
    rows = sample_rows(n, seed, sample=sample, size=size)
    assert rows.dtype == np.int64
    expected = sorted(serial_permutation(n, seed, f"sample {sample}")[:size])
    assert rows.tolist() == expected
    assert len(set(expected)) == size


def test_samples_differ_by_number_and_by_seed_and_never_change() -> None:
    def draw(seed: int, sample: int) -> tuple[int, ...]:
        return tuple(sample_rows(100, seed, sample=sample, size=20).tolist())

    assert len({draw(s, k) for s in (7, 8) for k in (1, 2, 3)}) == 6
    assert sample_rows(20, 7, sample=3, size=6).tolist() == GOLDEN_SAMPLE


def test_every_row_is_in_a_sample_about_equally_often() -> None:
    counts = np.zeros(10)
    for sample in range(1, 2001):
        counts[sample_rows(10, 1, sample=sample, size=3)] += 1
    assert np.all(np.abs(counts - 600) < 5 * np.sqrt(2000 * 0.3 * 0.7))


@pytest.mark.parametrize(
    ("sample", "size", "message"),
    [(0, 3, "no sample 0"), (1, 0, "a batch of 0 of 10"), (1, 11, "a batch of 11 of 10")],
)
def test_a_sample_has_a_number_and_a_size(sample: int, size: int, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        sample_rows(10, 7, sample=sample, size=size)


def test_ranks_are_places_in_rising_order() -> None:
    """They find each row of a subset in a file that has them sorted."""
    rows = subset(50, 3, replica=1, replicas=4)
    assert (np.sort(rows)[ranks(rows)] == rows).all()
    assert ranks(rows).dtype == np.int64
    assert ranks(np.zeros(0, np.int64)).tolist() == []
