"""Partitions refuse a gradient together or not at all (docs/reliability.md, G14)."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest

from dbctl.model.exchange import Give, Take
from dbctl.region import Range
from dbctl.roles.base import BatchResult, PlainBuffer
from dbctl.roles.conversation import Conversation
from dbctl.roles.verdict import ELSEWHERE, Verdict, judge

TENSORS = [("layers.0.weight", Range(0, 2)), ("layers.0.bias", Range(2, 3))]
GOOD, BAD = [1.0, 2.0, 3.0], [1.0, 2.0, nan]


def verdict(
    gradient: list[float],
    *others: list[float],
    loss: float = 5.0,
    bound: float = inf,
    say: tuple[float, ...] = (),
) -> tuple[list[float], Verdict]:
    """What partition 0 says, and what it finds when the others said `others`."""
    names = {p: f"worker-0.{p}" for p, _ in enumerate(others, start=1)}
    talk = Conversation(0, names, allocate=PlainBuffer, resend_s=0.25)
    work = judge(BatchResult(loss, 7, bound), np.array(gradient), talk, tensors=TENSORS, say=say)
    try:
        give = next(work)
        assert isinstance(give, Give)
        [own, *rest] = [run.outbox.array[run.start : run.stop].tolist() for run in give.to.values()]
        assert all(one == own for one in rest)
        assert isinstance(next(work), Take)
        work.send({p: np.array(values) for p, values in enumerate(others, start=1)})
    except StopIteration as end:
        return (own if others else []), end.value
    raise AssertionError("never ends")


def test_a_whole_replica_judges_alone() -> None:
    assert verdict(GOOD, say=(4.0,)) == ([], Verdict(5.0, "", [[4.0]]))
    assert verdict(BAD)[1].bad == "layers.0.bias"


@pytest.mark.parametrize("bound", [nan, inf, 1e200])
def test_a_gradient_without_a_useful_bound_is_looked_at(bound: float) -> None:
    assert verdict(BAD, bound=bound)[1].bad == "layers.0.bias"
    assert verdict(GOOD, bound=bound)[1].bad == ""


def test_a_gradient_whose_bound_is_small_is_not_looked_at() -> None:
    """A pass over it more is a twentieth of a step; the shard looks (test_shard.py)."""
    assert verdict(BAD, bound=1e9)[1].bad == ""
    assert verdict(GOOD, bound=1e9, loss=nan)[1].bad == "the loss"


def test_what_is_small_is_a_question_of_the_type() -> None:
    """1e30 times the rounding of a long sum in float32 may be infinite; in float64 it is small."""
    talk = Conversation(0, {}, allocate=PlainBuffer, resend_s=0.25)
    for dtype, looked in (("float32", True), ("float64", False)):
        work = judge(BatchResult(1.0, 1, 1e30), np.array(BAD, dtype), talk, tensors=TENSORS)
        with pytest.raises(StopIteration) as ended:
            next(work)
        assert bool(ended.value.value.bad) is looked


@pytest.mark.parametrize("loss", [nan, inf, -inf])
def test_a_loss_that_is_not_finite_is_named_when_the_gradient_is(loss: float) -> None:
    assert verdict(GOOD, loss=loss)[1].bad == "the loss"
    assert verdict(BAD, loss=loss)[1].bad == "layers.0.bias"


def test_losses_are_summed_and_what_each_says_comes_in_their_order() -> None:
    said, found = verdict(GOOD, [20.0, 1.0, 8.0], [300.0, 1.0, 9.0], say=(4.0,))
    assert said == [5.0, 1.0, 4.0]
    assert found == Verdict(325.0, "", [[4.0], [8.0], [9.0]])


def test_all_refuse_what_one_of_them_cannot_use_and_only_that_one_names_it() -> None:
    said, found = verdict(GOOD, [20.0, 1.0], [nan, 0.0])
    assert (said, found.bad) == ([5.0, 1.0], ELSEWHERE)
    said, found = verdict(BAD, [20.0, 1.0], [30.0, 1.0])
    assert (said, found.bad) == ([5.0, 0.0], "layers.0.bias")
