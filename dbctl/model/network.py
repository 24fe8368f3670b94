"""Networks: shapes, the flat layout of parameters, initial values, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, MinLen

from dbctl.model.layers.dense import DenseSpec

LayerSpec = DenseSpec  # a union, one member a layer family
LAYER_SPECS = {"dense": DenseSpec}

LossName = Literal["softmax", "logistic", "squared"]


@dataclass(frozen=True, kw_only=True)
class NetworkSpec:
    """`input` is (height, width, channels) or (features,)."""

    input: Annotated[tuple[Annotated[int, Ge(1)], ...], MinLen(1)]
    layers: Annotated[tuple[LayerSpec, ...], MinLen(1)]
    loss: LossName
