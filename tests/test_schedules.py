"""dbctl/optim/schedules.py: rates as a function of the shard's count of updates."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from dbctl.optim.schedules import ScheduleSpec, rate_at

STEP = ScheduleSpec(type="step", initial=0.8, every=10, factor=0.5)
EXPONENTIAL = ScheduleSpec(type="exponential", initial=0.8, every=10, factor=0.5)
INVERSE_TIME = ScheduleSpec(type="inverse_time", initial=0.8, every=10)


def test_a_number_is_the_rate_at_every_update() -> None:
    assert [rate_at(0.1, 0, n) for n in (0, 1, 10**9)] == [0.1, 0.1, 0.1]


@pytest.mark.parametrize(
    ("spec", "n", "expected"),
    [
        (STEP, 0, 0.8),
        (STEP, 9, 0.8),
        (STEP, 10, 0.4),
        (STEP, 19, 0.4),
        (STEP, 20, 0.2),
        (EXPONENTIAL, 0, 0.8),
        (EXPONENTIAL, 5, 0.8 * math.sqrt(0.5)),
        (EXPONENTIAL, 10, 0.4),
        (INVERSE_TIME, 0, 0.8),
        (INVERSE_TIME, 5, 0.8 / 1.5),
        (INVERSE_TIME, 10, 0.4),
        (INVERSE_TIME, 70, 0.1),
    ],
)
def test_the_three_schedules(spec: ScheduleSpec, n: int, expected: float) -> None:
    assert rate_at(spec, 0, n) == pytest.approx(expected, rel=1e-15)


def test_warm_up_rises_linearly_from_a_first_update_that_moves() -> None:
    assert [rate_at(1.0, 4, n) for n in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_warm_up_multiplies_a_schedule_that_does_not_wait_for_it() -> None:
    assert rate_at(STEP, 40, 19) == 0.4 * 0.5
    assert rate_at(STEP, 40, 39) == rate_at(STEP, 0, 39)


@pytest.mark.parametrize("warm_up", [0, 1])
def test_no_warm_up_and_one_of_one_update_change_nothing(warm_up: int) -> None:
    assert [rate_at(0.3, warm_up, n) for n in range(3)] == [0.3, 0.3, 0.3]


def test_rates_stay_numbers_however_long_the_run() -> None:
    n = 10**12
    assert rate_at(STEP, 0, n) == 0.0
    assert rate_at(EXPONENTIAL, 0, n) == 0.0
    assert 0 < rate_at(INVERSE_TIME, 0, n) < 1e-11
    growing = ScheduleSpec(type="step", initial=1.0, every=1, factor=2.0)
    assert rate_at(growing, 0, 10) == 1024.0
    assert rate_at(growing, 0, n) == math.inf


def test_the_rate_of_a_resumed_run_is_a_function_of_the_count_alone() -> None:
    whole = [rate_at(EXPONENTIAL, 7, n) for n in range(30)]
    assert [rate_at(EXPONENTIAL, 7, n) for n in range(12, 30)] == whole[12:]


def test_a_negative_count_is_a_programming_error() -> None:
    with pytest.raises(AssertionError, match="n=-1"):
        rate_at(0.1, 0, -1)


def test_specifications_load_without_numpy() -> None:
    code = "import sys, dbctl.optim.rules as r; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
