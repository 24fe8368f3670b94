"""dbctl/optim/lbfgs.py: the vector-free form is L-BFGS; it does as well as SciPy's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import median

import numpy as np
import pytest
from batch_cases import (
    assert_strong_wolfe,
    dense_network,
    loss_after,
    network_loss,
    quadratic,
    rosenbrock,
    rosenbrock_start,
    scipy_loss_after,
    start_of,
)
from batch_twin import Array, Executor, Function, run, two_loop
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits

from dbctl.experiment.specs import DigitsSource
from dbctl.optim import lbfgs as module
from dbctl.optim.batch import LineSearchSpec
from dbctl.optim.commands import (
    DIRECTION,
    GRADIENT,
    PARAMETERS,
    TRIAL_GRADIENT,
    Command,
    Evaluate,
    Iterated,
)
from dbctl.optim.lbfgs import lbfgs, saved_names

SPEC = LineSearchSpec()
DIGITS = DigitsSource(split="train", scale=0.0625)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Of BLAS, SciPy's own too: on such short vectors two waited for one another, at full load."""
    with threadpool_limits(1):
        yield


# ------------------------------------------------------------------------- the two-loop recursion


class Twin:
    """L-BFGS by the book beside the method: its own pairs, from the points that were accepted."""

    def __init__(self, executor: Executor, *, history: int, curvature: float) -> None:
        self.executor, self.history, self.curvature = executor, history, curvature
        self.pairs: list[tuple[Array, Array]] = []
        self.last: tuple[Array, Array] | None = None
        self.worst = 0.0
        self.n_rejected = 0
        self.n_kept = 0

    def watch(self, iterated: Iterated) -> None:
        """The direction of this iteration is checked, then its pair is taken in."""
        x, g = self.executor[PARAMETERS].copy(), self.executor[GRADIENT].copy()
        if self.last is not None:
            if iterated.restarted:
                self.pairs.clear()
            expected = two_loop(self.pairs, self.last[1])
            error = np.linalg.norm(self.executor[DIRECTION] - expected)
            self.worst = max(self.worst, float(error / np.linalg.norm(expected)))
            self.take(x - self.last[0], g - self.last[1])
        self.last = x, g

    def take(self, s: Array, y: Array) -> None:
        """A rejected pair has taken the place of the oldest."""
        if len(self.pairs) == self.history:
            self.pairs.pop(0)
        if s @ y > self.curvature * np.linalg.norm(s) * np.linalg.norm(y):
            self.pairs.append((s, y))
            self.n_kept += 1
        else:
            self.n_rejected += 1


@pytest.mark.parametrize("history", [1, 2, 5, 10, 20])
@pytest.mark.parametrize("curvature", [module.CURVATURE, 0.6])
def test_the_direction_is_that_of_the_two_loop_recursion(
    monkeypatch: pytest.MonkeyPatch, history: int, curvature: float
) -> None:
    """Chen, Wang and Zhou 2014: the same direction from dot products alone."""
    monkeypatch.setattr(module, "CURVATURE", curvature)
    function, _ = quadratic(30, condition=200)

    def bent(x: Array) -> tuple[float, Array]:
        loss, gradient = function(x)
        return loss + float(np.cosh(x).sum()), gradient + np.sinh(x)

    executor = Executor(bent, np.full(30, 0.5))
    twin = Twin(executor, history=history, curvature=curvature)
    trace = run(
        lbfgs(SPEC, history=history, tolerance=1e-8), executor, watch=twin.watch, iterations=120
    )
    assert len(trace.iterated) > 30
    assert twin.n_kept > history  # the ring went round
    assert (twin.n_rejected > 3) == (curvature == 0.6)
    assert twin.worst < 1e-10


def test_on_rosenbrock_the_two_forms_go_the_same_way() -> None:
    executor = Executor(rosenbrock, rosenbrock_start(20))
    twin = Twin(executor, history=7, curvature=module.CURVATURE)
    trace = run(lbfgs(SPEC, history=7), executor, watch=twin.watch)
    assert trace.ended is not None
    assert trace.ended.status == "converged"
    assert len(trace.iterated) > 80
    assert twin.worst < 1e-10


def test_the_pairs_lie_in_a_ring_of_names() -> None:
    executor = Executor(rosenbrock, rosenbrock_start(6))
    slots = []
    trace = run(lbfgs(SPEC, history=3), executor, iterations=5)
    slots = [iterated.state["memory"]["slots"] for iterated in trace.iterated]
    assert slots == [[], [0], [0, 1], [0, 1, 2], [1, 2, 0], [2, 0, 1]]
    assert set(executor.vectors) == {*saved_names(3), "direction", "trial", "trial_gradient"}
    assert saved_names(2) == ("parameters", "gradient", "s0", "y0", "s1", "y1")


