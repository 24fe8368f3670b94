"""Functions to minimise for the tests of batch methods: a network on data, and classic ones.

Rules of this file: a function is x -> (loss, gradient) and takes x in float32 and float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from batch_twin import Array, Executor, Function, Trace, run
from scipy.optimize import minimize, rosen, rosen_der
from threadpoolctl import ThreadpoolController

from dbctl.data.dataset import Dataset
from dbctl.data.sources import open_source
from dbctl.experiment.specs import SourceSpec
from dbctl.model.initial import initial_values
from dbctl.model.layers.dense import DenseSpec
from dbctl.model.network import NetworkSpec, tensors
from dbctl.model.passes import Network
from dbctl.optim.batch import LineSearchSpec
from dbctl.optim.lbfgs import lbfgs
from dbctl.region import Range


def dense_network(*units: int, activation: str = "sigmoid") -> NetworkSpec:
    """`units`: inputs, hidden layers, outputs; softmax."""
    hidden = [DenseSpec(units=n, activation=activation) for n in units[1:-1]]
    return NetworkSpec(
        input=(units[0],), layers=(*hidden, DenseSpec(units=units[-1])), loss="softmax"
    )


def start_of(spec: NetworkSpec, seed: int, dtype: str = "float32") -> Array:
    return initial_values(spec, seed, Range(0, tensors(spec)[-1].range.stop), dtype=dtype)


def network_loss(
    spec: NetworkSpec, source: SourceSpec, *, l2: float = 0.0, dtype: str = "float32"
) -> Function:
    """The mean loss over all rows with l2 / 2 times the squared weights, through dbctl.model.

    The vector may be of another dtype than the network, which then works on a copy. One thread of
    BLAS: for such small products several wait for one another.
    """
    blas = ThreadpoolController()
    data = Dataset(open_source(source), source, dtype=dtype)
    n = len(data)
    rows = np.arange(n, dtype=np.int64)
    x, targets = data.batch(rows, np.empty((data.features, n), dtype)), data.targets(rows)
    network = Network(spec, batch_size=n, dtype=dtype)
    gradient = np.empty(network.n_parameters, dtype)
    weights = [t.range.slice() for t in tensors(spec) if t.kind == "weight"]

    def function(parameters: Array) -> tuple[float, Array]:
        with blas.limit(limits=1):
            loss = network.gradient(parameters.astype(dtype), x, targets, out=gradient) / n
        total = gradient.astype(parameters.dtype)
        for part in weights:
            loss += l2 / 2 * float(np.square(parameters[part], dtype=np.float64).sum())
            total[part] += l2 * parameters[part]
        return loss, total

    return function


def rosenbrock(x: Array) -> tuple[float, Array]:
    """In float64, whatever the dtype of x."""
    wide = x.astype(np.float64)
    return float(rosen(wide)), rosen_der(wide)


def rosenbrock_start(n: int) -> Array:
    start = np.ones(n)
    start[0::2] = -1.2
    return start


def quadratic(n: int, *, condition: float, seed: int = 0) -> tuple[Function, Array]:
    """(f, its minimum): eigenvalues from 1 to `condition` in random directions; f >= 1."""
    rng = np.random.default_rng(seed)
    axes = np.linalg.qr(rng.standard_normal((n, n)))[0]
    matrix = axes * np.geomspace(1, condition, n) @ axes.T
    minimum = rng.standard_normal(n)

    def function(x: Array) -> tuple[float, Array]:
        gradient = matrix @ (x.astype(np.float64) - minimum)
        return 1 + float((x - minimum) @ gradient) / 2, gradient

    return function, minimum


def assert_strong_wolfe(trace: Trace, spec: LineSearchSpec, *, c2: float) -> None:
    """Every accepted step, from what was logged of it: f and slope, before and after."""
    for step in trace.iterated[1:]:
        assert step.slope_before < 0
        assert abs(step.slope) <= c2 * abs(step.slope_before)
        bound = step.loss_before + spec.c1 * step.step_length * step.slope_before
        if step.approximate:
            assert step.loss > bound
            assert abs(step.loss - step.loss_before) <= 1e-6 * abs(step.loss_before)
            assert step.slope <= (2 * spec.c1 - 1) * step.slope_before
        else:
            assert step.loss <= bound


def loss_after(function: Function, start: Array, evaluations: int, *, history: int) -> float:
    """Of dbctl's L-BFGS: the loss at the accepted point when the evaluations are spent."""
    method = lbfgs(LineSearchSpec(), history=history, tolerance=1e-12)
    trace = run(method, Executor(function, start), evaluations=evaluations)
    return trace.iterated[-1].loss


def scipy_loss_after(function: Function, start: Array, evaluations: int, *, history: int) -> float:
    """Of scipy.optimize: the least of the first `evaluations` losses, accepted or not."""
    losses: list[float] = []

    def recorded(x: Array) -> tuple[float, Array]:
        loss, gradient = function(x)
        losses.append(loss)
        return loss, gradient

    options: dict[str, Any] = {"maxcor": history, "maxfun": evaluations, "ftol": 0, "gtol": 1e-12}
    minimize(recorded, start.astype(np.float64), jac=True, method="L-BFGS-B", options=options)
    return min(losses[:evaluations])
