"""dbctl/pace.py: windows that follow a line, over a line that is simulated."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dbctl.pace import AGAIN_MOST_S, AGAIN_S, PIECE_BYTES, QUICK_S, WINDOW_MOST, Pace


def begun(n: int) -> Pace[int]:
    pace: Pace[int] = Pace()
    for key in range(n):
        pace.want(key)
    return pace


def test_one_is_asked_for_and_a_quick_one_widens_the_window() -> None:
    pace = begun(100)
    now, asked = 0.0, pace.due(0.0)
    assert asked == [0]
    assert pace.due(0.1) == []
    for window in range(2, WINDOW_MOST + 3):
        now += 0.01
        assert pace.came(now, asked.pop(0))
        asked += pace.due(now)
        assert len(asked) == min(window, WINDOW_MOST)
    assert asked == sorted(asked), "in order"


def test_a_slow_one_narrows_it_and_one_is_always_allowed() -> None:
    pace = begun(10)
    pace.window = 3
    assert pace.due(0.0) == [0, 1, 2]
    for key, took_s in ((0, 1.5 * QUICK_S), (1, 2 * QUICK_S), (2, 4 * QUICK_S)):
        assert pace.came(took_s, key)
    assert pace.window == 1
    assert pace.due(3.0) == [3]
    assert pace.came(9.0, 3)
    assert pace.window == 1


def test_a_line_that_others_fill_is_given_more_time() -> None:
    pace: Pace[int] = Pace(quick_s=1.0)
    for key in range(5):
        pace.want(key)
    assert pace.due(0.0) == [0]
    assert pace.came(0.9, 0)
    assert pace.due(1.0) == [1, 2]
    assert pace.came(2.9, 1)
    assert pace.window == 2
    assert pace.came(3.0, 2)
    assert pace.window == 1


def test_when_nothing_comes_all_is_asked_for_again_one_at_first() -> None:
    pace = begun(6)
    pace.window = 3
    assert pace.due(0.0) == [0, 1, 2]
    assert pace.again_at == AGAIN_S
    assert pace.due(AGAIN_S - 0.1) == []
    assert pace.due(AGAIN_S) == [0]
    assert pace.again_at == 3 * AGAIN_S, "the pause grows"
    assert pace.came(AGAIN_S + 0.1, 1), "late, and good"
    assert pace.came(AGAIN_S + 0.1, 0)
    assert pace.window == 1, "nobody knows which time this answers"
    assert pace.due(AGAIN_S + 0.1) == [2]
    assert not pace.came(AGAIN_S + 0.2, 0), "once"
    assert not pace.came(AGAIN_S + 0.2, 5), "never asked for"
    pauses = [now for now in range(1_000) if pace.due(float(now))]
    assert max(b - a for a, b in pairwise(pauses)) == AGAIN_MOST_S


def test_what_is_dropped_is_not_asked_for() -> None:
    pace = begun(3)
    assert pace.due(0.0) == [0]
    pace.drop(0)
    pace.drop(1)
    assert pace.due(0.0) == [2]
    assert not pace.came(0.1, 0)
    pace.drop(2)
    assert pace.again_at > 1e9


class Line:
    """A line that carries `rate` bytes a second behind a delay; counts what waits on it."""

    def __init__(self, rate: float, delay_s: float) -> None:
        self.rate, self.delay_s = rate, delay_s
        self.free_at = 0.0
        self.most_waiting_s = 0.0
        self.n_asked = 0
        self.coming: list[tuple[float, int]] = []

    def ask(self, now: float, key: int) -> None:
        self.n_asked += 1
        self.free_at = max(self.free_at, now + self.delay_s / 2) + PIECE_BYTES / self.rate
        self.most_waiting_s = max(self.most_waiting_s, self.free_at - now - self.delay_s / 2)
        self.coming.append((self.free_at + self.delay_s / 2, key))

    def take(self, pace: Pace[int], n: int) -> float:
        now = 0.0
        while n:
            for key in pace.due(now):
                self.ask(now, key)
            self.coming.sort()
            now, key = self.coming.pop(0)
            n -= pace.came(now, key)
        return now


@pytest.mark.parametrize("rate", [125e3, 1e6, 12.5e6, 1e9])
@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.2])
def test_a_line_is_used_well_and_nothing_waits_long_behind_it(rate: float, delay_s: float) -> None:
    """Nothing is asked for twice; a lease that comes behind the pieces waits 2 s at most."""
    n = 1_000
    line = Line(rate, delay_s)
    took_s = line.take(begun(n), n)
    assert line.n_asked == n
    assert line.most_waiting_s < 2.2
    most = min(rate, WINDOW_MOST * PIECE_BYTES / (delay_s or 1e-9))
    assert n * PIECE_BYTES / took_s > 0.6 * most
