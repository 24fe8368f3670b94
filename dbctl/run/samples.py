"""Pieces of what a replica computes, on random numbers, to be timed: a box of a layer, or a pass.

Rules of this file: little memory: of a large layer only a box, of a large network no pass.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dbctl.model.kernels.dropout import Dropout
from dbctl.model.layers.dropout import Draw
from dbctl.model.network import LayerSpec, NetworkSpec, node_shapes, tensors
from dbctl.model.passes import KERNELS, Network
from dbctl.region import Box

MAX_FLOPS = 1.2e9  # of one forward pass of a box
MAX_WEIGHTS = 4 << 20  # of a box, and of a whole network


class Sample(NamedTuple):
    """`run` computes it, after `prepare`, which is not part of it; its operations a run."""

    flops: int
    run: Callable[[], object]
    prepare: Callable[[], object]


def nothing() -> None:
    """What a sample needs that needs nothing."""


def largest_box(spec: LayerSpec, shape: tuple[int, ...], *, n_batch: int) -> Box:
    """The first rows (units, where there are none) of the layer, as many as the limits allow."""
    box = Box.whole(spec.output_shape(shape))
    while not _fits(spec, shape, box, n_batch=n_batch) and box.shape[0] > 1:
        box = of_rows(box, 2)
    return box


def of_rows(box: Box, divisor: int) -> Box:
    """The first of the box's rows (of its units, where it has no rows)."""
    kept = max(1, box.shape[0] // divisor)
    return Box(box.starts, (box.starts[0] + kept, *box.stops[1:]))


def _fits(spec: LayerSpec, shape: tuple[int, ...], box: Box, *, n_batch: int) -> bool:
    weights = sum(prod(tensor.shape) for tensor in spec.tensors(shape, box))
    return weights <= MAX_WEIGHTS and spec.flops(shape, box) * n_batch <= MAX_FLOPS


def of_box(
    spec: LayerSpec, shape: tuple[int, ...], box: Box, *, n_batch: int, first: bool
) -> Sample:
    """Forward and backward of a mini-batch; the first layer has no gradient by its inputs."""
    kernel = KERNELS[spec.type](spec, shape, box, batch_size=n_batch, dtype="float32")
    random = np.random.default_rng(0)

    def numbers(*sides: int) -> NDArray[np.float32]:
        return random.standard_normal(sides, np.float32)

    parameters = [0.05 * numbers(*tensor.shape) for tensor in kernel.tensors]
    gradients = [np.zeros_like(array) for array in parameters]
    x, kept = numbers(*kernel.input_box.shape, n_batch), numbers(*box.shape, n_batch)
    out, delta = np.zeros_like(kept), np.zeros_like(kept)
    dx = None if first else np.zeros_like(x)

    def run() -> None:
        if isinstance(kernel, Dropout):
            kernel.draw(Draw(0, 0, 0).label(0), n_batch)
        kernel.forward(parameters, x, out)
        kernel.backward(parameters, x, out, delta=delta, gradients=gradients, dx=dx)

    flops = spec.flops(shape, box) * (1 + bool(parameters) + (not first)) * n_batch
    return Sample(flops, run, lambda: np.copyto(delta, kept))


def has_pass(network: NetworkSpec) -> bool:
    """Whether the network is small enough for a pass of all of it."""
    return tensors(network)[-1].range.stop <= MAX_WEIGHTS


def of_pass(network: NetworkSpec, *, n_batch: int) -> Callable[[], object]:
    """Loss and gradient of a mini-batch."""
    whole, n_parameters = Network(network, batch_size=n_batch), tensors(network)[-1].range.stop
    random = np.random.default_rng(0)
    parameters = 0.05 * random.standard_normal(n_parameters, np.float32)
    x = random.standard_normal((prod(network.input), n_batch), np.float32)
    labels = random.integers(prod(node_shapes(network)[-1]), size=n_batch)
    out, draw = np.zeros_like(parameters), Draw(0, 0, 0)
    return lambda: whole.gradient(parameters, x, labels, out=out, draw=draw)


def typical(network: NetworkSpec, *, n_batch: int) -> Sample:
    """A pass of the network; of one too large for it, the box of the layer with most to compute."""
    if has_pass(network):
        return Sample(0, of_pass(network, n_batch=n_batch), nothing)
    layers = list(zip(network.layers, node_shapes(network), strict=False))
    flops = [spec.flops(shape, Box.whole(spec.output_shape(shape))) for spec, shape in layers]
    index = flops.index(max(flops))
    spec, shape = layers[index]
    box = largest_box(spec, shape, n_batch=n_batch)
    return of_box(spec, shape, box, n_batch=n_batch, first=index == 0)
