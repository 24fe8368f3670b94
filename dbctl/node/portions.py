"""What a batch method's worker computes: the network on any portion of the whole training set.

Rules of this file: roles.base.PortionGradient made of model/ and data/. Every replica has all rows,
since it may be ordered to compute any bundle (paper A, section 4.2). Nothing here depends on who
computes, or in which evaluation: the loss of a batch is a function of the parameters, as a line
search needs it. So the nodes that dropout leaves out are a function of seed and portion.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from dbctl.bundles import Batch
from dbctl.data.dataset import Dataset
from dbctl.data.order import sample_rows
from dbctl.model.exchange import Exchange
from dbctl.model.layers.dropout import Draw
from dbctl.node.compute import Batches, Share
from dbctl.roles.base import Array, BatchResult

DENSE = 2  # rows are read ahead where at least one in so many is wanted


class NetworkPortions:
    """The network on portions of `rows`, the whole training set.

    `share` has buffers for min(portion, rows) rows.

    Sample 0 is all rows in their order; sample k from 1 is `batch` rows of the seeded permutation
    k. Without `batch` there is only sample 0.
    """

    def __init__(
        self,
        share: Share,
        rows: Dataset,
        *,
        seed: int,
        portion: int,
        send_every: int,
        batch: int | None = None,
    ) -> None:
        self.tensors = share.tensors
        self._share = share
        self._rows = rows
        self._batches = Batches(rows, min(portion, len(rows)))
        self._seed = seed
        self._whole = Batch(len(rows), portion, send_every)
        self._sampled = None if batch is None else Batch(batch, portion, send_every)
        self._sample = 0  # the last one that was drawn
        self._drawn: Array = np.empty(0, np.int64)

    def portions(self, sample: int, bundle: int) -> range:
        return self._batch(sample).portions_of(bundle)

    def compute(
        self, parameters: Array, out: Array, *, sample: int, portion: int
    ) -> Generator[Exchange, Any, BatchResult]:
        indices = self._indices(sample, self._batch(sample).rows_of(portion))
        x, targets = self._batches.take(indices), self._rows.targets(indices)
        draw = Draw(self._seed, 0, portion)
        loss = yield from self._share.gradient(parameters, x, targets, out=out, draw=draw)
        with np.errstate(all="ignore"):
            # Passes give the gradient of the mean; an infinite one is refused by the worker.
            np.multiply(out, out.dtype.type(len(indices)), out=out)
        return BatchResult(loss, len(indices), self._share.bound * len(indices))

    def prefetch(self, sample: int, bundle: int) -> None:
        """Rows that lie close together are read ahead; a sparse sample is left to the kernel."""
        indices = self._indices(sample, self._batch(sample).rows_of_bundle(bundle))
        start, stop = int(indices[0]), int(indices[-1]) + 1
        if stop - start <= DENSE * len(indices):
            self._rows.prefetch(start, stop)

    def _batch(self, sample: int) -> Batch:
        if sample == 0:
            return self._whole
        assert self._sampled is not None, f"sample {sample} of a batch that is all rows"
        return self._sampled

    def _indices(self, sample: int, at: range) -> Array:
        """The data's rows that are number `at` of the batch."""
        if sample == 0:
            return np.arange(at.start, at.stop, dtype=np.int64)
        if sample != self._sample:
            size = self._batch(sample).rows
            self._drawn = sample_rows(len(self._rows), self._seed, sample=sample, size=size)
            self._sample = sample
        return self._drawn[at.start : at.stop]
