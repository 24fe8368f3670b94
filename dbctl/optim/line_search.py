"""A step along a direction that meets the strong Wolfe conditions (Moré and Thuente 1994).

Rules of this file: floats only. The search is told value and slope at `alpha` and names the next
alpha or its outcome; it never calls the model, so that a trial may be a whole cluster's work.

Theory of operation. phi(alpha) = f(x + alpha d). The best point so far is one end of an interval
that is known to hold a good step once it is *bracketed*; until then trials move outwards, at least
1.1 and at most 4 times the last move. A trial is placed by cubic and quadratic interpolation of
values and slopes, by halves when the interval shrinks too slowly. After a trial that is the best so
far without sufficient decrease, the interval is chosen for phi less the line of that decrease.
(Once a trial had it and a slope >= 0, the interval ends there, so that every better trial has it
too: stage two of the paper needs no mark.) The steps are those of MINPACK-2's dcsrch and dcstep.
Added here:

- A trial that is not finite is a wall: the next one goes back towards the best point (a tenth from
  0, else half the way), and moves outwards stay below half the way to the wall.
- Rounding. Near an optimum in float32 the values differ by less than their own error while the
  slopes are still good. Where a value is within NOISE |phi(0)| of phi(0) and shows no sufficient
  decrease, what the slopes say, phi(0) + alpha (phi'(0) + phi'(alpha)) / 2, stands for it. The
  condition of sufficient decrease then reads phi'(alpha) <= (2 c1 - 1) phi'(0): the approximate
  Wolfe condition of Hager and Zhang (2005, section 2). A step taken so has the outcome
  APPROXIMATE, never ACCEPTED. The condition on the slope is the strong one for both.

J. J. Moré and D. J. Thuente, Line search algorithms with guaranteed sufficient decrease, ACM
TOMS 20 (1994). W. W. Hager and H. Zhang, A new conjugate gradient method with guaranteed descent
and an efficient line search, SIAM J. Optim. 16 (2005).
"""

from __future__ import annotations

from math import inf, isfinite, nan, sqrt
from typing import NamedTuple

ACCEPTED = "accepted"
APPROXIMATE = "approximate"
FAILED = "failed"

NOISE = 1e-6
_SHRINK = 0.66
_EXTRAPOLATE_LEAST = 1.1
_EXTRAPOLATE_MOST = 4.0


class Point(NamedTuple):
    """`value` is phi(alpha) - phi(0): a difference of close numbers is exact, their sum is not."""

    alpha: float
    value: float
    slope: float


class LineSearch:
    """One search: evaluate at `alpha`, `tell` it, until there is an `outcome`.

    outcome: None while the search goes on; ACCEPTED or APPROXIMATE: `alpha` as last told is the
    step; FAILED: `reason` says why. At most `max_trials` trials.
    """

    def __init__(
        self,
        value: float,
        slope: float,
        step: float,
        *,
        c1: float,
        c2: float,
        max_trials: int,
        noise: float = NOISE,
    ) -> None:
        assert slope < 0 < step, (slope, step)
        assert isfinite(value)
        assert isfinite(slope)
        assert 0 < c1 <= c2 < 1, (c1, c2)
        self.alpha = step
        self.outcome: str | None = None
        self.reason = ""
        self.n_trials = 0
        self._value = value
        self._start = Point(0.0, 0.0, slope)
        self._c1, self._c2, self._max_trials = c1, c2, max_trials
        self._noise = noise * abs(value)
        self._best = self._other = self._start
        self._bracketed = False
        self._widths = (inf, inf)  # of the interval, two steps ago and one
        self._wall = inf

    def tell(self, value: float, slope: float) -> None:
        """What was found at `alpha`; either may be NaN or infinite."""
        assert self.outcome is None
        self.n_trials += 1
        finite = isfinite(value) and isfinite(slope)
        if finite:
            self._judge(Point(self.alpha, value - self._value, slope))
        else:
            self._step_back()
        if self.outcome is None and self.n_trials >= self._max_trials:
            self._fail(f"none of {self.n_trials} trials met the strong Wolfe conditions")
        if self.outcome == FAILED and not finite:
            self.reason += "; the last one was not finite"
        elif self.outcome == FAILED and abs(value - self._value) <= self._noise:
            self.reason += "; the loss changes by no more than its rounding"

    def _fail(self, reason: str) -> None:
        self.outcome, self.reason = FAILED, reason

    def _sufficient(self, trial: Point) -> bool:
        return trial.value <= trial.alpha * (self._c1 * self._start.slope)

    def _judge(self, trial: Point) -> None:
        start_slope = self._start.slope
        level = abs(trial.slope) <= -self._c2 * start_slope
        if self._sufficient(trial):
            if level:
                self.outcome = ACCEPTED
        elif abs(trial.value) <= self._noise:
            trial = trial._replace(value=trial.alpha * (start_slope + trial.slope) / 2)
            if level and trial.slope <= (2 * self._c1 - 1) * start_slope:
                self.outcome = APPROXIMATE
        if self.outcome is None:
            self._advance(trial)

    def _step_back(self) -> None:
        base, alpha = self._best.alpha, self.alpha
        if alpha > base:
            self._wall = min(self._wall, alpha)
        self.alpha = base + (0.5 if base else 0.1) * (alpha - base)
        if self.alpha in (base, alpha):
            self._fail("the way back to the last finite value is closed")

    def _advance(self, trial: Point) -> None:
        """Choose the interval and the next alpha: the loop body of MINPACK-2's dcsrch."""
        tilt = self._c1 * self._start.slope
        if self._sufficient(trial) or trial.value > self._best.value:
            tilt = 0.0
        best, other, alpha, self._bracketed = _choose(
            _tilted(self._best, -tilt),
            _tilted(self._other, -tilt),
            _tilted(trial, -tilt),
            bracketed=self._bracketed,
        )
        self._best, self._other = _tilted(best, tilt), _tilted(other, tilt)
        if self._bracketed:
            self.alpha = self._inside(alpha)
        else:
            self.alpha = min(alpha, (self._best.alpha + self._wall) / 2)

    def _inside(self, alpha: float) -> float:
        """`alpha`, or the middle where it is not inside or the interval shrinks too slowly."""
        best, other = self._best.alpha, self._other.alpha
        low, high, width = min(best, other), max(best, other), abs(other - best)
        if width >= _SHRINK * self._widths[0] or not low < alpha < high:
            alpha = best + 0.5 * (other - best)
        self._widths = (self._widths[1], width)
        if not low < alpha < high:
            self._fail("the interval closed and no point in it meets the strong Wolfe conditions")
        return alpha


