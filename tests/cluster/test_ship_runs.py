"""`ship: true` with real processes: hosts that have none of the data's files, over a real sshd."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbctl.data.sources import open_source
from dbctl.experiment.specs import DigitsSource
from tests.cluster.runs import TrainRun
from tests.cluster.sshd import Sshd
from tests.cluster.test_ssh_runs import EXPERIMENT, bits, dbctl

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(90)]


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with Sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture(autouse=True)
def with_wrapper(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", sshd.path)


def write_digits(directory: Path) -> dict[str, Any]:
    """Digits as files, uint8: data.train a compressed npz, data.test two npy."""
    directory.mkdir()
    sets = {}
    for split in ("train", "test"):
        source = open_source(DigitsSource(split=split))  # type: ignore[arg-type]
        sets[split] = np.asarray(source.x).astype(np.uint8), source.y
    x, y = sets["train"]
    np.savez_compressed(directory / "train.npz", images=x, labels=y)
    for name, array in zip(("x", "y"), sets["test"], strict=True):
        np.save(directory / f"{name}.npy", array)
    train = {"source": "npz", "path": str(directory / "train.npz"), "x": "images", "y": "labels"}
    test = {"source": "npy", "x": str(directory / "x.npy"), "y": str(directory / "y.npy")}
    return {"train": train, "test": test}


def prepared(data: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {split: source | more for split, source in data.items()}


def shipped(run_dir: Path) -> dict[tuple[str, str], int]:
    """What was sent, by host and file."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["event"] == "shipped"]
    return {(row["host"], f"{row['split']} {row['part']}"): row["sent_bytes"] for row in rows}


def host(sshd: Sshd, tmp_path: Path, hidden: Path, name: str = "here") -> dict[str, Any]:
    """A host to which `hidden` is an empty directory."""
    python = sshd.apart(f"python-{name}", hidden)
    return {"name": name, "ssh": "plain", "python": python, "workdir": str(tmp_path / name)}


@pytest.mark.parametrize("how", [{"scale": 0.0625}, {"standardize": True, "rows": 300}])
def test_one_blocking_replica_reaches_the_bits_of_the_file_by_path(
    sshd: Sshd, tmp_path: Path, how: dict[str, Any]
) -> None:
    """The second run of the same data is sent nothing."""
    data = write_digits(tmp_path / "data")
    there = [host(sshd, tmp_path, tmp_path / "data")]
    cluster = {"launcher": "ssh", "hosts": there}
    found = {}
    for name, changes in (
        ("local", {"data": prepared(data, **how)}),
        ("first", {"data": prepared(data, ship=True, **how), "cluster": cluster}),
        ("second", {"data": prepared(data, ship=True, **how), "cluster": cluster}),
    ):
        experiment = EXPERIMENT | changes | {"evaluate": {"every": "30 steps"}}
        with TrainRun(tmp_path, experiment, name=name) as run:
            assert run.finish() == 0, run.story()
        measured = json.loads(dbctl("eval", str(run.dir), "--json", "--split", "train"))
        found[name] = (bits(run.dir), run.status()["test_loss"], measured["confusion"])
    assert found["first"] == found["local"]
    assert found["second"] == found["local"]
    assert shipped(tmp_path / "second") == {}
    assert {what for _, what in shipped(tmp_path / "first")} == {
        f"{split} {part}" for split in ("train", "test") for part in "xy"
    }
