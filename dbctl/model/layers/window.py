"""Windows that slide over one axis of a layer's input, in integers.

Rules of this file: one axis, no boxes of it. Theory of operation: output i sees the inputs from
i x stride - before to i x stride - before + kernel, of which those outside the input are zeros.

    valid   before = 0                      outputs = (inputs - kernel) // stride + 1
    same    outputs = ceil(inputs / stride)
            padding = max(0, (outputs - 1) stride + kernel - inputs), before = padding // 2

`same` is TensorFlow's for every stride (the odd zero comes after the input), and for stride 1 also
PyTorch's, which refuses other strides.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Padding = Literal["valid", "same"]


class Axis(NamedTuple):
    """Windows of `kernel` inputs, `stride` apart, over `inputs` of them."""

    inputs: int
    kernel: int
    stride: int
    padding: Padding

    @property
    def fits(self) -> bool:
        """Whether there is an output. With padding same there always is."""
        return self.padding == "same" or self.kernel <= self.inputs

    @property
    def outputs(self) -> int:
        if self.padding == "same":
            return -(-self.inputs // self.stride)
        return (self.inputs - self.kernel) // self.stride + 1

    @property
    def before(self) -> int:
        """How many zeros stand before the input."""
        if self.padding == "valid":
            return 0
        return max(0, (self.outputs - 1) * self.stride + self.kernel - self.inputs) // 2

    def seen(self, start: int, stop: int) -> tuple[int, int]:
        """The inputs from the first that outputs `start` to `stop` see to their last."""
        if start == stop:
            return 0, 0
        first = start * self.stride - self.before
        last = (stop - 1) * self.stride - self.before + self.kernel
        return max(0, first), min(self.inputs, last)

    def zeros_before(self, start: int) -> int:
        """How many of the inputs that output `start` sees lie before the input's first."""
        return max(0, self.before - start * self.stride)


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    """(rows, columns) of a key that takes one number for both."""
    return (value, value) if isinstance(value, int) else value
