"""Whole and cut workers of batch methods over a network in memory that loses, repeats and delays.

Rules of this file: coordinator and shards are plain stand-ins. The shards are told of an evaluation
at once; the coordinator chooses badly on purpose: copies, evaluations left half-way, news that one
partition gets long before another. What must hold is rung 6 of the ladder (the full-batch gradient,
each bundle once, whoever dies) and that nobody waits for ever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from random import Random
from typing import Any

import numpy as np
import pytest
from lockstep import shares_of, whole_of

from dbctl.bundles import Batch
from dbctl.data.dataset import Dataset
from dbctl.data.sources import open_source
from dbctl.experiment.specs import DigitsSource, SourceSpec, SyntheticSource
from dbctl.launch.inproc import Faults, Network
from dbctl.model.cut import NetworkCut, cut_network
from dbctl.model.layers.conv2d import Conv2dSpec
from dbctl.model.layers.dense import DenseSpec
from dbctl.model.network import NetworkSpec, n_parameters
from dbctl.model.passes import Network as Whole
from dbctl.node.compute import Share
from dbctl.node.portions import NetworkPortions
from dbctl.region import Range
from dbctl.rights import CONTROLLER
from dbctl.roles.base import NEVER, Array, Done, Effects, PlainBuffer, Send, View
from dbctl.roles.batch_worker import BatchWorker, BatchWorkerStart
from dbctl.shards import ShardSpan, shard_spans, spans_within
from dbctl.wire import (
    Ack,
    Exited,
    Fetch,
    Finish,
    Hello,
    Message,
    Params,
    Peer,
    Push,
    Report,
    Welcome,
)
from dbctl.wire_batch import Computed, Order, Work

BAD = Faults(drop=0.05, duplicate=0.1, delay_s=0.02, in_pieces=0.2, piece_bytes=2048)
DIGITS = DigitsSource(split="train", scale=0.0625, rows=61)
DENSE = NetworkSpec(
    input=(64,),
    layers=(DenseSpec(units=7, activation="sigmoid"), DenseSpec(units=10)),
    loss="softmax",
)
# Cut in three, the filters are held by the first and the one output by the last.
PIXELS = SyntheticSource(features=36, classes=1, rows=25)
FILTERS = NetworkSpec(
    input=(6, 6, 1),
    layers=(Conv2dSpec(maps=2, kernel=3), DenseSpec(units=1, cut="outputs")),
    loss="logistic",
)


class Summing:
    """A shard that adds what is pushed in the evaluation in hand, each bundle of a slice once."""

    def __init__(self, span: Range, slices: Sequence[Range]) -> None:
        self.span = span
        self._slices = slices
        self.evaluation = 0
        self.sums: Array = np.zeros(len(span))
        self._point = PlainBuffer(len(span), "<f8")
        self._counted: set[tuple[int, int]] = set()
        self._handouts: dict[str, int] = defaultdict(int)
        self._answers: dict[str, Params] = {}
        self._applied: dict[str, int] = defaultdict(int)
        self.due = NEVER

    def begin(self, evaluation: int, point: Array) -> None:
        self.evaluation = evaluation
        self._point = PlainBuffer(len(self.span), "<f8")
        self._point.array[:] = point[self.span.slice()]
        self.sums = np.zeros(len(self.span))
        self._counted.clear()

    def start(self, now: float) -> Effects:
        return []

    def step(self, now: float) -> Effects:
        return []

    def receive(self, now: float, sender: Peer, message: Message) -> Effects:
        node = sender.node
        match message:
            case Hello():
                return [Send(node, Welcome(1, self._applied[node], self.evaluation))]
            case Fetch():
                return [Send(node, self._params(node, message))]
            case Push():
                if message.seq == self._applied[node] + 1:
                    self._applied[node] = message.seq
                    self._count(message)
                return [Send(node, Ack(1, self._applied[node], 0))]
            case Finish():
                return [Done("finished")]
        return []

    def _params(self, node: str, fetch: Fetch) -> Params:
        last = self._answers.get(node)
        if last is None or last.number < fetch.number:
            self._handouts[node] += 1
            view = View(self._point, fetch.start - self.span.start, self._stop(fetch.start))
            handout = self._handouts[node]
            last = Params(1, fetch.number, handout, self.evaluation, 0, fetch.start, view)
            self._answers[node] = last
        return last

    def _stop(self, start: int) -> int:
        [stop] = [s.stop for s in self._slices if s.start == start]
        return stop - self.span.start

    def _count(self, push: Push) -> None:
        key = (push.start, push.position.index)
        if push.position.epoch == self.evaluation and key not in self._counted:
            self._counted.add(key)
            at = push.start - self.span.start
            self.sums[at : at + len(push.payload)] += push.payload


@dataclass
class Replica:
    workers: tuple[str, ...]
    n_orders: int = 0
    orders: list[Order] = field(default_factory=list)
    answers: dict[int, dict[str, tuple[float, ...]]] = field(default_factory=dict)


class Boss:
    """Evaluates at each of `points` in turn; leaves some half-way; then halts everybody.

    `slow`: the chance that a worker is not told the news before the next time they are said.
    """

    def __init__(
        self,
        replicas: dict[int, Replica],
        shards: Sequence[Summing],
        points: Sequence[Array],
        *,
        batch: Batch,
        seed: int,
        slow: float,
    ) -> None:
        self.replicas, self.shards, self.points = replicas, shards, points
        self._batch, self._random, self._slow = batch, Random(seed), slow
        self.evaluation = 0
        self.left_half_way: set[int] = set()
        self.dropped = 0
        self.not_finite = 0
        self.losses: dict[int, tuple[float, ...]] = {}
        self.found: dict[int, tuple[Array, float]] = {}  # by evaluation: sums, loss
        self.halted: dict[str, Report] = {}
        self.due = 0.0

    def start(self, now: float) -> Effects:
        return self._next(now)

    def _next(self, now: float) -> Effects:
        self.evaluation += 1
        self.losses = {}
        if self.evaluation <= len(self.points):
            for shard in self.shards:
                shard.begin(self.evaluation, self.points[self.evaluation - 1])
        return self._hand_out()

    @property
    def halting(self) -> bool:
        return self.evaluation > len(self.points)

    def _hand_out(self) -> Effects:
        effects: Effects = []
        for replica in self.replicas.values():
            while not self.halting and len(replica.orders) < 2:
                mine = {o.bundle for o in replica.orders if o.evaluation == self.evaluation}
                free = set(range(self._batch.n_bundles)) - set(self.losses) - mine
                if not free:
                    break
                replica.n_orders += 1
                bundle = self._random.choice(sorted(free))
                replica.orders.append(Order(replica.n_orders, self.evaluation, bundle, 0))
            effects += self._tell(replica, slow=self._slow)
        return effects

    def _tell(self, replica: Replica, *, slow: float = 0.0) -> Effects:
        work = Work(self.evaluation, tuple(replica.orders), self.halting)
        return [Send(w, work) for w in replica.workers if self._random.random() >= slow]

    def receive(self, now: float, sender: Peer, message: Message) -> Effects:
        match message:
            case Computed():
                return self._on_computed(now, sender.node, message)
            case Report() if message.state == "halted":
                self.halted[sender.node] = message
                alive = {w for replica in self.replicas.values() for w in replica.workers}
                return [Done("done")] if alive <= set(self.halted) else []
            case Exited():
                dead = [n for n, r in self.replicas.items() if message.node in r.workers]
                for number in dead:
                    del self.replicas[number]
                return self._hand_out()
        return []

    def _on_computed(self, now: float, worker: str, computed: Computed) -> Effects:
        replica = next((r for r in self.replicas.values() if worker in r.workers), None)
        if replica is None:
            return []
        order = next((o for o in replica.orders if o.number == computed.number), None)
        if order is None:
            return self._tell(replica)
        assert (computed.evaluation, computed.bundle) == (order.evaluation, order.bundle)
        answers = replica.answers.setdefault(order.number, {})
        answers[worker] = computed.losses
        if len(answers) < len(replica.workers):
            return []
        kinds = {tuple(map(isfinite, losses)) for losses in answers.values()}
        assert len(kinds) == 1, "all partitions push, or drop, or refuse"
        replica.orders.remove(order)
        return self._done(now, order, answers[worker])

    def _done(self, now: float, order: Order, losses: tuple[float, ...]) -> Effects:
        self.dropped += not losses
        self.not_finite += not all(map(isfinite, losses))
        assert losses or order.evaluation < self.evaluation, "dropped before it was over"
        if order.evaluation == self.evaluation and not self.halting:
            if not all(map(isfinite, losses)):
                return self._next(now)
            self.losses.setdefault(order.bundle, losses)
            half = len(self.losses) >= self._batch.n_bundles // 2
            if half and self.evaluation in self.left_half_way:
                return self._next(now)
            if len(self.losses) == self._batch.n_bundles:
                sums = np.concatenate([shard.sums for shard in self.shards])
                parts = [loss for b in sorted(self.losses) for loss in self.losses[b]]
                assert len(parts) == self._batch.n_portions
                self.found[self.evaluation] = (sums, sum(parts))
                return self._next(now)
        return self._hand_out()

    def step(self, now: float) -> Effects:
        self.due = now + 0.2
        return [effect for r in self.replicas.values() for effect in self._tell(r)]


@dataclass
class Setting:
    spec: NetworkSpec = DENSE
    source: SourceSpec = DIGITS
    parts: dict[str, Any] = field(default_factory=lambda: {"count": 1})
    replicas: int = 2
    batch: tuple[int, int] = (5, 3)  # portion, send_every
    points: int = 6
    left_half_way: Sequence[int] = (2, 3, 5)
    slow: float = 0.3
    faults: Faults = BAD
    spoil: int = 0  # an evaluation at whose point nothing is finite


class Cluster:
    def __init__(self, setting: Setting, *, seed: int) -> None:
        self.setting = setting
        self.cut = cut_network(setting.spec, **setting.parts)
        self.rows = Dataset(open_source(setting.source), setting.source, dtype="float64")
        batch = Batch(len(self.rows), *setting.batch)
        rng = np.random.default_rng(seed)
        size = n_parameters(setting.spec)
        self.points = [0.3 * rng.standard_normal(size) for _ in range(setting.points)]
        if setting.spoil:
            self.points[setting.spoil - 1][:] = np.nan
        self.pushes: dict[str, dict[int, Any]] = defaultdict(dict)
        self.net = Network(seed, setting.faults, watch=self._watch)
        spans = shard_spans(size, 2)
        held = [self.cut.span(p) for p in range(self.cut.count)]
        shards = [
            Summing(own, [own.intersection(part) for part in held if own.intersection(part)])
            for own in (Range(span.start, span.stop) for span in spans)
        ]
        replicas = {
            r: Replica(tuple(f"worker-{r}.{p}" for p in range(self.cut.count)))
            for r in range(setting.replicas)
        }
        flat = [np.concatenate(shares_of(self.cut, point)) for point in self.points]
        self.boss = Boss(replicas, shards, flat, batch=batch, seed=seed, slow=setting.slow)
        self.boss.left_half_way = set(setting.left_half_way)
        self.workers: dict[str, BatchWorker] = {}
        for span, shard in zip(spans, shards, strict=True):
            self.net.add(span.node, shard)
        for replica in replicas.values():
            for p, name in enumerate(replica.workers):
                others = {q: other for q, other in enumerate(replica.workers) if q != p}
                self.workers[name] = self._worker(p, spans, others, batch=batch)
                self.net.add(name, self.workers[name])
        self.net.add(CONTROLLER, self.boss)

    def _worker(
        self, partition: int, spans: Sequence[ShardSpan], others: dict[int, str], *, batch: Batch
    ) -> BatchWorker:
        at_once = min(batch.portion, len(self.rows))
        share = Share(
            self.cut, partition, batch_size=at_once, allocate=PlainBuffer, dtype="float64"
        )
        gradient = NetworkPortions(
            share, self.rows, seed=3, portion=batch.portion, send_every=batch.send_every
        )
        span = self.cut.span(partition)
        start = BatchWorkerStart(
            gradient=gradient,
            shards=spans_within(spans, span),
            origin=span.start,
            partition=partition,
            partners=others,
            dtype="float64",
        )
        return BatchWorker(start, allocate=PlainBuffer)

    def _watch(self, now: float, sender: Peer, to: str, message: Message) -> None:
        if isinstance(message, Push):
            said = (message.position, message.n_gradients)
            assert self.pushes[sender.node].setdefault(message.seq, said) == said

    def run(self) -> None:
        ended = self.net.run(until=lambda: CONTROLLER in self.net.done, limit_s=300.0)
        boss = self.boss
        assert ended, f"waits in evaluation {boss.evaluation}: {boss.replicas}"

    def check(self) -> None:
        """Each evaluation that was not left is that of one pass over all rows."""
        setting = self.setting
        whole = set(range(1, setting.points + 1)) - set(setting.left_half_way) - {setting.spoil}
        assert whole <= set(self.boss.found)
        for evaluation, (sums, loss) in self.boss.found.items():
            expected, expected_loss = self._whole(self.points[evaluation - 1])
            found = whole_of(self.cut, shares_of_flat(self.cut, sums)) / len(self.rows)
            within = 1e-10 * np.abs(expected).max()
            np.testing.assert_allclose(found, expected, rtol=0, atol=within)
            assert loss == pytest.approx(expected_loss, rel=1e-10)

    def _whole(self, point: Array) -> tuple[Array, float]:
        n = len(self.rows)
        indices = np.arange(n)
        x = self.rows.batch(indices, np.empty((self.rows.features, n)))
        out = np.empty_like(point)
        network = Whole(self.setting.spec, batch_size=n, dtype="float64")
        loss = network.gradient(point, x, self.rows.targets(indices), out=out)
        return out, loss

    def check_lockstep(self) -> None:
        """The partitions that push push the same, under the same numbers."""
        for replica in range(self.setting.replicas):
            names = [f"worker-{replica}.{p}" for p in range(self.cut.count)]
            said = [self.pushes[name] for name in names if self.pushes[name]]
            for seq in {seq for pushes in said for seq in pushes}:
                assert len({str(pushes[seq]) for pushes in said if seq in pushes}) == 1


def shares_of_flat(cut: NetworkCut, flat: Array) -> list[Array]:
    return [flat[cut.span(p).slice()] for p in range(cut.count)]


def ran(seed: int, **options: Any) -> Cluster:
    cluster = Cluster(Setting(**options), seed=seed)
    cluster.run()
    cluster.check()
    cluster.check_lockstep()
    return cluster


# ------------------------------------------------------------------------------- whole replicas


@pytest.mark.parametrize("batch", [(5, 3), (1, 7), (61, 1), (8, 2), (1000, 4)])
def test_whatever_the_portions_it_is_the_full_batch_gradient(batch: tuple[int, int]) -> None:
    """docs/paper.md, A3: a portion counts once; the mean is over rows, not portions."""
    ran(1, batch=batch)


@pytest.mark.parametrize("replicas", [1, 3, 8])
def test_whatever_the_count_of_replicas(replicas: int) -> None:
    ran(2, replicas=replicas)


@pytest.mark.parametrize("seed", range(6))
def test_evaluations_left_half_way_leave_nothing_behind(seed: int) -> None:
    cluster = ran(17 + seed, points=12, left_half_way=(1, 2, 4, 5, 6, 9, 12), replicas=3)
    assert cluster.boss.dropped > 0


@pytest.mark.parametrize("time", [0.05, 0.2, 0.5])
def test_a_replica_dies_and_each_bundle_counts_once(time: float) -> None:
    cluster = Cluster(Setting(points=8, replicas=3), seed=7)
    cluster.net.at(time, lambda: cluster.net.kill("worker-1.0"))
    cluster.run()
    cluster.check()
    assert "worker-1.0" not in cluster.boss.halted


def test_a_point_where_nothing_is_finite_is_refused_and_the_next_is_right() -> None:
    cluster = ran(3, spoil=3, left_half_way=())
    assert cluster.boss.not_finite > 0
    assert 3 not in cluster.boss.found
    refused = [report.refused for report in cluster.boss.halted.values()]
    assert sum(refused) > 0


# --------------------------------------------------------------------------------- cut replicas


@pytest.mark.parametrize("parts", [{"count": 2}, {"count": 3}])
@pytest.mark.parametrize("seed", range(4))
def test_partitions_go_in_step(seed: int, parts: dict[str, Any]) -> None:
    """One hears long before another that an evaluation is over, and of which orders there are."""
    cluster = ran(
        20 + seed, parts=parts, points=10, left_half_way=(1, 3, 4, 7), slow=0.5, replicas=2
    )
    assert cluster.boss.dropped > 0


@pytest.mark.parametrize("seed", range(3))
def test_a_partition_that_holds_no_parameters_goes_along(seed: int) -> None:
    cluster = ran(
        30 + seed, spec=FILTERS, source=PIXELS, parts={"count": 3}, batch=(4, 2), slow=0.5
    )
    spans = [len(cluster.cut.span(p)) for p in range(3)]
    assert 0 in spans, "this test needs one"


def test_partitions_refuse_alike() -> None:
    """One whose own part is finite refuses too (docs/reliability.md, G14)."""
    cluster = ran(4, parts={"count": 2}, spoil=2, left_half_way=())
    assert cluster.boss.not_finite > 0


@pytest.mark.parametrize("time", [0.01, 0.03, 0.1, 0.33])
@pytest.mark.parametrize("parts", [{"count": 1}, {"count": 2}])
def test_halt_at_any_moment_comes_to_rest(time: float, parts: dict[str, Any]) -> None:
    """Also where a partition waits for one that has left the pass already."""
    cluster = Cluster(Setting(points=50, left_half_way=(), parts=parts, slow=0.5), seed=5)

    def halt() -> None:
        cluster.boss.points = []

    cluster.net.at(time, halt)
    cluster.run()
    assert len(cluster.boss.found) < 50
    assert set(cluster.boss.halted) == set(cluster.workers)
    for name, report in cluster.boss.halted.items():
        assert report.pushed == report.acked, name


def test_two_runs_of_one_seed_are_the_same() -> None:
    first, second = ran(6, parts={"count": 2}), ran(6, parts={"count": 2})
    assert first.pushes == second.pushes
    for evaluation, (sums, _) in first.boss.found.items():
        assert sums.tobytes() == second.boss.found[evaluation][0].tobytes()
