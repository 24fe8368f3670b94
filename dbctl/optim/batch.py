"""Batch optimisation methods as the experiment file names them.

Rules of this file: specifications only, no numpy, because `dbctl --help` and `validate` read it.
The methods are in optim/lbfgs.py, descent.py and conjugate_gradient.py, the search for a step in
optim/line_search.py. Paper A (section 4.2) leaves the line search open: all limits here are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

BatchMethod = Literal["lbfgs", "gradient_descent", "conjugate_gradient"]
History = Annotated[int, Ge(1), Le(100)]
Tolerance = Annotated[float, Gt(0)]

# Conjugate gradient needs a nearly exact search to give descent directions (Nocedal and Wright,
# Numerical Optimization, section 5.2); the others save evaluations with a loose one.
DEFAULT_C2: dict[BatchMethod, float] = {
    "lbfgs": 0.9,
    "gradient_descent": 0.9,
    "conjugate_gradient": 0.1,
}


@dataclass(frozen=True, kw_only=True)
class LineSearchSpec:
    """The strong Wolfe conditions on a step alpha along d, and how often to try.

    f(x + alpha d) <= f(x) + c1 alpha g.d and |g(x + alpha d).d| <= c2 |g.d|; c1 < c2. Without c2
    the method's own (`DEFAULT_C2`). `max_trials`: evaluations in one search.
    """

    c1: Annotated[float, Gt(0), Lt(0.5)] = 1e-4
    c2: Annotated[float, Gt(0), Lt(1)] | None = None
    max_trials: Annotated[int, Ge(1), Le(100)] = 20


def c2_of(spec: LineSearchSpec, method: BatchMethod) -> float:
    """c2 as given, else the method's own."""
    return DEFAULT_C2[method] if spec.c2 is None else spec.c2