@pytest.mark.parametrize("history", [1, 5, 100])
def test_two_commands_whatever_the_history(history: int) -> None:
    """A, section 4.2, and Chen et al.: not the 4m of the recursion carried out on the shards."""
    trace = run(lbfgs(SPEC, history=history), Executor(rosenbrock, rosenbrock_start(16)))
    assert len(trace.iterated) > 30
    for requests in trace.requests[1:-1]:
        assert [type(request) for request in requests].count(Command) == 2
        dots = [len(request.rows) * len(request.columns) for request in requests]
        assert max(dots) <= 3 * (2 * history + 1)


def test_the_state_holds_the_gram_matrix_of_the_pairs() -> None:
    executor = Executor(rosenbrock, rosenbrock_start(5))
    trace = run(lbfgs(SPEC, history=4), executor, iterations=9)
    memory = json.loads(json.dumps(trace.iterated[-1].state))["memory"]
    assert len(memory["dots"]) == 2 * 4 + 1
    for a, row in memory["dots"].items():
        for b, dot in row.items():
            assert dot == pytest.approx(float(executor[a] @ executor[b]), rel=1e-12, abs=1e-300)


# --------------------------------------------------------------------------------------- its steps


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_after_a_while_the_first_trial_is_taken(dtype: str) -> None:
    spec = dense_network(64, 10)
    executor = Executor(network_loss(spec, DIGITS, l2=1e-2), start_of(spec, 1, dtype))
    trace = run(lbfgs(SPEC), executor)
    assert trace.ended is not None
    assert trace.ended.status == "converged"
    n_iterations = trace.iterated[-1].iteration
    at_once = sum(iterated.step_length == 1 for iterated in trace.iterated)
    assert at_once >= 0.9 * n_iterations
    assert executor.n_evaluations <= 1.1 * n_iterations + 5
    assert_strong_wolfe(trace, SPEC, c2=0.9)


def test_the_scale_of_the_loss_does_not_matter() -> None:
    """Powers of two change no digit: the test of curvature is a cosine."""

    def steps(scale: float) -> list[tuple[float, int]]:
        def function(x: Array) -> tuple[float, Array]:
            loss, gradient = rosenbrock(x)
            return scale * loss, scale * gradient

        method = lbfgs(SPEC, tolerance=1e-5 * scale)
        trace = run(method, Executor(function, rosenbrock_start(6)))
        return [(iterated.loss / scale, iterated.evaluations) for iterated in trace.iterated]

    assert len(steps(1.0)) > 40
    assert steps(1.0) == steps(2.0**-60) == steps(2.0**60)


def test_a_failed_search_is_tried_again_down_the_steepest_descent() -> None:
    """With the history dropped; the step is as long as the last one in its first-order change."""

    def function(x: Array) -> tuple[float, Array]:
        loss, gradient = rosenbrock(x)
        lying[0] -= 1
        return loss, gradient * (nan_factor if 0 <= lying[0] < SPEC.max_trials else 1)

    nan_factor, lying = float("nan"), [-1]

    def watch(iterated: Iterated) -> None:
        if iterated.iteration == 12:
            lying[0] = SPEC.max_trials

    executor = Executor(function, rosenbrock_start(6))
    trace = run(lbfgs(SPEC), executor, watch=watch)
    assert trace.ended is not None
    assert trace.ended.status == "converged"
    assert [i.iteration for i in trace.iterated if i.restarted] == [13]
    again = trace.iterated[13]
    assert len(again.state["memory"]["slots"]) == 1
    assert again.evaluations - trace.iterated[12].evaluations > SPEC.max_trials
    assert again.slope_before == pytest.approx(-(trace.iterated[12].gradient_norm ** 2))
    before = trace.iterated[12]
    trials = [r for r in trace.requests[13] if isinstance(r, Evaluate)]
    first = trials[SPEC.max_trials].before[0][1][1][0]
    assert first * again.slope_before == pytest.approx(before.step_length * before.slope_before)


def test_with_a_new_batch_both_gradients_of_a_pair_are_of_one_batch() -> None:
    rng = np.random.default_rng(0)
    curvatures = rng.uniform(1, 9, (9, 5))

    def function(x: Array) -> tuple[float, Array]:
        return float(curvatures[batch[0]] @ (x - 1) ** 2) / 2, curvatures[batch[0]] * (x - 1)

    batch, checked = [0], []

    def watch(iterated: Iterated) -> None:
        slots = iterated.state["memory"]["slots"]
        if slots:
            s, y = executor[f"s{slots[-1]}"], executor[f"y{slots[-1]}"]
            np.testing.assert_allclose(y, curvatures[batch[0]] * s, atol=1e-9)
            checked.append(batch[0])
        batch[0] = (batch[0] + 1) % 9

    executor = Executor(function, np.zeros(5))
    run(lbfgs(SPEC, resample=True), executor, watch=watch, iterations=8)
    assert checked == list(range(1, 9))


