"""Ctrl-C and SIGTERM while the data are read, before a run has begun: it ends within one block."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbctl.data import rows
from dbctl.data.rows import Array, StreamRows
from dbctl.experiment.read import load
from dbctl.experiment.resolve import to_yaml
from dbctl.run.evaluate import Request, evaluate
from dbctl.run.resume import resume
from dbctl.run.signals import STATUS
from dbctl.run.train import train
from tests.inproc_run import SilentDisplay, begin

TEXT = """
version: 1
name: long
data:
  train: {{source: npz, path: {path}, x: x, y: y, standardize: true, ship: true}}
network: {{input: [6], layers: [{{type: dense, units: 3}}], loss: softmax}}
optimizer: {{type: sgd, batch_size: 8, rule: {{type: sgd, rate: 0.1}}}}
stop: {{steps: 3}}
"""
CLUSTER = "cluster={launcher: ssh, hosts: [{name: a, ssh: me@a.invalid}]}"
N_BLOCKS = 8


@dataclass
class Reading:
    """Counts the readings of x, and sends this process a signal in one of them."""

    number: int
    at: int
    begun: int = 0
    blocks_after: int = 0


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Reading:
    reading = Reading(*request.param)
    blocks = StreamRows.blocks

    def interrupted(self: StreamRows) -> Iterator[Array]:
        if self.shape[1] == 1:
            yield from blocks(self)
            return
        reading.begun += 1
        for number, block in enumerate(blocks(self)):
            if reading.begun == reading.at:
                reading.blocks_after += 1
                if number == 0:
                    os.kill(os.getpid(), reading.number)
            yield block

    def popen(*words: object, **more: object) -> None:
        pytest.fail(f"started {words}")

    monkeypatch.setattr(rows, "BLOCK_BYTES", 10 * 6 * 8)
    monkeypatch.setattr(StreamRows, "blocks", interrupted)
    monkeypatch.setattr("subprocess.Popen", popen)
    return reading


@pytest.fixture
def experiment(tmp_path: Path) -> str:
    x = np.arange(10 * N_BLOCKS * 6.0).reshape(-1, 6)
    np.savez_compressed(tmp_path / "d.npz", x=x, y=np.arange(len(x)) % 3)
    (tmp_path / "e.yaml").write_text(TEXT.format(path=tmp_path / "d.npz"))
    return str(tmp_path / "e.yaml")


CHECKED, STANDARDIZED, DIGESTED = 1, 2, 3
DIGESTED_LATER = 2  # the statistics are there


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A command leaves them ignored once it was ended by one."""
    before: dict[Any, Any] = {n: signal.getsignal(n) for n in STATUS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupted_in(*readings: tuple[int, int]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("reading", readings, indirect=True)


@interrupted_in(
    (signal.SIGINT, CHECKED),
    (signal.SIGINT, STANDARDIZED),
    (signal.SIGINT, DIGESTED),
    (signal.SIGTERM, DIGESTED),
)
def test_train(reading: Reading, experiment: str, tmp_path: Path) -> None:
    display = SilentDisplay()
    status = train(experiment, [CLUSTER], run_dir=str(tmp_path / "run"), display=display)
    assert (reading.begun, reading.blocks_after) == (reading.at, 1)
    word = "interrupted" if reading.number == signal.SIGINT else "stopped"
    assert status == (130 if word == "interrupted" else 75)
    assert display.warnings[-1] == f"{word} while the data were read: nothing was started"


@pytest.fixture
def trained(reading: Reading, experiment: str, tmp_path: Path) -> str:
    """A run directory of such data, made on this machine; `reading` begins to count after it."""
    at, reading.at = reading.at, 0
    run_dir, run = begin(Path(experiment).read_text(), tmp_path / "run")
    assert run.run().status == "done"
    run_dir.write_resolved(to_yaml(load(str(run_dir.resolved), [CLUSTER])))
    reading.at, reading.begun = at, 0
    return str(run_dir.path)


@interrupted_in((signal.SIGINT, CHECKED), (signal.SIGINT, DIGESTED_LATER))
def test_resume(reading: Reading, trained: str) -> None:
    display = SilentDisplay()
    assert resume(trained, ["stop.steps=9"], display=display) == 130
    assert (reading.begun, reading.blocks_after) == (reading.at, 1)
    assert display.warnings[-1] == "interrupted while the data were read: nothing was started"


@interrupted_in((signal.SIGINT, CHECKED), (signal.SIGTERM, DIGESTED_LATER))
def test_eval(reading: Reading, trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it stays in the directory for temporary files."""
    temporary = Path(trained).parent / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    status, found = evaluate(trained, Request(split="train"), warn=pytest.fail)
    assert (status, found) == ("interrupted" if reading.at == CHECKED else "stopped", None)
    assert (reading.begun, reading.blocks_after) == (reading.at, 1)
    assert list(temporary.iterdir()) == []
