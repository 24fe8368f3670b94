"""Convolution: every position has the same filters.

Rules of dbctl/model/layers/dense.py; windows and boxes are those of filters.py. As in torch it is a
cross-correlation: the kernel is not flipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from dbctl.model.layers.filters import FilterSpec
from dbctl.model.tensor import Initial, LayerTensor
from dbctl.region import Box


@dataclass(frozen=True, kw_only=True)
class Conv2dSpec(FilterSpec):
    """A convolution with one bias a map."""

    # The axes of the layer's nodes that are the first axes of each of its tensors.
    tensor_axes: ClassVar[tuple[int, ...]] = (2,)

    type: Literal["conv2d"] = "conv2d"

    def tensors(self, inputs: tuple[int, ...], box: Box) -> tuple[LayerTensor, ...]:
        """Weight (maps, in_maps, kernel, kernel), as in torch, and bias (maps,) of the box's maps.

        All boxes with the same maps share them.
        """
        maps = box.shape[2]
        return (
            LayerTensor("weight", (maps, inputs[2], *self.kernels), self.weight_initial(inputs)),
            LayerTensor("bias", (maps,), Initial("zero")),
        )
