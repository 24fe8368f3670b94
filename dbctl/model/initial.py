"""Initial values of parameters: the same for every count of partitions and shards.

Rules of this file: an element is a function of the seed, its tensor's name and its index, never of
who asks or for how much. Theory of operation: each tensor has its own Philox stream, whose key is
a hash of seed and name. A uniform element i takes word i, a normal one words 2i and 2i + 1 by
Box-Muller in float64; `advance` goes there directly. numpy's own `normal` rejects words, so an
element's place in its stream would depend on those before it.
"""

from __future__ import annotations

from hashlib import blake2b
from math import pi
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbctl.model.network import NetworkSpec, tensors
from dbctl.model.tensor import Tensor
from dbctl.region import Range

Array = NDArray[Any]

BLOCK = 1 << 15  # elements made at once: temporaries stay in the L2 cache
WORDS_A_COUNT = 4  # `advance(1)` moves a Philox 4x64 stream by this many words


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
    stream = np.random.Philox(key=_key(seed, tensor.name))
    count, skip = divmod(elements.start * words_each, WORDS_A_COUNT)
    stream.advance(count)
    stream.random_raw(skip)
    for start in range(0, len(out), BLOCK):
        block = out[start : start + BLOCK]
        fractions = _fractions(stream.random_raw(len(block) * words_each))
        block[...] = _normals(fractions, scale) if normal else _uniforms(fractions, scale)


def _key(seed: int, name: str) -> int:
    """128 bits from seed and tensor name, so that no two tensors share a stream."""
    return int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), "little")


def _fractions(words: NDArray[np.uint64]) -> Array:
    """The upper 53 bits of each word as a float64 in [0, 1)."""
    words >>= np.uint64(11)
    fractions = words.astype(np.float64)
    fractions *= 2.0**-53
    return fractions


def _uniforms(fractions: Array, half_width: float) -> Array:
    fractions *= 2 * half_width
    fractions -= half_width
    return fractions


def _normals(fractions: Array, deviation: float) -> Array:
    """Box and Muller 1958: deviation x sqrt(-2 ln(1 - a)) cos(2 pi b); 1 - a is never 0."""
    # Contiguous copies: a strided logarithm may round otherwise than a contiguous one.
    pairs = np.ascontiguousarray(fractions.reshape(-1, 2).T)
    radius: Array = pairs[0]
    angle: Array = pairs[1]
    np.subtract(1.0, radius, out=radius)
    np.log(radius, out=radius)
    radius *= -2.0
    np.sqrt(radius, out=radius)
    angle *= 2 * pi
    np.cos(angle, out=angle)
    radius *= angle
    radius *= deviation
    return radius
