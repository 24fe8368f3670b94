"""What happens to a stored number before the network sees it: scale, or standardize.

Rules of this file: element-wise, so that a value does not depend on the rows beside it, on the
batch or on which replica holds the row. Every split is prepared with the statistics of the
training rows.

Theory of operation: `scale` multiplies in the output's type. `standardize` is (x - mean) /
deviation. Numbers wider than the output's type are prepared in float64 and rounded once. Others
are prepared in the output's type, the mean taken off in two parts, its rounded value and the
rest: x minus the first is exact where the two are close, so that a large mean costs no digits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from dbctl.data.file_rows import unmapped
from dbctl.data.npy import open_npz
from dbctl.data.rows import Array
from dbctl.data.sources import Source
from dbctl.errors import DataError


@final
@dataclass(frozen=True, eq=False)
class Statistics:
    """Mean and deviation of each feature over the training rows: float64 (features,).

    A deviation of 0, a feature that is always the same, counts as 1 (it is 1 here).
    """

    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]

    def save(self, path: str) -> None:
        """Write both to `path`, a .npz file; an old one is replaced in one go."""
        partial = f"{path}.{os.getpid()}.part"
        with open(partial, "wb") as file:
            np.savez(file, mean=self.mean, deviation=self.deviation)
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str) -> Statistics:
        """Read what `save` wrote. Raises DataError."""
        mean, deviation = (_load(path, member) for member in ("mean", "deviation"))
        if mean.shape != deviation.shape:
            raise DataError(
                path,
                f"expected a deviation for each mean, found {deviation.shape[0]} for "
                f"{mean.shape[0]}; it is damaged: copy it from the run that wrote it",
            )
        if not (np.isfinite(mean).all() and np.isfinite(deviation).all() and (deviation > 0).all()):
            message = "expected finite means and deviations above 0; it is damaged"
            raise DataError(path, message)
        return cls(mean, deviation)


def _load(path: str, member: str) -> NDArray[np.float64]:
    stored = open_npz(path, "the run directory", member=member)
    if stored.dtype != np.float64 or len(stored.shape) != 1:
        found = f"{stored.dtype} of shape {stored.shape}"
        raise DataError(path, f"expected {member} as float64 (features,), found {found}")
    return np.asarray(stored.load(stored.shape[0])).reshape(-1)


def statistics(source: Source, *, between: Callable[[], None] = lambda: None) -> Statistics:
    """Mean and deviation of each feature over all rows of `source`, read once, a block at a time.

    Rows with a number that is not finite are left out: training refuses them, and one of them would
    make every row nan. `between` is called before each block: what it raises ends this. Raises
    DataError when no row is left, a deviation overflows float64, or the file is cut meanwhile.

    Blocks are joined as in Chan, Golub, LeVeque, *Updating Formulae and a Pairwise Algorithm for
    Computing Sample Variances* (1979): no sum of squares is ever taken about 0.
    """
    n = 0
    mean = np.zeros(source.features)
    squares = np.zeros(source.features)
    with np.errstate(over="ignore", invalid="ignore"):
        for raw in unmapped(source.x).blocks():
            between()
            block = raw.astype(np.float64)
            finite = np.isfinite(block).all(axis=1)
            if not finite.all():
                block = block[finite]
            if not len(block):
                continue
            block_mean = block.mean(axis=0)
            delta = block_mean - mean
            share = len(block) / (n + len(block))
            squares += np.square(block - block_mean).sum(axis=0) + np.square(delta) * n * share
            mean += delta * share
            n += len(block)
        deviation = np.sqrt(squares / max(n, 1))
    if not n:
        raise DataError(source.path, "standardize: no row has only finite numbers; mend the data")
    if not np.isfinite(deviation).all():
        feature = int(np.argmin(np.isfinite(deviation)))
        message = f"standardize: feature {feature} is too large to be squared; use scale instead"
        raise DataError(source.path, message)
    deviation[deviation == 0] = 1.0
    return Statistics(mean, deviation)


@final
class Preparation:
    """From stored rows to rows of `dtype`; `apply` is called for each batch and makes no arrays.

    `stored` is the type of what comes in. `scale` and `statistics`: at most one of them.
    """

    def __init__(
        self,
        stored: np.dtype[Any],
        dtype: np.dtype[Any],
        *,
        scale: float | None,
        statistics: Statistics | None,
    ) -> None:
        assert scale is None or statistics is None, "scale and standardize are alternatives"
        wide = not np.can_cast(stored, dtype, "safe")
        self.working: np.dtype[Any] = np.dtype(np.float64) if wide else dtype
        self._scale = None if scale is None else self.working.type(scale)
        self._standardize: tuple[Array, Array, Array] | None = None
        if statistics is not None:
            first = statistics.mean.astype(self.working)
            rest = (statistics.mean - first).astype(self.working)
            self._standardize = first, rest, (1.0 / statistics.deviation).astype(self.working)

    def apply(self, raw: Array, out: Array) -> None:
        """Prepare `raw` (n, features) into `out` (n, features) of the type `working`."""
        np.copyto(out, raw)
        if self._scale is not None:
            np.multiply(out, self._scale, out=out)
        if self._standardize is not None:
            first, rest, inverse = self._standardize
            np.subtract(out, first, out=out)
            np.subtract(out, rest, out=out)
            np.multiply(out, inverse, out=out)
