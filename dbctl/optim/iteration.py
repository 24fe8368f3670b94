"""What L-BFGS, conjugate gradient and steepest descent have in common: the loop of iterations.

Rules of this file: names and scalars only (optim/commands.py). The methods differ in a `Memory`:
what it keeps of the past and which direction follows from it.

Theory of operation. One iteration, with the requests it yields:

    Evaluate   only with `resample`: loss and gradient at PARAMETERS on a new batch, so that both
               gradients of a difference are of one batch
    Command    DIRECTION from what the memory says; answers the slope d.g
    Evaluate   each trial of the line search: TRIAL = PARAMETERS + alpha DIRECTION, its gradient,
               slope and squared norm
    Command    the accepted trial becomes PARAMETERS and GRADIENT by a swap; answers what the
               memory wants to know of it
    Iterated   the iteration is over; `state` is all that the next one needs besides the vectors

So two Commands an iteration whatever the size of the memory, and one more when the memory's
direction does not descend or its line search fails: then the memory is dropped and the steepest
descent tried once. PARAMETERS is only ever the start or an accepted trial, so it is finite and the
best of these (to the rounding of an `approximate` step). Where the tolerance is below what rounding
allows, approximate steps could go on for ever: STALLED iterations of which none lowers the least
loss or the least gradient so far end the run, as a search that failed.

With `resample` the batch is a new one after each Iterated, the one of iteration 0 included, and the
method is converged when the gradient on the new batch is small; losses of different batches are not
compared.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import asdict, dataclass
from math import inf, isfinite, sqrt
from typing import Any, NamedTuple, Protocol

from dbctl.optim.batch import LineSearchSpec
from dbctl.optim.commands import (
    DIRECTION,
    GRADIENT,
    PARAMETERS,
    TRIAL,
    TRIAL_GRADIENT,
    Command,
    Ended,
    Evaluate,
    Evaluation,
    Iterated,
    Method,
    Request,
    Scalars,
    Term,
)
from dbctl.optim.line_search import ACCEPTED, APPROXIMATE, FAILED, LineSearch

CONVERGED = "converged"
LINE_SEARCH_FAILED = "line_search_failed"
STALLED = 30

# After these PARAMETERS and GRADIENT are those of the accepted trial, TRIAL and TRIAL_GRADIENT
# those of the point before.
TAKE_TRIAL = ((PARAMETERS, TRIAL), (GRADIENT, TRIAL_GRADIENT))
STEEPEST: tuple[Term, ...] = ((-1.0, GRADIENT),)


class Direction(NamedTuple):
    """`scaled`: a step of 1 is the natural first trial; else it follows from the last step."""

    terms: tuple[Term, ...]
    scaled: bool


class Memory(Protocol):
    """What a method keeps of past iterations, as scalars; the vectors are with the executor."""

    def is_empty(self) -> bool:
        """Nothing of an earlier iteration is kept."""

    def forget(self) -> None:
        """The next direction is the steepest descent."""

    def direction(self) -> Direction | None:
        """None: the steepest descent, because there is no memory or it does not descend."""

    def accept(self) -> Command:
        """The command with the swaps of `TAKE_TRIAL`."""

    def accepted(self, dots: Scalars) -> None:
        """The answer to `accept`."""

    def columns(self) -> tuple[str, ...]:
        """Names whose dots with GRADIENT are wanted when it is measured at PARAMETERS."""

    def renew(self, dots: Scalars) -> None:
        """The dots of GRADIENT with itself and with `columns`."""

    def state(self) -> dict[str, Any]:
        """JSON values."""


@dataclass(kw_only=True)
class _Place:
    """PARAMETERS in scalars.

    decrease: alpha d.g of the last step, None before the first. least_loss, least_squared_norm: so
    far; stalled: iterations since either became less.
    """

    iteration: int = 0
    evaluations: int = 0
    loss: float = inf
    squared_norm: float = inf
    decrease: float | None = None
    least_loss: float = inf
    least_squared_norm: float = inf
    stalled: int = 0

    @property
    def gradient_norm(self) -> float:
        return sqrt(self.squared_norm)

    def compare(self) -> None:
        """Count this point among those that lower neither loss nor gradient, if it does not."""
        lower = self.loss < self.least_loss or self.squared_norm < self.least_squared_norm
        self.stalled = 0 if lower else self.stalled + 1
        self.least_loss = min(self.loss, self.least_loss)
        self.least_squared_norm = min(self.squared_norm, self.least_squared_norm)


class _Step(NamedTuple):
    """A line search that is over, and the trial it ended with."""

    outcome: str
    reason: str
    alpha: float
    loss: float
    squared_norm: float
    slope_before: float
    slope: float


def iterate(
    memory: Memory,
    line_search: LineSearchSpec,
    *,
    c2: float,
    tolerance: float,
    state: dict[str, Any] | None,
    resample: bool,
) -> Method:
    """Iterations until the gradient's 2-norm is at most `tolerance` or no step is found.

    `state`: that of the Iterated after which to go on; the memory has its part of it already.
    """
    if state is None:
        place = _Place()
        dots = yield from _measure(place, memory.columns())
        if not dots:
            return Ended(status=LINE_SEARCH_FAILED, reason="the loss is not finite at the start")
        memory.renew(dots)
        place.compare()
        yield _start_of(place, memory)
    else:
        place = _Place(**state["place"])
    search = _Searches(line_search, c2, place)
    while True:
        if resample:
            dots = yield from _measure(place, memory.columns())
            if not dots:
                reason = "the loss is not finite on the new batch"
                return Ended(status=LINE_SEARCH_FAILED, reason=reason)
            memory.renew(dots)
        if place.gradient_norm <= tolerance:
            reason = f"gradient norm {place.gradient_norm:.3g}, tolerance {tolerance:g}"
            return Ended(status=CONVERGED, reason=reason)
        if place.stalled >= STALLED and not resample:
            return Ended(status=LINE_SEARCH_FAILED, reason=_stalled_at(place))
        restarted, step = yield from search.along(memory)
        if step.outcome == FAILED:
            at = f"loss {place.loss:.9g}, gradient norm {place.gradient_norm:.3g}"
            return Ended(status=LINE_SEARCH_FAILED, reason=f"{step.reason}, from {at}")
        dots = yield memory.accept()
        memory.accepted(dots)
        yield _after(place, step, memory, restarted=restarted)


def _measure(place: _Place, columns: tuple[str, ...]) -> Generator[Request, Any, Scalars]:
    """Loss and gradient at PARAMETERS, and the gradient's dots; none where it is not finite."""
    evaluation: Evaluation = yield Evaluate(
        point=PARAMETERS, gradient=GRADIENT, rows=(GRADIENT,), columns=(GRADIENT, *columns)
    )
    place.evaluations += 1
    if not (isfinite(evaluation.loss) and all(map(isfinite, evaluation.dots))):
        return ()
    place.loss, place.squared_norm = evaluation.loss, evaluation.dots[0]
    return evaluation.dots


