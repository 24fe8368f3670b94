"""What local contrast normalisation computes, on a box of its output nodes.

Rules of dbctl/model/kernels/dense.py. Arrays are (rows, columns, maps, n); x and dx may be a region
of larger arrays. With i a map, j, k a position, p, q an offset within the window:

    v_ijk = x_ijk - sum_ipq w_pq x_i,j+p,k+q        sigma_jk = sqrt(sum_ipq w_pq v_i,j+p,k+q^2)
    y_ijk = v_ijk / max(floor, sigma_jk)

w is a Gaussian of deviation window / 4, the same for each map, cut at the image's border, with sum
1 over what is left of the window and all maps. Where the floor is what divides, it is a constant.

Theory of operation: a cut Gaussian of sum 1 is the product of one over rows and one over columns,
each a banded matrix B. So a weighted sum is a sum over maps and two small matrix products, on a box
a slice of B, and its gradient the same with B transposed. Sums over maps are by einsum, 1.5 to 15
times as fast as `add.reduce`, and without an array of products:

    s = B sum_m x, v = x - s, t = B sum_m v^2, d = max(floor, sqrt(t)), y = v / d
    dt = -(sum_m dy y) / d^2 where sqrt(t) > floor, else 0      (B has 1/maps, halves cancel)
    dv = dy / d + v B'dt        dx = dv - B' sum_m dv
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbctl.model.buffer import Buffer
from dbctl.model.layers.lcn import LcnSpec
from dbctl.region import Box

Array = NDArray[Any]

SUM = "rcmn->rcn"
SUM_OF_PRODUCTS = "rcmn,rcmn->rcn"


class Lcn:
    """The layer on the output nodes `box`; `inputs` is the shape of all its input nodes.

    `input_box` is what it sees of them; it has no tensors.
    """

    def __init__(
        self, spec: LcnSpec, inputs: tuple[int, ...], box: Box, *, batch_size: int, dtype: str
    ) -> None:
        self.input_box = spec.input_box(inputs, box)
        self.tensors = spec.tensors(inputs, box)
        centred = spec.centred_box(inputs, box)
        self._floor = spec.floor
        self._rows, self._columns, _ = centred.slices(self.input_box.starts)
        self._borders = _around(centred.slices(self.input_box.starts)[:2], self.input_box.shape)
        self._own = box.slices(centred.starts)
        self._mean = _Blur(spec, inputs, self.input_box, to=centred, n=batch_size, dtype=dtype)
        self._square = _Blur(spec, inputs, centred, to=box, n=batch_size, dtype=dtype)

        def buffer(*shape: int) -> Buffer:
            return Buffer(shape, batch_size, dtype=dtype)

        self._v = buffer(*centred.shape)  # kept from forward to backward, as are the next two
        self._deviation = buffer(*box.shape[:2])
        self._inverse = buffer(*box.shape[:2])
        self._of_input = buffer(*self.input_box.shape[:2])
        self._of_centred = buffer(*centred.shape[:2])
        self._of_box = buffer(*box.shape[:2])
        self._mask = Buffer(box.shape[:2], batch_size, dtype=bool)

    def forward(self, parameters: Sequence[Array], x: Array, out: Array) -> None:
        """Writes the normalised nodes into `out`, the box's shape and n. `x` is (input box, n)."""
        n = x.shape[-1]
        v = self._v.rows(n)
        deviation, inverse = self._deviation.rows(n), self._inverse.rows(n)
        sums, mean = self._of_input.rows(n), self._of_centred.rows(n)
        np.einsum(SUM, x, out=sums)
        self._mean.forward(sums, mean)
        np.subtract(x[self._rows, self._columns], mean[:, :, None], out=v)
        squares = np.einsum(SUM_OF_PRODUCTS, v, v, out=mean)  # the mean is used up
        self._square.forward(squares, deviation)
        np.sqrt(deviation, out=deviation)
        np.maximum(deviation, self._floor, out=deviation)
        np.divide(1.0, deviation, out=inverse)
        np.multiply(v[self._own], inverse[:, :, None], out=out)

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
        """Writes the gradient by `x` into `dx`, unless that is None (first layer).

        `out` is what `forward` wrote, last and on these `x`; `delta` the gradient by it, which is
        destroyed.
        """
        if dx is None:
            return
        n = x.shape[-1]
        v, inverse = self._v.rows(n), self._inverse.rows(n)
        d_square, sums = self._of_centred.rows(n), self._of_input.rows(n)
        self._square.backward(self._d_variance(out, delta), d_square)
        np.multiply(delta, inverse[:, :, None], out=delta)
        dv = dx[self._rows, self._columns]
        np.multiply(v, d_square[:, :, None], out=dv)
        own = dv[self._own]
        np.add(own, delta, out=own)
        np.einsum(SUM, dv, out=d_square)
        self._mean.backward(d_square, sums)
        np.subtract(dv, sums[self._rows, self._columns, None], out=dv)
        for border in self._borders:
            # Not np.negative: numpy 2.4 does not write all of some arrays with a stride.
            np.subtract(0.0, sums[border][:, :, None], out=dx[border])

    def _d_variance(self, out: Array, delta: Array) -> Array:
        """-(sum_m dy y) / d^2, and 0 where d is the floor."""
        n = out.shape[-1]
        deviation, inverse = self._deviation.rows(n), self._inverse.rows(n)
        found, mask = self._of_box.rows(n), self._mask.rows(n)
        np.einsum(SUM_OF_PRODUCTS, out, delta, out=found)
        np.greater(deviation, self._floor, out=mask)
        np.multiply(found, mask, out=found)
        np.multiply(found, inverse, out=found)
        np.multiply(found, inverse, out=found)
        np.negative(found, out=found)
        return found


