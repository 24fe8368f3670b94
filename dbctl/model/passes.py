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

from collections.abc import Sequence
from math import inf, prod
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dbctl.model.buffer import Buffer
from dbctl.model.kernels.bounds import norm
from dbctl.model.kernels.conv2d import Conv2d
from dbctl.model.kernels.dense import Dense
from dbctl.model.kernels.dropout import Dropout
from dbctl.model.kernels.lcn import Lcn
from dbctl.model.kernels.local2d import Local2d
from dbctl.model.kernels.pool import Pool
from dbctl.model.layers.dropout import Draw
from dbctl.model.losses import LOSSES, are_labels, loss_gradient
from dbctl.model.network import NetworkSpec, node_shapes, tensors
from dbctl.model.tensor import LayerTensor
from dbctl.region import Box

Array = NDArray[Any]


class Kernel(Protocol):
    """What a layer computes on the output nodes `box`; dbctl/model/kernels has one class a family.

    x, out and dx have the shapes of `input_box`, `box` and `input_box`, and then n.
    """

    input_box: Box
    tensors: tuple[LayerTensor, ...]

    def __init__(
        self, spec: Any, inputs: tuple[int, ...], box: Box, *, batch_size: int, dtype: str
    ) -> None: ...

    def forward(self, parameters: Sequence[Array], x: Array, out: Array) -> None: ...

    def backward(
        self,
        parameters: Sequence[Array],
        x: Array,
        out: Array,
        *,
        delta: Array,
        gradients: Sequence[Array],
        dx: Array | None,
    ) -> float | None:
        """Returns what no gradient by a tensor exceeds (kernels/bounds.py); None: look at them."""


KERNELS: dict[str, type[Kernel]] = {
    "dense": Dense,
    "conv2d": Conv2d,
    "local2d": Local2d,
    "pool": Pool,
    "lcn": Lcn,
    "dropout": Dropout,
}


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
        self.bound = inf  # no element of the last gradient is larger
        self._input = shapes[0]
        self._layers = [
            KERNELS[layer.type](layer, inputs, Box.whole(nodes), batch_size=batch_size, dtype=dtype)
            for layer, inputs, nodes in zip(spec.layers, shapes, shapes[1:], strict=False)
        ]
        self._loss = LOSSES[spec.loss](prod(shapes[-1]), batch_size=batch_size, dtype=dtype)
        # Each layer's outputs and the gradient by them; pages cost memory once they are written.
        self._outputs = [Buffer(shape, batch_size, dtype=dtype) for shape in shapes[1:]]
        self._deltas = [Buffer(shape, batch_size, dtype=dtype) for shape in shapes[1:]]
        # What of its inputs a layer sees: a border that no window reaches is left out.
        self._seen = [layer.input_box.slices() for layer in self._layers]
        self._partial = [
            layer.input_box != Box.whole(shape)
            for layer, shape in zip(self._layers, shapes, strict=False)
        ]

    def gradient(
        self, parameters: Array, x: Array, targets: Array, *, out: Array, draw: Draw | None = None
    ) -> float:
        """Writes the gradient of the rows' mean loss into every element of `out`.

        `draw` says which nodes dropout drops; None: none. Returns the sum of the rows' losses.

        Accumulation (n_push > 1) is a pass of its own, `dbctl.optim.gradients.accrue_and_step`.
        Measured with the finite check, 784-1024-1024-10, batch 100, gradient alone = 1.00: one pass
        1.13, after each tensor 1.11, after each 256 rows of a weight 1.12, inside the products
        (sgemm with beta = 1) 1.09 to 1.14.
        """
        with np.errstate(all="ignore"):
            views = self._views(parameters)
            nodes = self._forward(views, x, draw)
            delta = self._deltas[-1].rows(x.shape[-1])
            np.copyto(delta, nodes[-1])
            loss_sum = loss_gradient(self._loss, delta, targets)
            self.bound = self._backward(views, nodes, delta=delta, gradients=self._views(out))
        return loss_sum

    def outputs(self, parameters: Array, x: Array) -> Array:
        """The last layer's outputs (outputs, n), before softmax or sigmoid of the loss.

        A view of a buffer: valid until the next call.
        """
        with np.errstate(all="ignore"):
            return self._forward(self._views(parameters), x, None)[-1]

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

    def _forward(self, parameters: list[list[Array]], x: Array, draw: Draw | None) -> list[Array]:
        """The network's input and each layer's outputs."""
        n = x.shape[-1]
        assert 1 <= n <= self.batch_size, f"{n} rows for a batch of {self.batch_size}"
        assert x.dtype == self.dtype, f"{x.dtype}, not {self.dtype}"
        nodes = [x.reshape(*self._input, n)]
        for index, layer in enumerate(self._layers):
            if isinstance(layer, Dropout):
                layer.draw(draw.label(index) if draw else None, n)
            out = self._outputs[index].rows(n)
            layer.forward(parameters[index], nodes[-1][self._seen[index]], out)
            nodes.append(out)
        return nodes

    def _backward(
        self,
        parameters: list[list[Array]],
        nodes: list[Array],
        *,
        delta: Array,
        gradients: list[list[Array]],
    ) -> float:
        """Downwards from `delta`, the gradient by the last layer's outputs. Returns a bound."""
        bound = 0.0  # a sum, not the largest: of NaN and a number max() gives either
        for index in reversed(range(len(self._layers))):
            below = self._deltas[index - 1].rows(delta.shape[-1]) if index else None
            seen = self._seen[index]
            if below is not None and self._partial[index]:
                below[...] = 0
            known = self._layers[index].backward(
                parameters[index],
                nodes[index][seen],
                nodes[index + 1],
                delta=delta,
                gradients=gradients[index],
                dx=None if below is None else below[seen],
            )
            bound += sum(map(norm, gradients[index])) if known is None else known
            if below is not None:
                delta = below
        return bound


def _ranks(z: Array, labels: Array) -> Array:
    """How many outputs of each row come before its label's; all where the label's is NaN."""
    own = z[labels, np.arange(z.shape[1])]
    lower = np.arange(len(z))[:, None] < labels
    before = ~(z <= own)
    before |= (z == own) & lower
    ranks: Array = before.sum(axis=0)
    return ranks
