"""A dense layer cut by its inputs: each partition multiplies the inputs that it owns.

Rules of this package: kernels/dense.py. Theory of operation: with W = [W_1 ... W_P] by columns,

    forward   z = sum_p W_p x_p + b, y = f(z)      the sum is taken by whoever owns the outputs
    backward  d = dy * f' (all outputs)    dW_p = d x_p^T    dx_p = W_p^T d

so two dense layers in a row, the first cut by its outputs and the second by its inputs, exchange
nothing between them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbctl.model.activations import ACTIVATIONS
from dbctl.model.layers.dense import DenseSpec

Array = NDArray[Any]


class DenseByInputs:
    """The products: of all `units` outputs with the inputs of one partition."""

    def __init__(self, units: int, *, batch_size: int, dtype: str) -> None:
        self._units = units
        self._sums = np.zeros(units * batch_size, dtype)

    def partial(self, weight: Array, x: Array) -> Array:
        """W_p x_p (units, n); valid until the next call."""
        n = x.shape[-1]
        sums = self._sums[: self._units * n].reshape(self._units, n)
        np.matmul(weight, x.reshape(-1, n), out=sums)
        return sums

    def backward(
        self, weight: Array, x: Array, delta: Array, *, d_weight: Array, dx: Array | None
    ) -> None:
        """The gradients by W_p and, unless None, by x_p; `delta` (units, n) is that by z."""
        n = x.shape[-1]
        if dx is not None:
            np.matmul(weight.T, delta, out=dx.reshape(-1, n))
        np.matmul(delta, x.reshape(-1, n).T, out=d_weight)

    class Finish:
        """Bias and activation, on the outputs that a partition owns."""

        def __init__(self, spec: DenseSpec, *, batch_size: int, dtype: str) -> None:
            self._activation = ACTIVATIONS[spec.activation]
            self._ones = np.ones(batch_size, dtype)
            self._mask = np.zeros(spec.units * batch_size, bool)

        def apply(self, bias: Array, z: Array) -> None:
            np.add(z, bias[:, None], out=z)
            self._activation.apply(z)

        def pull_back(self, out: Array, delta: Array, *, d_bias: Array) -> None:
            """Turns the gradient by y in `delta` into that by z; `out` is destroyed."""
            mask = self._mask[: delta.size].reshape(delta.shape)
            self._activation.pull_back(out, delta, mask)
            np.matmul(delta, self._ones[: delta.shape[-1]], out=d_bias)