def _around(inner: tuple[slice, ...], shape: tuple[int, ...]) -> list[tuple[slice, slice]]:
    """What of the rows and columns of `shape` is not `inner`: at most four boxes."""
    rows, columns = inner
    height, width, _ = shape
    found = [
        (slice(0, rows.start), slice(0, width)),
        (slice(rows.stop, height), slice(0, width)),
        (rows, slice(0, columns.start)),
        (rows, slice(columns.stop, width)),
    ]
    return [(r, c) for r, c in found if r.start < r.stop and c.start < c.stop]


class _Blur:
    """Weighted sums over the window: from sums over maps on `box` to its positions `to`."""

    def __init__(
        self, spec: LcnSpec, inputs: tuple[int, ...], box: Box, *, to: Box, n: int, dtype: str
    ) -> None:
        rows, columns, _ = box.slices()
        to_rows, to_columns, _ = to.slices()
        height, width, maps = inputs
        by_row = window_matrix(height, spec.window) / maps
        by_column = window_matrix(width, spec.window)
        self._by_row = np.ascontiguousarray(by_row[to_rows, rows], dtype)
        self._by_column = np.ascontiguousarray(by_column[to_columns, columns], dtype)
        self._between = Buffer((to.shape[0], box.shape[1]), n, dtype=dtype)

    def forward(self, source: Array, out: Array) -> None:
        between = self._between.rows(source.shape[-1])
        np.matmul(self._by_row, _flat(source), out=_flat(between))
        np.matmul(self._by_column, between, out=out)

    def backward(self, delta: Array, out: Array) -> None:
        between = self._between.rows(delta.shape[-1])
        np.matmul(self._by_column.T, delta, out=between)
        np.matmul(self._by_row.T, _flat(between), out=_flat(out))


def window_matrix(size: int, window: int) -> Array:
    """(size, size) in float64: row j has the weights of positions in the window about j, sum 1."""
    offsets = np.subtract.outer(np.arange(size), np.arange(size))
    weights: Array = np.exp(-0.5 * (offsets / (window / 4)) ** 2)
    weights[np.abs(offsets) > window // 2] = 0
    weights /= weights.sum(axis=1, keepdims=True)
    return weights


def _flat(x: Array) -> Array:
    """(rows, columns, n) as (rows, columns x n), never a copy."""
    assert x.flags.c_contiguous
    return x.reshape(len(x), x.shape[1] * x.shape[2])