def test_with_a_new_batch_the_direction_is_of_its_gradient() -> None:
    """The pairs are those of the old batches; the gradient's dots with them are asked for anew."""
    rng = np.random.default_rng(0)
    curvatures = np.linspace(1, 9, 6) * rng.uniform(0.9, 1.1, (50, 6))

    def function(x: Array) -> tuple[float, Array]:
        return float(curvatures[batch[0]] @ (x - 1) ** 2) / 2, curvatures[batch[0]] * (x - 1)

    batch, pairs, checked = [0], [], []

    def watch(iterated: Iterated) -> None:
        if pairs:
            # The trial's swap has put there the gradient from which the search began.
            expected = two_loop(pairs, executor[TRIAL_GRADIENT])
            np.testing.assert_allclose(executor[DIRECTION], expected, rtol=1e-8)
            checked.append(iterated.iteration)
        slots = iterated.state["memory"]["slots"]
        pairs[:] = [(executor[f"s{slot}"].copy(), executor[f"y{slot}"].copy()) for slot in slots]
        batch[0] += 1

    executor = Executor(function, np.zeros(6))
    run(lbfgs(SPEC, history=3, resample=True), executor, watch=watch, iterations=8)
    assert checked == list(range(2, 9))


# ------------------------------------------------------------------------------------ beside SciPy


@pytest.mark.parametrize("n", [2, 10, 100])
def test_rosenbrock_with_as_many_evaluations_as_scipy(n: int) -> None:
    trace = run(lbfgs(SPEC), Executor(rosenbrock, rosenbrock_start(n)))
    assert trace.ended is not None
    assert trace.ended.status == "converged"
    last = trace.iterated[-1]
    assert last.loss < 1e-9
    options = {"gtol": 1e-6, "ftol": 0, "maxcor": 10, "maxiter": 10_000, "maxfun": 10_000}
    peer = minimize(rosenbrock, rosenbrock_start(n), jac=True, method="L-BFGS-B", options=options)
    assert last.evaluations <= 1.2 * peer.nfev
    assert_strong_wolfe(trace, SPEC, c2=0.9)


@pytest.fixture(scope="module")
def convex() -> tuple[Function, Function, Array, float]:
    """Softmax regression with L2 on digits in float32 and float64, a start, SciPy's optimum."""
    spec = dense_network(64, 10)
    exact = network_loss(spec, DIGITS, l2=1e-3, dtype="float64")
    start = start_of(spec, 3, "float64")
    options = {"gtol": 1e-8, "ftol": 0, "maxiter": 10_000, "maxfun": 10_000}
    peer = minimize(exact, start, jac=True, method="L-BFGS-B", options=options)
    return network_loss(spec, DIGITS, l2=1e-3), exact, start, float(peer.fun)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_optimum_of_a_convex_problem_is_scipys(
    convex: tuple[Function, Function, Array, float], dtype: str
) -> None:
    """Design, rung 7: to 1e-6, in float32 too, though its losses are no better than that."""
    single, exact, start, optimum = convex
    executor = Executor(single if dtype == "float32" else exact, start.astype(dtype))
    trace = run(lbfgs(SPEC), executor)
    assert trace.ended is not None
    assert trace.ended.status == "converged"
    reached = exact(executor[PARAMETERS].astype(np.float64))[0]
    assert abs(reached - optimum) < 1e-6
    assert abs(trace.iterated[-1].loss - optimum) < 1e-6
    assert any(iterated.approximate for iterated in trace.iterated) == (dtype == "float32")
    assert_strong_wolfe(trace, SPEC, c2=0.9)


def test_a_tolerance_below_rounding_ends_honestly(
    convex: tuple[Function, Function, Array, float],
) -> None:
    single, exact, start, optimum = convex
    executor = Executor(single, start.astype(np.float32))
    trace = run(lbfgs(SPEC, tolerance=1e-14), executor)
    assert trace.ended is not None
    assert trace.ended.status == "line_search_failed"
    assert "rounding" in trace.ended.reason
    assert len(trace.iterated) < 600
    assert trace.iterated[-1].gradient_norm < 1e-6
    assert abs(exact(executor[PARAMETERS].astype(np.float64))[0] - optimum) < 1e-6


@pytest.mark.parametrize("activation", ["sigmoid", "relu"])
def test_digits_after_25_evaluations_beside_scipy(activation: str) -> None:
    """64-64-10 in float32, median over 5 seeds: at most 1.15 times SciPy's loss."""
    spec = dense_network(64, 64, 10, activation=activation)
    function = network_loss(spec, DIGITS)
    ratios = []
    for seed in range(5):
        start = start_of(spec, seed)
        ours = loss_after(function, start, 25, history=10)
        ratios.append(ours / scipy_loss_after(function, start, 25, history=10))
    assert median(ratios) <= 1.15
