"""What a run says of a death: once, and nothing that helps nobody."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from dbctl.experiment.specs import StopSpec
from dbctl.metrics import read_metrics
from dbctl.progress.display import make_display
from dbctl.roles.base import Record
from dbctl.roles.coordinator import Coordinator, CoordinatorStart
from dbctl.roles.figures import Part
from dbctl.roles.records import shard_fields
from dbctl.run.nodes import Nodes
from dbctl.run.records import RunRecords
from dbctl.rundir import RunDir, create
from dbctl.wire import Exited, ShardReport

STARTED = "20:25:03.277 worker-0.0 incarnation 1 of run 2ae46c850419bc1f, pid 1761\n"


def records_in(run_dir: RunDir, err: io.StringIO) -> RunRecords:
    display = make_display(json=False, stderr_is_tty=False, out=io.StringIO(), err=err)
    start = CoordinatorStart(
        workers={0: ("worker-0.0",)},
        parts={0: Part(rows=4, steps_per_epoch=2)},
        shards=["shard-0"],
        stop=StopSpec(steps=1),
    )
    return RunRecords(run_dir, display, Coordinator(start), run="r", now=lambda: 0.0)


@pytest.mark.parametrize(
    ("node", "tail", "said"),
    [
        ("worker-0.0", STARTED + "out of cheese\n", "; its log ends with: out of cheese (log: "),
        ("worker-0.0", STARTED, "worker-0.0 was killed by SIGKILL (log: "),
        ("worker-0.0", "", "worker-0.0 was killed by SIGKILL (log: "),
        ("shard-0", STARTED, ""),  # it ends the run: the error says it
    ],
)
def test_a_death_is_told_with_the_last_word_of_its_log(
    node: str, tail: str, said: str, tmp_path: Path
) -> None:
    err = io.StringIO()
    with create(tmp_path / "r", "x") as run_dir:
        records = records_in(run_dir, err)
        records.node_died(node, Exited(node, 1, -9, tail))
        records.close()
        assert [(r["event"], r["node"]) for r in read_metrics(run_dir.metrics)] == [("death", node)]
    assert said in err.getvalue()
    assert bool(err.getvalue()) == bool(said)
    assert "incarnation" not in err.getvalue()


def test_what_a_shard_refuses_is_told_once(tmp_path: Path) -> None:
    err = io.StringIO()
    with create(tmp_path / "r", "x") as run_dir:
        records = records_in(run_dir, err)
        for refused in (0, 1, 2):
            report = ShardReport(1, 0, 0, 0, 0, refused, (), ())
            records._coordinator.figures.shard_report("shard-0", report)
            records.record(Record("shard", shard_fields("shard-0", report)))
            assert err.getvalue().count("a shard refused a push that is not finite") == (
                refused > 0
            )
        records.write_status(0.0, Nodes({}, lease_s=1.0), "running")
        records.close()
        assert json.loads(run_dir.status.read_text())["refused_pushes"] == 2


def test_before_the_first_example_no_rate_is_shown(tmp_path: Path) -> None:
    err = io.StringIO()
    with create(tmp_path / "r", "x") as run_dir:
        records = records_in(run_dir, err)
        records.tick(0.0, Nodes({}, lease_s=1.0))
        records.close()
        assert run_dir.read_status()["examples_per_second"] is None
    assert err.getvalue() == "epoch 0.00  step 0/1  loss -\n"


def test_a_test_loss_after_a_training_that_diverged_is_no_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dbctl.roles.figures.Figures.diverged", lambda figures: True)
    err = io.StringIO()
    fields = {"accuracy": None, "epochs": 1.0, "examples": 4}
    with create(tmp_path / "r", "x") as run_dir:
        records = records_in(run_dir, err)
        records.record(Record("evaluation", {**fields, "loss": float("nan")}))
        records.close()
    assert "warning" not in err.getvalue()


def test_a_test_loss_that_is_not_finite_is_warned_of_once(tmp_path: Path) -> None:
    err = io.StringIO()
    fields = {"accuracy": None, "epochs": 1.0, "examples": 4}
    with create(tmp_path / "r", "x") as run_dir:
        records = records_in(run_dir, err)
        records.record(Record("evaluation", {**fields, "loss": 0.5}))
        assert "warning" not in err.getvalue()
        for _ in range(2):
            records.record(Record("evaluation", {**fields, "loss": float("nan")}))
        records.close()
    assert err.getvalue().count("the test loss is nan: a row of data.test is not finite") == 1
