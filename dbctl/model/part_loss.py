"""Losses on an output layer that is split over partitions, without gathering it.

Rules of this file: model/part.py. Theory of operation: softmax takes two reductions of one number a
row each, the greatest output and the sum of exponentials (with the label's own output); the other
losses are sums over outputs and take none. Measuring takes two: the label's output and the best,
then how many outputs come before the label's.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dbctl.model.buffer import Buffer
from dbctl.model.exchange import Exchange, Key, Take
from dbctl.model.losses import LOSSES, are_labels
from dbctl.model.part_layer import Post
from dbctl.region import Box

Array = NDArray[Any]
Taken = dict[int, Array]
TOP = 5


class PartMeasurement(NamedTuple):
    """`loss_sum` is this partition's share; the rest is of the whole network, the same on each.

    As passes.Measurement: `correct` and `top5` are -1 for float targets.
    """

    loss_sum: float
    correct: int
    top5: int
    predicted: Array
    scores: Array


class PartLoss:
    """`owned`: each partition's outputs, one-dimensional boxes that cover the layer in order."""

    def __init__(
        self,
        loss: str,
        owned: Sequence[Box],
        partition: int,
        *,
        batch_size: int,
        dtype: str,
        post: Post,
    ) -> None:
        self._name = loss
        self._partition = partition
        self._order = [p for p, box in enumerate(owned) if box]
        self._others = tuple(p for p in range(len(owned)) if p != partition)
        self._senders = tuple(p for p in self._order if p != partition)
        self._start = owned[partition].starts[0]
        self._units = len(owned[partition])
        self._outputs = sum(len(box) for box in owned)
        self._post = post
        self._dtype = np.dtype(dtype)
        self._ones = np.ones(self._units, dtype)
        self._one_hot = Buffer((self._units,), batch_size, dtype=dtype)
        self._loss = LOSSES[loss](self._units, batch_size=batch_size, dtype=dtype)

    def gradient(self, z: Array, targets: Array) -> Generator[Exchange, Taken, float]:
        """Turns `z` (own outputs, n) into the gradient of the mean loss by it.

        Returns this partition's share of the sum of the rows' losses.
        """
        rows = yield from self._rows(z, targets)
        if are_labels(targets):
            z[self._own_labels(targets)] -= 1
        else:
            np.subtract(z, self._wanted(targets), out=z)
        np.multiply(z, 1 / z.shape[1], out=z)
        return float(rows.sum(dtype=np.float64))

    def _wanted(self, targets: Array) -> Array:
        """The targets of the own outputs, labels as one-hot: (own outputs, n)."""
        if not are_labels(targets):
            return targets[self._start : self._start + self._units]
        wanted = self._one_hot.rows(len(targets))
        wanted[...] = 0
        wanted[self._own_labels(targets)] = 1
        return wanted

    def _own_labels(self, labels: Array) -> tuple[Array, Array]:
        """Rows of the own outputs and columns of those rows whose label is ours."""
        columns = np.flatnonzero((labels >= self._start) & (labels < self._start + self._units))
        return labels[columns] - self._start, columns

    def _rows(self, z: Array, targets: Array) -> Generator[Exchange, Taken, Array]:
        """Each row's loss, or the own outputs' share of it; turns `z` into predictions."""
        if self._name != "softmax":
            wanted = self._wanted(targets)
            return self._loss.rows(z, wanted) if self._units else np.zeros(z.shape[1])
        assert are_labels(targets), f"softmax takes integer labels, not {targets.dtype}"
        n = z.shape[1]
        greatest = z.max(axis=0) if self._units else np.full(n, -np.inf, self._dtype)
        tops = yield from self._reduce(Key("max", 0), greatest, rows=n)
        np.subtract(z, np.maximum.reduce(tops), out=z)
        of_label = np.zeros(n, self._dtype)
        own, columns = self._own_labels(targets)
        of_label[columns] = z[own, columns]
        np.exp(z, out=z)
        sums = np.stack([self._ones @ z, of_label])
        parts = yield from self._reduce(Key("total", 0), sums.reshape(-1), rows=n)
        total = np.zeros(2 * n, self._dtype)
        for part in parts:
            np.add(total, part, out=total)
        np.multiply(z, 1 / total[:n], out=z)
        # Every partition knows every row's loss: it counts once.
        first = self._partition == self._order[0]
        rows: Array = np.log(total[:n]) - total[n:] if first else np.zeros(n)
        return rows

    def _reduce(
        self, key: Key, own: Array, *, rows: int
    ) -> Generator[Exchange, Taken, list[Array]]:
        """Everybody's array, in the order of partitions; nothing of those without outputs."""
        if self._units and self._others:
            yield self._post.send(key, self._others, own, rows=rows)
        taken = (yield Take(key, self._senders)) if self._senders else {}
        return [own if p == self._partition else taken[p] for p in self._order]

    # ------------------------------------------------------------------------------ measuring

    def measure(self, z: Array, targets: Array) -> Generator[Exchange, Taken, PartMeasurement]:
        """Loss, accuracy, best class and its score; `z` (own outputs, n) is left as predictions."""
        labelled = are_labels(targets)
        raw = z.copy()
        rows = yield from self._rows(z, targets)
        loss_sum = float(rows.sum(dtype=np.float64))
        if not labelled:
            first = yield from self._first_output(z)
            return PartMeasurement(loss_sum, -1, -1, first, first)
        best, scores, of_label = yield from self._best(raw, z, targets)
        ranks = yield from self._ranks(raw, targets, of_label)
        correct = int(np.count_nonzero(ranks == 0))
        top5 = int(np.count_nonzero(ranks < min(TOP, self._outputs)))
        return PartMeasurement(loss_sum, correct, top5, best, scores)

    def _first_output(self, z: Array) -> Generator[Exchange, Taken, Array]:
        own = z[0].copy() if self._units else np.zeros(z.shape[1], self._dtype)
        parts = yield from self._reduce(Key("max", 1), own, rows=z.shape[1])
        return np.array(parts[0])

    def _best(
        self, raw: Array, predictions: Array, labels: Array
    ) -> Generator[Exchange, Taken, tuple[Array, Array, Array]]:
        """The class with the greatest output, its score, and the label's output, of every row."""
        n = raw.shape[1]
        # value and class of the best own output, its score, the label's output: exact in float64
        # and, below 2^24 classes, in float32.
        own = np.zeros((4, n), self._dtype)
        own[0] = -np.inf
        if self._units:
            at = np.argmax(raw, axis=0)
            columns = np.arange(n)
            own[0], own[1] = raw[at, columns], at + self._start
            own[2] = predictions[at, columns]
        rows, columns = self._own_labels(labels)
        own[3, columns] = raw[rows, columns]
        parts = yield from self._reduce(Key("rank", 0), own.reshape(-1), rows=n)
        found = [part.reshape(4, n) for part in parts]
        best = found[0].copy()
        for other in found[1:]:
            # Of equal outputs the lower index, and NaN before all else, as argmax has it.
            better = (other[0] > best[0]) | (np.isnan(other[0]) & ~np.isnan(best[0]))
            best[:3, better] = other[:3, better]
        of_label = sum(part[3] for part in found)
        return best[1].astype(np.int64), best[2].copy(), np.asarray(of_label)

    def _ranks(
        self, raw: Array, labels: Array, of_label: Array
    ) -> Generator[Exchange, Taken, Array]:
        """How many outputs come before the label's; all where that is NaN."""
        n = raw.shape[1]
        own = np.zeros(n, self._dtype)
        if self._units:
            lower = (np.arange(self._units) + self._start)[:, None] < labels
            before = ~(raw <= of_label)
            before |= (raw == of_label) & lower
            own[...] = before.sum(axis=0)
        parts = yield from self._reduce(Key("rank", 1), own, rows=n)
        total: Array = np.sum(parts, axis=0)
        return total
