"""What a run can live with is told in a line: by the run, the dry run and, if it can, validate."""

from __future__ import annotations

from pathlib import Path

import pytest

from dbctl.cli.main import main
from dbctl.run.resume import prepare as prepare_resume
from dbctl.run.train import prepare
from tests.inproc_run import begin

TEXT = """
version: 1
name: small
data:
  train: {source: digits, split: train, scale: 0.0625, rows: 40}
  test: {source: digits, split: test, scale: 0.0625}
network: {input: [64], layers: [{type: dense, units: 4}, {type: dense, units: 10}], loss: softmax}
optimizer: {type: sgd, batch_size: 8, rule: {type: sgd, rate: 0.1}}
stop: {steps: 3}
"""
FEWER = "20 of 400 shards are started: at most one for each 16 of the network's 310 parameters"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.yaml").write_text(TEXT)
    return str(tmp_path / "e.yaml")


def told(file: str, *overrides: str) -> list[str]:
    """What a run is told before it begins."""
    warnings: list[str] = []
    prepare(file, overrides, run_dir=None, warn=warnings.append)
    return warnings


def dry(file: str, capsys: pytest.CaptureFixture[str], *overrides: str) -> list[str]:
    """What a dry run says besides its plan."""
    words = [word for override in overrides for word in ("--set", override)]
    assert main(["train", file, "--dry-run", *words]) == 0
    return capsys.readouterr().err.splitlines()


def test_nothing_is_doubted_of_a_plain_file(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(file, "shards=20") == []
    assert dry(file, capsys, "shards=20") == []


@pytest.mark.parametrize(
    ("train", "test"), [("0.0625", "null"), ("null", "0.0625"), ("0.0625", "0.625")]
)
def test_splits_that_are_scaled_otherwise(
    train: str, test: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`standardize` of one split only is an error (tests/test_experiment.py)."""
    overrides = [f"data.train.scale={train}", f"data.test.scale={test}"]
    train, test = (scale.replace("null", "not given") for scale in (train, test))
    doubt = f"data.train.scale is {train} and data.test.scale {test}: give both the same, unless"
    [said] = told(file, *overrides)
    assert said == f"{doubt} what is stored differs so"
    assert dry(file, capsys, *overrides) == [f"warning: {said}"]
    assert main(["validate", file, *(f"--set={override}" for override in overrides)]) == 0
    assert capsys.readouterr().err == f"warning: {said}\n"
    assert told(file, *overrides, "data.test=null") == []


def test_fewer_shards_than_asked_for(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(file, "shards=400") == [FEWER]
    assert dry(file, capsys, "shards=400") == [f"warning: {FEWER}"]


def test_fewer_shards_than_a_resume_asks_for(tmp_path: Path) -> None:
    run_dir, run = begin(TEXT, tmp_path / "r")
    run.run()
    assert prepare_resume(run_dir, ["shards=400", "stop.steps=9"]).warnings == [FEWER]
