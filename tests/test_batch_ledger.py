"""G7 over seeded histories, and mutants that must be caught (docs/reliability.md).

Theory of operation. With portion and send_every fixed the losses of a batch method are a function
of the data: whatever is lost, repeated, overtaken, paused, killed or stopped and resumed, and
however many shards, replicas and partitions there are. So each history has the losses of an
undisturbed run, or something was counted twice, not at all, or of another point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from dbctl.launch.inproc import Faults
from dbctl.optim.gradients import is_finite
from dbctl.optim.vectors import add_to_sums
from dbctl.rights import CONTROLLER
from dbctl.roles.allocation import Allocation
from dbctl.roles.base import Effects
from dbctl.roles.batch_shard import BatchShard
from dbctl.roles.batch_slice import BatchSlice
from dbctl.roles.batch_worker import BatchWorker
from dbctl.roles.slice import Outcome
from dbctl.wire import Message, Peer, Push
from dbctl.wire_batch import Begin, Collect, Execute
from tests.inproc_run import InprocRun, begin, go_on

N_HISTORIES = 40
N_OF_MUTANT = 20
STEPS = 4
TEXT = f"""\
version: 1
name: ledger
seed: 2
data:
  train: {{source: digits, split: train, scale: 0.0625, rows: 60}}
network:
  input: [64]
  layers:
    - {{type: dense, units: 3, activation: sigmoid}}
    - {{type: dense, units: 10}}
  loss: softmax
optimizer: {{type: sandblaster, portion: 5, send_every: 2, history: 3}}
stop: {{steps: {STEPS}}}
checkpoint: {{every: 1 steps}}
"""


def losses(*runs: InprocRun) -> dict[int, float]:
    records = (r.fields for run in runs for r in run.records if r.event == "iteration")
    return {fields["iteration"]: fields["loss"] for fields in records}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    _, run = begin(TEXT, tmp_path_factory.mktemp("run") / "run")
    run.run()
    return losses(run)


def history(seed: int, directory: Path, happened: Counter[str]) -> dict[int, float]:
    """One random history: its losses."""
    random = Random(seed)
    faults = Faults(
        drop=random.choice((0.0, 0.02, 0.1)),
        duplicate=random.choice((0.0, 0.2)),
        delay_s=random.choice((0.001, 0.05)),
        in_pieces=random.choice((0.0, 0.5)),
        step_s=random.choice((0.001, 0.05)),
    )
    replicas = random.randint(2, 4)
    overrides = [f"replicas={replicas}", f"shards={random.randint(1, 3)}"]
    _, run = begin(TEXT, directory, overrides=overrides, faults=faults, seed=seed)
    net, leader = run.net, run.coordinator
    workers = [f"worker-{n}.0" for n in range(replicas)]
    dead = random.sample(workers, random.randint(0, replicas - 1))
    for worker in dead:
        net.at(random.uniform(0.0, 3.0), lambda w=worker: net.kill(w))
    for _ in range(random.randint(0, 4)):
        asleep, nap_s = random.choice([*workers, "shard-0"]), random.uniform(0.1, 2.0)
        net.at(random.uniform(0.0, 3.0), lambda n=asleep, s=nap_s: net.pause(n, s))
    runs = [run]
    if random.random() < 0.5:
        at = random.uniform(0.0, 3.0)
        net.at(at, lambda: net.perform(CONTROLLER, leader.interrupt(net.now, "interrupted")))
    status = run.run().status
    if status == "interrupted":
        happened["interrupt"] += 1
        directory_of = run.life.run_dir
        runs.append(go_on(directory_of, [f"shards={random.randint(1, 3)}"], faults=faults))
        status = runs[-1].run().status
    assert status == "max_iterations", f"seed {seed}: {status}"
    for each in runs:
        happened.update(kind for kind in each.net.happened if each.net.happened[kind])
        happened["backup"] += any(r.fields.get("backups") for r in each.records)
    return losses(*runs)


def test_every_history_has_the_losses_of_an_undisturbed_run(
    tmp_path: Path,
    undisturbed: dict[int, float],
    record_property: Callable[[str, str], None],
) -> None:
    """G7: each bundle counts once, whoever dies; the same losses to 1e-6."""
    happened: Counter[str] = Counter()
    for seed in range(N_HISTORIES):
        found = history(seed, tmp_path / f"{seed}", happened)
        assert sorted(found) == list(range(STEPS + 1)), f"seed {seed}"
        expected = [undisturbed[n] for n in range(STEPS + 1)]
        np.testing.assert_allclose(
            [found[n] for n in range(STEPS + 1)], expected, rtol=1e-6, err_msg=f"seed {seed}"
        )
    counts = ", ".join(f"{kind} {happened[kind]}" for kind in sorted(happened))
    record_property("counted", f"batch ledger: {N_HISTORIES} histories; held {counts}")
    for kind in ("message lost", "message repeated", "piece lost", "kill", "pause", "interrupt"):
        assert happened[kind] >= N_HISTORIES // 6, kind


# ------------------------------------------------------------------------------------- mutants


def counted_again(self: Any, push: Push, *, staleness: int) -> Outcome:
    """A bundle counts as often as it comes."""
    if not self._counting or push.position.epoch != self.version or not is_finite(push.payload):
        return Outcome.DROPPED
    add_to_sums(self._sums, push.payload)
    return Outcome.APPLIED


def late_counted(self: Any, push: Push, *, staleness: int) -> Outcome:
    """A bundle of an earlier evaluation counts in this one."""
    if not self._counting or push.position.index in self._counted:
        return Outcome.DROPPED
    add_to_sums(self._sums, push.payload)
    self._counted.add(push.position.index)
    return Outcome.APPLIED


def carried_out_again(self: Any, now: float, sender: Peer, message: Message) -> Effects:
    """A command that comes twice is carried out twice."""
    if isinstance(message, Execute | Begin | Collect):
        self._filed = message
        return []
    return list(self.shard.receive(now, sender, message))


def said_too_early(self: Any) -> bool:
    """Computed is said before the shards have acknowledged the push."""
    return bool(self._pushed)


def forgotten(self: Any, replica: int) -> None:
    """What a dead replica had to do is nobody's."""
    del self._holding[replica]
    self._left.pop(replica)


MUTANTS: dict[str, tuple[type, str, Any]] = {
    "counted again": (BatchSlice, "take", counted_again),
    "late counted": (BatchSlice, "take", late_counted),
    "carried out again": (BatchShard, "receive", carried_out_again),
    "said too early": (BatchWorker, "_acknowledged", said_too_early),
    "forgotten": (Allocation, "lose", forgotten),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(
    name: str, tmp_path: Path, undisturbed: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute, mutant = MUTANTS[name]
    assert hasattr(owner, attribute)
    monkeypatch.setattr(owner, attribute, mutant)
    monkeypatch.setattr("tests.inproc_run.LIMIT_S", 300.0)
    for seed in range(N_OF_MUTANT):
        try:
            found = history(seed, tmp_path / f"{seed}", Counter())
        except Exception:
            return
        if not np.allclose(
            [found.get(n, 0.0) for n in undisturbed], list(undisturbed.values()), rtol=1e-6, atol=0
        ):
            return
    pytest.fail(f"{name}: {N_OF_MUTANT} histories, none of them wrong")
