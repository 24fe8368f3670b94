"""Whole runs through `dbctl train` beside PyTorch eager, 784-1024-1024-10, batch 100.

    python tests/benchmarks/bench_train.py [ROUNDS]

Each round runs every peer once, in turn; printed are medians of examples/s and of the ratios to
PyTorch eager with one thread in the same round. Fashion-MNIST is needed (Debian's package
dataset-fashion-mnist). Bars: sgd 0.9, Downpour with 2 replicas 1.55 at n_fetch = n_push = 1 and 1.7
at 5; evaluation each epoch keeps 0.85 of the examples/s without.

What the machine has to give is measured beside them: `one copy` is a process that makes the steps
of our network by itself, without servers, `two copies` are two such processes at once that have
nothing to do with each other. No sgd run can be expected to pass the first, no Downpour run of two
replicas the second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

FASHION = "/usr/share/datasets/fashion-mnist"
ROOT = Path(__file__).resolve().parents[2]

EXPERIMENT = f"""
version: 1
name: bench
seed: 1
data:
  train:
    source: idx
    images: {FASHION}/train-images-idx3-ubyte.gz
    labels: {FASHION}/train-labels-idx1-ubyte.gz
    scale: 0.00392156862745098
  test:
    source: idx
    images: {FASHION}/t10k-images-idx3-ubyte.gz
    labels: {FASHION}/t10k-labels-idx1-ubyte.gz
    scale: 0.00392156862745098
network:
  input: [28, 28, 1]
  layers:
    - {{type: dense, units: 1024, activation: relu}}
    - {{type: dense, units: 1024, activation: relu}}
    - {{type: dense, units: 10}}
  loss: softmax
optimizer: {{type: sgd, batch_size: 100, rule: {{type: sgd, rate: 0.05}}}}
stop: {{steps: 1}}
evaluate: off
checkpoint: {{every: off}}
threads: 1
"""

DOWNPOUR = (
    "replicas=2",
    "optimizer={type: downpour, batch_size: 100, rule: {type: sgd, rate: 0.05}}",
)
PEERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "sgd": (600, ()),
    "downpour n=1": (1200, DOWNPOUR),
    "downpour n=5": (1200, (*DOWNPOUR, "optimizer.n_fetch=5", "optimizer.n_push=5")),
    "downpour n=1, evaluate": (1200, (*DOWNPOUR, "evaluate={every: 1 epoch}")),
}

TORCH = f"""
import gzip, sys, time
import numpy as np, torch
torch.set_num_threads(1)
torch.manual_seed(1)
raw = gzip.open("{FASHION}/train-images-idx3-ubyte.gz").read()[16:]
x = torch.from_numpy(np.frombuffer(raw, np.uint8).reshape(-1, 784).astype(np.float32) / 255)
raw = gzip.open("{FASHION}/train-labels-idx1-ubyte.gz").read()[8:]
y = torch.from_numpy(np.frombuffer(raw, np.uint8).astype(np.int64))
model = torch.nn.Sequential(
    torch.nn.Linear(784, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU(),
    torch.nn.Linear(1024, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loss_of = torch.nn.CrossEntropyLoss()
steps = int(sys.argv[1])
order = torch.randperm(len(x))
for step in range(steps + 20):
    if step == 20:
        began = time.perf_counter()
    at = order[step * 100 % 60000 : step * 100 % 60000 + 100]
    optimizer.zero_grad()
    loss = loss_of(model(x[at]), y[at])
    loss.backward()
    optimizer.step()
print(steps * 100 / (time.perf_counter() - began))
"""


COPY = f"""
import sys, time
import numpy as np
from dbctl.data.sources import open_source
from dbctl.experiment.read import parse
from dbctl.model.initial import initial_values
from dbctl.model.passes import Network
from dbctl.optim.gradients import local_step
from dbctl.region import Range
experiment = parse({EXPERIMENT!r})
network = Network(experiment.network, batch_size=100)
parameters = initial_values(experiment.network, 1, Range(0, network.n_parameters))
gradient = np.zeros_like(parameters)
source = open_source(experiment.data.train)
x = np.float32(source.x.take(np.arange(6000)).reshape(-1, 784) / 255)
y = source.y[:6000]
steps = int(sys.argv[1])
for step in range(steps + 20):
    if step == 20:
        print("ready", flush=True)
        sys.stdin.readline()
        began = time.perf_counter()
    at = slice(step * 100 % len(x), step * 100 % len(x) + 100)
    network.gradient(parameters, x[at].T, y[at], out=gradient)
    local_step(parameters, gradient, 0.05)
print(steps * 100 / (time.perf_counter() - began))
"""


def copies(count: int, steps: int = 400) -> float:
    """Examples/s of so many processes together that begin at the same time."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    words = [sys.executable, "-c", COPY, str(steps)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(words, cwd=ROOT, env=env, **pipes) for _ in range(count)]
    for process in running:
        assert process.stdout.readline() == "ready\n"
    for process in running:
        process.stdin.write("\n")
        process.stdin.flush()
    return sum(float(process.communicate()[0]) for process in running)


def torch_examples_per_second(steps: int = 400) -> float:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    words = [sys.executable, "-c", TORCH, str(steps)]
    return float(subprocess.run(words, env=env, check=True, capture_output=True).stdout)


LIMITS = {"one copy": lambda: copies(1), "two copies": lambda: copies(2)}


def train(steps: int, settings: tuple[str, ...]) -> float:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "bench.yaml"
        path.write_text(EXPERIMENT)
        words = [sys.executable, "-m", "dbctl", "train", str(path), "--json"]
        words += ["--run-dir", f"{directory}/run", "--set", f"stop.steps={steps}"]
        for setting in settings:
            words += ["--set", setting]
        done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
        return float(json.loads(done.stdout.splitlines()[-1])["examples_per_second"])


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    machine = {"torch eager": torch_examples_per_second, **LIMITS}
    found: dict[str, list[float]] = {name: [] for name in (*machine, *PEERS)}
    for _ in range(rounds):
        for name, measure in machine.items():
            found[name].append(measure())
        for name, (steps, settings) in PEERS.items():
            found[name].append(train(steps, settings))
    for name, rates in found.items():
        ratios = [a / b for a, b in zip(rates, found["torch eager"], strict=True)]
        line = f"{name:<24} {median(rates):>8,.0f} examples/s   {median(ratios):.2f} of torch eager"
        if name in PEERS:
            limit = "one copy" if name == "sgd" else "two copies"
            of_limit = median(a / b for a, b in zip(rates, found[limit], strict=True))
            line += f", {of_limit:.2f} of {limit}"
        print(line)
    pairs = zip(found["downpour n=1, evaluate"], found["downpour n=1"], strict=True)
    print(f"evaluation each epoch keeps {median(a / b for a, b in pairs):.2f}")


if __name__ == "__main__":
    main()
