"""One partition's share of a network's passes: forward, loss and gradient as a generator.

Rules of this file: knows no process and no message; it yields what it gives to and takes from the
other partitions (model/exchange.py). Arrays are batch innermost, buffers made once. Contributions
of several partitions are added to the own one in the order of partitions, so that a result does not
depend on who was first.

Theory of operation (model/cut.py says who owns what). Forward, a layer cut by its outputs: inputs
that others own are taken, the own box is computed, and given to whoever needs it. A layer cut by
its inputs: partial sums of all outputs from the own inputs, given to the owners of the outputs, who
add them. Backward is the transpose. Shared weights come from their owner and their gradients go
back to it.

What others wait for is computed and given first, and what needs nothing of theirs while it is on
its way: shared weights before all else, partial sums of others' outputs before those of the own,
gradients by inputs before those by weights; partial gradients of shared weights are added up last.

Nodes of a level, and gradients by others' nodes, are sent from where they lie if they are a run of
an array that also holds what others gave (whole rows). Nodes lie unchanged until the layer below
destroys them, going back: by then everybody they were sent to has taken them, because each of those
has given the gradient by them. Gradients by others' nodes, and all nodes of a pass that only
measures, lie unchanged until the next pass.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbctl.model.buffer import Buffer
from dbctl.model.cut import NetworkCut
from dbctl.model.exchange import Exchange, Give, Key, Take
from dbctl.model.kernels.bounds import norm
from dbctl.model.kernels.dense import Dense
from dbctl.model.kernels.dense_inputs import DenseByInputs
from dbctl.model.kernels.dropout import Dropout
from dbctl.model.layers.dropout import Draw
from dbctl.model.part_layer import (
    Crossing,
    Lendable,
    MakeOutbox,
    PartLayer,
    Post,
    add_all,
    views_of,
)
from dbctl.model.part_loss import PartLoss
from dbctl.region import Box

Array = NDArray[Any]
Taken = dict[int, Array]
Pass = Generator[Exchange, Taken, Any]
Tensors = list[list[Array]]


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
        self.bound = inf  # no element of the last gradient is larger
        self._batch_size = batch_size
        self._post = Post(outbox, batch_size=batch_size, dtype=dtype)
        self._layers = [
            PartLayer(cut, index, partition, batch_size=batch_size, dtype=dtype, post=self._post)
            for index in range(len(cut.spec.layers))
        ]
        own = [owned[partition].shape for owned in cut.owned]
        self._outputs = [Buffer(shape, batch_size, dtype=dtype) for shape in own]
        self._deltas = [Buffer(shape, batch_size, dtype=dtype) for shape in own]
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
        return _quiet(self._gradient(parameters, x, targets, out=out, draw=draw))

    def measure(self, parameters: Array, x: Array, targets: Array) -> Pass:
        """Returns a PartMeasurement of the rows: the same on every partition but for its loss."""
        return _quiet(self._measure(parameters, x, targets))

    def _gradient(
        self, parameters: Array, x: Array, targets: Array, *, out: Array, draw: Draw | None
    ) -> Pass:
        views, slots = self._views(parameters), self._views(out)
        nodes = yield from self._forward(parameters, views, x, draw=draw)
        delta = self._deltas[-1].rows(x.shape[-1])
        np.copyto(delta, nodes[-1])
        loss_sum = yield from self._loss.gradient(delta, targets)
        bound = yield from self._backward(views, nodes, delta=delta, slots=slots)
        self.bound = bound + (yield from self._gather_shared(out))
        return loss_sum

    def _measure(self, parameters: Array, x: Array, targets: Array) -> Pass:
        nodes = yield from self._forward(parameters, self._views(parameters), x, draw=None)
        return (yield from self._loss.measure(nodes[-1], targets))

    def _views(self, flat: Array) -> Tensors:
        """The flat vector as each layer's tensors; none where another partition holds them."""
        assert flat.shape == (len(self.span),), f"{flat.shape}, not ({len(self.span)},)"
        assert flat.dtype == self.dtype, f"{flat.dtype}, not {self.dtype}"
        return [views_of(flat, layer.tensors) for layer in self._layers]

    # -------------------------------------------------------------------------------- forward

    def _forward(self, parameters: Array, views: Tensors, x: Array, *, draw: Draw | None) -> Pass:
        n = x.shape[-1]
        assert x.shape[:-1] == self.input_box.shape, f"{x.shape}, not {self.input_box.shape}"
        assert 1 <= n <= self._batch_size, f"{n} rows for a batch of {self._batch_size}"
        yield from self._give_shared(parameters)
        nodes = [x]
        for index, layer in enumerate(self._layers):
            out = self._room(index, n)
            if layer.by_inputs is not None:
                layer.x = nodes[-1]
                yield from self._sum(index, layer.by_inputs, views[index], own=nodes[-1], out=out)
            else:
                layer.x = yield from self._needed(index, nodes[-1])
                layer.weights = yield from self._weights(index, views[index])
                if isinstance(layer.kernel, Dropout):
                    layer.kernel.draw(draw.label(index) if draw else None, n)
                if layer.kernel is not None:
                    layer.kernel.forward(layer.weights, layer.x, out)
            nodes.append(out)
        return nodes

    def _room(self, index: int, n: int) -> Array:
        """Where a layer's outputs are written: among the next one's inputs, if all are needed."""
        if index + 1 < len(self._layers):
            above = self._layers[index + 1]
            if above.takes and above.own.in_place:
                return above.inputs.rows(n)[above.own.in_needed]
        return self._outputs[index + 1].rows(n)

    def _needed(self, index: int, own: Array) -> Pass:
        """A layer's inputs, own and others', in one array; others are given theirs."""
        layer, n = self._layers[index], own.shape[-1]
        if index == 0:
            return own
        key = Key("states", index)
        if layer.sends:
            yield self._give(key, layer.sends, own, memory=layer.inputs)
        if layer.is_local:
            return own
        whole = layer.inputs.rows(n)
        if not layer.own.in_place:  # else it was written there
            whole[layer.own.in_needed] = own[layer.own.in_owned]
        if layer.takes:
            taken = yield Take(key, tuple(layer.takes))
            for p, box in layer.takes.items():
                whole[box.place] = taken[p].reshape(*box.shape, n)
        return whole

    def _give(
        self, key: Key, boxes: dict[int, Crossing], array: Array, *, memory: Lendable
    ) -> Give:
        """Boxes of `array`: as runs of the `memory` it lies in, or copied."""
        n = array.shape[-1]
        for p, box in boxes.items():
            if memory.outbox is not None and box.run is not None:
                self._post.lend(p, memory.outbox, box.run, rows=n)
            else:
                room = self._post.room(key, (p,), (*box.shape, n), rows=n)
                np.copyto(room, array[box.place])
        return self._post.give(key)

    def _give_shared(self, parameters: Array) -> Pass:
        """Shared weights are given by their owner at the start of each mini-batch."""
        for index, layer in enumerate(self._layers):
            shared = layer.shared
            if shared is not None and shared.owner == self.partition and shared.users:
                flat = parameters[shared.flat.slice()]
                yield self._post.send(Key("weights", index), shared.users, flat, rows=None)

    def _weights(self, index: int, own: list[Array]) -> Pass:
        shared = self._layers[index].shared
        if shared is None or self.partition not in shared.users:
            return own
        taken = yield Take(Key("weights", index), (shared.owner,))
        return shared.views(taken[shared.owner])

    def _sum(
        self, index: int, layer: DenseByInputs, views: list[Array], *, own: Array, out: Array
    ) -> Pass:
        """The outputs of a layer cut by its inputs, of everybody's partial sums."""
        key, n = Key("sums", index), own.shape[-1]
        others = [p for p in layer.units if p != self.partition]
        if layer.has_inputs and others:
            for p in others:
                units = layer.units[p]
                shape = (units.stop - units.start, n)
                room = self._post.room(key, (p,), shape, rows=n)
                layer.partial(views[0], own, of=p, out=room)
            yield self._post.give(key)
        if not layer.has_outputs:
            return
        if layer.has_inputs:
            layer.partial(views[0], own, of=self.partition, out=out)
        taken = (yield Take(key, layer.multipliers)) if layer.multipliers else {}
        add_all(out, (taken[p] for p in layer.multipliers), has_own=layer.has_inputs)
        layer.finish(views[-1], out)

    # ------------------------------------------------------------------------------- backward

    def _backward(
        self, views: Tensors, nodes: Sequence[Array], *, delta: Array, slots: Tensors
    ) -> Pass:
        """Returns a bound of the gradients by tensors that are not shared."""
        bound = 0.0
        for index in reversed(range(len(self._layers))):
            layer, out, n = self._layers[index], nodes[index + 1], delta.shape[-1]
            if layer.by_inputs is not None:
                delta, known = yield from self._split_sum(
                    index, views[index], out, delta=delta, slots=slots[index]
                )
                bound += known
                continue
            dx = layer.dx.rows(n) if index else None
            gradients = slots[index] or (layer.shared.gradients if layer.shared else [])
            kernel = layer.kernel
            if isinstance(kernel, Dense):
                kernel.input_gradient(layer.weights, out, delta, dx=dx)
                yield from self._give_back(index, dx)
                bound += kernel.weight_gradient(layer.x, delta, gradients)
            elif kernel is not None:
                known = kernel.backward(
                    layer.weights, layer.x, out, delta=delta, gradients=gradients, dx=dx
                )
                yield from self._give_back(index, dx)
                if layer.shared is None:
                    bound += sum(map(norm, gradients)) if known is None else known
            yield from self._give_shares(index)
            if index:
                delta = yield from self._take_back(index, layer.dx.rows(n))
        return bound

    def _give_back(self, index: int, dx: Array | None) -> Pass:
        """Gradients by inputs go to the owners of the inputs."""
        layer, key = self._layers[index], Key("back", index)
        if dx is None or not layer.takes:
            return
        yield self._give(key, layer.takes, dx, memory=layer.dx)

    def _take_back(self, index: int, dx: Array) -> Pass:
        """The gradient by our nodes of the level below: our own share and what others give."""
        layer, n = self._layers[index], dx.shape[-1]
        if layer.own.is_all and not layer.sends:
            return dx
        if layer.own.in_place:
            delta = dx[layer.own.in_needed]
        else:
            delta = self._deltas[index].rows(n)
            delta[...] = 0
            delta[layer.own.in_owned] = dx[layer.own.in_needed]
        if layer.sends:
            taken = yield Take(Key("back", index), tuple(layer.sends))
            for p, box in layer.sends.items():
                part = delta[box.place]
                np.add(part, taken[p].reshape(part.shape), out=part)
        return delta

    def _give_shares(self, index: int) -> Pass:
        """Partial gradients of shared weights go to their owner."""
        shared = self._layers[index].shared
        if shared is not None and self.partition in shared.users:
            key = Key("shares", index)
            yield self._post.send(key, (shared.owner,), shared.flat_gradients, rows=None)

    def _gather_shared(self, out: Array) -> Pass:
        """The owner of shared weights adds up their gradients, from the last layer down.

        Returns a bound of them.
        """
        bound = 0.0
        for index in reversed(range(len(self._layers))):
            shared = self._layers[index].shared
            if shared is None or shared.owner != self.partition:
                continue
            own = out[shared.flat.slice()]
            if shared.users:
                taken = yield Take(Key("shares", index), shared.users)
                add_all(own, (taken[p] for p in shared.users), has_own=True)
            bound += norm(own)
        return bound

    def _split_sum(
        self, index: int, views: list[Array], out: Array, *, delta: Array, slots: list[Array]
    ) -> Pass:
        """Backward of `_sum`: everybody needs the gradients by all sums.

        Returns the gradient by the inputs, and a bound of those by the tensors.
        """
        layer, below = self._layers[index].by_inputs, self._layers[index].x
        assert layer is not None
        key, n, bound = Key("deltas", index), delta.shape[-1], 0.0
        if layer.has_outputs:
            bound += layer.pull_back(out, delta, d_bias=slots[-1])
            if layer.multipliers:
                yield self._post.send(key, layer.multipliers, delta, rows=n)
        dx = self._deltas[index].rows(n)
        if not layer.has_inputs:
            return dx, bound
        deltas = {}
        if layer.has_outputs:
            layer.put(delta, of=self.partition)
            bound += layer.weight_gradient(delta, below, of=self.partition, d_weight=slots[0])
        others = tuple(p for p in layer.units if p != self.partition)
        if others:
            deltas = yield Take(key, others)
        for p in others:
            units = deltas[p].reshape(-1, n)
            layer.put(units, of=p)
            bound += layer.weight_gradient(units, below, of=p, d_weight=slots[0])
        if index:
            layer.input_gradient(views[0], dx)
        return dx, bound


def _quiet(work: Pass) -> Pass:
    """`work`, in which numbers that are not finite raise nothing; nor does that reach others."""
    answer: Any = None
    while True:
        with np.errstate(all="ignore"):
            try:
                item = work.send(answer)
            except StopIteration as end:
                return end.value
        answer = yield item


def box_of_rows(x: Array, shape: tuple[int, ...], box: Box) -> Array:
    """The box of a batch (features, n) of inputs of `shape`: (..., n), contiguous."""
    whole = x.reshape(*shape, x.shape[-1])
    return np.ascontiguousarray(whole[box.slices()])
