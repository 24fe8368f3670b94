"""One job cut over threads: the parts, what a part raises, and that no bit shows the cut."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbctl.optim import team as module
from dbctl.optim.rules import (
    AdagradRuleSpec,
    AdamRuleSpec,
    MomentumRuleSpec,
    RuleSpec,
    SgdRuleSpec,
)
from dbctl.optim.team import LEAST, MOST, Team, size_of_team
from dbctl.optim.updates import make_rule
from dbctl.region import Range
from dbctl.roles.base import PlainBuffer
from dbctl.roles.handouts import Handouts
from dbctl.roles.slice import Outcome, Slice
from dbctl.wire import BEGINNING, Push

RULES = [
    SgdRuleSpec(rate=0.1),
    MomentumRuleSpec(rate=0.1),
    AdagradRuleSpec(rate=0.1),
    AdamRuleSpec(rate=0.1),
]
LONG = 2 * LEAST + 77


@given(n=st.integers(0, 9 * LEAST), threads=st.integers(1, 5))
def test_the_parts_are_the_whole_once_and_none_is_too_short_for_a_thread(
    n: int, threads: int
) -> None:
    parts = Team(threads).each(n, lambda part: part)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == n
    assert len(parts) == max(1, min(threads, n // LEAST))
    assert all(part.start % 1024 == 0 for part in parts)
    lengths = [part.stop - part.start for part in parts]
    assert len(parts) == 1 or min(lengths) > LEAST - 1024
    assert max(lengths) - min(lengths) <= 2048


def test_the_parts_are_done_at_once_by_as_many_threads() -> None:
    """None is over before all have begun: one thread for two parts would wait here for ever."""
    all_begun = threading.Barrier(3, timeout=20)

    def job(part: slice) -> int:
        all_begun.wait()
        return threading.get_ident()

    found = Team(3).each(3 * LEAST, job)
    assert found[0] == threading.get_ident()
    assert len(set(found)) == 3


@pytest.mark.parametrize("bad", [0, 1])
def test_what_a_part_raises_is_raised_when_all_are_over(bad: int) -> None:
    over = []
    released = threading.Event()

    def job(part: slice) -> None:
        if (part.start > 0) == bool(bad):
            released.set()
            raise ValueError(part.start)
        released.wait(20)
        over.append(part)

    with pytest.raises(ValueError, match=r"^(0|\d+)$"):
        Team(2).each(2 * LEAST, job)
    assert len(over) == 1


def make(rule: RuleSpec, *, threads: int, fast: bool) -> Slice:
    values = np.random.default_rng(1).normal(size=LONG).astype("float32")
    made = make_rule(rule, fast=fast)
    return Slice(
        Range(0, LONG),
        values,
        made.new_state(LONG, "float32"),
        rule=made,
        decays=[(Range(0, LEAST + 5), 0.0), (Range(LEAST + 5, LONG), 0.25)],
        version=0,
        allocate=PlainBuffer,
        handouts=Handouts(),
        team=Team(threads),
    )


def push(gradient: Any) -> Push:
    return Push(1, 1, 0, 0, 1, BEGINNING, 0, 0, gradient)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.type)
def test_a_slice_that_two_threads_update_has_the_bits_of_one(
    rule: RuleSpec, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fast:
        pytest.importorskip("numba")
    monkeypatch.setattr(module, "LEAST", LEAST // 4)
    one, three = (make(rule, threads=threads, fast=fast) for threads in (1, 3))
    for seed in range(3):
        gradient = np.random.default_rng(seed).normal(size=LONG).astype("float32")
        for held in (one, three):
            assert held.take(push(gradient), staleness=0) is Outcome.APPLIED
    assert three._team._others is not None, "one thread did it all"
    assert one.current.array.tobytes() == three.current.array.tobytes()
    assert {k: v.tobytes() for k, v in one.state.items()} == {
        k: v.tobytes() for k, v in three.state.items()
    }


@pytest.mark.parametrize("where", [0, LEAST - 1, LONG // 2, LONG - 1])
def test_a_gradient_that_is_not_finite_anywhere_changes_nothing(where: int) -> None:
    held = make(RULES[2], threads=2, fast=False)
    gradient = np.ones(LONG, "float32")
    gradient[where] = np.nan
    before = held.current.array.tobytes()
    assert held.take(push(gradient), staleness=0) is Outcome.REFUSED
    assert held.current.array.tobytes() == before
    assert not held.state["sum_of_squares"].any()
    assert held.version == 0


def test_a_team_has_the_cores_that_nobody_computes_on() -> None:
    assert size_of_team(2, busy=0, teams=1) == 2
    assert size_of_team(2, busy=1, teams=1) == 1
    assert size_of_team(2, busy=40, teams=1) == 1
    assert size_of_team(8, busy=1, teams=3) == 2
    assert size_of_team(8, busy=0, teams=9) == 1
    assert size_of_team(64, busy=8, teams=2) == MOST


def test_where_no_more_threads_are_allowed_the_caller_does_it_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a limit is met in the middle of a run: an update must not fail of it."""
    begin, begun = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        begun.append(thread)
        if len(begun) > 1:
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    team = Team(3)
    for _ in range(2):
        assert team.each(3 * LEAST, lambda part: part) == [slice(0, 3 * LEAST)]
    assert len(begun) == 2, "it is not tried again"
