"""From a NodeSpec to its role: data, network, rule and checkpoint meet the pure roles here.

Rules of this file: it only puts together what other modules make. Each role imports what it needs:
a shard loads no data, a worker no optimiser state.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dbctl.checkpoint.layout import PARAMETERS
from dbctl.checkpoint.reader import open_checkpoint
from dbctl.data.dataset import Dataset
from dbctl.data.order import ranks, subset
from dbctl.data.prepare import Statistics
from dbctl.data.sources import Source, files_of, open_source
from dbctl.experiment.resolve import from_json
from dbctl.experiment.specs import (
    DownpourSpec,
    Experiment,
    SandblasterSpec,
    SourceSpec,
)
from dbctl.model.cut import NetworkCut, cut_network
from dbctl.model.initial import fill_initial
from dbctl.model.network import tensors
from dbctl.node.compute import NetworkGradient, NetworkMeasure, Share
from dbctl.node.distant import Distant
from dbctl.node.portions import NetworkPortions
from dbctl.optim.gradients import prepare
from dbctl.optim.methods import saved_names
from dbctl.optim.schedules import rate_at
from dbctl.optim.team import Team, size_of_team
from dbctl.optim.updates import make_rule
from dbctl.plan import EVALUATION_BATCH, NodeSpec
from dbctl.process import log
from dbctl.region import Range
from dbctl.rights import CONTROLLER
from dbctl.roles.base import Allocate, Array, Role
from dbctl.roles.batch_shard import BatchShard, BatchShardStart
from dbctl.roles.batch_worker import BatchWorker, BatchWorkerStart
from dbctl.roles.downpour import Downpour, DownpourStart
from dbctl.roles.evaluator import Evaluator
from dbctl.roles.shard import Shard, ShardStart
from dbctl.shards import READERS_IN_PLACE

TERM = 1


class Saved(Protocol):
    """A checkpoint as a node reads it, wherever it is."""

    @property
    def vectors(self) -> Sequence[str]: ...

    @property
    def updates(self) -> int: ...

    def read_each(self, vector: str, spans: Sequence[Range]) -> Iterator[Array]: ...


def build(spec: NodeSpec, allocate: Allocate, distant: Distant | None = None) -> Role:
    """The role that `spec` asks for. DataError, CheckpointError: its files are not as promised.

    `distant`: who has the run's files where this host has none.
    """
    experiment = from_json(spec.experiment)
    if spec.role == "shard":
        return build_shard(spec, experiment, allocate, distant=distant)
    if spec.role == "worker":
        return build_worker(spec, experiment, allocate, distant=distant)
    assert spec.role == "evaluator", spec.role
    return build_evaluator(spec, experiment, allocate, distant=distant)


def cut_of(experiment: Experiment) -> NetworkCut:
    """How the experiment cuts a replica: every node finds the same."""
    return cut_network(
        experiment.network, count=experiment.partition.count, grid=experiment.partition.grid
    )


def build_shard(
    spec: NodeSpec, experiment: Experiment, allocate: Allocate, *, distant: Distant | None
) -> Role:
    checkpoint = _saved(spec, distant)
    lends = CONTROLLER in spec.far
    mine = next(s for s in spec.shards if s.node == spec.node)
    span, cut = Range(mine.start, mine.stop), cut_of(experiment)
    optimizer = experiment.optimizer
    common: dict[str, Any] = {
        "name": spec.node,
        "span": span,
        "decays": decays(cut, span, l2=optimizer.l2),
        "partitions": cut.spans,
        "term": TERM,
    }
    if isinstance(optimizer, SandblasterSpec):
        # An evaluation reads the parameters only, and no state is made before it is written.
        saved = checkpoint.vectors if checkpoint and spec.restore and spec.training else ()
        state = {n: np.zeros(len(span), np.float32) for n in saved if n != PARAMETERS}
        values, _ = _values(spec, experiment, state, cut=cut, span=span, checkpoint=checkpoint)
        kept = saved_names(optimizer.method, history=optimizer.history)
        start = BatchShardStart(**common, values=values, state=state, kept=kept)
        return BatchShard(start, allocate=allocate, lends=lends)
    rule = make_rule(optimizer.rule, size=len(span))
    state = rule.new_state(len(span), "float32")
    values, version = _values(spec, experiment, state, cut=cut, span=span, checkpoint=checkpoint)
    scaling = isinstance(optimizer, DownpourSpec) and optimizer.staleness_scaling
    cores = len(os.sched_getaffinity(0))
    online = ShardStart(
        **common,
        values=values,
        state=state,
        rule=rule,
        version=version,
        staleness_scaling=scaling,
        team=Team(size_of_team(cores, busy=spec.busy, teams=spec.shards_here)),
    )
    return Shard(online, allocate=allocate, lends=lends)


def _saved(spec: NodeSpec, distant: Distant | None) -> Saved | None:
    """What a shard begins with; None: with initial values."""
    path = spec.restore or spec.initialize
    if not path or distant is not None:
        return distant if path else None
    # The controller has verified the checksums of all files before any node was started.
    return open_checkpoint(Path(path), verify=False)


def _values(
    spec: NodeSpec,
    experiment: Experiment,
    state: dict[str, Array],
    *,
    cut: NetworkCut,
    span: Range,
    checkpoint: Saved | None,
) -> tuple[Array, int]:
    """Parameters `span` and their count of updates; `state` is filled as far as it was saved."""
    values = np.zeros(len(span), np.float32)
    if checkpoint is None:
        begin(values, cut, span, seed=experiment.seed)
        return values, 0
    restore(values, PARAMETERS, checkpoint, cut=cut, span=span)
    if not spec.restore:
        return values, 0
    for name, vector in state.items():
        # An evaluation may read a run of batch methods, which saves no such state.
        if name in checkpoint.vectors:
            restore(vector, name, checkpoint, cut=cut, span=span)
    return values, checkpoint.updates


def restore(out: Array, vector: str, checkpoint: Saved, *, cut: NetworkCut, span: Range) -> None:
    """Elements `span` of the cut's flat vector from a checkpoint of whole tensors."""
    runs = [r for piece in cut.pieces for r in piece.runs(span.intersection(piece.range))]
    there = [Range(start, start + len(run)) for start, run in runs]
    for (_, run), values in zip(runs, checkpoint.read_each(vector, there), strict=True):
        out[run.slice(span.start)] = values


