"""Pooling, alone: against its definition, on boxes (ladder, rung 1), its gradient (rung 2)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import check_gradient, pooled, pooled_back

from dbctl.model.kernels.pool import Pool
from dbctl.model.layers.pool import PoolSpec
from dbctl.region import Box

KINDS = ["max", "mean", "l2"]
BATCH = 4

sides = st.tuples(st.integers(1, 3), st.integers(1, 3))


def run(spec: PoolSpec, inputs, box: Box, *, x, dy, batch_size: int = BATCH):
    """Outputs on `box` and the gradient by its input box, from arrays of the whole layer."""
    layer = Pool(spec, inputs, box, batch_size=batch_size, dtype=str(x.dtype))
    assert layer.tensors == ()
    seen = x[layer.input_box.slices()].copy()
    before = seen.copy()
    out = np.full((*box.shape, x.shape[-1]), np.nan, x.dtype)
    layer.forward([], seen, out)
    assert seen.tobytes() == before.tobytes()
    y, dx = out.copy(), np.full_like(seen, np.nan)
    delta = dy[box.slices()].copy()
    layer.backward([], seen, out, delta=delta, gradients=[], dx=dx)
    return y, dx, layer.input_box


@st.composite
def cases(draw):
    """A layer, inputs of whole numbers (with ties, and sums without rounding), a box of it."""
    size, stride = draw(sides), draw(st.none() | sides)
    spec = PoolSpec(kind=draw(st.sampled_from(KINDS)), size=size, stride=stride)
    inputs = (
        size[0] + draw(st.integers(0, 6)),
        size[1] + draw(st.integers(0, 6)),
        draw(st.integers(1, 3)),
    )
    whole = Box.whole(spec.output_shape(inputs))
    starts = tuple(draw(st.integers(0, n - 1)) for n in whole.stops)
    ends = zip(starts, whole.stops, strict=True)
    stops = tuple(draw(st.integers(a + 1, n)) for a, n in ends)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    n = draw(st.integers(1, BATCH))
    x = rng.integers(-2, 3, (*inputs, n)).astype(float)
    dy = rng.integers(-8, 9, (*whole.shape, n)).astype(float)
    return spec, inputs, Box(starts, stops), x, dy


@settings(deadline=None)
@given(cases())
def test_on_any_box_it_is_the_slow_twin_there(case) -> None:
    """Exactly for max, whatever the windows; to rounding where numbers are divided."""
    spec, inputs, box, x, dy = case
    y, dx, seen = run(spec, inputs, box, x=x, dy=dy)
    expected = pooled(x, spec.kind, spec.sizes, strides=spec.strides)
    tolerance = 0 if spec.kind == "max" else 1e-14
    np.testing.assert_allclose(y, expected[box.slices()], rtol=tolerance, atol=0)
    only = np.zeros_like(dy)
    only[box.slices()] = dy[box.slices()]
    d_whole = pooled_back(x, only, spec.kind, sizes=spec.sizes, strides=spec.strides)
    np.testing.assert_allclose(dx, d_whole[seen.slices()], rtol=0, atol=64 * tolerance)
    d_whole[seen.slices()] = 0
    assert not d_whole.any(), "a node outside the input box has a gradient"


@settings(deadline=None, max_examples=50)
@given(cases(), st.tuples(*[st.integers(1, 3)] * 3))
def test_boxes_that_cover_it_give_the_bits_of_the_layer_on_everything(case, counts) -> None:
    spec, inputs, _, x, dy = case
    whole = Box.whole(spec.output_shape(inputs))
    y, dx, seen = run(spec, inputs, whole, x=x, dy=dy)
    total = np.zeros_like(x)
    for box in filter(None, whole.split(counts)):
        part, d_part, inner = run(spec, inputs, box, x=x, dy=dy)
        assert part.tobytes() == y[box.slices()].tobytes()
        total[inner.slices()] += d_part
    # A sum of whole numbers, or of no other window's share, has no rounding.
    exact = spec.kind == "max" or all(a <= b for a, b in zip(spec.sizes, spec.strides, strict=True))
    np.testing.assert_allclose(total[seen.slices()], dx, rtol=0, atol=0 if exact else 1e-12)


@pytest.mark.parametrize(
    "spec",
    [
        PoolSpec(kind=k, size=s, stride=t)
        for k in KINDS
        for s, t in [(2, None), (3, 2), ((1, 2), (3, 1))]
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_gradient_is_a_directional_difference(spec: PoolSpec, dtype: str) -> None:
    """Distinct inputs, so that max has no tie within a step; float32 agrees with float64."""
    inputs, rng = (7, 8, 2), np.random.default_rng(0)
    x = rng.permutation(7 * 8 * 2 * 3).reshape(*inputs, 3) / 10 + 0.05
    box = Box.whole(spec.output_shape(inputs))
    dy = rng.standard_normal((*box.shape, 3))
    _, dx, seen = run(spec, inputs, box, x=x.astype(dtype), dy=dy.astype(dtype))
    full = np.zeros_like(x)
    full[seen.slices()] = dx
    if dtype == "float32":
        expected = pooled_back(x, dy, spec.kind, sizes=spec.sizes, strides=spec.strides)
        np.testing.assert_allclose(full, expected, rtol=0, atol=1e-5)
        return
    check_gradient(lambda at: float(np.vdot(run(spec, inputs, box, x=at, dy=dy)[0], dy)), full, x)


def test_of_equal_inputs_the_first_by_rows_takes_the_gradient() -> None:
    x = np.array([[0.0, 1.0], [1.0, 1.0]]).reshape(2, 2, 1, 1)
    box = Box.whole((1, 1, 1))
    _, dx, _ = run(PoolSpec(kind="max"), (2, 2, 1), box, x=x, dy=np.full((1, 1, 1, 1), 5.0))
    assert dx.ravel().tolist() == [0, 5, 0, 0]


def test_l2_of_a_window_of_zeros_has_no_gradient_and_no_warning() -> None:
    x = np.zeros((2, 4, 1, 1))
    x[0, 2] = 3
    x[1, 3] = 4
    spec, box = PoolSpec(kind="l2"), Box.whole((1, 2, 1))
    y, dx, _ = run(spec, (2, 4, 1), box, x=x, dy=np.ones((1, 2, 1, 1)))
    assert y.ravel().tolist() == [0, 5]
    np.testing.assert_allclose(dx.ravel(), [0, 0, 0.6, 0, 0, 0, 0, 0.8], rtol=1e-15)


def test_a_remainder_at_the_border_is_dropped() -> None:
    spec = PoolSpec(kind="mean", size=(2, 3), stride=(2, 2))
    assert spec.output_shape((7, 8, 5)) == (3, 3, 5)
    assert spec.input_box((7, 8, 5), Box.whole((3, 3, 5))) == Box((0, 0, 0), (6, 7, 5))
    assert spec.input_box((7, 8, 5), Box((1, 2, 3), (3, 3, 4))) == Box((2, 4, 3), (6, 7, 4))
    assert not spec.input_box((7, 8, 5), Box((1, 1, 1), (1, 2, 2)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_mini_batch_after_a_full_one_has_the_bits_of_its_own(kind: str) -> None:
    spec, inputs, rng = PoolSpec(kind=kind, size=3, stride=2), (7, 7, 2), np.random.default_rng(0)
    box = Box.whole(spec.output_shape(inputs))
    layer = Pool(spec, inputs, box, batch_size=BATCH, dtype="float32")
    for n in (BATCH, 1, 3):
        x = rng.standard_normal((*inputs, n)).astype("float32")
        dy = rng.standard_normal((*box.shape, n)).astype("float32")
        out, dx = np.empty_like(dy), np.empty_like(x)
        layer.forward([], x, out)
        y = out.copy()
        layer.backward([], x, out, delta=dy.copy(), gradients=[], dx=dx)
        fresh = run(spec, inputs, box, x=x, dy=dy, batch_size=n)
        assert y.tobytes() == fresh[0].tobytes()
        assert dx.tobytes() == fresh[1].tobytes()


def test_the_first_layer_needs_no_gradient_by_its_inputs() -> None:
    spec = PoolSpec(kind="max")
    layer = Pool(spec, (2, 2, 1), Box.whole((1, 1, 1)), batch_size=1, dtype="float64")
    one = np.ones((1, 1, 1, 1))
    layer.backward([], np.ones((2, 2, 1, 1)), one, delta=one, gradients=[], dx=None)
