"""run/session.py over processes that play a script: what ends a run, as what, and how gently.

No process, link, thread or wait: `Staged.run` plays one turn for each time that the session asks
what has come, and the clock stands still unless a turn moves it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from errno import EMFILE
from math import inf
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import pytest

from dbctl.errors import LaunchError, RunError
from dbctl.launch.base import AgentHandle
from dbctl.roles.base import Done, Effects, Record, Save, Send
from dbctl.roles.leader import Leader
from dbctl.run import session as module
from dbctl.run.nodes import Node
from dbctl.run.processes import GOODBYE_S, SHORT_GOODBYE_S, Processes
from dbctl.run.saver import Saved, Saver
from dbctl.run.session import FINAL_LIMIT_S, HELD_UP_S, Outcome, Session
from dbctl.run.shipments import Shipments
from dbctl.run.signals import Signals
from dbctl.run.vectors import Vectors
from dbctl.wire import Cut, Exited, Message, Peer

Come = Sequence[tuple[Peer, Message]]
Turn = Come | Callable[[], Come | None]  # what comes, or what happens before it does

LEASE_S = 100.0
SHARD, AGENT = Peer("shard-0", 1), Peer("agent-0", 1)
SOMETHING: Come = [(SHARD, Cut(1))]  # which the coordinator hears, and answers as the test says
EXITED = Exited("shard-0", 1, -9, "the tail")
DEATH: Come = [(AGENT, EXITED)]
DIED = LaunchError("shard-0", "was killed by SIGKILL")
AGENT_ENDED = LaunchError("agent-0", "ended early")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


class StandingStill:
    """In the place of the pulse: `stood_s` is what it finds when it is asked next."""

    stood_s = 0.0
    n_closed = 0

    def start(self) -> None:
        """No thread."""

    def standstill(self) -> float:
        found, StandingStill.stood_s = StandingStill.stood_s, 0.0
        return found

    def close(self) -> None:
        StandingStill.n_closed += 1


class Book:
    """In the place of the book of nodes."""

    def __init__(self) -> None:
        self.ready = True
        self.excused: list[float] = []

    def excuse(self, now: float) -> None:
        self.excused.append(now)


class Players:
    """In the place of the processes. `told`: a death as it is told; None: it is nobody's.

    `goodbye`: how gently they were to end; `meanwhile` happens then; `hurried`: what comes of it.
    """

    def __init__(self) -> None:
        self.lease_s = LEASE_S
        self.nodes = Book()
        self.turns: list[Turn] = []
        self.sent: list[tuple[str, Message]] = []
        self.told: Exited | None = EXITED
        self.cannot_come_up: LaunchError | None = None
        self.agent_ended: LaunchError | None = None
        self.orphaned_by: LaunchError | None = None
        self.buried: list[Exited] = []
        self.goodbye: tuple[str, ...] | None = None
        self.meanwhile: Callable[[Callable[[], bool]], None] = lambda pressed: None
        self.hurried: bool | None = None
        self.closed = False
        self.begun = False

    def bring_agents(self) -> None:
        if self.cannot_come_up is not None:
            raise self.cannot_come_up

    def wake(self) -> None:
        """Nobody waits."""

    def plan_nodes(self, make_nodes: Callable[[Sequence[AgentHandle]], Mapping[str, Node]]) -> None:
        make_nodes([])

    def start(self, now: float) -> None:
        """They come up as the test says."""

    def step_start(self, now: float) -> None:
        if self.agent_ended is not None:
            raise self.agent_ended

    def begin(self, now: float) -> None:
        self.begun = True

    def receive(self, wait_s: float) -> list[tuple[Peer, Message]]:
        assert self.turns, "the run goes on after all that was to end it"
        turn = self.turns.pop(0)
        return list((turn() if callable(turn) else turn) or [])

    def hear(self, now: float, peer: Peer, message: Message) -> bool:
        return False

    def bury(self, now: float, exited: Exited) -> Exited | None:
        self.buried.append(exited)
        return self.told

    def why_orphaned(self, exited: Exited) -> LaunchError | None:
        return self.orphaned_by

    def death(self, exited: Exited) -> LaunchError:
        assert exited is self.told
        return DIED

    def send(self, sends: Sequence[tuple[str, Message]]) -> None:
        self.sent += sends

    def step(self, now: float) -> None:
        """Nobody is silent."""

    def failure(self, now: float) -> LaunchError | None:
        return self.agent_ended

    def say_goodbye(self, *, orderly: bool, quick: bool, pressed: Callable[[], bool]) -> bool:
        assert self.goodbye is None
        assert not self.closed
        self.goodbye = ("orderly",) * orderly + ("quick",) * quick
        self.meanwhile(pressed)
        return quick if self.hurried is None else self.hurried

    def close(self) -> None:
        self.closed = True


class Coordinator:
    """`answer`: the effects of all that it hears."""

    def __init__(self) -> None:
        self.due = inf
        self.steps = 0
        self.started = False
        self.answer: Effects = []
        self.heard: list[Message] = []
        self.interrupted: list[str] = []
        self.saves: list[str] = []

    def start(self, now: float) -> Effects:
        self.started = True
        return []

    def receive(self, now: float, sender: Peer, message: Message) -> Effects:
        self.heard.append(message)
        return self.answer

    def step(self, now: float) -> Effects:
        self.steps += 1
        return self.answer

    def interrupt(self, now: float, status: str) -> Effects:
        self.interrupted.append(status)
        return []

    def saved(self, now: float, error: str) -> Effects:
        self.saves.append(error)
        return self.answer


class Noted:
    """In the place of the records: by name what they were told."""

    def __init__(self) -> None:
        self.deaths: list[tuple[str, Exited]] = []
        self.saves: list[Saved] = []
        self.records: list[Record] = []
        self.n_stopping = 0

    def record(self, record: Record) -> None:
        self.records.append(record)

    def node_died(self, name: str, exited: Exited) -> None:
        self.deaths.append((name, exited))

    def saved(self, saved: Saved) -> None:
        self.saves.append(saved)

    def stopping(self) -> None:
        self.n_stopping += 1

    def tick(self, now: float, nodes: object) -> None:
        """No display."""


class Writer:
    """In the place of the saver: `last` is ready when it is closed, after `waited_s` at most."""

    def __init__(self, last: Saved | None = None) -> None:
        self.answers: SimpleQueue[Saved] = SimpleQueue()
        self.far = self
        self.waited_s = 0.0
        self._last = last
        self.closed = False

    def due(self, now: float) -> list[tuple[str, Message]]:
        return []

    def close(self, wait_s: float) -> None:
        self.waited_s, self.closed = wait_s, True
        if self._last is not None:
            self.answers.put(self._last)


class Staged:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.processes = Players()
        self.coordinator = Coordinator()
        self.records = Noted()
        self.signals = Signals()
        self.writer = Writer()
        self.shipments = Shipments({}, {}, host_of={}, directory="")
        self.cuts: list[Any] = []

    def run(self, *turns: Turn) -> Outcome:
        """To its end; the processes are down however that comes."""
        self.processes.turns = list(turns)
        session = Session(
            processes=cast(Processes, self.processes),
            coordinator=cast(Leader, self.coordinator),
            records=self.records,
            signals=self.signals,
            vectors=Vectors(checkpoint="", statistics=""),
            shipments=self.shipments,
            save=lambda saver, effect: self.cuts.append((saver, effect.cut)),
        )
        try:
            return session.run(lambda agents: {}, lambda wake: cast(Saver, self.writer))
        finally:
            assert self.processes.closed

    def press(self) -> None:
        """Ctrl-C."""
        self.signals._handle(signal.SIGINT, None)


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Staged:
    clock = Clock()
    monkeypatch.setattr(module, "_now", clock)
    monkeypatch.setattr(module, "Pulse", StandingStill)
    monkeypatch.setattr(StandingStill, "stood_s", 0.0)
    monkeypatch.setattr(StandingStill, "n_closed", 0)
    return Staged(clock)


def test_what_the_coordinator_wants_is_carried_out_and_its_end_is_orderly(staged: Staged) -> None:
    record = Record("step", {"steps": 1})
    staged.coordinator.answer = [Send("shard-0", Cut(2)), record, Save("a cut"), Done("done")]
    assert staged.run(SOMETHING) == Outcome(status="done")
    assert staged.processes.begun
    assert staged.processes.sent == [("shard-0", Cut(2))]
    assert staged.records.records == [record]
    assert staged.cuts == [(staged.writer, "a cut")]
    assert staged.processes.goodbye == ("orderly",)


def test_what_became_of_a_cut_is_told(staged: Staged) -> None:
    saved = Saved(3, None, "disk full")
    staged.coordinator.answer = [Done("failed", "the checkpoint failed")]
    outcome = staged.run(lambda: staged.writer.answers.put(saved))
    assert outcome == Outcome(status="failed", reason="the checkpoint failed")
    assert (staged.records.saves, staged.coordinator.saves) == ([saved], ["disk full"])
    assert staged.processes.goodbye == ("orderly",), "all nodes live"


# --------------------------------------------------------------------------------------- deaths


def test_a_death_is_heard_in_the_words_in_which_it_is_told(staged: Staged) -> None:
    told = staged.processes.told = Exited("shard-0", 1, -9, "", word="nothing was heard of it")
    staged.coordinator.answer = [Done("failed", "shard-0 died")]
    staged.run(DEATH)
    assert staged.coordinator.heard == [told]
    assert staged.records.deaths == [("shard-0", told)]


def test_a_death_that_was_told_already_is_not_told_again(staged: Staged) -> None:
    staged.processes.told = None
    staged.processes.orphaned_by = AGENT_ENDED
    assert staged.run(DEATH, staged.press, staged.press).reason == "stopped at once"
    assert (staged.coordinator.heard, staged.records.deaths) == ([], [])


@pytest.mark.parametrize(
    ("done", "error"),
    [
        (Done("failed", "shard-0 died"), DIED),
        (Done("stopped", "a shard is gone: no final checkpoint"), DIED),
        (Done("stopped"), None),  # all was saved
        (Done("done", "the last replica had nothing left to do"), None),
        (Done("max_iterations", "steps"), None),  # the evaluator died in the final evaluation
        (Done("converged", "the gradient's norm"), None),
        (Done("line_search_failed", "none of 20 trials"), None),
    ],
)
def test_only_a_run_that_a_death_spoils_ends_by_it(
    staged: Staged, done: Done, error: LaunchError | None
) -> None:
    staged.coordinator.answer = [done]
    outcome = staged.run(DEATH)
    assert outcome == Outcome(status=done.status, reason=done.reason, error=error)
    assert staged.processes.goodbye == (() if error else ("orderly",))


def test_a_death_that_the_run_survives_is_not_blamed_for_its_end(staged: Staged) -> None:
    def fail() -> None:
        staged.coordinator.answer = [Done("failed", "no progress")]

    outcome = staged.run(DEATH, fail, SOMETHING)
    assert staged.records.deaths == [("shard-0", EXITED)]
    assert outcome == Outcome(status="failed", reason="no progress")


def test_a_death_before_all_are_ready_is_no_death_of_the_training(staged: Staged) -> None:
    staged.processes.nodes.ready = False
    staged.run(DEATH, staged.press)
    assert (staged.coordinator.heard, staged.records.deaths) == ([], [])


def test_nor_is_one_after_the_end(staged: Staged) -> None:
    staged.coordinator.answer = [Done("failed", "the first")]
    outcome = staged.run([(SHARD, Cut(1)), (AGENT, EXITED)])
    assert outcome == Outcome(status="failed", reason="the first")
    assert (staged.coordinator.heard, staged.records.deaths) == ([Cut(1)], [])
    assert staged.processes.buried == [EXITED], "the goodbye does not wait for it"


@pytest.mark.parametrize("signalled", [False, True])
def test_a_node_that_ends_because_its_agent_does_is_no_death(
    staged: Staged, signalled: bool
) -> None:
    staged.processes.orphaned_by = AGENT_ENDED
    outcome = staged.run(*[staged.press] * signalled, DEATH)
    assert outcome == Outcome(
        status="interrupted" if signalled else "failed",
        reason="agent-0 ended: the run cannot go on without it",
        error=AGENT_ENDED,
    )
    assert (staged.coordinator.heard, staged.records.deaths) == ([], [])
    assert staged.processes.goodbye == ()


def test_what_comes_with_the_end_of_an_agent_is_not_heard(staged: Staged) -> None:
    staged.processes.orphaned_by = AGENT_ENDED
    staged.coordinator.answer = [Done("interrupted")]
    outcome = staged.run(staged.press, [*DEATH, *SOMETHING])
    assert (outcome.status, outcome.error) == ("interrupted", AGENT_ENDED)
    assert staged.coordinator.heard == []
    assert staged.processes.goodbye == ()


def test_the_first_end_is_the_runs(staged: Staged) -> None:
    staged.coordinator.answer = [Done("stopped", "the first"), Done("done")]
    assert staged.run(SOMETHING) == Outcome(status="stopped", reason="the first")


def test_nothing_is_done_in_the_round_of_the_end(
    staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable() -> Effects:
        raise LaunchError("controller", "cannot read the data")

    def end() -> Come:
        monkeypatch.setattr(staged.shipments, "due", unreadable)
        staged.coordinator.due = staged.clock.now
        staged.writer.answers.put(Saved(3, None, "disk full"))
        return SOMETHING

    staged.coordinator.answer = [Done("done")]
    assert staged.run(end) == Outcome(status="done")
    assert (staged.coordinator.steps, staged.coordinator.saves) == (0, [])


def test_an_agent_that_ends_ends_the_run(staged: Staged) -> None:
    def end() -> None:
        staged.processes.agent_ended = AGENT_ENDED

    outcome = staged.run(end)
    assert (outcome.status, outcome.error) == ("failed", AGENT_ENDED)
    assert staged.processes.goodbye == ()


# -------------------------------------------------------------------------------------- signals


def test_the_first_signal_asks_and_the_run_ends_as_it_says(staged: Staged) -> None:
    staged.coordinator.answer = [Done("interrupted")]
    almost = FINAL_LIMIT_S - 0.1
    outcome = staged.run(staged.press, lambda: staged.clock.passes(almost), SOMETHING)
    assert outcome == Outcome(status="interrupted")
    assert staged.coordinator.interrupted == ["interrupted"], "asked once"
    assert staged.records.n_stopping == 1
    assert staged.processes.goodbye == ("orderly",)


def test_after_a_signal_a_failure_is_only_why_nothing_was_saved(staged: Staged) -> None:
    staged.coordinator.answer = [Done("failed", "shard-0 died")]
    outcome = staged.run(staged.press, DEATH)
    assert outcome == Outcome(status="interrupted", reason="shard-0 died", error=DIED)


def test_the_second_signal_ends_everything_at_once(staged: Staged) -> None:
    outcome = staged.run(staged.press, staged.press)
    assert outcome == Outcome(status="interrupted", reason="stopped at once")
    assert staged.coordinator.interrupted == ["interrupted"]
    assert staged.processes.goodbye == ("quick",)
    assert staged.writer.waited_s == SHORT_GOODBYE_S


def test_a_final_checkpoint_that_takes_too_long_is_given_up(staged: Staged) -> None:
    """G11: within 30 s of the first signal."""
    outcome = staged.run(staged.press, lambda: staged.clock.passes(FINAL_LIMIT_S))
    assert outcome == Outcome(status="interrupted", reason="it took longer than 28 s")
    assert staged.processes.goodbye == ("quick",)


@pytest.mark.parametrize(("n_heeded", "n_more"), [(0, 2), (1, 1), (2, 1)])
def test_who_presses_again_while_they_end_hurries_them(
    staged: Staged, n_heeded: int, n_more: int
) -> None:
    """The first of a run that ends by itself comes too late to mean anything."""
    seen: list[bool] = []

    def press_on(pressed: Callable[[], bool]) -> None:
        for _ in range(n_more):
            seen.append(pressed())
            staged.press()
        seen.append(pressed())

    staged.processes.meanwhile = press_on
    staged.coordinator.answer = [Done("done")]
    staged.run(*[staged.press] * n_heeded, *[SOMETHING] * (n_heeded < 2))
    assert seen == [False] * n_more + [True]


@pytest.mark.parametrize("hurried", [False, True])
def test_the_saver_has_as_long_as_the_nodes_had(staged: Staged, hurried: bool) -> None:
    """Also where somebody pressed only when all was over; what it has written meanwhile counts."""
    staged.processes.hurried = hurried
    last = Saved(7, Path("step-7"))
    staged.writer = Writer(last)
    staged.coordinator.answer = [Done("done")]
    staged.run(SOMETHING)
    assert staged.writer.waited_s == (SHORT_GOODBYE_S if hurried else GOODBYE_S)
    assert staged.records.saves == [last]


@pytest.mark.parametrize(("pressed", "status"), [(False, "failed"), (True, "interrupted")])
def test_a_controller_without_descriptors_ends_the_run(
    staged: Staged, pressed: bool, status: str
) -> None:
    """As any failure does: told as the reason, nothing orderly, all closed."""
    none_left = RunError("no descriptor left")

    def fail() -> Come:
        raise none_left

    outcome = staged.run(*[staged.press] * pressed, fail)
    assert outcome == Outcome(status=status, reason="no descriptor left", error=none_left)
    assert staged.processes.goodbye == ()
    assert staged.processes.closed


@pytest.mark.parametrize("ended", [False, True])
def test_whatever_fails_in_the_goodbye_all_is_closed_and_it_is_told(
    staged: Staged, ended: bool
) -> None:
    """A link that has no descriptors left says so each time that it is asked."""

    def fail(*_: object) -> None:
        raise OSError(EMFILE, "too many open files")

    staged.processes.meanwhile = fail
    staged.writer = Writer(Saved(7, Path("step-7")))
    staged.coordinator.answer = [Done("done")]
    with pytest.raises(OSError, match="too many open files"):
        staged.run(SOMETHING if ended else fail)
    assert staged.writer.closed
    assert [saved.step for saved in staged.records.saves] == [7]
    assert StandingStill.n_closed == 1
    assert staged.processes.closed


# -------------------------------------------------------------------------------- the beginning


def test_what_does_not_come_up_is_told_and_nothing_is_orderly(staged: Staged) -> None:
    staged.processes.cannot_come_up = AGENT_ENDED
    with pytest.raises(LaunchError, match="agent-0 ended early"):
        staged.run()
    assert staged.processes.goodbye == ()


def test_who_pressed_is_not_told_of_what_does_not_come_up(staged: Staged) -> None:
    staged.processes.cannot_come_up = AGENT_ENDED
    staged.press()
    assert staged.run() == Outcome(status="interrupted")


def test_an_agent_that_ends_while_they_come_up_is_told(staged: Staged) -> None:
    staged.processes.nodes.ready = False
    staged.processes.agent_ended = AGENT_ENDED
    with pytest.raises(LaunchError, match="agent-0 ended early"):
        staged.run([])


def test_a_signal_while_they_come_up_ends_it_before_the_training(staged: Staged) -> None:
    staged.processes.nodes.ready = False
    assert staged.run([], staged.press) == Outcome(status="interrupted")
    assert not staged.processes.begun
    assert not staged.coordinator.started
    assert staged.processes.goodbye == ()


# -------------------------------------------------------------------------------- a standstill


@pytest.mark.parametrize("ready", [False, True])
def test_after_a_standstill_of_a_lease_nothing_is_heard(staged: Staged, ready: bool) -> None:
    staged.processes.nodes.ready = ready

    def stop() -> Come:
        StandingStill.stood_s = LEASE_S + 1.0
        return SOMETHING

    staged.coordinator.answer = [Done("done")]
    outcome = staged.run(stop)
    assert outcome.status == "failed"
    assert outcome.reason.startswith("this process was stopped for 101.0 s, as long as the lease")
    assert staged.coordinator.heard == []


@pytest.mark.parametrize("node_first", [False, True])
def test_an_agents_end_after_a_standstill_of_almost_a_lease_is_the_standstills(
    staged: Staged, node_first: bool
) -> None:
    def stop() -> Come:
        StandingStill.stood_s = LEASE_S - 1.0
        if node_first:
            staged.processes.orphaned_by = AGENT_ENDED
            return DEATH
        staged.processes.agent_ended = AGENT_ENDED
        return []

    outcome = staged.run(stop)
    assert outcome.reason.startswith("this process was stopped for 99.0 s")
    assert outcome.error is None


@pytest.mark.parametrize(("since_s", "is_blamed"), [(LEASE_S, True), (LEASE_S + 5.0, False)])
def test_a_standstill_is_no_reason_for_what_comes_much_later(
    staged: Staged, since_s: float, is_blamed: bool
) -> None:
    def stop() -> None:
        StandingStill.stood_s = LEASE_S - 1.0

    def end() -> None:
        staged.clock.passes(since_s)
        staged.processes.agent_ended = AGENT_ENDED

    outcome = staged.run(stop, end)
    assert outcome.reason.startswith("this process was stopped") == is_blamed
    assert outcome.error == (None if is_blamed else AGENT_ENDED)


@pytest.mark.parametrize(("second_s", "is_blamed"), [(LEASE_S - 1.5, True), (1.0, False)])
def test_of_two_standstills_that_may_be_the_reason_the_newest_counts(
    staged: Staged, second_s: float, is_blamed: bool
) -> None:
    """Though the first was longer: an agent is found to have ended of the second later on."""

    def stop() -> None:
        StandingStill.stood_s = LEASE_S - 1.0

    def stop_again() -> None:
        staged.clock.passes(LEASE_S)
        StandingStill.stood_s = second_s

    def end() -> None:
        staged.clock.passes(LEASE_S)
        staged.processes.agent_ended = AGENT_ENDED

    outcome = staged.run(stop, stop_again, end)
    assert outcome.reason.startswith("this process was stopped for 98.5 s") == is_blamed
    assert outcome.error == (None if is_blamed else AGENT_ENDED)


def test_a_standstill_after_it_was_looked_for_is_found_with_the_agents_end(
    staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(now: float) -> None:
        StandingStill.stood_s = LEASE_S + 1.0
        staged.processes.agent_ended = AGENT_ENDED

    monkeypatch.setattr(staged.processes, "step", stop)
    outcome = staged.run(SOMETHING)
    assert outcome.reason.startswith("this process was stopped for 101.0 s")
    assert outcome.error is None


@pytest.mark.parametrize("slow", [False, True])
def test_the_silence_of_nodes_does_not_count_while_nobody_listened(
    staged: Staged, slow: bool
) -> None:
    staged.coordinator.answer = [Done("done")]
    took_s = HELD_UP_S + 0.1 if slow else HELD_UP_S - 0.1
    staged.run(lambda: staged.clock.passes(took_s), SOMETHING)
    assert staged.processes.nodes.excused == ([staged.clock.now] if slow else [])
