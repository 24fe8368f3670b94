"""Dropout: in training each node is 0 with a probability, and the others are scaled up.

Rules of dbctl/model/layers/dense.py. Source: G. Hinton et al. 2012, *Improving neural networks by
preventing co-adaptation of feature detectors*; scaling in training instead of halving weights in
use is today's usual form. Theory of operation: which nodes are 0 is a function of the seed and of
where in the training a mini-batch stands, so nothing random is stored, and a replica that is cut
or resumed drops the same nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt, Lt

from dbctl.model.tensor import LayerTensor
from dbctl.region import Box


@dataclass(frozen=True, slots=True)
class Draw:
    """Which mini-batch is trained on: `step` counts the replica's own, from 0, over resumes too."""

    seed: int
    replica: int
    step: int

    def label(self, layer: int) -> str:
        """The name of the random words of layer `layer` (its index in the file)."""
        return f"{self.seed}/dropout/{self.replica}/{self.step}/layers.{layer}"


@dataclass(frozen=True, kw_only=True)
class DropoutSpec:
    """`rate`: the probability that a node is 0; the others are divided by 1 - rate."""

    tensor_axes: ClassVar[tuple[int, ...]] = ()

    type: Literal["dropout"] = "dropout"
    rate: Annotated[float, Gt(0), Lt(1)] = 0.5

    def fault(self, inputs: tuple[int, ...]) -> tuple[str, str] | None:
        """(key, message) where the layer cannot stand on nodes of shape `inputs`: never."""
        return None

    def output_shape(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """As `inputs`."""
        return inputs

    def input_box(self, inputs: tuple[int, ...], box: Box) -> Box:
        """The input nodes that the output nodes `box` see: the same."""
        return box

    def flops(self, inputs: tuple[int, ...], box: Box) -> int:
        """Floating-point operations of one example forward."""
        return len(box)

    def tensors(self, inputs: tuple[int, ...], box: Box) -> tuple[LayerTensor, ...]:
        """None."""
        return ()
