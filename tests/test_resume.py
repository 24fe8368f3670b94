"""`dbctl resume` without processes: the same run for any counts (docs/reliability.md, G18)."""

from __future__ import annotations

import errno
import json
import shutil
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import pytest

from dbctl.checkpoint.layout import Manifest, ReplicaRow
from dbctl.checkpoint.reader import Checkpoint, list_checkpoints, newest_good
from dbctl.cli.main import main
from dbctl.data.prepare import Statistics
from dbctl.errors import (
    CheckpointError,
    DataError,
    DbctlError,
    ExperimentError,
    LaunchError,
    RunError,
    UsageError,
)
from dbctl.experiment.read import load, parse
from dbctl.experiment.resolve import to_json
from dbctl.experiment.specs import Experiment, StopSpec
from dbctl.launch.inproc import Faults
from dbctl.metrics import read_metrics
from dbctl.plan import make_plan
from dbctl.progress.display import make_display
from dbctl.progress.text import counted
from dbctl.region import Range
from dbctl.roles.base import Done
from dbctl.roles.shard import Shard
from dbctl.run import evaluate, room
from dbctl.run.positions import beginnings
from dbctl.run.resume import (
    CHANGEABLE,
    _is_finished,
    _tell,
    check_overrides,
    prepare,
)
from dbctl.run.signals import Interrupted
from dbctl.rundir import RunDir
from dbctl.wire import Position
from tests.inproc_run import begin, go_on

TEXT = """\
version: 1
name: resumed
seed: 3
data:
  train: {source: digits, split: train, scale: 0.0625, rows: 200}
network:
  input: [64]
  layers:
    - {type: dense, units: 9, activation: sigmoid}
    - {type: dense, units: 10}
  loss: softmax
optimizer: {type: downpour, batch_size: 16, rule: {type: sgd, rate: 0.1}, overlap: false}
stop: {steps: 20}
checkpoint: {every: off}
"""

RULES = {
    "sgd": "{type: sgd, rate: 0.1}",
    "sgd with a schedule": "{type: sgd, rate: {type: step, initial: 0.2, every: 4, factor: 0.7}}",
    "momentum": "{type: momentum, rate: 0.05, momentum: 0.9, warm_up: 15}",
    "adagrad": "{type: adagrad, rate: 0.05}",
    "adam": "{type: adam, rate: 0.01}",
}


def newest(run_dir: RunDir) -> Checkpoint:
    checkpoint, warnings = newest_good(run_dir.checkpoints)
    assert not warnings
    return checkpoint


def contents(checkpoint: Checkpoint) -> dict[str, bytes]:
    whole = Range(0, checkpoint.n_elements)
    return {v: checkpoint.read(v, whole).tobytes() for v in checkpoint.manifest.vectors}


def where(manifest: Manifest) -> tuple[Any, ...]:
    """What goes on over a resume, and must be as if there had been none."""
    return manifest.step, manifest.updates, manifest.rows, manifest.examples


def straight(directory: Path, *overrides: str) -> Checkpoint:
    run_dir, run = begin(TEXT, directory, overrides=overrides)
    assert run.run().status == "done"
    return newest(run_dir)


def at_start(run: Any) -> bytes:
    """The parameters that the shards of a life begin with."""
    shards = [run.net.role(span.node) for span in run.life.plan.shards]
    assert all(isinstance(shard, Shard) for shard in shards)
    return b"".join(shard.values.tobytes() for shard in shards)


def test_too_many_processes_are_refused_before_data_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, first = begin(TEXT, tmp_path / "run", overrides=["stop.steps=10"])
    first.run()
    monkeypatch.setattr("dbctl.run.resume.open_data", lambda *_, **__: pytest.fail("read"))
    monkeypatch.setattr(room, "raise_descriptor_limit", lambda: 20_000)
    with pytest.raises(LaunchError, match=r"agent-0 needs about 2,000,0\d\d, and the hard limit"):
        prepare(run_dir, ["replicas=1000000"])


# ------------------------------------------------------------------------------ rung 9: bit for bit


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shards", [1, 3])
def test_stopped_and_resumed_is_never_having_stopped(
    rule: str, shards: int, tmp_path: Path
) -> None:
    """cases: 20 steps against 10 + resume 10, each rule, one replica (mxnet#15923)."""
    overrides = [f"optimizer.rule={RULES[rule]}"]
    expected = straight(tmp_path / "whole", *overrides)
    run_dir, first = begin(TEXT, tmp_path / "cut", overrides=[*overrides, "stop.steps=10"])
    assert first.run().status == "done"
    assert newest(run_dir).manifest.step == 10
    second = go_on(run_dir, ["stop.steps=20", f"shards={shards}"])
    assert second.run().status == "done"
    found = newest(run_dir)
    assert where(found.manifest) == where(expected.manifest)
    assert found.manifest.vectors == expected.manifest.vectors
    assert contents(found) == contents(expected)


