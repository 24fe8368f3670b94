"""Gaussian clusters from a seed: data of any size without a file.

Rules of this file: row i is a function of seed, split and i alone, so that any subset costs only
its own rows and every process makes the same ones.

Theory of operation: class c has a centre of standard normals; row i is of class i mod classes and
lies at that centre plus `noise` times standard normals. Its normals come from its own stretch of
one Philox stream, reached by `advance` (4 words a step), by Box-Muller in float64: word pairs
(2j, 2j+1) make normal j, as for initial values (docs/architecture.md). Train and test share the
centres and have streams of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import numpy as np
from numpy.typing import NDArray

from dbctl.data.order import stream
from dbctl.data.rows import Array, Indices, Rows
from dbctl.experiment.specs import SyntheticSource

# More than this is made anew batch by batch instead of kept (rows.Rows.mapped).
KEEP_BYTES = 256 << 20


@final
class SyntheticRows(Rows):
    """float32 (rows, features), computed."""

    def __init__(self, spec: SyntheticSource) -> None:
        self.shape = (spec.rows, spec.features)
        self.dtype = np.dtype(np.float32)
        self.mapped = spec.rows * spec.features * 4 > KEEP_BYTES
        self._spec = spec
        words = stream(spec.seed, "synthetic centres").random_raw(2 * spec.classes * spec.features)
        self._centres = box_muller(words).reshape(spec.classes, spec.features)

    @property
    def labels(self) -> Indices:
        return np.arange(self.shape[0], dtype=np.int64) % self._spec.classes

    def blocks(self) -> Iterator[Array]:
        for start in range(0, len(self), self.rows_a_block):
            stop = min(start + self.rows_a_block, len(self))
            yield self._make(np.arange(start, stop, dtype=np.int64))

    def take(self, indices: Indices) -> Array:
        out = np.empty((len(indices), self.shape[1]), np.float32)
        order = np.argsort(indices, kind="stable")
        for start in range(0, len(indices), self.rows_a_block):
            part = order[start : start + self.rows_a_block]
            out[part] = self._make(indices[part])
        return out

    def _make(self, rows: Indices) -> Array:
        """Rows in rising order: the stream only goes forward."""
        steps_a_row = -(-2 * self.shape[1] // 4)
        bits = stream(self._spec.seed, f"synthetic {self._spec.split}")
        words = np.empty((len(rows), 4 * steps_a_row), np.uint64)
        at = 0
        for i, row in enumerate(rows.tolist()):
            bits.advance((row - at) * steps_a_row)
            words[i] = bits.random_raw(4 * steps_a_row)
            at = row + 1
        normals = box_muller(words)[:, : self.shape[1]]
        x = self._centres[rows % self._spec.classes] + self._spec.noise * normals
        return x.astype(np.float32)


def box_muller(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Standard normals (..., n) from raw words (..., 2 n): normal j from words 2j and 2j + 1.

    sqrt(-2 ln u) cos(2 pi v), u in (0, 1], v in [0, 1), both of 53 bits; no rejection, so that
    normal j depends on its own two words only.
    """
    u = ((words[..., 0::2] >> np.uint64(11)) + np.uint64(1)) * 2.0**-53
    v = (words[..., 1::2] >> np.uint64(11)) * 2.0**-53
    normals: NDArray[np.float64] = np.sqrt(-2.0 * np.log(u)) * np.cos(2.0 * np.pi * v)
    return normals
