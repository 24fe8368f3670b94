"""`initialize_from` without processes: parameters of another run, and nothing else of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from dbctl.checkpoint.reader import Checkpoint, newest_good
from dbctl.cli.main import main
from dbctl.errors import CheckpointError, UsageError
from dbctl.experiment.read import load, parse
from dbctl.region import Range
from dbctl.roles.batch_shard import BatchShard
from dbctl.run.initial_run import absent, settle, split
from dbctl.rundir import RunDir
from dbctl.wire import Position
from tests.inproc_run import InprocRun, begin, go_on
from tests.reference import serial_sgd

TEXT = """\
version: 1
name: begun
seed: 3
data:
  train: {source: digits, split: train, scale: 0.0625, rows: 200}
network:
  input: [8, 8, 1]
  layers:
    - {type: local2d, maps: 2, kernel: 3, activation: sigmoid}
    - {type: dense, units: 10}
  loss: softmax
optimizer: {type: downpour, batch_size: 16, rule: {type: adagrad, rate: 0.1}, overlap: false}
stop: {steps: 8}
checkpoint: {every: off}
"""
BATCH = "optimizer={type: sandblaster, method: lbfgs, portion: 20}"
SERIAL = "optimizer={type: sgd, batch_size: 16, rule: {type: sgd, rate: 0.1}}"


def values(checkpoint: Checkpoint, vector: str = "parameters") -> np.ndarray:
    return checkpoint.read(vector, Range(0, checkpoint.n_elements))


def newest(run_dir: RunDir) -> Checkpoint:
    checkpoint, warnings = newest_good(run_dir.checkpoints)
    assert not warnings
    return checkpoint


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of two shards and two replicas, saved at steps 4 and 8; not to be changed."""
    directory = tmp_path_factory.mktemp("first") / "run"
    run_dir, run = begin(TEXT, directory, overrides=["shards=2", "replicas=2", "stop.steps=4"])
    assert run.run().status == "done"
    assert go_on(run_dir, ["stop.steps=8"]).run().status == "done"
    return run_dir


@pytest.fixture
def copy(first: RunDir, tmp_path: Path) -> RunDir:
    return RunDir(Path(shutil.copytree(first.path, tmp_path / "first")))


def from_(run_dir: RunDir, step: int | None = None) -> str:
    at = "" if step is None else f"@{step}"
    return f"initialize_from={run_dir.path}{at}"


def at_start(run: InprocRun) -> np.ndarray:
    """The cut's flat vector as the shards hold it, as whole tensors: what a checkpoint holds."""
    cut = run.life.plan.cut
    whole = np.full(run.life.plan.n_parameters, np.nan, np.float32)
    for span in run.life.plan.shards:
        role = run.net.role(span.node)
        own = role.shard.values if isinstance(role, BatchShard) else role.values  # type: ignore[attr-defined]
        for piece in cut.pieces:
            held = Range(span.start, span.stop).intersection(piece.range)
            for start, part in piece.runs(held):
                whole[start : start + len(part)] = own[part.slice(span.start)]
    return whole


# --------------------------------------------------------------------------------- what it gives


@pytest.mark.parametrize("counts", [(1, 1, 1), (3, 1, 2), (2, 3, 1), (5, 2, 2)])
def test_any_counts_begin_with_the_same_parameters(
    counts: tuple[int, int, int], first: RunDir, tmp_path: Path
) -> None:
    shards, replicas, partitions = counts
    overrides = [f"shards={shards}", f"replicas={replicas}", f"partition.count={partitions}"]
    _, run = begin(TEXT, tmp_path / "run", overrides=[*overrides, from_(first)])
    np.testing.assert_array_equal(at_start(run), values(newest(first)))
    assert run.run().status == "done"


def test_nothing_else_is_taken_over(first: RunDir, tmp_path: Path) -> None:
    """Steps, epochs, examples, updates and the sum of squares of Adagrad begin anew."""
    run_dir, run = begin(TEXT, tmp_path / "a", overrides=[from_(first), "stop.steps=1"])
    assert run.run().status == "done"
    made = newest(run_dir)
    assert (made.manifest.step, made.manifest.updates, made.manifest.examples) == (1, 1, 16)
    assert made.manifest.rows[0].position == Position(1, 0, 1)
    squares = (values(made) - values(newest(first))) ** 2
    # One step of Adagrad from an empty sum moves each weight by the rate, whatever its gradient.
    moved = squares[values(made, "sum_of_squares") > 1e-12]
    assert len(moved) > 100
    np.testing.assert_allclose(moved, 0.1**2, rtol=1e-3)


