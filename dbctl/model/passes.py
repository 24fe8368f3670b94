"""A whole network's passes: forward, gradient, measurement, in buffers made once.

Rules of this file: knows no process, message, optimiser or file. Parameters and gradients are flat
vectors in the layout of `dbctl.model.network.tensors`; activations are (nodes, n), batch innermost;
a mini-batch shorter than `batch_size` uses the first elements of the same buffers, contiguous.

Theory of operation: `forward` fills one buffer a layer; the loss turns a copy of the last into the
gradient by it; `backward` goes down, each layer turning the gradient by its outputs into those by
its tensors and by its inputs. A step allocates nothing larger than one number a row. Numbers that
are not finite raise nothing here: they show in the loss or the gradient, which the caller checks.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dbctl.model.kernels.dense import Dense
from dbctl.model.losses import LOSSES, are_labels, loss_gradient
from dbctl.model.network import NetworkSpec, node_shapes, tensors
from dbctl.region import Box

Array = NDArray[Any]

KERNELS = {"dense": Dense}


class Measurement(NamedTuple):
    """What is measured on n rows.

    `correct` and `top5` count rows whose label has the greatest output, one of the five greatest
    (of equal outputs the lower index is the greater); both are -1 for float targets. `predicted`
    (n,) is the class, for float targets the first output; `scores` (n,) its probability (softmax,
    logistic) or value (squared).
    """

    loss_sum: float
    correct: int
    top5: int
    predicted: Array
    scores: Array


class Network:
    """One replica's network in one process. Not for two threads at once: it owns its buffers.

    `parameters` and `out` are flat, C-contiguous, of `n_parameters` elements and the network's
    dtype; `parameters` may be read-only. `x` is (features, n) with n from 1 to `batch_size`;
    the transpose of contiguous rows (n, features) is as fast. `targets` are integer labels (n,) or
    floats (outputs, n).
    """

    def __init__(self, spec: NetworkSpec, *, batch_size: int, dtype: str = "float32") -> None:
        assert batch_size >= 1
        shapes = node_shapes(spec)
        self.tensors = tensors(spec)
        self.n_parameters = self.tensors[-1].range.stop
        self.batch_size = batch_size
        self.dtype = np.dtype(dtype)
        self._layers = [
            KERNELS[layer.type](layer, inputs, Box.whole(nodes), batch_size=batch_size, dtype=dtype)
            for layer, inputs, nodes in zip(spec.layers, shapes, shapes[1:], strict=False)
        ]
        self._loss = LOSSES[spec.loss](prod(shapes[-1]), batch_size=batch_size, dtype=dtype)
        # Each layer's outputs and the gradient by them; pages cost memory once they are written.
        self._outputs = [_Buffer(shape, batch_size, dtype=dtype) for shape in shapes[1:]]
        self._deltas = [_Buffer(shape, batch_size, dtype=dtype) for shape in shapes[1:]]

    def gradient(self, parameters: Array, x: Array, targets: Array, *, out: Array) -> float:
        """Writes the gradient of the rows' mean loss into every element of `out`.

        Returns the sum of the rows' losses. Accumulation (n_push > 1) is a pass of its own,
        `dbctl.optim.gradients.accrue_and_step`. Measured with the finite check, 784-1024-1024-10,
        batch 100, gradient alone = 1.00: one pass 1.13, after each tensor 1.11, after each 256 rows
        of a weight 1.12, inside the products (sgemm with beta = 1) 1.09 to 1.14.
        """
        with np.errstate(all="ignore"):
            views = self._views(parameters)
            nodes = self._forward(views, x)
            delta = self._deltas[-1].rows(x.shape[-1])
            np.copyto(delta, nodes[-1])
            loss_sum = loss_gradient(self._loss, delta, targets)
            self._backward(views, nodes, delta=delta, gradients=self._views(out))
        return loss_sum

    def outputs(self, parameters: Array, x: Array) -> Array:
        """The last layer's outputs (outputs, n), before softmax or sigmoid of the loss.

        A view of a buffer: valid until the next call.
        """
        with np.errstate(all="ignore"):
            return self._forward(self._views(parameters), x)[-1]

    def measure(self, parameters: Array, x: Array, targets: Array) -> Measurement:
        """Loss and accuracy at `parameters`, in one forward pass."""
        z = self.outputs(parameters, x)
        columns = np.arange(z.shape[1])
        labelled = are_labels(targets)
        correct = top5 = -1
        best = np.argmax(z, axis=0) if labelled else np.zeros(z.shape[1], np.intp)
        if labelled:
            ranks = _ranks(z, targets)
            correct = int(np.count_nonzero(ranks == 0))
            top5 = int(np.count_nonzero(ranks < min(5, len(z))))
        with np.errstate(all="ignore"):
            rows = self._loss.rows(z, targets)
        scores = z[best, columns]
        loss_sum = float(rows.sum(dtype=np.float64))
        return Measurement(loss_sum, correct, top5, best if labelled else scores, scores)

    def _views(self, flat: Array) -> list[list[Array]]:
        """The flat vector as the tensors of each layer."""
        assert flat.shape == (self.n_parameters,), f"{flat.shape}, not ({self.n_parameters},)"
        assert flat.dtype == self.dtype, f"{flat.dtype}, not {self.dtype}"
        assert flat.flags.c_contiguous, "a flat vector with a stride"
        views = iter(flat[t.range.slice()].reshape(t.shape) for t in self.tensors)
        return [[next(views) for _ in layer.tensors] for layer in self._layers]

    def _forward(self, parameters: list[list[Array]], x: Array) -> list[Array]:
        """The network's input and each layer's outputs."""
        n = x.shape[-1]
        assert 1 <= n <= self.batch_size, f"{n} rows for a batch of {self.batch_size}"
        assert x.dtype == self.dtype, f"{x.dtype}, not {self.dtype}"
        nodes = [x]
        for layer, views, buffer in zip(self._layers, parameters, self._outputs, strict=True):
            out = buffer.rows(n)
            layer.forward(views, nodes[-1], out)
            nodes.append(out)
        return nodes

    def _backward(
        self,
        parameters: list[list[Array]],
        nodes: list[Array],
        *,
        delta: Array,
        gradients: list[list[Array]],
    ) -> None:
        """Downwards from `delta`, the gradient by the last layer's outputs."""
        for index in reversed(range(len(self._layers))):
            dx = self._deltas[index - 1].rows(delta.shape[-1]) if index else None
            self._layers[index].backward(
                parameters[index],
                nodes[index],
                nodes[index + 1],
                delta=delta,
                gradients=gradients[index],
                dx=dx,
            )
            if dx is not None:
                delta = dx


class _Buffer:
    """Memory for (nodes, batch) from which fewer rows are taken without a stride."""

    def __init__(self, shape: tuple[int, ...], batch_size: int, *, dtype: str) -> None:
        self._shape = shape
        self._nodes = prod(shape)
        self._flat = np.zeros(self._nodes * batch_size, dtype)

    def rows(self, n: int) -> Array:
        return self._flat[: self._nodes * n].reshape(*self._shape, n)


def _ranks(z: Array, labels: Array) -> Array:
    """How many outputs of each row come before its label's; all where the label's is NaN."""
    own = z[labels, np.arange(z.shape[1])]
    lower = np.arange(len(z))[:, None] < labels
    before = ~(z <= own)
    before |= (z == own) & lower
    ranks: Array = before.sum(axis=0)
    return ranks
