"""Random layers of filters and boxes of them: what the tests of conv2d and local2d share.

Rules of this file: numpy and hypothesis; a layer is run on a box of its nodes in memory filled with
NaN, so that what is read before it is written shows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from dbctl.model.layers.filters import FilterSpec
from dbctl.model.passes import KERNELS
from dbctl.region import Box

Array = NDArray[Any]
BATCH = 4


class Case(NamedTuple):
    """A layer, the shape of its inputs, and numbers for the whole of it."""

    spec: FilterSpec
    inputs: tuple[int, int, int]
    parameters: list[Array]
    x: Array
    dy: Array

    @property
    def whole(self) -> Box:
        return Box.whole(self.spec.output_shape(self.inputs))


class Result(NamedTuple):
    y: Array
    gradients: list[Array]
    dx: Array | None
    seen: Box


def make_case(spec: FilterSpec, inputs: tuple[int, int, int], *, n: int, seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    whole = Box.whole(spec.output_shape(inputs))
    parameters = [rng.standard_normal(t.shape) for t in spec.tensors(inputs, whole)]
    x = rng.standard_normal((*inputs, n))
    return Case(spec, inputs, parameters, x, rng.standard_normal((*whole.shape, n)))


@st.composite
def cases(draw: Any, family: type[FilterSpec]) -> Case:
    """Kernels and strides that do not fit evenly, kernels larger than inputs where `same`."""
    kernel = draw(st.tuples(st.integers(1, 5), st.integers(1, 4)))
    padding = draw(st.sampled_from(["valid", "same"]))
    least = kernel if padding == "valid" else (1, 1)
    inputs = (draw(st.integers(least[0], 8)), draw(st.integers(least[1], 7)))
    spec = family(
        type=family.type,
        maps=draw(st.integers(1, 4)),
        kernel=kernel,
        stride=draw(st.tuples(st.integers(1, 4), st.integers(1, 3))),
        padding=padding,
        activation=draw(st.sampled_from(["tanh", "linear", "relu"])),
    )
    maps, n, seed = draw(st.tuples(st.integers(1, 3), st.integers(1, BATCH), st.integers(0, 99)))
    return make_case(spec, (*inputs, maps), n=n, seed=seed)


@st.composite
def boxes(draw: Any, whole: Box) -> Box:
    """Any box but an empty one."""
    starts = tuple(draw(st.integers(0, n - 1)) for n in whole.stops)
    ends = zip(starts, whole.stops, strict=True)
    return Box(starts, tuple(draw(st.integers(a + 1, n)) for a, n in ends))


def parameters_of(case: Case, box: Box) -> list[Array]:
    """Those of the whole layer's parameters that `box` has, by the axes the spec names."""
    axes = case.spec.tensor_axes
    part = tuple(box.slices()[axis] for axis in axes)
    return [np.ascontiguousarray(array[part]) for array in case.parameters]


def make_kernel(case: Case, box: Box, *, batch_size: int = BATCH) -> Any:
    kernel = KERNELS[case.spec.type]
    dtype = str(case.x.dtype)
    layer = kernel(case.spec, case.inputs, box, batch_size=batch_size, dtype=dtype)
    expected = [array.shape for array in parameters_of(case, box)]
    assert [tensor.shape for tensor in layer.tensors] == expected
    return layer


def run(case: Case, box: Box, *, layer: Any = None, first: bool = False) -> Result:
    """`layer` (default: a new one) on `box`; `first`: without the gradient by the input."""
    layer = layer or make_kernel(case, box)
    parameters = parameters_of(case, box)
    x = np.ascontiguousarray(case.x[layer.input_box.slices()])
    dy = case.dy[box.slices()].copy()
    before = [array.copy() for array in (x, *parameters)]
    out, dx = np.full_like(dy, np.nan), None if first else np.full_like(x, np.nan)
    gradients = [np.full_like(array, np.nan) for array in parameters]
    layer.forward(parameters, x, out)
    y = out.copy()
    layer.backward(parameters, x, out, delta=dy, gradients=gradients, dx=dx)
    for array, unchanged in zip((x, *parameters), before, strict=True):
        assert array.tobytes() == unchanged.tobytes()
    return Result(y, gradients, dx, layer.input_box)
