"""dbctl/optim/iteration.py: what holds for every batch method (paper A, section 4.2)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from math import inf, isfinite, nan
from typing import Any, NamedTuple

import numpy as np
import pytest
from batch_cases import assert_strong_wolfe, quadratic, rosenbrock, rosenbrock_start
from batch_twin import Array, Executor, Function, Trace, run

from dbctl.optim import conjugate_gradient, descent, lbfgs
from dbctl.optim.batch import DEFAULT_C2, BatchMethod, LineSearchSpec, c2_of
from dbctl.optim.commands import DIRECTION, GRADIENT, PARAMETERS, Command, Evaluate, Method


class Named(NamedTuple):
    name: BatchMethod
    make: Callable[..., Method]
    saved: tuple[str, ...]


METHODS = [
    Named("lbfgs", lbfgs.lbfgs, lbfgs.saved_names(10)),
    Named("gradient_descent", descent.gradient_descent, descent.saved_names()),
    Named(
        "conjugate_gradient",
        conjugate_gradient.conjugate_gradient,
        conjugate_gradient.saved_names(),
    ),
]
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
every_dtype = pytest.mark.parametrize("dtype", ["float32", "float64"])
SPEC = LineSearchSpec()


def minimise(
    method: Named, function: Function, start: Array, *, iterations: int = 300, **options: Any
) -> tuple[Trace, Executor]:
    executor = Executor(function, np.asarray(start))
    trace = run(method.make(SPEC, **options), executor, iterations=iterations)
    assert_strong_wolfe(trace, SPEC, c2=DEFAULT_C2[method.name])
    return trace, executor


# ----------------------------------------------------------------- what a method asks for (A, 4.2)


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for part in value:
            yield from leaves(part)
    else:
        yield value


@every_method
def test_only_names_and_scalars_travel(method: Named) -> None:
    """A, section 4.2: no request and no answer has a part that is as long as the parameters."""
    asked = []

    class Watched(Executor):
        def carry_out(self, request: Command | Evaluate) -> Any:
            answer = super().carry_out(request)
            asked.append((request, answer))
            return answer

    sizes = []
    for n in (10, 1000):
        asked.clear()
        run(method.make(SPEC), Watched(rosenbrock, rosenbrock_start(n)), iterations=30)
        assert asked
        assert {type(leaf) for leaf in leaves(tuple(asked))} <= {str, float}
        sizes.append(max(len(list(leaves(pair))) for pair in asked))
    assert sizes[0] == sizes[1]


@every_method
@every_dtype
def test_two_commands_an_iteration_and_one_for_a_restart(method: Named, dtype: str) -> None:
    """A, section 4.2: trials apart, the coordinator speaks to the shards at most 4 times."""
    trace, _ = minimise(method, rosenbrock, rosenbrock_start(10).astype(dtype))
    assert len(trace.iterated) > 50
    for iterated, requests in list(zip(trace.iterated, trace.requests, strict=False))[1:]:
        commands = [request for request in requests if isinstance(request, Command)]
        assert len(commands) == 2 or (iterated.restarted and len(commands) == 3)


@every_method
def test_a_trial_is_one_request(method: Named) -> None:
    """Its move, its gradient, its slope and its norm, so that a trial is one round trip."""
    trace, executor = minimise(method, rosenbrock, rosenbrock_start(4))
    last = trace.iterated[-1]
    assert last.evaluations == executor.n_evaluations
    evaluations = [r for asked in trace.requests for r in asked if isinstance(r, Evaluate)]
    assert len(evaluations) == last.evaluations
    assert all(request.before for request in evaluations[1:])


# ------------------------------------------------------------------------------------- what it says


@every_method
@every_dtype
def test_iterated_says_what_is_so(method: Named, dtype: str) -> None:
    seen = []
    executor = Executor(rosenbrock, rosenbrock_start(6).astype(dtype))

    def watch(iterated: Any) -> None:
        loss, gradient = rosenbrock(executor[PARAMETERS])
        assert iterated.loss == loss
        np.testing.assert_array_equal(executor[GRADIENT], gradient.astype(dtype))
        norm = np.linalg.norm(executor[GRADIENT].astype(np.float64))
        assert iterated.gradient_norm == pytest.approx(norm, rel=1e-12)
        seen.append(executor[PARAMETERS].copy())

    trace = run(method.make(SPEC), executor, iterations=40, watch=watch)
    assert [iterated.iteration for iterated in trace.iterated] == list(range(len(seen)))
    first, *rest = trace.iterated
    assert first.evaluations == 1
    assert (first.step_length, first.slope_before, first.slope) == (0.0, 0.0, 0.0)
    np.testing.assert_array_equal(seen[0], rosenbrock_start(6).astype(dtype))
    for before, after in zip(trace.iterated, rest, strict=False):
        assert after.loss_before == before.loss
        assert after.loss < before.loss or after.approximate


@every_method
def test_the_first_trial_has_length_one(method: Named) -> None:
    """As in L-BFGS-B: whatever the scale of the loss."""
    for scale in (1e-6, 1.0, 1e6):
        tried = []

        def function(x: Array, scale: float = scale, tried: list[Array] = tried) -> Any:
            tried.append(x)
            loss, gradient = rosenbrock(x)
            return scale * loss, scale * gradient

        run(method.make(SPEC), Executor(function, rosenbrock_start(4)), evaluations=2)
        assert np.linalg.norm(tried[1] - tried[0]) == pytest.approx(1.0)


@every_method
@pytest.mark.parametrize("tolerance", [1e-2, 1e-4])
def test_it_ends_at_the_first_gradient_within_the_tolerance(
    method: Named, tolerance: float
) -> None:
    function, minimum = quadratic(8, condition=20)
    trace, executor = minimise(method, function, np.zeros(8), tolerance=tolerance)
    assert trace.ended is not None
    assert trace.ended.status == "converged"
    norms = [iterated.gradient_norm for iterated in trace.iterated]
    assert norms[-1] <= tolerance < min(norms[:-1])
    assert np.abs(executor[PARAMETERS] - minimum).max() < tolerance
    assert not trace.requests[-1]


@every_method
def test_limits_are_those_of_the_specification(method: Named) -> None:
    tight = LineSearchSpec(c1=0.01, c2=0.02, max_trials=40)
    trace = run(method.make(tight), Executor(rosenbrock, rosenbrock_start(4)), iterations=30)
    assert_strong_wolfe(trace, tight, c2=0.02)
    assert c2_of(tight, method.name) == 0.02
    assert c2_of(SPEC, method.name) == {"conjugate_gradient": 0.1}.get(method.name, 0.9)
    one = LineSearchSpec(max_trials=1)
    trace = run(method.make(one), Executor(rosenbrock, rosenbrock_start(4)))
    assert trace.ended is not None
    assert trace.ended.status == "line_search_failed"


@pytest.mark.parametrize("method", [METHODS[0], METHODS[2]], ids=lambda method: method.name)
@pytest.mark.parametrize("slope", [1e-9, 0.0, nan, -inf])
def test_a_direction_that_does_not_descend_as_measured_is_replaced(
    method: Named, slope: float
) -> None:
    """By the steepest descent, whatever the memory's scalars had promised."""

    class Lying(Executor):
        def carry_out(self, request: Command | Evaluate) -> Any:
            answer = super().carry_out(request)
            made = isinstance(request, Command) and request.rows == (DIRECTION,)
            return (slope,) if made and self.n_commands == 7 else answer

    trace = run(method.make(SPEC), Lying(rosenbrock, rosenbrock_start(4)), iterations=6)
    assert [i.iteration for i in trace.iterated if i.restarted] == [4]
    replaced, before = trace.iterated[4], trace.iterated[3]
    assert [type(request) for request in trace.requests[4]].count(Command) == 3
    assert replaced.slope_before == pytest.approx(-(before.gradient_norm**2))


