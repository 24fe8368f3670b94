"""Runs whose nodes are all as on hosts of their own: tcp with CURVE, no memory shared (rung 8)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dbctl.checkpoint.reader import newest_good
from dbctl.region import Range

pytestmark = pytest.mark.cluster

EXPERIMENT = """
version: 1
name: apart
seed: 11
data:
  train: {source: digits, split: train, scale: 0.0625}
  test: {source: digits, split: test, scale: 0.0625}
network:
  input: [8, 8, 1]
  layers:
    - {type: dense, units: 48, activation: tanh}
    - {type: dense, units: 10}
  loss: softmax
shards: 3
optimizer: {type: downpour, batch_size: 32, overlap: false, rule: {type: adagrad, rate: 0.05}}
stop: {steps: 60}
threads: 1
"""


class Run:
    """One finished `dbctl train`; `apart` is (address, encrypted) or None for one host."""

    def __init__(self, path: Path, apart: tuple[str, bool] | None, *settings: str) -> None:
        path.mkdir()
        (path / "apart.yaml").write_text(EXPERIMENT)
        self.run_dir = path / "run"
        test = {"factories": {}, "lease_s": None, "held_up_s": None, "apart": apart}
        words = [sys.executable, "-m", "tests.cluster.drive", json.dumps(test), "train"]
        words += [str(path / "apart.yaml"), "--run-dir", str(self.run_dir)]
        for setting in settings:
            words += ["--set", setting]
        done = subprocess.run(words, check=True, timeout=60, capture_output=True, text=True)
        self.said = done.stderr

    @property
    def parameters(self) -> bytes:
        checkpoint, warnings = newest_good(self.run_dir / "checkpoints")
        assert not warnings
        assert checkpoint.manifest.step == 60
        return checkpoint.read("parameters", Range(0, checkpoint.n_elements)).tobytes()

    def logs(self) -> str:
        return "".join(path.read_text() for path in (self.run_dir / "logs").iterdir())


@pytest.mark.parametrize("settings", [(), ("partition.count=2",)], ids=["whole", "cut"])
@pytest.mark.parametrize("apart", [("127.0.0.1", True), ("::1", False)], ids=["curve", "plain"])
def test_over_tcp_the_same_bits_as_on_one_host(
    tmp_path: Path, apart: tuple[str, bool], settings: tuple[str, ...]
) -> None:
    """Rung 8, one blocking replica; cut ones exchange their boxes over tcp too."""
    here = Run(tmp_path / "here", None, *settings)
    there = Run(tmp_path / "there", apart, *settings)
    assert there.parameters == here.parameters
    assert ("encryption is off" in there.said) == (not apart[1])
    assert "encryption is off" not in here.said
    assert "refused" not in there.logs()
    assert " says that it is " not in there.logs()