@pytest.mark.parametrize("at", [1, 7, 13, 14, 19])
def test_interrupted_anywhere_and_resumed_is_never_having_stopped(at: int, tmp_path: Path) -> None:
    """Ctrl-C at a step within an epoch and at its end (13 mini-batches), then resume."""
    expected = straight(tmp_path / "whole", "optimizer.rule={type: adam, rate: 0.01}")
    run_dir, first = begin(
        TEXT, tmp_path / "cut", overrides=["optimizer.rule={type: adam, rate: 0.01}"]
    )
    assert first.run(interrupt_at=at).status == "interrupted"
    stood = newest(run_dir).manifest
    assert at <= stood.step <= 20
    assert not stood.extra["finished"]
    assert go_on(run_dir).run().status == "done"
    assert where(newest(run_dir).manifest) == where(expected.manifest)
    assert contents(newest(run_dir)) == contents(expected)


def test_resumed_from_a_checkpoint_in_the_middle(tmp_path: Path) -> None:
    """As after kill -9: steps done after the newest checkpoint are done again."""
    expected = straight(tmp_path / "whole", "stop.steps=60")
    overrides = ["checkpoint.every=9 steps", "stop.steps=60"]
    run_dir, first = begin(TEXT, tmp_path / "cut", overrides=overrides)
    first.run()
    *newer, oldest = list_checkpoints(run_dir.checkpoints)
    assert newer
    for path in newer:
        shutil.rmtree(path)
    step = newest(run_dir).manifest.step
    assert 0 < step < 60
    n_epochs, index = divmod(step, 13)
    assert newest(run_dir).manifest.examples == 200 * n_epochs + 16 * index
    second = go_on(run_dir)
    second.run()
    assert second.saved[-1] == 60
    assert oldest.exists()
    assert where(newest(run_dir).manifest) == where(expected.manifest)
    assert contents(newest(run_dir)) == contents(expected)


def test_twice_resumed_over_a_bad_network(tmp_path: Path) -> None:
    expected = straight(tmp_path / "whole", "optimizer.rule={type: momentum, rate: 0.05}")
    rule = "optimizer.rule={type: momentum, rate: 0.05}"
    faults = Faults(drop=0.1, duplicate=0.2, delay_s=0.02, in_pieces=0.5, piece_bytes=999)
    run_dir, run = begin(TEXT, tmp_path / "cut", overrides=[rule, "stop.steps=5"], faults=faults)
    run.run()
    for steps, shards in ((11, 2), (20, 5)):
        run = go_on(run_dir, [f"stop.steps={steps}", f"shards={shards}"], faults=faults, seed=steps)
        assert run.run().status == "done"
        assert run.net.happened["message lost"]
    assert contents(newest(run_dir)) == contents(expected)


# ------------------------------------------------------------------------- other counts (DeepSpeed)


@pytest.mark.parametrize("shards", [1, 3, 5])
@pytest.mark.parametrize("replicas", [1, 3, 8])
def test_two_shards_and_three_replicas_become_others(
    shards: int, replicas: int, tmp_path: Path
) -> None:
    """cases: saved with 2 shards and 3 replicas, resumed with 1, 3, 5 and 1, 8."""
    counts = ["shards=2", "replicas=3", "stop.steps=20", "optimizer.overlap=true"]
    run_dir, first = begin(TEXT, tmp_path / "r", overrides=counts)
    first.run()
    saved = newest(run_dir)
    parameters = contents(saved)["parameters"]
    second = go_on(run_dir, [f"shards={shards}", f"replicas={replicas}", "stop.steps=50"])
    assert at_start(second) == parameters
    assert second.coordinator.figures.steps == 20
    assert second.run().status == "done"
    manifest = newest(run_dir).manifest
    assert manifest.step == 50
    assert len(manifest.rows) == replicas
    assert sum(row.step for row in manifest.rows) == 50


def rows(*places: tuple[int, int, int]) -> tuple[ReplicaRow, ...]:
    return tuple(ReplicaRow(replica, *place) for replica, place in enumerate(places))


def manifest_with(*places: tuple[int, int, int], examples: int = 0) -> Manifest:
    found = rows(*places)
    return Manifest(
        run="r", network="n", updates=0, rows=found, replicas=len(found), partitions=1, shards=1,
        seconds=0.0, epochs=0.0, examples=examples, format=1, dbctl="x",
        step=sum(p[0] for p in places), dtype="float32", cut_bytes=1,
        vectors=("parameters",), tensors=(), files=(),
    )  # fmt: skip


def experiment_of(replicas: int) -> Experiment:
    return parse(TEXT, overrides=[f"replicas={replicas}"])


