"""Deaths of one process of a run (docs/reliability.md, G3, G5, G11; DeepSpeed#618: never exit 0).

A replica's death is a warning and its rows are left out; a shard's ends the run at once and leaves
the checkpoints; a node that does not come up is told with the last lines of its log.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from dbctl.run.find import find
from dbctl.run.resume import prepare
from tests.cluster.runs import ENDLESS, TrainRun, digits, kill, synthetic, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(60)]

AT_ONCE_S = 5.0
SAVES = {"every": "0.2 s"}


def test_a_killed_replica_is_left_out(tmp_path: Path) -> None:
    """One of three: the others go on to the end, and it is said what was left out."""
    experiment = digits(replicas=3, stop={"steps": 2000})
    with TrainRun(tmp_path, experiment) as run:
        run.reach("train")
        victim = run.processes()["worker-1.0"]
        kill(victim)
        assert run.finish() == 0
        deaths = run.metrics("death")
        assert [(d["node"], d["status"]) for d in deaths] == [("worker-1.0", -9)]
        assert [(lost["node"], lost["rows"]) for lost in run.metrics("lost")] == [
            ("worker-1.0", 479)
        ]
        assert "worker-1.0 was killed by SIGKILL" in run.err
        assert f"log: {run.dir}/logs/worker-1.0.log" in run.err
        assert "replica 1 was lost: its 479 rows were left out" in run.out
        # All that lived did sixty epochs: a stop that they have passed is no reason to go on.
        assert prepare(find(str(run.dir)), ["stop={epochs: 20}"]).finished
        assert not prepare(find(str(run.dir)), ["stop={epochs: 2000}"]).finished
        last = {r["node"]: r["step"] for r in run.metrics("worker")}
        assert last["worker-0.0"] > 2 * last["worker-1.0"]
        finished = run.metrics("finished")[-1]
        assert (finished["status"], finished["steps"]) == ("done", 2000)
        assert finished["test_accuracy"] > 0.9
        # Its last steps may be applied and never reported: the shards' table knows them.
        assert [step // 100 for step in run.checkpoints()] == [20]


def test_a_killed_partition_ends_its_replica_and_only_that(tmp_path: Path) -> None:
    """G4: its partner could only wait for it; the other replica goes on to the end."""
    experiment = digits(partition={"count": 2}, stop={"steps": 600})
    with TrainRun(tmp_path, experiment) as run:
        run.reach("train")
        kill(run.processes()["worker-1.1"])
        wait_for(lambda: len(run.metrics("death")) == 2, "the end of its replica", 5.0)
        assert run.finish() == 0
        deaths = {death["node"]: death["word"] for death in run.metrics("death")}
        assert deaths == {"worker-1.1": "", "worker-1.0": "its replica ended with worker-1.1"}
        assert len(run.metrics("lost")) == 1
        finished = run.metrics("finished")[-1]
        assert (finished["status"], finished["steps"]) == ("done", 600)


def test_fewer_than_min_replicas_is_a_failed_run_that_can_be_resumed(tmp_path: Path) -> None:
    experiment = digits(replicas=3, min_replicas=2, stop=ENDLESS)
    with TrainRun(tmp_path, experiment) as run:
        run.reach("train")
        kill(run.processes()["worker-0.0"])
        wait_for(lambda: run.metrics("death"), "the first death")
        step = run.step("worker-2.0")
        wait_for(lambda: run.step("worker-2.0") > step + 10, "the two others to go on")
        kill(run.processes()["worker-1.0"])
        assert run.finish(AT_ONCE_S) == 1
        assert "worker-1.0" in run.err
        assert "min_replicas" in run.err
        assert run.step_to_resume() >= step


def test_all_replicas_killed(tmp_path: Path) -> None:
    with TrainRun(tmp_path, digits(stop=ENDLESS)) as run:
        run.reach("train")
        for name in ("worker-0.0", "worker-1.0"):
            kill(run.processes()[name])
        assert run.finish(AT_ONCE_S) == 1
        assert "worker-0.0 was killed by SIGKILL" in run.err
        assert "worker-1.0 was killed by SIGKILL" in run.err
        assert run.step_to_resume() > 0


def test_a_killed_shard_ends_the_run_at_once(tmp_path: Path) -> None:
    """ps-lite#68: noticed, named with its signal; what was saved before is whole."""
    with TrainRun(tmp_path, digits(stop=ENDLESS, checkpoint=SAVES)) as run:
        run.reach("train")
        wait_for(run.checkpoints, "a checkpoint")
        kill(run.processes()["shard-1"])
        assert run.finish(AT_ONCE_S) == 1
        assert "shard-1 on localhost was killed by SIGKILL" in run.err
        assert "incarnation 1 of run" in run.err, "the tail of its log"
        assert f"{run.dir}/logs/shard-1.log" in run.err
        assert run.err.count("SIGKILL") == 1 or "warning" in run.err
        assert run.step_to_resume() in run.checkpoints()
        assert run.out.startswith("failed: ")


