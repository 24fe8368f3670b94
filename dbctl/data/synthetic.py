"""Gaussian clusters from a seed: data of any size without a file.

Rules of this file: row i is a function of seed, split and i alone, so that any subset costs only
its own rows and every process makes the same ones.

Theory of operation: class c has a centre of standard normals; row i is of class i mod classes and
lies at that centre plus `noise` times standard normals. Its normals come from its own stretch of
one stream (philox.py), reached by `advance` (4 words a step). Train and test share the centres and
have streams of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import numpy as np

from dbctl.data.rows import Array, Indices, Rows
from dbctl.experiment.specs import SyntheticSource
from dbctl.philox import WORDS_A_COUNT, normals, stream

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
        words = stream(f"{spec.seed} synthetic centres").random_raw(
            2 * spec.classes * spec.features
        )
        self._centres = normals(words).reshape(spec.classes, spec.features)

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
        steps_a_row = -(-2 * self.shape[1] // WORDS_A_COUNT)
        bits = stream(f"{self._spec.seed} synthetic {self._spec.split}")
        words = np.empty((len(rows), WORDS_A_COUNT * steps_a_row), np.uint64)
        at = 0
        for i, row in enumerate(rows.tolist()):
            bits.advance((row - at) * steps_a_row)
            words[i] = bits.random_raw(WORDS_A_COUNT * steps_a_row)
            at = row + 1
        noise = normals(words.ravel()).reshape(len(rows), -1)[:, : self.shape[1]]
        x = self._centres[rows % self._spec.classes] + self._spec.noise * noise
        return x.astype(np.float32)
