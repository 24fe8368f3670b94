"""Dense layers: every output node sees every input node.

Rules of this package: what a layer *is*, in integers (shapes, boxes, tensors); no numpy. What it
computes is in dbctl/model/kernels, one module a family here and there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt

from dbctl.model.tensor import Initial, LayerTensor, weight_initial
from dbctl.region import Box

Activation = Literal["sigmoid", "tanh", "relu", "linear"]


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """`init`: glorot, he or a uniform half-width; None: he for relu, else glorot. Biases are 0.

    `cut`: how partitions share the layer; None: whichever sends less (model/cut.py).
    """

    # The axes of the layer's nodes that are the first axes of each of its tensors.
    tensor_axes: ClassVar[tuple[int, ...]] = (0,)

    type: Literal["dense"] = "dense"
    units: Annotated[int, Ge(1)]
    activation: Activation = "linear"
    init: Literal["glorot", "he"] | Annotated[float, Gt(0)] | None = None
    cut: Literal["outputs", "inputs"] | None = None

    def fault(self, inputs: tuple[int, ...]) -> tuple[str, str] | None:
        """(key, message) where the layer cannot stand on nodes of shape `inputs`: never."""
        return None

    def output_shape(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the layer's nodes on an input of shape `inputs`: (units,)."""
        return (self.units,)

    def input_box(self, inputs: tuple[int, ...], box: Box) -> Box:
        """The input nodes that the output nodes `box` see: all of them."""
        return Box.whole(inputs)

    def flops(self, inputs: tuple[int, ...], box: Box) -> int:
        """Floating-point operations of one example forward; biases and activations not counted."""
        return 2 * len(box) * prod(inputs)

    def tensors(self, inputs: tuple[int, ...], box: Box) -> tuple[LayerTensor, ...]:
        """Weight (units, inputs), as in torch, and bias (units,), of the output nodes `box`.

        Inputs with height and width flatten height, width, channels. The initial values are those
        of the whole layer, whatever the box.
        """
        (units,) = box.shape
        n_inputs = prod(inputs)
        init = self.init or ("he" if self.activation == "relu" else "glorot")
        initial = weight_initial(init, fan_in=n_inputs, fan_out=self.units)
        return (
            LayerTensor("weight", (units, n_inputs), initial),
            LayerTensor("bias", (units,), Initial("zero")),
        )
