"""A run's records as curves: loss and accuracy against time, processes, examples and bytes.

Rules of this file: pure; records in, numbers out. It believes nothing of a record: a field that is
missing, null or of another type is as if it had not been measured, an event that it does not know
adds nothing. So a run that is going on, was killed, or is of another method gives what it has.

Theory of operation. Nodes report totals since they began (`examples`, `bytes_...`), at moments of
their own; each report adds a `Mark` of the sums, and where a curve's point stands is read off
between two marks. A loss that names a node is that of its replica, and the run's is the mean of
all; one that names no node (an iteration of a batch method) is the run's own. A `start` begins
another life: what earlier ones did after its time was lost with them and is left out, and totals
count on from there. Resources are those of Dean et al. 2012, figure 5, on one machine: processes
that compute, of all replicas and partitions, times the seconds that they were held.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

_BYTES = ("bytes_fetched", "bytes_pushed", "bytes_exchanged")

Record = Mapping[str, Any]


class Mark(NamedTuple):
    """What a run had spent at one moment of its training, from its very beginning."""

    seconds: float
    replica_seconds: float = 0.0
    examples: float = 0.0
    bytes: float = 0.0


class Point(NamedTuple):
    """A value of a curve and when it was known."""

    mark: Mark
    value: float


@dataclass(frozen=True, kw_only=True)
class History:
    """One run. `status`: of its end; None while its newest life has not said any.

    `losses` are means over training rows as workers report them, `accuracies` shares of the test
    rows. What a run's records do not say is None.
    """

    name: str | None
    optimizer: str | None
    replicas: int | None
    partitions: int | None
    shards: int | None
    status: str | None
    steps: int
    spent: Mark
    losses: tuple[Point, ...]
    accuracies: tuple[Point, ...]

    @property
    def best(self) -> float | None:
        """The greatest accuracy."""
        return max((point.value for point in self.accuracies), default=None)

    @property
    def last(self) -> float | None:
        return self.accuracies[-1].value if self.accuracies else None

    def reach(self, accuracy: float) -> Mark | None:
        """What had been spent when `accuracy` was first measured; None: it never arrived."""
        return next((p.mark for p in self.accuracies if p.value >= accuracy), None)


def common_accuracy(histories: Iterable[History]) -> float | None:
    """The greatest accuracy that all reached, of those with any; None where there is none."""
    return min((h.best for h in histories if h.best is not None), default=None)


def read_history(records: Iterable[Record]) -> History:
    """The history that the lines of metrics.jsonl tell."""
    reader = _Reader()
    for record in records:
        reader.read(record)
    return reader.history()


class _Life:
    """Totals of one life of the run, by node and replica."""

    def __init__(self, base: Mark) -> None:
        self.base = base
        self.workers: int | None = None  # processes that compute; None: as many as reported
        self.lost: set[Any] = set()
        self.partitions = 1
        self.nodes: set[str] = set()
        self.examples: dict[Any, float] = {}
        self.bytes: dict[str, dict[str, float]] = {}
        self.steps: dict[Any, float] = {}
        self.losses: dict[Any, float] = {}

    @property
    def computing(self) -> int:
        n_workers = self.workers if self.workers is not None else len(self.nodes)
        return max(0, n_workers - len(self.lost) * self.partitions)

    def mark(self, seconds: float, replica_seconds: float) -> Mark:
        n_bytes = sum(sum(totals.values()) for totals in self.bytes.values())
        examples = self.base.examples + sum(self.examples.values())
        return Mark(seconds, replica_seconds, examples, self.base.bytes + n_bytes)


class _Reader:
    def __init__(self) -> None:
        self._life = _Life(Mark(0.0))
        self._marks = [self._life.base]
        self._losses: list[tuple[float, float]] = []
        self._own_losses: list[tuple[float, float]] = []
        self._accuracies: list[tuple[float, float]] = []
        self._now = 0.0
        self._start: Record = {}
        self._status: str | None = None
        self._steps: float | None = None

    def read(self, record: Record) -> None:
        seconds, event = _number(record, "time"), record.get("event")
        if seconds is None:
            return
        if event == "start":
            self._now = seconds
            self._begin(seconds, record)
            return
        seconds = self._now = max(seconds, self._now)  # a run's own clock only goes on
        node = record.get("node")
        if event == "lost" and isinstance(node, str) and node.startswith("worker-"):
            self._advance(seconds)
            self._life.lost.add(_replica(record, node))
        elif event == "evaluation":
            self._steps_are(record)
            self._add(self._accuracies, seconds, _number(record, "accuracy"))
        elif event == "finished":
            self._finish(seconds, record)
        elif isinstance(node, str):
            self._report(seconds, node, record)
        else:
            self._steps_are(record)
            self._add(self._own_losses, seconds, _number(record, "loss"))

    def history(self) -> History:
        self._advance(self._now)
        start, optimizer = self._start, self._start.get("optimizer")
        method = start.get("method")
        words = [word for word in (optimizer, method) if isinstance(word, str)]
        steps = self._steps if self._steps is not None else sum(self._life.steps.values())
        name = start.get("name")
        return History(
            name=name if isinstance(name, str) else None,
            optimizer=" ".join(dict.fromkeys(words)) or None,
            replicas=_count(start, "replicas"),
            partitions=_count(start, "partitions"),
            shards=_count(start, "shards"),
            status=self._status,
            steps=round(steps),
            spent=self._marks[-1],
            losses=self._points(self._own_losses or self._losses),
            accuracies=self._points(self._accuracies),
        )

    # ------------------------------------------------------------------------ what is told

    def _begin(self, seconds: float, record: Record) -> None:
        """Another life, from where `seconds` says: what came after is not of this run any more."""
        base = _between(self._marks, seconds)
        self._marks = [mark for mark in self._marks if mark.seconds < seconds] + [base]
        for series in (self._losses, self._own_losses, self._accuracies):
            series[:] = [point for point in series if point[0] <= seconds]
        self._life = life = _Life(base)
        self._start, self._status, self._steps = record, None, None
        replicas, partitions = _count(record, "replicas"), _count(record, "partitions")
        if replicas is not None and partitions is not None:
            life.workers, life.partitions = replicas * partitions, partitions

    def _report(self, seconds: float, node: str, record: Record) -> None:
        """Totals of a node; all partitions of a replica count the same examples and steps."""
        life, replica = self._life, _replica(record, node)
        loss, examples = _number(record, "loss"), _number(record, "examples")
        if examples is not None:
            life.nodes.add(node)
            life.examples[replica] = max(life.examples.get(replica, 0.0), examples)
        if (step := _number(record, "step")) is not None:
            life.steps[replica] = step
        for key in _BYTES:
            if (total := _number(record, key)) is not None:
                life.bytes.setdefault(node, {})[key] = total
        if loss is not None:
            life.losses[replica] = loss
            mean = sum(life.losses.values()) / len(life.losses)
            self._add(self._losses, seconds, mean)
        self._advance(seconds)

    def _finish(self, seconds: float, record: Record) -> None:
        self._steps_are(record)
        self._advance(seconds)
        status, examples = record.get("status"), _number(record, "examples")
        self._status = status if isinstance(status, str) else None
        if examples is not None:  # the workers' last words may not have come
            self._marks[-1] = self._marks[-1]._replace(examples=examples)

    def _steps_are(self, record: Record) -> None:
        for key in ("steps", "iteration"):
            if (steps := _number(record, key)) is not None:
                self._steps = steps

    def _advance(self, seconds: float) -> None:
        """A mark of what has been spent by now; nothing is ever taken back."""
        last = self._marks[-1]
        passed = max(0.0, seconds - last.seconds)
        held = last.replica_seconds + passed * self._life.computing
        self._marks.append(Mark(*map(max, self._life.mark(seconds, held), last)))

    def _add(self, series: list[tuple[float, float]], seconds: float, value: float | None) -> None:
        if value is not None:
            series.append((seconds, value))

    def _points(self, series: Sequence[tuple[float, float]]) -> tuple[Point, ...]:
        return tuple(Point(_between(self._marks, seconds), value) for seconds, value in series)


def _between(marks: Sequence[Mark], seconds: float) -> Mark:
    """The mark at `seconds`, on the line between its neighbours; at most the last one."""
    after = bisect_right(marks, seconds, key=lambda mark: mark.seconds)
    if after in (0, len(marks)):
        return marks[after - 1 if after else 0]._replace(seconds=seconds)
    left, right = marks[after - 1], marks[after]
    share = (seconds - left.seconds) / (right.seconds - left.seconds)
    return Mark(*(min(b, a + share * (b - a)) for a, b in zip(left, right, strict=True)))


def _replica(record: Record, node: str) -> object:
    """What the partitions of one replica have in common."""
    replica = _count(record, "replica")
    return replica if replica is not None else node.partition(".")[0]


def _number(record: Record, key: str) -> float | None:
    """An amount: nothing that is recorded is below 0."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if isfinite(value) and value >= 0 else None


def _count(record: Record, key: str) -> int | None:
    value = record.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
