"""Local contrast normalisation, alone: against its definition, on boxes, its gradient."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import check_gradient, contrast_normalised

from dbctl.model.kernels.lcn import Lcn, window_matrix
from dbctl.model.layers.lcn import LcnSpec
from dbctl.region import Box

BATCH = 3


def run(spec: LcnSpec, box: Box, *, x, dy):
    """Outputs on `box` and the gradient by its input box, from arrays of the whole layer."""
    layer = Lcn(spec, x.shape[:-1], box, batch_size=BATCH, dtype=str(x.dtype))
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


def numbers(shape: tuple[int, ...], n: int = BATCH, *, seed: int = 0):
    """x with a flat corner, where the floor divides, and dy."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((*shape, n))
    x[: shape[0] // 2, : shape[1] // 2] *= 1e-3
    return x, rng.standard_normal((*shape, n))


@pytest.mark.parametrize("window", [1, 3, 5, 9])
@pytest.mark.parametrize("shape", [(8, 7, 3), (4, 6, 1), (1, 1, 2)])
def test_it_is_the_loop_over_the_definition(shape, window: int) -> None:
    """Jarrett et al. 2009, section 2; windows are cut at the border, even all around the image."""
    spec = LcnSpec(window=window, floor=0.3)
    x, dy = numbers(shape, 2)
    y, _, seen = run(spec, Box.whole(shape), x=x, dy=dy)
    assert seen == Box.whole(shape)
    np.testing.assert_allclose(y, contrast_normalised(x, window, 0.3), rtol=0, atol=1e-12)


@st.composite
def cases(draw):
    """Floors at which dy / floor, which may cancel, is not so great that its rounding shows."""
    shape = tuple(draw(st.integers(1, most)) for most in (12, 11, 3))
    spec = LcnSpec(
        window=draw(st.sampled_from([1, 3, 5, 7])), floor=draw(st.sampled_from([0.1, 0.3]))
    )
    return spec, shape, draw(st.tuples(*[st.integers(1, 3)] * 3)), draw(st.integers(1, BATCH))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-10)])
@settings(deadline=None, max_examples=40)
@given(case=cases())
@example(case=(LcnSpec(window=3, floor=0.1), (2, 4, 1), (1, 2, 1), 1))  # one column, a stride
@example(case=(LcnSpec(window=3, floor=0.1), (2, 8, 1), (1, 2, 1), 1))
def test_boxes_that_cover_it_give_the_layer_on_everything(dtype, tolerance, case) -> None:
    spec, shape, counts, n = case
    x, dy = (array.astype(dtype) for array in numbers(shape, n))
    whole = Box.whole(shape)
    y, dx, _ = run(spec, whole, x=x, dy=dy)
    total = np.zeros_like(x)
    for box in filter(None, whole.split(counts)):
        part, d_part, seen = run(spec, box, x=x, dy=dy)
        np.testing.assert_allclose(part, y[box.slices()], rtol=tolerance, atol=tolerance)
        total[seen.slices()] += d_part
    scale = max(1.0, float(np.abs(dx).max()))
    np.testing.assert_allclose(total, dx, rtol=0, atol=tolerance * scale)


def test_a_box_sees_two_radii_around_it_and_all_maps_and_no_more() -> None:
    spec, shape = LcnSpec(window=3, floor=0.1), (12, 12, 2)
    box = Box((5, 6, 1), (7, 7, 2))
    seen = spec.input_box(shape, box)
    assert seen == Box((3, 4, 0), (9, 9, 2))
    assert spec.input_box(shape, Box((0, 11, 0), (1, 12, 1))) == Box((0, 9, 0), (3, 12, 2))
    x, _ = numbers(shape)
    y = contrast_normalised(x, 3, 0.1)[box.slices()]
    outside = x + 1
    outside[seen.slices()] = x[seen.slices()]
    np.testing.assert_array_equal(contrast_normalised(outside, 3, 0.1)[box.slices()], y)
    for corner in ((3, 4, 0), (8, 8, 1)):
        moved = x.copy()
        moved[corner] += 1
        assert (contrast_normalised(moved, 3, 0.1)[box.slices()] != y).any()


@pytest.mark.parametrize("floor", [0.01, 0.7])
@pytest.mark.parametrize("box", [Box.whole((7, 6, 3)), Box((1, 2, 1), (4, 5, 2))], ids=str)
def test_the_gradient_is_a_directional_difference(box: Box, floor: float) -> None:
    """At a floor of 0.7 some positions divide by it (a constant) and some by their deviation."""
    spec, shape = LcnSpec(window=3, floor=floor), (7, 6, 3)
    x, dy = numbers(shape)
    x *= np.linspace(0.3, 2, 6)[:, None, None]
    _, dx, seen = run(spec, box, x=x, dy=dy)
    full = np.zeros_like(x)
    full[seen.slices()] = dx

    def loss(at):
        return float(np.vdot(run(spec, box, x=at, dy=dy)[0], dy[box.slices()]))

    check_gradient(loss, full, x)


def test_a_constant_image_becomes_zero_and_its_gradient_is_finite() -> None:
    x = np.full((6, 6, 2, 1), 3.0, "float32")
    y, dx, _ = run(LcnSpec(window=5), Box.whole((6, 6, 2)), x=x, dy=np.ones_like(x))
    assert np.abs(y).max() < 1e-3
    assert np.isfinite(dx).all()


def test_brightness_and_contrast_are_taken_out() -> None:
    x, dy = numbers((8, 8, 2))
    spec, whole = LcnSpec(window=5, floor=1e-9), Box.whole((8, 8, 2))
    expected = run(spec, whole, x=x, dy=dy)[0]
    np.testing.assert_allclose(run(spec, whole, x=7 * x + 5, dy=dy)[0], expected, atol=1e-9)


def test_weights_of_a_cut_window_have_sum_1_and_those_of_a_whole_one_are_gaussian() -> None:
    weights = window_matrix(20, 9)
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-15)
    assert weights[10, 5] == weights[10, 15] == 0
    assert weights[10, 12] / weights[10, 10] == pytest.approx(np.exp(-0.5 * (2 / 2.25) ** 2))
    assert weights[0, 0] > weights[10, 10]


def test_a_short_mini_batch_after_a_full_one_has_the_bits_of_its_own() -> None:
    spec, shape = LcnSpec(window=3), (6, 5, 2)
    box = Box((1, 1, 0), (4, 3, 1))
    layer = Lcn(spec, shape, box, batch_size=BATCH, dtype="float64")
    for n in (BATCH, 1, 2):
        x, dy = numbers(shape, n, seed=n)
        seen = x[layer.input_box.slices()].copy()
        out, dx = np.empty((*box.shape, n)), np.empty_like(seen)
        layer.forward([], seen, out)
        y = out.copy()
        delta = dy[box.slices()].copy()
        layer.backward([], seen, out, delta=delta, gradients=[], dx=dx)
        fresh = run(spec, box, x=x, dy=dy)
        assert y.tobytes() == fresh[0].tobytes()
        assert dx.tobytes() == fresh[1].tobytes()


def test_the_first_layer_needs_no_gradient_by_its_inputs() -> None:
    x, dy = numbers((4, 4, 1))
    layer = Lcn(LcnSpec(), (4, 4, 1), Box.whole((4, 4, 1)), batch_size=BATCH, dtype="float64")
    out = np.empty_like(x)
    layer.forward([], x, out)
    layer.backward([], x, out, delta=dy, gradients=[], dx=None)
