"""run/eval_figures.py: shares of classes from the counts of rows by true and predicted class."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dbctl.roles.evaluations import Measured
from dbctl.run.eval_figures import Evaluation, evaluation_of


def found(confusion: list[list[int]] | None) -> Evaluation:
    counts = None if confusion is None else np.array(confusion, np.int64)
    measured = Measured(
        number=1,
        rows=int(sum(map(sum, confusion or []))),
        loss=0.5,
        accuracy=None,
        top5=None,
        classes=len(confusion or []),
        confusion=counts,
        version=9,
    )
    return evaluation_of(measured, run_dir=Path("runs/a"), step=7, split="train")


def test_recall_goes_by_rows_and_precision_by_columns() -> None:
    classes = found([[6, 2, 0], [1, 3, 0], [0, 0, 0]]).classes
    assert classes is not None
    assert [(one.number, one.rows, one.correct) for one in classes] == [
        (0, 8, 6),
        (1, 4, 3),
        (2, 0, 0),
    ]
    assert [one.recall for one in classes] == [6 / 8, 3 / 4, None]
    assert [one.precision for one in classes] == [6 / 7, 3 / 5, None]


def test_counts_are_plain_numbers() -> None:
    """They go into JSON."""
    confusion = found([[1, 2], [3, 4]]).confusion
    assert confusion == ((1, 2), (3, 4))
    assert {type(n) for row in confusion for n in row} == {int}


def test_float_targets_have_no_classes() -> None:
    one = found(None)
    assert (one.classes, one.confusion, one.loss) == (None, None, 0.5)
    assert (one.run_dir, one.step, one.split) == ("runs/a", 7, "train")
