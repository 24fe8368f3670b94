"""Sums and dot products of whole vectors, beside float64 and beside one element at a time."""

from __future__ import annotations

from itertools import pairwise
from math import fsum, inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dbctl.optim import vectors
from dbctl.optim.vectors import add_to_sums, combine, dots, mean_gradient
from dbctl.region import Range
from tests.reference import combined, mean_gradient_of

Array = NDArray[Any]

DTYPES = ["f4", "f8"]
# Blocks are shorter in the tests, so that a vector of some tens of elements has several.
SIZES = st.integers(1, 80)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("_COMBINE_BLOCK", 16), ("_DOTS_BLOCK", 8), ("_SUMS_BLOCK", 12)):
        monkeypatch.setattr(vectors, name, size)


def vectors_of(n: int, count: int, dtype: str = "f4", seed: int = 0) -> list[Array]:
    generator = np.random.default_rng(seed)
    return [
        (generator.normal(size=n) * 10.0 ** generator.integers(-6, 6, size=n)).astype(dtype)
        for _ in range(count)
    ]


def cuts_of(data: st.DataObject, n: int) -> list[slice]:
    inner = data.draw(st.sets(st.integers(1, n), max_size=4), label="cuts")
    return [slice(a, b) for a, b in pairwise(sorted({0, n} | inner))]


# --------------------------------------------------------------------------------------- combine


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40)
@given(n=SIZES, factors=st.lists(st.sampled_from([1.0, -1.0, 0.3, -7e-3, 0.0, 1e9]), max_size=7))
def test_a_combination_is_term_by_term_in_the_vectors_dtype(
    dtype: str, n: int, factors: list[float]
) -> None:
    terms = list(zip(factors, vectors_of(n, len(factors), dtype), strict=True))
    out = np.full(n, np.nan, dtype)
    combine(out, terms)
    assert out.tolist() == combined(terms, n, dtype).tolist()


@settings(max_examples=60)
@given(data=st.data(), n=SIZES, count=st.integers(1, 6))
def test_no_bit_of_a_combination_shows_how_the_vectors_are_cut(
    data: st.DataObject, n: int, count: int
) -> None:
    factors = data.draw(st.lists(st.floats(-1e3, 1e3), min_size=count, max_size=count))
    parts, whole = vectors_of(n, count), np.zeros(n, "f4")
    combine(whole, list(zip(factors, parts, strict=True)))
    for at in cuts_of(data, n):
        out = np.zeros(at.stop - at.start, "f4")
        combine(out, [(c, v[at]) for c, v in zip(factors, parts, strict=True)])
        assert out.tobytes() == whole[at].tobytes()


@pytest.mark.parametrize("factor", [1.0, -1.0, 0.3])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_output_may_be_among_the_terms(factor: float, place: int, count: int) -> None:
    if place >= count:
        return
    parts = vectors_of(40, count)
    terms = [(factor, v) for v in parts]
    expected = combined(terms, 40, "f4")
    combine(parts[place], terms)
    assert parts[place].tolist() == expected.tolist()


def test_the_output_may_stand_twice() -> None:
    vector = np.arange(30.0)
    combine(vector, [(1.0, vector), (2.0, vector), (-1.0, vector)])
    assert vector.tolist() == (2 * np.arange(30.0)).tolist()


@pytest.mark.parametrize("factor", [0.1, np.float64(0.1)])
def test_coefficients_are_rounded_to_the_dtype_of_the_vectors(factor: float) -> None:
    """A float64 coefficient must not make the arithmetic of a float32 vector float64."""
    out, vector = np.zeros(99, "f4"), np.arange(1, 100, dtype="f4")
    expected = combined([(factor, vector)], 99, "f4")
    combine(out, [(factor, vector)])
    assert out.tolist() == expected.tolist() != (0.1 * vector.astype("f8")).astype("f4").tolist()


def test_vectors_of_another_dtype_or_length_are_a_fault() -> None:
    for other in (np.zeros(3), np.zeros(4, "f4")):
        with pytest.raises(AssertionError, match="expected float32"):
            combine(np.zeros(3, "f4"), [(1.0, other)])


def test_what_is_not_finite_comes_through_without_a_warning() -> None:
    bad = np.array([np.nan, np.inf, -np.inf, 3e38], "f4")
    out = np.zeros(4, "f4")
    combine(out, [(2.0, bad), (1e300, np.ones(4, "f4")), (0.0, bad)])
    assert not np.isfinite(out).any()
    assert np.isnan(dots([bad], [bad])[0])
    sums = np.zeros(4)
    add_to_sums(sums, bad)
    add_to_sums(sums, -bad)
    assert np.isnan(sums[:3]).all()


# ------------------------------------------------------------------------------------------ dots


@settings(max_examples=60)
@given(data=st.data(), n=SIZES, count=st.integers(1, 6), dtype=st.sampled_from(DTYPES))
def test_dot_products_are_those_of_float64(
    data: st.DataObject, n: int, count: int, dtype: str
) -> None:
    have = vectors_of(n, count, dtype)
    some = st.lists(st.sampled_from(range(count)), max_size=5)
    rows, columns = data.draw(some, label="rows"), data.draw(some, label="columns")
    found = dots([have[i] for i in rows], [have[i] for i in columns])
    pairs = [(have[i].astype("f8"), have[j].astype("f8")) for i in rows for j in columns]
    assert len(found) == len(pairs)
    for value, (a, b) in zip(found, pairs, strict=True):
        assert value == pytest.approx(fsum(a * b), rel=1e-12, abs=1e-13 * fsum(abs(a * b)))


