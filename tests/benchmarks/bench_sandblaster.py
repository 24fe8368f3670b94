"""Sandblaster through `dbctl train`: how much of an iteration is not the gradient.

    python tests/benchmarks/bench_sandblaster.py [--iterations 16] [--replicas 2] [--shards 2]

784-1024-200-10 (1,010,000 parameters) on the 60,000 images of Fashion-MNIST, L-BFGS with history
10, one BLAS thread a worker. Printed are medians over the iterations whose history is full: seconds
of an iteration, seconds in which nothing was evaluated (commands, and what the coordinator does),
their ratio, commands. Beside it SciPy's own share on the same machine: what L-BFGS-B takes between
two calls of a function that costs nothing. Bar: 4 % of an iteration. Fashion-MNIST is needed
(Debian's package dataset-fashion-mnist).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from scipy.optimize import minimize

ROOT = Path(__file__).resolve().parents[2]
LAYERS = (
    "network.layers=[{type: dense, units: 1024, activation: tanh},"
    " {type: dense, units: 200, activation: tanh}, {type: dense, units: 10}]"
)
N_PARAMETERS = 785 * 1024 + 1025 * 200 + 201 * 10
HISTORY = 10


def run(iterations: int, *, replicas: int, shards: int) -> list[dict[str, float]]:
    """The `iteration` records of a run."""
    settings = (
        LAYERS,
        f"optimizer={{type: sandblaster, history: {HISTORY}, portion: 500, send_every: 4}}",
        f"stop={{steps: {iterations}}}",
        f"replicas={replicas}",
        f"shards={shards}",
        "threads=1",
        "evaluate=off",
        "checkpoint={every: off}",
    )
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "dbctl", "train", "experiments/fashion-lbfgs.yaml"]
        words += ["--quiet", "--run-dir", f"{folder}/run"]
        for setting in settings:
            words += ["--set", setting]
        subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        lines = Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [r for r in map(json.loads, lines) if r["event"] == "iteration"]


def scipy_between_s() -> float:
    """Median seconds between two calls of a quadratic of as many parameters."""
    scale = np.linspace(1.0, 100.0, N_PARAMETERS)
    ends: list[float] = []
    gaps: list[float] = []

    def function(x: np.ndarray) -> tuple[float, np.ndarray]:
        if ends:
            gaps.append(time.perf_counter() - ends[-1])
        gradient = scale * x
        value = float(gradient @ x) / 2
        ends.append(time.perf_counter())
        return value, gradient

    options = {"maxcor": HISTORY, "maxfun": 40, "ftol": 0.0, "gtol": 0.0}
    minimize(function, np.ones(N_PARAMETERS), jac=True, method="L-BFGS-B", options=options)
    return median(gaps[HISTORY + 2 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=HISTORY + 6)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--shards", type=int, default=2)
    options = parser.parse_args()
    records = run(options.iterations, replicas=options.replicas, shards=options.shards)
    pairs = list(pairwise(records[HISTORY:]))
    whole = median(b["time"] - a["time"] for a, b in pairs)
    outside = median(b["outside_s"] - a["outside_s"] for a, b in pairs)
    commands = median(b["commands"] - a["commands"] for a, b in pairs)
    print(f"{N_PARAMETERS:,} parameters, {options.replicas} replicas, {options.shards} shards")
    print(f"iteration      {whole:8.3f} s, {commands:.0f} commands")
    print(f"not gradient   {outside:8.4f} s, {100 * outside / whole:.1f} %  (bar 4 %)")
    between = scipy_between_s()
    print(f"SciPy          {between:8.4f} s, {100 * between / (whole + between):.1f} %")


if __name__ == "__main__":
    main()
