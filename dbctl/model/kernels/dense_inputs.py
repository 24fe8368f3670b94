"""A dense layer cut by its inputs: each partition multiplies the inputs that it owns.

Rules of this package: kernels/dense.py. Theory of operation: with W = [W_1 ... W_P] by columns,

    forward   z = sum_p W_p x_p + b, y = f(z)      the sum is taken by whoever owns the outputs
    backward  d = dy * f' (all outputs)    dW_p = d x_p^T    dx_p = W_p^T d

so two dense layers in a row, the first cut by its outputs and the second by its inputs, exchange
nothing between them. The outputs that one partition owns are rows of W_p, of d and of dW_p: each
is a product of its own, so that what another waits for is computed first, and what needs only what
is here while others are waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbctl.model.activations import ACTIVATIONS
from dbctl.model.buffer import Buffer
from dbctl.model.kernels.bounds import product_bound
from dbctl.model.layers.dense import DenseSpec
from dbctl.region import Box

Array = NDArray[Any]


class DenseByInputs:
    """One partition's share; `inputs` and `outputs`: what each partition owns of them.

    `units[p]`: the outputs of partition p, where it has any. `multipliers`: the other partitions
    that have inputs. `has_inputs`, `has_outputs`: whether this one has.
    """

    def __init__(
        self,
        spec: DenseSpec,
        inputs: Sequence[Box],
        outputs: Sequence[Box],
        *,
        partition: int,
        batch_size: int,
        dtype: str,
    ) -> None:
        self.has_inputs, self.has_outputs = bool(inputs[partition]), bool(outputs[partition])
        self.units = {p: box.slices()[0] for p, box in enumerate(outputs) if box}
        self.multipliers = tuple(p for p, box in enumerate(inputs) if box and p != partition)
        self._activation = ACTIVATIONS[spec.activation]
        self._ones = np.ones(batch_size, dtype)
        self._mask = Buffer(outputs[partition].shape, batch_size, dtype=bool)
        self._deltas = Buffer((spec.units if self.has_inputs else 0,), batch_size, dtype=dtype)

    def partial(self, weight: Array, x: Array, *, of: int, out: Array) -> None:
        """Writes what x adds to the outputs of partition `of`, before bias and activation."""
        np.matmul(weight[self.units[of]], _flat(x), out=out)

    def finish(self, bias: Array, z: Array) -> None:
        """Bias and activation, on the outputs that this partition owns."""
        np.add(z, bias[:, None], out=z)
        self._activation.apply(z)

    def pull_back(self, out: Array, delta: Array, *, d_bias: Array) -> float:
        """Turns the gradient by y in `delta` into that by z; `out` is destroyed.

        Returns a bound of the gradient by the bias, which it writes.
        """
        self._activation.pull_back(out, delta, self._mask.rows(delta.shape[-1]))
        ones = self._ones[: delta.shape[-1]]
        np.matmul(delta, ones, out=d_bias)
        return product_bound(delta, ones)

    def put(self, delta: Array, *, of: int) -> None:
        """Files the gradient by z of the outputs of partition `of`: (its units, n)."""
        n = delta.shape[-1]
        np.copyto(self._deltas.rows(n)[self.units[of]], delta)

    def weight_gradient(self, delta: Array, x: Array, *, of: int, d_weight: Array) -> float:
        """Writes the rows of the gradient by W_p that belong to the outputs of `of`.

        Returns a bound of them.
        """
        np.matmul(delta, _flat(x).T, out=d_weight[self.units[of]])
        return product_bound(delta, x)

    def input_gradient(self, weight: Array, dx: Array) -> None:
        """Writes the gradient by x_p, once all of the gradient by z is filed."""
        np.matmul(weight.T, self._deltas.rows(dx.shape[-1]), out=_flat(dx))


def _flat(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])
