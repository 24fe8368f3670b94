"""Gradient descent along -g with a line search, on the commands of every batch method.

Rules of this file: names and scalars only (optim/commands.py). It keeps nothing of the past but
the length of the last step; beside L-BFGS it shows that the framework takes other methods
(paper A, section 4.2).
"""

from __future__ import annotations

from typing import Any

from dbctl.optim.batch import LineSearchSpec, c2_of
from dbctl.optim.commands import GRADIENT, PARAMETERS, Command, Method, Scalars
from dbctl.optim.iteration import TAKE_TRIAL, Direction, iterate


def gradient_descent(
    line_search: LineSearchSpec,
    *,
    tolerance: float = 1e-5,
    state: dict[str, Any] | None = None,
    resample: bool = False,
) -> Method:
    """Steepest descent (optim/iteration.py: the loop, `state` and `resample`)."""
    return iterate(
        _Nothing(),
        line_search,
        c2=c2_of(line_search, "gradient_descent"),
        tolerance=tolerance,
        state=state,
        resample=resample,
    )


def saved_names() -> tuple[str, ...]:
    """The vectors that a later iteration reads."""
    return (PARAMETERS, GRADIENT)


class _Nothing:
    """No memory at all."""

    def is_empty(self) -> bool:
        return True

    def forget(self) -> None:
        pass

    def direction(self) -> Direction | None:
        return None

    def accept(self) -> Command:
        return Command(swap=TAKE_TRIAL)

    def accepted(self, dots: Scalars) -> None:
        assert not dots

    def columns(self) -> tuple[str, ...]:
        return ()

    def renew(self, dots: Scalars) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}
