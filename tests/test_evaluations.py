"""Evaluations under way: summed over evaluators, predictions filed piece by piece in order."""

from __future__ import annotations

from typing import Any

import numpy as np

from dbctl.roles.evaluations import Evaluations
from dbctl.wire import Evaluate, Evaluated, Filed, Loss, Predictions


def answer(number: int = 1, **changes: Any) -> Evaluated:
    fields: dict[str, Any] = {"part": 0, "version": 3, "loss": Loss(5.0, 10), "correct": 6}
    fields |= {"top5": 8, "classes": 2, "payload": np.array([4.0, 1, 2, 3])}
    return Evaluated(number=number, **(fields | changes))


def piece(index: int, number: int = 1) -> Predictions:
    return Predictions(number, index, (0,), (1.0,), (1.0,), (0.5,))


def test_answers_are_summed_over_the_evaluators() -> None:
    evaluations = Evaluations([("a",), ("b",)])
    assert evaluations.begin() == {"a": Evaluate(1, 0, 2), "b": Evaluate(1, 1, 2)}
    assert evaluations.add("a", answer()) is None
    assert evaluations.pending() == {"b": Evaluate(1, 1, 2)}
    assert evaluations.add("a", answer()) is None  # repeated
    measured = evaluations.add("b", answer(loss=Loss(7.0, 30), correct=2, version=4))
    assert measured is not None
    assert measured.fields() == {
        "examples": 40,
        "loss": 12 / 40,
        "accuracy": 8 / 40,
        "top5": 16 / 40,
        "version": 3,
    }
    assert measured.confusion is not None
    assert measured.confusion.tolist() == [[8, 2], [4, 6]]
    assert measured.confusion.dtype == np.int64
    assert not evaluations.busy
    assert evaluations.pending() == {}


def test_float_targets_have_no_accuracy() -> None:
    evaluations = Evaluations([("a",)])
    evaluations.begin()
    measured = evaluations.add("a", answer(correct=-1, top5=-1, payload=None))
    assert measured is not None
    assert (measured.accuracy, measured.top5, measured.confusion) == (None, None, None)


def test_late_answers_and_strangers_are_not_counted() -> None:
    evaluations = Evaluations([("a",)])
    assert evaluations.add("a", answer()) is None
    evaluations.begin()
    assert evaluations.add("b", answer()) is None
    assert evaluations.add("a", answer(number=2)) is None
    assert evaluations.add("a", answer()) is not None
    assert evaluations.add("a", answer()) is None


def test_the_first_partition_answers_for_a_cut_evaluator() -> None:
    """All partitions are asked, also again; only the leader's sums and predictions count."""
    evaluations = Evaluations([("a.0", "a.1"), ("b.0", "b.1")], predictions=True)
    first, second = Evaluate(1, 0, 2, predictions=True), Evaluate(1, 1, 2, predictions=True)
    asked = {"a.0": first, "a.1": first, "b.0": second, "b.1": second}
    assert evaluations.begin() == asked
    assert evaluations.add("a.1", answer()) is None
    assert evaluations.file("a.1", piece(0)) == (False, None)
    assert evaluations.pending() == asked
    assert evaluations.add("a.0", answer()) is None
    assert evaluations.pending() == {"b.0": second, "b.1": second}
    measured = evaluations.add("b.0", answer())
    assert measured is not None
    assert measured.rows == 20


def test_a_partition_takes_its_evaluator_with_it() -> None:
    evaluations = Evaluations([("a.0", "a.1"), ("b.0", "b.1")])
    evaluations.begin()
    evaluations.lose("a.1")
    assert not evaluations.busy
    assert evaluations.begin() == {"b.0": Evaluate(2, 0, 1), "b.1": Evaluate(2, 0, 1)}


def test_a_lost_evaluator_measures_nothing_more() -> None:
    evaluations = Evaluations([("a",)])
    evaluations.begin()
    evaluations.lose("a")
    assert not evaluations
    assert not evaluations.busy
    assert evaluations.pending() == {}


def test_each_piece_of_predictions_is_kept_once_and_in_order() -> None:
    """A piece that comes twice or too early is answered with what has come, and not kept."""
    evaluations = Evaluations([("a",)], predictions=True)
    assert evaluations.file("a", piece(0)) == (False, None)
    assert evaluations.begin() == {"a": Evaluate(1, 0, 1, predictions=True)}
    assert evaluations.file("a", piece(1)) == (False, Filed(1, 0))
    assert evaluations.file("a", piece(0)) == (True, Filed(1, 1))
    assert evaluations.file("a", piece(0)) == (False, Filed(1, 1))
    assert evaluations.file("a", piece(1)) == (True, Filed(1, 2))
    assert evaluations.file("a", piece(2, number=2)) == (False, None)
    assert evaluations.file("b", piece(0)) == (False, None)
