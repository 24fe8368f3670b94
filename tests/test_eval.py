"""`dbctl eval` without processes: each row once, for any number of evaluators and any network."""

from __future__ import annotations

import csv
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dbctl.checkpoint.reader import list_checkpoints, newest_good
from dbctl.cli import evaluate as cli
from dbctl.cli.main import main
from dbctl.data.sources import DIGITS_PATH
from dbctl.errors import CheckpointError, RunError, UsageError
from dbctl.experiment.read import load
from dbctl.launch.base import AgentHandle
from dbctl.launch.inproc import Faults, Network
from dbctl.node import build, compute
from dbctl.plan import NodeSpec, make_evaluation_plan
from dbctl.region import Range
from dbctl.rights import CONTROLLER
from dbctl.roles.base import PlainBuffer, Record
from dbctl.roles.coordinator import Coordinator
from dbctl.roles.evaluations import Measured
from dbctl.run import evaluate
from dbctl.run.eval_figures import Class, Evaluation
from dbctl.run.evaluate import evaluation_start
from dbctl.run.predictions import PredictionsFile
from dbctl.run.setting import Origin, make_nodes
from dbctl.rundir import RunDir
from dbctl.wire import Predictions
from tests.inproc_run import begin

ROWS = 21
TEXT = """\
version: 1
name: measured
seed: 3
data:
  train: {source: digits, split: train, scale: 0.0625, rows: 100}
  test: {source: digits, split: test, scale: 0.0625, rows: 21}
network:
  input: [64]
  layers:
    - {type: dense, units: 9, activation: sigmoid}
    - {type: dense, units: 10}
  loss: softmax
optimizer: {type: sgd, batch_size: 16, rule: {type: adagrad, rate: 0.1}}
stop: {steps: 40}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run_dir, run = begin(TEXT, tmp_path_factory.mktemp("trained") / "r")
    run.run()
    return run_dir


def measure_in_batches(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    for module in (build, compute):
        monkeypatch.setattr(module, "EVALUATION_BATCH", rows)


class Task:
    """An evaluation in the in-process network: what `dbctl eval` does with processes."""

    def __init__(
        self,
        run_dir: RunDir,
        *,
        workers: int,
        rows: int = ROWS,
        shards: int = 2,
        faults: Faults | None = None,
    ) -> None:
        experiment = replace(load(str(run_dir.resolved)), shards=shards)
        checkpoint, _ = newest_good(run_dir.checkpoints)
        plan = make_evaluation_plan(experiment, rows=rows, evaluators=workers)
        self.pieces: list[Predictions] = []
        self.measured: Measured | None = None
        self.net = Network(workers, faults, on_record=self._on_record)
        nodes = make_nodes(
            plan,
            [AgentHandle("agent-0", "localhost", "", 0)],
            run="run",
            run_dir=run_dir.path,
            origin=Origin(restore=str(checkpoint.path), positions={}),
        )
        assert all(node.needed for node in nodes.values())
        for name, node in nodes.items():
            spec = msgspec.json.decode(node.order.spec, type=NodeSpec)
            self.net.add(name, build.build(spec, PlainBuffer))
        self.net.add(CONTROLLER, Coordinator(evaluation_start(plan, predictions=True)))

    def _on_record(self, now: float, record: Record) -> None:
        if record.event == "predictions":
            self.pieces.append(record.fields["message"])
        elif record.event == "evaluation":
            self.measured = record.fields["measured"]

    def run(self) -> str:
        assert self.net.run(until=lambda: CONTROLLER in self.net.done, limit_s=10_000)
        return self.net.done[CONTROLLER].status


def by_hand(run_dir: RunDir) -> tuple[float, int, list[int]]:
    """Mean loss, rows right, predictions: float64, without a network, batch or role of dbctl."""
    checkpoint, _ = newest_good(run_dir.checkpoints)
    flat = checkpoint.read("parameters", Range(0, checkpoint.n_elements)).astype(np.float64)
    w0, b0, w1, b1 = np.split(flat, np.cumsum([9 * 64, 9, 10 * 9]))
    stored = np.load(DIGITS_PATH)
    keep = np.arange(len(stored["x"])) % 5 == 4
    x, y = stored["x"].reshape(len(keep), 64)[keep][:ROWS] / 16, stored["y"][keep][:ROWS]
    hidden = 1 / (1 + np.exp(-(x @ w0.reshape(9, 64).T + b0)))
    scores = np.exp(hidden @ w1.reshape(10, 9).T + b1)
    shares = scores / scores.sum(axis=1, keepdims=True)
    predicted = shares.argmax(axis=1)
    loss = -np.log(shares[np.arange(ROWS), y]).mean()
    return float(loss), int((predicted == y).sum()), predicted.tolist()


@pytest.mark.parametrize("batch", [1, 4, 21, 500])
@pytest.mark.parametrize("workers", [1, 2, 3, 30])
def test_21_rows_are_21_rows(
    batch: int, workers: int, trained: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cases: `eval` of 21 rows, batch 4, with 1, 2, 3 workers (pytorch#25162)."""
    measure_in_batches(monkeypatch, batch)
    loss, correct, predicted = by_hand(trained)
    assert 3 < correct < ROWS, "all right or all wrong would show nothing"
    task = Task(trained, workers=workers)
    assert task.run() == "done"
    assert task.measured is not None
    assert task.measured.rows == ROWS
    assert task.measured.loss == pytest.approx(loss, rel=1e-5)
    assert task.measured.accuracy == correct / ROWS
    assert task.measured.confusion is not None
    assert task.measured.confusion.sum() == ROWS
    assert task.measured.confusion.trace() == correct
    rows = [row for piece in task.pieces for row in piece.rows]
    assert sorted(rows) == list(range(ROWS))
    found = dict(zip(rows, (p for piece in task.pieces for p in piece.predicted), strict=True))
    assert [found[row] for row in range(ROWS)] == predicted


