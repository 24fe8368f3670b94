"""What one layer of one partition works with: its kernel, its buffers, what crosses, its outboxes.

Rules of this file: model/part.py. Memory is made once; an outbox is made when it is first used,
large enough for a whole mini-batch, and what is lent when a pass first works on it. Which boxes
cross is worked out once, not in each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dbctl.model.buffer import Buffer
from dbctl.model.cut import NetworkCut
from dbctl.model.exchange import Give, Key, Outbox, Run
from dbctl.model.kernels.dense_inputs import DenseByInputs
from dbctl.model.layers.dense import DenseSpec
from dbctl.model.passes import KERNELS, Kernel
from dbctl.region import Box, Range

Array = NDArray[Any]
MakeOutbox = Callable[[int, str], Outbox]

_NOTHING = Box((0,), (0,))


class Post:
    """Outboxes by exchange and receivers, made when first used.

    An outbox is written by `room` or `send` at most once a pass and stays as it is until the pass
    is over on all partitions. What `lend` sends lies in memory that passes work on.
    """

    def __init__(self, make: MakeOutbox, *, batch_size: int, dtype: str) -> None:
        self._make = make
        self._batch_size = batch_size
        self._dtype = dtype
        self._boxes: dict[tuple[Key, tuple[int, ...]], Outbox] = {}
        self._written: dict[int, Run] = {}

    def room(
        self, key: Key, to: Iterable[int], shape: tuple[int, ...], *, rows: int | None
    ) -> Array:
        """Memory that the partitions `to` are sent by the next `give`.

        `rows` of the mini-batch, which may be a short one; None: what is sent does not depend on
        the batch.
        """
        size, receivers = prod(shape), tuple(to)
        if (key, receivers) not in self._boxes:
            most = size if rows is None else size // rows * self._batch_size
            self._boxes[key, receivers] = self._make(most, self._dtype)
        outbox = self._boxes[key, receivers]
        self._written.update(dict.fromkeys(receivers, Run(outbox, 0, size)))
        return outbox.array[:size].reshape(shape)

    def memory(self, n_nodes: int) -> Outbox:
        """For `n_nodes` of a whole mini-batch, to be lent."""
        return self._make(n_nodes * self._batch_size, self._dtype)

    def buffer(self, shape: tuple[int, ...], outbox: Outbox | None) -> Buffer:
        """Of a whole mini-batch, in the memory of `outbox` if there is one."""
        flat = None if outbox is None else outbox.array
        return Buffer(shape, self._batch_size, dtype=self._dtype, flat=flat)

    def lend(self, to: int, outbox: Outbox, nodes: Range, *, rows: int) -> None:
        """Partition `to` is sent `nodes` as they lie in `outbox` by the next `give`."""
        self._written[to] = Run(outbox, nodes.start * rows, nodes.stop * rows)

    def give(self, key: Key) -> Give:
        """What was written since the last one."""
        written, self._written = self._written, {}
        return Give(key, written)

    def send(self, key: Key, to: Iterable[int], array: Array, *, rows: int | None) -> Give:
        """The same array, copied once, to each of `to`."""
        np.copyto(self.room(key, to, array.shape, rows=rows), array)
        return self.give(key)


class Lendable:
    """Nodes of `box` for mini-batches, made when first used: if `lent`, in memory others can map.

    Runs of what is lent are sent from where they lie.
    """

    def __init__(self, box: Box, post: Post, *, lent: bool) -> None:
        self._box = box
        self._post = post
        self._lent = lent
        self._buffer: Buffer | None = None
        self.outbox: Outbox | None = None

    def rows(self, n: int) -> Array:
        """As Buffer.rows."""
        if self._buffer is None:
            self.outbox = self._post.memory(len(self._box)) if self._lent else None
            self._buffer = self._post.buffer(self._box.shape, self.outbox)
        return self._buffer.rows(n)


class Crossing(NamedTuple):
    """A box of a level that crosses: its shape, and its place in an array of ours.

    `run`: where its nodes lie in the array of what we need; None: not there, or not in one run.
    """

    shape: tuple[int, ...]
    place: tuple[slice, ...]
    run: Range | None


class Flat(NamedTuple):
    """A tensor's share in a flat vector, and the shape that a kernel works with."""

    part: slice
    shape: tuple[int, ...]


