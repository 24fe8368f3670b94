"""The windows of a layer of filters, one column of output positions at a time.

Rules of dbctl/model/kernels/dense.py. Theory of operation, with a kernel of k rows and j columns,
C maps below and R rows of outputs in the box:

A column of output positions sees a *band* of the input, j columns wide. Copied to memory of its
own as (rows, j C, n), the window of output row r is its rows r stride to r stride + k: contiguous,
k j C x n, in the order of the weights. So all windows of the column are one strided view that
overlaps itself, and what they compute is one batched product. That copies k / stride times less
than a matrix of patches, which is never built. Padding is rows and columns of zeros in the band.

The gradient by the weights is a product over the batch. OpenBLAS multiplies two matrices four
times faster than a matrix and a transpose of such shapes, so the input is turned once, and the band
is copied with the batch outermost, (n, rows, j C).

The gradient by the band: block g of `stride` rows is seen by the T = ceil(k / stride) output rows
g - T + 1 to g. It is one product over these rows and the maps, which are contiguous in the column's
gradients; the weights are laid out to match: `laid[.., u, m, (p, j, C)]` is the weight of map m at
kernel row (T - 1 - u) stride + p. The first and last T - 1 blocks are seen by fewer rows and are
products of their own, so that nothing is multiplied by padding.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from dbctl.model.buffer import Buffer
from dbctl.model.layers.filters import FilterSpec
from dbctl.region import Box

Array = NDArray[Any]
Product = tuple[Array, Array, Array]


class Bands:
    """The bands of the output nodes `box`; `inputs` is the shape of all the layer's input nodes.

    `n_inputs` is how many a node sees: k j C.
    """

    def __init__(
        self, spec: FilterSpec, inputs: tuple[int, ...], box: Box, *, batch_size: int, dtype: str
    ) -> None:
        assert box, f"a layer on the empty box {box}"
        self.rows, self.columns, self.maps = box.shape
        self.kernel, self.strides = spec.kernels, spec.strides
        self.in_maps = inputs[2]
        self.n_inputs = self.kernel[0] * self.kernel[1] * self.in_maps
        axes = spec.axes(inputs)
        self._lead = tuple(a.zeros_before(s) for a, s in zip(axes, box.starts[:2], strict=True))
        self._seen = spec.input_box(inputs, box).shape
        self._height = (self.rows - 1) * self.strides[0] + self.kernel[0]
        # How many output rows see a block of rows, and how many blocks there are.
        self.reach = -(-self.kernel[0] // self.strides[0])
        self.blocks = self.rows + self.reach - 1
        width = self.kernel[1] * self.in_maps
        self.block_nodes = self.strides[0] * width
        self._band_row = (self.kernel[1], self.in_maps)
        self._band = Buffer((self._height, *self._band_row), batch_size, dtype=dtype)
        self._turned_band = _pitched((self._height, *self._band_row), batch_size, dtype=dtype)
        self._turned = _pitched(self._seen, batch_size, dtype=dtype)
        self._dtype = dtype
        self._d_band = Buffer((self.blocks * self.strides[0], width), batch_size, dtype=dtype)

    # ------------------------------------------------------------------------------- forward

    def windows(self, n: int) -> Array:
        """(rows, k j C, n): the windows of whatever column was read last."""
        band = self._band.rows(n)
        row, item = band.strides[0], band.itemsize
        shape, strides = (self.rows, self.n_inputs, n), (self.strides[0] * row, n * item, item)
        return as_strided(band, shape, strides)

    def read(self, x: Array, column: int) -> None:
        """Copies the band of an output column from `x` (input box, n)."""
        band = self._band.rows(x.shape[-1])
        seen, within = self._inner(column)
        top, bottom = self._lead[0], self._lead[0] + self._seen[0]
        np.copyto(band[top:bottom, within], x[:, seen])
        # A mini-batch of another length has left other numbers where the zeros belong.
        if bottom - top < self._height:
            band[:top] = 0
            band[bottom:] = 0
        if within.stop - within.start < self.kernel[1]:
            band[:, : within.start] = 0
            band[:, within.stop :] = 0

    # ------------------------------------------------- backward, the gradient by the weights

    def turn(self, x: Array) -> Array:
        """`x` (input box, n) with the batch outermost: (n, input box)."""
        rows = np.moveaxis(x, -1, 0)
        if rows.flags.c_contiguous:
            return rows
        turned = self._turned[: len(rows)]
        np.copyto(turned, rows)
        return turned

    def turned_windows(self, n: int) -> Array:
        """(rows, n, k j C): the windows of whatever column was read last by `read_turned`."""
        pitch, row, _, item = self._turned_band.strides
        shape = (self.rows, n, self.n_inputs)
        return as_strided(self._turned_band, shape, (self.strides[0] * row, pitch, item))

    def read_turned(self, turned: Array, column: int) -> None:
        """Copies the band of an output column from what `turn` returned."""
        band = self._turned_band[: len(turned)]
        seen, within = self._inner(column)
        top, bottom = self._lead[0], self._lead[0] + self._seen[0]
        # Rows of padding lie where they did whatever the mini-batch, and are zeros from the start.
        np.copyto(band[:, top:bottom, within], turned[:, :, seen])
        if within.stop - within.start < self.kernel[1]:
            band[:, :, : within.start] = 0
            band[:, :, within.stop :] = 0

    # --------------------------------------------------- backward, the gradient by the input

    def make_laid(self, *, shared: bool) -> Array:
        """Memory for `lay`, zeros: (1 or blocks, reach, maps, block_nodes)."""
        blocks = 1 if shared else self.blocks
        return np.zeros((blocks, self.reach, self.maps, self.block_nodes), self._dtype)

    def lay(self, weight: Array, laid: Array) -> None:
        """Lays out a column's weights (1 or rows, maps, k j C) for `products`.

        Row r's at kernel rows from t stride on go to block r + t, at u = reach - 1 - t. What a
        kernel lacks to whole strides stays zero.
        """
        whole, rest = divmod(self.n_inputs, self.block_nodes)
        block, u, of_map, item = laid.strides
        by_row = as_strided(
            laid[0, -1:],
            (len(weight), self.maps, self.reach, self.block_nodes),
            (block, of_map, (block if len(laid) > 1 else 0) - u, item),
        )
        source = weight[..., : whole * self.block_nodes]
        np.copyto(by_row[:, :, :whole], source.reshape(*source.shape[:2], whole, self.block_nodes))
        if rest:
            np.copyto(by_row[:, :, whole, :rest], weight[..., -rest:])

    def products(self, laid: Array, delta: Array) -> list[Product]:
        """(a, b, out) of each product that makes the gradient by a band: out = a b.

        `delta` (rows, maps, n), contiguous, is the gradient of one column. The products are views:
        they are made once a pass and computed for each column.
        """
        n, reach = delta.shape[-1], self.reach
        out = self._d_band.rows(n).reshape(self.blocks, self.block_nodes, n)
        nodes = delta.reshape(-1, n)
        found: list[Product] = []
        for block in range(self.blocks):
            first, last = max(0, block - reach + 1), min(self.rows, block + 1)
            if last - first < reach:
                u = first - (block - reach + 1)
                weights = laid[block if len(laid) > 1 else 0, u : u + last - first]
                seen = nodes[first * self.maps : last * self.maps]
                found.append((weights.reshape(-1, self.block_nodes).T, seen, out[block]))
        if self.rows >= reach:
            inner = slice(reach - 1, self.rows)
            weights = laid[inner] if len(laid) > 1 else laid
            weights = weights.reshape(len(weights), -1, self.block_nodes)
            shape = (self.rows - reach + 1, reach * self.maps, n)
            found.append(
                (weights.transpose(0, 2, 1), as_strided(delta, shape, delta.strides), out[inner])
            )
        return found

    def add_to(self, dx: Array, column: int) -> None:
        """Adds what the products of an output column made to `dx` (input box, n)."""
        n = dx.shape[-1]
        band = self._d_band.rows(n).reshape(-1, self.kernel[1], self.in_maps, n)
        seen, within = self._inner(column)
        top = self._lead[0]
        part = dx[:, seen]
        np.add(part, band[top : top + self._seen[0], within], out=part)

    # ------------------------------------------------------------------------------ geometry

    def _inner(self, column: int) -> tuple[slice, slice]:
        """The columns of the input box that an output column sees, and their place in its band."""
        first = column * self.strides[1] - self._lead[1]
        start, stop = max(0, first), min(self._seen[1], first + self.kernel[1])
        return slice(start, stop), slice(start - first, stop - first)


def _pitched(shape: tuple[int, ...], rows: int, *, dtype: str) -> Array:
    """Zeros (rows, *shape), each of the rows an odd number of cache lines after the last.

    Rows that are a power of two apart compete for a few places in the cache: turning an input of
    320,000 bytes a row was ten times slower.
    """
    size, line = prod(shape), 64 // np.dtype(dtype).itemsize
    flat = np.zeros((rows, (-(-size // line) | 1) * line), dtype)
    return flat[:, :size].reshape(rows, *shape)
