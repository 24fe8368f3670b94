"""Portions and bundles: every row of a batch lies in exactly one (paper A, section 4.2)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbctl.bundles import Batch

batches = st.builds(Batch, st.integers(1, 200), st.integers(1, 50), st.integers(1, 12))


@given(batches)
def test_bundles_and_portions_share_the_rows_out_in_order(batch: Batch) -> None:
    """Only the last may be short: "each portion counts exactly once" needs them disjoint."""
    portions = [p for b in range(batch.n_bundles) for p in batch.portions_of(b)]
    assert portions == list(range(batch.n_portions))
    rows = [row for portion in portions for row in batch.rows_of(portion)]
    assert rows == list(range(batch.rows))
    assert {len(batch.rows_of(p)) for p in portions[:-1]} <= {batch.portion}
    full = [len(batch.portions_of(b)) for b in range(batch.n_bundles - 1)]
    assert set(full) <= {batch.send_every}


@given(batches)
def test_a_bundle_s_rows_are_those_of_its_portions(batch: Batch) -> None:
    for bundle in range(batch.n_bundles):
        rows = [row for p in batch.portions_of(bundle) for row in batch.rows_of(p)]
        assert list(batch.rows_of_bundle(bundle)) == rows
        assert len(batch.rows_of_bundle(bundle)) == len(rows) > 0


def test_by_hand() -> None:
    batch = Batch(rows=25, portion=4, send_every=3)
    assert (batch.n_portions, batch.n_bundles) == (7, 3)
    assert batch.portions_of(2) == range(6, 7)
    assert batch.rows_of(6) == range(24, 25)
    assert batch.rows_of_bundle(1) == range(12, 24)
    assert len(batch.rows_of_bundle(2)) == 1


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_batch_has_rows(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(AssertionError, match="nothing to compute"):
        Batch(*sizes)


def test_there_is_no_bundle_or_portion_beyond_the_last() -> None:
    batch = Batch(rows=4, portion=2)
    with pytest.raises(AssertionError, match="no bundle 2 of 2"):
        batch.portions_of(2)
    with pytest.raises(AssertionError, match="no portion -1 of 2"):
        batch.rows_of(-1)