@pytest.mark.parametrize(
    ("places", "replicas", "expected", "again"),
    [
        # The same count: each where it stood.
        ([(9, 1, 2), (8, 1, 1)], 2, [(9, 1, 2), (8, 1, 1)], 0),
        # Nothing of epoch 1 was begun: it is that epoch.
        ([(7, 1, 0), (7, 1, 0)], 3, [(5, 1, 0), (5, 1, 0), (4, 1, 0)], 0),
        ([(0, 0, 0), (0, 0, 0)], 1, [(0, 0, 0)], 0),
        # One replica has begun epoch 1, the other is nearly there: 1 is begun anew.
        ([(9, 1, 2), (6, 0, 6)], 1, [(15, 1, 0)], 132 + 96 - 200),
        # One is at the end of epoch 0, the other in it: 0 is not done.
        ([(7, 1, 0), (6, 0, 6)], 4, [(4, 0, 0), (3, 0, 0), (3, 0, 0), (3, 0, 0)], 196),
        # However far one is ahead, what the other has not done is not called done.
        ([(35, 5, 0), (7, 1, 0)], 1, [(42, 3, 0)], 0),
        ([(37, 5, 2), (7, 1, 0)], 1, [(44, 3, 0)], 32),
    ],
)
def test_where_replicas_begin(
    places: list[tuple[int, int, int]],
    replicas: int,
    expected: list[tuple[int, int, int]],
    again: int,
) -> None:
    """200 rows, batches of 16: 7 a replica of two. The sum of the steps stays what it was."""
    plan = make_plan(experiment_of(replicas), rows=200, test_rows=0, cores=1)
    found, repeated = beginnings(manifest_with(*places), plan)
    assert found == {r: Position(*place) for r, place in enumerate(expected)}
    assert sum(p.step for p in found.values()) == sum(p[0] for p in places)
    assert repeated == again


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_place_that_no_epoch_has_is_no_place_of_this_experiment(replicas: int) -> None:
    """Whose resolved.yaml was edited: mini-batches of 100 and not 16 of 100 rows each."""
    edited = parse(TEXT, overrides=[f"replicas={replicas}", "optimizer.batch_size=100"])
    plan = make_plan(edited, rows=200, test_rows=0, cores=1)
    with pytest.raises(RunError, match="replica 0 stood at mini-batch 6 of its epoch, but its"):
        beginnings(manifest_with((6, 0, 6), (6, 0, 6), examples=192), plan)


def test_what_is_done_again_counts_for_the_next_count() -> None:
    """Lives shorter than an epoch, each with another count, come to an end all the same."""
    plan = make_plan(experiment_of(2), rows=200, test_rows=0, cores=1)
    manifest = manifest_with((16, 0, 8), examples=2 * 8 * 16)
    found, again = beginnings(manifest, plan)
    assert found == {0: Position(8, 1, 0), 1: Position(8, 1, 0)}
    assert again == 56


def test_another_count_tells_where_it_begins_and_ends_with_epochs_of_examples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, first = begin(TEXT, tmp_path / "r", overrides=["replicas=2", "stop={epochs: 3}"])
    first.run(interrupt_at=19)
    saved = newest(run_dir).manifest
    epochs, again = divmod(saved.examples, 200)
    assert epochs >= 1
    assert again > 0
    found = prepare(run_dir, ["replicas=1"])
    _tell(make_display(json=False, stderr_is_tty=False, out=sys.stdout, err=sys.stderr), found)
    said = f"replicas 2 -> 1: all begin after {epochs} epoch"
    assert said in (err := capsys.readouterr().err)
    assert f"done on average, and the work of {again} rows is done again" in err
    go_on(run_dir, ["replicas=1"]).run()
    manifest = newest(run_dir).manifest
    assert [(row.epoch, row.index) for row in manifest.rows] == [(3, 0)]
    assert manifest.examples == 3 * 200 + again


def test_warmstart_is_over_when_the_steps_have_passed_it(tmp_path: Path) -> None:
    counts = ["replicas=2", "optimizer.warmstart={steps: 8}", "stop.steps=6"]
    run_dir, first = begin(TEXT, tmp_path / "r", overrides=counts)
    first.run()
    assert [row.step for row in newest(run_dir).manifest.rows] == [6, 0]
    go_on(run_dir, ["stop.steps=8"]).run()
    assert [row.step for row in newest(run_dir).manifest.rows] == [8, 0]
    go_on(run_dir, ["stop.steps=40"]).run()
    assert all(row.step > 8 for row in newest(run_dir).manifest.rows)


def test_epochs_go_on(tmp_path: Path) -> None:
    """20 epochs are 20 over any number of lives."""
    run_dir, first = begin(TEXT, tmp_path / "r", overrides=["replicas=2", "stop={epochs: 3}"])
    first.run(interrupt_at=5)
    go_on(run_dir).run()
    manifest = newest(run_dir).manifest
    assert [(row.step, row.epoch, row.index) for row in manifest.rows] == [(21, 3, 0)] * 2
    assert manifest.examples == 3 * 200


# --------------------------------------------------------------------------------- what is refused


@pytest.fixture
def done(tmp_path: Path) -> RunDir:
    """A run that reached its 4 steps, in `tmp_path`/r."""
    run_dir, run = begin(TEXT, tmp_path / "r", overrides=["stop.steps=4", "replicas=2"])
    run.run()
    return run_dir