def test_it_goes_on_like_serial_sgd_begun_there(first: RunDir, tmp_path: Path) -> None:
    """Rung 5 from other parameters than the seed's, bit for bit."""
    overrides = [SERIAL, from_(first), "shards=3"]
    with threadpool_limits(1):
        run_dir, run = begin(TEXT, tmp_path / "run", overrides=overrides)
        assert run.run().status == "done"
        wanted = serial_sgd(parse(TEXT, overrides=overrides), 8, begin=values(newest(first)))
    np.testing.assert_array_equal(values(newest(run_dir)), wanted)


def test_from_downpour_to_a_batch_method_and_back(first: RunDir, tmp_path: Path) -> None:
    """Paper A, figure 4: Sandblaster from the warmstart of the others; its history stays behind."""
    run_dir, run = begin(TEXT, tmp_path / "a", overrides=[BATCH, from_(first), "stop.steps=3"])
    np.testing.assert_array_equal(at_start(run), values(newest(first)))
    assert run.run().status == "max_iterations"
    assert newest(run_dir).manifest.step == 3
    assert len(newest(run_dir).manifest.vectors) > 2
    _, run = begin(TEXT, tmp_path / "b", overrides=[from_(run_dir), "shards=2"])
    np.testing.assert_array_equal(at_start(run), values(newest(run_dir)))
    assert run.run().status == "done"


def test_a_step_is_that_step_and_none_is_the_newest(first: RunDir) -> None:
    steps = {}
    for step in (None, 4):
        experiment, directory = settle(
            parse(TEXT, overrides=[from_(first, step)]), warn=pytest.fail
        )
        steps[step] = Path(directory).name, experiment.initialize_from
    assert steps == {
        None: ("step-000000008", f"{first.path}@8"),
        4: ("step-000000004", f"{first.path}@4"),
    }


def test_the_network_may_differ_in_what_is_no_tensor(first: RunDir, tmp_path: Path) -> None:
    overrides = ["network.layers.0.activation=relu", "seed=9", from_(first)]
    _, run = begin(TEXT, tmp_path / "run", overrides=overrides)
    np.testing.assert_array_equal(at_start(run), values(newest(first)))


def test_a_damaged_newest_one_is_named_and_the_one_before_it_taken(copy: RunDir) -> None:
    newest(copy).path.joinpath("model-00001-of-00001.safetensors").write_bytes(b"")
    warnings: list[str] = []
    experiment, _ = settle(parse(TEXT, overrides=[from_(copy)]), warn=warnings.append)
    assert experiment.initialize_from == f"{copy.path}@4"
    assert "falling back to step-000000004" in warnings[0]
    with pytest.raises(CheckpointError, match="is cut or damaged"):
        settle(parse(TEXT, overrides=[from_(copy, 8)]), warn=pytest.fail)


def test_resume_goes_on_from_its_own_checkpoints(copy: RunDir, tmp_path: Path) -> None:
    run_dir, run = begin(TEXT, tmp_path / "run", overrides=[from_(copy)])
    assert run.run().status == "done"
    shutil.rmtree(copy.path)
    again = go_on(run_dir, ["stop.steps=12"])
    np.testing.assert_array_equal(at_start(again), values(newest(run_dir)))
    assert again.run().status == "done"
    assert newest(run_dir).manifest.step == 12


def test_resume_of_a_run_that_saved_nothing_does_not_begin_again(
    first: RunDir, tmp_path: Path
) -> None:
    run_dir, _ = begin(TEXT, tmp_path / "run", overrides=[from_(first)])
    with pytest.raises(CheckpointError, match="nothing was saved"):
        go_on(run_dir)


# ------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("runs/a", ("runs/a", None)),
        ("runs/a@12", ("runs/a", 12)),
        ("runs/a@b", ("runs/a@b", None)),
        ("runs/a@5/", ("runs/a@5/", None)),
        ("runs/a@5@7", ("runs/a@5", 7)),
        ("@7", ("@7", None)),
    ],
)
def test_directory_and_step(name: str, parts: tuple[str, int | None]) -> None:
    assert split(name) == parts


def write(tmp_path: Path, name: str) -> Path:
    file = tmp_path / "file.yaml"
    file.write_text(f"{TEXT}initialize_from: {name}\n")
    return file


