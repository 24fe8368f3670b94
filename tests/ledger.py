"""The ledger: a model whose updates are exact integers, so that any push applied twice, lost, torn
or mixed shows in the sums (docs/reliability.md, G1 and G2).

Rate -1, float64. The gradient of replica r at its step s is 1 in element r and s + 1 in element
R + r, so after N steps the two hold N and N (N + 1) / 2, whatever the order of application.

A replica may be cut into two partitions: the first holds the elements below R, the second the
others. At each step they exchange boxes that name replica, step, round and sender, and look at what
they took until the step ends: a box that is lost, old, mixed or written too early shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from itertools import product
from random import Random
from typing import Any

import numpy as np

from dbctl.experiment.specs import Every, StopSpec
from dbctl.launch.inproc import Faults, Network
from dbctl.model.exchange import Give, Key, Run, Take
from dbctl.region import Range
from dbctl.rights import CONTROLLER
from dbctl.roles.base import Array, BatchResult, Effects, PlainBuffer, Save, View
from dbctl.roles.coordinator import Coordinator, CoordinatorStart
from dbctl.roles.cuts import replica_of
from dbctl.roles.downpour import Downpour, DownpourStart
from dbctl.roles.figures import Part
from dbctl.roles.shard import Shard, ShardStart
from dbctl.shards import READERS_IN_PLACE, ShardSpan, spans_within
from dbctl.wire import Ack, CutPart, Fetch, Message, Params, Peer, Position, Push, Return


class LedgerRule:
    """w <- w + g in float64: exact for integers."""

    def rate(self, n: int) -> float:
        return -1.0

    def update(
        self,
        parameters: Array,
        gradient: Array,
        state: dict[str, Array],
        *,
        n: int,
        rate: float,
        out: Array,
        decay: float = 0.0,
    ) -> None:
        np.subtract(parameters, rate * gradient, out=out)


BOX = 5  # numbers in a box that partitions exchange
ROUNDS = 2


def held(partition: int | None, replicas: int) -> Range:
    """What a partition holds of the ledger; None: a whole replica."""
    start = 0 if partition is None else partition * replicas
    return Range(start, 2 * replicas if partition is None else start + replicas)


def worth(element: int, replicas: int, *, steps: int) -> int:
    """What an element holds after so many steps of its replica."""
    return steps if element < replicas else steps * (steps + 1) // 2


class LedgerGradient:
    """`exact`: the parameters must show this replica's own steps, all of them, at every step."""

    steps_per_epoch = 7

    def __init__(
        self, replica: int, replicas: int, *, exact: bool, partition: int | None = None
    ) -> None:
        span = held(partition, replicas)
        self.tensors: Sequence[tuple[str, Range]] = [("ledger", Range(0, len(span)))]
        # (place in the partition's vector, element) of what this replica's steps add to.
        own = (replica, replicas + replica)
        self._own = [(e - span.start, e) for e in own if span.start <= e < span.stop]
        self._replica, self._replicas, self._exact = replica, replicas, exact
        self._partition = partition
        self._outboxes = [PlainBuffer(BOX, "<f8") for _ in range(ROUNDS)]
        self.faults: list[str] = []

    def compute(
        self, at: Position, parameters: Array, out: Array
    ) -> Generator[Any, Any, BatchResult]:
        out.fill(0.0)
        for place, element in self._own:
            now, next_ = (worth(element, self._replicas, steps=at.step + i) for i in (0, 1))
            if self._exact and parameters[place] != now:
                self._wrong(at, f"sees {parameters[place]} in element {element}, not {now}")
            out[place] = next_ - now
        if self._partition is not None:
            yield from self._exchange(at, self._partition)
        return BatchResult(1.0, 1)

    def _exchange(self, at: Position, partition: int) -> Generator[Any, Any, None]:
        """Gives and takes a box a round; what was taken is looked at until the end."""
        other = 1 - partition
        taken: list[tuple[Array, Array]] = []
        for turn, outbox in enumerate(self._outboxes):
            key = Key("states", turn)
            np.copyto(outbox.array, self._box(at, turn, sender=partition))
            yield Give(key, {other: Run(outbox, 0, BOX)})
            found = yield Take(key, (other,))
            taken.append((found[other], self._box(at, turn, sender=other)))
            for array, expected in taken:
                if not np.array_equal(array, expected):
                    self._wrong(at, f"took {array}, not {expected}")

    def _box(self, at: Position, turn: int, *, sender: int) -> Array:
        return np.array([self._replica, at.step, turn, sender, at.step + turn], "f8")

    def _wrong(self, at: Position, what: str) -> None:
        self.faults.append(f"replica {self._replica} at step {at.step} {what}")


