"""Local contrast normalisation: subtractive, then divisive, over a window and across maps.

Rules of dbctl/model/layers/dense.py. Source: K. Jarrett, K. Kavukcuoglu, M. Ranzato, Y. LeCun 2009,
section 2 (N layer); Q. V. Le et al. 2012, section 3. Paper A, section 5 uses it. Theory of
operation: a node divides what is left of its input by a deviation over its window, and each value
in that window had a mean over a window of its own subtracted: it sees twice the radius, all maps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt

from dbctl.model.tensor import LayerTensor
from dbctl.region import Box


@dataclass(frozen=True, kw_only=True)
class LcnSpec:
    """`window`: its side, odd; `floor`: the least deviation that is divided by."""

    tensor_axes: ClassVar[tuple[int, ...]] = ()

    type: Literal["lcn"] = "lcn"
    window: Annotated[int, Ge(1)] = 9
    floor: Annotated[float, Gt(0)] = 0.01

    def fault(self, inputs: tuple[int, ...]) -> tuple[str, str] | None:
        """(key, message) where the layer cannot stand on nodes of shape `inputs`."""
        if self.window % 2 == 0:
            near = f"{self.window - 1} or {self.window + 1}"
            return "window", f"expected an odd number, found {self.window}; write {near}"
        if len(inputs) != 3:
            return "type", f"expected rows, columns and maps below lcn, found {list(inputs)}"
        return None

    def output_shape(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """As `inputs`: at borders the window is cut."""
        return inputs

    def centred_box(self, inputs: tuple[int, ...], box: Box) -> Box:
        """Where a mean must be subtracted for `box`: a radius further, all maps."""
        return self._grown(inputs, box, self.window // 2)

    def input_box(self, inputs: tuple[int, ...], box: Box) -> Box:
        """The input nodes that the output nodes `box` see: two radii further, all maps."""
        return self._grown(inputs, box, self.window // 2 * 2)

    def flops(self, inputs: tuple[int, ...], box: Box) -> int:
        """Floating-point operations of one example forward, borders not considered.

        A window is a product by rows and one by columns of what is summed over the maps.
        """
        centred, seen = len(self.centred_box(inputs, box)), len(self.input_box(inputs, box))
        weighted = 4 * self.window * (centred + len(box)) // inputs[2]
        return seen + 3 * centred + len(box) + weighted

    def tensors(self, inputs: tuple[int, ...], box: Box) -> tuple[LayerTensor, ...]:
        """None."""
        return ()

    @staticmethod
    def _grown(inputs: tuple[int, ...], box: Box, radius: int) -> Box:
        if not box:
            return Box((0,) * 3, (0,) * 3)
        (top, left, _), (bottom, right, _) = box.starts, box.stops
        rows, columns, maps = inputs
        return Box(
            (max(0, top - radius), max(0, left - radius), 0),
            (min(rows, bottom + radius), min(columns, right + radius), maps),
        )
