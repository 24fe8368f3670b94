"""What one layer of one partition works with: its kernel, its buffers, its outboxes.

Rules of this file: model/part.py. Memory is made once; an outbox is made when it is first used,
large enough for a whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbctl.model.cut import NetworkCut, Piece
from dbctl.model.exchange import Give, Key, Outbox
from dbctl.model.kernels.dense_inputs import DenseByInputs
from dbctl.model.layers.dense import DenseSpec
from dbctl.model.passes import KERNELS

Array = NDArray[Any]
MakeOutbox = Callable[[int, str], Outbox]


class Rows:
    """Memory for (nodes, batch) from which fewer rows are taken without a stride."""

    def __init__(self, shape: tuple[int, ...], batch_size: int, *, dtype: str) -> None:
        self.shape = shape
        self._nodes = prod(shape)
        self._flat = np.zeros(self._nodes * batch_size, dtype)

    def of(self, n: int) -> Array:
        return self._flat[: self._nodes * n].reshape(*self.shape, n)


class Post:
    """Outboxes by exchange and receiver, made when first used."""

    def __init__(self, make: MakeOutbox, *, batch_size: int, dtype: str) -> None:
        self._make = make
        self._batch_size = batch_size
        self._dtype = dtype
        self._boxes: dict[tuple[Key, int], Outbox] = {}

    def give(self, key: Key, arrays: dict[int, Array], *, rows: int | None) -> Give:
        """Copies each array into its outbox. `rows` of the mini-batch, which may be a short one.

        None: what is sent does not depend on the batch.
        """
        to = {}
        for partition, array in arrays.items():
            where = (key, partition)
            if where not in self._boxes:
                size = array.size if rows is None else array.size // rows * self._batch_size
                self._boxes[where] = self._make(size, self._dtype)
            outbox = self._boxes[where]
            np.copyto(outbox.array[: array.size].reshape(array.shape), array)
            to[partition] = (outbox, array.size)
        return Give(key, to)


class PartLayer:
    """What one layer of one partition works with."""

    def __init__(
        self, cut: NetworkCut, index: int, partition: int, *, batch_size: int, dtype: str
    ) -> None:
        spec, box = cut.spec.layers[index], cut.owned[index + 1][partition]
        shape = cut.shapes[index]
        self.need = cut.needs(index, partition)
        self.owner = cut.owner_of_shared(index)
        self.pieces = [p for p in cut.pieces_of(partition) if p.layer == index]
        self.x: Array = np.empty(0)
        self.weights: list[Array] = []
        self.kernel = None
        self.by_inputs: DenseByInputs | None = None
        if cut.ways[index] == "inputs":
            assert isinstance(spec, DenseSpec), "only a dense layer is cut by its inputs"
            self.finish = DenseByInputs.Finish(spec, batch_size=batch_size, dtype=dtype)
            if self.need:
                units = cut.shapes[index + 1][0]
                self.by_inputs = DenseByInputs(units, batch_size=batch_size, dtype=dtype)
                self.all_deltas = Rows((units,), batch_size, dtype=dtype)
            return
        if box:
            self.kernel = KERNELS[spec.type](spec, shape, box, batch_size=batch_size, dtype=dtype)
        spread = index > 0 and cut.count > 1
        self.inputs = Rows(self.need.shape if spread else (0,), batch_size, dtype=dtype)
        self.dx = Rows(self.need.shape if index else (0,), batch_size, dtype=dtype)
        if self.owner is not None and self.kernel is not None:
            shapes = [tensor.shape for tensor in self.kernel.tensors]
            size = sum(prod(s) for s in shapes)
            self.shared_flat = np.zeros(size, dtype)
            self.shared_gradient_flat = np.zeros(size, dtype)
            self.shared = _split(self.shared_flat, shapes)
            self.shared_gradients = _split(self.shared_gradient_flat, shapes)


def view_of(flat: Array, piece: Piece, *, origin: int) -> Array:
    """A piece of the flat vector in the shape that a kernel works with."""
    part = flat[piece.range.slice(origin)]
    if piece.tensor.kind == "weight" and len(piece.view) != len(piece.tensor.shape):
        return part.reshape(piece.box.shape[0], -1)
    return part.reshape(piece.box.shape)


def _split(flat: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    arrays, start = [], 0
    for shape in shapes:
        arrays.append(flat[start : start + prod(shape)].reshape(shape))
        start += prod(shape)
    return arrays


def split_into(flat: Array, arrays: Sequence[Array]) -> None:
    start = 0
    for array in arrays:
        np.copyto(array, flat[start : start + array.size].reshape(array.shape))
        start += array.size