def begin(out: Array, cut: NetworkCut, span: Range, *, seed: int) -> None:
    """Initial values of elements `span`: of the same seed the same for every cut."""
    for piece in cut.pieces:
        for start, run in piece.runs(span.intersection(piece.range)):
            first = start - piece.tensor.range.start
            elements = Range(first, first + len(run))
            fill_initial(out[run.slice(span.start)], piece.tensor, seed, elements=elements)


def decays(cut: NetworkCut, span: Range, *, l2: float) -> list[tuple[Range, float]]:
    """L2 is for weights, not for biases: ranges of the slice, from its own element 0 on."""
    if l2 == 0.0:
        return [(Range(0, len(span)), 0.0)]
    parts = []
    for piece in cut.pieces:
        both = piece.range.intersection(span)
        if both:
            own = both.shift(-span.start)
            parts.append((own, l2 if piece.tensor.kind == "weight" else 0.0))
    return parts


def build_worker(
    spec: NodeSpec, experiment: Experiment, allocate: Allocate, *, distant: Distant | None
) -> Role:
    optimizer = experiment.optimizer
    if isinstance(optimizer, SandblasterSpec):
        return build_batch_worker(spec, experiment, allocate, distant=distant)
    cut = cut_of(experiment)
    rows = _rows_of(spec, experiment, distant)
    batch_size = min(optimizer.batch_size, max(1, len(rows)))
    gradient = NetworkGradient(
        Share(cut, spec.partition, batch_size=batch_size, allocate=allocate),
        rows,
        seed=experiment.seed,
        replica=spec.replica,
        batch_size=batch_size,
    )
    rule, client = optimizer.rule, optimizer.client
    assert client.overlap is not None, "not settled"
    if not client.blocking:  # else it moves no parameters itself
        prepare(len(cut.span(spec.partition)), "float32")
    start = DownpourStart(
        gradient=gradient,
        shards=spec.shards,
        rate=lambda n: rate_at(rule.rate, rule.warm_up, n),
        n_fetch=client.n_fetch,
        n_push=client.n_push,
        overlap=client.overlap,
        in_place=client.blocking and experiment.replicas <= READERS_IN_PLACE,
        clip=optimizer.clip,
        slots=client.slots_used,
        position=spec.position,
        origin=cut.span(spec.partition).start,
        partition=spec.partition,
        partners=dict(spec.partners),
        tensors=[tensor.name for tensor in tensors(experiment.network)],
    )
    return Downpour(start, allocate=allocate)


