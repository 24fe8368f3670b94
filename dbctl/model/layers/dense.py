"""Dense layers: every output node sees every input node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

Activation = Literal["sigmoid", "tanh", "relu", "linear"]


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """`init`: glorot, he or a uniform half-width; None: he for relu, else glorot. Biases are 0."""

    type: Literal["dense"] = "dense"
    units: Annotated[int, Ge(1)]
    activation: Activation = "linear"
    init: Literal["glorot", "he"] | Annotated[float, Gt(0)] | None = None
