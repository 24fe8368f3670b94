"""Loss functions on the last layer's outputs, batch innermost: (outputs, n).

Rules of this file: a mini-batch's loss is the *sum* over its rows in float64, its gradient the
*mean* over its rows (also of a short last one); both are sums over outputs. Theory of operation:
each loss goes with the function that makes predictions of its outputs p(z), so that the gradient
by z is p(z) - target for all three:

    softmax    p = softmax(z)   loss = log sum_k exp(z_k) - z_label           labels only
    logistic   p = sigmoid(z)   loss = sum_k log(1 + exp(z_k)) - t_k z_k      one-vs-all
    squared    p = z            loss = sum_k (z_k - t_k)^2 / 2

Targets are integer labels (n,), each at least 0 and below `outputs` (dbctl/data checks that once,
not each step), which count as one-hot, or floats t (outputs, n) as they are. Sums over outputs are
products with ones: faster than `sum` along axis 0, and they round less.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dbctl.model.activations import sigmoid

Array = NDArray[Any]


class RowLoss(Protocol):
    """`rows(z, targets)` returns each row's loss (n,) and turns z into predictions in place."""

    def __init__(self, n_outputs: int, *, batch_size: int, dtype: str) -> None: ...

    def rows(self, z: Array, targets: Array) -> Array: ...


class SoftmaxLoss:
    """Cross-entropy of softmax, by log-sum-exp: the greatest output is subtracted first."""

    def __init__(self, n_outputs: int, *, batch_size: int, dtype: str) -> None:
        self._ones = np.ones(n_outputs, dtype)

    def rows(self, z: Array, targets: Array) -> Array:
        assert are_labels(targets), f"softmax takes integer labels, not {targets.dtype}"
        np.subtract(z, z.max(axis=0), out=z)
        of_label = z[targets, np.arange(z.shape[1])]
        np.exp(z, out=z)
        total = self._ones @ z
        np.multiply(z, 1 / total, out=z)
        rows: Array = np.log(total) - of_label
        return rows


class LogisticLoss:
    """Binary cross-entropy of each output, with log(1 + exp(z)) = max(z, 0) + log1p(exp(-|z|))."""

    def __init__(self, n_outputs: int, *, batch_size: int, dtype: str) -> None:
        self._ones = np.ones(n_outputs, dtype)
        self._scratch = np.zeros(n_outputs * batch_size, dtype)

    def rows(self, z: Array, targets: Array) -> Array:
        scratch = self._scratch[: z.size].reshape(z.shape)
        np.abs(z, out=scratch)
        np.negative(scratch, out=scratch)
        np.exp(scratch, out=scratch)
        np.log1p(scratch, out=scratch)
        rows = self._ones @ scratch
        np.maximum(z, 0.0, out=scratch)
        if are_labels(targets):
            scratch[targets, np.arange(z.shape[1])] -= z[targets, np.arange(z.shape[1])]
            rows += self._ones @ scratch
        else:
            rows += self._ones @ scratch
            np.multiply(z, targets, out=scratch)
            rows -= self._ones @ scratch
        sigmoid(z)
        return rows


class SquaredLoss:
    """Half the squared error."""

    def __init__(self, n_outputs: int, *, batch_size: int, dtype: str) -> None:
        self._halves = np.full(n_outputs, 0.5, dtype)
        self._scratch = np.zeros(n_outputs * batch_size, dtype)

    def rows(self, z: Array, targets: Array) -> Array:
        scratch = self._scratch[: z.size].reshape(z.shape)
        np.copyto(scratch, z)
        subtract_targets(scratch, targets)
        np.multiply(scratch, scratch, out=scratch)
        rows: Array = self._halves @ scratch
        return rows


LOSSES: dict[str, type[RowLoss]] = {
    "softmax": SoftmaxLoss,
    "logistic": LogisticLoss,
    "squared": SquaredLoss,
}


def are_labels(targets: Array) -> bool:
    return targets.dtype.kind in "iu"


def subtract_targets(values: Array, targets: Array) -> None:
    """values -= targets in place; labels as one-hot."""
    if are_labels(targets):
        values[targets, np.arange(values.shape[1])] -= 1
    else:
        np.subtract(values, targets, out=values)


def loss_gradient(loss: RowLoss, z: Array, targets: Array) -> float:
    """Turns `z` into the gradient of the mean loss by z; returns the sum of the rows' losses."""
    rows = loss.rows(z, targets)
    subtract_targets(z, targets)
    np.multiply(z, 1 / z.shape[1], out=z)
    return float(rows.sum(dtype=np.float64))
