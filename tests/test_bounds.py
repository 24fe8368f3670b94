"""What bounds a gradient without a look at it (docs/reliability.md, G14)."""

from __future__ import annotations

import tracemalloc
from math import inf, isnan, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as some

from dbctl.model.kernels.bounds import norm, product_bound

TINY = 1e-19  # its square is lost in float32, where the other norm is below 1e20

numbers = st.floats(-(2.0**60), 2.0**60, width=32)
arrays = some.arrays(np.float32, some.array_shapes(min_dims=2, max_dims=2), elements=numbers)


@given(arrays, st.data())
def test_no_element_of_the_product_is_larger(delta: np.ndarray, data: st.DataObject) -> None:
    shape = (data.draw(st.integers(1, 6)), delta.shape[1])
    x = data.draw(some.arrays(np.float32, shape, elements=numbers))
    bound = product_bound(delta, x) * (1 + 1e-5) + TINY * 1e20
    for product in (delta.astype(float) @ x.astype(float).T, delta.astype(float).sum(axis=1)):
        assert np.abs(product).max() <= bound


def test_it_is_reached() -> None:
    delta, x = np.full((1, 4), 2.0), np.full((1, 4), 3.0)
    assert product_bound(delta, x) == 24.0
    assert product_bound(delta, 0 * x) == 8.0  # the gradient by the bias


@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("zero", [False, True])
def test_what_is_not_finite_has_no_bound(bad: float, zero: bool) -> None:
    """Not even times zero: that is NaN."""
    good, spoilt = np.full((2, 3), 0.0 if zero else 1.0), np.ones((2, 3))
    spoilt[1, 2] = bad
    for bound in (product_bound(good, spoilt), product_bound(spoilt, good)):
        assert isnan(bound) or bound == inf


def test_a_sum_of_squares_that_overflows_is_no_bound() -> None:
    with np.errstate(over="ignore"):
        assert norm(np.full(3, 1e20, "float32")) == inf


def test_rows_first_data_are_not_copied() -> None:
    rows = np.arange(120_000.0).reshape(400, 300)
    expected = np.sqrt((rows**2).sum())
    tracemalloc.start()
    assert norm(rows.T) == norm(rows) == pytest.approx(expected)
    assert tracemalloc.get_traced_memory()[1] < rows.nbytes / 10
    tracemalloc.stop()


def test_no_elements_have_no_size() -> None:
    assert norm(np.empty((0, 3))) == 0.0
