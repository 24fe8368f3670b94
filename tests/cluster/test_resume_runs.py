"""`dbctl resume` with real processes (docs/reliability.md, G18): rung 9 over the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dbctl.checkpoint.reader import Checkpoint, newest_good
from dbctl.metrics import read_metrics
from dbctl.region import Range
from tests.cluster.runs import ENDLESS, ROOT, TrainRun, synthetic, wait_for

pytestmark = pytest.mark.cluster

SERIAL = {
    "replicas": 1,
    "shards": 1,
    "optimizer": {"type": "sgd", "batch_size": 16, "rule": {"type": "adam", "rate": 0.01}},
    "threads": 1,
}


def dbctl(*words: object, limit_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dbctl", *map(str, words)],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=limit_s,
        check=False,
    )


def train(tmp_path: Path, name: str, experiment: dict[str, Any], *words: str) -> Path:
    file = tmp_path / f"{name}.yaml"
    file.write_text(json.dumps(experiment))
    done = dbctl("train", file, "--run-dir", tmp_path / name, "--quiet", *words)
    assert done.returncode == 0, done.stderr
    return tmp_path / name


def resume(path: Path, *words: str) -> list[dict[str, Any]]:
    """Its JSON lines; the last one is `finished`."""
    done = dbctl("resume", path, "--json", *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


def newest(path: Path) -> Checkpoint:
    checkpoint, warnings = newest_good(path / "checkpoints")
    assert not warnings
    return checkpoint


def contents(path: Path) -> dict[str, bytes]:
    checkpoint = newest(path)
    whole = Range(0, checkpoint.n_elements)
    return {v: checkpoint.read(v, whole).tobytes() for v in checkpoint.manifest.vectors}


def test_ten_and_ten_are_twenty(tmp_path: Path) -> None:
    """Bit for bit, and from one shard to three."""
    experiment = synthetic(rows=100, **SERIAL)
    whole = train(tmp_path, "whole", experiment, "--set", "stop.steps=20", "--set", "stop.epochs=9")
    cut = train(tmp_path, "cut", experiment, "--set", "stop={steps: 10}")
    given = (cut / "experiment.yaml").read_bytes()
    first, *_, finished = resume(cut, "--set", "stop.steps=20", "--set", "shards=3")
    assert first["text"].endswith("; shards 1 -> 3; stop.steps 10 -> 20")
    assert (finished["lives"], finished["life_examples"]) == (2, finished["examples"] // 2)
    assert (finished["event"], finished["status"], finished["steps"]) == ("finished", "done", 20)
    assert finished["examples"] == newest(whole).manifest.examples
    assert contents(cut) == contents(whole)
    assert newest(cut).manifest.rows == newest(whole).manifest.rows
    assert newest(cut).manifest.updates == 20
    assert newest(cut).manifest.shards == 3
    assert (cut / "experiment.yaml").read_bytes() == given
    assert "shards: 3" in (cut / "resolved.yaml").read_text()
    assert {"shard-2.log", "worker-0.0.log"} <= {p.name for p in (cut / "logs").iterdir()}


def test_settings_are_the_runs_when_all_have_come_up(tmp_path: Path) -> None:
    """A host that is not there leaves a run that goes on as it was."""
    path = train(tmp_path, "r", synthetic(rows=100, stop={"steps": 4}))
    before = (path / "resolved.yaml").read_bytes()
    nowhere = 'cluster={launcher: ssh, hosts: [{name: left, ssh: "host.invalid", slots: 8}]}'
    done = dbctl("resume", path, "--set", nowhere, "--set", "stop.steps=8")
    assert done.returncode == 3
    assert (path / "resolved.yaml").read_bytes() == before
    events = resume(path, "--set", "stop.steps=6")
    assert events[-1]["steps"] == 6
    assert b"steps: 6" in (path / "resolved.yaml").read_bytes()


def test_metrics_are_appended_and_numbers_go_on(tmp_path: Path) -> None:
    """cases: step numbers, metrics file over a resume (ray#46814)."""
    path = train(tmp_path, "r", synthetic(rows=100, evaluate={"every": "1 epoch"}))
    before = (path / "metrics.jsonl").read_bytes()
    first = newest(path).manifest
    events = resume(path, "--set", "stop.epochs=4")
    assert events[0]["event"] == "resume"
    assert events[0]["step"] == first.step
    assert (path / "metrics.jsonl").read_bytes().startswith(before)
    records = list(read_metrics(path / "metrics.jsonl"))
    starts = [r for r in records if r["event"] == "start"]
    assert [bool(r["restore"]) for r in starts] == [False, True]
    after = records[records.index(starts[1]) :]
    assert all(r["time"] >= first.seconds - 1e-6 for r in after)
    assert all(r["step"] >= first.rows[r["replica"]].step for r in after if r["event"] == "worker")
    assert all(r["version"] >= first.updates for r in after if r["event"] == "shard")
    assert min(r["epochs"] for r in after if r["event"] == "evaluation") > 2
    assert after[-1]["event"] == "finished"
    assert after[-1]["examples"] == 4 * 100


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_anywhere_and_resumed_is_never_having_stopped(
    number: signal.Signals, tmp_path: Path
) -> None:
    """One replica, blocking: bit for bit; after kill -9 from the newest periodic checkpoint."""
    experiment = synthetic(rows=100, **SERIAL, checkpoint={"every": "50 steps", "keep": 2})
    with TrainRun(tmp_path, {**experiment, "stop": ENDLESS}, name="cut") as run:
        run.until_train(200)
        run.checkpoints()
        run.signal(number)
        assert run.process.wait(30) == (130 if number == signal.SIGINT else -9)
        wait_for(lambda: not run.left(), "an end of all that it started")
    saved = newest(run.dir).manifest
    stop = saved.step + 37
    assert saved.step > 0
    finished = resume(run.dir, "--set", f"stop.steps={stop}")[-1]
    assert finished["steps"] == stop
    whole = train(tmp_path, "whole", {**experiment, "stop": {"steps": stop}})
    assert contents(run.dir) == contents(whole)
    assert newest(run.dir).manifest.rows == newest(whole).manifest.rows


def test_other_counts(tmp_path: Path) -> None:
    """cases: saved with 2 shards and 3 replicas, resumed with others."""
    path = train(tmp_path, "r", synthetic(rows=100, replicas=3, stop={"steps": 30}))
    for shards, replicas, steps in ((5, 4, 60), (1, 1, 80)):
        counts = [f"shards={shards}", f"replicas={replicas}", f"stop.steps={steps}"]
        events = resume(path, *(w for count in counts for w in ("--set", count)))
        assert events[-1]["steps"] == steps
        manifest = newest(path).manifest
        assert (manifest.shards, len(manifest.rows), manifest.step) == (shards, replicas, steps)


def test_a_running_run_is_not_resumed(tmp_path: Path) -> None:
    with TrainRun(tmp_path, synthetic(rows=100, stop=ENDLESS)) as run:
        run.until_train()
        done = dbctl("resume", run.dir)
        assert done.returncode == 2
        assert f"this run is going on, process {run.pid}" in done.stderr
        run.signal(signal.SIGTERM)
        assert run.finish() == 75
