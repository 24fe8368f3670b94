"""Nonlinear conjugate gradient of Polak and Ribière with restarts (PR+), on the same commands.

Rules of this file: names and scalars only (optim/commands.py).

Theory of operation. d+ = -g+ + beta d with beta = g+.(g+ - g) / g.g. The method restarts with -g+
where beta is negative (Powell's max(beta, 0); Gilbert and Nocedal 1992) or where d+ would not
descend, which is known beforehand from d.g+. The command that takes the trial answers the three
dots of g+. With a new batch each iteration, beta is of the old batch's two gradients and -g+ is the
new one's.
"""

from __future__ import annotations

from typing import Any

from dbctl.optim.batch import LineSearchSpec, c2_of
from dbctl.optim.commands import (
    DIRECTION,
    GRADIENT,
    PARAMETERS,
    TRIAL_GRADIENT,
    Command,
    Method,
    Scalars,
)
from dbctl.optim.iteration import TAKE_TRIAL, Direction, iterate

# The direction of the iteration before. Apart from DIRECTION, which the search of an iteration that
# is abandoned and done again has overwritten.
LAST_DIRECTION = "last_direction"


def conjugate_gradient(
    line_search: LineSearchSpec,
    *,
    tolerance: float = 1e-5,
    state: dict[str, Any] | None = None,
    resample: bool = False,
) -> Method:
    """Polak-Ribière+ (optim/iteration.py: the loop, `state` and `resample`).

    To go on from a state the executor needs the vectors `saved_names()`.
    """
    return iterate(
        _LastDirection(None if state is None else state["memory"]),
        line_search,
        c2=c2_of(line_search, "conjugate_gradient"),
        tolerance=tolerance,
        state=state,
        resample=resample,
    )


def saved_names() -> tuple[str, ...]:
    """The vectors that a later iteration reads."""
    return (PARAMETERS, GRADIENT, LAST_DIRECTION)


class _LastDirection:
    """beta of the last two gradients, None before the first step; the scalars of GRADIENT."""

    def __init__(self, state: dict[str, Any] | None) -> None:
        self._beta: float | None = None
        self._squared_norm = 0.0
        self._slope = 0.0
        if state is not None:
            self._beta = state["beta"]
            self._squared_norm, self._slope = state["squared_norm"], state["slope"]

    def state(self) -> dict[str, Any]:
        return {"beta": self._beta, "squared_norm": self._squared_norm, "slope": self._slope}

    def is_empty(self) -> bool:
        return self._beta is None

    def forget(self) -> None:
        self._beta = None

    def direction(self) -> Direction | None:
        if self._beta is None or self._beta <= 0:
            return None
        if not self._beta * self._slope - self._squared_norm < 0:
            return None
        return Direction(((-1.0, GRADIENT), (self._beta, LAST_DIRECTION)), scaled=False)

    def columns(self) -> tuple[str, ...]:
        return (LAST_DIRECTION,)

    def renew(self, dots: Scalars) -> None:
        self._squared_norm, self._slope = dots

    def accept(self) -> Command:
        # After the swap TRIAL_GRADIENT is the gradient at the point before.
        columns = (GRADIENT, TRIAL_GRADIENT, LAST_DIRECTION)
        swap = (*TAKE_TRIAL, (DIRECTION, LAST_DIRECTION))
        return Command(swap=swap, rows=(GRADIENT,), columns=columns)

    def accepted(self, dots: Scalars) -> None:
        new_new, new_old, self._slope = dots
        self._beta = (new_new - new_old) / self._squared_norm
        self._squared_norm = new_new