class PartLayer:
    """What one layer of one partition works with.

    `sends`: nodes of ours that others need, by partition, in the array of what we own. `takes`:
    those of others that we need, in the array of what we need. `kernel`: None without outputs of
    ours, and where the layer is cut by its inputs. `inputs`: what we need, our own and others'
    nodes, and `dx` the gradient by it.
    """

    def __init__(
        self,
        cut: NetworkCut,
        index: int,
        partition: int,
        *,
        batch_size: int,
        dtype: str,
        post: Post,
    ) -> None:
        spec, box = cut.spec.layers[index], cut.owned[index + 1][partition]
        mine = cut.owned[index][partition]
        others = [p for p in range(cut.count) if p != partition]
        self.box = box
        self.need = cut.needs(index, partition)
        self.x: Array = np.empty(0)
        self.weights: list[Array] = []
        self.tensors = _tensors_of(cut, index, partition)
        self.own = _own(mine, self.need)
        sent = {p: cut.sent(index, partition, p) for p in others}
        taken = {p: cut.sent(index, p, partition) for p in others}
        self.takes = _crossings(taken, self.need, lain=self.need)
        lain = self.need if self.takes and self.own.in_place else None
        self.sends = _crossings(sent, mine, lain=lain)
        self.kernel: Kernel | None = None
        self.by_inputs: DenseByInputs | None = None
        self.shared: Shared | None = None
        gathered = self.need if index and not self.is_local else _NOTHING
        self.inputs = Lendable(gathered, post, lent=_any_run(self.sends))
        self.dx = Lendable(self.need if index else _NOTHING, post, lent=_any_run(self.takes))
        if cut.ways[index] == "inputs":
            assert isinstance(spec, DenseSpec), "only a dense layer is cut by its inputs"
            self.by_inputs = DenseByInputs(
                spec,
                cut.owned[index],
                cut.owned[index + 1],
                partition=partition,
                batch_size=batch_size,
                dtype=dtype,
            )
            return
        if box:
            shape = cut.shapes[index]
            self.kernel = KERNELS[spec.type](spec, shape, box, batch_size=batch_size, dtype=dtype)
        if cut.owner_of_shared(index) is not None:
            self.shared = Shared(cut, index, partition, dtype=dtype)

    @property
    def is_local(self) -> bool:
        """The inputs that are needed are those that are owned, and nobody else's."""
        return self.own.is_all and not self.takes


class Own(NamedTuple):
    """Where what is owned and needed lies, in both arrays."""

    in_owned: tuple[slice, ...]
    in_needed: tuple[slice, ...]
    is_all: bool  # what is owned is what is needed
    in_place: bool  # all that is owned is needed: it is computed where it is needed


def _own(mine: Box, need: Box) -> Own:
    both = mine.intersection(need)
    places = both.slices(mine.starts), both.slices(need.starts)
    return Own(*places, is_all=mine == need, in_place=bool(mine) and both == mine)


def _crossings(boxes: dict[int, Box], array: Box, *, lain: Box | None) -> dict[int, Crossing]:
    """Boxes in the array of `array`'s nodes, which lie in memory with all of `lain`."""
    return {
        p: Crossing(box.shape, box.slices(array.starts), box.run_in(lain) if lain else None)
        for p, box in boxes.items()
        if box
    }


def _any_run(boxes: dict[int, Crossing]) -> bool:
    return any(box.run is not None for box in boxes.values())


def _tensors_of(cut: NetworkCut, index: int, partition: int) -> list[Flat]:
    """The layer's tensors in the partition's flat vector; none where another one holds them."""
    origin = cut.span(partition).start
    found = []
    for piece in cut.pieces_of(partition):
        if piece.layer == index:
            shape = piece.box.shape
            if len(piece.view) != len(piece.tensor.shape):
                shape = (shape[0], prod(shape[1:]))
            found.append(Flat(piece.range.slice(origin), shape))
    return found


class Shared:
    """A layer whose weights all partitions share: one of them holds them (`owner`).

    `users`: the others that compute the layer. `flat`: the weights in the owner's vector. Whoever
    is not the owner has memory for the gradients (`gradients`, one run: `flat_gradients`).
    """

    def __init__(self, cut: NetworkCut, index: int, partition: int, *, dtype: str) -> None:
        owner = cut.owner_of_shared(index)
        assert owner is not None
        self.owner = owner
        self.users = tuple(p for p, box in enumerate(cut.owned[index + 1]) if box and p != owner)
        tensors = _tensors_of(cut, index, owner)
        self.flat = Range(tensors[0].part.start, tensors[-1].part.stop)
        self._tensors = [
            Flat(slice(t.part.start - self.flat.start, t.part.stop - self.flat.start), t.shape)
            for t in tensors
        ]
        size = len(self.flat) if partition in self.users else 0
        self.flat_gradients = np.zeros(size, dtype)
        self.gradients = self.views(self.flat_gradients) if size else []

    def views(self, flat: Array) -> list[Array]:
        """The layer's tensors in a run of them."""
        return views_of(flat, self._tensors)


def views_of(flat: Array, tensors: Sequence[Flat]) -> list[Array]:
    return [flat[t.part].reshape(t.shape) for t in tensors]


def add_all(out: Array, taken: Iterable[Array], *, has_own: bool) -> None:
    """`out` += each of `taken`, in their order; without a share of its own: `out` = their sum."""
    for array in taken:
        part = array.reshape(out.shape)
        if has_own:
            np.add(out, part, out=out)
        else:
            np.copyto(out, part)
        has_own = True
    if not has_own:
        out[...] = 0
