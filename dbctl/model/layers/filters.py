"""What layers of filters have in common: a window of all maps below to each node.

Rules of dbctl/model/layers/dense.py. Nodes are (rows, columns, maps). Theory of operation: a node
sees the same window of rows and columns in all maps of its input; which windows there are does not
depend on whether the filters' weights are shared (conv2d.py) or not (local2d.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from dbctl.model.layers.dense import Activation
from dbctl.model.layers.window import Axis, Padding, pair
from dbctl.model.tensor import Initial, weight_initial
from dbctl.region import Box

Count = Annotated[int, Ge(1)]


@dataclass(frozen=True, kw_only=True)
class FilterSpec:
    """`kernel` and `stride`: rows and columns, or one number for both. `init` as dense."""

    type: str
    maps: Count
    kernel: Count | tuple[Count, Count]
    stride: Count | tuple[Count, Count] = 1
    padding: Padding = "valid"
    activation: Activation = "linear"
    init: Literal["glorot", "he"] | Annotated[float, Gt(0)] | None = None

    @property
    def kernels(self) -> tuple[int, int]:
        """Rows and columns of a filter."""
        return pair(self.kernel)

    @property
    def strides(self) -> tuple[int, int]:
        """Rows and columns between the windows of neighbours."""
        return pair(self.stride)

    def axes(self, inputs: tuple[int, ...]) -> tuple[Axis, Axis]:
        """The windows by rows and by columns."""
        rows, columns = (
            Axis(size, kernel, stride, self.padding)
            for size, kernel, stride in zip(inputs[:2], self.kernels, self.strides, strict=True)
        )
        return rows, columns

    def fault(self, inputs: tuple[int, ...]) -> tuple[str, str] | None:
        """(key, message) where the layer cannot stand on nodes of shape `inputs`."""
        if len(inputs) != 3:
            return (
                "type",
                f"expected rows, columns and maps below {self.type}, found {list(inputs)}",
            )
        for side, axis in zip(("rows", "columns"), self.axes(inputs), strict=True):
            if not axis.fits:
                message = f"expected a kernel within the {axis.inputs} {side} below, found"
                sum_ = f"({axis.inputs} - {axis.kernel}) / {axis.stride} + 1 is less than 1"
                return "kernel", f"{message} {axis.kernel}: {sum_}; or use padding: same"
        return None

    def output_shape(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """(rows, columns, maps)."""
        rows, columns = self.axes(inputs)
        return (rows.outputs, columns.outputs, self.maps)

    def input_box(self, inputs: tuple[int, ...], box: Box) -> Box:
        """The receptive field of the output nodes `box`, as far as it lies in the input."""
        if not box:
            return Box((0,) * 3, (0,) * 3)
        sides = list(box.sides())[:2]
        (top, bottom), (left, right) = (
            axis.seen(start, stop)
            for axis, (start, stop) in zip(self.axes(inputs), sides, strict=True)
        )
        return Box((top, left, 0), (bottom, right, inputs[2]))

    def flops(self, inputs: tuple[int, ...], box: Box) -> int:
        """Floating-point operations of one example forward; biases and activations not counted.

        Zeros of the padding count like nodes.
        """
        rows, columns = self.kernels
        return 2 * len(box) * rows * columns * inputs[2]

    def weight_initial(self, inputs: tuple[int, ...]) -> Initial:
        """fan_in is what a node sees, fan_out the same count of maps above, as in torch."""
        rows, columns = self.kernels
        init = self.init or ("he" if self.activation == "relu" else "glorot")
        window = rows * columns
        return weight_initial(init, fan_in=window * inputs[2], fan_out=window * self.maps)