def changed(run_dir: RunDir, old: str, new: str) -> None:
    text = run_dir.resolved.read_text(encoding="utf-8")
    assert old in text, text
    run_dir.resolved.write_text(text.replace(old, new, 1), encoding="utf-8")


@pytest.mark.parametrize(
    "key", ["seed", "network.layers.0.units", "optimizer.batch_size", "data.test"]
)
def test_another_key_is_refused_and_the_allowed_ones_are_named(
    done: RunDir, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume", str(done.path), "--set", f"{key}=3"]) == 2
    err = capsys.readouterr().err
    assert f"--set {key}=3: resume can change only" in err
    assert all(name in err for name in CHANGEABLE)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("replcas=3", "unknown key; did you mean `replicas`? resume"),
        ("stpo.steps=3", "unknown key; did you mean `stop`? resume"),
        ("units=3", "unknown key here; it belongs under `network.layers`; resume"),
        ("data.train.shp=true", "unknown key; did you mean `data.train.ship`? resume"),
        ("optimizr.batch_size=3", "unknown key; did you mean `optimizer`? resume"),
        ("data.train.rows=3", "resume"),
        ("network.layers.0.units=3", "resume"),
    ],
)
def test_a_mistyped_key_is_told_which_was_meant(override: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_overrides([override])
    assert str(caught.value).startswith(f"--set {override}: {said} can change only stop, ")


def test_where_the_data_are_read_may_change() -> None:
    check_overrides(["data.train.ship=true", "data.test.ship = true", "stop.steps=3", "shards=1"])
    with pytest.raises(UsageError, match=r"data\.train\.rows=3: resume can change only"):
        check_overrides(["data.train.ship=true", "data.train.rows=3"])


def test_help_names_all_that_may_change(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", "--help"]) == 0
    words = {word.strip(",.") for word in capsys.readouterr().out.split()}
    assert {name.rpartition(".")[2] for name in CHANGEABLE} <= words


def test_a_bad_value_of_an_allowed_key(done: RunDir) -> None:
    with pytest.raises(ExperimentError, match="replicas"):
        prepare(done, ["replicas=0"])
    with pytest.raises(ExperimentError, match="min_replicas"):
        prepare(done, ["min_replicas=3"])
    with pytest.raises(ExperimentError, match="KEY=VALUE"):
        prepare(done, ["shards"])


def test_nothing_was_saved(done: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """cases: resume on an empty directory never starts over silently (Theoria#1382)."""
    shutil.rmtree(done.checkpoints)
    assert main(["resume", str(done.path)]) == 1
    err = capsys.readouterr().err
    assert "nothing was saved" in err
    assert "start again with `dbctl train FILE --run-dir OTHER`" in err


def test_no_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err
    assert main(["resume", str(tmp_path / "none")]) == 2


def test_a_run_that_is_going_on(done: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    with done:
        done.lock()
        assert main(["resume", str(done.path)]) == 2
    assert "this run is going on" in capsys.readouterr().err


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, flip, empty])
@pytest.mark.parametrize("name", ["manifest.json", "model-00001-of-00001.safetensors"])
def test_a_damaged_newest_one(
    damage: Any, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """cases: falls back with a warning; with none good exit 1 (reliability.md, G9)."""
    run_dir, run = begin(
        TEXT, tmp_path / "r", overrides=["checkpoint.every=9 steps", "stop.steps=60"]
    )
    run.run()
    new, *old = list_checkpoints(run_dir.checkpoints)
    damage(new / name)
    found = prepare(run_dir)
    assert found.checkpoint.path == old[0]
    [warning] = found.warnings
    assert str(new / name) in warning
    assert f"falling back to {old[0].name}" in warning
    for path in old:
        damage(path / name)
    assert main(["resume", str(run_dir.path)]) == 1
    assert "no checkpoint is good" in capsys.readouterr().err


def test_a_layer_was_changed(done: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """cases: one message with layer and both shapes (DALLE-pytorch#211)."""
    changed(done, "units: 9", "units: 12")
    assert main(["resume", str(done.path)]) == 1
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "layers.0.weight is (9, 64) in the checkpoint and (12, 64) in the experiment" in err


def test_an_activation_was_changed(done: RunDir) -> None:
    changed(done, "activation: sigmoid", "activation: tanh")
    with pytest.raises(CheckpointError, match="an activation, the loss"):
        prepare(done)


def test_the_rule_was_changed(done: RunDir) -> None:
    changed(done, "type: sgd\n", "type: adagrad\n")
    with pytest.raises(CheckpointError, match="state of another rule"):
        prepare(done)


def test_the_data_were_changed(done: RunDir) -> None:
    """reliability.md, G17: a mismatch stops the run."""
    changed(done, "rows: 200", "rows: 199")
    with pytest.raises(CheckpointError, match="other data"):
        prepare(done)


def test_data_that_cannot_be_read_leave_the_run_as_it_was(
    done: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreadable(*_: Any, **__: Any) -> None:
        raise DataError("x.npy", "cannot be read")

    before = {path: path.stat().st_mtime_ns for path in done.path.rglob("*")}
    monkeypatch.setattr("dbctl.run.resume.shipments_of", unreadable)
    assert main(["resume", str(done.path), "--set", "stop.steps=9"]) == DataError.exit_code
    assert "x.npy: cannot be read" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in done.path.rglob("*")} == before


def test_a_signal_is_heard_while_the_plan_is_made(done: RunDir) -> None:
    """Digits are read in one block, so it is the plan that asks."""

    def check() -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        prepare(done, between=check)


# ------------------------------------------------------------------------------------ what is told


LEFT = " · logs that could not be sent stay there: "
HOSTS = "cluster={launcher: ssh, hosts: [{name: a, workdir: /w}, {name: b, workdir: /v}]}"


@pytest.mark.parametrize(
    ("error", "hosts"),
    [
        (RunError("no descriptor left"), ["a:/w", "b:/v"]),
        (LaunchError("agent-1", "ended", host="b"), ["b:/v"]),
        (LaunchError("agent-1", "ended", host="b", about="cluster"), ["a:/w", "b:/v"]),
        (LaunchError("shard-0", "ended", host="b"), []),
        (CheckpointError("step-9", "cannot be written"), []),
        (None, []),
    ],
)
@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_where_logs_lie_that_nobody_hears_of(
    error: DbctlError | None, hosts: list[str], status: str, tmp_path: Path
) -> None:
    run_dir, run = begin(TEXT, tmp_path / "r")
    run.run()
    experiment = load(str(run_dir.resolved), [HOSTS])
    run.life.plan = replace(run.life.plan, experiment=experiment)
    notes = " · ".join(run.end(Done(status), error=error).notes)
    left = ", ".join(f"{host}/{run.life.run_id}" for host in hosts)
    assert notes.partition(LEFT)[2] == left


def test_why_a_run_failed_is_in_its_last_record_too(tmp_path: Path) -> None:
    """For scripts: as `dbctl status` says it."""
    run_dir, run = begin(TEXT, tmp_path / "r")
    done = run.run()

    def last(done: Done, error: DbctlError | None = None) -> tuple[Any, ...]:
        summary = run.end(done, error=error)
        record = list(read_metrics(run_dir.metrics))[-1]
        assert record["event"] == "finished"
        reason = run_dir.read_status()["reason"]
        return (record["reason"], summary.error, record["error"], reason)

    assert last(done) == ("", None, None, None)
    assert last(Done("failed", "no replica is left")) == ("no replica is left",) * 4
    died = LaunchError("shard-0", "was killed", host="b", log_tail="its words")
    assert last(Done("failed"), died) == ("shard-0 on b was killed",) * 4
    assert last(Done("failed", "shard-0 died"), died) == ("shard-0 on b was killed",) * 4
    assert last(Done("interrupted", "stopped at once")) == ("stopped at once", None, None, None)
    assert last(Done("converged", "|g| 0")) == ("|g| 0", None, None, None)


@pytest.mark.parametrize("n_push", [1, 7])
def test_steps_that_a_resume_does_again_are_told(n_push: int, tmp_path: Path) -> None:
    """Ctrl-C while gradients are gathered: the line counts the steps, the checkpoint does not."""
    overrides = ["replicas=2", f"optimizer.n_push={n_push}", f"optimizer.n_fetch={n_push}"]
    run_dir, run = begin(TEXT, tmp_path / "r", overrides=[*overrides, "stop.steps=90"])
    summary = run.end(run.run(interrupt_at=10))
    n_again = summary.steps - newest(run_dir).manifest.step
    said = f"`dbctl resume {run_dir.path}` goes on from step {run.saved[-1]}"
    if n_push > 1:
        assert n_again > 1
        said += f" and does {n_again} steps again, whose pushes were not sent"
    assert summary.notes == (said,)


def test_steps_after_an_older_checkpoint_are_done_again_whatever_was_sent(tmp_path: Path) -> None:
    overrides = ["checkpoint.every=5 steps", "stop.steps=90"]
    _, run = begin(TEXT, tmp_path / "r", overrides=overrides)
    figures = run.coordinator.figures
    assert run.net.run(until=lambda: run.saved and figures.steps > run.saved[-1], limit_s=1e3)
    summary = run.end(Done("interrupted", "stopped at once"))
    n_again = summary.steps - run.saved[-1]
    assert summary.notes[0] == "the final checkpoint was not taken: stopped at once"
    assert summary.notes[1].endswith(
        f"step {run.saved[-1]} and does {counted(n_again, 'step')} again"
    )


def test_no_checkpoint_is_ahead_of_the_last_line(tmp_path: Path) -> None:
    """Shards apply what a worker is killed before it reports."""
    run_dir, run = begin(TEXT, tmp_path / "r")
    run.run()
    figures = run.coordinator.figures
    whole = figures.summary(run.net.now)
    for replica, report in figures._reports.items():
        figures._reports[replica] = msgspec.structs.replace(report, position=Position())
    assert figures.steps == 0
    summary = run.end(Done("failed", "shard-0 died"))
    assert summary.steps == run.saved[-1] == whole["steps"]
    assert summary.epochs == whole["epochs"]
    assert run_dir.read_status()["steps"] == summary.steps


def test_a_newer_cut_that_could_not_be_saved_counts_no_steps(tmp_path: Path) -> None:
    """The checkpoint is of step 5, the reports say 7, and what was not saved was of step 20."""
    _, run = begin(TEXT, tmp_path / "r")
    run.run()
    figures = run.coordinator.figures
    for replica, report in figures._reports.items():
        figures._reports[replica] = msgspec.structs.replace(report, position=Position(7, 0, 7))
    run.saved = [5]
    assert run.end(Done("failed", "shard-0 died")).steps == 7


EVALUATED = [
    "stop={epochs: 8}",
    "data.test={source: digits, split: test, scale: 0.0625}",
    "evaluate.every=1 epoch",
]


def test_evaluations_that_were_due_and_not_made_are_told(tmp_path: Path) -> None:
    """The evaluator was still at the one before: such a gap in the curve looked like none."""
    run_dir, run = begin(TEXT, tmp_path / "r", overrides=EVALUATED)
    done = run.run()
    made = [record for record in run.records if record.event == "evaluation"]
    assert 1 < len(made) < 8
    for run.records in (made, made[1:], made * 8):
        summary = run.end(done)
        assert (summary.measured_steps, summary.measured_epochs) == (summary.steps, 8.0)
        n = max(0, 8 - len(run.records))
        assert summary.evaluations_left_out == n
        assert list(read_metrics(run_dir.metrics))[-1]["evaluations_left_out"] == n
        told = [f for name, f in run.life.display.events if name == "evaluations_left_out"]
        assert [(f["left_out"], f["due"]) for f in told] == ([(n, 8)] if n else [])
        assert not told or told[0]["text"].startswith(f"{8 - n} of 8 measurements made: ")
    run.records = made[1:]  # a run that is stopped does not wait for the last one
    assert run.end(Done("interrupted")).evaluations_left_out == 8 - len(made)
    run.coordinator.unmeasured = True  # that it was lost is told
    run.coordinator.figures.test_loss = None
    summary = run.end(done)
    assert (summary.evaluations_left_out, summary.measured_steps) == (None, None)


@pytest.mark.parametrize(
    ("made", "status", "left_out", "said"),
    [
        ([2.2, 7.0], "done", 2, "1 of 3 measurements made besides the one at the end"),
        ([2.2, 4.1, 6.0, 7.0], "done", 0, ""),
        ([2.2], "interrupted", 1, "1 of 3 measurements made"),
        ([], "interrupted", 2, "0 of 3 measurements made"),
        ([2.2, 4.4, 7.0], "done", 1, ""),  # as many as were asked for, with that of the end
        (
            [2.2, 7.0],
            "interrupted",
            0,
            "",
        ),  # which a run that is stopped does not measure by itself
    ],
)
def test_the_measurement_of_an_end_where_none_is_due_is_none_of_those_due(
    made: list[float], status: str, left_out: int, said: str, tmp_path: Path
) -> None:
    overrides = ["stop={epochs: 7}", EVALUATED[1], "evaluate.every=2 epochs"]
    _, run = begin(TEXT, tmp_path / "r", overrides=overrides)
    run.run()
    last = [record for record in run.records if record.event == "evaluation"][-1]
    run.records = [replace(last, fields=last.fields | {"epochs": at}) for at in made]
    assert run.end(Done(status)).evaluations_left_out == left_out
    told = [f for name, f in run.life.display.events if name == "evaluations_left_out"]
    assert [f["text"].partition(": ")[0] for f in told] == ([said] if said else [])


def test_by_the_clock_no_evaluation_is_due_at_a_point(tmp_path: Path) -> None:
    _, run = begin(TEXT, tmp_path / "r", overrides=[*EVALUATED[:2], "evaluate.every=1 s"])
    assert run.end(run.run()).evaluations_left_out is None


def test_the_last_line_tells_this_life_from_all(tmp_path: Path) -> None:
    """Examples and seconds are of all lives, the rate is of the last."""
    run_dir, first = begin(TEXT, tmp_path / "r")
    begun = first.end(first.run(interrupt_at=7))
    assert (begun.lives, begun.life_examples) == (1, begun.examples)
    for lives, stop in ((2, 30), (3, 40)):
        run = go_on(run_dir, [f"stop.steps={stop}"])
        summary = run.end(run.run())
        assert summary.lives == lives
        assert summary.life_examples == summary.examples - begun.examples
        assert summary.life_seconds == pytest.approx(summary.seconds - begun.seconds)
        assert summary.life_examples == pytest.approx(
            (summary.examples_per_second or 0) * (summary.life_seconds or 0)
        )
        begun = summary


def test_what_is_set_anew_is_told(done: RunDir) -> None:
    found = prepare(done, ["shards=2", "stop.steps=9", "min_replicas=1"])
    assert found.changed == ["shards 1 -> 2", "stop.steps 4 -> 9"]
    assert prepare(done).changed == []
    changed(done, "shards: 1", "shards: 0")
    assert prepare(done, ["shards=2"]).changed == []  # nothing is known of the life before


# ---------------------------------------------------------------------------------- finished runs


def test_a_finished_run_stays_finished(done: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(done.path.rglob("*"))
    for more in ([], ["--set", "shards=2"], ["--set", "stop.steps=3"]):
        assert main(["resume", str(done.path), *more]) == 0
        out = capsys.readouterr().out
        assert out.startswith("done: 4 steps")
        assert "had finished already" in out
    assert sorted(done.path.rglob("*")) == before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"steps": 4, "train_loss": "x"}'])
def test_a_finished_run_stays_finished_with_a_damaged_status(
    done: RunDir, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is never flushed to the disk, and only for people."""
    done.status.write_text(text)
    assert main(["resume", str(done.path)]) == 0
    assert capsys.readouterr().out.startswith("done: 4 steps")


def test_records_that_cannot_be_kept_leave_no_runtime_directory(
    done: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = done.path.parent / "x"
    base.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    made = []
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: made.append(mkdir(base / "d")) or made[0])
    done.metrics.unlink(missing_ok=True)
    done.metrics.mkdir()
    shutil.rmtree(done.logs)
    assert main(["resume", str(done.path), "--set", "stop.steps=9"]) == 1
    assert "metrics.jsonl: cannot be written" in capsys.readouterr().err
    assert made
    assert not any(base.iterdir())
    assert done.logs.is_dir()  # made again


def mkdir(path: Path) -> str:
    path.mkdir()
    return str(path)


def test_a_finished_run_says_so_in_json(done: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(done.path), "--json"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    fields = json.loads(line)
    assert (fields["event"], fields["status"], fields["steps"]) == ("finished", "done", 4)
    assert "had finished already" in fields["notes"][0]
    assert fields["lives"] == len(fields["notes"]) == 1
    assert main(["resume", str(done.path), "--json", "--set", "shards=2"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["notes"][1] == "of no effect, as nothing is trained: shards 1 -> 2"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "finished already by stop.epochs (1): it goes on with a later one, --set stop.epoc"),
        (["--set", "stop.steps=99"], "by stop.epochs (1): it goes on with a later one, --set stop"),
        (["--set", "stop.steps=5"], "--set stop.steps=N --set stop.epochs=N"),
    ],
)
def test_a_finished_run_names_the_stop_that_was_reached(
    tmp_path: Path, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, run = begin(TEXT, tmp_path / "r", overrides=["stop={epochs: 1}"])
    run.run()
    assert main(["resume", str(run_dir.path), *more]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "finished"),
    [
        ("stop.steps=4", True),
        ("stop.steps=5", False),
        ("stop={epochs: 1}", False),
        ("stop={steps: 9, epochs: 1}", False),
        ("stop={steps: 2, epochs: 9}", True),
    ],
)
def test_only_a_later_stop_goes_on(done: RunDir, override: str, finished: bool) -> None:
    assert prepare(done, [override]).finished is finished


def test_a_stop_that_an_unfinished_run_is_past_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, run = begin(TEXT, tmp_path / "r", overrides=["stop={epochs: 9}"])
    run.run(interrupt_at=30)
    before = {path: path.stat().st_mtime_ns for path in run_dir.path.rglob("*")}
    assert main(["resume", str(run_dir.path), "--set", "stop.epochs=1"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("done: ")
    assert " · stop.epochs (1) was reached already: it goes on with a later one, --set " in out
    assert "of no effect, as nothing is trained: stop.epochs 9 -> 1" in out
    assert not err
    assert {path: path.stat().st_mtime_ns for path in run_dir.path.rglob("*")} == before
    assert not prepare(run_dir).finished  # with the stop that it had it goes on


def test_epochs_that_are_done_on_average_are_told_before_another_count_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All replicas would begin behind their last step."""
    counts = ["replicas=2", "optimizer.warmstart={steps: 16}", "stop={epochs: 9}"]
    run_dir, run = begin(TEXT, tmp_path / "r", overrides=counts)
    run.run(interrupt_at=20)
    sets = ["replicas=1", "stop.epochs=1"]
    assert not prepare(run_dir, sets[1:]).finished  # one of the two has not done it
    assert not prepare(run_dir, ["replicas=1", "stop.epochs=2"]).finished
    before = {path: path.stat().st_mtime_ns for path in run_dir.path.rglob("*")}
    assert main(["resume", str(run_dir.path), "--set", sets[0], "--set", sets[1]]) == 0
    out = capsys.readouterr().out
    assert "stop.epochs (1) on average of the replicas was reached already: it goes on" in out
    assert {path: path.stat().st_mtime_ns for path in run_dir.path.rglob("*")} == before


def test_an_end_that_was_not_measured_yet_is_gone_on_with(tmp_path: Path) -> None:
    """Interrupted at its stop, before the final evaluation."""
    stop = asdict(parse(TEXT).stop)
    manifest = msgspec.structs.replace(
        manifest_with((20, 1, 7)), extra={"stop": stop, "finished": False}
    )
    assert not _is_finished(manifest, StopSpec(steps=20))
    assert _is_finished(manifest, StopSpec(steps=19))


@pytest.mark.parametrize(
    ("places", "lost", "finished"),
    [
        ([(14, 2, 0), (13, 1, 6)], [], False),  # one is behind
        ([(14, 2, 0), (13, 1, 6)], [1], True),  # and nobody waited for it
        ([(14, 2, 0), (0, 0, 0)], [], True),  # it has no rows
        ([(0, 0, 0), (0, 0, 0)], [], False),
    ],
)
def test_epochs_are_done_when_all_that_train_have_done_them(
    places: list[tuple[int, int, int]], lost: list[int], finished: bool
) -> None:
    manifest = msgspec.structs.replace(manifest_with(*places), extra={"lost": lost})
    assert _is_finished(manifest, StopSpec(epochs=2)) is finished


def test_a_later_stop_is_kept_when_nothing_came_of_it(done: RunDir) -> None:
    """Resumed with a later stop and killed before anything was saved: the stop is still due."""
    changed(done, "steps: 4", "steps: 9")
    assert not prepare(done).finished


def test_the_resolved_file_keeps_threads_and_takes_the_new_values(tmp_path: Path) -> None:
    run_dir, run = begin(TEXT, tmp_path / "r", overrides=["threads=3"])
    run.run()
    found = prepare(run_dir, ["stop.steps=30", "shards=2", "checkpoint.every=5 steps"])
    assert found.plan.experiment.threads == 3
    assert {n.threads for n in found.plan.of_role("worker")} == {3}
    resolved = json.loads(to_json(found.plan.experiment))
    assert (resolved["stop"]["steps"], resolved["shards"]) == (30, 2)
    assert found.origin.examples == run.coordinator.figures.examples


def test_a_standardized_run_resumes_with_the_statistics_it_had(tmp_path: Path) -> None:
    overrides = ["data.train={source: digits, split: train, rows: 200, standardize: true}"]
    expected = straight(tmp_path / "whole", *overrides)
    run_dir, run = begin(TEXT, tmp_path / "cut", overrides=[*overrides, "stop.steps=10"])
    run.run()
    file = run_dir.path / "standardize.npz"
    kept = Statistics.load(str(file))
    assert prepare(run_dir, ["stop.steps=20"]).warnings == []
    short = Statistics(kept.mean[:3], kept.deviation[:3])
    # It is a function of the same data, whatever has become of it.
    for spoil in (file.unlink, lambda: file.write_bytes(b"PK"), lambda: short.save(str(file))):
        spoil()
        told = f"{file}: missing or damaged, is made again"
        assert prepare(run_dir, ["stop.steps=20"]).warnings == [told]
    go_on(run_dir, ["stop.steps=20"]).run()
    assert contents(newest(run_dir)) == contents(expected)


def test_statistics_that_a_finished_run_has_lost_are_made_again_by_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`eval` needs them, and names that cure."""
    overrides = ["data.train={source: digits, split: train, rows: 200, standardize: true}"]
    run_dir, run = begin(TEXT, tmp_path / "r", overrides=overrides)
    run.run()
    place = str(run_dir.path)
    kept = (run_dir.path / "standardize.npz").read_bytes()
    (run_dir.path / "standardize.npz").unlink()
    monkeypatch.setattr(evaluate._Task, "run", lambda *_, **__: ("interrupted", None))
    assert main(["eval", place, "--split", "train"]) == 1
    assert "dbctl resume makes it again" in capsys.readouterr().err
    assert main(["resume", place]) == 0
    assert "standardize.npz: missing or damaged, is made again" in capsys.readouterr().err
    assert (run_dir.path / "standardize.npz").read_bytes() == kept
    assert main(["eval", place, "--split", "train"]) == 130


def test_a_full_disk_is_told_of_the_statistics_and_the_next_try_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(file: IO[bytes], **arrays: object) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    given, place = tmp_path / "file.yaml", tmp_path / "run"
    given.write_text(TEXT.replace("scale: 0.0625", "standardize: true"))
    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        assert main(["train", str(given), "--run-dir", str(place)]) == 1
    said = capsys.readouterr().err
    assert f"{place}/standardize.npz: cannot be written: no space left on device" in said
    assert main(["train", str(given), "--run-dir", str(place), "--dry-run"]) == 0


def test_the_initial_values_are_not_those_of_a_checkpoint(done: RunDir) -> None:
    """What the other tests compare can differ."""
    first = np.frombuffer(contents(newest(done))["parameters"], np.float32)
    _, again = begin(TEXT, done.path.parent / "other")
    assert not np.array_equal(first, np.frombuffer(at_start(again), np.float32))
