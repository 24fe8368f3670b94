"""Activation functions, in place and batch innermost: (nodes, batch).

Rules of this file: nothing is allocated; a derivative is taken from the function's own output, so
the values before it are never kept. Forms were chosen by measurement: the sigmoid is a tanh, which
numpy vectorises (an exponential and a division are slower), and relu's mask multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class ActivationKernel(NamedTuple):
    """`apply(z)` turns z into f(z) in place.

    `pull_back(y, delta, mask)` turns the gradient by y = f(z) in `delta` into the gradient by z.
    It destroys y. `mask` is a bool array of the same shape to work in.
    """

    apply: Callable[[Array], None]
    pull_back: Callable[[Array, Array, Array], None]


def sigmoid(z: Array) -> None:
    """1 / (1 + exp(-z)) as 0.5 tanh(z / 2) + 0.5, in place; never overflows."""
    np.multiply(z, 0.5, out=z)
    np.tanh(z, out=z)
    np.multiply(z, 0.5, out=z)
    np.add(z, 0.5, out=z)


def _sigmoid_back(y: Array, delta: Array, mask: Array) -> None:
    np.multiply(delta, y, out=delta)
    np.subtract(1.0, y, out=y)
    np.multiply(delta, y, out=delta)


def _tanh(z: Array) -> None:
    np.tanh(z, out=z)


def _tanh_back(y: Array, delta: Array, mask: Array) -> None:
    np.multiply(y, y, out=y)
    np.subtract(1.0, y, out=y)
    np.multiply(delta, y, out=delta)


def _relu(z: Array) -> None:
    np.maximum(z, 0.0, out=z)


def _relu_back(y: Array, delta: Array, mask: Array) -> None:
    np.greater(y, 0.0, out=mask)
    np.multiply(delta, mask, out=delta)


def _linear(z: Array) -> None:
    pass


def _linear_back(y: Array, delta: Array, mask: Array) -> None:
    pass


ACTIVATIONS = {
    "sigmoid": ActivationKernel(sigmoid, _sigmoid_back),
    "tanh": ActivationKernel(_tanh, _tanh_back),
    "relu": ActivationKernel(_relu, _relu_back),
    "linear": ActivationKernel(_linear, _linear_back),
}
