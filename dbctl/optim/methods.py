"""The batch methods by their names in the experiment file.

Rules of this file: no more than the choice; the methods are in lbfgs.py, descent.py and
conjugate_gradient.py.
"""

from __future__ import annotations

from typing import Any

from dbctl.optim import conjugate_gradient, descent, lbfgs
from dbctl.optim.batch import BatchMethod, LineSearchSpec
from dbctl.optim.commands import Method


def make_method(
    name: BatchMethod,
    line_search: LineSearchSpec,
    *,
    history: int,
    tolerance: float,
    state: dict[str, Any] | None,
    resample: bool,
) -> Method:
    """The generator of method `name`; `history` is for L-BFGS (optim/iteration.py: the rest)."""
    common: dict[str, Any] = {"tolerance": tolerance, "state": state, "resample": resample}
    match name:
        case "lbfgs":
            return lbfgs.lbfgs(line_search, history=history, **common)
        case "gradient_descent":
            return descent.gradient_descent(line_search, **common)
        case "conjugate_gradient":
            return conjugate_gradient.conjugate_gradient(line_search, **common)


def saved_names(name: BatchMethod, *, history: int) -> tuple[str, ...]:
    """The vectors that a later iteration of the method reads, PARAMETERS first."""
    match name:
        case "lbfgs":
            return lbfgs.saved_names(history)
        case "gradient_descent":
            return descent.saved_names()
        case "conjugate_gradient":
            return conjugate_gradient.saved_names()
