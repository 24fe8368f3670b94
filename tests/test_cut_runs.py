"""Whole runs of cut replicas in the in-process network: the numbers of whole ones, and resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dbctl.checkpoint.reader import newest_good
from dbctl.launch.inproc import Faults
from dbctl.region import Range
from dbctl.roles.base import Array
from dbctl.roles.downpour import Downpour
from dbctl.rundir import RunDir
from tests.inproc_run import InprocRun, begin, go_on

TEXT = """\
version: 1
name: cut
seed: 5
data:
  train: {source: digits, split: train, scale: 0.0625, rows: 200}
  test: {source: digits, split: test, scale: 0.0625, rows: 60}
network:
  input: [64]
  layers:
    - {type: dense, units: 13, activation: sigmoid}
    - {type: dense, units: 9, activation: sigmoid}
    - {type: dense, units: 10}
  loss: softmax
optimizer: {type: sgd, batch_size: 16, rule: {type: sgd, rate: 0.01}}
shards: 3
stop: {steps: 50}
evaluate: {every: 20 steps}
checkpoint: {every: off}
"""
NO_PARAMETERS = """\
data:
  train: {source: synthetic, features: 36, classes: 1, rows: 40, split: train}
  test: {source: synthetic, features: 36, classes: 1, rows: 10, split: test}
network:
  input: [6, 6, 1]
  layers:
    - {type: conv2d, maps: 2, kernel: 3}
    - {type: dense, units: 1, cut: outputs}
  loss: logistic
optimizer: {type: sgd, batch_size: 8, rule: {type: sgd, rate: 0.01}}
stop: {steps: 12}
evaluate: {every: 6 steps}
"""
BAD = Faults(drop=0.05, duplicate=0.1, delay_s=0.01, in_pieces=0.3, piece_bytes=4096)


def parameters(run_dir: RunDir) -> Array:
    checkpoint, _ = newest_good(run_dir.checkpoints)
    return checkpoint.read("parameters", Range(0, checkpoint.n_elements))


def done(run: InprocRun) -> InprocRun:
    assert run.run().status == "done"
    return run


def evaluations(run: InprocRun) -> list[tuple[int, float, float]]:
    events = [r.fields for r in run.records if r.event == "evaluation"]
    return [(e["examples"], e["loss"], e["accuracy"]) for e in events]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Array, list[tuple[int, float, float]]]:
    run_dir, run = begin(TEXT, tmp_path_factory.mktemp("whole") / "r")
    done(run)
    return parameters(run_dir), evaluations(run)


BLOCKING = (
    "optimizer={type: downpour, batch_size: 16, overlap: false, rule: {type: sgd, rate: 0.01}}"
)


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize(
    ("settings", "in_place"),
    [
        ((), True),
        ((BLOCKING,), True),
        ((BLOCKING, "replicas=2"), True),
        ((BLOCKING, "replicas=3"), False),
    ],
)
def test_only_workers_of_one_or_two_replicas_read_where_the_shard_writes(
    tmp_path: Path, settings: tuple[str, ...], partitions: int, in_place: bool
) -> None:
    """A hand-out is read-only; a copy of one's own is not."""
    cut = (f"partition.count={partitions}", f"shards={partitions}", "stop.steps=4")
    _, run = begin(TEXT, tmp_path / "r", overrides=(*cut, *settings))
    done(run)
    workers = [run.net.role(node.node) for node in run.life.plan.of_role("worker")]
    assert len(workers) == partitions * run.life.plan.experiment.replicas
    for worker in workers:
        assert isinstance(worker, Downpour)
        assert worker.local.parameters.flags.writeable is not in_place


@pytest.mark.parametrize("count", [2, 4])
def test_a_cut_replica_trains_as_a_whole_one(
    count: int, whole: tuple[Array, list[tuple[int, float, float]]], tmp_path: Path
) -> None:
    """A sigmoid network, rate 0.01, blocking, 50 steps, on a network that loses and repeats."""
    run_dir, run = begin(
        TEXT, tmp_path / "r", overrides=[f"partition.count={count}"], seed=count, faults=BAD
    )
    done(run)
    np.testing.assert_allclose(parameters(run_dir), whole[0], rtol=0, atol=1e-5)
    found = evaluations(run)
    assert [e[0] for e in found] == [60] * len(found)
    assert found[-1][1] == pytest.approx(whole[1][-1][1], abs=1e-4)