class _Searches:
    """The line searches of a method."""

    def __init__(self, spec: LineSearchSpec, c2: float, place: _Place) -> None:
        self._spec, self._c2, self._place = spec, c2, place

    def along(self, memory: Memory) -> Generator[Request, Any, tuple[bool, _Step]]:
        """Whether the memory was dropped, and the step: the memory's, else steepest descent."""
        had_memory = not memory.is_empty()
        direction = memory.direction()
        if direction is not None:
            slope = yield from _combine(direction.terms)
            if -inf < slope < 0:
                first = 1.0 if direction.scaled else self._first(slope)
                step = yield from self._search(slope, first)
                if step.outcome != FAILED:
                    return False, step
        memory.forget()
        slope = yield from _combine(STEEPEST)
        step = yield from self._search(slope, self._first(slope))
        return had_memory, step

    def _first(self, slope: float) -> float:
        """The first trial: the same first-order change as the last step (Nocedal and Wright,
        Numerical Optimization, 3.5); without one a move of length 1, as L-BFGS-B does.
        """
        if self._place.decrease is None:
            return 1.0 / self._place.gradient_norm
        return self._place.decrease / slope

    def _search(self, slope: float, first: float) -> Generator[Request, Any, _Step]:
        place, spec = self._place, self._spec
        search = LineSearch(
            place.loss, slope, first, c1=spec.c1, c2=self._c2, max_trials=spec.max_trials
        )
        while True:
            alpha = search.alpha
            evaluation: Evaluation = yield Evaluate(
                point=TRIAL,
                gradient=TRIAL_GRADIENT,
                before=((TRIAL, ((1.0, PARAMETERS), (alpha, DIRECTION))),),
                rows=(TRIAL_GRADIENT,),
                columns=(DIRECTION, TRIAL_GRADIENT),
            )
            place.evaluations += 1
            trial_slope, squared_norm = evaluation.dots
            search.tell(evaluation.loss, trial_slope)
            if search.outcome is not None:
                break
        return _Step(
            outcome=search.outcome,
            reason=search.reason,
            alpha=alpha,
            loss=evaluation.loss,
            squared_norm=squared_norm,
            slope_before=slope,
            slope=trial_slope,
        )


def _combine(terms: tuple[Term, ...]) -> Generator[Request, Any, float]:
    """DIRECTION as the sum of `terms`; its slope as the shards measure it, rounding included."""
    dots: Scalars = yield Command(
        assign=((DIRECTION, terms),), rows=(DIRECTION,), columns=(GRADIENT,)
    )
    return dots[0]


def _stalled_at(place: _Place) -> str:
    return (
        f"{STALLED} steps lowered neither the loss nor the gradient, so that they move within their"
        f" rounding, from loss {place.loss:.9g}, gradient norm {place.gradient_norm:.3g}"
    )


def _start_of(place: _Place, memory: Memory) -> Iterated:
    step = _Step(
        outcome=ACCEPTED,
        reason="",
        alpha=0.0,
        loss=place.loss,
        squared_norm=place.squared_norm,
        slope_before=0.0,
        slope=0.0,
    )
    return _iterated(place, step, memory, loss_before=place.loss, restarted=False)


def _after(place: _Place, step: _Step, memory: Memory, *, restarted: bool) -> Iterated:
    """The accepted trial is now the place."""
    loss_before = place.loss
    place.iteration += 1
    place.loss, place.squared_norm = step.loss, step.squared_norm
    place.decrease = step.alpha * step.slope_before
    place.compare()
    return _iterated(place, step, memory, loss_before=loss_before, restarted=restarted)


def _iterated(
    place: _Place, step: _Step, memory: Memory, *, loss_before: float, restarted: bool
) -> Iterated:
    return Iterated(
        iteration=place.iteration,
        loss=place.loss,
        gradient_norm=place.gradient_norm,
        step_length=step.alpha,
        evaluations=place.evaluations,
        loss_before=loss_before,
        slope_before=step.slope_before,
        slope=step.slope,
        approximate=step.outcome == APPROXIMATE,
        restarted=restarted,
        state={"place": asdict(place), "memory": memory.state()},
    )
