"""What `dbctl eval` found: the figures of the whole split, and of each class.

Rules of this file: pure; everything follows from the counts that evaluators sum. What cannot be
said (the recall of a class without rows) is None, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dbctl.roles.evaluations import Measured

Split = Literal["train", "test"]


@dataclass(frozen=True, kw_only=True)
class Class:
    """One class: its rows, how many of them were predicted so, and the shares of both kinds."""

    number: int
    rows: int
    correct: int
    recall: float | None
    precision: float | None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What was measured. For float targets accuracy, top5, classes and confusion are None.

    `confusion[t][p]` is how many rows of class t were predicted to be of class p.
    """

    run_dir: str
    step: int
    split: Split
    examples: int
    loss: float
    accuracy: float | None
    top5: float | None
    classes: tuple[Class, ...] | None
    confusion: tuple[tuple[int, ...], ...] | None


def evaluation_of(measured: Measured, *, run_dir: Path, step: int, split: Split) -> Evaluation:
    """The figures of a checkpoint, that of `step`, on a split."""
    counts = measured.confusion
    confusion = None if counts is None else tuple(map(tuple, counts.tolist()))
    return Evaluation(
        run_dir=str(run_dir),
        step=step,
        split=split,
        examples=measured.rows,
        loss=measured.loss,
        accuracy=measured.accuracy,
        top5=measured.top5,
        classes=None if confusion is None else tuple(_classes(confusion)),
        confusion=confusion,
    )


def _classes(confusion: tuple[tuple[int, ...], ...]) -> list[Class]:
    predicted = [sum(column) for column in zip(*confusion, strict=True)]
    found = []
    for number, row in enumerate(confusion):
        rows, correct = sum(row), row[number]
        recall = correct / rows if rows else None
        precision = correct / predicted[number] if predicted[number] else None
        found.append(
            Class(number=number, rows=rows, correct=correct, recall=recall, precision=precision)
        )
    return found
