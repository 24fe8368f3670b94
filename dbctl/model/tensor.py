"""Tensors of parameters: what each is called, where it lies, and how it begins.

Rules of this file: integers and names only, no numpy, so that plans, validation and `--help` stay
light. Arrays of initial values are made in dbctl/model/initial.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Literal

from dbctl.region import Range

Kind = Literal["weight", "bias"]
InitialName = Literal["glorot", "he"]


@dataclass(frozen=True, slots=True)
class Initial:
    """How elements are drawn: zeros; uniform in +-scale; normal with mean 0 and deviation scale."""

    distribution: Literal["zero", "uniform", "normal"]
    scale: float = 0.0


def weight_initial(init: InitialName | float, *, fan_in: int, fan_out: int) -> Initial:
    """Glorot and Bengio 2010, equation 16 (uniform); He et al. 2015, equation 10 (normal).

    A number is the half-width of a uniform distribution.
    """
    if init == "glorot":
        return Initial("uniform", sqrt(6 / (fan_in + fan_out)))
    if init == "he":
        return Initial("normal", sqrt(2 / fan_in))
    return Initial("uniform", float(init))


@dataclass(frozen=True, slots=True)
class LayerTensor:
    """One tensor of a layer, or of a box of its nodes."""

    kind: Kind
    shape: tuple[int, ...]
    initial: Initial


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a network: `range` is its place in the flat parameter vector, C order."""

    name: str  # layers.<index in the file>.<kind>
    kind: Kind
    shape: tuple[int, ...]
    range: Range
    initial: Initial

    def __str__(self) -> str:
        return f"{self.name} {self.shape} at {self.range}"
