"""Element-wise sums and dot products of whole vectors, for batch methods (optim/commands.py).

Rules of this file: flat arrays of float32 or float64, a block at a time; no array the size of the
slice is made. What is added to what, and in which precision, is part of the interface:

    combine         each element in the vectors' dtype, term by term in the order given
    dots            in float64
    add_to_sums     in float64
    mean_gradient   in float64, rounded once

Theory of operation: every element of a result depends on that element of the operands only, by the
same operations whatever its place in a block, so how parameters are cut over shards does not show
in a single bit. (A matrix-vector product of BLAS would do: its kernels treat the ends of a block
differently.) Dot products add across elements, so a cut shows in their last bits, in float64. A
block stays in the cache while everything that is asked of it is done: each vector goes through
memory once, whatever the count of products. Values that are not finite come through, without a
warning.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbctl.region import Range

Array = NDArray[Any]
Doubles = NDArray[np.float64]

# Elements. Two blocks of float32 fill a core's second-level cache: the fastest of 4 to 128 K.
_COMBINE_BLOCK = 1 << 17
# All vectors' blocks lie in the cache together, in float64. Of 2 to 32 K the fastest for 3 rows and
# 21 columns; from 16 K on OpenBLAS copies the block before it multiplies: twice the time.
_DOTS_BLOCK = 3 << 12
# Rows that begin a power of two apart would fall on the same lines of the cache.
_DOTS_PAD = 8
_SUMS_BLOCK = 1 << 15


class _Scratch(threading.local):
    """One array a use, grown to the largest size asked for and kept: fresh pages cost time."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, str], Array] = {}

    def take(self, use: str, n_elements: int, dtype: str) -> Array:
        """A flat array with anything in it."""
        array = self._arrays.get((use, dtype))
        if array is None or array.size < n_elements:
            array = self._arrays[use, dtype] = np.zeros(n_elements, dtype)
        return array[:n_elements]


_scratch = _Scratch()


def _blocks(start: int, stop: int, size: int) -> Iterator[slice]:
    for at in range(start, stop, size):
        yield slice(at, min(at + size, stop))


def combine(out: Array, terms: Sequence[tuple[float, Array]]) -> None:
    """out = c1 v1 + c2 v2 + ..., each product and sum rounded in the dtype of `out`, in order.

    Coefficients are rounded to that dtype first. `out` may be among the terms, in any place; it
    may not overlap one in part. No terms: zeros.
    """
    kinds = {(v.dtype, v.shape) for _, v in terms}
    assert kinds <= {(out.dtype, out.shape)}, f"expected {out.dtype} {out.shape}, found {kinds}"
    if not terms:
        out.fill(0)
        return
    size = min(_COMBINE_BLOCK, out.size)
    sum_, product = (_scratch.take(use, size, out.dtype.str) for use in ("sum", "product"))
    with np.errstate(all="ignore"):
        rounded = [(out.dtype.type(c), v) for c, v in terms]
        for at in _blocks(0, out.size, size):
            n = at.stop - at.start
            _combine_block(out[at], [(c, v[at]) for c, v in rounded], (sum_[:n], product[:n]))


def _combine_block(
    out: Array, terms: list[tuple[Any, Array]], scratch: tuple[Array, Array]
) -> None:
    """`out` is written last: it may be among the terms."""
    total, product = scratch
    (factor, vector), *rest = terms
    if not rest:
        np.multiply(vector, factor, out=out)
        return
    # v and -v as they are where the factor is 1 or -1: what the product gives, a pass less.
    so_far = vector if factor == 1 else np.multiply(vector, factor, out=total)
    for i, (factor, vector) in enumerate(rest, 1):
        to = out if i == len(rest) else total
        if factor == 1:
            np.add(so_far, vector, out=to)
        elif factor == -1:
            np.subtract(so_far, vector, out=to)
        else:
            np.add(so_far, np.multiply(vector, factor, out=product), out=to)
        so_far = to


def dots(rows: Sequence[Array], columns: Sequence[Array]) -> list[float]:
    """The dot product of each row with each column, row by row; products and sums in float64.

    A vector that stands in several places (the same array object) is read once; the product of two
    vectors has the same bits in whichever order they are named.
    """
    distinct = {id(v): v for v in (*rows, *columns)}
    places = {key: place for place, key in enumerate(distinct)}
    vectors = list(distinct.values())
    if not rows or not columns:
        return []
    n_elements, n_rows = vectors[0].size, len({id(v) for v in rows})
    assert all(v.ndim == 1 and v.size == n_elements for v in vectors), "vectors of several lengths"
    totals = np.zeros((n_rows, len(vectors)))
    # What stands in a row comes first, so that the rows of a block are a matrix of their own.
    size = min(_DOTS_BLOCK, n_elements)
    flat = _scratch.take("dots", len(vectors) * (size + _DOTS_PAD), "f8")
    block = flat.reshape(len(vectors), size + _DOTS_PAD)[:, :size]
    with np.errstate(all="ignore"):
        for at in _blocks(0, n_elements, size):
            n = at.stop - at.start
            for place, vector in enumerate(vectors):
                np.copyto(block[place, :n], vector[at])
            totals += block[:n_rows, :n] @ block[:, :n].T
    answers = []
    for row in rows:
        for column in columns:
            # BLAS does not promise a symmetric product.
            first, second = sorted((places[id(row)], places[id(column)]))
            answers.append(float(totals[first, second]))
    return answers


def add_to_sums(sums: Doubles, gradient: Array) -> None:
    """sums = sums + gradient, in float64: rounding to float32 hides the order of what is added."""
    assert sums.dtype == np.float64, sums.dtype
    with np.errstate(all="ignore"):
        for at in _blocks(0, sums.size, _SUMS_BLOCK):
            np.add(sums[at], gradient[at], out=sums[at])


def mean_gradient(
    out: Array,
    sums: Doubles,
    point: Array,
    *,
    examples: int,
    decays: Sequence[tuple[Range, float]],
) -> float:
    """out = sums / examples + decay * point, in float64, rounded once; returns the L2 penalty.

    decays: (elements, coefficient), covering all elements once. The penalty is the sum of
    decay / 2 * point^2 in float64, infinite where an element of `out` is not finite.
    """
    penalty, finite = 0.0, True
    size = min(_SUMS_BLOCK, out.size)
    mean, decayed = (_scratch.take(use, size, "f8") for use in ("mean", "decayed"))
    with np.errstate(all="ignore"):
        for elements, decay in decays:
            squares = 0.0
            for at in _blocks(elements.start, elements.stop, size):
                n = at.stop - at.start
                g, w = mean[:n], decayed[:n]
                np.divide(sums[at], examples, out=g)
                if decay != 0:
                    np.copyto(w, point[at])
                    squares += float(np.dot(w, w))
                    np.multiply(w, decay, out=w)
                    np.add(g, w, out=g)
                np.copyto(out[at], g, casting="same_kind")
                finite = finite and bool(np.isfinite(out[at]).all())
            penalty += decay / 2 * squares
    return penalty if finite else inf
