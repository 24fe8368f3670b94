"""What a run says of a death: once, and nothing that helps nobody."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from dbctl.experiment.specs import StopSpec
from dbctl.metrics import read_metrics
from dbctl.progress.display import make_display
from dbctl.roles.coordinator import Coordinator, CoordinatorStart
from dbctl.roles.figures import Part
from dbctl.run.records import RunRecords
from dbctl.rundir import create
from dbctl.wire import Exited

STARTED = "20:25:03.277 worker-0.0 incarnation 1 of run 2ae46c850419bc1f, pid 1761\n"


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
    display = make_display(json=False, stderr_is_tty=False, out=io.StringIO(), err=err)
    start = CoordinatorStart(
        workers={0: ("worker-0.0",)},
        parts={0: Part(rows=4, steps_per_epoch=2)},
        shards=["shard-0"],
        stop=StopSpec(steps=1),
    )
    with create(tmp_path / "r", "x") as run_dir:
        records = RunRecords(run_dir, display, Coordinator(start), run="r", now=lambda: 0.0)
        records.node_died(node, Exited(node, 1, -9, tail))
        records.close()
        assert [(r["event"], r["node"]) for r in read_metrics(run_dir.metrics)] == [("death", node)]
    assert said in err.getvalue()
    assert bool(err.getvalue()) == bool(said)
    assert "incarnation" not in err.getvalue()
