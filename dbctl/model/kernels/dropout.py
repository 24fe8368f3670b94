"""What dropout computes, on a box of its output nodes.

Rules of dbctl/model/kernels/dense.py. Before each pass `draw` says which words of which stream make
the mask, or that there is none (measuring: y = x).

    forward   y = x mask        backward   dx = dy mask        mask: 0, or 1 / (1 - rate)

Theory of operation: a node has as many words of the layer's Philox stream as `batch_size` needs,
two rows a word, and nodes follow each other in C order of the whole layer. Row r of node j is
dropped where half r of the words of j (32 bits, the lower half first) is less than rate x 2^32. So
the mask depends neither on the box nor on how many rows a short mini-batch has. Nodes that follow
each other are a run of the stream; a box is as few runs as it can be. Halves, because making words
costs more than everything else here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbctl.model.buffer import Buffer
from dbctl.model.layers.dropout import DropoutSpec
from dbctl.philox import stream
from dbctl.region import Box, Range

Array = NDArray[Any]

BLOCK = 1 << 14  # words made at once: temporaries stay in the L2 cache


class Dropout:
    """Dropout on the nodes `box` of all `inputs`. `draw` comes before each `forward`."""

    def __init__(
        self, spec: DropoutSpec, inputs: tuple[int, ...], box: Box, *, batch_size: int, dtype: str
    ) -> None:
        self.input_box = spec.input_box(inputs, box)
        self.tensors = spec.tensors(inputs, box)
        self._least = np.uint32(min(round(spec.rate * 2**32), 2**32 - 1))
        self._scale = 1 / (1 - spec.rate)
        self._words = -(-batch_size // 2)  # of one node
        self._runs = list(_runs(inputs, box))
        self._mask = Buffer(box.shape, batch_size, dtype=dtype)
        self._drawn = False
        self._n = 0  # rows that the last draw was for

    def draw(self, label: str | None, n: int) -> None:
        """The mask of n rows from the stream `label`; None: no node is dropped."""
        self._drawn, self._n = label is not None, n
        if label is None:
            return
        mask = self._mask.rows(n).reshape(-1, n)
        done = 0
        for run in self._runs:
            self._fill(mask[done : done + len(run)], label, run)
            done += len(run)
        np.multiply(mask, self._scale, out=mask)

    def forward(self, parameters: Sequence[Array], x: Array, out: Array) -> None:
        """Writes `x` (box, n) times the mask into `out`; without a draw, `x` itself."""
        n = x.shape[-1]
        assert n == self._n, f"{n} rows, but the mask was drawn for {self._n}"
        if self._drawn:
            np.multiply(x, self._mask.rows(n), out=out)
        else:
            np.copyto(out, x)

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
        """Writes the gradient by `x` into `dx`, unless that is None (first layer)."""
        if dx is not None:
            self.forward(parameters, delta, dx)

    def _fill(self, mask: Array, label: str, run: Range) -> None:
        """Writes 1 where a node is kept, else 0, into `mask` (nodes of `run`, n)."""
        bits = stream(label, run.start * self._words)
        nodes = max(1, BLOCK // self._words)
        for start in range(0, len(run), nodes):
            part = mask[start : start + nodes]
            words = bits.random_raw(len(part) * self._words).astype("<u8", copy=False)
            halves = words.view("<u4").reshape(len(part), 2 * self._words)
            np.greater_equal(halves[:, : part.shape[1]], self._least, out=part)


def _runs(inputs: tuple[int, ...], box: Box) -> Iterator[Range]:
    """The nodes of `box` in its C order, as ranges of nodes that follow each other in `inputs`."""
    sides = list(box.sides())
    axis = len(inputs) - 1
    while axis > 0 and sides[axis] == (0, inputs[axis]):
        axis -= 1
    size = prod(inputs[axis + 1 :])
    start, stop = sides[axis]
    for outer in product(*(range(a, b) for a, b in sides[:axis])):
        base = 0
        for at, length in zip((*outer, 0), inputs[: axis + 1], strict=True):
            base = base * length + at
        yield Range((base + start) * size, (base + stop) * size)
