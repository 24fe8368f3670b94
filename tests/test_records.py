"""What a run says of a death, or of a stall: once, and nothing that helps nobody."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbctl.bundles import Batch
from dbctl.experiment.specs import StopSpec
from dbctl.metrics import read_metrics
from dbctl.optim.commands import Evaluate, Method
from dbctl.progress.display import make_display
from dbctl.roles.base import Record
from dbctl.roles.coordinator import Coordinator, CoordinatorStart
from dbctl.roles.figures import Part
from dbctl.roles.leader import Leader
from dbctl.roles.records import shard_fields
from dbctl.roles.sandblaster import Sandblaster, SandblasterStart
from dbctl.run.nodes import Node, Nodes
from dbctl.run.records import STUCK_S, RunRecords
from dbctl.rundir import RunDir, create
from dbctl.wire import Exited, Loss, Peer, Position, Report, ShardReport
from dbctl.wire_batch import Executed
from dbctl.wire_processes import Beat, Start

STARTED = "20:25:03.277 worker-0.0 incarnation 1 of run 2ae46c850419bc1f, pid 1761\n"


def records_in(run_dir: RunDir, err: io.StringIO, coordinator: Leader | None = None) -> RunRecords:
    display = make_display(json=False, stderr_is_tty=False, out=io.StringIO(), err=err)
    return RunRecords(run_dir, display, coordinator or downpour(1), run="r", now=lambda: 0.0)


def downpour(steps: int = 8, **changes: Any) -> Coordinator:
    part = Part(rows=4, steps_per_epoch=2)
    given: dict[str, Any] = {"workers": {0: ("worker-0.0",)}, "parts": {0: part}} | changes
    start = CoordinatorStart(shards=["shard-0"], stop=StopSpec(steps=steps), save=False, **given)
    return Coordinator(start)


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


# ------------------------------------------------------------------------------------------ stalls


def sandblaster() -> Sandblaster:
    def method(state: dict[str, Any] | None) -> Method:
        yield Evaluate("parameters", "gradient")
        raise AssertionError("its only bundle is never computed")

    return Sandblaster(
        SandblasterStart(
            workers={0: ("worker-0.0",)},
            shards=["shard-0"],
            stop=StopSpec(steps=1),
            save=False,
            method=method,
            rows=40,
            batch=Batch(rows=40, portion=4, send_every=10),
        )
    )


class Watched:
    """A worker that beats each second. Its loop steps twice in it, for its timers."""

    def __init__(self, run_dir: RunDir, leader: Leader, name: str = "worker-0.0") -> None:
        self.leader = leader
        self.name = name
        self._err = io.StringIO()
        self.records = records_in(run_dir, self._err, leader)
        self._nodes = Nodes({name: Node(Start(name, 1, (), (), ""), "agent-0", ())}, lease_s=10.0)
        self._now = 0.0
        self._steps = 0
        leader.start(0.0)
        leader.receive(0.0, Peer("shard-0", 1), Executed(1, ()))  # a batch method hands out then

    def reports(self, step: int, name: str = "") -> None:
        fields: dict[str, Any] = dict.fromkeys(Report.__struct_fields__, 0)
        fields |= {"epoch_loss": Loss(), "last_epoch_loss": Loss(), "state": "running"}
        report = Report(**(fields | {"position": Position(step, step // 2, step % 2)}))
        self.leader.receive(self._now, Peer(name or self.name, 1), report)

    def passes(self, seconds: float, *, in_gradient: bool = False) -> None:
        for _ in range(int(seconds)):
            self._now += 1.0
            self._steps += 0 if in_gradient else 2
            self._nodes.receive(self._now, self.name, Beat(1, self._steps, 1 << 20))
            self.records.tick(self._now, self._nodes)

    @property
    def n_warned(self) -> int:
        assert self._err.getvalue().count("warning") == self._err.getvalue().count(
            f"{self.name} has made no step for 30 s"
        )
        return self._err.getvalue().count("warning")


@pytest.mark.parametrize("leader", [downpour, sandblaster])
def test_a_worker_that_makes_no_step_is_warned_of_once_each_time(
    leader: Callable[[], Leader], tmp_path: Path
) -> None:
    """A fetch that nobody answers: it is asked for again and again, and reports are made."""
    with create(tmp_path / "r", "x") as run_dir:
        watched = Watched(run_dir, leader())
        for step in (0, 1):
            watched.reports(step)
            watched.passes(STUCK_S)
            assert watched.n_warned == step, "not yet"
            for _ in range(3):
                watched.passes(STUCK_S)
                watched.reports(step)
            assert watched.n_warned == step + 1
        watched.records.close()


@pytest.mark.parametrize("leader", [downpour, sandblaster])
def test_long_gradients_that_end_are_no_stall(leader: Callable[[], Leader], tmp_path: Path) -> None:
    with create(tmp_path / "r", "x") as run_dir:
        watched = Watched(run_dir, leader())
        for step in range(4):
            watched.reports(step)
            watched.passes(STUCK_S - 1, in_gradient=True)
        assert watched.n_warned == 0
        watched.passes(STUCK_S, in_gradient=True)
        assert watched.n_warned == 1, "one may take minutes, and that is told"
        watched.records.close()


def test_who_waits_to_be_told_is_not_stuck_and_counts_from_when_it_is(tmp_path: Path) -> None:
    """The second replica, while the first one does the warmstart."""
    workers = {n: (f"worker-{n}.0",) for n in (0, 1)}
    parts = dict.fromkeys(workers, Part(rows=40, steps_per_epoch=20))
    leader = downpour(steps=80, workers=workers, parts=parts, warmstart=4)
    with create(tmp_path / "r", "x") as run_dir:
        watched = Watched(run_dir, leader, "worker-1.0")
        watched.passes(2 * STUCK_S)
        watched.reports(4, "worker-0.0")
        assert leader.is_working("worker-1.0")
        watched.passes(STUCK_S)
        assert watched.n_warned == 0
        watched.passes(2)
        assert watched.n_warned == 1
        watched.records.close()


@pytest.mark.parametrize("leader", [downpour, sandblaster])
def test_who_has_halted_is_not_stuck(leader: Callable[[], Leader], tmp_path: Path) -> None:
    """A final evaluation may take longer than a stall."""
    with create(tmp_path / "r", "x") as run_dir:
        watched = Watched(run_dir, leader())
        watched.leader.interrupt(0.0, "interrupted")
        assert watched.leader.is_working(watched.name), "it has steps left"
        watched.passes(2 * STUCK_S)
        assert watched.n_warned == 0
        watched.records.close()