def test_a_shard_killed_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """tensorflow#7767, ray#41700: what lies in the dead shard's memory is still written whole."""
    experiment = digits(stop=ENDLESS, checkpoint={"every": "1 step"}, evaluate="off")
    with TrainRun(tmp_path, experiment) as run:
        run.reach("checkpoint")
        kill(run.processes()["shard-0"])
        run.signal(18)
        assert run.finish(AT_ONCE_S) == 1
        assert run.step_to_resume() in run.checkpoints()
        assert not list((run.dir / "checkpoints").glob(".tmp-*"))


def test_a_killed_evaluator_is_a_warning(tmp_path: Path) -> None:
    with TrainRun(tmp_path, digits(stop={"steps": 2000})) as run:
        run.reach("train")
        kill(run.node("evaluator-0"))
        assert run.finish() == 0
        assert "evaluator-0 was killed by SIGKILL" in run.err
        assert "the evaluator was lost: the end was not measured" in run.out
        assert run.metrics("finished")[-1]["steps"] == 2000
        assert run.checkpoints() == [2000]


def test_a_killed_evaluator_where_only_it_would_end_the_run(tmp_path: Path) -> None:
    with TrainRun(tmp_path, digits(stop={"test_accuracy": 1.0})) as run:
        run.reach("train")
        kill(run.node("evaluator-0"))
        assert run.finish(AT_ONCE_S) == 1
        assert "test_accuracy" in run.err
        assert run.step_to_resume() > 0


@pytest.mark.parametrize("role", ["shard", "worker"])
def test_a_role_that_raises_in_training(tmp_path: Path, role: str) -> None:
    """Its own word reaches the screen."""
    experiment = digits(stop=ENDLESS)
    with TrainRun(tmp_path, experiment, factories={role: "raises_in_a_step"}) as run:
        assert run.finish(20.0) == 1
        assert "ArithmeticError: a step went wrong" in run.err


# ------------------------------------------------------------------------------- the start


@pytest.mark.parametrize(
    ("node", "factory", "words"),
    [
        (
            "worker-1.0",
            "raises_at_start",
            ("exit status 1", "ValueError: no such table", "Traceback"),
        ),
        ("shard-0", "raises_at_start", ("exit status 1", "ValueError: no such table", "Traceback")),
        ("worker-0.0", "exits_at_start", ("exit status 7", "last words")),
    ],
)
def test_a_node_that_does_not_come_up(
    tmp_path: Path, node: str, factory: str, words: tuple[str, ...]
) -> None:
    """angel#18, tensorflow#46169: at once, with its exit status, log tail and log path."""
    role = node.partition("-")[0]
    env = {"DBCTL_TEST_NODE": node}
    with TrainRun(tmp_path, synthetic(rows=100), factories={role: factory}, env=env) as run:
        begin = time.monotonic()
        assert run.finish(20.0) == 3
        assert time.monotonic() - begin < 10.0
        told, first, *_ = run.err.splitlines()
        assert told == f"run directory: {run.dir}"
        assert first.startswith(f"dbctl: error: {node} on localhost ended with ")
        for word in (*words, f"{run.dir}/logs/{node}.log"):
            assert word in run.err
        assert len(run.err.splitlines()) < 30


def test_a_data_file_that_changes_after_it_was_checked(tmp_path: Path) -> None:
    """The agent is there, the nodes load: the file is cut under their hands."""
    data = tmp_path / "rows.csv"
    good = "".join(f"{i % 7},{i % 5},{i % 2}\n" for i in range(50_000))
    data.write_text("a,b,label\n" + good)
    source = {"source": "csv", "path": str(data), "label": "label"}
    experiment = synthetic(rows=1)
    experiment["data"] = {"train": source}
    experiment["network"]["input"] = [2]
    experiment["network"]["layers"][-1]["units"] = 2
    with TrainRun(tmp_path, experiment) as run:
        run.until_spawn()
        data.write_text("a,b,label\n1,2,x\n")
        assert run.finish(20.0) == 3
        assert re.search(r"worker-\d\.0 on localhost ended with exit status 1", run.err)
        assert "rows.csv" in run.err
