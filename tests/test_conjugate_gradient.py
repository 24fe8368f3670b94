"""dbctl/optim/conjugate_gradient.py: Polak-Ribière+ on the commands of batch methods."""

from __future__ import annotations

import numpy as np
import pytest
from batch_cases import (
    assert_strong_wolfe,
    dense_network,
    network_loss,
    quadratic,
    rosenbrock,
    rosenbrock_start,
    start_of,
)
from batch_twin import Array, Executor, run
from scipy.optimize import minimize

from dbctl.experiment.specs import DigitsSource
from dbctl.optim.batch import LineSearchSpec
from dbctl.optim.commands import GRADIENT, PARAMETERS, Command, Iterated
from dbctl.optim.conjugate_gradient import LAST_DIRECTION, conjugate_gradient, saved_names

SPEC = LineSearchSpec()


class Twin:
    """The directions by the formula, from the points that were accepted."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.gradients: list[Array] = []
        self.direction: Array | None = None
        self.restarts: list[int] = []

    def watch(self, iterated: Iterated) -> None:
        if self.gradients:
            expected = self.next()
            np.testing.assert_allclose(
                self.executor[LAST_DIRECTION], expected, rtol=1e-9, atol=1e-12
            )
            self.direction = expected
        self.gradients.append(self.executor[GRADIENT].copy())

    def next(self) -> Array:
        g = self.gradients[-1]
        if self.direction is None:
            return -g
        old = self.gradients[-2]
        beta = max(0.0, g @ (g - old) / (old @ old))
        direction = -g + beta * self.direction
        if beta == 0 or direction @ g >= 0:
            self.restarts.append(len(self.gradients))
            return -g
        return direction


@pytest.mark.parametrize("c2", [0.1, 0.9])
def test_directions_are_those_of_polak_and_ribiere(c2: float) -> None:
    """With a loose search some do not descend or have a negative beta: it restarts there."""
    spec = LineSearchSpec(c2=c2)
    executor = Executor(rosenbrock, rosenbrock_start(10))
    twin = Twin(executor)
    trace = run(conjugate_gradient(spec), executor, watch=twin.watch, iterations=150)
    assert len(trace.iterated) > 100
    assert twin.restarts == [i.iteration for i in trace.iterated if i.restarted]
    assert twin.restarts
    assert_strong_wolfe(trace, spec, c2=c2)


def test_a_restart_is_known_before_the_direction_is_made() -> None:
    """So that it costs no command: the scalars came with the accepted trial."""
    spec = LineSearchSpec(c2=0.9)
    trace = run(conjugate_gradient(spec), Executor(rosenbrock, rosenbrock_start(10)))
    restarts = [i.iteration for i in trace.iterated if i.restarted]
    betas = [trace.iterated[number - 1].state["memory"]["beta"] for number in restarts]
    assert min(betas) < 0 < max(betas)  # both reasons
    for number in restarts:
        kinds = [type(request) for request in trace.requests[number]]
        assert kinds.count(Command) == 2


@pytest.mark.parametrize("n", [1, 2, 5, 12])
def test_a_quadratic_takes_n_steps(n: int) -> None:
    """With exact searches; Nocedal and Wright, theorem 5.1."""
    function, minimum = quadratic(n, condition=30, seed=n)
    exact = LineSearchSpec(c1=1e-10, c2=1e-9, max_trials=60)
    executor = Executor(function, np.zeros(n))
    trace = run(conjugate_gradient(exact, tolerance=1e-5), executor)
    assert trace.ended is not None
    assert trace.ended.status == "converged"
    assert trace.iterated[-1].iteration == n
    np.testing.assert_allclose(executor[PARAMETERS], minimum, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_optimum_of_a_convex_problem_is_scipys(dtype: str) -> None:
    spec, source = dense_network(64, 10), DigitsSource(split="train", scale=0.0625)
    exact = network_loss(spec, source, l2=1e-2, dtype="float64")
    start = start_of(spec, 3, "float64")
    options = {"gtol": 1e-8, "ftol": 0, "maxiter": 10_000, "maxfun": 10_000}
    peer = minimize(exact, start, jac=True, method="L-BFGS-B", options=options)
    executor = Executor(network_loss(spec, source, l2=1e-2, dtype=dtype), start.astype(dtype))
    trace = run(conjugate_gradient(SPEC), executor)
    assert trace.ended is not None
    assert trace.ended.status == "converged"
    assert abs(exact(executor[PARAMETERS].astype(np.float64))[0] - peer.fun) < 1e-6
    assert_strong_wolfe(trace, SPEC, c2=0.1)


def test_the_direction_is_all_it_keeps_of_the_past() -> None:
    executor = Executor(rosenbrock, rosenbrock_start(4))
    run(conjugate_gradient(SPEC), executor, iterations=5)
    assert saved_names() == (PARAMETERS, GRADIENT, LAST_DIRECTION)
    assert {*executor.vectors} == {*saved_names(), "direction", "trial", "trial_gradient"}
