"""What a dense layer computes, on a box of its output nodes.

Rules of this package: one class a layer family, with the same four members (`input_box`, `tensors`,
`forward`, `backward`); arrays are C-contiguous, batch innermost; results go where the caller says;
nothing of the size of a product is allocated in a step. Where the gradient by the inputs costs
nothing extra when it is computed first, `backward` is two members, `input_gradient` and then
`weight_gradient`: a partition gives the one to others while it computes the other. Where it is
known at no cost, `backward` returns a bound of the gradients by tensors (bounds.py).

Theory of operation, with W (units, inputs), x (inputs, batch), y (units, batch):

    forward   y = f(W x + b)
    backward  d = dy * f'    dW = d x^T    db = d 1    dx = W^T d

In this orientation all three products run as OpenBLAS likes them best. `dx` of a box holds what its
units contribute: the gradient by the input is the sum over the boxes that cover the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbctl.model.activations import ACTIVATIONS
from dbctl.model.kernels.bounds import product_bound
from dbctl.model.layers.dense import DenseSpec
from dbctl.region import Box

Array = NDArray[Any]


class Dense:
    """A dense layer on the output nodes `box`; `inputs` is the shape of all its input nodes.

    `input_box` is what it sees of them, `tensors` what its parameters look like.
    """

    def __init__(
        self, spec: DenseSpec, inputs: tuple[int, ...], box: Box, *, batch_size: int, dtype: str
    ) -> None:
        self.input_box = spec.input_box(inputs, box)
        self.tensors = spec.tensors(inputs, box)
        self._activation = ACTIVATIONS[spec.activation]
        self._ones = np.ones(batch_size, dtype)
        self._mask = np.zeros(len(box) * batch_size, bool)

    def forward(self, parameters: Sequence[Array], x: Array, out: Array) -> None:
        """Writes f(W x + b) into `out` (units, n). `x` is (..., n), n rows of the mini-batch."""
        weight, bias = parameters
        np.matmul(weight, _flat(x), out=out)
        np.add(out, bias[:, None], out=out)
        self._activation.apply(out)

    def backward(
        self,
        parameters: Sequence[Array],
        x: Array,
        out: Array,
        *,
        delta: Array,
        gradients: Sequence[Array],
        dx: Array | None,
    ) -> float:
        """Writes the gradients by weight and bias, and by `x` unless `dx` is None (first layer).

        `out` is what `forward` wrote and `delta` (units, n) the gradient by it; both are destroyed.
        """
        self.input_gradient(parameters, out, delta, dx=dx)
        return self.weight_gradient(x, delta, gradients)

    def input_gradient(
        self, parameters: Sequence[Array], out: Array, delta: Array, *, dx: Array | None
    ) -> None:
        """The first half of `backward`: turns `delta` into the gradient by W x + b, writes `dx`."""
        self._activation.pull_back(out, delta, self._mask[: delta.size].reshape(delta.shape))
        if dx is not None:
            np.matmul(parameters[0].T, delta, out=_flat(dx))

    def weight_gradient(self, x: Array, delta: Array, gradients: Sequence[Array]) -> float:
        """The second half: writes the gradients by weight and bias. Returns their bound."""
        d_weight, d_bias = gradients
        np.matmul(delta, _flat(x).T, out=d_weight)
        np.matmul(delta, self._ones[: delta.shape[-1]], out=d_bias)
        return product_bound(delta, x)


def _flat(x: Array) -> Array:
    """(height, width, channels, n) or (features, n) as (features, n), never a copy."""
    flat = x.reshape(-1, x.shape[-1])
    assert np.may_share_memory(flat, x), "nodes with a stride"
    return flat