def refused(file: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `dbctl train` says; nothing is left of it."""
    where = file.parent / "refused"
    assert main(["train", str(file), "--run-dir", str(where), *words]) == 2
    assert not where.exists()
    return capsys.readouterr().err


def test_a_relative_name_starts_at_the_file(copy: RunDir, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    experiment = load(str(write(tmp_path / "below", "../first@4")))
    assert experiment.initialize_from == f"{tmp_path}/below/../first@4"
    assert settle(experiment, warn=pytest.fail)[1].endswith("first/checkpoints/step-000000004")


def test_no_run_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, "nowhere")
    place = f"{file}:{TEXT.count(chr(10)) + 1}:18: initialize_from: "
    said = refused(file, capsys)
    assert f"{place}{tmp_path}/nowhere: no such directory, expected that of a run" in said
    said = refused(file, capsys, "--set", "initialize_from=other")
    assert f"--set initialize_from=other: initialize_from: {tmp_path}/other: no such" in said


def test_a_checkpoint_instead_of_its_run(copy: RunDir, tmp_path: Path) -> None:
    name = f"initialize_from={copy.path}/checkpoints/step-000000004"
    with pytest.raises(UsageError, match=f"is a checkpoint, .* its run: {copy.path}@4$"):
        settle(parse(TEXT, overrides=[name]), warn=pytest.fail)


def test_a_step_that_was_not_saved(
    copy: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(write(tmp_path, "first@7"), capsys)
    assert "initialize_from:" in said
    assert "first: has no checkpoint of step 7, only of 4, 8" in said


def test_a_run_that_saved_nothing(
    copy: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(copy.checkpoints)
    assert "first: this run has saved no checkpoint" in refused(write(tmp_path, "first"), capsys)


def test_another_tensor_is_named_with_both_shapes(
    copy: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, "first")
    said = refused(file, capsys, "--set", "network.layers.1.units=12")
    assert f"{file}:" in said
    assert (
        "layers.1.weight is (10, 72) in the checkpoint and (12, 72) in the experiment (and 1 more"
    ) in said


def test_a_value_of_another_type_is_a_fault_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "expected a run directory, or DIRECTORY@STEP, found `5`" in refused(
        write(tmp_path, "5"), capsys
    )


# ---------------------------------------------------------------------------- who starts nothing

DRY = ([], ["--dry-run"])


def test_absent_says_what_is_missing_and_reads_nothing(copy: RunDir, tmp_path: Path) -> None:
    (newest(copy).path / "manifest.json").write_bytes(b"")
    assert absent(parse(TEXT)) == ""
    assert absent(parse(TEXT, overrides=[from_(copy)])) == ""
    assert "no checkpoint of step 5" in absent(parse(TEXT, overrides=[from_(copy, 5)]))
    missing = absent(parse(TEXT, overrides=["initialize_from=no"], directory=str(tmp_path)))
    assert missing.startswith(f"initialize_from: {tmp_path}/no: no such directory")


def test_validate_and_dry_run_warn_and_are_content(
    copy: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["validate"], ["train", "--dry-run"], ["train", "--dry-run", "--json"]):
        file = write(tmp_path, "first")
        assert main([*words, str(file)]) == 0
        good = capsys.readouterr()
        assert good.err == ""
        file = write(tmp_path, "nowhere")
        assert main([*words, str(file)]) == 0
        warned = capsys.readouterr()
        assert warned.err.startswith("warning: initialize_from: ")
        assert "nowhere: no such directory" in warned.err
        assert warned.err.count("\n") == 1
    step = newest(copy).manifest.step
    assert json.loads(good.out)["initialize_from"] == f"{tmp_path}/first@{step}"


def test_the_plan_says_where_parameters_come_from(
    copy: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--dry-run", str(write(tmp_path, "first"))]) == 0
    step = newest(copy).manifest.step
    assert f"with the parameters of {tmp_path}/first@{step}\n" in capsys.readouterr().out


def test_a_dry_run_refuses_what_a_run_does_where_the_other_run_is_there(
    copy: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, "first")
    other = ["--set", "network.layers=[{type: dense, units: 3}, {type: dense, units: 10}]"]
    said = {(main(["train", str(file), *other, *dry]), capsys.readouterr()) for dry in DRY}
    assert [status for status, _ in said] == [2]
    step = newest(copy).manifest.step
    (newest(copy).path / "manifest.json").write_bytes(b"")
    file = write(tmp_path, f"first@{step}")
    said = {(main(["train", str(file), *dry]), capsys.readouterr()) for dry in DRY}
    assert [status for status, _ in said] == [1]