def _tilted(point: Point, slope: float) -> Point:
    return Point(point.alpha, point.value + point.alpha * slope, point.slope + slope)


def _choose(
    best: Point, other: Point, trial: Point, *, bracketed: bool
) -> tuple[Point, Point, float, bool]:
    """The new interval, the next alpha and whether it is bracketed: MINPACK-2's dcstep."""
    turned = trial.slope * best.slope < 0
    if trial.value > best.value:  # a minimum lies between: closer to best by the cubic
        cubic, quadratic = _cubic(best, trial), _quadratic(best, trial)
        near = abs(cubic - best.alpha) < abs(quadratic - best.alpha)
        alpha = cubic if near else cubic + (quadratic - cubic) / 2
        return best, trial, alpha, True
    if turned:  # lower, past a minimum
        cubic, secant = _cubic(trial, best), _secant(trial, best)
        far = abs(cubic - trial.alpha) > abs(secant - trial.alpha)
        return trial, best, cubic if far else secant, True
    if abs(trial.slope) < abs(best.slope):  # lower, and the slope becomes smaller
        alpha = _onwards(best, other, trial, bracketed=bracketed)
    elif bracketed:
        alpha = _cubic(trial, other)
    else:
        alpha = trial.alpha + _EXTRAPOLATE_MOST * (trial.alpha - best.alpha)
    return trial, other, alpha, bracketed


def _onwards(best: Point, other: Point, trial: Point, *, bracketed: bool) -> float:
    """dcstep's third case: the minimum of the cubic counts only beyond the trial."""
    gap = trial.alpha - best.alpha
    most = trial.alpha + _EXTRAPOLATE_MOST * gap
    least = trial.alpha + (_EXTRAPOLATE_LEAST * gap if best.alpha else 0.0)
    cubic, secant = _cubic(trial, best), _secant(trial, best)
    if not (cubic - trial.alpha) * gap > 0:
        cubic = (inf if gap > 0 else -inf) if bracketed else most
    near = abs(cubic - trial.alpha) < abs(secant - trial.alpha)
    if bracketed:
        alpha = cubic if near else secant
        limit = trial.alpha + _SHRINK * (other.alpha - trial.alpha)
        return min(limit, alpha) if gap > 0 else max(limit, alpha)
    return max(least, min(most, secant if near else cubic))


def _cubic(a: Point, b: Point) -> float:
    """The minimum of the cubic with the values and slopes of both points, seen from a.

    NaN where there is none.
    """
    gap = b.alpha - a.alpha
    theta = 3 * _divide(a.value - b.value, gap) + a.slope + b.slope
    scale = max(abs(theta), abs(a.slope), abs(b.slope))
    square = _divide(theta, scale) ** 2 - _divide(a.slope, scale) * _divide(b.slope, scale)
    if not square > 0:
        return nan
    gamma = scale * sqrt(square) * (1 if gap > 0 else -1)
    return a.alpha + _divide(gamma - a.slope + theta, gamma - a.slope + gamma + b.slope) * gap


def _quadratic(a: Point, b: Point) -> float:
    """The minimum of the parabola with both values and the slope of a."""
    gap = b.alpha - a.alpha
    return a.alpha + _divide(a.slope, _divide(a.value - b.value, gap) + a.slope) / 2 * gap


def _secant(a: Point, b: Point) -> float:
    """Where the line through both slopes is 0."""
    return a.alpha + _divide(a.slope, a.slope - b.slope) * (b.alpha - a.alpha)


def _divide(a: float, b: float) -> float:
    return a / b if b else nan
