"""One partition's share of a network's passes: forward, loss and gradient as a generator.

Rules of this file: knows no process and no message; it yields what it gives to and takes from the
other partitions (model/exchange.py). Arrays are batch innermost, buffers made once. Contributions
of several partitions are added in the order of partitions, so that a result does not depend on who
was first.

Theory of operation (model/cut.py says who owns what). Forward, a layer cut by its outputs: inputs
that others own are taken, the own box is computed, and given to whoever needs it. A layer cut by
its inputs: partial sums of all outputs from the own inputs, given to the owners of the outputs, who
add them. Backward is the transpose. Shared weights come from their owner and their gradients go
back to it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbctl.model.cut import NetworkCut
from dbctl.model.exchange import Exchange, Key, Take
from dbctl.model.kernels.dropout import Dropout
from dbctl.model.layers.dropout import Draw
from dbctl.model.part_layer import MakeOutbox, PartLayer, Post, Rows, split_into, view_of
from dbctl.model.part_loss import PartLoss
from dbctl.region import Box

Array = NDArray[Any]
Taken = dict[int, Array]
Pass = Generator[Exchange, Taken, Any]


class PartNetwork:
    """Partition `partition` of a cut network.

    `parameters` and `out` of the passes are flat, the partition's range of the cut's flat vector.
    `x` is the box `input_box` of the network's input, (..., n). `outbox(n_elements, dtype)` makes
    memory that others can read.
    """

    def __init__(
        self,
        cut: NetworkCut,
        partition: int,
        *,
        batch_size: int,
        dtype: str = "float32",
        outbox: MakeOutbox,
    ) -> None:
        self.cut = cut
        self.partition = partition
        self.dtype = np.dtype(dtype)
        self.span = cut.span(partition)
        self.input_box = cut.needs(0, partition)
        self._others = tuple(p for p in range(cut.count) if p != partition)
        self._post = Post(outbox, batch_size=batch_size, dtype=dtype)
        n_layers = len(cut.spec.layers)
        self._layers = [
            PartLayer(cut, index, partition, batch_size=batch_size, dtype=dtype)
            for index in range(n_layers)
        ]
        own = [cut.owned[level][partition].shape for level in range(n_layers + 1)]
        self._outputs = [Rows(shape, batch_size, dtype=dtype) for shape in own]
        self._deltas = [Rows(shape, batch_size, dtype=dtype) for shape in own]
        self._loss = PartLoss(
            cut.spec.loss,
            cut.owned[-1],
            partition,
            batch_size=batch_size,
            dtype=dtype,
            post=self._post,
        )

    @property
    def n_parameters(self) -> int:
        return len(self.span)

    def gradient(
        self, parameters: Array, x: Array, targets: Array, *, out: Array, draw: Draw | None = None
    ) -> Pass:
        """Writes the partition's share of the gradient of the rows' mean loss into `out`.

        Returns this partition's share of the sum of the rows' losses: the sum over the partitions
        is the whole.
        """
        views, slots = self._views(parameters), self._views(out)
        with np.errstate(all="ignore"):
            nodes = yield from self._forward(views, x, draw)
            delta = self._deltas[-1].of(x.shape[-1])
            np.copyto(delta, nodes[-1])
            loss_sum = yield from self._loss.gradient(delta, targets)
            yield from self._backward(views, nodes, delta=delta, slots=slots)
        return loss_sum

    def measure(self, parameters: Array, x: Array, targets: Array) -> Pass:
        """Returns a PartMeasurement of the rows: the same on every partition."""
        with np.errstate(all="ignore"):
            nodes = yield from self._forward(self._views(parameters), x, None)
            return (yield from self._loss.measure(nodes[-1], targets))

    def _views(self, flat: Array) -> list[list[Array]]:
        """The flat vector as each layer's tensors; none where another partition holds them."""
        assert flat.shape == (len(self.span),), f"{flat.shape}, not ({len(self.span)},)"
        return [
            [view_of(flat, piece, origin=self.span.start) for piece in layer.pieces]
            for layer in self._layers
        ]

    # -------------------------------------------------------------------------------- forward

    def _forward(self, views: list[list[Array]], x: Array, draw: Draw | None) -> Pass:
        nodes = [x]
        for index, layer in enumerate(self._layers):
            out = self._outputs[index + 1].of(x.shape[-1])
            if self.cut.ways[index] == "inputs":
                yield from self._forward_sums(index, views[index], nodes[-1], out)
            else:
                if index:
                    yield from self._send_states(index, nodes[-1])
                    layer.x = yield from self._take_states(index, nodes[-1])
                else:
                    layer.x = x
                layer.weights = yield from self._share_weights(index, views[index])
                if isinstance(layer.kernel, Dropout):
                    layer.kernel.draw(draw.label(index) if draw else None, x.shape[-1])
                if layer.kernel is not None:
                    layer.kernel.forward(layer.weights, layer.x, out)
            nodes.append(out)
        return nodes

    def _send_states(self, index: int, own: Array) -> Pass:
        mine = self.cut.owned[index][self.partition]
        parts = {}
        for other in self._others:
            box = self.cut.sent(index, self.partition, other)
            if box:
                parts[other] = own[box.slices(mine.starts)]
        if parts:
            yield self._post.give(Key("states", index), parts, rows=own.shape[-1])

    def _take_states(self, index: int, own: Array) -> Pass:
        """The layer's inputs, own and others', in one array."""
        layer, mine = self._layers[index], self.cut.owned[index][self.partition]
        if not layer.need:
            return own[:0] if own.ndim == 2 else own
        senders = [p for p in self._others if self.cut.sent(index, p, self.partition)]
        if not senders and layer.need == mine:
            return own
        whole = layer.inputs.of(own.shape[-1])
        both = mine.intersection(layer.need)
        whole[both.slices(layer.need.starts)] = own[both.slices(mine.starts)]
        if senders:
            taken = yield Take(Key("states", index), tuple(senders))
            for sender in senders:
                box = self.cut.sent(index, sender, self.partition)
                part = taken[sender].reshape(*box.shape, own.shape[-1])
                whole[box.slices(layer.need.starts)] = part
        return whole

    def _share_weights(self, index: int, own: list[Array]) -> Pass:
        """Shared weights: given by their owner at the start of each mini-batch."""
        owner = self._layers[index].owner
        if owner is None:
            return own
        layer, key = self._layers[index], Key("weights", index)
        users = self._users(index)
        if owner == self.partition:
            flat = np.concatenate([array.ravel() for array in own])
            yield self._post.give(key, dict.fromkeys(users, flat), rows=None)
            return own
        if layer.kernel is None:
            return own
        taken = yield Take(key, (owner,))
        np.copyto(layer.shared_flat, taken[owner])
        return layer.shared

    def _users(self, index: int) -> list[int]:
        """The others that compute a layer with shared weights."""
        owned = self.cut.owned[index + 1]
        return [p for p in self._others if owned[p]]

    def _forward_sums(self, index: int, views: list[Array], own: Array, out: Array) -> Pass:
        layer, key, owned = self._layers[index], Key("sums", index), self.cut.owned[index + 1]
        n = own.shape[-1]
        layer.x = own
        sums = None
        if layer.by_inputs is not None:
            sums = layer.by_inputs.partial(views[0], own)
            parts = {p: sums[owned[p].slices()] for p in self._others if owned[p]}
            if parts:
                yield self._post.give(key, parts, rows=n)
        mine = owned[self.partition]
        if not mine:
            return
        senders = tuple(p for p in self._others if self.cut.owned[index][p])
        taken = (yield Take(key, senders)) if senders else {}
        out[...] = 0
        for p in range(self.cut.count):
            if p in taken:
                np.add(out, taken[p].reshape(len(mine), n), out=out)
            elif p == self.partition and sums is not None:
                np.add(out, sums[mine.slices()], out=out)
        layer.finish.apply(views[-1], out)

    # ------------------------------------------------------------------------------- backward

    def _backward(
        self,
        views: list[list[Array]],
        nodes: Sequence[Array],
        *,
        delta: Array,
        slots: list[list[Array]],
    ) -> Pass:
        for index in reversed(range(len(self._layers))):
            layer, out = self._layers[index], nodes[index + 1]
            if self.cut.ways[index] == "inputs":
                delta = yield from self._backward_sums(
                    index, views[index], out, delta=delta, slots=slots[index]
                )
                continue
            dx = layer.dx.of(delta.shape[-1]) if index and layer.need else None
            grads = slots[index]
            if layer.owner is not None and layer.owner != self.partition:
                grads = layer.shared_gradients
            if layer.kernel is not None:
                layer.kernel.backward(
                    layer.weights, layer.x, out, delta=delta, gradients=grads, dx=dx
                )
            if index:
                delta = yield from self._return_deltas(index, dx, delta.shape[-1])
            yield from self._gather_shared(index, slots[index])

    def _return_deltas(self, index: int, dx: Array | None, n: int) -> Pass:
        """Gradients by inputs go to their owner, who adds them in the order of partitions."""
        layer, mine = self._layers[index], self.cut.owned[index][self.partition]
        key = Key("back", index)
        parts = {}
        for other in self._others:
            box = self.cut.sent(index, other, self.partition)
            if box and dx is not None:
                parts[other] = dx[box.slices(layer.need.starts)]
        if parts:
            yield self._post.give(key, parts, rows=n)
        senders = tuple(p for p in self._others if self.cut.sent(index, self.partition, p))
        if not senders and dx is not None and layer.need == mine:
            return dx
        delta = self._deltas[index].of(n)
        taken = (yield Take(key, senders)) if senders else {}
        delta[...] = 0
        for p in range(self.cut.count):
            if p in taken:
                box = self.cut.sent(index, self.partition, p)
                where = box.slices(mine.starts)
                delta[where] += taken[p].reshape(*box.shape, n)
            elif p == self.partition and dx is not None:
                both = mine.intersection(layer.need)
                delta[both.slices(mine.starts)] += dx[both.slices(layer.need.starts)]
        return delta

    def _gather_shared(self, index: int, slots: list[Array]) -> Pass:
        """Partial gradients of shared weights are added by their owner."""
        layer, key = self._layers[index], Key("shares", index)
        if layer.owner is None:
            return
        if layer.owner != self.partition:
            if layer.kernel is not None:
                flat = layer.shared_gradient_flat
                yield self._post.give(key, {layer.owner: flat}, rows=None)
            return
        users = self._users(index)
        taken = (yield Take(key, tuple(users))) if users else {}
        # In the order of partitions: the owner's own share has its place in it.
        total = np.zeros(sum(a.size for a in slots), self.dtype)
        own = np.concatenate([a.ravel() for a in slots])
        for p in range(self.cut.count):
            if p in taken:
                np.add(total, taken[p], out=total)
            elif p == self.partition and layer.kernel is not None:
                np.add(total, own, out=total)
        split_into(total, slots)

    def _backward_sums(
        self, index: int, views: list[Array], out: Array, *, delta: Array, slots: list[Array]
    ) -> Pass:
        layer, key, owned = self._layers[index], Key("deltas", index), self.cut.owned[index + 1]
        n, mine = delta.shape[-1], owned[self.partition]
        if mine:
            layer.finish.pull_back(out, delta, d_bias=slots[-1])
            receivers = [p for p in self._others if self.cut.owned[index][p]]
            if receivers:
                yield self._post.give(key, dict.fromkeys(receivers, delta), rows=n)
        if layer.by_inputs is None:
            return self._deltas[index].of(n)
        senders = tuple(p for p in self._others if owned[p])
        whole = layer.all_deltas.of(n)
        if mine:
            whole[mine.slices()] = delta
        if senders:
            taken = yield Take(key, senders)
            for p in senders:
                whole[owned[p].slices()] = taken[p].reshape(len(owned[p]), n)
        dx = self._deltas[index].of(n) if index else None
        layer.by_inputs.backward(views[0], layer.x, whole, d_weight=slots[0], dx=dx)
        return dx if dx is not None else whole


def box_of_rows(x: Array, shape: tuple[int, ...], box: Box) -> Array:
    """The box of a batch (features, n) of inputs of `shape`: (..., n), contiguous."""
    whole = x.reshape(*shape, x.shape[-1])
    return np.ascontiguousarray(whole[box.slices()])
