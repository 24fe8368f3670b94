"""Deaths in the middle of a Fashion-MNIST run: what the others lose, and how soon a run ends.

    python tests/benchmarks/bench_deaths.py

Three replicas of `experiments/fashion-adagrad.yaml`; one is killed a third of the way. Bars: the
others keep at least 0.8 of their own rate, the run ends with exit 0 and at least 86 %. Then a shard
is killed: exit 1 in under 5 s, and `dbctl resume` finishes the run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DBCTL = (sys.executable, "-m", "dbctl")


def start(run_dir: Path) -> subprocess.Popen[str]:
    words = [*DBCTL, "train", "experiments/fashion-adagrad.yaml", "--json", "--run-dir"]
    settings = ["--set", "replicas=3", "--set", "stop.epochs=9"]
    settings += ["--set", "checkpoint={every: 3 s, keep: 3}"]
    return subprocess.Popen(
        [*words, str(run_dir), *settings],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def wait_for(run_dir: Path, epochs: float) -> dict[str, int]:
    """Until so many epochs are done; the process of each node."""
    while True:
        try:
            status = json.loads((run_dir / "status.json").read_text())
            if status["epochs"] >= epochs:
                return {name: node["pid"] for name, node in status["nodes"].items()}
        except FileNotFoundError:
            pass
        time.sleep(0.1)


def examples_by_time(run_dir: Path, node: str) -> list[tuple[float, int]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    mine = [r for r in records if r["event"] == "worker" and r["node"] == node]
    return [(r["time"], r["examples"]) for r in mine if r["state"] in ("running", "waiting")]


def rate(points: list[tuple[float, int]]) -> float:
    (t0, n0), (t1, n1) = points[0], points[-1]
    return (n1 - n0) / (t1 - t0)


def replica_dies(run_dir: Path) -> None:
    process = start(run_dir)
    pids = wait_for(run_dir, 3.0)
    os.kill(pids["worker-1.0"], signal.SIGKILL)
    out, _ = process.communicate()
    last = json.loads(out.splitlines()[-1])
    death = next(
        record["time"]
        for line in (run_dir / "metrics.jsonl").read_text().splitlines()
        if (record := json.loads(line))["event"] == "death"
    )
    for node in ("worker-0.0", "worker-2.0"):
        points = examples_by_time(run_dir, node)
        before = rate([p for p in points if p[0] <= death])
        after = rate([p for p in points if p[0] > death])
        print(f"{node}: {after / before:.2f} of its rate before the death ({before:,.0f}/s)")
    print(f"exit {process.returncode}, accuracy {last['test_accuracy']}, {last['notes']}")


def shard_dies(run_dir: Path) -> None:
    process = start(run_dir)
    pids = wait_for(run_dir, 3.0)
    began = time.monotonic()
    os.kill(pids["shard-1"], signal.SIGKILL)
    process.communicate()
    print(f"shard killed: exit {process.returncode} after {time.monotonic() - began:.2f} s")
    resumed = subprocess.run(
        [*DBCTL, "resume", str(run_dir), "--json"], cwd=ROOT, capture_output=True, text=True
    )
    last = json.loads(resumed.stdout.splitlines()[-1])
    print(f"resume: exit {resumed.returncode}, {last['status']}, accuracy {last['test_accuracy']}")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        replica_dies(Path(directory) / "replica")
        shard_dies(Path(directory) / "shard")


if __name__ == "__main__":
    main()
