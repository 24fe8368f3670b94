"""Sandblaster with real processes: deaths, a slow replica, signals, ends, memory.

Paper A, section 4.2; docs/reliability.md, G7. One BLAS thread a worker, so that a portion's
gradient has the same bits whoever computes it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from tests.cluster.runs import ENDLESS, ROOT, TrainRun, kill, synthetic, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


def batch(*, rows: int = 20_000, **changes: Any) -> dict[str, Any]:
    """40 bundles of some milliseconds a batch."""
    source = {"source": "synthetic", "rows": rows, "features": 100, "classes": 10, "noise": 3.0}
    layers = [
        {"type": "dense", "units": 200, "activation": "sigmoid"},
        {"type": "dense", "units": 10},
    ]
    return {
        **synthetic(rows=rows),
        "data": {"train": source, "test": {**source, "rows": 100, "split": "test"}},
        "network": {"input": [100], "layers": layers, "loss": "softmax"},
        "replicas": 3,
        "optimizer": {"type": "sandblaster", "portion": 100, "send_every": 5, "l2": 0.001},
        "stop": {"steps": 12},
        "threads": 1,
        **changes,
    }


def losses(run: TrainRun) -> dict[int, float]:
    return {r["iteration"]: r["loss"] for r in run.metrics("iteration")}


_known: list[float] = []


@pytest.fixture
def undisturbed(tmp_path: Path) -> list[float]:
    """Of a run that nothing happened to: made once."""
    if not _known:
        with TrainRun(tmp_path, batch(), name="undisturbed") as run:
            assert run.finish() == 0
            found = losses(run)
            assert sorted(found) == list(range(13))
            _known.extend(found[n] for n in sorted(found))
    return _known


@pytest.mark.parametrize("moment", [2, 5, 8])
def test_a_replica_killed_in_the_middle_of_a_batch(
    moment: int, tmp_path: Path, undisturbed: list[float]
) -> None:
    """G7: its bundles go to the others: same losses to 1e-6, and the run ends well without it."""
    with TrainRun(tmp_path, batch()) as run:
        victim = run.node("worker-1.0")
        wait_for(lambda: moment in losses(run), f"iteration {moment}")
        kill(victim)
        assert run.finish() == 0
        deaths = run.metrics("death")
        assert [(d["node"], d["status"]) for d in deaths] == [("worker-1.0", -9)]
        found = losses(run)
        np.testing.assert_allclose([found[n] for n in range(13)], undisturbed, rtol=1e-6)
        assert run.metrics("finished")[-1]["status"] == "max_iterations"
        assert "were left out" not in run.out


def iteration_s(run: TrainRun) -> float:
    times = [r["time"] for r in run.metrics("iteration")]
    return median(after - before for before, after in pairwise(times[2:]))


@pytest.mark.alone
def test_a4_2_backup_copies_hide_a_slow_replica(tmp_path: Path) -> None:
    """One of three is 20 times slower: an iteration takes at most 1.5 times the undisturbed."""
    experiment = batch(rows=60_000, stop={"steps": 9})
    experiment["optimizer"]["send_every"] = 10  # 60 bundles
    slow: dict[str, Any] = {"factories": {"worker": "slow_portions"}}
    slow["env"] = {"DBCTL_TEST_NODE": "worker-2.0"}
    without = json.loads(json.dumps(experiment))
    without["optimizer"]["backup"] = False
    taken, sequences = {}, []
    for name, what, more in (
        ("undisturbed", experiment, {}),
        ("copies", experiment, slow),
        ("none", without, slow),
    ):
        with TrainRun(tmp_path, what, name=name, **more) as run:
            assert run.finish(limit_s=100) == 0
            taken[name] = iteration_s(run)
            sequences.append([losses(run)[n] for n in range(10)])
            backups = run.metrics("iteration")[-1]["backups"]
            assert (backups == 0) == (name == "none")
    print({name: f"{seconds / taken['undisturbed']:.2f}" for name, seconds in taken.items()})
    # Late answers of the slow one never counted.
    np.testing.assert_allclose(sequences[1], sequences[0], rtol=1e-6)
    np.testing.assert_allclose(sequences[2], sequences[0], rtol=1e-6)
    assert taken["copies"] <= 1.5 * taken["undisturbed"]
    assert taken["none"] > 1.2 * taken["copies"]


def test_a_killed_shard_ends_the_run_and_resume_goes_on(
    tmp_path: Path, undisturbed: list[float]
) -> None:
    with TrainRun(tmp_path, batch(checkpoint={"every": "2 steps"})) as run:
        victim = run.node("shard-1")
        wait_for(lambda: 6 in losses(run) and run.checkpoints(), "iteration 6")
        kill(victim)
        assert run.finish() == 1
        assert run.took_s < 5
        assert "shard-1 on localhost was killed by SIGKILL" in run.err
        assert resume(run.dir) == 0
        found = losses(run)
        np.testing.assert_allclose([found[n] for n in range(13)], undisturbed, rtol=1e-6)


def resume(run_dir: Path, *words: str) -> int:
    command = [sys.executable, "-m", "dbctl", "resume", str(run_dir), *words]
    return subprocess.run(command, cwd=ROOT, check=False, timeout=60).returncode


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_in_the_middle_of_a_batch(
    number: int, tmp_path: Path, undisturbed: list[float]
) -> None:
    with TrainRun(tmp_path, batch(stop=ENDLESS)) as run:
        wait_for(lambda: 3 in losses(run), "iteration 3")
        run.signal(number)
        assert run.finish() == (130 if number == signal.SIGINT else 75)
        assert run.took_s < 5
        assert run.step_to_resume() == max(losses(run))
        until = max(losses(run)) + 3
        assert resume(run.dir, "--set", f"stop.steps={until}", "--set", "shards=1") == 0
        found = losses(run)
        assert sorted(found) == list(range(until + 1))
        n_known = min(until + 1, 13)
        np.testing.assert_allclose(
            [found[n] for n in range(n_known)], undisturbed[:n_known], rtol=1e-6
        )


@pytest.mark.parametrize(
    ("optimizer", "status", "code"),
    [
        ({"tolerance": 10.0}, "converged", 0),
        ({"line_search": {"max_trials": 1, "c1": 0.49, "c2": 0.491}}, "line_search_failed", 1),
    ],
)
def test_honest_ends(optimizer: dict[str, Any], status: str, code: int, tmp_path: Path) -> None:
    experiment = batch()
    experiment["optimizer"].update(optimizer)
    with TrainRun(tmp_path, experiment, "--json") as run:
        assert run.finish() == code
        last = json.loads(run.out.splitlines()[-1])
        assert last["event"] == "finished"
        assert last["status"] == status
        assert last["train_loss"] == pytest.approx(losses(run)[max(losses(run))])
        assert len(run.checkpoints()) == 1
        assert last["test_accuracy"] is None  # evaluate is off
        assert ('"event": "error"' in run.out) == (code == 1)


def test_a4_2_the_coordinators_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Paper A, section 4.2: it holds no parameter-sized vector. 10,000 and 10,000,000 of them."""

    def peak(units: int) -> float:
        experiment = batch(rows=300, replicas=1, stop={"steps": 4}, checkpoint={"every": "off"})
        experiment["network"]["layers"][0]["units"] = units
        experiment["optimizer"] |= {"portion": 100, "send_every": 3, "history": 3}
        greatest = 0.0
        with TrainRun(tmp_path, experiment, name=f"run-{units}") as run:
            while 4 not in losses(run):
                greatest = max(greatest, high_water_mib(run.pid))
                time.sleep(0.02)  # the mark only rises, and who looks all the time keeps a core
            run.signal(signal.SIGKILL)  # before the final cut, which is mapped to be written
            run.rest(20.0)
        return greatest

    small, large = peak(90), peak(90_000)
    print(f"{small:.1f} and {large:.1f} MiB")
    assert small > 10
    assert abs(large - small) < 5


def high_water_mib(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
    return int(found[0]) / 1024 if found else 0.0