def test_dot_products_do_not_lose_what_float32_would() -> None:
    """2^24 + 1 is not a float32."""
    large = np.array([4096, 1, 1], "f4")
    assert dots([large], [large]) == [2**24 + 2]


def test_a_product_has_the_same_bits_in_both_orders() -> None:
    have = vectors_of(77, 5)
    table = np.array(dots(have, have)).reshape(5, 5)
    assert table.tolist() == table.T.tolist()
    again = dots(have[3:], have[:3])
    assert again == pytest.approx(table[3:, :3].ravel().tolist(), rel=1e-12)


def test_dot_products_of_a_cut_add_up() -> None:
    have = vectors_of(80, 3)
    whole = dots(have[:2], have)
    parts = [
        dots([v[at] for v in have[:2]], [v[at] for v in have]) for at in (slice(33), slice(33, 80))
    ]
    # Not the same array objects, but the same vectors: they are only read more often.
    assert [sum(column) for column in zip(*parts, strict=True)] == pytest.approx(whole, rel=1e-12)


# --------------------------------------------------------------- sums of gradients and their mean


@settings(max_examples=30)
@given(n=SIZES, count=st.integers(1, 9), seed=st.integers(0, 99))
def test_the_order_of_bundles_does_not_show_in_float32(n: int, count: int, seed: int) -> None:
    """They are added in float64 (paper A, section 4.2; ours)."""
    generator = np.random.default_rng(seed)
    gradients = [generator.normal(size=n).astype("f4") for _ in range(count)]
    found = []
    for order in (range(count), reversed(range(count)), generator.permutation(count)):
        sums, out = np.zeros(n), np.zeros(n, "f4")
        for i in order:
            add_to_sums(sums, gradients[i])
        mean_gradient(out, sums, out, examples=7, decays=[(Range(0, n), 0.0)])
        found.append(out.tobytes())
    assert len(set(found)) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40)
@given(data=st.data(), n=SIZES)
def test_the_mean_gradient_and_the_penalty_are_the_slow_twins(
    dtype: str, data: st.DataObject, n: int
) -> None:
    sums, point = vectors_of(n, 1, "f8")[0], vectors_of(n, 1, dtype, seed=1)[0]
    decays = [
        (Range(at.start, at.stop), data.draw(st.sampled_from([0.0, 0.5, 1e-4])))
        for at in cuts_of(data, n)
    ]
    out = np.full(n, np.nan, dtype)
    penalty = mean_gradient(out, sums, point, examples=13, decays=decays)
    expected, its_penalty = mean_gradient_of(sums, point, examples=13, decays=decays)
    assert out.tolist() == expected.tolist()
    assert penalty == pytest.approx(its_penalty, rel=1e-12)


@settings(max_examples=40)
@given(data=st.data(), n=SIZES)
def test_no_bit_of_a_mean_gradient_shows_how_it_is_cut(data: st.DataObject, n: int) -> None:
    sums, point = vectors_of(n, 1, "f8")[0], vectors_of(n, 1, seed=1)[0]
    whole = np.zeros(n, "f4")
    penalty = mean_gradient(whole, sums, point, examples=3, decays=[(Range(0, n), 0.1)])
    penalties = []
    for at in cuts_of(data, n):
        out, size = np.zeros(at.stop - at.start, "f4"), at.stop - at.start
        decays = [(Range(0, size), 0.1)]
        penalties.append(mean_gradient(out, sums[at], point[at], examples=3, decays=decays))
        assert out.tobytes() == whole[at].tobytes()
    assert fsum(penalties) == pytest.approx(penalty, rel=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e39])
@pytest.mark.parametrize("place", [0, 17, 39])
def test_one_element_that_is_not_finite_in_the_gradients_dtype_is_told(
    bad: float, place: int
) -> None:
    """1e39 is a float64 and no float32."""
    sums, out = np.zeros(40), np.zeros(40, "f4")
    sums[place] = bad
    decays = [(Range(0, 20), 0.1), (Range(20, 40), 0.0)]
    assert mean_gradient(out, sums, np.ones(40, "f4"), examples=1, decays=decays) == inf
    sums[place] = 1e38
    penalty = mean_gradient(out, sums, np.ones(40, "f4"), examples=1, decays=decays)
    assert penalty == pytest.approx(0.05 * 20)


def test_a_point_too_far_out_has_no_penalty() -> None:
    """Finite in float64, with a gradient that is finite too: its square is not."""
    out = np.zeros(3)
    decays = [(Range(0, 3), 0.5)]
    assert mean_gradient(out, np.zeros(3), np.full(3, 1e200), examples=1, decays=decays) == inf
    assert np.isfinite(out).all()


# ---------------------------------------------------------------------------------------- memory


def test_nothing_the_size_of_the_slice_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    import tracemalloc

    monkeypatch.undo()
    n = 1 << 21
    have, sums = [np.ones(n, "f4") for _ in range(3)], np.zeros(n)
    tracemalloc.start()
    combine(have[0], [(0.3, v) for v in have])
    dots(have, have)
    add_to_sums(sums, have[1])
    mean_gradient(have[2], sums, have[1], examples=2, decays=[(Range(0, n), 0.1)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < have[0].nbytes / 2, peak
