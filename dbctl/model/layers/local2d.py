"""Locally connected layers with untied weights: every position has filters of its own.

Rules of dbctl/model/layers/dense.py; windows and boxes are those of filters.py. Source: paper A,
section 3 and the vision network of section 5; Q. V. Le et al. 2012, section 3. Nothing is shared,
so boxes of positions have parameters of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from dbctl.model.layers.filters import FilterSpec
from dbctl.model.tensor import Initial, LayerTensor
from dbctl.region import Box


@dataclass(frozen=True, kw_only=True)
class Local2dSpec(FilterSpec):
    """A locally connected layer; its biases are untied too."""

    # The axes of the layer's nodes that are the first axes of each of its tensors.
    tensor_axes: ClassVar[tuple[int, ...]] = (0, 1, 2)

    type: Literal["local2d"] = "local2d"

    def tensors(self, inputs: tuple[int, ...], box: Box) -> tuple[LayerTensor, ...]:
        """Weight (rows, columns, maps, kernel, kernel, in_maps) and bias (rows, columns, maps).

        Only those of the box.
        """
        weight = (*box.shape, *self.kernels, inputs[2])
        return (
            LayerTensor("weight", weight, self.weight_initial(inputs)),
            LayerTensor("bias", box.shape, Initial("zero")),
        )