@pytest.mark.parametrize("seed", range(6))
def test_a_bad_network_loses_no_prediction(
    seed: int, trained: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces are taken in order, each once, whatever is lost, repeated or overtakes."""
    measure_in_batches(monkeypatch, 1)
    faults = Faults(drop=0.2, duplicate=0.3, delay_s=0.05)
    task = Task(trained, workers=1 + seed % 3, shards=1 + seed, faults=faults)
    assert task.run() == "done"
    assert task.net.happened["message lost"]
    assert task.net.happened["message repeated"]
    assert sorted(row for piece in task.pieces for row in piece.rows) == list(range(ROWS))
    assert task.measured is not None
    assert task.measured.rows == ROWS


def test_a_dead_evaluator_ends_it(trained: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows would be missing: an error, and no waiting for ever."""
    measure_in_batches(monkeypatch, 1)
    task = Task(trained, workers=2)
    task.net.run(until=lambda: len(task.pieces) > 2)
    task.net.kill("evaluator-1")
    assert task.run() == "failed"
    assert "an evaluator died" in task.net.done[CONTROLLER].reason
    assert task.measured is None


@pytest.mark.parametrize("said", [True, False])
def test_the_logs_of_one_that_fails_are_kept_and_named(
    said: bool, trained: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Path] = []

    def fails(*_: object, logs: str, **__: object) -> None:
        kept.append(Path(logs))
        if said:
            (kept[0] / "evaluator-0.log").write_text("its last words")
        raise RunError("an evaluator died")

    monkeypatch.setattr(evaluate, "_evaluate", fails)
    warnings: list[str] = []
    with pytest.raises(RunError, match="died"):
        evaluate.evaluate(str(trained.path), evaluate.Request(), warn=warnings.append)
    assert kept[0].exists() == said
    assert [str(kept[0]) in warning for warning in warnings] == [True] * said
    if said:
        shutil.rmtree(kept[0])


def test_float_targets_have_no_accuracy(tmp_path: Path) -> None:
    x = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", x[:, :2] * 2)
    data = f"{{source: npy, x: {tmp_path}/x.npy, y: {tmp_path}/y.npy}}"
    text = TEXT[: TEXT.index("data:")] + (
        f"data: {{train: {data}, test: {data}}}\n"
        "network: {input: [3], layers: [{type: dense, units: 2}], loss: squared}\n"
        "optimizer: {type: sgd, batch_size: 4, rule: {type: sgd, rate: 0.1}}\n"
        "stop: {steps: 4}\n"
    )
    run_dir, run = begin(text, tmp_path / "r")
    run.run()
    task = Task(run_dir, workers=3, rows=8)
    assert task.run() == "done"
    assert task.measured is not None
    measured = task.measured
    assert (measured.rows, measured.accuracy, measured.top5) == (8, None, None)
    assert measured.confusion is None
    assert measured.loss > 0


# ------------------------------------------------------------------------------- the CSV of rows


def piece(*rows: int) -> Predictions:
    n = len(rows)
    return Predictions(1, 0, rows, (1.0,) * n, tuple(map(float, rows)), (0.125,) * n)


def test_predictions_are_in_row_order(tmp_path: Path) -> None:
    path = tmp_path / "größe.csv"
    with PredictionsFile(path, 5, labelled=True) as file:
        file.add(piece(1, 3))
        file.add(piece(4, 0))
        assert not path.exists()
        file.add(piece(2))
        file.finish()
    with open(path, newline="") as text:
        header, *rows = csv.reader(text)
    assert header == ["row", "label", "predicted", "score"]
    assert rows == [[str(i), "1", str(i), "0.125"] for i in range(5)]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_device_is_never_replaced_and_a_link_stays_one(tmp_path: Path) -> None:
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="pipe: not a file"):
        PredictionsFile(pipe, 1, labelled=True)
    link.symlink_to(target)
    with PredictionsFile(link, 1, labelled=True) as file:
        file.add(piece(0))
        file.finish()
    assert link.is_symlink()
    assert target.read_text().count("\n") == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "pipe", "target"]


