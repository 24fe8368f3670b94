"""The rows of one replica, ready for the network: batches (features, n), the batch innermost.

Rules of this file: a batch makes no array larger than itself and keeps its working space. The same
row gives the same bits whichever rows are kept beside it and wherever they are stored.

Theory of operation: of rows that are mapped nothing is copied. Of others only this replica's are
kept: as stored where that is smaller than the network's type (a byte instead of four), and prepared
on the way into each batch; else prepared once. Both go through the same element-wise `Preparation`,
hence the same bits. A batch is: gather rows, prepare them, turn them.
"""

from __future__ import annotations

from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from dbctl.data.files import shown
from dbctl.data.prepare import Preparation, Statistics
from dbctl.data.rows import Array, ArrayRows, Indices, Rows
from dbctl.data.sources import Source
from dbctl.experiment.specs import SourceSpec

PREPARE_ROWS = 1024  # at once, when rows are prepared ahead
PREFETCH_BYTES = 64 << 20  # at once: a bundle may be larger than the memory that is free


@final
class Dataset:
    """Rows `rows` of `source` (default: all), prepared as `spec` says; indices count within them.

    `statistics`: of the training rows; needed where `spec.standardize`. `dtype`: of the batches.
    `named`: what messages call each of the rows (default: `rows`).
    It may have no rows (fewer rows than replicas): `len` is 0 then, and nothing may be asked of it.
    Raises DataError when a compressed file turns out damaged.
    """

    def __init__(
        self,
        source: Source,
        spec: SourceSpec,
        *,
        statistics: Statistics | None = None,
        rows: Indices | None = None,
        named: Indices | None = None,
        dtype: str = "float32",
    ) -> None:
        assert statistics is not None or not spec.standardize, "standardize needs statistics"
        self.features = source.features
        self._path = source.path
        self._named = rows if named is None else named
        self.kind = source.kind
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self._preparation = Preparation(
            source.x.dtype,
            self.dtype,
            scale=None if spec.standardize else spec.scale,
            statistics=statistics if spec.standardize else None,
        )
        self._prepared = False
        self._x = self._keep(source.x, rows)
        # Where x is mapped the indices of the own rows are kept instead of the rows, and large
        # targets, mapped like x, are treated alike.
        self._map = rows if source.x.mapped else None
        own_y = rows is not None and (self._map is None or self.kind == "labels")
        self._y = source.y[rows] if own_y else source.y
        self._n = source.rows if rows is None else len(rows)
        self._raw: Array = np.empty((0, self.features), self._x.dtype)
        self._work: Array = np.empty((0, self.features), self._preparation.working)

    def __len__(self) -> int:
        return self._n

    def _keep(self, x: Rows, rows: Indices | None) -> Rows:
        """The rows to gather from: all of them where they are mapped, else only the own ones."""
        if x.mapped:
            return x
        if isinstance(x, ArrayRows) and rows is None:
            kept = x.array
        else:
            kept = x.take(np.arange(len(x), dtype=np.int64) if rows is None else rows)
        if x.dtype.itemsize < self.dtype.itemsize:
            return ArrayRows(kept)
        prepared = np.empty(kept.shape, self.dtype)
        for start in range(0, len(kept), PREPARE_ROWS):
            raw = kept[start : start + PREPARE_ROWS]
            work = np.empty(raw.shape, self._preparation.working)
            with np.errstate(over="ignore", invalid="ignore"):
                self._preparation.apply(raw, work)
                prepared[start : start + PREPARE_ROWS] = work
        self._prepared = True
        return ArrayRows(prepared)

    def batch(self, indices: Indices, out: Array) -> Array:
        """Fill `out` (features, n), of the dataset's dtype, with rows `indices` (n,); return it.

        Numbers too large for the dtype become infinite; the worker refuses what comes of them.
        """
        n = len(indices)
        assert out.shape == (self.features, n), f"out is {out.shape}, not {(self.features, n)}"
        if n > len(self._work):
            self._raw = np.empty((n, self.features), self._x.dtype)
            self._work = np.empty((n, self.features), self._preparation.working)
        at = indices if self._map is None else self._map[indices]
        if isinstance(self._x, ArrayRows):
            # With mode="raise" numpy gathers into a copy of `out` first.
            assert n == 0 or (at.min() >= 0 and at.max() < len(self._x)), "no such row"
            raw = np.take(self._x.array, at, axis=0, out=self._raw[:n], mode="clip")
        else:
            raw = self._x.take(at)
        with np.errstate(over="ignore", invalid="ignore"):
            if not self._prepared:
                self._preparation.apply(raw, self._work[:n])
                raw = self._work[:n]
            out[...] = raw.T
        return out

    def blemish(self, indices: Indices) -> str:
        """The first of rows `indices` with a number that is not finite as batches have it, and
        where the file has it; "" where all are finite. It makes a batch: for when one went wrong.
        """
        shape = self.features, len(indices)
        bad = ~np.isfinite(x := self.batch(indices, np.empty(shape, self.dtype)))
        if not bad.any():
            return ""
        at = int(np.argmax(bad.any(axis=0)))
        feature = int(np.argmax(bad[:, at]))
        row = indices[at] if self._named is None else self._named[indices[at]]
        number = f"{x[feature, at]} in {self.dtype}"
        return f"row {row} (from 0) of {shown(self._path, 200)} has {number} as feature {feature}"

    def prefetch(self, start: int, stop: int) -> None:
        """Rows `start` to `stop` will be wanted soon: mapped ones are read ahead, up to a limit.

        Of own rows that are spread over a mapping nothing is done.
        """
        if isinstance(self._x, ArrayRows) and self._map is None:
            limit = max(1, PREFETCH_BYTES // max(1, self._x.shape[1] * self._x.dtype.itemsize))
            self._x.prefetch(start, min(stop, start + limit))

    def targets(self, indices: Indices) -> NDArray[Any]:
        """Rows `indices`: labels, int64 (n,), or targets (outputs, n) of the dataset's dtype."""
        if self.kind == "labels":
            return self._y[indices]
        at = indices if self._map is None else self._map[indices]
        return np.ascontiguousarray(self._y[at].T, dtype=self.dtype)
