"""What workers and evaluators compute: the network, or one partition of it, on rows of the data.

Rules of this file: roles.base.Gradient and Measure made of model/ and data/; a pass is a generator,
which yields what the partitions of a cut replica exchange and nothing when the replica is whole.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from math import prod
from typing import Any

import numpy as np

from dbctl.data.dataset import Dataset
from dbctl.data.order import batch_rows, epoch_order, steps_per_epoch
from dbctl.model.cut import NetworkCut
from dbctl.model.exchange import Exchange
from dbctl.model.layers.dropout import Draw
from dbctl.model.part import PartNetwork, box_of_rows
from dbctl.model.passes import Network
from dbctl.plan import EVALUATION_BATCH
from dbctl.region import Range
from dbctl.roles.base import Allocate, Array, BatchResult, Tally
from dbctl.wire import Position, Predictions

MAX_CONFUSION_CLASSES = 1000  # 8 MB a matrix
Pass = Generator[Exchange, Any, Any]


class Batches:
    """Batches of a dataset, (features, n), in one buffer; a short one is contiguous too."""

    def __init__(self, dataset: Dataset, batch_size: int) -> None:
        self.dataset = dataset
        self._flat = np.zeros(dataset.features * batch_size, dataset.dtype)

    def take(self, indices: Array) -> Array:
        n, features = len(indices), self.dataset.features
        return self.dataset.batch(indices, self._flat[: features * n].reshape(features, n))


class Share:
    """One partition's share of the network's passes, or all of it: one face for both."""

    def __init__(
        self,
        cut: NetworkCut,
        partition: int,
        *,
        batch_size: int,
        allocate: Allocate,
        dtype: str = "float32",
    ) -> None:
        self._cut = cut
        self._whole: Network | None = None
        self._part: PartNetwork | None = None
        if cut.count == 1:
            self._whole = Network(cut.spec, batch_size=batch_size, dtype=dtype)
        else:
            self._part = PartNetwork(
                cut,
                partition,
                batch_size=batch_size,
                dtype=dtype,
                outbox=lambda n, dtype: allocate(n, np.dtype(dtype).str),
            )
        pieces = cut.pieces_of(partition)
        origin = cut.span(partition).start
        self.tensors: Sequence[tuple[str, Range]] = [
            (piece.tensor.name, piece.range.shift(-origin)) for piece in pieces
        ]
        self.n_parameters = len(cut.span(partition))

    def gradient(
        self, parameters: Array, x: Array, targets: Array, *, out: Array, draw: Draw
    ) -> Pass:
        """Returns this partition's share of the sum of the rows' losses."""
        if self._whole is not None:
            return self._whole.gradient(parameters, x, targets, out=out, draw=draw)
        assert self._part is not None
        own = box_of_rows(x, self._cut.spec.input, self._part.input_box)
        return (yield from self._part.gradient(parameters, own, targets, out=out, draw=draw))

    @property
    def bound(self) -> float:
        """No element of the last gradient is larger."""
        passes = self._part if self._whole is None else self._whole
        assert passes is not None
        return passes.bound

    def measure(self, parameters: Array, x: Array, targets: Array) -> Pass:
        """Returns a Measurement; its `loss_sum` is this partition's share."""
        if self._whole is not None:
            return self._whole.measure(parameters, x, targets)
        assert self._part is not None
        own = box_of_rows(x, self._cut.spec.input, self._part.input_box)
        return (yield from self._part.measure(parameters, own, targets))


class NetworkGradient:
    """roles.base.Gradient: the network on one replica's own rows."""

    def __init__(
        self, share: Share, rows: Dataset, *, seed: int, replica: int, batch_size: int
    ) -> None:
        self.tensors = share.tensors
        self.steps_per_epoch = steps_per_epoch(len(rows), batch_size)
        self._share = share
        self._rows = rows
        self._batches = Batches(rows, batch_size)
        self._seed, self._replica, self._batch_size = seed, replica, batch_size
        self._epoch = -1
        self._order: Array = np.empty(0, np.int64)
        self._taken: Array = np.empty(0, np.int64)

    def compute(
        self, at: Position, parameters: Array, out: Array
    ) -> Generator[Exchange, Any, BatchResult]:
        if at.epoch != self._epoch:
            self._epoch = at.epoch
            self._order = epoch_order(
                len(self._rows), self._seed, replica=self._replica, epoch=at.epoch
            )
        self._taken = indices = batch_rows(self._order, at.index, self._batch_size)
        x, targets = self._batches.take(indices), self._rows.targets(indices)
        draw = Draw(self._seed, self._replica, at.step)
        loss = yield from self._share.gradient(parameters, x, targets, out=out, draw=draw)
        return BatchResult(loss, len(indices), self._share.bound)

    def blemish(self) -> str:
        """What is not finite in the rows of the last mini-batch (Dataset.blemish)."""
        return self._rows.blemish(self._taken)


class NetworkMeasure:
    """roles.base.Measure: a forward pass over a split."""

    def __init__(self, share: Share, rows: Dataset, *, outputs: tuple[int, ...]) -> None:
        self._share = share
        self._rows = rows
        self._batches = Batches(rows, EVALUATION_BATCH)
        self._indices: Array = np.empty(0, np.int64)
        self._labelled = rows.kind == "labels"
        self._classes = prod(outputs)
        self.begin(0, 1)

    @property
    def n_parameters(self) -> int:
        return self._share.n_parameters

    def begin(self, part: int, of: int) -> int:
        self._indices = np.arange(part, len(self._rows), of, dtype=np.int64)
        self._n, self._correct, self._top5 = 0, 0, 0
        counted = self._labelled and self._classes <= MAX_CONFUSION_CLASSES
        self._confusion = np.zeros((self._classes, self._classes) if counted else (0, 0), np.int64)
        return -(-len(self._indices) // EVALUATION_BATCH)

    def measure(
        self, index: int, parameters: Array, *, number: int, predictions: bool
    ) -> Generator[Exchange, Any, tuple[float, Predictions | None]]:
        indices = self._indices[index * EVALUATION_BATCH : (index + 1) * EVALUATION_BATCH]
        x, targets = self._batches.take(indices), self._rows.targets(indices)
        found = yield from self._share.measure(parameters, x, targets)
        self._n += len(indices)
        self._correct += found.correct
        self._top5 += found.top5
        if self._confusion.size:
            np.add.at(self._confusion, (targets, found.predicted.astype(np.int64)), 1)
        if not predictions:
            return found.loss_sum, None
        labels = targets if self._labelled else targets[0]
        rows = Predictions(
            number,
            index,
            tuple(indices.tolist()),
            tuple(map(float, labels.tolist())),
            tuple(map(float, found.predicted.tolist())),
            tuple(map(float, found.scores.tolist())),
        )
        return found.loss_sum, rows

    def tally(self) -> Tally:
        return Tally(
            rows=self._n,
            correct=self._correct if self._labelled else -1,
            top5=self._top5 if self._labelled else -1,
            classes=self._classes,
            confusion=self._confusion if self._confusion.size else None,
        )
