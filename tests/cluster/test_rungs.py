"""Rungs 5 and 8 of the ladder through the command line: real processes against a serial loop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from dbctl.checkpoint.reader import newest_good
from dbctl.experiment.read import load
from dbctl.region import Range
from tests.reference import Array, serial_sgd

pytestmark = pytest.mark.cluster

STEPS = 60  # one pass over digits is 45 mini-batches: a short one and a new order are in it

EXPERIMENT = """
version: 1
name: rung-5
seed: 11
data:
  train: {source: digits, split: train, scale: 0.0625}
network:
  input: [8, 8, 1]
  layers:
    - {type: dense, units: 48, activation: tanh}
    - {type: dense, units: 10}
  loss: softmax
optimizer: {type: sgd, batch_size: 32, rule: {type: sgd, rate: 0.3}}
stop: {steps: 60}
evaluate: off
threads: 1
"""
BLOCKING = (
    "optimizer={type: downpour, batch_size: 32, overlap: false, rule: {type: sgd, rate: 0.3}}"
)


def train(directory: Path, *settings: str, updates: int = STEPS) -> Array:
    """The parameters that `dbctl train` leaves."""
    path = directory / "rung-5.yaml"
    path.write_text(EXPERIMENT)
    run_dir = directory / f"run-{len(list(directory.iterdir()))}"
    words = [sys.executable, "-m", "dbctl", "train", str(path), "--run-dir", str(run_dir)]
    for setting in settings:
        words += ["--set", setting]
    subprocess.run(words, check=True, timeout=60, capture_output=True)
    checkpoint, warnings = newest_good(run_dir / "checkpoints")
    assert not warnings
    assert checkpoint.manifest.step == STEPS
    assert checkpoint.manifest.updates == updates
    return checkpoint.read("parameters", Range(0, checkpoint.n_elements))


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Array:
    path = tmp_path_factory.mktemp("serial") / "rung-5.yaml"
    path.write_text(EXPERIMENT)
    with threadpool_limits(1):  # other counts of threads give other bits
        return serial_sgd(load(str(path)), STEPS)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "downpour"])
def test_one_blocking_replica_is_serial_sgd(
    tmp_path: Path, serial: Array, optimizer: str, shards: int
) -> None:
    """Paper A, 4.1: one replica, n_fetch = n_push = 1, blocking, fixed rate: bit for bit."""
    settings = [BLOCKING] if optimizer == "downpour" else []
    found = train(tmp_path, *settings, f"shards={shards}")
    assert found.tobytes() == serial.tobytes()
    assert np.isfinite(found).all()


def test_overlap_alone_changes_no_bit(tmp_path: Path, serial: Array) -> None:
    """A replica that is alone and reads its own writes computes on the same parameters (ours)."""
    found = train(tmp_path, BLOCKING.replace("overlap: false", "overlap: true"), "shards=2")
    assert found.tobytes() == serial.tobytes()


def test_the_comparison_can_fail(tmp_path: Path, serial: Array) -> None:
    """A sum of two gradients is rounded otherwise than one after the other."""
    # Pushes after steps 0, 2, ..., 58 and the rest at the end (paper A, appendix 7.1).
    found = train(tmp_path, BLOCKING, "optimizer.n_push=2", updates=31)
    assert found.tobytes() != serial.tobytes()
    assert np.abs(found - serial).max() < 0.1
