"""Update rules at a shard, one thread: dbctl beside np.copyto and PyTorch.

    python tests/benchmarks/bench_rules.py [--sizes 1 4 42] [--rules sgd adagrad] [--rounds 15]

Every figure is bytes a second as a multiple of np.copyto's over the same number of float32
parameters (sizes in 2^20), so that it says how near to the speed of memory an update runs: the
median over rounds of one update of each, each round in another order: what runs after copyto waits
for its writes. Bytes read and written per element: copyto 8,
sgd 12, momentum and adagrad 20, adam 28; what a rule reads twice counts once. PyTorch: its default
and its fused optimisers. `apart` is an update into another buffer, as when a reader holds the
current one: one array more goes through memory, which is not counted. `zeros`: a third of all
gradients were always zero. `blocks` of sgd is one call of numpy's OpenBLAS where that will do
(optim/blas.py), which `apart` and every other rule's are not.

Parameters and gradients, and what copyto copies, are shared memory as in a run, which begins at a
page: numpy's own arrays, as the state of a rule is, begin 16 or 32 bytes after a cache line, and
every wide load is then two.

Bars at 4 M: sgd 1.2, with and without numba; adagrad 1.3, compiled.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import time
from collections.abc import Callable
from statistics import median

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

import numpy as np  # noqa: E402

from dbctl.optim.gradients import accrue_and_step, is_finite  # noqa: E402
from dbctl.optim.rules import (  # noqa: E402
    AdagradRuleSpec,
    AdamRuleSpec,
    MomentumRuleSpec,
    RuleSpec,
    SgdRuleSpec,
)
from dbctl.optim.updates import make_rule  # noqa: E402
from dbctl.transport.memory import SharedBuffer  # noqa: E402

RATE = 1e-4
RULES: list[tuple[RuleSpec, int]] = [
    (SgdRuleSpec(rate=RATE), 12),
    (MomentumRuleSpec(rate=RATE), 20),
    (AdagradRuleSpec(rate=RATE), 20),
    (AdamRuleSpec(rate=RATE), 28),
]
BARS = {("sgd", "blocks"): 1.2, ("sgd", "numba"): 1.2, ("adagrad", "numba"): 1.3}

Case = tuple[int, Callable[[], object]]  # bytes an element, one update


def shared(values: np.ndarray) -> np.ndarray:
    """The same values where a run has them; the buffer lives as long as the array."""
    array = SharedBuffer(values.size, values.dtype.str).array
    np.copyto(array, values)
    return array


def gradient_of(n: int, *, zeros: bool) -> np.ndarray:
    gradient = np.random.default_rng(0).normal(size=n).astype("float32")
    if zeros:
        gradient[::3] = 0
    return shared(gradient)


def dbctl_case(
    spec: RuleSpec, n: int, *, fast: bool, apart: bool, zeros: bool
) -> Callable[[], None]:
    rule = make_rule(spec, fast=fast)
    parameters, gradient = shared(np.ones(n, "float32")), gradient_of(n, zeros=zeros)
    state = rule.new_state(n, "float32")
    out = shared(np.ones(n, "float32")) if apart else parameters
    return lambda: rule.update(parameters, gradient, state, n=100, rate=RATE, out=out)


def torch_case(kind: str, n: int, *, fused: bool) -> Callable[[], None]:
    import torch

    torch.set_num_threads(1)
    make = {
        "sgd": lambda p: torch.optim.SGD([p], lr=RATE, fused=fused),
        "momentum": lambda p: torch.optim.SGD([p], lr=RATE, momentum=0.9, fused=fused),
        "adagrad": lambda p: torch.optim.Adagrad([p], lr=RATE, fused=fused),
        "adam": lambda p: torch.optim.Adam([p], lr=RATE, fused=fused),
    }
    parameters = torch.ones(n)
    parameters.grad = torch.tensor(gradient_of(n, zeros=False))
    optimizer = make[kind](parameters)
    return lambda: optimizer.step()


def cases_of(spec: RuleSpec, size: int, n: int) -> dict[str, Case]:
    compiled = importlib.util.find_spec("numba") is not None
    cases: dict[str, Case] = {}
    for fast in (False, True) if compiled else (False,):
        name = "numba" if fast else "blocks"
        for apart in (False, True):
            case = dbctl_case(spec, n, fast=fast, apart=apart, zeros=False)
            cases[name + (" apart" if apart else "")] = size, case
        if spec.type == "adagrad":
            cases[name + " zeros"] = size, dbctl_case(spec, n, fast=fast, apart=False, zeros=True)
    if importlib.util.find_spec("torch") is not None:
        for fused in (False, True):
            name = "torch fused" if fused else "torch"
            cases[name] = size, torch_case(spec.type, n, fused=fused)
    return cases


def worker_cases(n: int) -> dict[str, Case]:
    """What a worker does to its gradient: the finite check, and accruing with the local step."""
    accrued, parameters = shared(np.zeros(n, "float32")), shared(np.ones(n, "float32"))
    gradient = gradient_of(n, zeros=False)
    cases: dict[str, Case] = {"finite check": (4, lambda: is_finite(gradient))}
    for fast in (False, True) if importlib.util.find_spec("numba") else (False,):
        cases[f"accrue and step, {'numba' if fast else 'blocks'}"] = (
            20,
            lambda fast=fast: accrue_and_step(accrued, gradient, parameters, rate=RATE, fast=fast),
        )
    return cases


def measure(cases: dict[str, Case], n: int, rounds: int) -> dict[str, float]:
    """Median over rounds of each case's bytes a second over copyto's of the same round."""
    source, target = shared(np.ones(n, "float32")), shared(np.ones(n, "float32"))
    everything: dict[str, Case] = {"copyto": (8, lambda: np.copyto(target, source)), **cases}
    for _, update in everything.values():
        update()  # compiles, makes scratch, touches every page
    seconds: dict[str, list[float]] = {name: [] for name in everything}
    repeats = max(1, (4 << 20) // n)
    names, order = list(everything), random.Random(0)
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            update = everything[name][1]
            began = time.perf_counter()
            for _ in range(repeats):
                update()
            seconds[name].append((time.perf_counter() - began) / repeats)
    rate = 8 * n / median(seconds["copyto"]) / 1e9
    print(f"  copyto {rate:.1f} GB/s")
    return {
        name: median(
            size / 8 * copy / own
            for copy, own in zip(seconds["copyto"], seconds[name], strict=True)
        )
        for name, (size, _) in cases.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 42], help="in 2^20 elements")
    parser.add_argument("--rules", nargs="+", default=[spec.type for spec, _ in RULES])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    for millions in arguments.sizes:
        n = millions << 20
        for spec, size in RULES:
            if spec.type not in arguments.rules:
                continue
            print(f"{spec.type}, {millions} M")
            for name, ratio in measure(cases_of(spec, size, n), n, arguments.rounds).items():
                bar = BARS.get((spec.type, name)) if millions == 4 else None
                verdict = f"   bar {bar}: {'met' if ratio >= bar else 'MISSED'}" if bar else ""
                print(f"    {name:14s} {ratio:5.2f}{verdict}")
        print(f"worker, {millions} M")
        for name, ratio in measure(worker_cases(n), n, arguments.rounds).items():
            print(f"    {name:24s} {ratio:5.2f}")


if __name__ == "__main__":
    main()
