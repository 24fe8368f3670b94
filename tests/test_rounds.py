"""From phase to phase, whatever the method: a method of a few lines goes round by hand."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from dbctl.region import Range
from dbctl.rights import CONTROLLER
from dbctl.roles.base import (
    Array,
    BatchResult,
    Done,
    Effects,
    Gradient,
    PlainBuffer,
    Send,
)
from dbctl.roles.rounds import REPORT_S, Phase, Rounds, WorkerStart
from dbctl.shards import ShardSpan
from dbctl.wire import Finish, Hello, Peer, Position, Report, Welcome

SHARD, BOSS = Peer("shard-0", 1), Peer(CONTROLLER, 1)
NEXT = {
    Phase.IDLE: Phase.FETCHING,
    Phase.FETCHING: Phase.SLOT,
    Phase.COMPUTED: Phase.IDLE,
    Phase.FLUSH: Phase.HALTED,
}


class Nothing:
    """A gradient of two elements that nobody computes."""

    tensors = (("layers.0.weight", Range(0, 2)),)
    steps_per_epoch = 4

    def compute(
        self, at: Position, parameters: Array, out: Array
    ) -> Generator[Any, Any, BatchResult]:
        raise AssertionError("computed")


class Method:
    """`tasks`: how many times it goes round before it waits to be told more."""

    def __init__(self, tasks: int = 0, gradient: Gradient | None = None) -> None:
        start = WorkerStart(gradient=gradient or Nothing(), shards=(ShardSpan("shard-0", 0, 2),))
        self.rounds = Rounds(
            start,
            rate=lambda n: 0.5,
            later=False,
            read_own=False,
            allocate=PlainBuffer,
            resend_s=100.0,
        )
        self.at, self.until, self.tasks = Position(), 3, tasks
        self.entered: list[Phase] = []
        self.n_computed, self.refuses = 0, False

    def can_go_on(self) -> bool:
        if self.rounds.phase is Phase.IDLE:
            return self.tasks > 0
        return self.rounds.can_go_on()

    def enter(self, now: float) -> Effects:
        phase = self.rounds.phase
        self.entered.append(phase)
        if phase is Phase.SLOT:
            self.rounds.compute(now, self._compute())
            return []
        self.tasks -= phase is Phase.COMPUTED
        self.rounds.to(now, NEXT[phase])
        return []

    def _compute(self) -> Generator[Any, Any, str]:
        self.n_computed += 1
        if self.refuses:
            self.rounds.totals.refused_one("step 0")
        return "computed"
        yield

    def step(self, now: float, effects: Effects | None = None) -> list[Any]:
        done = self.rounds.go_on(now, effects or [], self)
        return [effect.message for effect in done if isinstance(effect, Send)]


def joined(tasks: int = 0, gradient: Gradient | None = None) -> Method:
    """Its first report is said, at 0.0."""
    method = Method(tasks, gradient)
    assert method.rounds.start(0.0) == [Send("shard-0", Hello(1))]
    assert method.step(0.0) == []
    method.rounds.receive(0.0, SHARD, Welcome(1, 0, 0))
    [report] = method.step(0.0)
    assert (report.state, report.until) == ("running" if tasks else "waiting", 3)
    return method


def test_it_waits_to_join_and_reports_that_meanwhile() -> None:
    method = Method(tasks=1)
    method.rounds.start(0.0)
    assert method.rounds.due == REPORT_S
    [report] = method.step(REPORT_S)
    assert (report.state, method.entered) == ("joining", [])


def test_a_step_goes_through_phases_until_a_gradient_is_computed() -> None:
    method = joined(tasks=2)
    assert method.step(0.0) == []
    assert method.entered == [Phase.IDLE, Phase.FETCHING, Phase.SLOT]
    assert (method.n_computed, method.rounds.talk.result) == (1, "computed")
    method.step(0.0)
    assert method.entered[3:] == [Phase.COMPUTED, Phase.IDLE, Phase.FETCHING, Phase.SLOT]
    assert method.n_computed == 2


class Looking(Nothing):
    """Asked about the rows of a pass, it says `found`, and counts how often it was."""

    def __init__(self, found: str) -> None:
        self.found, self.n_asked = found, 0

    def blemish(self) -> str:
        self.n_asked += 1
        return self.found


@pytest.mark.parametrize(
    ("found", "where"),
    [("", "step 0"), ("row 7 has nan", "step 0, where row 7 has nan; mend or leave out that row")],
)
def test_rows_are_looked_at_when_a_gradient_is_refused_only(found: str, where: str) -> None:
    gradient = Looking(found)
    method = joined(tasks=2, gradient=gradient)
    method.step(0.0)
    assert (method.n_computed, gradient.n_asked) == (1, 0)
    method.refuses = True
    method.step(0.0)
    assert (method.n_computed, gradient.n_asked) == (2, 1)
    assert method.rounds.totals.refused_where == where


def test_what_is_to_be_sent_is_sent_before_anything_is_computed() -> None:
    method = joined(tasks=1)
    assert method.step(0.0, [Send("shard-0", Hello(1))]) == [Hello(1)]
    assert method.entered == []


def test_a_report_that_is_due_is_made_with_whatever_else_is_said() -> None:
    method = joined()
    assert method.rounds.due == REPORT_S
    said = method.step(REPORT_S, [Send("shard-0", Hello(1))])
    assert [type(message) for message in said] == [Hello, Report]
    assert method.rounds.due == 2 * REPORT_S


@pytest.mark.parametrize(
    ("phase", "tasks", "state"),
    [
        (Phase.JOINING, 1, "joining"),
        (Phase.IDLE, 0, "waiting"),
        (Phase.IDLE, 1, "running"),
        (Phase.FETCHING, 0, "running"),
        (Phase.SLOT, 0, "running"),
        (Phase.COMPUTE, 0, "running"),
        (Phase.COMPUTED, 0, "running"),
        (Phase.FLUSH, 0, "running"),
        (Phase.FINISHED, 1, "finished"),
        (Phase.HALTED, 1, "halted"),
    ],
)
def test_a_report_says_what_the_worker_does(phase: Phase, tasks: int, state: str) -> None:
    """docs/protocol.md, Report: waiting is to have nothing to do."""
    method = Method(tasks)
    method.rounds.phase = phase
    [effect] = method.rounds.report(0.0, method)
    assert isinstance(effect, Send)
    assert effect.to == CONTROLLER
    assert isinstance(effect.message, Report)
    assert effect.message.state == state


def test_seconds_are_counted_to_the_phase_that_is_left() -> None:
    """A computation is over before the `now` of the step after it, not before that of its own."""
    method = joined()
    rounds = method.rounds
    rounds.to(1.0, Phase.FETCHING)
    rounds.to(3.0, Phase.SLOT)
    rounds.to(7.0, Phase.COMPUTE)
    rounds.talk.begin(method._compute())
    method.step(7.0)
    assert rounds.phase is Phase.COMPUTED
    rounds.talk.waited_s = 0.5  # in exchanges with other partitions, no computing
    rounds.to(15.0, Phase.IDLE)
    totals = rounds.totals
    assert (totals.fetch_wait_s, totals.push_wait_s, totals.compute_s) == (2.0, 4.0, 7.5)
    rounds.to(100.0, Phase.SLOT)  # who waits to be told what to do waits for no shard
    rounds.to(101.0, Phase.COMPUTE)
    rounds.phase = Phase.COMPUTED
    rounds.to(102.0, Phase.IDLE)
    assert (totals.fetch_wait_s, totals.push_wait_s, totals.compute_s) == (2.0, 5.0, 8.5)


def test_finish_ends_every_worker() -> None:
    assert Method().rounds.receive(0.0, BOSS, Finish()) == [Done("finished")]
