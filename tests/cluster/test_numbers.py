"""Numbers that are not finite, and disks that are full: the run says so and keeps what is good.

docs/reliability.md, G10 and G14; returnn#1568.
"""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from tests.cluster.runs import ENDLESS, TrainRun, digits, synthetic, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(60)]


def test_a_row_with_nan(tmp_path: Path) -> None:
    """Its batch is refused in each pass; replica, step and layer are named; the run ends well."""
    rng = np.random.default_rng(5)
    labels = np.arange(200) % 4
    x = (np.eye(4)[labels] * 3 + rng.normal(size=(200, 4))).astype(np.float32)
    x[17, 2] = np.nan
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", labels)
    files = {"source": "npy", "x": str(tmp_path / "x.npy"), "y": str(tmp_path / "y.npy")}
    experiment = synthetic(rows=1, stop={"epochs": 3})
    experiment["data"] = {"train": files}
    experiment["network"]["input"] = [4]
    with TrainRun(tmp_path, experiment) as run:
        assert run.finish() == 0
        refused = {r["node"]: r["refused"] for r in run.metrics("worker")}
        assert sorted(refused.values()) == [0, 3], "one replica has the row, and meets it each pass"
        [where] = {r["refused_where"] for r in run.metrics("worker") if r["refused"] == 3}
        [replica] = [n.split("-")[1].split(".")[0] for n, count in refused.items() if count]
        assert f"replica {replica} refused a gradient that is not finite, at step " in run.err
        assert run.err.count("refused a gradient") == 1, "a warning, not one a row"
        row = f"row 17 (from 0) of '{tmp_path}/x.npy' has nan in float32 as feature 2"
        assert f"layers.0.weight, where {row}; mend or leave out that row" in where
        assert "3 gradients that were not finite were refused" in run.out
        assert run.metrics("finished")[-1]["epochs"] == 3.0
        assert len(run.checkpoints()) == 1


def test_a_rate_that_is_far_too_high(tmp_path: Path) -> None:
    """`squared` with rate 1e6: ended with the last good checkpoint kept, and told what to do."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(400, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", (x @ rng.normal(size=(8, 1))).astype(np.float32))
    files = {"source": "npy", "x": str(tmp_path / "x.npy"), "y": str(tmp_path / "y.npy")}
    experiment = synthetic(rows=1, stop=ENDLESS, checkpoint={"every": "1 step", "keep": 100})
    experiment["data"] = {"train": files}
    experiment["network"] = {
        "input": [8],
        "layers": [{"type": "dense", "units": 1}],
        "loss": "squared",
    }
    experiment["optimizer"]["rule"] = {"type": "sgd", "rate": 1e6}
    with TrainRun(tmp_path, experiment) as run:
        assert run.finish() == 1
        assert "non-finite gradients in a row" in run.err
        assert "lower optimizer.rule.rate, or use adagrad with a warmstart" in run.err
        assert run.out.startswith("failed: ")
        if run.checkpoints():  # it may be over before the first is asked for
            assert run.step_to_resume() > 0


def test_a_loss_that_is_absurd(tmp_path: Path) -> None:
    """Softmax with rate 1e6 stays finite and "succeeds": one warning, one record, the last line."""
    experiment = digits(stop={"epochs": 12})
    experiment["optimizer"]["rule"] = {"type": "sgd", "rate": 1e6}
    with TrainRun(tmp_path, experiment) as run:
        assert run.finish() == 0
        assert run.err.count("warning: the training diverged: train loss ") == 1
        assert "the training diverged: " in run.out
        assert "take a lower optimizer.rule.rate" in run.out
        [record] = run.metrics("diverged")
        assert 1.0 < record["first_loss"] < 5.0
        assert record["loss"] > 10 * record["first_loss"]


def fill(file: IO[bytes]) -> bool:
    """Writes until the disk is full; True, once it is."""
    try:
        while True:
            file.write(bytes(4096))
    except OSError as error:
        return error.errno == errno.ENOSPC


def test_a_full_disk(tmp_path: Path) -> None:
    """Training goes on without checkpoints and records, one warning each, and catches up after."""
    if os.geteuid():
        pytest.skip("mounting needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4M", "tmpfs", disk], check=True)
    try:
        experiment = digits(stop=ENDLESS, checkpoint={"every": "0.3 s"}, evaluate="off")
        with TrainRun(tmp_path, experiment, run_dir=disk / "run") as run:
            run.until_train()
            wait_for(run.checkpoints, "a checkpoint")
            filler = disk / "filler"
            with open(filler, "wb", buffering=0) as file:
                # Again and again: the removal of an old checkpoint makes room.
                wait_for(lambda: fill(file) and "no checkpoint" in run.err, "a failed one")
                good = run.checkpoints()
                wait_for(lambda: run.err.count("no checkpoint") >= 2, "another failed one")
            assert "no space left on device" in run.err
            assert run.process.poll() is None
            assert set(good) <= set(run.checkpoints())
            assert not list((run.dir / "checkpoints").glob(".tmp-*"))
            filler.unlink()
            wait_for(lambda: set(run.checkpoints()) - set(good), "a new checkpoint")
            run.signal(15)
            assert run.finish(5.0) == 75
            assert run.step_to_resume() > max(good)
            assert run.err.count("training goes on without this record") <= 1
            assert not run.metrics("death")
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
