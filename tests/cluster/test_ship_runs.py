"""`ship: true` with real processes: hosts that have none of the data's files, over a real sshd."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbctl.data.sources import open_source
from dbctl.experiment.specs import DigitsSource
from tests.cluster.runs import TrainRun, finish_all, synthetic, wait_for
from tests.cluster.sshd import Sshd, agents_left
from tests.cluster.test_ssh_runs import (
    EXPERIMENT,
    agents_nodes,
    bits,
    command_line,
    dbctl,
    is_ssh,
    leftovers,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(90)]

LARGE = 40_000  # rows of 784 bytes


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


def large(directory: Path, cluster: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """An experiment whose training rows, 31 MB, take a while to be sent."""
    directory.mkdir()
    rng = np.random.default_rng(7)
    np.save(directory / "x.npy", rng.integers(0, 256, (LARGE, 784), dtype=np.uint8))
    np.save(directory / "y.npy", (np.arange(LARGE) % 4).astype(np.uint8))
    source = {"source": "npy", "x": f"{directory}/x.npy", "y": f"{directory}/y.npy"}
    experiment = synthetic(rows=9, stop={"steps": 4}, threads=1, **changes)
    experiment["network"]["input"] = [784]
    experiment["data"] = {"train": source | {"scale": 0.001, "ship": True}}
    return experiment | {"cluster": cluster}


def shipped(run_dir: Path) -> dict[tuple[str, str], int]:
    """Bytes that were sent, by node and file."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["event"] == "shipped"]
    return {(row["node"], f"{row['split']} {row['part']}"): row["sent_bytes"] for row in rows}


def kept(tmp_path: Path, suffix: str = ".npy") -> dict[str, int]:
    """Sizes of what the host has."""
    found = (tmp_path / "there" / "data").glob(f"*{suffix}")
    return {path.name: path.stat().st_size for path in found}


def cluster(sshd: Sshd, tmp_path: Path, **more: Any) -> dict[str, Any]:
    """A host to which tmp_path/data is an empty directory."""
    python = sshd.apart(f"python-{tmp_path.name}", tmp_path / "data")
    host = {"name": "here", "ssh": "plain", "python": python, "workdir": str(tmp_path / "there")}
    return {"launcher": "ssh", "hosts": [host | more]}


def test_one_blocking_replica_reaches_the_bits_of_the_file_by_path(
    sshd: Sshd, tmp_path: Path
) -> None:
    """Standardized, and measured by an evaluator; the second run of the same data is sent nothing;
    what was lost meanwhile is sent again."""
    data = write_digits(tmp_path / "data")
    there, how = {"cluster": cluster(sshd, tmp_path)}, {"standardize": True, "rows": 300}
    shipping = {"data": prepared(data, ship=True, **how)} | there

    def begin(name: str, changes: dict[str, Any]) -> TrainRun:
        experiment = EXPERIMENT | {"evaluate": {"every": "30 steps"}} | changes
        return TrainRun(tmp_path, experiment, name=name)

    with (
        begin("local", {"data": prepared(data, **how)}) as local,
        begin("first", shipping) as first,
    ):
        finish_all(local, first)
    with begin("second", shipping) as second:
        assert second.finish() == 0, second.story()
    assert list((tmp_path / "data").iterdir()), "it is hidden there, not gone"
    runs = {"local": local, "first": first, "second": second}
    found = {name: (bits(run.dir), run.status()["test_loss"]) for name, run in runs.items()}
    assert found["first"] == found["local"]
    assert found["second"] == found["local"]
    assert sum(shipped(tmp_path / "first").values()) == sum(kept(tmp_path).values())
    assert len(kept(tmp_path)) == 4
    assert shipped(tmp_path / "second") == {}
    assert "sending 19,328 bytes of data.test (x) to here" in (tmp_path / "first.err").read_text()

    def loss(run: TrainRun) -> float:
        return float(json.loads(dbctl("eval", str(run.dir), "--json", "--split", "train"))["loss"])

    with ThreadPoolExecutor() as pool:
        measured = list(pool.map(loss, (local, second)))
    assert measured[0] == measured[1]


def test_two_runs_at_once_share_what_is_sent_and_every_partition_reads_it(
    sshd: Sshd, tmp_path: Path
) -> None:
    """Each byte is sent once, to one of eight workers that want it at the same time."""
    experiment = large(tmp_path / "data", cluster(sshd, tmp_path), partition={"count": 2})
    with (
        TrainRun(tmp_path, experiment, name="one") as one,
        TrainRun(tmp_path, experiment, name="two") as two,
    ):
        finish_all(one, two)
    sent = [*shipped(one.dir).values(), *shipped(two.dir).values()]
    assert sorted(sent) == sorted(kept(tmp_path).values())
    assert kept(tmp_path, ".part") == {}


