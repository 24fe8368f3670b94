"""Initial values of parameters: the same for every count of partitions and shards.

Rules of this file: an element is a function of the seed, its tensor's name and its index, never of
who asks or for how much. Theory of operation: each tensor has its own stream (philox.py), labelled
by seed and name. A uniform element i takes word i, a normal one words 2i and 2i + 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbctl.model.network import NetworkSpec, tensors
from dbctl.model.tensor import Tensor
from dbctl.philox import normals, stream, uniforms
from dbctl.region import Range

Array = NDArray[Any]

BLOCK = 1 << 15  # elements made at once: temporaries stay in the L2 cache


def initial_values(spec: NetworkSpec, seed: int, span: Range, *, dtype: str = "float32") -> Array:
    """Elements `span` of the flat vector: bit for bit that slice of the whole, for any cut.

    `seed` is an integer of at least 0. Returns a flat array of len(span) elements.
    """
    values = np.zeros(len(span), dtype)
    for tensor in tensors(spec):
        part = tensor.range.intersection(span)
        if part:
            elements = part.shift(-tensor.range.start)
            fill_initial(values[part.slice(span.start)], tensor, seed, elements=elements)
    return values


def fill_initial(out: Array, tensor: Tensor, seed: int, *, elements: Range) -> None:
    """Writes elements `elements` of `tensor` (0 is its first, C order) into flat `out`."""
    assert out.shape == (len(elements),), f"{out.shape} for {elements} of {tensor}"
    distribution, scale = tensor.initial.distribution, tensor.initial.scale
    if distribution == "zero":
        out[...] = 0
        return
    normal = distribution == "normal"
    words_each = 2 if normal else 1
    bits = stream(f"{seed}/{tensor.name}", elements.start * words_each)
    for start in range(0, len(out), BLOCK):
        block = out[start : start + BLOCK]
        words = bits.random_raw(len(block) * words_each)
        block[...] = normals(words, scale) if normal else uniforms(words, scale)
