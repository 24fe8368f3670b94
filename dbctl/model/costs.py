"""What a cut network costs: operations, parameters, nodes, numbers sent, by layer and partition.

Rules of this file: integers only, no numpy; counts are exact and of one example of training, both
phases, unless they say mini-batch. Paper A, section 3: which nodes have their state sent, and who
is waited for. Theory of operation: everything follows from who owns and who needs which box
(model/cut.py). Backward, a layer with tensors costs two more products of the size of the forward
one, by its weights and by its inputs; the first layer has no gradient by its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from dbctl.model.cut import NetworkCut
from dbctl.region import Box

ITEM_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one layer costs one partition.

    Sent to other partitions: `states`, node states forward and gradients by them backward; `sums`,
    the partial sums of a layer cut by its inputs and the gradients by its outputs; `shared`, shared
    weights and their gradients, of a mini-batch whatever its rows. `messages` of a mini-batch.
    """

    nodes: int = 0
    parameters: int = 0
    flops: int = 0
    states: int = 0
    sums: int = 0
    shared: int = 0
    messages: int = 0

    @property
    def bytes_sent(self) -> int:
        """Of one example: shared weights do not count, they are sent once a mini-batch."""
        return ITEM_BYTES * (self.states + self.sums)


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """`shares[partition]`. `rounds`: how often in a mini-batch somebody waits for another."""

    name: str
    shares: tuple[Share, ...]
    rounds: int

    def total(self, figure: str) -> int:
        return sum(getattr(share, figure) for share in self.shares)

    def extremes(self, figure: str) -> tuple[int, int]:
        """The least and the greatest of the partitions."""
        figures = [getattr(share, figure) for share in self.shares]
        return min(figures), max(figures)


def costs_of(cut: NetworkCut) -> tuple[LayerCosts, ...]:
    """Layer by layer, and last the loss, which has no nodes of its own."""
    layers = range(len(cut.spec.layers))
    return (*(_layer(cut, layer) for layer in layers), _loss(cut))


def imbalance(costs: tuple[LayerCosts, ...]) -> float:
    """The operations of the partition that has most, over the mean."""
    parts = range(len(costs[0].shares))
    totals = [sum(layer.shares[p].flops for layer in costs) for p in parts]
    return max(totals) * len(totals) / max(1, sum(totals))


def nodes_kept(cut: NetworkCut, partition: int) -> int:
    """Node states of one example that a partition has in memory in a forward pass.

    A backward pass has as many gradients by them besides. The network's inputs do not count.
    """
    kept = len(cut.owned[-1][partition])
    for layer in range(1, len(cut.spec.layers)):
        own, need = cut.owned[layer][partition], cut.needs(layer, partition)
        # What is owned is computed among what is needed where all of it is needed.
        in_place = bool(own) and own.intersection(need) == own
        kept += len(need) if in_place else len(own) + len(need)
    return kept


def _layer(cut: NetworkCut, layer: int) -> LayerCosts:
    parts, spec = range(cut.count), cut.spec.layers[layer]
    parameters = [0] * cut.count
    for piece in cut.pieces:
        if piece.layer == layer:
            parameters[piece.partition] += len(piece.range)
    sent = _sums(cut, layer) if cut.ways[layer] == "inputs" else _states(cut, layer)
    figure = "sums" if cut.ways[layer] == "inputs" else "states"
    users, size = _users(cut, layer), _shared_size(cut, layer)
    shares = tuple(
        Share(
            nodes=len(cut.owned[layer + 1][p]),
            parameters=parameters[p],
            flops=_operations(cut, layer, p),
            shared=users[p] * size,
            messages=len(sent[p]) + users[p],
            **{figure: sum(sent[p])},
        )
        for p in parts
    )
    waits = sum(any(column) for column in (sent, users))
    return LayerCosts(name=f"layers.{layer} {spec.type}", shares=shares, rounds=2 * waits)


def _operations(cut: NetworkCut, layer: int, partition: int) -> int:
    spec, shape = cut.spec.layers[layer], cut.shapes[layer]
    if cut.ways[layer] == "inputs":
        # All outputs, of the own inputs only.
        outputs = Box.whole(cut.shapes[layer + 1])
        forward = spec.flops(cut.owned[layer][partition].shape, outputs)
    else:
        box = cut.owned[layer + 1][partition]
        forward = spec.flops(shape, box) if box else 0
    has_tensors = bool(spec.tensors(shape, cut.owned[layer + 1][partition]))
    return forward * (1 + has_tensors + (layer > 0))


def _states(cut: NetworkCut, layer: int) -> list[list[int]]:
    """Each partition's messages by size: own nodes up to who needs them, gradients back."""
    sent: list[list[int]] = [[] for _ in range(cut.count)]
    if layer == 0:  # the inputs come from the data
        return sent
    needs = [cut.needs(layer, p) for p in range(cut.count)]
    for owner, own in enumerate(cut.owned[layer]):
        for user, need in enumerate(needs):
            size = len(own.intersection(need)) if owner != user else 0
            if size:
                sent[owner].append(size)
                sent[user].append(size)
    return sent


def _sums(cut: NetworkCut, layer: int) -> list[list[int]]:
    """The same of a layer cut by its inputs: partial sums up, gradients by its outputs down."""
    sent: list[list[int]] = [[] for _ in range(cut.count)]
    for summing, inputs in enumerate(cut.owned[layer]):
        for owner, outputs in enumerate(cut.owned[layer + 1]):
            if owner != summing and inputs and outputs:
                sent[summing].append(len(outputs))
                sent[owner].append(len(outputs))
    return sent


def _shared_size(cut: NetworkCut, layer: int) -> int:
    """The count of a layer's weights that all partitions share."""
    box = next(box for box in cut.owned[layer + 1] if box)
    found = cut.spec.layers[layer].tensors(cut.shapes[layer], box)
    return sum(prod(tensor.shape) for tensor in found)


def _users(cut: NetworkCut, layer: int) -> list[int]:
    """How often each partition sends the layer's shared weights, or its gradients by them."""
    owner, boxes = cut.owner_of_shared(layer), cut.owned[layer + 1]
    others = sum(map(bool, boxes)) - 1
    if owner is None:
        return [0] * cut.count
    return [others if p == owner else int(bool(box)) for p, box in enumerate(boxes)]


def _loss(cut: NetworkCut) -> LayerCosts:
    """Softmax: the greatest output, then a sum and the label's output, of each row (part_loss)."""
    others = cut.count - 1
    softmax = cut.spec.loss == "softmax" and others > 0
    shares = tuple(
        Share(sums=3 * others, messages=2 * others) if softmax and box else Share()
        for box in cut.owned[-1]
    )
    return LayerCosts(name=f"loss {cut.spec.loss}", shares=shares, rounds=2 * softmax)
