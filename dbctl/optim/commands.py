"""What a batch method asks for: operations on the *names* of vectors, answered by scalars.

Rules of this file: data only, no numpy, no message. A method (optim/lbfgs.py, descent.py,
conjugate_gradient.py) is a generator that yields these and never holds a vector: the same code runs
over plain arrays in tests and over the shards of a run (paper A, section 4.2: the coordinator
issues commands drawn from a small set of operations, each shard carries them out on its own slice,
and only scalars travel).

    yields       is sent                    means
    Command      tuple of floats            assignments, then swaps, then dot products
    Evaluate     Evaluation                 loss and gradient at a point; both may be non-finite
    Iterated     None                       an iteration is over: log it, save here, stop here

and returns `Ended`. What is written to a name is read by later commands under that name. Every
vector is as long as the parameters and has their dtype; scalars are float64. A name that nothing
was assigned to yet is zeros.

    PARAMETERS   the accepted point      GRADIENT         of the loss there
    TRIAL        the point being tried   TRIAL_GRADIENT   of the loss there
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

PARAMETERS = "parameters"
GRADIENT = "gradient"
TRIAL = "trial"
TRIAL_GRADIENT = "trial_gradient"
DIRECTION = "direction"

Term: TypeAlias = tuple[float, str]
Assignment: TypeAlias = tuple[str, tuple[Term, ...]]
Scalars: TypeAlias = tuple[float, ...]


class Command(NamedTuple):
    """One round trip to every shard. The parts are carried out in this order:

    assign: (out, ((c, v), ...)) sets out = c1 v1 + c2 v2 + ..., one after the other; `out` may be
        among the terms.
    swap: (a, b) exchanges two names: no element moves.
    rows, columns: the answer is the dot product of each row with each column, row by row.
    """

    assign: tuple[Assignment, ...] = ()
    swap: tuple[tuple[str, str], ...] = ()
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


class Evaluate(NamedTuple):
    """Carry out `before` (its dots are not answered), then find loss and gradient at `point`.

    The gradient is written to `gradient`, after which `rows` and `columns` are answered as those
    of a Command. The loss is the mean over the batch's rows, with the L2 penalty.
    """

    point: str
    gradient: str
    before: tuple[Assignment, ...] = ()
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


class Evaluation(NamedTuple):
    """`loss` is infinite where the loss or any element of the gradient was not finite."""

    loss: float
    dots: Scalars


@dataclass(frozen=True, kw_only=True)
class Iterated:
    """Iteration `iteration` (from 1; 0 is the initial point) ended at PARAMETERS.

    loss, gradient_norm: there (2-norm). step_length: alpha of x + alpha d; evaluations: so far in
    all. The line search started from `loss_before` with `slope_before` (d . g) and accepted
    `slope`. `approximate`: the loss differs from `loss_before` by no more than rounding, so
    sufficient decrease was judged by the slopes (optim/line_search.py); else the step meets the
    strong Wolfe conditions as given here. `restarted`: the direction was the steepest descent
    because the history was dropped.
    `state`: JSON values from which the method goes on exactly, given the vectors.
    """

    iteration: int
    loss: float
    gradient_norm: float
    step_length: float
    evaluations: int
    loss_before: float
    slope_before: float
    slope: float
    approximate: bool
    restarted: bool
    state: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """status: converged | line_search_failed; the coordinator alone ends with max_iterations."""

    status: str
    reason: str


Request: TypeAlias = Command | Evaluate | Iterated
Method: TypeAlias = Generator[Request, Any, Ended]
