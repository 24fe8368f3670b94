"""Memory of nodes for mini-batches of up to one size.

Rules of this file: memory is taken once, and a mini-batch shorter than the greatest uses its first
elements, so that arrays stay contiguous whatever the count of rows.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Buffer:
    """Zeros for (*shape, batch) from which fewer rows are taken without a stride.

    `flat`: memory to use, of at least as many elements, in place of its own.
    """

    def __init__(
        self, shape: tuple[int, ...], batch_size: int, *, dtype: Any, flat: Array | None = None
    ) -> None:
        self._shape = shape
        self._nodes = prod(shape)
        self._flat = np.zeros(self._nodes * batch_size, dtype) if flat is None else flat

    def rows(self, n: int) -> Array:
        """(*shape, n), C-contiguous: the first elements, for n rows of a mini-batch."""
        return self._flat[: self._nodes * n].reshape(*self._shape, n)
