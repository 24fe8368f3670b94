"""What a locally connected layer computes, on a box of its output nodes.

Rules of dbctl/model/kernels/dense.py; a column of output positions at a time (bands.py). Theory of
operation: the weights of a position, (maps, k j C), are one matrix of a batched product, and so are
their gradients, written where they are wanted. For the gradient by the input a column's weights are
laid out again: as many copies as weights, which is less than the additions they save.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbctl.model.activations import ACTIVATIONS
from dbctl.model.buffer import Buffer
from dbctl.model.kernels.bands import Bands
from dbctl.model.layers.local2d import Local2dSpec
from dbctl.region import Box

Array = NDArray[Any]


class Local2d:
    """A locally connected layer on the output nodes `box`; `inputs`: the shape of all inputs.

    `input_box` is what it sees of them, `tensors` what its parameters look like.
    """

    def __init__(
        self, spec: Local2dSpec, inputs: tuple[int, ...], box: Box, *, batch_size: int, dtype: str
    ) -> None:
        self.input_box = spec.input_box(inputs, box)
        self.tensors = spec.tensors(inputs, box)
        self._activation = ACTIVATIONS[spec.activation]
        bands = self._bands = Bands(spec, inputs, box, batch_size=batch_size, dtype=dtype)
        column = (bands.rows, bands.maps)
        self._ones = np.ones(batch_size, dtype)
        self._mask = Buffer(column, batch_size, dtype=bool)
        self._delta = Buffer(column, batch_size, dtype=dtype)
        self._laid = bands.make_laid(shared=False)

    def forward(self, parameters: Sequence[Array], x: Array, out: Array) -> None:
        """Writes f(W x + b) of each position into `out`, the box's shape and n.

        `x` is (input box, n).
        """
        weight, bias = self._by_column(parameters[0]), parameters[1][..., None]
        windows = self._bands.windows(x.shape[-1])
        for column in range(self._bands.columns):
            self._bands.read(x, column)
            y = out[:, column]
            np.matmul(weight[:, column], windows, out=y)
            np.add(y, bias[:, column], out=y)
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
        weight, d_weight = self._by_column(parameters[0]), self._by_column(gradients[0])
        turned, windows = bands.turn(x), bands.turned_windows(n)
        products = []
        if dx is not None:
            dx[...] = 0
            products = bands.products(self._laid, own)
        for column in range(bands.columns):
            self._activation.pull_back(out[:, column], delta[:, column], mask)
            np.copyto(own, delta[:, column])
            np.matmul(own, self._ones[:n], out=gradients[1][:, column])
            bands.read_turned(turned, column)
            np.matmul(own, windows, out=d_weight[:, column])
            if dx is not None:
                bands.lay(weight[:, column], self._laid)
                for a, b, product in products:
                    np.matmul(a, b, out=product)
                bands.add_to(dx, column)

    def _by_column(self, weight: Array) -> Array:
        """(rows, columns, maps, k j C) of a weight (rows, columns, maps, k, j, C): a view."""
        assert weight.flags.c_contiguous
        return weight.reshape(*weight.shape[:3], -1)
