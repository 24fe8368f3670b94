"""What a pooling layer computes, on a box of its output nodes.

Rules of dbctl/model/kernels/dense.py. Arrays are (rows, columns, maps, n); x and dx may be a region
of larger arrays. Theory of operation, a row of output nodes at a time, so that it stays in the
cache: all nodes of the row take position (p, q) of their windows at once, one strided view.

    max     y = max x             dx = dy at the first position, row-major, that holds the maximum
    mean    y = sum x / count     dx = dy / count
    l2      y = sqrt(sum x^2)     dx = dy x / y, and 0 where y is 0

Max: a position takes the gradient where it equals y, and what it took is subtracted, so that a
later equal one gets 0. Where windows lie edge to edge each input is in one of them and its gradient
is written directly; else gradients are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dbctl.model.buffer import Buffer
from dbctl.model.layers.pool import PoolSpec
from dbctl.region import Box

Array = NDArray[Any]


class Pool:
    """A pooling layer on the output nodes `box`; `inputs` is the shape of all its input nodes.

    `input_box` is what it sees of them; it has no tensors.
    """

    def __init__(
        self, spec: PoolSpec, inputs: tuple[int, ...], box: Box, *, batch_size: int, dtype: str
    ) -> None:
        self.input_box = spec.input_box(inputs, box)
        self.tensors = spec.tensors(inputs, box)
        self._strides = spec.strides
        self._offsets = [(p, q) for p in range(spec.sizes[0]) for q in range(spec.sizes[1])]
        self._kind = _KINDS[spec.kind](spec.sizes[0] * spec.sizes[1])
        self._edge_to_edge = spec.sizes == spec.strides
        row = box.shape[1:]
        self._scratch = Buffer(row, batch_size, dtype=dtype)
        self._mask = Buffer(row, batch_size, dtype=bool)

    def forward(self, parameters: Sequence[Array], x: Array, out: Array) -> None:
        """Writes the pooled nodes into `out`, the box's shape and n. `x` is (input box, n)."""
        scratch = self._scratch.rows(x.shape[-1])
        for index, row in enumerate(out):
            first, *others = self._positions(x, index, columns=len(row))
            self._kind.first(first, row)
            for position in others:
                self._kind.join(position, row, scratch)
            self._kind.finish(row)

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

        `out` is what `forward` wrote and `delta` the gradient by it; both are destroyed.
        """
        if dx is None:
            return
        n = x.shape[-1]
        scratch, mask = self._scratch.rows(n), self._mask.rows(n)
        if not self._edge_to_edge:
            dx[...] = 0
        for index, (row, d_row) in enumerate(zip(out, delta, strict=True)):
            self._kind.prepare(row, d_row, mask)
            positions = self._positions(x, index, columns=len(row))
            d_positions = self._positions(dx, index, columns=len(row))
            for position, d_position in zip(positions, d_positions, strict=True):
                part = d_position if self._edge_to_edge else scratch
                self._kind.share(position, row, d_row, mask=mask, part=part)
                if not self._edge_to_edge:
                    np.add(d_position, scratch, out=d_position)

    def _positions(self, x: Array, row: int, *, columns: int) -> list[Array]:
        """Each position of the windows of an output row in turn, (columns, maps, n)."""
        down, across = self._strides
        span = (columns - 1) * across + 1
        return [x[row * down + p, q : q + span : across] for p, q in self._offsets]


class _Kind(Protocol):
    """A kind of pooling over `count` positions, on rows of nodes.

    `first(x, y)`, then `join(x, y, scratch)` for each other position, then `finish(y)`. Back:
    `prepare(y, dy, mask)` once, then `share` writes the gradient by each position into `part`. y
    and dy are destroyed.
    """

    def __init__(self, count: int) -> None: ...

    def first(self, x: Array, y: Array) -> None: ...

    def join(self, x: Array, y: Array, scratch: Array) -> None: ...

    def finish(self, y: Array) -> None: ...

    def prepare(self, y: Array, dy: Array, mask: Array) -> None: ...

    def share(self, x: Array, y: Array, dy: Array, *, mask: Array, part: Array) -> None: ...


class _Max:
    def __init__(self, count: int) -> None:
        pass

    def first(self, x: Array, y: Array) -> None:
        np.copyto(y, x)

    def join(self, x: Array, y: Array, scratch: Array) -> None:
        np.maximum(y, x, out=y)

    def finish(self, y: Array) -> None:
        pass

    def prepare(self, y: Array, dy: Array, mask: Array) -> None:
        pass

    def share(self, x: Array, y: Array, dy: Array, *, mask: Array, part: Array) -> None:
        np.equal(x, y, out=mask)
        np.multiply(dy, mask, out=part)
        np.subtract(dy, part, out=dy)


class _Mean:
    def __init__(self, count: int) -> None:
        self._factor = 1 / count

    def first(self, x: Array, y: Array) -> None:
        np.copyto(y, x)

    def join(self, x: Array, y: Array, scratch: Array) -> None:
        np.add(y, x, out=y)

    def finish(self, y: Array) -> None:
        np.multiply(y, self._factor, out=y)

    def prepare(self, y: Array, dy: Array, mask: Array) -> None:
        np.multiply(dy, self._factor, out=dy)

    def share(self, x: Array, y: Array, dy: Array, *, mask: Array, part: Array) -> None:
        np.copyto(part, dy)


class _L2:
    def __init__(self, count: int) -> None:
        pass

    def first(self, x: Array, y: Array) -> None:
        np.multiply(x, x, out=y)

    def join(self, x: Array, y: Array, scratch: Array) -> None:
        np.multiply(x, x, out=scratch)
        np.add(y, scratch, out=y)

    def finish(self, y: Array) -> None:
        np.sqrt(y, out=y)

    def prepare(self, y: Array, dy: Array, mask: Array) -> None:
        # Where y is 0 so is x, and dy x / 1 is the 0 that is wanted.
        np.equal(y, 0.0, out=mask)
        np.add(y, mask, out=y)
        np.divide(dy, y, out=dy)

    def share(self, x: Array, y: Array, dy: Array, *, mask: Array, part: Array) -> None:
        np.multiply(x, dy, out=part)


_KINDS: dict[str, type[_Kind]] = {"max": _Max, "mean": _Mean, "l2": _L2}
