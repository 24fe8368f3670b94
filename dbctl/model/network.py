"""Networks: the shapes of their nodes and the flat layout of their parameters.

Rules of this file: integers only, no numpy (dbctl/model/passes.py computes). Theory of operation:
a network is a chain of layers; its parameters are one flat vector, layer by layer, each layer's
tensors in the order its spec gives them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Annotated, Literal

from annotated_types import Ge, MinLen

from dbctl.model.layers.conv2d import Conv2dSpec
from dbctl.model.layers.dense import DenseSpec
from dbctl.model.layers.dropout import DropoutSpec
from dbctl.model.layers.lcn import LcnSpec
from dbctl.model.layers.local2d import Local2dSpec
from dbctl.model.layers.pool import PoolSpec
from dbctl.model.tensor import Tensor
from dbctl.region import Box, Range

# A union with one member a layer family.
LayerSpec = DenseSpec | Conv2dSpec | Local2dSpec | PoolSpec | LcnSpec | DropoutSpec
LAYER_SPECS = {
    "dense": DenseSpec,
    "conv2d": Conv2dSpec,
    "local2d": Local2dSpec,
    "pool": PoolSpec,
    "lcn": LcnSpec,
    "dropout": DropoutSpec,
}

LossName = Literal["softmax", "logistic", "squared"]


@dataclass(frozen=True, kw_only=True)
class NetworkSpec:
    """`input` is (height, width, channels) or (features,)."""

    input: Annotated[tuple[Annotated[int, Ge(1)], ...], MinLen(1)]
    layers: Annotated[tuple[LayerSpec, ...], MinLen(1)]
    loss: LossName


def node_shapes(spec: NetworkSpec) -> tuple[tuple[int, ...], ...]:
    """The input's shape, then each layer's: one more than there are layers."""
    shapes = [tuple(spec.input)]
    for layer in spec.layers:
        shapes.append(layer.output_shape(shapes[-1]))
    return tuple(shapes)


def tensors(spec: NetworkSpec) -> tuple[Tensor, ...]:
    """The tensors of the whole network in the order of the flat vector, which they cover once."""
    found: list[Tensor] = []
    start = 0
    shapes = node_shapes(spec)
    for index, layer in enumerate(spec.layers):
        for part in layer.tensors(shapes[index], Box.whole(shapes[index + 1])):
            place = Range(start, start + prod(part.shape))
            name = f"layers.{index}.{part.kind}"
            found.append(Tensor(name, part.kind, part.shape, place, part.initial))
            start = place.stop
    return tuple(found)


def n_parameters(spec: NetworkSpec) -> int:
    all_tensors = tensors(spec)
    return all_tensors[-1].range.stop if all_tensors else 0
