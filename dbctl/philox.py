"""Random numbers as a function of a name and a place: streams of Philox words, and what they make.

Rules of this file: an element depends on its own words only, never on who asks or for how much.
Theory of operation: a label (seed and name) is hashed to the key of a Philox stream of its own;
`advance` goes to any word of it directly. Only the raw words of a bit generator are kept the same
by numpy for good: its `normal` rejects words, so that an element's place would depend on those
before it, and its `permutation` may change. So fractions, uniforms and normals are made here.
"""

from __future__ import annotations

from hashlib import blake2b
from math import pi

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Floats = NDArray[np.float64]

WORDS_A_COUNT = 4  # `advance(1)` moves a Philox 4x64 stream by this many words


def stream(label: str, first: int = 0) -> np.random.Philox:
    """The words of `label` from word `first` on.

    The key is 128 bits of BLAKE2b, so that no two labels share a stream.
    """
    digest = blake2b(label.encode(), digest_size=16).digest()
    bits = np.random.Philox(key=int.from_bytes(digest, "little"))
    count, skip = divmod(first, WORDS_A_COUNT)
    bits.advance(count)
    bits.random_raw(skip)
    return bits


def uniforms(words: Words, half_width: float) -> Floats:
    """Uniform in [-half_width, half_width), one a word; `words` are used up."""
    fractions = _fractions(words)
    fractions *= 2 * half_width
    fractions -= half_width
    return fractions


def normals(words: Words, deviation: float = 1.0) -> Floats:
    """Normals (n,) from words (2 n,), which are used up: number i from words 2i and 2i + 1.

    Box and Muller 1958: deviation x sqrt(-2 ln(1 - a)) cos(2 pi b); 1 - a is never 0.
    """
    # Contiguous copies: a strided logarithm may round otherwise than a contiguous one.
    pairs = np.ascontiguousarray(_fractions(words).reshape(-1, 2).T)
    radius: Floats = pairs[0]
    angle: Floats = pairs[1]
    np.subtract(1.0, radius, out=radius)
    np.log(radius, out=radius)
    radius *= -2.0
    np.sqrt(radius, out=radius)
    angle *= 2 * pi
    np.cos(angle, out=angle)
    radius *= angle
    radius *= deviation
    return radius


def _fractions(words: Words) -> Floats:
    """The upper 53 bits of each word as a float64 in [0, 1)."""
    words >>= np.uint64(11)
    fractions = words.astype(np.float64)
    fractions *= 2.0**-53
    return fractions
