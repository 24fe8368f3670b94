"""Runs that end as they should, and what they leave: a run directory and nothing else.

docs/reliability.md, G11 and G13; tensorflow#4713, pytorch#73320, pytorch#63247, mxnet#2412,
pytorch#38174.
"""

from __future__ import annotations

import os
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from dbctl.checkpoint.reader import open_checkpoint
from dbctl.run.show import look
from tests.cluster.runs import ENDLESS, TrainRun, digits, synthetic, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(90)]


def manifest(run: TrainRun) -> Any:
    [step] = run.checkpoints()
    return open_checkpoint(run.dir / "checkpoints" / f"step-{step:09d}", verify=False).manifest


def test_two_runs_of_one_file_at_once(tmp_path: Path) -> None:
    """Default directories, made in the same second: separate results, no fixed port or name."""
    experiment = digits(stop={"epochs": 10})
    with (
        TrainRun(tmp_path, experiment, default_dir=True) as one,
        TrainRun(tmp_path, experiment, default_dir=True, name="two") as two,
    ):
        for run in (one, two):
            run.process.wait(40.0)
    found = sorted((tmp_path / "runs" / "digits-downpour").iterdir())
    assert len(found) == 2
    assert {one.out.split(" · ")[-1].strip(), two.out.split(" · ")[-1].strip()} == {
        str(path.relative_to(tmp_path)) for path in found
    }
    for run, path in zip((one, two), found, strict=True):
        assert run.process.returncode == 0, run.story()
        run.dir = path
        assert run.metrics("finished")[-1]["epochs"] == 10.0
        assert len(run.checkpoints()) == 1
        run.assert_nothing_left()


def test_32_replicas(tmp_path: Path) -> None:
    # 44 rows each, two batches an epoch: what is computed is a dozen updates old when it arrives.
    experiment = digits(replicas=32, stop={"epochs": 60})
    begin = time.monotonic()
    with TrainRun(tmp_path, experiment) as run:
        assert run.finish(60.0) == 0
        assert time.monotonic() - begin < 60.0
        finished = run.metrics("finished")[-1]
        assert finished["epochs"] == 60.0
        assert finished["test_accuracy"] >= 0.9
        assert not run.metrics("death")


@pytest.mark.parametrize(
    ("rows", "replicas", "batch_size", "steps"),
    [
        (1003, 4, 64, [8, 8, 8, 8]),  # 251, 251, 251 and 250 rows: four batches each
        (2, 3, 16, [2, 2, 0]),  # a replica that has none
        (5, 2, 16, [2, 2]),  # less than a batch
    ],
)
def test_rows_that_do_not_divide(
    tmp_path: Path, rows: int, replicas: int, batch_size: int, steps: list[int]
) -> None:
    """Two passes: each row twice, exactly."""
    experiment = synthetic(rows=rows, batch_size=batch_size, replicas=replicas)
    with TrainRun(tmp_path, experiment) as run:
        assert run.finish() == 0
        finished = run.metrics("finished")[-1]
        assert (finished["examples"], finished["epochs"]) == (2 * rows, 2.0)
        assert [run.step(f"worker-{r}.0") for r in range(replicas)] == steps
        last = {r["node"]: r["examples"] for r in run.metrics("worker")}
        share = [len(range(r, rows, replicas)) for r in range(replicas)]
        assert [last[f"worker-{r}.0"] for r in range(replicas)] == [2 * n for n in share]


def test_1000_steps_are_exactly_1000(tmp_path: Path) -> None:
    """Replicas of different speed share them; metrics, status and manifest agree."""
    experiment = digits(replicas=3, stop={"steps": 1000})
    env = {"DBCTL_TEST_NODE": "worker-2.0", "DBCTL_TEST_SECONDS": "0.005"}
    factories = {"worker": "slow_gradient"}
    with TrainRun(tmp_path, experiment, factories=factories, env=env) as run:
        assert run.finish() == 0
        assert sum(run.step(f"worker-{r}.0") for r in range(3)) == 1000
        assert run.step("worker-2.0") < run.step("worker-0.0")
        assert run.metrics("finished")[-1]["steps"] == 1000
        assert run.status()["steps"] == 1000
        assert manifest(run).step == 1000
        assert sum(row.step for row in manifest(run).rows) == 1000
        assert [s["updates"] for s in run.metrics("shard")[-2:]] == [1000, 1000]


