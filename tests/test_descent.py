"""dbctl/optim/descent.py: steepest descent on the commands of batch methods."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from batch_cases import assert_strong_wolfe, quadratic, rosenbrock, rosenbrock_start
from batch_twin import Executor, run

from dbctl.optim.batch import LineSearchSpec
from dbctl.optim.commands import DIRECTION, GRADIENT, PARAMETERS, Evaluate, Iterated
from dbctl.optim.descent import gradient_descent, saved_names

SPEC = LineSearchSpec()


def test_every_direction_is_the_steepest() -> None:
    executor = Executor(rosenbrock, rosenbrock_start(4))
    last = [np.zeros(4)]

    def watch(iterated: Iterated) -> None:
        if iterated.iteration:
            np.testing.assert_array_equal(executor[DIRECTION], -last[0])
            assert not iterated.restarted
        last[0] = executor[GRADIENT].copy()

    run(gradient_descent(SPEC), executor, iterations=50, watch=watch)


def test_it_keeps_no_vector_of_the_past() -> None:
    executor = Executor(rosenbrock, rosenbrock_start(4))
    trace = run(gradient_descent(SPEC), executor, iterations=5)
    assert saved_names() == (PARAMETERS, GRADIENT)
    assert trace.iterated[-1].state["memory"] == {}
    assert {*executor.vectors} == {*saved_names(), DIRECTION, "trial", "trial_gradient"}


def test_it_converges_as_its_theory_says() -> None:
    """With exact searches each step multiplies f - f* by ((k - 1) / (k + 1))^2 at most."""
    condition = 10
    function, minimum = quadratic(12, condition=condition)
    exact = LineSearchSpec(c2=1e-3)
    executor = Executor(function, np.zeros(12))
    trace = run(gradient_descent(exact, tolerance=1e-4), executor)
    assert trace.ended is not None
    assert trace.ended.status == "converged"
    assert np.abs(executor[PARAMETERS] - minimum).max() < 1e-4
    rate = ((condition - 1) / (condition + 1)) ** 2
    gaps = [iterated.loss - 1 for iterated in trace.iterated if iterated.loss > 1 + 1e-5]
    assert len(gaps) > 10
    assert all(after <= 1.01 * rate * before for before, after in pairwise(gaps))
    assert_strong_wolfe(trace, exact, c2=1e-3)


def test_the_first_trial_changes_the_loss_as_much_as_the_last_step() -> None:
    """Nocedal and Wright, 3.5: alpha d.g is kept."""
    trace = run(gradient_descent(SPEC), Executor(rosenbrock, rosenbrock_start(4)), iterations=20)
    for number in range(2, 21):
        before, after = trace.iterated[number - 1], trace.iterated[number]
        first = next(r for r in trace.requests[number] if isinstance(r, Evaluate))
        alpha = first.before[0][1][1][0]
        expected = before.step_length * before.slope_before
        assert alpha * after.slope_before == pytest.approx(expected)
