"""A shard's share of an L-BFGS iteration, one thread: dbctl beside np.copyto and plain numpy.

    python tests/benchmarks/bench_vectors.py [--sizes 1 4 42] [--history 10] [--rounds 9]

What a shard of so many float32 parameters (in 2^20) does outside the gradient, once the history is
full: the pair (two subtractions) with its three rows of dot products, the direction (a combination
of 2 m + 1 vectors), the trial point, and the mean gradient of an evaluation with L2. `numpy` is
what one writes first: whole vectors, and copies of them all in float64 for the dot products.
Medians over rounds of one turn of each.

Bar at 1 M and a history of 10: 30 ms without the mean gradient, compiled or not.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

import numpy as np  # noqa: E402

from dbctl.optim.vectors import add_to_sums, combine, dots, mean_gradient  # noqa: E402
from dbctl.region import Range  # noqa: E402

BAR_MS = 30.0
ITERATION = ("pair", "dots", "direction", "trial")

Case = Callable[[], object]


def cases_of(n: int, history: int) -> dict[str, tuple[Case, Case]]:
    """What is done -> dbctl's way and numpy's."""
    generator = np.random.default_rng(0)
    pairs = [generator.normal(size=n).astype("f4") for _ in range(2 * history)]
    gradient, x, direction, trial, out = (np.ones(n, "f4") for _ in range(5))
    sums = np.ones(n)
    basis = [*pairs, gradient]
    rows = [pairs[0], pairs[1], gradient]
    terms = [(0.1 * i, v) for i, v in enumerate(basis, 1)]
    decays = [(Range(0, n), 1e-4)]

    def pair() -> None:
        combine(pairs[0], [(1.0, trial), (-1.0, x)])
        combine(pairs[1], [(1.0, trial), (-1.0, gradient)])

    def plain_pair() -> None:
        pairs[0][:] = trial - x
        pairs[1][:] = trial - gradient

    def plain_dots() -> None:
        np.array(rows, "f8") @ np.array(basis, "f8").T

    def plain_direction() -> None:
        direction[:] = sum(np.float32(c) * v for c, v in terms)

    def plain_sums() -> None:
        sums[:] = sums + gradient

    def plain_mean() -> None:
        out[:] = sums / 7 + 1e-4 * x
        np.isfinite(out).all()
        np.sum(x.astype("f8") ** 2)

    return {
        "pair": (pair, plain_pair),
        "dots": (lambda: dots(rows, basis), plain_dots),
        "direction": (lambda: combine(direction, terms), plain_direction),
        "trial": (
            lambda: combine(trial, [(1.0, x), (0.5, direction)]),
            lambda: np.copyto(trial, x + np.float32(0.5) * direction),
        ),
        "add to sums": (lambda: add_to_sums(sums, gradient), plain_sums),
        "mean gradient": (
            lambda: mean_gradient(out, sums, x, examples=7, decays=decays),
            plain_mean,
        ),
    }


def measure(cases: dict[str, Case], rounds: int) -> dict[str, float]:
    """Milliseconds of each, the median over rounds."""
    for case in cases.values():
        case()  # makes scratch, touches every page
    spent: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            began = time.perf_counter()
            case()
            spent[name].append(1e3 * (time.perf_counter() - began))
    return {name: median(times) for name, times in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4], help="in 2^20 elements")
    parser.add_argument("--history", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    for millions in arguments.sizes:
        n = millions << 20
        source, target = np.ones(n, "f4"), np.ones(n, "f4")
        cases = cases_of(n, arguments.history)
        flat: dict[str, Case] = {"copyto": lambda to=target, of=source: np.copyto(to, of)}
        for name, (ours, plain) in cases.items():
            flat[name], flat["numpy " + name] = ours, plain
        ms = measure(flat, arguments.rounds)
        print(f"{millions} M, history {arguments.history}: copyto {ms['copyto']:.2f} ms")
        for name in cases:
            own, plain_ms = ms[name], ms["numpy " + name]
            ratio = own / ms["copyto"]
            print(f"    {name:14s} {own:8.2f} ms {ratio:6.1f} copies; numpy {plain_ms:8.2f} ms")
        total = sum(ms[name] for name in ITERATION)
        line = f"    iteration      {total:8.2f} ms"
        if millions == 1 and arguments.history == 10:
            line += f"   bar {BAR_MS:.0f}: {'met' if total <= BAR_MS else 'MISSED'}"
        print(line)


if __name__ == "__main__":
    main()
