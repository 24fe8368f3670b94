"""One training step, one thread: dbctl beside PyTorch eager.

    python tests/benchmarks/bench_step.py [--rounds 30]

Each peer runs in a process of its own (two OpenBLAS or OpenMP pools in one process disturb each
other), and they take turns: a round is a few steps of each. A step is forward, backward and an SGD
update, at the same parameters, on one mini-batch. Printed: the median time of a step of each, and
the median over rounds of PyTorch's time divided by ours: examples/s as a multiple of PyTorch's.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

CASES = (
    ((784, 512, 10), 32),
    ((784, 512, 10), 100),
    ((784, 512, 10), 256),
    ((784, 1024, 1024, 10), 100),
)
RATE = 1e-4
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
TUNING = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


def dbctl_step(sizes: tuple[int, ...], batch_size: int) -> Callable[[], None]:
    import numpy as np

    from dbctl.model.initial import initial_values
    from dbctl.model.layers.dense import DenseSpec
    from dbctl.model.network import NetworkSpec, n_parameters
    from dbctl.model.passes import Network
    from dbctl.optim.gradients import local_step
    from dbctl.region import Range

    hidden = tuple(DenseSpec(units=units, activation="sigmoid") for units in sizes[1:-1])
    spec = NetworkSpec(
        input=sizes[:1], layers=(*hidden, DenseSpec(units=sizes[-1])), loss="softmax"
    )
    network = Network(spec, batch_size=batch_size)
    parameters = initial_values(spec, 0, Range(0, n_parameters(spec)))
    gradient = np.zeros_like(parameters)
    rng = np.random.default_rng(0)
    x = rng.random((sizes[0], batch_size), dtype=np.float32)
    labels = rng.integers(0, sizes[-1], batch_size)

    def step() -> None:
        network.gradient(parameters, x, labels, out=gradient)
        local_step(parameters, gradient, RATE, fast=False)

    return step


def torch_step(sizes: tuple[int, ...], batch_size: int) -> Callable[[], None]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for inputs, units in itertools.pairwise(sizes):
        layers += [torch.nn.Linear(inputs, units), torch.nn.Sigmoid()]
    model = torch.nn.Sequential(*layers[:-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    x = torch.rand(batch_size, sizes[0])
    labels = torch.randint(sizes[-1], (batch_size,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return step


PEERS = {"dbctl": dbctl_step, "torch": torch_step}


def serve(peer: str) -> None:
    """Answers each line "case steps" with the seconds that so many steps took."""
    made: dict[int, Callable[[], None]] = {}
    for line in sys.stdin:
        case, steps = map(int, line.split())
        if case not in made:
            made[case] = PEERS[peer](*CASES[case])
        step = made[case]
        step()  # warm the caches that the other peer has just used
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        print(time.perf_counter() - begin, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--peer", choices=PEERS)
    options = parser.parse_args()
    if options.peer:
        serve(options.peer)
        return
    root = Path(__file__).parents[2]
    env = {k: v for k, v in os.environ.items() if k not in TUNING}
    env |= ONE_THREAD | {"PYTHONPATH": str(root)}
    peers = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--peer", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        for name in PEERS
    }

    def ask(name: str, case: int, steps: int) -> float:
        process = peers[name]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{case} {steps}\n")
        process.stdin.flush()
        return float(process.stdout.readline()) / steps

    print(f"{'network':>20} {'batch':>5} {'dbctl ms':>9} {'torch ms':>9} {'dbctl/torch':>11}")
    for case, (sizes, batch_size) in enumerate(CASES):
        for name in PEERS:
            ask(name, case, 20)
        rounds = [{name: ask(name, case, 10) for name in PEERS} for _ in range(options.rounds)]
        ours, theirs = (median(r[name] for r in rounds) * 1e3 for name in PEERS)
        ratio = median(r["torch"] / r["dbctl"] for r in rounds)
        name = "-".join(map(str, sizes))
        print(f"{name:>20} {batch_size:>5} {ours:>9.3f} {theirs:>9.3f} {ratio:>11.2f}")
    for process in peers.values():
        process.communicate()


if __name__ == "__main__":
    main()