# ------------------------------------------------------------------------- functions that misbehave


def sphere(x: Array) -> tuple[float, Array]:
    wide = x.astype(np.float64)
    return float(wide @ wide) / 2, wide


def small_bowl(bad: float, *, part: str) -> Function:
    """A bowl in a ball so small that a first step of length 1 leads out of it, to `bad` values."""
    bowl, _ = quadratic(4, condition=20)

    def function(x: Array) -> tuple[float, Array]:
        loss, gradient = bowl(100 * x)
        gradient *= 100
        if np.abs(x).max() > 0.05:
            loss = bad if part == "loss" else loss
            gradient[-1] = bad if part == "gradient" else gradient[-1]
        return loss, gradient

    return function


@every_method
@every_dtype
@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("part", ["loss", "gradient"])
def test_large_steps_that_are_not_finite_are_stepped_back_from(
    method: Named, dtype: str, bad: float, part: str
) -> None:
    trace, executor = minimise(
        method, small_bowl(bad, part=part), np.zeros(4, dtype), tolerance=0.01
    )
    assert trace.ended is not None
    assert trace.ended.status == "converged"
    assert trace.iterated[1].evaluations > 2
    assert trace.iterated[-1].loss == pytest.approx(1)
    assert executor.n_evaluations < 2 * len(trace.iterated) + 10