def build_batch_worker(
    spec: NodeSpec, experiment: Experiment, allocate: Allocate, *, distant: Distant | None
) -> BatchWorker:
    optimizer = experiment.optimizer
    assert isinstance(optimizer, SandblasterSpec)
    cut = cut_of(experiment)
    train = experiment.data.train
    source = _source(spec, train, distant)
    rows = Dataset(source, train, statistics=_statistics(spec, train, source, distant=distant))
    gradient = NetworkPortions(
        Share(cut, spec.partition, batch_size=min(optimizer.portion, len(rows)), allocate=allocate),
        rows,
        seed=experiment.seed,
        portion=optimizer.portion,
        send_every=optimizer.send_every,
        batch=optimizer.batch,
    )
    start = BatchWorkerStart(
        gradient=gradient,
        shards=spec.shards,
        origin=cut.span(spec.partition).start,
        partition=spec.partition,
        partners=dict(spec.partners),
    )
    return BatchWorker(start, allocate=allocate)


def _rows_of(spec: NodeSpec, experiment: Experiment, distant: Distant | None) -> Dataset:
    """The replica's own rows: row i of one seeded permutation is of replica i mod R."""
    train = experiment.data.train
    source = _source(spec, train, distant)
    n_rows = spec.shipped.rows if spec.shipped is not None else source.rows
    own = subset(n_rows, experiment.seed, replica=spec.replica, replicas=experiment.replicas)
    rows = own if spec.shipped is None else ranks(own)
    statistics = _statistics(spec, train, source, distant=distant)
    return Dataset(source, train, statistics=statistics, rows=rows, named=own)


def _source(spec: NodeSpec, asked: SourceSpec, distant: Distant | None) -> Source:
    """The rows where the experiment says, or as they were sent to this host."""
    if spec.shipped is None:
        return open_source(asked)
    from dbctl.node.arrival import bring

    assert distant is not None, "what was sent came from the controller"
    here = bring(spec.shipped, distant, runtime=spec.runtime, log=partial(log, spec.node))
    return replace(open_source(here), path=files_of(asked)[0][0])  # for messages: the user's file


def _statistics(
    spec: NodeSpec, asked: SourceSpec, source: Source, *, distant: Distant | None
) -> Statistics | None:
    if not asked.standardize:
        return None
    if distant is not None:
        return distant.statistics(source.features)
    return Statistics.load(spec.statistics)


def build_evaluator(
    spec: NodeSpec, experiment: Experiment, allocate: Allocate, *, distant: Distant | None
) -> Evaluator:
    asked = experiment.data.train if spec.split == "train" else experiment.data.test
    assert asked is not None, f"no data.{spec.split}"
    source = _source(spec, asked, distant)
    statistics = _statistics(spec, asked, source, distant=distant)
    dataset = Dataset(source, asked, statistics=statistics)
    cut = cut_of(experiment)
    share = Share(cut, spec.partition, batch_size=EVALUATION_BATCH, allocate=allocate)
    measure = NetworkMeasure(share, dataset, outputs=cut.shapes[-1])
    return Evaluator(
        measure,
        spec.shards,
        origin=cut.span(spec.partition).start,
        partition=spec.partition,
        partners=dict(spec.partners),
        allocate=allocate,
    )
