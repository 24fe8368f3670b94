"""How long a person waits: `dbctl --help`, and `dbctl train` to the first step's record.

    python tests/benchmarks/bench_start.py [ROUNDS]

Bars: help under 150 ms; digits from the process's start to the first worker record with a step in
metrics.jsonl, median of 9, under 2.5 s.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
DBCTL = (sys.executable, "-m", "dbctl")


def help_seconds() -> float:
    began = time.monotonic()
    subprocess.run([*DBCTL, "--help"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def first_step_seconds() -> float:
    with tempfile.TemporaryDirectory() as directory:
        metrics = Path(directory) / "run" / "metrics.jsonl"
        words = [*DBCTL, "train", "experiments/digits-downpour.yaml", "--quiet"]
        began = time.monotonic()
        process = subprocess.Popen(
            [*words, "--run-dir", str(metrics.parent)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while not _stepped(metrics):
                assert process.poll() is None, "the run ended before its first step"
                time.sleep(0.005)
            return time.monotonic() - began
        finally:
            process.wait()


def _stepped(metrics: Path) -> bool:
    if not metrics.exists():
        return False
    lines = metrics.read_text().split("\n")[:-1]
    return any(json.loads(line).get("step", 0) >= 1 for line in lines)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    help_s = sorted(help_seconds() for _ in range(rounds))
    first_s = sorted(first_step_seconds() for _ in range(rounds))
    for name, found in (("dbctl --help", help_s), ("first step of digits", first_s)):
        print(f"{name:<22} median {median(found):.3f} s, {found[0]:.3f} to {found[-1]:.3f}")


if __name__ == "__main__":
    main()
