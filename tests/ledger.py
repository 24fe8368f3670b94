"""The ledger: a model whose updates are exact integers, so that any push applied twice, lost, torn
or mixed shows in the sums (docs/reliability.md, G1 and G2).

Rate -1, float64. The gradient of replica r at its step s is 1 in element r and s + 1 in element
R + r, so after N steps the two hold N and N (N + 1) / 2, whatever the order of application.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from random import Random
from typing import Any

import numpy as np

from dbctl.experiment.specs import Every, StopSpec
from dbctl.launch.inproc import CONTROLLER, Faults, Network
from dbctl.region import Range
from dbctl.roles.base import Array, BatchResult, Effects, PlainBuffer, Save, View
from dbctl.roles.coordinator import Coordinator, CoordinatorStart
from dbctl.roles.downpour import Downpour, DownpourStart
from dbctl.roles.figures import Part
from dbctl.roles.shard import Shard, ShardStart
from dbctl.wire import Ack, CutPart, Message, Params, Peer, Position, Push, Return, ShardSpan


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


class LedgerGradient:
    """`exact`: the parameters must show this replica's own steps, all of them, at every step."""

    steps_per_epoch = 7

    def __init__(self, replica: int, replicas: int, *, exact: bool) -> None:
        self.tensors: Sequence[tuple[str, Range]] = [("ledger", Range(0, 2 * replicas))]
        self._replica, self._replicas, self._exact = replica, replicas, exact
        self.faults: list[str] = []

    def compute(
        self, at: Position, parameters: Array, out: Array
    ) -> Generator[Any, Any, BatchResult]:
        own = parameters[self._replica]
        if self._exact and own != at.step:
            self.faults.append(f"replica {self._replica} at step {at.step} sees {own} of its own")
        out.fill(0.0)
        out[self._replica] = 1.0
        out[self._replicas + self._replica] = at.step + 1
        return BatchResult(1.0, 1)
        yield


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
            case Return(returned):
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
    """One seeded cluster with its faults; `run` gives what is wrong, nothing when all is well."""

    def __init__(
        self, seed: int, *, make_shard: Callable[..., Shard] = Shard, faults: Faults | None = None
    ) -> None:
        random = Random(seed)
        self.replicas = random.randint(1, 4)
        self.shards = random.randint(1, min(3, 2 * self.replicas))
        self.steps = random.randint(10, 40)
        self.faults = faults or random_faults(random)
        self.watch = Watch()
        self.saved: list[Save] = []
        self._contents: dict[tuple[int, int], Array] = {}
        self.net = Network(seed, self.faults, watch=self.watch, on_save=self._on_save)
        spread = spans(2 * self.replicas, self.shards)
        for span in spread:
            size = span.stop - span.start
            start = ShardStart(
                name=span.node,
                span=Range(span.start, span.stop),
                values=np.zeros(size),
                state={"memory": np.zeros(size)},
                rule=LedgerRule(),
            )
            self.net.add(span.node, make_shard(start, allocate=PlainBuffer, resend_s=0.05))
        self.gradients: dict[int, LedgerGradient] = {}
        n_fetch, n_push = random.choice([1, 1, 2, 3]), random.choice([1, 1, 2, 5])
        overlap, slots = random.random() < 0.6, random.choice([2, 2, 3])
        for replica in range(self.replicas):
            exact = overlap or (n_push == 1 and n_fetch == 1)
            gradient = LedgerGradient(replica, self.replicas, exact=exact)
            self.gradients[replica] = gradient
            worker = DownpourStart(
                gradient=gradient,
                shards=spread,
                rate=lambda n: -1.0,
                n_fetch=n_fetch,
                n_push=n_push,
                overlap=overlap,
                slots=slots,
                dtype="float64",
            )
            self.net.add(
                f"worker-{replica}.0", Downpour(worker, allocate=PlainBuffer, resend_s=0.02)
            )
        self.coordinator = Coordinator(
            CoordinatorStart(
                workers={r: (f"worker-{r}.0",) for r in range(self.replicas)},
                parts={r: Part(rows=7, steps_per_epoch=7) for r in range(self.replicas)},
                shards=[span.node for span in spread],
                stop=StopSpec(steps=self.steps),
                checkpoint=Every(amount=7, unit="steps"),
                warmstart=random.choice([0, 0, 5]),
                max_lead=random.choice([None, None, 4]),
            )
        )
        self.net.add(CONTROLLER, self.coordinator)
        self.killed: set[int] = set()
        self._plan_mishaps(random)

    def _plan_mishaps(self, random: Random) -> None:
        names = [f"shard-{i}" for i in range(self.shards)]
        names += [f"worker-{r}.0" for r in range(self.replicas)]
        for _ in range(random.choice([0, 1, 2])):
            name, seconds = random.choice(names), random.uniform(0.05, 3.0)
            self.net.at(random.uniform(0.0, 0.5), lambda n=name, s=seconds: self.net.pause(n, s))
        if self.replicas > 1 and random.random() < 0.5:
            victim = random.randrange(self.replicas)
            self.net.at(random.uniform(0.0, 0.3), lambda: self._kill(victim))

    def _kill(self, replica: int) -> None:
        if CONTROLLER not in self.net.done:
            self.killed.add(replica)
            self.net.kill(f"worker-{replica}.0")

    def _on_save(self, now: float, save: Save) -> Effects:
        self.saved.append(save)
        self.net.at(now + 0.02, lambda: self._saved(save))
        return []

    def _saved(self, save: Save) -> None:
        for part in save.cut.parts:  # read late, as a slow disk does
            if part.vector == "parameters":
                self._contents[part.number, part.start] = part.payload.copy()
        self.net.perform(CONTROLLER, self.coordinator.saved(self.net.now, ""))

    def run(self) -> list[str]:
        ended = self.net.run(until=lambda: CONTROLLER in self.net.done, limit_s=10_000)
        if not ended:
            return [f"not done after {self.net.now:.0f} s"]
        wrong = list(self.watch.faults)
        for gradient in self.gradients.values():
            wrong += gradient.faults
        if self.net.done[CONTROLLER].status != "done":
            wrong.append(f"ended as {self.net.done[CONTROLLER]}")
        return wrong + self._check_sums() + self._check_cuts()

    def values(self) -> Array:
        parts = [self._shard(i).values for i in range(self.shards)]
        return np.concatenate(parts)

    def _shard(self, index: int) -> Shard:
        role = self.net.role(f"shard-{index}")
        assert isinstance(role, Shard)
        return role

    def _check_sums(self) -> list[str]:
        wrong, total = [], 0
        values = self.values()
        for replica in range(self.replicas):
            counts = self._steps_at_shards(replica)
            n = int(values[replica])
            total += max(counts.values(), default=0)
            expected = counts[self._holder(replica)]
            if n != expected:
                wrong.append(f"replica {replica}: {n} applied, table says {expected}")
            m = counts[self._holder(self.replicas + replica)]
            if values[self.replicas + replica] != m * (m + 1) // 2:
                wrong.append(f"replica {replica}: sum {values[self.replicas + replica]}, {m} steps")
        exact = not self.killed
        if exact and total != self.steps:
            wrong.append(f"{total} steps, expected {self.steps}")
        return wrong

    def _holder(self, element: int) -> int:
        bounds = spans(2 * self.replicas, self.shards)
        return next(i for i, s in enumerate(bounds) if s.start <= element < s.stop)

    def _steps_at_shards(self, replica: int) -> Counter[int]:
        counts: Counter[int] = Counter()
        for index in range(self.shards):
            for row in self._shard(index).table():
                if row.worker == f"worker-{replica}.0":
                    counts[index] = row.position.step
        return counts

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
        for offset, value in enumerate(self._contents[part.number, part.start]):
            replica, second = (part.start + offset) % self.replicas, part.start + offset
            n = steps.get(f"worker-{replica}.0", 0)
            expected = n * (n + 1) // 2 if second >= self.replicas else n
            if value != expected:
                wrong.append(f"cut {part.number}, element {second}: {value}, expected {expected}")
        return wrong


def random_faults(random: Random) -> Faults:
    return Faults(
        drop=random.choice([0.0, 0.05, 0.2]),
        duplicate=random.choice([0.0, 0.1, 0.3]),
        delay_s=random.choice([0.001, 0.01, 0.03]),
        in_pieces=random.choice([0.0, 0.5, 1.0]),
        piece_bytes=8,
    )