@pytest.mark.parametrize(("first", "second"), [(4, 1), (4, 2), (1, 3), (2, 4)])
def test_a_run_goes_on_in_another_cut(
    first: int,
    second: int,
    whole: tuple[Array, list[tuple[int, float, float]]],
    tmp_path: Path,
) -> None:
    run_dir, run = begin(
        TEXT, tmp_path / "r", overrides=[f"partition.count={first}", "stop.steps=20"]
    )
    done(run)
    done(go_on(run_dir, ["stop.steps=50", f"partition.count={second}", "shards=2"]))
    np.testing.assert_allclose(parameters(run_dir), whole[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("rule", ["momentum, rate: 0.01", "adagrad, rate: 0.01", "adam"])
def test_optimiser_state_moves_to_another_cut_with_its_parameters(
    rule: str, tmp_path: Path
) -> None:
    changed = TEXT.replace("type: sgd, rate: 0.01", f"type: {rule}")
    assert changed != TEXT
    straight, run = begin(changed, tmp_path / "straight")
    done(run)
    run_dir, run = begin(changed, tmp_path / "r", overrides=["partition.count=3", "stop.steps=20"])
    done(run)
    done(go_on(run_dir, ["stop.steps=50", "partition.count=2"]))
    np.testing.assert_allclose(parameters(run_dir), parameters(straight), rtol=0, atol=2e-4)


def test_an_interrupted_cut_run_goes_on_where_all_its_partitions_stood(tmp_path: Path) -> None:
    run_dir, run = begin(TEXT, tmp_path / "r", overrides=["partition.count=2"], faults=BAD, seed=3)
    assert run.run(interrupt_at=10).status == "interrupted"
    checkpoint, _ = newest_good(run_dir.checkpoints)
    [row] = checkpoint.manifest.rows
    assert 10 <= row.position.step <= 50
    assert checkpoint.manifest.updates == row.position.step, "each step is one update a slice"
    done(go_on(run_dir, ["partition.count=2"]))
    straight, other = begin(TEXT, tmp_path / "straight")
    done(other)
    np.testing.assert_allclose(parameters(run_dir), parameters(straight), rtol=0, atol=1e-5)


def test_clipping_is_by_the_norm_of_the_whole_gradient(tmp_path: Path) -> None:
    overrides = ["optimizer.clip=0.5", "optimizer.rule.rate=0.1", "stop.steps=20"]
    found = []
    for count in (1, 2, 3):
        run_dir, run = begin(
            TEXT, tmp_path / f"r-{count}", overrides=[*overrides, f"partition.count={count}"]
        )
        done(run)
        found.append(parameters(run_dir))
    run_dir, run = begin(TEXT, tmp_path / "free", overrides=overrides[1:])
    done(run)
    assert np.abs(parameters(run_dir) - found[0]).max() > 1e-3, "clipping does something here"
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(found[2], found[0], rtol=0, atol=1e-5)


def test_a_partition_that_holds_no_parameters_goes_along(tmp_path: Path) -> None:
    """The filters are held by the first, the one output by the last; it only convolves."""
    text = TEXT[: TEXT.index("data:")] + NO_PARAMETERS
    found = []
    for count in (1, 3):
        run_dir, run = begin(
            text, tmp_path / f"r-{count}", overrides=[f"partition.count={count}"], faults=BAD
        )
        plan = run.life.plan
        assert count == 1 or not plan.held_by(1)
        done(run)
        found.append((parameters(run_dir), evaluations(run)[-1][1]))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=0, atol=1e-5)
    assert found[1][1] == pytest.approx(found[0][1], abs=1e-4)


def test_two_cut_replicas_lose_one_and_end(tmp_path: Path) -> None:
    text = TEXT.replace("{type: sgd, batch_size: 16, rule", "{type: downpour, batch_size: 16, rule")
    overrides = ["replicas=2", "partition.count=2", "checkpoint.every=10 steps"]
    _, run = begin(text, tmp_path / "r", overrides=overrides, faults=BAD, seed=8)

    def die() -> None:
        run.net.kill("worker-1.1")
        run.net.at(run.net.now + 0.1, lambda: run.net.kill("worker-1.0"))

    run.net.at(0.2, die)
    done(run)
    assert not run.net.alive("worker-1.0")
    assert len(run.saved) > 1
    assert run.coordinator.figures.steps == 50
