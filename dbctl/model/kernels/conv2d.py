"""What a convolution computes, on a box of its output nodes.

Rules of dbctl/model/kernels/dense.py; a column of output positions at a time (bands.py). Theory of
operation: the weights are laid out once a pass, (maps, k j C) as windows are and for the gradient
by the input. Each position's gradient by the weights is written and then added up over the column:
with mini-batches as long as usual that is the fastest form (a product over positions and batch at
once needs the band in yet another order).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbctl.model.activations import ACTIVATIONS
from dbctl.model.buffer import Buffer
from dbctl.model.kernels.bands import Bands
from dbctl.model.layers.conv2d import Conv2dSpec
from dbctl.region import Box

Array = NDArray[Any]


class Conv2d:
    """A convolution on the output nodes `box`; `inputs` is the shape of all its input nodes.

    `input_box` is what it sees of them, `tensors` what its parameters look like.
    """

    def __init__(
        self, spec: Conv2dSpec, inputs: tuple[int, ...], box: Box, *, batch_size: int, dtype: str
    ) -> None:
        self.input_box = spec.input_box(inputs, box)
        self.tensors = spec.tensors(inputs, box)
        self._activation = ACTIVATIONS[spec.activation]
        bands = self._bands = Bands(spec, inputs, box, batch_size=batch_size, dtype=dtype)
        column = (bands.rows, bands.maps)
        self._ones = np.ones(batch_size, dtype)
        self._mask = Buffer(column, batch_size, dtype=bool)
        self._delta = Buffer(column, batch_size, dtype=dtype)
        self._weight = np.zeros((bands.maps, *bands.kernel, bands.in_maps), dtype)
        self._laid = bands.make_laid(shared=True)
        self._d_weights = np.zeros((bands.rows, bands.maps, bands.n_inputs), dtype)
        self._d_column = np.zeros((bands.maps, bands.n_inputs), dtype)
        self._d_weight = np.zeros((bands.maps, bands.n_inputs), dtype)
        self._d_biases = np.zeros((bands.columns, bands.rows, bands.maps), dtype)

    def forward(self, parameters: Sequence[Array], x: Array, out: Array) -> None:
        """Writes f(W * x + b) into `out`, the box's shape and n. `x` is (input box, n)."""
        weight, bias = self._filters(parameters[0]), parameters[1][:, None]
        windows = self._bands.windows(x.shape[-1])
        for column in range(self._bands.columns):
            self._bands.read(x, column)
            y = out[:, column]
            np.matmul(weight, windows, out=y)
            np.add(y, bias, out=y)
            self._activation.apply(y)

    def backward(
        self,
        parameters: Sequence[Array],
        x: Array,
        out: Array,
        *,
        delta: Array,
        gradients: Sequence[Array],
        dx: Array | None,
    ) -> None:
        """Writes the gradients by weight and bias, and by `x` unless `dx` is None (first layer).

        `out` is what `forward` wrote and `delta` the gradient by it; both are destroyed.
        """
        n = x.shape[-1]
        bands, mask, own = self._bands, self._mask.rows(n), self._delta.rows(n)
        turned, windows = bands.turn(x), bands.turned_windows(n)
        products = []
        if dx is not None:
            dx[...] = 0
            bands.lay(self._filters(parameters[0])[None], self._laid)
            products = bands.products(self._laid, own)
        self._d_weight[...] = 0
        for column in range(bands.columns):
            self._activation.pull_back(out[:, column], delta[:, column], mask)
            np.copyto(own, delta[:, column])
            np.matmul(own, self._ones[:n], out=self._d_biases[column])
            bands.read_turned(turned, column)
            np.matmul(own, windows, out=self._d_weights)
            np.add.reduce(self._d_weights, axis=0, out=self._d_column)
            np.add(self._d_weight, self._d_column, out=self._d_weight)
            for a, b, product in products:
                np.matmul(a, b, out=product)
            if dx is not None:
                bands.add_to(dx, column)
        d_weight, d_bias = gradients
        np.copyto(d_weight, self._d_weight.reshape(self._weight.shape).transpose(0, 3, 1, 2))
        np.add.reduce(self._d_biases, axis=(0, 1), out=d_bias)

    def _filters(self, weight: Array) -> Array:
        """(maps, k j C) of a weight (maps, C, k, j)."""
        np.copyto(self._weight, weight.transpose(0, 2, 3, 1))
        return self._weight.reshape(len(weight), -1)
