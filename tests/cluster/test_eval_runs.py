"""`dbctl eval` with real processes: nothing is left, and no run is disturbed."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.cluster.runs import ENDLESS, TrainRun, digits, synthetic, wait_for
from tests.cluster.test_resume_runs import dbctl, newest, train

pytestmark = pytest.mark.cluster


def test_any_number_of_workers_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cases: 21 rows with 1, 2, 3 workers: each once, same numbers, and the same file of rows."""
    data = digits()["data"]
    data["test"]["rows"] = 21
    path = train(tmp_path, "r", digits(data=data, stop={"epochs": 2}))
    before = sorted(path.rglob("*"))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    found, texts = [], set()
    for workers in (1, 2, 3):
        csv = tmp_path / f"{workers}.csv"
        words = ["--workers", workers, "--predictions", csv, "--json"]
        done = dbctl("eval", path, *words)
        assert done.returncode == 0, done.stderr
        [line] = done.stdout.splitlines()
        found.append(json.loads(line))
        texts.add("\n".join(line.rpartition(",")[0] for line in csv.read_text().splitlines()))
    assert len(texts) == 1
    for one in found:
        assert (one["examples"], one["split"]) == (21, "test")
        assert one["step"] == newest(path).manifest.step
        assert one["loss"] == pytest.approx(found[0]["loss"], rel=1e-6)
        assert [one[k] for k in ("accuracy", "top5", "classes", "confusion")] == [
            found[0][k] for k in ("accuracy", "top5", "classes", "confusion")
        ]
    rows = [line.split(",") for line in texts.pop().splitlines()[1:]]
    right = sum(label == predicted for _, label, predicted in rows)
    assert right / 21 == found[0]["accuracy"]
    assert sorted(path.rglob("*")) == before
    assert list(temporary.iterdir()) == []


def test_it_agrees_with_the_run(tmp_path: Path) -> None:
    """The final evaluation of the run, and `eval` of its last checkpoint: the same parameters."""
    path = train(tmp_path, "r", digits(stop={"epochs": 3}))
    status = json.loads((path / "status.json").read_text())
    found = json.loads(dbctl("eval", path, "--json").stdout)
    assert found["accuracy"] == status["test_accuracy"]
    assert found["loss"] == pytest.approx(status["test_loss"], rel=1e-6)
    text = dbctl("eval", path, "--split", "train").stdout
    assert "1,438 rows of the train split" in text


def test_a_matrix_of_more_classes_than_a_header_holds(tmp_path: Path) -> None:
    """300 classes: 720 kB in shared memory, of two evaluators that each count half the rows."""
    experiment = synthetic(rows=900, stop={"steps": 20}, evaluate={"every": "5 steps"})
    layers = [{"type": "dense", "units": 300}]
    experiment["network"] = {**experiment["network"], "layers": layers}
    for split in experiment["data"].values():
        split["classes"] = 300
    with TrainRun(tmp_path, experiment) as run:
        assert run.finish() == 0
    done = dbctl("eval", run.dir, "--json", "--workers", 2)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["classes"]) == len(found["confusion"]) == 300
    assert sum(map(sum, found["confusion"])) == found["examples"] == 40
    hits = sum(row[number] for number, row in enumerate(found["confusion"]))
    assert hits == round(found["accuracy"] * 40)


def test_a_run_that_is_going_on(tmp_path: Path) -> None:
    experiment = synthetic(rows=100, stop=ENDLESS, checkpoint={"every": "0.5 s", "keep": 50})
    with TrainRun(tmp_path, experiment) as run:
        run.until_train()
        wait_for(lambda: list((run.dir / "checkpoints").glob("step-*")), "a checkpoint")
        logs = {p.name: p.read_text() for p in (run.dir / "logs").iterdir()}
        done = dbctl("eval", run.dir, "--json", "--workers", 2)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["examples"] == 40
        assert {p.name: p.read_text() for p in (run.dir / "logs").iterdir()} == logs
        step = run.step("worker-0.0")
        wait_for(lambda: run.step("worker-0.0") > step, "another step")
        run.signal(signal.SIGTERM)
        assert run.finish() == 75
