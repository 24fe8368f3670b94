"""What the coordinator knows of the run in numbers: totals, rates, losses, staleness.

Rules of this file: pure. Reports are totals; everything here is a sum or a difference of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from dbctl.wire import BEGINNING, Position, Report, ShardReport

RATE_WINDOW_S = 5.0
RATE_MIN_S = 0.4  # reports closer together say little
DIVERGED_FACTOR = 10.0  # ours: of the first loss; an untrained network is seldom so bad
FIRST_LOSS_ROWS = 16  # of fewer rows the mean may be small by chance


@dataclass(frozen=True, kw_only=True)
class Part:
    """A replica's share: its rows, the mini-batches they make, where it stood at the begin."""

    rows: int
    steps_per_epoch: int
    begin: Position = BEGINNING
    batch_size: int = 1

    def rows_at(self, at: Position) -> int:
        """Rows passed by who stands there, from the first epoch on."""
        return at.epoch * self.rows + min(at.index * self.batch_size, self.rows)


class Figures:
    """`parts`: one a replica. `examples` and `seconds` are what an earlier life of the run did."""

    def __init__(
        self, parts: Mapping[int, Part], *, examples: int = 0, seconds: float = 0.0
    ) -> None:
        self._parts = dict(parts)
        self._reports: dict[int, Report] = {}
        # Of staleness: by worker and of all, so that nobody walks all workers for one of them.
        self._counts: dict[str, dict[tuple[str, int], int]] = {}
        self._staleness: dict[int, int] = {}
        self._refused: dict[str, int] = {}  # pushes, by shard
        self._applied: dict[str, tuple[int, int]] = {}  # updates, and what was refused by then
        self._examples_before = self._examples = examples
        self._examples_of: dict[int, int] = {}  # what each replica has in that sum
        self._seconds_before = seconds
        self._began: float | None = None
        self._ended: float | None = None
        self._window: deque[tuple[float, int]] = deque()
        self._rated: dict[int, tuple[float, int]] = {}
        self._rates: dict[int, float] = {}
        self.dead: set[int] = set()
        self._settled: dict[int, Position] = {}
        self.first_loss: float | None = None  # mean of the first rows, of the first life if known
        self.gradient_norm: float | None = None  # of the whole batch: batch methods only
        self.test_loss: float | None = None
        self.test_accuracy: float | None = None

    @property
    def n_replicas(self) -> int:
        return len(self._parts)

    def begin(self, now: float) -> None:
        self._began = now
        self._window.append((now, self.examples))

    def end(self, now: float) -> None:
        """The last acknowledgement has come: the clock of the run stops."""
        self._ended = self._ended if self._ended is not None else now

    def report(self, now: float, replica: int, report: Report) -> None:
        before = self._reports.get(replica)
        if before is not None and before.position > report.position:
            return  # overtaken on its way: totals only grow
        first = report.epoch_loss
        if self.first_loss is None and first.rows >= FIRST_LOSS_ROWS and isfinite(first.sum):
            self.first_loss = first.sum / first.rows
        self._measure_rate(now, replica, report)
        self._reports[replica] = report
        self._count(replica)
        self._window.append((now, self.examples))
        while self._window and now - self._window[0][0] > RATE_WINDOW_S:
            self._window.popleft()

    def _measure_rate(self, now: float, replica: int, report: Report) -> None:
        since, before = self._rated.get(replica, (self._began or now, 0))
        if now - since >= RATE_MIN_S:
            self._rates[replica] = (report.examples - before) / (now - since)
            self._rated[replica] = (now, report.examples)

    def rate(self, replica: int) -> float | None:
        """Examples a second of one replica, between reports some time apart."""
        return self._rates.get(replica)

    def staleness_of(self, worker: str) -> dict[int, int]:
        """How many of the worker's pushes had each staleness, all shards together."""
        counts: dict[int, int] = {}
        for (_, value), count in self._counts.get(worker, {}).items():
            counts[value] = counts.get(value, 0) + count
        return dict(sorted(counts.items()))

    def shard_report(self, shard: str, report: ShardReport) -> None:
        for worker, value, count in report.staleness:
            counts = self._counts.setdefault(worker, {})
            new = count - counts.get((shard, value), 0)
            self._staleness[value] = self._staleness.get(value, 0) + new
            counts[shard, value] = count
        self._refused[shard] = report.refused
        updates, _ = self._applied.get(shard, (0, 0))
        if report.updates != updates:
            self._applied[shard] = (report.updates, report.refused)

    def settle(self, replica: int, position: Position) -> None:
        """What the shards have applied of a dead replica, which it could not report any more."""
        self._settled[replica] = max(position, self._parts[replica].begin)
        self._count(replica)

    def reach(self, positions: Mapping[int, Position]) -> None:
        """The run is over, and its checkpoint is of these: a report may not have come in time."""
        for replica, position in positions.items():
            self._settled[replica] = max(position, self.position(replica))
            self._count(replica)

    def position(self, replica: int) -> Position:
        if replica in self._settled:
            return self._settled[replica]
        report = self._reports.get(replica)
        return report.position if report is not None else self._parts[replica].begin

    def seconds(self, now: float) -> float:
        if self._began is None:
            return self._seconds_before
        return self._seconds_before + (self._ended or now) - self._began

    @property
    def examples(self) -> int:
        """As reported; of a dead replica what the shards have applied."""
        return max(0, self._examples)

    def examples_at(self, positions: Mapping[int, Position]) -> int:
        """Examples when the replicas stood there: a cut is ahead of the reports, or behind them."""
        total = self._examples_before
        for replica in self._parts:
            total += self._examples_by(replica, positions.get(replica, self.position(replica)))
        return max(0, total)

    def _examples_by(self, replica: int, at: Position) -> int:
        part, report = self._parts[replica], self._reports.get(replica)
        said = report.position if report else part.begin
        return part.rows_at(at) - part.rows_at(said) + (report.examples if report else 0)

    def _count(self, replica: int) -> None:
        """Whenever one has changed: each report asks for the sum, and walks no other replicas."""
        examples = self._examples_by(replica, self.position(replica))
        self._examples += examples - self._examples_of.get(replica, 0)
        self._examples_of[replica] = examples

    @property
    def steps(self) -> int:
        return sum(self.position(replica).step for replica in self._parts)

    @property
    def epochs(self) -> float:
        """Passes over all rows, a dead replica's with what it did: a death is no jump."""
        return self._weighted(self._passes)

    def reachable_epochs(self, wanted: float) -> float:
        """What `epochs` will be once each living replica has done `wanted` passes."""
        return self._weighted(lambda r: self._passes(r) if r in self.dead else wanted)

    def _passes(self, replica: int) -> float:
        at = self.position(replica)
        return at.epoch + at.index / self._parts[replica].steps_per_epoch

    def _weighted(self, value: Callable[[int], float]) -> float:
        """The mean over the replicas by their rows."""
        held = {replica: part.rows for replica, part in self._parts.items() if part.rows}
        return sum(n * value(replica) for replica, n in held.items()) / max(1, sum(held.values()))

    def loss(self, *, last_epoch: bool) -> float | None:
        """Mean training loss: of each replica's last whole epoch, or of the one in hand."""
        total, rows = 0.0, 0
        for report in self._reports.values():
            losses = (report.epoch_loss, report.last_epoch_loss)
            first, second = reversed(losses) if last_epoch else losses
            loss = first if first.rows else second
            total, rows = total + loss.sum, rows + loss.rows
        return total / rows if rows else None

    def diverged(self) -> bool:
        """Whether the training loss is not finite, or absurd beside what it began with."""
        loss, first = self.loss(last_epoch=True), self.first_loss
        if loss is None:
            return False
        return not isfinite(loss) or (first is not None and loss > DIVERGED_FACTOR * first)

    def examples_per_second(self, now: float) -> float | None:
        """Over the last seconds, for display; None before the first example of this life."""
        if len(self._window) < 2 or not self._new_examples:
            return None
        (since, before), (until, after) = self._window[0], self._window[-1]
        return (after - before) / (until - since) if until - since >= RATE_MIN_S else None

    def mean_examples_per_second(self, now: float) -> float | None:
        """Over this life of the run, from the first grant to the last acknowledgement; None before
        its first example.
        """
        seconds, done = self.seconds(now) - self._seconds_before, self._new_examples
        return done / seconds if done and seconds > 0 else None

    @property
    def _new_examples(self) -> int:
        """Of this life."""
        return self.examples - self._examples_before

    def staleness(self) -> dict[int, int]:
        """How many pushes had each staleness, all shards and replicas together."""
        return dict(sorted(self._staleness.items()))

    def mean_staleness(self) -> float | None:
        counts = self.staleness()
        total = sum(counts.values())
        return sum(value * count for value, count in counts.items()) / total if total else None

    def fetch_wait_share(self) -> float | None:
        waited = sum(r.fetch_wait_s + r.push_wait_s for r in self._reports.values())
        total = waited + sum(r.compute_s for r in self._reports.values())
        return waited / total if total > 0 else None

    def refused(self) -> int:
        return sum(report.refused for report in self._reports.values())

    def refused_pushes(self) -> int:
        """Sums of gradients that were not finite, as the shards found, though each of them was."""
        return sum(self._refused.values())

    def refused_in_a_row(self, shard: str) -> int:
        """How many pushes it has refused since it applied one, of those that are known of."""
        _, before = self._applied.get(shard, (0, 0))
        return self._refused.get(shard, 0) - before

    def left_out(self) -> dict[int, int]:
        """Rows of dead replicas that nobody computes any more, by replica."""
        return {replica: self._parts[replica].rows for replica in sorted(self.dead)}

    def summary(self, now: float) -> dict[str, Any]:
        """The fields of the `finished` event that this object knows."""
        return {
            "steps": self.steps,
            "epochs": round(self.epochs, 6),
            "examples": self.examples,
            "seconds": self.seconds(now),
            "examples_per_second": self.mean_examples_per_second(now),
            "train_loss": self.loss(last_epoch=True),
            "test_loss": self.test_loss,
            "test_accuracy": self.test_accuracy,
        }