class Watch:
    """Nobody writes what was handed out: contents are compared at hand-out and at return."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self._acked: Counter[tuple[str, str]] = Counter()
        self._returned: Counter[tuple[str, str]] = Counter()
        self._out: dict[tuple[str, str, int], tuple[Array, Array]] = {}
        self._pushed: dict[tuple[str, str, int], tuple[Array, Array]] = {}

    def __call__(self, now: float, sender: Peer, to: str, message: Message) -> None:
        match message:
            case Params() | CutPart() if isinstance(message.payload, View):
                array = message.payload.array
                # One at or below what the reader gave back is ignored by it, and may change.
                if message.handout > self._returned[sender.node, to]:
                    self._out.setdefault((sender.node, to, message.handout), (array, array.copy()))
            case Push() if isinstance(message.payload, View):
                array = message.payload.array
                # One that was acknowledged is not read again, and may change.
                if message.seq > self._acked[sender.node, to]:
                    self._pushed.setdefault((sender.node, to, message.seq), (array, array.copy()))
                self._check_pushed(sender.node, to)
                self._check_out(to, sender.node, message.returned)
            case Return(returned) | Fetch(returned=returned):
                self._check_out(to, sender.node, returned)
            case Ack():
                self._acknowledged(to, sender.node, message)

    def _acknowledged(self, worker: str, shard: str, ack: Ack) -> None:
        self._acked[worker, shard] = max(ack.seq, self._acked[worker, shard])
        for key in [k for k in self._pushed if k[:2] == (worker, shard) and k[2] <= ack.seq]:
            array, copy = self._pushed.pop(key)
            if not np.array_equal(array, copy):
                self.faults.append(f"push {key} changed before it was acknowledged")

    def _check_pushed(self, worker: str, shard: str) -> None:
        for key, (array, copy) in self._pushed.items():
            if key[:2] == (worker, shard) and not np.array_equal(array, copy):
                self.faults.append(f"push {key} changed before it was acknowledged")

    def _check_out(self, shard: str, reader: str, returned: int) -> None:
        self._returned[shard, reader] = max(returned, self._returned[shard, reader])
        for key in [k for k in self._out if k[:2] == (shard, reader) and k[2] <= returned]:
            array, copy = self._out.pop(key)
            if not np.array_equal(array, copy):
                self.faults.append(f"hand-out {key} changed while it was out")


def spans(size: int, shards: int) -> tuple[ShardSpan, ...]:
    cuts = Range(0, size).split(shards)
    return tuple(ShardSpan(f"shard-{i}", cut.start, cut.stop) for i, cut in enumerate(cuts))


class History:
    """One seeded cluster with its faults; `run` gives what is wrong, nothing when all is well.

    `cut`: replicas of two partitions; None: by the seed, four of ten are.
    """

    def __init__(
        self,
        seed: int,
        *,
        make_shard: Callable[..., Shard] = Shard,
        faults: Faults | None = None,
        cut: bool | None = None,
    ) -> None:
        random = Random(seed)
        self.replicas = random.randint(1, 4)
        self.shards = random.randint(1, min(3, 2 * self.replicas))
        self.steps = random.randint(10, 40)
        self.faults = faults or random_faults(random)
        self.cut = random.random() < 0.4 if cut is None else cut
        self.partitions: tuple[int | None, ...] = (0, 1) if self.cut else (None,)
        self.spans = spans(2 * self.replicas, self.shards)
        self.watch = Watch()
        self.saved: list[Save] = []
        self._contents: dict[tuple[int, int], Array] = {}
        self.net = Network(seed, self.faults, watch=self.watch, on_save=self._on_save)
        for span in self.spans:
            self.net.add(span.node, self._make_shard(span, make_shard))
        self.gradients: list[LedgerGradient] = []
        self._add_workers(random)
        self.coordinator = Coordinator(
            CoordinatorStart(
                workers={r: self.workers(r) for r in range(self.replicas)},
                parts={r: Part(rows=7, steps_per_epoch=7) for r in range(self.replicas)},
                shards=[span.node for span in self.spans],
                stop=StopSpec(steps=self.steps),
                checkpoint=Every(amount=7, unit="steps"),
                warmstart=random.choice([0, 0, 5]),
                max_lead=random.choice([None, None, 4]),
            )
        )
        self.net.add(CONTROLLER, self.coordinator)
        self.killed: set[int] = set()
        self.interrupted = False
        self._plan_mishaps(random)

    def workers(self, replica: int) -> tuple[str, ...]:
        return tuple(worker(replica, partition) for partition in self.partitions)

    def _make_shard(self, span: ShardSpan, make_shard: Callable[..., Shard]) -> Shard:
        size = span.stop - span.start
        start = ShardStart(
            name=span.node,
            span=Range(span.start, span.stop),
            values=np.zeros(size),
            state={"memory": np.zeros(size)},
            rule=LedgerRule(),
            partitions=[held(partition, self.replicas) for partition in self.partitions],
        )
        return make_shard(start, allocate=PlainBuffer, resend_s=0.05)

    def _add_workers(self, random: Random) -> None:
        n_fetch, n_push = random.choice([1, 1, 1, 2, 3]), random.choice([1, 1, 2, 5])
        overlap, slots = random.random() < 0.5, random.choice([2, 2, 3])
        blocking = not overlap and n_fetch == 1
        self.in_place = blocking and self.replicas <= READERS_IN_PLACE
        exact = overlap or (n_push == 1 and n_fetch == 1)
        for replica, partition in product(range(self.replicas), self.partitions):
            gradient = LedgerGradient(replica, self.replicas, exact=exact, partition=partition)
            self.gradients.append(gradient)
            mine = held(partition, self.replicas)
            others = () if partition is None else (1 - partition,)
            start = DownpourStart(
                gradient=gradient,
                shards=spans_within(self.spans, mine),
                rate=lambda n: -1.0,
                n_fetch=n_fetch,
                n_push=n_push,
                overlap=overlap,
                in_place=self.in_place,
                slots=slots,
                origin=mine.start,
                partition=partition or 0,
                partners={other: worker(replica, other) for other in others},
                dtype="float64",
            )
            name = worker(replica, partition)
            self.net.add(name, Downpour(start, allocate=PlainBuffer, resend_s=0.02))

    # ----------------------------------------------------------------------------------- mishaps

    def _plan_mishaps(self, random: Random) -> None:
        names = [span.node for span in self.spans]
        names += [name for r in range(self.replicas) for name in self.workers(r)]
        for _ in range(random.choice([0, 1, 2])):
            name, seconds = random.choice(names), random.uniform(0.05, 3.0)
            self.net.at(random.uniform(0.0, 0.5), lambda n=name, s=seconds: self.net.pause(n, s))
        if self.replicas > 1 and random.random() < 0.6:
            victim, first = random.randrange(self.replicas), random.choice(self.partitions)
            later_s = self.faults.death_seen_s + random.uniform(0.0, 0.1)
            self.net.at(random.uniform(0.0, 0.3), lambda: self._kill(victim, first, later_s))
        if random.random() < 0.2:
            self.net.at(random.uniform(0.0, 0.4), self._interrupt)

    def _kill(self, replica: int, partition: int | None, later_s: float) -> None:
        """One partition dies; when that was seen the session ends the others of its replica."""
        if CONTROLLER in self.net.done:
            return
        self.killed.add(replica)
        self.net.kill(worker(replica, partition))
        for other in self.workers(replica):
            self.net.at(self.net.now + later_s, lambda name=other: self.net.kill(name))

    def _interrupt(self) -> None:
        if CONTROLLER not in self.net.done:
            self.interrupted = True
            effects = self.coordinator.interrupt(self.net.now, "interrupted")
            self.net.perform(CONTROLLER, effects)

    def _on_save(self, now: float, save: Save) -> Effects:
        self.saved.append(save)
        self.net.at(now + 0.02, lambda: self._saved(save))
        return []

    def _saved(self, save: Save) -> None:
        for part in save.cut.parts:  # read late, as a slow disk does
            if part.vector == "parameters":
                self._contents[part.number, part.start] = part.payload.copy()
        self.net.perform(CONTROLLER, self.coordinator.saved(self.net.now, ""))

    # ---------------------------------------------------------------------------------- judgement

    def run(self, *, limit_s: float = 10_000) -> list[str]:
        ended = self.net.run(until=lambda: CONTROLLER in self.net.done, limit_s=limit_s)
        if not ended:
            return [f"not done after {self.net.now:.0f} s"]
        wrong = list(self.watch.faults)
        for gradient in self.gradients:
            wrong += gradient.faults
        status = "interrupted" if self.interrupted else "done"
        if self.net.done[CONTROLLER].status != status:
            wrong.append(f"ended as {self.net.done[CONTROLLER]}")
        return wrong + self._check_sums() + self._check_cuts()

    def values(self) -> Array:
        return np.concatenate([self._shard(span).values for span in self.spans])

    def _shard(self, span: ShardSpan) -> Shard:
        role = self.net.role(span.node)
        assert isinstance(role, Shard)
        return role

    def _check_sums(self) -> list[str]:
        """Each element is worth the steps that its shard's table says, and no step is missing."""
        wrong, total = [], 0
        for replica in range(self.replicas):
            steps = [self._steps(e) for e in (replica, self.replicas + replica)]
            total += self._applied(replica)
            if replica not in self.killed and len(set(steps)) > 1:
                wrong.append(f"replica {replica}: its partitions did {steps} steps")
        for element, value in enumerate(self.values()):
            expected = worth(element, self.replicas, steps=self._steps(element))
            if value != expected:
                wrong.append(f"element {element}: {value}, its table says {expected}")
        if not self.interrupted and total != self.steps:
            wrong.append(f"{total} steps, expected {self.steps}")
        return wrong

    def _applied(self, replica: int) -> int:
        """Steps of which a shard has something: those of a dead replica need not be everywhere."""
        rows = [row for span in self.spans for row in self._shard(span).table()]
        mine = (row.position.step for row in rows if replica_of(row.worker) == replica)
        return max(mine, default=0)

    def _owner(self, element: int) -> str:
        """The worker whose pushes an element is made of."""
        partition = element // self.replicas if self.cut else None
        return worker(element % self.replicas, partition)

    def _steps(self, element: int) -> int:
        span = next(s for s in self.spans if s.start <= element < s.stop)
        rows = {row.worker: row.position.step for row in self._shard(span).table()}
        return rows.get(self._owner(element), 0)

    def _check_cuts(self) -> list[str]:
        """A cut holds, of each replica, just the steps that its own table says."""
        wrong = []
        for save in self.saved:
            for part in save.cut.parts:
                if part.vector == "parameters":
                    wrong += self._check_part(part)
        return wrong

    def _check_part(self, part: CutPart) -> list[str]:
        steps = {row.worker: row.position.step for row in part.table}
        wrong = []
        for element, value in enumerate(self._contents[part.number, part.start], part.start):
            n = steps.get(self._owner(element), 0)
            expected = worth(element, self.replicas, steps=n)
            if value != expected:
                wrong.append(f"cut {part.number}, element {element}: {value}, not {expected}")
        return wrong


def worker(replica: int, partition: int | None) -> str:
    return f"worker-{replica}.{partition or 0}"


def random_faults(random: Random) -> Faults:
    return Faults(
        drop=random.choice([0.0, 0.05, 0.2]),
        duplicate=random.choice([0.0, 0.1, 0.3]),
        delay_s=random.choice([0.001, 0.01, 0.03]),
        in_pieces=random.choice([0.0, 0.5, 1.0]),
        piece_bytes=8,
    )
