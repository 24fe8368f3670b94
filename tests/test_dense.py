"""A dense layer, alone: on boxes (ladder, rung 1), its gradient (rung 2), its tensors."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import check_gradient

from dbctl.model.activations import ACTIVATIONS
from dbctl.model.kernels.dense import Dense
from dbctl.model.layers.dense import Activation, DenseSpec
from dbctl.model.tensor import Initial
from dbctl.region import Box

UNITS, BATCH = 6, 5
INPUTS = (3, 2, 2)


def layer_on(box: Box, activation: str) -> Dense:
    spec = DenseSpec(units=UNITS, activation=activation)
    return Dense(spec, INPUTS, box, batch_size=BATCH, dtype="float64")


def run(layer: Dense, weight: np.ndarray, bias: np.ndarray, x: np.ndarray, dy: np.ndarray):
    """Output, gradients by weight and bias, gradient by x."""
    out, dx = np.full((len(bias), x.shape[-1]), np.nan), np.full(x.shape, np.nan)
    gradients = [np.full(weight.shape, np.nan), np.full(bias.shape, np.nan)]
    layer.forward([weight, bias], x, out)
    y = out.copy()
    layer.backward([weight, bias], x, out, delta=dy.copy(), gradients=gradients, dx=dx)
    return y, *gradients, dx


def numbers(n: int = BATCH) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = [(UNITS, 12), (UNITS,), (*INPUTS, n), (UNITS, n)]
    return [rng.standard_normal(shape) for shape in shapes]


@settings(deadline=None)
@given(st.lists(st.integers(0, UNITS), max_size=3), st.sampled_from(sorted(ACTIVATIONS)))
def test_on_a_box_it_is_the_box_cut_from_the_layer_on_everything(cuts, activation) -> None:
    weight, bias, x, dy = numbers()
    whole = run(layer_on(Box.whole((UNITS,)), activation), weight, bias, x, dy)
    edges = [0, *sorted(set(cuts) - {0, UNITS}), UNITS]
    dx = np.zeros_like(x)
    for start, stop in pairwise(edges):
        layer = layer_on(Box((start,), (stop,)), activation)
        assert layer.input_box == Box.whole(INPUTS)
        assert [t.shape for t in layer.tensors] == [(stop - start, 12), (stop - start,)]
        part = slice(start, stop)
        *cut, dx_part = run(layer, weight[part], bias[part], x, dy[part])
        for mine, all_of_it in zip(cut, whole, strict=False):
            np.testing.assert_allclose(mine, all_of_it[part], rtol=0, atol=1e-12)
        dx += dx_part
    np.testing.assert_allclose(dx, whole[-1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 3, BATCH])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_gradients_are_directional_differences(activation: str, rows: int) -> None:
    weight, bias, x, dy = numbers(rows)
    layer = layer_on(Box.whole((UNITS,)), activation)
    _, d_weight, d_bias, dx = run(layer, weight, bias, x, dy)

    def loss(w: np.ndarray, b: np.ndarray, x: np.ndarray) -> float:
        return float(np.vdot(run(layer, w, b, x, dy)[0], dy))

    check_gradient(lambda w: loss(w, bias, x), d_weight, weight)
    check_gradient(lambda b: loss(weight, b, x), d_bias, bias)
    check_gradient(lambda x: loss(weight, bias, x), dx, x)


def test_without_dx_the_other_gradients_are_the_same() -> None:
    weight, bias, x, dy = numbers()
    layer = layer_on(Box.whole((UNITS,)), "tanh")
    y, *expected, _ = run(layer, weight, bias, x, dy)
    gradients = [np.empty_like(weight), np.empty_like(bias)]
    layer.backward([weight, bias], x, y, delta=dy, gradients=gradients, dx=None)
    for mine, theirs in zip(gradients, expected, strict=True):
        assert mine.tobytes() == theirs.tobytes()


def test_inputs_flatten_height_width_channels() -> None:
    weight, bias, x, _ = numbers()
    out = np.empty((UNITS, BATCH))
    layer_on(Box.whole((UNITS,)), "linear").forward([weight, bias], x, out)
    by_hand = np.einsum("uhwc,hwcb->ub", weight.reshape(UNITS, *INPUTS), x) + bias[:, None]
    np.testing.assert_allclose(out, by_hand, rtol=0, atol=1e-12)


def test_every_activation_of_the_file_is_computed_and_right() -> None:
    assert set(ACTIVATIONS) == set(get_args(Activation))
    z = np.array([-1e30, -200.0, -1.0, 0.0, 1.0, 200.0, 1e30], "float32")
    # RuntimeWarnings are errors, so this also says that the sigmoid never overflows.
    expected = {
        "sigmoid": [0, 0, 0.26894142, 0.5, 0.73105858, 1, 1],
        "tanh": [-1, -1, -0.76159416, 0, 0.76159416, 1, 1],
        "relu": [0, 0, 0, 0, 1, 200, 1e30],
        "linear": z,
    }
    for name, kernel in ACTIVATIONS.items():
        y = z.copy()
        kernel.apply(y)
        assert y == pytest.approx(np.array(expected[name]), rel=1e-6, abs=1e-7), name


@pytest.mark.parametrize(
    ("activation", "init", "expected"),
    [
        ("relu", None, Initial("normal", sqrt(2 / 12))),
        ("sigmoid", None, Initial("uniform", sqrt(6 / (12 + UNITS)))),
        ("linear", "he", Initial("normal", sqrt(2 / 12))),
        ("relu", "glorot", Initial("uniform", sqrt(6 / (12 + UNITS)))),
        ("relu", 0.05, Initial("uniform", 0.05)),
    ],
)
def test_initial_values_are_those_of_the_whole_layer_whatever_the_box(
    activation, init, expected
) -> None:
    spec = DenseSpec(units=UNITS, activation=activation, init=init)
    weight, bias = spec.tensors(INPUTS, Box((2,), (4,)))
    assert weight.initial == expected
    assert bias.initial == Initial("zero")
