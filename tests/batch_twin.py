"""The executor of batch commands over plain arrays, and the recursion of L-BFGS by the book.

Rules of this file: one machine, one array a name, nothing clever. It does what optim/commands.py
says, in the order in which it says it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbctl.optim.commands import (
    PARAMETERS,
    Assignment,
    Command,
    Ended,
    Evaluate,
    Evaluation,
    Iterated,
    Method,
)

Array = NDArray[Any]
Function = Callable[[Array], tuple[float, Array]]


class Executor:
    """Vectors by name, all of one dtype; dots in float64."""

    def __init__(self, function: Function, start: Array) -> None:
        self.function = function
        self.vectors = {PARAMETERS: start.copy()}
        self.like = np.zeros_like(start)
        self.n_evaluations = 0
        self.n_commands = 0

    def __getitem__(self, name: str) -> Array:
        if name not in self.vectors:
            self.vectors[name] = self.like.copy()
        return self.vectors[name]

    def carry_out(self, request: Command | Evaluate) -> tuple[float, ...] | Evaluation:
        if isinstance(request, Evaluate):
            self._assign(request.before)
            self.n_evaluations += 1
            with np.errstate(all="ignore"):
                loss, gradient = self.function(self[request.point].copy())
                self.vectors[request.gradient] = np.asarray(gradient, self.like.dtype)
                finite = np.isfinite(loss) and np.isfinite(self[request.gradient]).all()
                dots = self._dots(request.rows, request.columns)
            return Evaluation(float(loss) if finite else np.inf, dots)
        self.n_commands += 1
        self._assign(request.assign)
        for a, b in request.swap:
            self.vectors[a], self.vectors[b] = self[b], self[a]
        return self._dots(request.rows, request.columns)

    def _assign(self, assignments: tuple[Assignment, ...]) -> None:
        for out, terms in assignments:
            total = self.like.copy()
            for coefficient, name in terms:
                total += self.like.dtype.type(coefficient) * self[name]
            self.vectors[out] = total

    def _dots(self, rows: tuple[str, ...], columns: tuple[str, ...]) -> tuple[float, ...]:
        wide = {name: self[name].astype(np.float64) for name in {*rows, *columns}}
        return tuple(float(wide[a] @ wide[b]) for a in rows for b in columns)


@dataclass
class Trace:
    """What a method did: its Iterated, how it ended (None: stopped), the requests of each."""

    iterated: list[Iterated] = field(default_factory=list)
    requests: list[list[Command | Evaluate]] = field(default_factory=list)
    ended: Ended | None = None


def run(
    method: Method,
    executor: Executor,
    *,
    iterations: int = 1000,
    watch: Callable[[Iterated], None] = lambda iterated: None,
    evaluations: int = 100_000,
) -> Trace:
    """Carry the method out until it ends, `iterations` is reached, or the evaluations are spent."""
    trace, requests, answer = Trace(), [], None
    while True:
        try:
            request = method.send(answer)
        except StopIteration as stop:
            trace.ended = stop.value
            trace.requests.append(requests)
            return trace
        if isinstance(request, Iterated):
            trace.iterated.append(request)
            trace.requests.append(requests)
            requests, answer = [], None
            watch(request)
            if request.iteration >= iterations:
                return trace
        elif isinstance(request, Evaluate) and executor.n_evaluations >= evaluations:
            return trace
        else:
            requests.append(request)
            answer = executor.carry_out(request)


def two_loop(pairs: list[tuple[Array, Array]], gradient: Array) -> Array:
    """The direction of L-BFGS from pairs (s, y), oldest first: Nocedal and Wright, 7.4."""
    q, alphas = gradient.copy(), []
    for s, y in reversed(pairs):
        alphas.append((s @ q) / (y @ s))
        q -= alphas[-1] * y
    if pairs:
        s, y = pairs[-1]
        q *= (s @ y) / (y @ y)
    for (s, y), alpha in zip(pairs, reversed(alphas), strict=True):
        q += s * (alpha - (y @ q) / (y @ s))
    return -q
