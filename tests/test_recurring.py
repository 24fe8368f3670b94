"""What comes every N steps, epochs or seconds: on the run's own beat, whichever life it is in."""

from __future__ import annotations

from typing import Any

import pytest

from dbctl.experiment.specs import Every
from dbctl.roles.base import NEVER
from dbctl.roles.recurring import Recurring


class Progress:
    """Of roles.figures.Figures, what is read here."""

    def __init__(self, steps: int = 0, epochs: float = 0.0) -> None:
        self.steps, self.epochs = steps, epochs


def begun(amount: float, unit: Any, progress: Any, *, now: float = 0.0) -> Recurring:
    each = Recurring(Every(amount=amount, unit=unit))
    each.begin(now, progress)
    return each


def test_off_is_never_due() -> None:
    each = Recurring(None)
    each.begin(0.0, Progress())  # type: ignore[arg-type]
    assert not each.is_due(1e9, Progress(10**9, 1e9))  # type: ignore[arg-type]
    assert each.at == NEVER


def test_steps_are_due_at_each_multiple_and_once() -> None:
    progress: Any = Progress()
    each = begun(10, "steps", progress)
    due = []
    for progress.steps in range(1, 36):
        if each.is_due(0.0, progress):
            due.append(progress.steps)
            each.advance(0.0, progress)
    assert due == [10, 20, 30]
    assert each.at == NEVER, "no clock is waited for"


def test_several_multiples_passed_at_once_are_one() -> None:
    progress: Any = Progress()
    each = begun(10, "steps", progress)
    progress.steps = 47
    assert each.is_due(0.0, progress)
    each.advance(0.0, progress)
    progress.steps = 49
    assert not each.is_due(0.0, progress)
    progress.steps = 50
    assert each.is_due(0.0, progress)


@pytest.mark.parametrize(("at", "first"), [(0, 10), (9, 10), (10, 20), (13, 20), (20, 30)])
def test_a_resumed_run_keeps_the_beat(at: int, first: int) -> None:
    progress: Any = Progress(at)
    each = begun(10, "steps", progress)
    progress.steps = first - 1
    assert not each.is_due(0.0, progress)
    progress.steps = first
    assert each.is_due(0.0, progress)


def test_epochs_that_sum_up_to_just_below_a_whole_one_count() -> None:
    """Ten times a tenth is 0.9999999999999999."""
    progress: Any = Progress()
    each = begun(1, "epochs", progress)
    progress.epochs = sum([0.1] * 10)
    assert progress.epochs < 1
    assert each.is_due(0.0, progress)
    each.advance(0.0, progress)
    assert not each.is_due(0.0, progress)
    progress.epochs = 2.0
    assert each.is_due(0.0, progress)


def test_parts_of_an_epoch_can_be_waited_for() -> None:
    progress: Any = Progress(epochs=0.6)
    each = begun(0.25, "epochs", progress)
    progress.epochs = 0.74
    assert not each.is_due(0.0, progress)
    progress.epochs = 0.75
    assert each.is_due(0.0, progress)


def test_seconds_go_by_the_clock_from_when_it_was_last_due() -> None:
    progress: Any = Progress()
    each = begun(2.5, "seconds", progress, now=100.0)
    assert each.at == 102.5
    assert not each.is_due(102.4, progress)
    assert each.is_due(102.5, progress)
    each.advance(110.0, progress)  # it was busy: what was missed is not made up for
    assert each.at == 112.5
    progress.steps = 10**6
    assert not each.is_due(111.0, progress), "steps do not matter"