def test_a_file_that_cannot_be_made_is_called_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = r"^none/p\.csv: cannot be written: no such file or directory$"
    with pytest.raises(UsageError, match=said):
        PredictionsFile(Path("none/p.csv"), 1, labelled=True)


def test_more_rows_than_a_block(tmp_path: Path) -> None:
    n = 25_001
    with PredictionsFile(tmp_path / "p.csv", n, labelled=True) as file:
        file.add(piece(*range(n)))
        file.finish()
    lines = (tmp_path / "p.csv").read_text().splitlines()
    assert len(lines) == n + 1
    assert lines[-1] == "25000,1,25000,0.125"


def test_float_targets_are_written_as_floats(tmp_path: Path) -> None:
    with PredictionsFile(tmp_path / "p.csv", 1, labelled=False) as file:
        file.add(Predictions(1, 0, (0,), (0.5,), (-0.1,), (float("nan"),)))
        file.finish()
    assert (tmp_path / "p.csv").read_text().splitlines()[1] == "0,0.5,-0.1,nan"


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([piece(0, 1)], "1 rows did not come, the first is row 2"),
        ([piece(0, 1), piece(2, 1)], "1 rows came twice, the first is row 1"),
        ([piece(0, 1, 2), piece(0, 1, 2), piece(0, 1, 2)], "3 rows came twice"),
    ],
)
def test_gaps_and_duplicates_fail_clearly(
    pieces: list[Predictions], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "p.csv"
    path.write_text("what was there before")
    with PredictionsFile(path, 3, labelled=True) as file:
        for each in pieces:
            file.add(each)
        with pytest.raises(RunError, match=said):
            file.finish()
    assert path.read_text() == "what was there before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_row_that_is_none(tmp_path: Path) -> None:
    with (
        PredictionsFile(tmp_path / "p.csv", 3, labelled=True) as file,
        pytest.raises(RunError, match="predictions of row 3"),
    ):
        file.add(piece(2, 3))


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a directory"):
        PredictionsFile(tmp_path, 3, labelled=True)
    with pytest.raises(UsageError, match="cannot be written"):
        PredictionsFile(tmp_path / "none" / "p.csv", 3, labelled=True)


# ------------------------------------------------------------------------------------- refusals


def test_eval_of_what_is_not_there(
    trained: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err
    assert main(["eval", str(trained.path), "--step", "39"]) == 2
    assert "--step 39: there is no such checkpoint; there are 40" in capsys.readouterr().err
    assert main(["eval", str(trained.path), "--split", "all"]) == 2
    assert main(["eval", str(trained.path), "--workers", "0"]) == 2


@pytest.mark.parametrize(
    ("every", "when"),
    [
        ("2 min", "every 120 s (checkpoint.every); try again once it has"),
        ("off", "only at its end (checkpoint.every is off); try again then"),
    ],
)
def test_a_run_that_has_saved_nothing_yet_is_not_told_to_start_again(
    every: str, when: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only while it is going on: where it is over, no checkpoint will come."""
    run_dir, _ = begin(TEXT, tmp_path / "r", overrides=[f"checkpoint.every={every}"])
    for status in ({}, {"run": "run", "state": "running"}, {"run": "earlier", "state": "failed"}):
        run_dir.write_status(status)
        for step in ((), ("--step", "40")):
            assert main(["eval", str(run_dir.path), *step]) == 1
            assert capsys.readouterr().err.endswith(
                f"this run is going on and has not saved a checkpoint yet: it saves one {when}\n"
            )
    over = "nothing was saved: there is no checkpoint to go on from; start again with "
    run_dir.write_status({"run": "run", "state": "failed"})
    assert main(["eval", str(run_dir.path)]) == 1
    assert over in capsys.readouterr().err
    run_dir.write_status({"run": "run", "state": "running"})
    run_dir.write_info(msgspec.structs.replace(run_dir.read_info(), pid_start=1))  # was killed
    assert main(["eval", str(run_dir.path)]) == 1
    assert over in capsys.readouterr().err
    (run_dir.path / "run.json").write_text("{")
    assert main(["eval", str(run_dir.path)]) == 1
    assert over in capsys.readouterr().err


def variant(run_dir: RunDir, directory: Path, old: str, new: str) -> str:
    """A run directory with the same checkpoints and another resolved.yaml."""
    directory.mkdir()
    text = run_dir.resolved.read_text(encoding="utf-8")
    assert old in text, text
    (directory / "resolved.yaml").write_text(text.replace(old, new, 1), encoding="utf-8")
    (directory / "run.json").write_bytes((run_dir.path / "run.json").read_bytes())
    (directory / "checkpoints").symlink_to(run_dir.checkpoints)
    return str(directory)


def test_a_layer_was_changed(
    trained: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """cases: one message with layer and both shapes (DALLE-pytorch#211)."""
    path = variant(trained, tmp_path / "v", "units: 9", "units: 12")
    assert main(["eval", path]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "layers.0.weight is (9, 64) in the checkpoint and (12, 64) in the experiment" in line


def test_no_test_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(line for line in TEXT.splitlines(True) if not line.startswith("  test:"))
    run_dir, run = begin(text, tmp_path / "r")
    run.run()
    assert main(["eval", str(run_dir.path)]) == 2
    assert "give --split train" in capsys.readouterr().err


@pytest.mark.parametrize("explicit", [False, True])
def test_a_checkpoint_that_the_run_removes_meanwhile(
    explicit: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`checkpoint: keep` of a run that is going on: the next newest one is measured instead."""
    run_dir, first = begin(
        TEXT, tmp_path / "r", overrides=["checkpoint.every=7 steps", "stop.steps=90"]
    )
    first.run()
    new, old, *_ = list_checkpoints(run_dir.checkpoints)
    tried = []

    def run(task: evaluate._Task, *_: object, **__: object) -> tuple[str, None]:
        path = task._checkpoint.path
        tried.append(path)
        if path == new:
            shutil.rmtree(path)
            raise RunError("it is gone")
        return "stopped", None

    monkeypatch.setattr(evaluate._Task, "run", run)
    words = ["--step", "90"] if explicit else []
    assert main(["eval", str(run_dir.path), *words]) == (1 if explicit else 75)
    assert tried == ([new] if explicit else [new, old])
    said = capsys.readouterr().err
    assert ("greater checkpoint.keep or checkpoint.every" in said) == explicit


def test_checkpoints_that_go_faster_than_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ["checkpoint.every=7 steps", "stop.steps=90"]
    run_dir, first = begin(TEXT, tmp_path / "r", overrides=sets)
    first.run()
    monkeypatch.setattr(evaluate, "MAX_TRIES", len(list_checkpoints(run_dir.checkpoints)))
    assert evaluate.MAX_TRIES > 1
    real_open, n_runs = evaluate.newest_good, []

    def open_late(directory: Path) -> object:
        if not n_runs:  # the first time it is gone while it is opened, later while it is read
            shutil.rmtree(list_checkpoints(directory)[0])
            n_runs.append("opening")
            raise CheckpointError(str(directory), "cannot be read")
        return real_open(directory)

    def run(task: evaluate._Task, *_: object, **__: object) -> tuple[str, None]:
        n_runs.append("reading")
        shutil.rmtree(task._checkpoint.path)
        raise RunError("it is gone")

    monkeypatch.setattr(evaluate, "newest_good", open_late)
    monkeypatch.setattr(evaluate._Task, "run", run)
    assert main(["eval", str(run_dir.path)]) == 1
    assert n_runs == ["opening"] + ["reading"] * (evaluate.MAX_TRIES - 1)
    said = capsys.readouterr().err
    assert (
        f"its run removed it while it was being read, {evaluate.MAX_TRIES} times in a row" in said
    )
    assert "greater checkpoint.keep or checkpoint.every" in said


# ------------------------------------------------------------------------------------- the text


def measured_evaluation(n_classes: int, **changes: Any) -> Evaluation:
    row = (3, *(0,) * (n_classes - 1))
    classes = tuple(
        Class(number=i, rows=3, correct=3 * (i == 0), recall=float(i == 0), precision=None)
        for i in range(n_classes)
    )
    values: dict[str, Any] = {
        "run_dir": "runs/a\x1b[2J",
        "step": 1200,
        "split": "test",
        "examples": 3 * n_classes,
        "loss": 0.25,
        "accuracy": 1 / n_classes,
        "top5": None,
        "classes": classes,
        "confusion": (row,) * n_classes,
    }
    return Evaluation(**{**values, **changes})


def test_the_text() -> None:
    assert list(cli.lines(measured_evaluation(2))) == [
        "runs/a\\x1b[2J: step 1,200, 6 rows of the test split",
        "loss      0.25",
        "accuracy  50.00 %",
        "",
        " class     rows  correct    recall  precision",
        "     0        3        3  100.00 %          -",
        "     1        3        0    0.00 %          -",
        "",
        "true \\ predicted",
        "         0   1",
        "     0   3   0",
        "     1   3   0",
    ]


def test_a_wide_matrix_is_left_out_of_the_text() -> None:
    assert "true \\ predicted" in list(cli.lines(measured_evaluation(20)))
    text = list(cli.lines(measured_evaluation(21)))
    assert "true \\ predicted" not in text
    assert len(text) == 3 + 2 + 21


def test_float_targets_in_the_text_and_in_json() -> None:
    bare = measured_evaluation(2, accuracy=None, classes=None, confusion=None, loss=float("nan"))
    assert len(list(cli.lines(bare))) == 2
    found = json.loads(cli.json_line(bare))
    assert found["accuracy"] is None
    assert found["loss"] is None
    assert {"examples", "loss", "accuracy", "step", "split"} <= set(found)