def test_shards_live_until_the_slowest_replica_is_done(tmp_path: Path) -> None:
    """mxnet#2412: one is a hundred times slower than the others, which are done long before."""
    experiment = synthetic(rows=120, batch_size=4, replicas=3)
    env = {"DBCTL_TEST_NODE": "worker-1.0", "DBCTL_TEST_SECONDS": "0.1"}
    factories = {"worker": "slow_gradient"}
    with TrainRun(tmp_path, experiment, factories=factories, env=env) as run:
        for name in ("worker-0.0", "worker-2.0"):
            wait_for(lambda n=name: run.step(n) == 20, f"{name} to be done")
        assert run.step("worker-1.0") < 10
        assert {"shard-0", "shard-1", "worker-1.0"} <= set(run.processes())
        assert run.finish() == 0
        assert run.step("worker-1.0") == 20
        assert run.metrics("finished")[-1]["examples"] == 240


def test_a_directory_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    """While it goes on and afterwards; nothing of it is touched."""
    with TrainRun(tmp_path, synthetic(rows=400, stop=ENDLESS)) as run:
        run.until_train()
        with TrainRun(tmp_path, synthetic(rows=100), name="b", run_dir=run.dir) as other:
            assert other.process.wait(20.0) == 2
            assert f"dbctl: error: {run.dir}" in other.err
        run.signal(15)
        assert run.finish() == 75
        before = {p: p.read_bytes() for p in run.dir.rglob("*") if p.is_file()}
        with TrainRun(tmp_path, synthetic(rows=100), name="c", run_dir=run.dir) as other:
            assert other.process.wait(20.0) == 2
            assert "holds a run already; go on with `dbctl resume`" in other.err
        assert {p: p.read_bytes() for p in run.dir.rglob("*") if p.is_file()} == before


def test_a_run_directory_that_is_removed_meanwhile(tmp_path: Path) -> None:
    with TrainRun(tmp_path, synthetic(rows=100, stop=ENDLESS, evaluate="off")) as run:
        run.until_train()
        while run.dir.exists():
            shutil.rmtree(run.dir, ignore_errors=True)
        run.signal(15)
        assert run.process.wait(20.0) == 75
        assert "the run directory was removed meanwhile, and nothing is left to resume" in run.out
        assert "dbctl resume" not in run.out
        assert not run.dir.exists()


def test_a_controller_that_has_no_descriptor_left(tmp_path: Path) -> None:
    """It ends and says what to do: for a final checkpoint that it cannot map it would wait."""
    with TrainRun(tmp_path, digits(stop={"seconds": 2})) as run:
        run.reach("train")
        n_open = min(len(os.listdir(f"/proc/{run.pid}/fd")) for _ in range(20))
        # One more is what status.json takes, and too few to map a buffer by.
        resource.prlimit(run.pid, resource.RLIMIT_NOFILE, (n_open + 1, n_open + 1))
        assert run.finish() == 1
        [error] = [line for line in run.err.splitlines() if line.startswith("dbctl: error: ")]
        assert f"process {run.pid} has no descriptor left for the memory of " in error
        assert f"raise `ulimit -n`, here {n_open + 1}, " in error
        cause = error.removeprefix("dbctl: error: ")
        assert (run.status()["state"], run.status()["reason"]) == ("failed", cause)
        assert f"cause: {cause}" in look(str(run.dir)).lines
        assert run.metrics("finished")[-1]["status"] == "failed"


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """G13, in the running processes: each proves that its hook sees pickle, and none sees more."""
    audit = tmp_path / "audit"
    factories = dict.fromkeys(("shard", "worker", "evaluator"), "watched")
    experiment = synthetic(rows=100, evaluate={"every": "1 epoch"}, checkpoint={"every": "3 steps"})
    env = {"DBCTL_TEST_AUDIT": str(audit)}
    with TrainRun(tmp_path, experiment, factories=factories, env=env) as run:
        assert run.finish() == 0
        nodes = ("controller", "evaluator-0", "shard-0", "shard-1", "worker-0.0", "worker-1.0")
        assert sorted(audit.read_text().splitlines()) == [f"{n} builtins.repr" for n in nodes]
        assert run.metrics("evaluation")


def test_no_named_shared_memory_and_a_private_directory(tmp_path: Path) -> None:
    """Bulk data lie in memory without a name; sockets in a directory of mode 0700."""
    with TrainRun(tmp_path, digits()) as run:
        run.until_train()
        shard = run.node("shard-0")
        links = [os.readlink(p) for p in Path(f"/proc/{shard}/fd").iterdir() if p.is_symlink()]
        assert any(link.startswith("/memfd:") for link in links), links
        assert not any("/dev/shm" in link for link in links)
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in run.processes().values()]
        assert any("/memfd:" in text for text in maps)
        assert not any("/dev/shm/" in text for text in maps)
        assert run.runtime is not None
        assert run.runtime.stat().st_mode & 0o777 == 0o700
        assert run.finish() == 0
