"""From a NodeSpec to its role: data, network, rule and checkpoint meet the pure roles here.

Rules of this file: it only puts together what other modules make. Each role imports what it needs:
a shard loads no data, a worker no optimiser state.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from dbctl.checkpoint.reader import Checkpoint, open_checkpoint
from dbctl.data.dataset import Dataset
from dbctl.data.order import batch_rows, epoch_order, steps_per_epoch, subset
from dbctl.data.prepare import Statistics
from dbctl.data.sources import open_source
from dbctl.experiment.resolve import from_json
from dbctl.experiment.specs import DownpourSpec, Experiment, SgdSpec, SourceSpec
from dbctl.model.initial import initial_values
from dbctl.model.layers.dropout import Draw
from dbctl.model.network import NetworkSpec, node_shapes, tensors
from dbctl.model.passes import Network
from dbctl.optim.schedules import rate_at
from dbctl.optim.updates import make_rule
from dbctl.plan import NodeSpec
from dbctl.region import Range
from dbctl.roles.base import Allocate, Array, BatchResult, Role, Tally
from dbctl.roles.downpour import Downpour, DownpourStart
from dbctl.roles.evaluator import Evaluator
from dbctl.roles.shard import Shard, ShardStart
from dbctl.wire import Position, Predictions

EVALUATION_BATCH = 500
MAX_CONFUSION_CLASSES = 1000
TERM = 1


def build(spec: NodeSpec, allocate: Allocate) -> Role:
    """The role that `spec` asks for. DataError, CheckpointError: its files are not as promised."""
    experiment = from_json(spec.experiment)
    if spec.role == "shard":
        return build_shard(spec, experiment, allocate)
    if spec.role == "worker":
        return build_worker(spec, experiment, allocate)
    assert spec.role == "evaluator", spec.role
    return build_evaluator(spec, experiment)


def build_shard(spec: NodeSpec, experiment: Experiment, allocate: Allocate) -> Shard:
    mine = next(s for s in spec.shards if s.node == spec.node)
    span = Range(mine.start, mine.stop)
    optimizer = experiment.optimizer
    rule = make_rule(optimizer.rule, size=len(span))
    state = rule.new_state(len(span), "float32")
    version = 0
    if spec.restore:
        # The controller has verified the checksums of all files before any node was started.
        checkpoint = open_checkpoint(Path(spec.restore), verify=False)
        values = checkpoint.read("parameters", span)
        version = checkpoint.manifest.updates
        _restore_state(state, checkpoint, span)
    else:
        values = initial_values(experiment.network, experiment.seed, span)
    scaling = isinstance(optimizer, DownpourSpec) and optimizer.staleness_scaling
    start = ShardStart(
        name=spec.node,
        span=span,
        values=values,
        state=state,
        rule=rule,
        decays=decays(experiment.network, span, l2=optimizer.l2),
        version=version,
        term=TERM,
        staleness_scaling=scaling,
    )
    return Shard(start, allocate=allocate)


def _restore_state(state: dict[str, Array], checkpoint: Checkpoint, span: Range) -> None:
    # An evaluation may read a run of batch methods, which saves no such state.
    for name in state:
        if name in checkpoint.manifest.vectors:
            np.copyto(state[name], checkpoint.read(name, span))


def decays(network: NetworkSpec, span: Range, *, l2: float) -> list[tuple[Range, float]]:
    """L2 is for weights, not for biases: ranges of the slice, from its own element 0 on."""
    if l2 == 0.0:
        return [(Range(0, len(span)), 0.0)]
    parts = []
    for tensor in tensors(network):
        both = tensor.range.intersection(span)
        if both:
            own = Range(both.start - span.start, both.stop - span.start)
            parts.append((own, l2 if tensor.kind == "weight" else 0.0))
    return parts


def build_worker(spec: NodeSpec, experiment: Experiment, allocate: Allocate) -> Downpour:
    optimizer = experiment.optimizer
    gradient = NetworkGradient(
        experiment.network,
        _rows_of(spec, experiment),
        seed=experiment.seed,
        replica=spec.replica,
        batch_size=optimizer.batch_size,
    )
    rule = optimizer.rule
    # `type: sgd` is one replica that blocks at each step (docs/paper.md, A2).
    if isinstance(optimizer, SgdSpec):
        client = DownpourSpec(batch_size=optimizer.batch_size, rule=rule, overlap=False)
    else:
        client = optimizer
    start = DownpourStart(
        gradient=gradient,
        shards=spec.shards,
        rate=lambda n: rate_at(rule.rate, rule.warm_up, n),
        n_fetch=client.n_fetch,
        n_push=client.n_push,
        overlap=client.overlap,
        clip=optimizer.clip,
        slots=client.slots,
        position=spec.position,
    )
    return Downpour(start, allocate=allocate)


def _rows_of(spec: NodeSpec, experiment: Experiment) -> Dataset:
    """The replica's own rows: row i of one seeded permutation is of replica i mod R."""
    source = open_source(experiment.data.train)
    rows = subset(source.rows, experiment.seed, replica=spec.replica, replicas=experiment.replicas)
    statistics = _statistics(spec, experiment.data.train)
    return Dataset(source, experiment.data.train, statistics=statistics, rows=rows)