def test_a_run_that_was_broken_off_is_sent_only_the_rest(sshd: Sshd, tmp_path: Path) -> None:
    experiment = large(tmp_path / "data", cluster(sshd, tmp_path), replicas=1)
    with TrainRun(tmp_path, experiment, name="first") as run:
        wait_for(lambda: any(n > 2e6 for n in kept(tmp_path, ".part").values()), "a beginning")
        [ssh] = [pid for pid in run.processes().values() if is_ssh(pid)]
        os.kill(ssh, signal.SIGKILL)
        assert run.finish() == 3
        assert "agent-0 on here ended early (killed by SIGKILL)" in run.err
    wait_for(lambda: not agents_left(), "its agent's end")
    [begun] = kept(tmp_path, ".part").values()
    whole = LARGE * 784 + 128
    assert 2_000_000 < begun < whole
    with TrainRun(tmp_path, experiment, name="second") as run:
        assert run.finish() == 0, run.story()
    assert shipped(run.dir)["worker-0.0", "train x"] == whole - begun
    assert f"sending {whole - begun:,} bytes of data.train (x), the rest of {whole:,}" in run.err
    # One bit of what is there by now: that file is sent anew, the other is not.
    [path] = [p for p in (tmp_path / "there" / "data").iterdir() if p.stat().st_size == whole]
    with open(path, "r+b") as file:
        file.seek(whole // 2)
        byte = file.read(1)
        file.seek(whole // 2)
        file.write(bytes([byte[0] ^ 8]))
    with TrainRun(tmp_path, experiment, name="third") as run:
        assert run.finish() == 0, run.story()
    assert shipped(run.dir) == {("worker-0.0", "train x"): whole}


def own_bytes(pid: int) -> int:
    """Memory of a process that is no mapped file."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"RssAnon:\s+(\d+) kB", text)
    return 1024 * int(found[1]) if found else 0


def test_neither_side_holds_what_is_sent(sshd: Sshd, tmp_path: Path) -> None:
    """180 MB that can only be read from the front: half of it would show."""
    experiment = large(tmp_path / "data", cluster(sshd, tmp_path), replicas=1)
    x = np.zeros((230_000, 784), np.uint8)
    x[:, 0] = np.arange(len(x)) % 251
    np.savez(tmp_path / "data" / "d.npz", x=x, y=np.arange(len(x)) % 4)
    source = {"source": "npz", "path": f"{tmp_path}/data/d.npz", "x": "x", "y": "y", "ship": True}
    experiment["data"]["train"] = source
    most = {"controller": 0, "worker": 0}
    with TrainRun(tmp_path, experiment) as run:
        while run.process.poll() is None:
            most["controller"] = max(most["controller"], own_bytes(run.pid))
            for pid in agents_nodes(sshd):
                if "worker-0.0" in command_line(pid):
                    most["worker"] = max(most["worker"], own_bytes(pid))
            time.sleep(0.01)
        assert run.finish() == 0, run.story()
    assert sum(shipped(run.dir).values()) > 180e6
    assert all(20e6 < n < 110e6 for n in most.values()), most


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_the_middle(sshd: Sshd, tmp_path: Path, number: int) -> None:
    experiment = large(tmp_path / "data", cluster(sshd, tmp_path), replicas=1)
    with TrainRun(tmp_path, experiment) as run:
        wait_for(lambda: any(n > 2e6 for n in kept(tmp_path, ".part").values()), "a beginning")
        run.signal(number)
        assert run.finish(5.0) == (130 if number == signal.SIGINT else 75)
        assert "Traceback" not in run.err
    assert leftovers(tmp_path) == [str(tmp_path / "there" / "data")]
    assert len(kept(tmp_path, ".part")) == 1


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


def test_a_full_disk_is_told_once_with_what_is_needed(sshd: Sshd, tmp_path: Path) -> None:
    with small_disk(tmp_path / "there", "4m"):
        experiment = large(tmp_path / "data", cluster(sshd, tmp_path))
        with TrainRun(tmp_path, experiment) as run:
            assert run.finish() == 3
        assert shipped(run.dir) == {}
        assert sum(kept(tmp_path, "").values()) == 0
    needed = LARGE // 2 * 784 + 128
    assert " on here " in run.err
    assert f"{tmp_path}/there/data/" in run.err
    assert f".part: no room for it: {needed:,} bytes more are needed, " in run.err
    assert run.err.count("no room") == 1, run.err
    assert "Traceback" not in run.err
    shutil.rmtree(tmp_path / "there")
