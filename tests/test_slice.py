"""A slice: one partition's part of a shard, with buffers and a count of updates of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dbctl.optim.rules import AdagradRuleSpec, AdamRuleSpec, MomentumRuleSpec, RuleSpec, SgdRuleSpec
from dbctl.optim.schedules import ScheduleSpec
from dbctl.optim.updates import make_rule
from dbctl.region import Range
from dbctl.roles.base import Array, PlainBuffer
from dbctl.roles.handouts import Handouts
from dbctl.roles.slice import Slice
from dbctl.wire import Peer, Position, Push
from tests.reference import rule_loop

READER = Peer("worker-0.0", 1)


def make(
    values: Sequence[float] = (0, 0, 0),
    rule: RuleSpec | None = None,
    *,
    decays: Sequence[tuple[Range, float]] = (),
    version: int = 0,
    handouts: Handouts | None = None,
    start: int = 10,
) -> Slice:
    made = make_rule(rule or SgdRuleSpec(rate=1.0), fast=False)
    array = np.array(values, "f8")
    return Slice(
        Range(start, start + len(array)),
        array,
        made.new_state(len(array), "f8"),
        rule=made,
        decays=decays or [(Range(0, len(array)), 0.0)],
        version=version,
        allocate=PlainBuffer,
        handouts=handouts or Handouts(),
    )


def apply(part: Slice, gradient: Sequence[float], *, divide_rate: int = 1) -> None:
    target = part.writable()
    assert target is not None
    part.update(np.array(gradient, "f8"), target, divide_rate=divide_rate)


def push(start: int, payload: Any) -> Push:
    return Push(1, 1, start, 0, 1, Position(1, 0, 1), 0, 0, payload)


def test_an_update_moves_the_parameters_and_counts() -> None:
    part = make([1, 2, 3], version=4)
    apply(part, [1, 0, -1])
    assert part.current.array.tolist() == [0, 2, 4]
    assert part.version == 5
    apply(part, [1, 1, 1], divide_rate=4)
    assert part.current.array.tolist() == [-0.25, 1.75, 3.75]


def test_the_start_is_copied() -> None:
    values = np.array([1.0, 2.0])
    part = make(values)  # type: ignore[arg-type]
    apply(part, [1, 1])
    assert values.tolist() == [1, 2]


@pytest.mark.parametrize(
    "rule", [MomentumRuleSpec(rate=0.1, momentum=0.5), AdagradRuleSpec(rate=0.1), AdamRuleSpec()]
)
def test_updates_follow_the_rule_from_the_slices_own_first_one(rule: RuleSpec) -> None:
    gradients: list[Array] = [np.array([1.0, -2.0, 3.0]) * (i + 1) for i in range(4)]
    expected, _ = rule_loop(rule, np.zeros(3), gradients)
    part = make(rule=rule)
    for gradient in gradients:
        apply(part, gradient.tolist())
    np.testing.assert_allclose(part.current.array, expected, rtol=1e-12)


def test_a_schedule_goes_by_the_slices_own_version() -> None:
    rate = ScheduleSpec(type="inverse_time", initial=1.0, every=1)
    handouts = Handouts()
    first = make(rule=SgdRuleSpec(rate=rate), handouts=handouts)
    second = make(rule=SgdRuleSpec(rate=rate), handouts=handouts, start=13)
    for _ in range(3):
        apply(first, [-1, -1, -1])
    apply(second, [-1, -1, -1])
    assert first.current.array[0] == pytest.approx(1 + 1 / 2 + 1 / 3)
    assert second.current.array[0] == 1.0


def test_decay_is_range_by_range() -> None:
    part = make([8, 8, 8], decays=[(Range(0, 1), 0.5), (Range(1, 2), 0.0), (Range(2, 3), 0.25)])
    apply(part, [0, 0, 0])
    assert part.current.array.tolist() == [4, 8, 6]


def test_what_is_handed_out_is_not_written_and_two_more_updates_find_room() -> None:
    handouts = Handouts()
    part = make(handouts=handouts)
    held = []
    for number in range(3):
        buffer = part.current
        handouts.hand_out(READER, buffer)
        held.append((buffer, buffer.array.copy()))
        if number < 2:
            apply(part, [-1, -1, -1])
    assert part.writable() is None
    assert [b.array.tolist() for b, _ in held] == [c.tolist() for _, c in held]
    assert [c[0] for _, c in held] == [0, 1, 2]
    handouts.take_back(READER, 1)
    target = part.writable()
    assert target is held[0][0]


def test_a_push_fits_if_it_is_the_whole_slice_and_has_come() -> None:
    part = make([0, 0, 0], start=10)
    assert part.fits(push(10, np.zeros(3)))
    assert not part.fits(push(10, np.zeros(2)))
    assert not part.fits(push(10, np.zeros(4)))
    assert not part.fits(push(9, np.zeros(3)))
    assert not part.fits(push(11, np.zeros(2)))
    assert not part.fits(push(10, None))


def test_a_cut_has_the_parameters_as_they_lie_and_copies_of_the_state() -> None:
    handouts = Handouts()
    part = make([0, 0, 0], AdagradRuleSpec(rate=1.0), handouts=handouts)
    apply(part, [2, 2, 2])
    (first, parameters), (second, squares) = part.vectors()
    assert (first, second) == ("parameters", "sum_of_squares")
    assert parameters.buffer is part.current
    assert squares.array.tolist() == [4, 4, 4]
    handouts.hand_out(READER, parameters.buffer)
    before = parameters.array.copy()
    apply(part, [1, 1, 1])
    assert part.state["sum_of_squares"].tolist() == [5, 5, 5]
    assert squares.array.tolist() == [4, 4, 4], "training goes on while it is written"
    assert parameters.array.tolist() == before.tolist()
    again = dict(part.vectors())["sum_of_squares"]
    assert again.buffer is squares.buffer, "made once"
    assert again.array.tolist() == [5, 5, 5]
