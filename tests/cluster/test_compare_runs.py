"""`dbctl compare` of real runs: its figures are those that the runs told (paper A, figure 4)."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.cluster.runs import ENDLESS, TrainRun, digits
from tests.cluster.test_resume_runs import dbctl, resume

pytestmark = pytest.mark.cluster


def test_it_agrees_with_the_runs(tmp_path: Path) -> None:
    """One that ended and was resumed, beside one that is going on."""
    cut = digits(name="cut", partition={"count": 2}, replicas=1, stop={"epochs": 2})
    with TrainRun(tmp_path, cut, "--quiet", name="cut") as first:
        assert first.finish() == 0
    told = resume(first.dir, "--set", "stop.epochs=4")[-1]
    with TrainRun(tmp_path, digits(name="on", stop=ENDLESS), "--quiet", name="on") as second:
        second.until_train(100)
        done = dbctl("compare", first.dir, second.dir, "--json", "--accuracy", "0.01")
        assert (done.returncode, done.stderr) == (0, "")
        ended, on = json.loads(done.stdout)["runs"]
        second.signal(signal.SIGTERM)
        assert second.finish() == 75
    assert (on["status"], on["optimizer"], on["replicas"]) == ("running", "downpour adagrad", 2)
    assert (ended["status"], ended["partitions"], ended["shards"]) == ("done", 2, 2)
    assert (ended["steps"], ended["examples"]) == (told["steps"], told["examples"])
    assert ended["seconds"] == pytest.approx(told["seconds"], abs=1e-3)
    assert ended["replica_seconds"] == pytest.approx(2 * ended["seconds"], rel=1e-6)
    assert ended["last_accuracy"] == told["test_accuracy"]
    # 64 x 256 + 256 + 256 x 10 + 10 parameters of 4 bytes are fetched and pushed each step.
    size = 4 * (64 * 256 + 256 + 256 * 10 + 10)
    assert ended["bytes"] > 1.9 * size * told["steps"]
    assert 0 < ended["reached"]["seconds"] <= ended["seconds"]
