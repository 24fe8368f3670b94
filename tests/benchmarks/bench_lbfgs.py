"""L-BFGS beside scipy.optimize's L-BFGS-B: the loss after as many evaluations of the batch.

    python tests/benchmarks/bench_lbfgs.py [--seeds 5] [--evaluations 25] [--rows 10000]

784-1024-200-10 on the first rows of Fashion-MNIST, in float32, all rows a batch, history 10: of
dbctl the loss at the accepted point, of SciPy (whose vectors are float64) the least loss it has
seen. Printed are both losses of each seed and the median of the ratios. Fashion-MNIST is needed
(Debian's package dataset-fashion-mnist). Bar: 1.15.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from batch_cases import (  # noqa: E402
    dense_network,
    loss_after,
    network_loss,
    scipy_loss_after,
    start_of,
)

from dbctl.experiment.specs import IdxSource  # noqa: E402

FASHION = "/usr/share/datasets/fashion-mnist"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--evaluations", type=int, default=25)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--activation", default="sigmoid", choices=["sigmoid", "relu", "tanh"])
    options = parser.parse_args()
    spec = dense_network(784, 1024, 200, 10, activation=options.activation)
    source = IdxSource(
        images=f"{FASHION}/train-images-idx3-ubyte.gz",
        labels=f"{FASHION}/train-labels-idx1-ubyte.gz",
        scale=1 / 255,
        rows=options.rows,
    )
    function = network_loss(spec, source)
    ratios = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        begun = time.perf_counter()
        start = start_of(spec, seed)
        ours = loss_after(function, start, options.evaluations, history=10)
        peer = scipy_loss_after(function, start, options.evaluations, history=10)
        ratios.append(ours / peer)
        seconds = time.perf_counter() - begun
        print(f"seed {seed}: dbctl {ours:.5f}, SciPy {peer:.5f} ({seconds:.0f} s)", flush=True)
    print(f"dbctl / SciPy after {options.evaluations} evaluations: {median(ratios):.3f} (median)")


if __name__ == "__main__":
    main()