@every_method
@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("part", ["loss", "gradient"])
def test_a_start_that_is_not_finite_ends_at_once(method: Named, bad: float, part: str) -> None:
    loss, gradient = (bad, 1.0) if part == "loss" else (1.0, bad)
    trace, executor = minimise(method, lambda x: (loss, x * 0 + gradient), np.ones(3))
    assert trace.ended is not None
    assert trace.ended.status == "line_search_failed"
    assert trace.ended.reason == "the loss is not finite at the start"
    assert not trace.iterated
    assert executor.n_evaluations == 1
    np.testing.assert_array_equal(executor[PARAMETERS], np.ones(3))


@every_method
def test_a_zero_gradient_at_the_start_is_converged(method: Named) -> None:
    trace, executor = minimise(method, sphere, np.zeros(3, np.float32))
    assert trace.ended is not None
    assert trace.ended.status == "converged"
    assert [iterated.iteration for iterated in trace.iterated] == [0]
    assert executor.n_evaluations == 1
    assert executor.n_commands == 0


@every_method
@every_dtype
@pytest.mark.parametrize(
    "function",
    [
        lambda x: (1.0, np.ones_like(x)),
        lambda x: (1 - sphere(x)[0], -sphere(x)[1]),
        lambda x: (1 + sphere(x)[0], -sphere(x)[1]),
        lambda x: (float(x.sum()), np.ones_like(x)),
        lambda x: (1e-3 if (x == 0.5).all() else nan, np.ones_like(x)),
    ],
    ids=["flat", "falls without end", "wrong sign", "a slope", "a point alone"],
)
def test_where_no_step_is_found_the_start_is_kept(
    method: Named, function: Function, dtype: str
) -> None:
    start = np.full(4, 0.5, dtype)
    trace, executor = minimise(method, function, start)
    assert trace.ended is not None
    assert trace.ended.status == "line_search_failed"
    assert "from loss" in trace.ended.reason
    assert executor.n_evaluations == 1 + SPEC.max_trials
    np.testing.assert_array_equal(executor[PARAMETERS], start)


def worse_later(after: int) -> Function:
    """Rosenbrock, whose gradient turns round after some evaluations."""
    calls = [0]

    def function(x: Array) -> tuple[float, Array]:
        calls[0] += 1
        loss, gradient = rosenbrock(x)
        return loss, -gradient if calls[0] > after else gradient

    return function


@every_method
@every_dtype
@pytest.mark.parametrize("after", [2, 17, 30])
def test_a_gradient_that_goes_wrong_keeps_the_best_point(
    method: Named, dtype: str, after: int
) -> None:
    """Two searches that fail, one along the memory's direction and one down the steepest."""
    trace, executor = minimise(method, worse_later(after), rosenbrock_start(4).astype(dtype))
    assert trace.ended is not None
    assert trace.ended.status == "line_search_failed"
    last = trace.iterated[-1]
    assert last.loss == min(iterated.loss for iterated in trace.iterated)
    assert rosenbrock(executor[PARAMETERS])[0] == last.loss
    assert executor.n_evaluations <= last.evaluations + 2 * SPEC.max_trials
    assert executor.n_evaluations > last.evaluations


@every_method
def test_a_concave_stretch_is_crossed(method: Named) -> None:
    """y.s of a short step is negative near a maximum; the search goes on until it is not."""

    def function(x: Array) -> tuple[float, Array]:
        wide = x.astype(np.float64)
        return float(np.cos(wide).sum()), -np.sin(wide)

    trace, executor = minimise(method, function, np.array([1e-3, -2e-3, 0.3]))
    assert trace.ended is not None
    assert trace.ended.status == "converged"
    assert trace.iterated[-1].loss == pytest.approx(-3)
    assert isfinite(executor[PARAMETERS].sum())


# ----------------------------------------------------------------------------------- stop and go on


class Batches:
    """Quadratics that take turns: the batch is a new one after each Iterated."""

    def __init__(self, n: int, *, alike: float) -> None:
        rng = np.random.default_rng(0)
        noise = rng.standard_normal((7, n, n)) / n
        matrices = np.eye(n) + np.diag(np.linspace(0, 9, n)) + (1 - alike) * noise
        self.matrices = [matrix @ matrix.T for matrix in matrices]
        self.index = 0

    @property
    def matrix(self) -> Array:
        return self.matrices[self.index % 7]

    def __call__(self, x: Array) -> tuple[float, Array]:
        gradient = self.matrix @ (x.astype(np.float64) - 1)
        return float((x - 1) @ gradient) / 2, gradient

    def next(self, iterated: Any) -> None:
        self.index = iterated.iteration + 1