def _statistics(spec: NodeSpec, source: SourceSpec) -> Statistics | None:
    return Statistics.load(spec.statistics) if source.standardize else None


def build_evaluator(spec: NodeSpec, experiment: Experiment) -> Evaluator:
    source = experiment.data.train if spec.split == "train" else experiment.data.test
    assert source is not None, f"no data.{spec.split}"
    dataset = Dataset(open_source(source), source, statistics=_statistics(spec, source))
    return Evaluator(NetworkMeasure(experiment.network, dataset), spec.shards)


class _Batches:
    """Batches of a dataset, (features, n), in one buffer; a short one is contiguous too."""

    def __init__(self, dataset: Dataset, batch_size: int) -> None:
        self.dataset = dataset
        self._flat = np.zeros(dataset.features * batch_size, dataset.dtype)

    def take(self, indices: Array) -> Array:
        n, features = len(indices), self.dataset.features
        return self.dataset.batch(indices, self._flat[: features * n].reshape(features, n))


class NetworkGradient:
    """roles.base.Gradient of a whole replica: the network on this replica's own rows."""

    def __init__(
        self, network: NetworkSpec, rows: Dataset, *, seed: int, replica: int, batch_size: int
    ) -> None:
        self.tensors: Sequence[tuple[str, Range]] = [(t.name, t.range) for t in tensors(network)]
        self.steps_per_epoch = steps_per_epoch(len(rows), batch_size)
        self._network = Network(network, batch_size=batch_size)
        self._rows = rows
        self._batches = _Batches(rows, batch_size)
        self._seed, self._replica, self._batch_size = seed, replica, batch_size
        self._epoch = -1
        self._order: Array = np.empty(0, np.int64)

    def compute(
        self, at: Position, parameters: Array, out: Array
    ) -> Generator[Any, Any, BatchResult]:
        if at.epoch != self._epoch:
            self._epoch = at.epoch
            self._order = epoch_order(
                len(self._rows), self._seed, replica=self._replica, epoch=at.epoch
            )
        indices = batch_rows(self._order, at.index, self._batch_size)
        x, targets = self._batches.take(indices), self._rows.targets(indices)
        draw = Draw(self._seed, self._replica, at.step)
        loss_sum = self._network.gradient(parameters, x, targets, out=out, draw=draw)
        return BatchResult(loss_sum, len(indices))
        yield  # a generator: the partitions of a cut replica exchange boxes here


class NetworkMeasure:
    """roles.base.Measure: a forward pass over a split."""

    def __init__(self, network: NetworkSpec, rows: Dataset) -> None:
        self._network = Network(network, batch_size=EVALUATION_BATCH)
        self._rows = rows
        self._batches = _Batches(rows, EVALUATION_BATCH)
        self._indices: Array = np.empty(0, np.int64)
        self._labelled = rows.kind == "labels"
        self._classes = prod(node_shapes(network)[-1])
        self.begin(0, 1)

    @property
    def n_parameters(self) -> int:
        return self._network.n_parameters

    def begin(self, part: int, of: int) -> int:
        self._indices = np.arange(part, len(self._rows), of, dtype=np.int64)
        self._loss_sum, self._n, self._correct, self._top5 = 0.0, 0, 0, 0
        counted = self._labelled and self._classes <= MAX_CONFUSION_CLASSES
        self._confusion = np.zeros((self._classes, self._classes) if counted else (0, 0), np.int64)
        return -(-len(self._indices) // EVALUATION_BATCH)

    def measure(
        self, index: int, parameters: Array, *, number: int, predictions: bool
    ) -> Predictions | None:
        indices = self._indices[index * EVALUATION_BATCH : (index + 1) * EVALUATION_BATCH]
        x, targets = self._batches.take(indices), self._rows.targets(indices)
        found = self._network.measure(parameters, x, targets)
        self._loss_sum += found.loss_sum
        self._n += len(indices)
        self._correct += found.correct
        self._top5 += found.top5
        if self._confusion.size:
            np.add.at(self._confusion, (targets, found.predicted.astype(np.int64)), 1)
        if not predictions:
            return None
        labels = targets if self._labelled else targets[0]
        return Predictions(
            number,
            index,
            tuple(indices.tolist()),
            tuple(map(float, labels.tolist())),
            tuple(map(float, found.predicted.tolist())),
            tuple(map(float, found.scores.tolist())),
        )

    def tally(self) -> Tally:
        return Tally(
            loss_sum=self._loss_sum,
            rows=self._n,
            correct=self._correct if self._labelled else -1,
            top5=self._top5 if self._labelled else -1,
            classes=self._classes,
            confusion=tuple(self._confusion.ravel().tolist()),
        )
