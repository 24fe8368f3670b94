"""How large the elements of a product can be: a number per product, without a look at it.

Rules of this package: kernels/dense.py. Theory of operation: an element of a b is a sum of products
of a row of a and a column of b, so neither it nor any part of that sum is larger than |a| |b|, the
Euclidean norms of all of a and b (Cauchy-Schwarz). The gradient by a dense layer's weights is such
a product, a hundred times as large as its factors: whether it is finite is known without one more
pass over it (docs/reliability.md, G14).

Norms are sums in the arrays' own type, and infinite where that overflows. Rounding, and squares too
small for the type, make them a little too small: who relies on a bound leaves room
(`dbctl.roles.verdict`).
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def norm(array: Array) -> float:
    """The square root of the sum of squares; NaN or infinite if an element is."""
    flat = array.ravel(order="K")
    return sqrt(float(np.dot(flat, flat)))


def product_bound(delta: Array, x: Array) -> float:
    """No element of delta x^T or delta 1 is larger; both are (..., n), n rows of a mini-batch."""
    return norm(delta) * max(norm(x), sqrt(delta.shape[-1]))