@every_method
@every_dtype
@pytest.mark.parametrize("resample", [False, True])
@pytest.mark.parametrize("stop", [0, 1, 3, 20])
def test_stopped_and_gone_on_is_never_stopped(
    method: Named, dtype: str, resample: bool, stop: int
) -> None:
    """Bit for bit, given the saved vectors, and without evaluating again (no batch: rung 9)."""

    def new(start: Array) -> tuple[Executor, Callable[[Any], None]]:
        if not resample:
            return Executor(rosenbrock, start), lambda iterated: None
        batches = Batches(len(start), alike=0.9)
        return Executor(batches, start), batches.next

    start = rosenbrock_start(8).astype(dtype)
    whole, watch = new(start)
    expected = run(method.make(SPEC, resample=resample), whole, iterations=40, watch=watch)
    assert len(expected.iterated) > stop + 2

    before, watch = new(start)
    begun = run(method.make(SPEC, resample=resample), before, iterations=stop, watch=watch)
    state = json.loads(json.dumps(begun.iterated[-1].state))
    after, watch = new(start)
    after.vectors = {name: before[name].copy() for name in method.saved}
    watch(begun.iterated[-1])
    gone_on = run(
        method.make(SPEC, state=state, resample=resample), after, iterations=40, watch=watch
    )
    assert begun.iterated + gone_on.iterated == expected.iterated
    assert gone_on.requests == expected.requests[stop + 1 :]
    assert gone_on.ended == expected.ended
    for name in (*method.saved, "trial", "trial_gradient"):
        np.testing.assert_array_equal(after[name], whole[name])


@every_method
def test_going_on_from_a_converged_state_is_converged(method: Named) -> None:
    function, _ = quadratic(5, condition=5)
    trace, executor = minimise(method, function, np.zeros(5))
    state = json.loads(json.dumps(trace.iterated[-1].state))
    n_before = executor.n_evaluations
    again = run(method.make(SPEC, state=state), executor)
    assert again.ended == trace.ended
    assert again.iterated == []
    assert executor.n_evaluations == n_before


@every_method
def test_a_state_is_not_changed_by_going_on(method: Named) -> None:
    trace, _ = minimise(method, rosenbrock, rosenbrock_start(4), iterations=5)
    early = json.dumps(trace.iterated[2].state)
    trace, _ = minimise(method, rosenbrock, rosenbrock_start(4), iterations=20)
    assert json.dumps(trace.iterated[2].state) == early


# -------------------------------------------------------------------------- a new batch each time


@every_method
def test_with_a_new_batch_loss_and_gradient_are_measured_again(method: Named) -> None:
    batches = Batches(6, alike=0.9)
    executor = Executor(batches, np.zeros(6))
    trace = run(method.make(SPEC, resample=True), executor, iterations=20, watch=batches.next)
    for requests in trace.requests[1:]:
        again = requests[0]
        assert isinstance(again, Evaluate)
        assert (again.point, again.gradient, again.before) == (PARAMETERS, GRADIENT, ())
    for before, after in zip(trace.iterated, trace.iterated[1:], strict=False):
        assert after.loss_before != before.loss
        assert after.loss < after.loss_before
    assert_strong_wolfe(trace, SPEC, c2=DEFAULT_C2[method.name])
    assert trace.iterated[-1].loss < 1e-2 * trace.iterated[0].loss


@every_method
def test_a_new_batch_that_is_not_finite_ends_the_run(method: Named) -> None:
    def function(x: Array) -> tuple[float, Array]:
        loss, gradient = rosenbrock(x)
        return (nan if bad[0] else loss), gradient

    bad = [False]

    def watch(iterated: Any) -> None:
        bad[0] = iterated.iteration >= 3

    executor = Executor(function, rosenbrock_start(4))
    trace = run(method.make(SPEC, resample=True), executor, watch=watch)
    assert trace.ended is not None
    assert trace.ended.status == "line_search_failed"
    assert trace.ended.reason == "the loss is not finite on the new batch"
    assert rosenbrock(executor[PARAMETERS])[0] == trace.iterated[-1].loss


@every_method
def test_with_a_new_batch_its_gradient_says_whether_it_is_over(method: Named) -> None:
    """A sample's minimum is not that of the next sample."""
    targets = iter([0.0, 0.0, 5.0])
    target = [next(targets)]

    def function(x: Array) -> tuple[float, Array]:
        return sphere(x - target[0])

    def watch(iterated: Any) -> None:
        target[0] = next(targets, 5.0)

    executor = Executor(function, np.full(2, 0.5))
    trace = run(method.make(SPEC, resample=True), executor, watch=watch, iterations=30)
    assert trace.ended is not None
    assert trace.ended.status == "converged"
    np.testing.assert_allclose(executor[PARAMETERS], 5.0, atol=1e-5)
