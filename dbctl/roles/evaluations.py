"""Evaluations under way: asked of every evaluator, summed, one at a time.

Rules of this file: pure. Theory of operation: evaluation n is rows `part`, `part + of`, ... for
each of the evaluators; it is complete when all have answered. A repeated answer is harmless.
Predictions are taken piece by piece in order, so that each counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dbctl.roles.base import Array
from dbctl.wire import Evaluate, Evaluated, Filed, Predictions


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One complete evaluation. `accuracy` and `top5` are None for float targets.

    `version`: so many updates, at least, were in all parameters that were measured.
    """

    number: int
    rows: int
    loss: float
    accuracy: float | None
    top5: float | None
    classes: int
    confusion: Array | None  # int64 (classes, classes), true class first
    version: int

    def fields(self) -> dict[str, Any]:
        return {
            "examples": self.rows,
            "loss": self.loss,
            "accuracy": self.accuracy,
            "top5": self.top5,
            "version": self.version,
        }


def _whole_numbers(answer: Evaluated) -> Array:
    counts: Array = answer.payload.astype("int64").reshape(answer.classes, answer.classes)
    return counts


class Evaluations:
    """`evaluators`: the nodes of each one's partitions; the first of them answers."""

    def __init__(self, evaluators: Sequence[Sequence[str]], *, predictions: bool = False) -> None:
        self._evaluators = [tuple(nodes) for nodes in evaluators]
        self._predictions = predictions
        self._number = 0
        self._answers: dict[str, Evaluated] = {}
        self._confusions: dict[str, Array] = {}
        self._filed: dict[str, int] = {}  # pieces of predictions that have come
        self.busy = False

    def __bool__(self) -> bool:
        return bool(self._evaluators)

    def lose(self, evaluator: str) -> None:
        """An evaluator died: what it was to measure is not measured."""
        self._evaluators = [nodes for nodes in self._evaluators if evaluator not in nodes]
        self.busy = False

    def begin(self) -> dict[str, Evaluate]:
        assert not self.busy
        self._number += 1
        self._answers = {}
        self._confusions = {}
        self._filed = {}
        self.busy = True
        return self.pending()

    def pending(self) -> dict[str, Evaluate]:
        """What each evaluator still owes; sent again until it answers."""
        if not self.busy:
            return {}
        of = len(self._evaluators)
        return {
            name: Evaluate(self._number, part, of, self._predictions)
            for part, nodes in enumerate(self._evaluators)
            if nodes[0] not in self._answers
            for name in nodes
        }

    def file(self, evaluator: str, piece: Predictions) -> tuple[bool, Filed | None]:
        """Whether this piece is the next one, to be kept; and what to answer, if anything."""
        if not self.busy or piece.number != self._number or evaluator not in self._leaders():
            return False, None
        n_filed = self._filed.get(evaluator, 0)
        is_next = piece.index == n_filed
        self._filed[evaluator] = n_filed + is_next
        return is_next, Filed(self._number, self._filed[evaluator])

    def add(self, evaluator: str, answer: Evaluated) -> Measured | None:
        if not self.busy or answer.number != self._number or evaluator not in self._leaders():
            return None
        self._answers[evaluator] = answer
        if answer.payload is not None and evaluator not in self._confusions:
            # A copy: the memory is the evaluator's again once it is asked for more.
            self._confusions[evaluator] = _whole_numbers(answer)
        if len(self._answers) < len(self._evaluators):
            return None
        self.busy = False
        return self._sum([self._answers[name] for name in self._leaders()])

    def _leaders(self) -> list[str]:
        return [nodes[0] for nodes in self._evaluators]

    def _sum(self, answers: Sequence[Evaluated]) -> Measured:
        rows = sum(a.loss.rows for a in answers)
        labelled = all(a.correct >= 0 for a in answers) and rows > 0
        confusions = list(self._confusions.values())
        return Measured(
            number=self._number,
            rows=rows,
            loss=sum(a.loss.sum for a in answers) / max(1, rows),
            accuracy=sum(a.correct for a in answers) / rows if labelled else None,
            top5=sum(a.top5 for a in answers) / rows if labelled else None,
            classes=answers[0].classes,
            confusion=sum(confusions[1:], confusions[0]) if confusions else None,
            version=min(a.version for a in answers),
        )
