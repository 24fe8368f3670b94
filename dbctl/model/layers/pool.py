"""Pooling layers: each map on its own, a window of positions to one node.

Rules of dbctl/model/layers/dense.py. Windows are valid only: rows and columns that are left over at
the lower and right border, fewer than a stride, are seen by no node. Theory of operation: output
row i sees input rows i x stride to i x stride + size, columns likewise, and the same map.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from dbctl.model.layers.window import Axis, pair
from dbctl.model.tensor import LayerTensor
from dbctl.region import Box

Count = Annotated[int, Ge(1)]


@dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """`kind`: the greatest, the mean, or the root of the sum of squares; `stride` None: as size."""

    tensor_axes: ClassVar[tuple[int, ...]] = ()

    type: Literal["pool"] = "pool"
    kind: Literal["max", "mean", "l2"]
    size: Count | tuple[Count, Count] = 2
    stride: Count | tuple[Count, Count] | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows and columns of a window."""
        return pair(self.size)

    @property
    def strides(self) -> tuple[int, int]:
        """Rows and columns between windows."""
        return self.sizes if self.stride is None else pair(self.stride)

    def axes(self, inputs: tuple[int, ...]) -> tuple[Axis, Axis]:
        """The windows by rows and by columns."""
        rows, columns = (
            Axis(below, size, stride, "valid")
            for below, size, stride in zip(inputs[:2], self.sizes, self.strides, strict=True)
        )
        return rows, columns

    def fault(self, inputs: tuple[int, ...]) -> tuple[str, str] | None:
        """(key, message) where the layer cannot stand on nodes of shape `inputs`."""
        if len(inputs) != 3:
            return "type", f"expected rows, columns and maps below pool, found {list(inputs)}"
        for side, axis in zip(("rows", "columns"), self.axes(inputs), strict=True):
            if not axis.fits:
                message = f"expected a window within the {axis.inputs} {side} below, found"
                sum_ = f"({axis.inputs} - {axis.kernel}) / {axis.stride} + 1 is less than 1"
                return "size", f"{message} {axis.kernel}: {sum_}"
        return None

    def output_shape(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """(rows, columns, maps): as many windows as lie wholly inside `inputs`."""
        rows, columns = self.axes(inputs)
        return (rows.outputs, columns.outputs, inputs[2])

    def input_box(self, inputs: tuple[int, ...], box: Box) -> Box:
        """From the first window's first position to the last one's last; the maps of `box`."""
        if not box:
            return Box((0,) * 3, (0,) * 3)
        rows, columns = self.axes(inputs)
        top, bottom = rows.seen(box.starts[0], box.stops[0])
        left, right = columns.seen(box.starts[1], box.stops[1])
        return Box((top, left, box.starts[2]), (bottom, right, box.stops[2]))

    def flops(self, inputs: tuple[int, ...], box: Box) -> int:
        """Operations of one example forward: one for each position of each window."""
        rows, columns = self.sizes
        return len(box) * rows * columns

    def tensors(self, inputs: tuple[int, ...], box: Box) -> tuple[LayerTensor, ...]:
        """None."""
        return ()
