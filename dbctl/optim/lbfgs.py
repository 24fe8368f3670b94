"""L-BFGS in its vector-free form (paper A, section 4.2; Chen, Wang and Zhou, NIPS 2014).

Rules of this file: names and scalars only (optim/commands.py).

Theory of operation. The history is m pairs s = x+ - x, y = g+ - g. The two-loop recursion

    q = -g;  newest to oldest: a_i = (s_i.q) / (s_i.y_i), q -= a_i y_i
    q *= (s.y) / (y.y) of the newest pair
    oldest to newest: b_i = (y_i.q) / (s_i.y_i), q += (a_i - b_i) s_i

only ever adds multiples of s_i, y_i and g, so it runs on the coefficients of these 2m+1 vectors,
and each dot product follows from theirs (`_dots`, the Gram matrix). An iteration changes one pair
and g: three rows of the matrix, asked for in the command that makes the pair. The recursion would
cost 4m commands one after the other; this costs two, whatever m is.

The pairs lie in a ring of names s0, y0, s1, y1, ... A pair is kept when s.y > CURVATURE |s| |y|:
the test does not depend on the scale of loss or parameters, and fails only where the Hessian's
condition number along s would have to exceed about 4 / CURVATURE^2. By the line search s.y > 0, so
that what is dropped is rounding. A dropped pair has taken the place of the oldest.
"""

from __future__ import annotations

from itertools import product
from math import sqrt
from typing import Any

from dbctl.optim.batch import LineSearchSpec, c2_of
from dbctl.optim.commands import (
    GRADIENT,
    PARAMETERS,
    TRIAL,
    TRIAL_GRADIENT,
    Command,
    Method,
    Scalars,
)
from dbctl.optim.iteration import TAKE_TRIAL, Direction, iterate

CURVATURE = 1e-8


def lbfgs(
    line_search: LineSearchSpec,
    *,
    history: int = 10,
    tolerance: float = 1e-5,
    state: dict[str, Any] | None = None,
    resample: bool = False,
) -> Method:
    """L-BFGS with `history` pairs (optim/iteration.py: the loop, `state` and `resample`).

    To go on from a state the executor needs the vectors `saved_names(history)`.
    """
    return iterate(
        _Pairs(history, None if state is None else state["memory"]),
        line_search,
        c2=c2_of(line_search, "lbfgs"),
        tolerance=tolerance,
        state=state,
        resample=resample,
    )


def saved_names(history: int) -> tuple[str, ...]:
    """The vectors that a later iteration reads."""
    pairs = [name for slot in range(history) for name in (_s(slot), _y(slot))]
    return (PARAMETERS, GRADIENT, *pairs)


def _s(slot: int) -> str:
    return f"s{slot}"


def _y(slot: int) -> str:
    return f"y{slot}"


class _Pairs:
    """The history: slots, oldest first, and the dots of all their vectors and GRADIENT."""

    def __init__(self, history: int, state: dict[str, Any] | None) -> None:
        assert history >= 1
        self._history = history
        self._slots: list[int] = []
        self._dots: dict[str, dict[str, float]] = {}
        self._asked: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        if state is not None:
            self._slots = list(state["slots"])
            self._dots = {name: dict(row) for name, row in state["dots"].items()}
            assert all(slot < history for slot in self._slots)

    def state(self) -> dict[str, Any]:
        names = (*self.columns(), GRADIENT) if self._slots else ()
        dots = {a: {b: self._dots[a][b] for b in names} for a in names}
        return {"slots": list(self._slots), "dots": dots}

    def is_empty(self) -> bool:
        return not self._slots

    def forget(self) -> None:
        self._slots.clear()

    def columns(self) -> tuple[str, ...]:
        return tuple(name for slot in self._slots for name in (_s(slot), _y(slot)))

    def renew(self, dots: Scalars) -> None:
        self._file((GRADIENT,), (GRADIENT, *self.columns()), dots)

    def accept(self) -> Command:
        """Make the pair in the next slot of the ring; ask for the rows that changed."""
        slot = (self._slots[-1] + 1) % self._history if self._slots else 0
        if len(self._slots) == self._history:
            self._slots.pop(0)
        self._slots.append(slot)
        rows, columns = (_s(slot), _y(slot), GRADIENT), (*self.columns(), GRADIENT)
        self._asked = rows, columns
        return Command(
            assign=(
                (_s(slot), ((1.0, TRIAL), (-1.0, PARAMETERS))),
                (_y(slot), ((1.0, TRIAL_GRADIENT), (-1.0, GRADIENT))),
            ),
            swap=TAKE_TRIAL,
            rows=rows,
            columns=columns,
        )

    def accepted(self, dots: Scalars) -> None:
        self._file(*self._asked, dots)
        s, y = _s(self._slots[-1]), _y(self._slots[-1])
        if not self._dots[s][y] > CURVATURE * sqrt(self._dots[s][s]) * sqrt(self._dots[y][y]):
            self._slots.pop()

    def _file(self, rows: tuple[str, ...], columns: tuple[str, ...], dots: Scalars) -> None:
        for (a, b), dot in zip(product(rows, columns), dots, strict=True):
            self._dots.setdefault(a, {})[b] = dot
            self._dots.setdefault(b, {})[a] = dot

    def direction(self) -> Direction | None:
        if not self._slots:
            return None
        sum_of = dict.fromkeys((*self.columns(), GRADIENT), 0.0)
        sum_of[GRADIENT] = -1.0

        def dot(name: str) -> float:
            row = self._dots[name]
            return sum(coefficient * row[other] for other, coefficient in sum_of.items())

        first_loop = {}
        for slot in reversed(self._slots):
            s, y = _s(slot), _y(slot)
            first_loop[slot] = dot(s) / self._dots[s][y]
            sum_of[y] -= first_loop[slot]
        newest_s, newest_y = _s(self._slots[-1]), _y(self._slots[-1])
        scale = self._dots[newest_s][newest_y] / self._dots[newest_y][newest_y]
        for name in sum_of:
            sum_of[name] *= scale
        for slot in self._slots:
            s, y = _s(slot), _y(slot)
            sum_of[s] += first_loop[slot] - dot(y) / self._dots[s][y]
        if not dot(GRADIENT) < 0:
            return None
        return Direction(tuple((c, name) for name, c in sum_of.items()), scaled=True)
