"""The coordinator: grants, deaths, evaluations, cuts and the end, as lists of effects."""

from __future__ import annotations

from typing import Any

import pytest

from dbctl.experiment.specs import Every, StopSpec
from dbctl.roles.base import NEVER, Done, Effects, Record, Save, Send
from dbctl.roles.coordinator import MAX_REFUSED_IN_A_ROW, Coordinator, CoordinatorStart
from dbctl.roles.figures import Part
from dbctl.roles.grants import FIRST_GRANT_CUT
from dbctl.roles.leader import RESEND_S, Phase
from dbctl.roles.verdict import MEND
from dbctl.wire import (
    Cut,
    CutPart,
    Evaluate,
    Evaluated,
    Exited,
    Gone,
    Grant,
    Halt,
    Loss,
    Message,
    Peer,
    Position,
    Report,
    Return,
    ShardReport,
    WorkerRow,
)

AGENT = Peer("agent-0", 1)
PART = Part(rows=40, steps_per_epoch=10)


class Boss:
    """A coordinator, and its workers' totals as they grow."""

    def __init__(self, replicas: int = 2, **changes: Any) -> None:
        given: dict[str, Any] = {"stop": StopSpec(steps=8), "save": False} | changes
        self.role = Coordinator(
            CoordinatorStart(
                workers={r: (f"worker-{r}.0",) for r in range(replicas)},
                parts=given.pop("parts", dict.fromkeys(range(replicas), PART)),
                shards=["shard-0", "shard-1"],
                **given,
            )
        )
        self.over: list[str] = []
        self.begun = self.role.start(0.0)

    def report(self, replica: int, step: int, state: str = "running", **changes: Any) -> Effects:
        fields: dict[str, Any] = dict.fromkeys(Report.__struct_fields__, 0)
        fields |= {"epoch_loss": Loss(), "last_epoch_loss": Loss(), "state": state}
        fields["position"] = Position(step, step // 10, step % 10)
        now = changes.pop("now", 0.1)
        report = Report(**(fields | changes))
        return self.role.receive(now, Peer(f"worker-{replica}.0", 1), report)

    def dies(self, node: str, *, steps: int = 0) -> Effects:
        """Its death, and both shards' word that it is over, after `steps` of its steps."""
        effects = self.role.receive(0.2, AGENT, Exited(node, 1, -9, ""))
        self.over.append(node)
        return effects + self.confirm(0, steps) + self.confirm(1, steps)

    def confirm(self, shard: int, steps: int = 0) -> Effects:
        rows = [WorkerRow(n, 1, 1, Position(steps, 0, steps)) for n in self.over if n[0] == "w"]
        report = ShardReport(1, 0, 0, 0, 0, 0, tuple(rows), (), tuple(self.over))
        return self.role.receive(0.2, Peer(f"shard-{shard}", 1), report)

    def part(self, number: int, shard: int, now: float = 0.3) -> Effects:
        row = WorkerRow("worker-0.0", 1, 1, Position(4, 0, 4))
        part = CutPart(number, "parameters", 1, 1, 0, 3, (row,))
        return self.role.receive(now, Peer(f"shard-{shard}", 1), part)

    def measured(self, number: int, correct: int = 9, node: str = "evaluator-0") -> Effects:
        answer = Evaluated(number, 0, 3, Loss(5.0, 10), correct, 10, 2)
        return self.role.receive(0.3, Peer(node, 1), answer)


def sent(effects: Effects, kind: type[Message] = Message) -> list[tuple[str, Any]]:
    return [
        (effect.to, effect.message)
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, kind)
    ]


def events(effects: Effects) -> list[str]:
    records = [effect.event for effect in effects if isinstance(effect, Record)]
    return [event for event in records if event != "shard"]


# --------------------------------------------------------------------------------------- granting


def test_it_begins_with_a_grant_for_every_replica() -> None:
    boss = Boss()
    assert boss.begun == [Send("worker-0.0", Grant(1, 2)), Send("worker-1.0", Grant(1, 1))]


def test_a_report_brings_the_next_grant_and_grants_never_pass_the_stop() -> None:
    boss = Boss(replicas=1)
    assert boss.begun == [Send("worker-0.0", Grant(1, 8, last=True))]
    assert sent(boss.report(0, 4)) == []


def test_all_partitions_of_a_replica_get_its_grant() -> None:
    start = CoordinatorStart(
        workers={0: ("worker-0.0", "worker-0.1")},
        parts={0: PART},
        shards=[],
        stop=StopSpec(steps=5),
        save=False,
    )
    assert sent(Coordinator(start).start(0.0)) == [
        ("worker-0.0", Grant(1, FIRST_GRANT_CUT)),
        ("worker-0.1", Grant(1, FIRST_GRANT_CUT)),
    ]


def test_grants_are_said_again_each_second_under_the_same_number() -> None:
    boss = Boss(replicas=1)
    assert boss.role.due == RESEND_S
    assert boss.role.step(RESEND_S) == boss.begun
    assert boss.role.step(RESEND_S + 0.5) == []
    assert boss.role.step(2 * RESEND_S) == boss.begun


def test_who_has_no_steps_to_do_is_not_working() -> None:
    boss = Boss(stop=StopSpec(steps=100), warmstart=50)
    assert boss.role.is_working("worker-0.0")
    assert not boss.role.is_working("worker-1.0")


def test_a_run_ends_when_all_have_pushed_all_and_it_was_acknowledged() -> None:
    boss = Boss(replicas=1)
    assert boss.role.phase is Phase.RUNNING
    assert Done("done") not in boss.report(0, 8, "finished", pushed=8, acked=7)
    assert boss.report(0, 8, "finished", pushed=8, acked=8)[-1] == Done("done")
    assert boss.role.phase is Phase.OVER
    assert boss.role.due == NEVER
    assert boss.report(0, 8, "finished") == []


def test_a_finish_report_of_one_replica_waits_for_the_other() -> None:
    boss = Boss(stop=StopSpec(epochs=1))
    for _ in range(2):
        boss.report(0, 8)
        boss.report(1, 8)
    assert boss.report(0, 10, "finished")[-1:] != [Done("done")]
    assert boss.report(1, 10, "finished")[-1] == Done("done")


# ----------------------------------------------------------------------------------------- deaths


def test_the_shards_are_told_of_a_dead_replica_and_its_grant_goes_to_the_others() -> None:
    boss = Boss()
    boss.report(0, 1)
    effects = boss.dies("worker-0.0", steps=1)
    assert sent(effects, Gone) == [
        ("shard-0", Gone("worker-0.0", 1)),
        ("shard-1", Gone("worker-0.0", 1)),
    ]
    assert events(effects) == ["lost"]
    assert sent(effects, Grant)[-1] == ("worker-1.0", Grant(4, 7, last=True))
    assert boss.report(0, 5) == []  # what still comes of it changes nothing
    assert boss.report(1, 7, "finished")[-1] == Done("done")


def test_a_finished_replica_does_what_a_dead_one_left() -> None:
    boss = Boss()
    granted = {0: 2, 1: 1}
    for _ in range(10):
        for replica in (0, 1):
            for to, grant in sent(boss.report(replica, granted[replica]), Grant):
                granted[int(to[7])] = grant.until
    boss.report(0, granted[0], "finished")
    effects = boss.dies("worker-1.0", steps=granted[1])
    left = 8 - granted[0] - granted[1]
    assert left == 0
    assert effects[-1] == Done("done")


def test_a_death_at_the_end_does_not_hold_up_the_run() -> None:
    boss = Boss(stop=StopSpec(epochs=1))
    for replica in (0, 1):
        boss.report(replica, 8)
    boss.report(0, 10, "finished")
    assert boss.dies("worker-1.0")[-1] == Done("done")


def test_fewer_replicas_than_the_least_end_the_run_as_failed() -> None:
    boss = Boss(min_replicas=2)
    effects = boss.dies("worker-1.0")
    assert sent(effects, Halt) == [("worker-0.0", Halt(push=True))]
    done = boss.report(0, 2, "halted")[-1]
    assert done == Done("failed", "1 replicas live, min_replicas is 2")


def test_a_death_after_the_last_acknowledgement_changes_nothing() -> None:
    """Final evaluation and final cut need no worker: nothing of it is left out, nothing failed."""
    boss = Boss(replicas=1, evaluators=[("evaluator-0",)])
    boss.report(0, 8)
    assert sent(boss.report(0, 8, "finished"), Evaluate) != []
    assert events(boss.dies("worker-0.0", steps=8)) == []
    assert boss.role.figures.left_out() == {}
    assert boss.measured(1)[-1] == Done("done")


def test_a_death_while_an_interrupted_run_stops_is_no_failure() -> None:
    boss = Boss(replicas=1)
    boss.role.interrupt(0.1, "interrupted")
    assert boss.dies("worker-0.0")[-1] == Done("interrupted")


def test_without_any_replica_the_run_has_failed() -> None:
    boss = Boss(replicas=1)
    assert boss.dies("worker-0.0")[-1] == Done("failed", "0 replicas live, min_replicas is 1")


def test_a_run_cannot_go_on_without_a_shard() -> None:
    boss = Boss()
    [done] = boss.dies("shard-1")
    assert isinstance(done, Done)
    assert done.status == "failed"
    assert "shard-1 died" in done.reason


@pytest.mark.parametrize("fault", ["rate", "data"])
def test_many_refused_gradients_in_a_row_end_the_run_with_advice(fault: str) -> None:
    """reliability.md, G14."""
    boss = Boss()
    where = "step 3, layers.0.weight" + (f", where row 7 has nan; {MEND}" * (fault == "data"))
    assert not any(
        isinstance(e, Done)
        for e in boss.report(0, 1, refused_in_a_row=MAX_REFUSED_IN_A_ROW, refused_where=where)
    )
    done = boss.report(0, 1, refused_in_a_row=MAX_REFUSED_IN_A_ROW + 1, refused_where=where)[-1]
    assert isinstance(done, Done)
    assert done.status == "failed"
    assert where in done.reason
    assert ("lower optimizer.rule.rate" in done.reason) == (fault == "rate")


def test_many_refused_pushes_in_a_row_end_the_run_with_advice() -> None:
    """Sums that overflow of gradients that are finite: only the shard sees it."""
    boss = Boss()

    def said(updates: int, refused: int) -> list[Done]:
        report = ShardReport(1, updates, updates, 0, 0, refused, (), ())
        effects = boss.role.receive(0.1, Peer("shard-1", 1), report)
        return [effect for effect in effects if isinstance(effect, Done)]

    assert said(3, 0) == said(4, 5) == said(4, 5 + MAX_REFUSED_IN_A_ROW) == []
    [done] = said(4, 5 + MAX_REFUSED_IN_A_ROW + 1)
    assert done.status == "failed"
    assert "shard-1 refused 11 pushes in a row, whose sums were not finite; lower" in done.reason


def test_pushes_that_were_refused_at_the_end_do_not_cost_the_final_checkpoint() -> None:
    """A shard says so once a second: the run may be over by then, and what is there is finite."""
    boss = Boss(replicas=1, evaluators=[("evaluator-0",)])
    assert sent(boss.report(0, 10, "finished"), Evaluate)
    report = ShardReport(1, 3, 3, 0, 0, MAX_REFUSED_IN_A_ROW + 5, (), ())
    late = ShardReport(1, 3, 3, 0, 0, 2 * MAX_REFUSED_IN_A_ROW + 6, (), ())
    for one in (report, late):
        effects = boss.role.receive(0.2, Peer("shard-1", 1), one)
        assert not any(isinstance(effect, Done) for effect in effects)


def test_who_would_have_measured_the_end_is_lost() -> None:
    boss = Boss(evaluators=[("evaluator-0",)])
    assert not boss.role.unmeasured
    boss.dies("evaluator-0")
    assert boss.role.unmeasured


def test_an_evaluator_that_is_lost_when_the_end_was_measured_takes_nothing_with_it() -> None:
    boss = Boss(replicas=1, evaluators=[("evaluator-0",)], save=True)
    boss.report(0, 10, "finished")
    boss.measured(1)
    assert boss.role.figures.test_accuracy == 0.9
    boss.dies("evaluator-0")
    assert boss.role.figures.test_accuracy == 0.9
    assert not boss.role.unmeasured


# ---------------------------------------------------------------------------------- stop by other


def test_stop_by_seconds_halts_and_pushes_and_ends() -> None:
    boss = Boss(stop=StopSpec(seconds=5.0))
    boss.report(0, 3)
    assert boss.role.step(4.9) != []
    assert sent(boss.role.step(5.0), Halt) == [
        ("worker-0.0", Halt(push=True)),
        ("worker-1.0", Halt(push=True)),
    ]
    assert sent(boss.role.step(6.0), Halt) != []  # again, until it shows
    boss.report(0, 3, "halted")
    assert boss.report(1, 3, "halted")[-1] == Done("done", "seconds")


def test_seconds_of_an_earlier_life_count() -> None:
    boss = Boss(stop=StopSpec(seconds=5.0), seconds=4.0)
    assert sent(boss.role.step(1.0), Halt) != []


@pytest.mark.parametrize("status", ["stopped", "interrupted"])
def test_an_interrupt_does_not_push_and_names_its_status(status: str) -> None:
    boss = Boss(evaluators=[("evaluator-0",)])
    assert sent(boss.role.interrupt(0.1, status)) == [
        ("worker-0.0", Halt(push=False)),
        ("worker-1.0", Halt(push=False)),
    ]
    boss.report(0, 1, "halted")
    assert boss.report(1, 1, "halted")[-1] == Done(status)  # nothing is measured


@pytest.mark.parametrize("measuring", [False, True])
def test_an_interrupt_at_the_end_takes_its_reason_away(measuring: bool) -> None:
    """The last line would give the stop that was reached as why it was interrupted."""
    boss = Boss(stop=StopSpec(seconds=5.0), evaluators=[("evaluator-0",)])
    boss.report(0, 3)
    boss.role.step(5.0)
    states = [lambda: boss.report(0, 3, "halted"), lambda: boss.report(1, 3, "halted")]
    if measuring:
        assert sent([effect for halt in states for effect in halt()], Evaluate) != []
        assert boss.role.interrupt(5.1, "interrupted")[-1] == Done("interrupted", "")
    else:
        assert boss.role.interrupt(5.1, "interrupted") == []
        assert [effect for halt in states for effect in halt()][-1] == Done("interrupted", "")


def test_an_interrupt_does_not_undo_a_failure() -> None:
    boss = Boss(replicas=2, min_replicas=2)
    boss.dies("worker-0.0")
    assert boss.role.interrupt(0.3, "interrupted") == []
    done = boss.report(1, 3, "halted")[-1]
    assert done == Done("failed", "1 replicas live, min_replicas is 2")


# ----------------------------------------------------------------------------------- evaluations


def test_evaluations_come_with_the_steps_one_at_a_time() -> None:
    boss = Boss(
        stop=StopSpec(steps=100),
        evaluators=[("evaluator-0",)],
        evaluate=Every(amount=5, unit="steps"),
    )
    assert sent(boss.report(0, 4), Evaluate) == []
    assert sent(boss.report(1, 1), Evaluate) == [("evaluator-0", Evaluate(1))]
    assert sent(boss.report(1, 8), Evaluate) == []  # the first is under way
    assert sent(boss.role.step(RESEND_S), Evaluate) == [("evaluator-0", Evaluate(1))]
    effects = boss.measured(1)
    [record] = effects
    assert isinstance(record, Record)
    assert (record.event, record.fields["accuracy"], record.fields["loss"]) == (
        *("evaluation", 0.9, 0.5),
    )
    assert sent(boss.report(1, 9), Evaluate) == [("evaluator-0", Evaluate(2))]


def test_the_rows_are_shared_out_among_evaluators() -> None:
    boss = Boss(
        evaluators=[("evaluator-0",), ("evaluator-1",)],
        evaluate=Every(amount=1, unit="steps"),
    )
    assert sent(boss.report(0, 1), Evaluate) == [
        ("evaluator-0", Evaluate(1, 0, 2)),
        ("evaluator-1", Evaluate(1, 1, 2)),
    ]
    assert boss.measured(1) == []
    [record] = boss.measured(1, 5, node="evaluator-1")
    assert isinstance(record, Record)
    assert (record.fields["examples"], record.fields["accuracy"]) == (20, 0.7)


def test_reaching_the_accuracy_ends_the_run() -> None:
    boss = Boss(
        replicas=1,
        stop=StopSpec(test_accuracy=0.95),
        evaluators=[("evaluator-0",)],
        evaluate=Every(amount=1, unit="steps"),
    )
    boss.report(0, 1)
    assert sent(boss.measured(1, 9), Halt) == []
    boss.report(0, 2)
    assert sent(boss.measured(2, 10), Halt) == [("worker-0.0", Halt(push=True))]


def test_the_end_is_measured_on_the_final_parameters() -> None:
    boss = Boss(replicas=1, evaluators=[("evaluator-0",)], evaluate=Every(amount=1, unit="epochs"))
    effects = boss.report(0, 8, "finished")
    assert sent(effects, Evaluate) == [("evaluator-0", Evaluate(1))]
    assert boss.role.phase is Phase.MEASURING
    assert boss.measured(1)[-1] == Done("done")


def test_an_evaluation_under_way_at_the_end_is_followed_by_the_final_one() -> None:
    boss = Boss(replicas=1, evaluators=[("evaluator-0",)], evaluate=Every(amount=1, unit="steps"))
    assert sent(boss.report(0, 7), Evaluate) == [("evaluator-0", Evaluate(1))]
    assert sent(boss.report(0, 8, "finished"), Evaluate) == []
    assert sent(boss.measured(1), Evaluate) == [("evaluator-0", Evaluate(2))]
    assert boss.measured(1) == []  # repeated
    assert boss.measured(2)[-1] == Done("done")


@pytest.mark.parametrize(("version", "again"), [(3, False), (2, True)])
def test_an_evaluation_of_the_final_parameters_is_not_repeated(version: int, again: bool) -> None:
    """It was under way at the end; the final cut says that it holds 3 updates."""
    every = Every(amount=1, unit="steps")
    boss = Boss(replicas=1, evaluators=[("evaluator-0",)], evaluate=every, save=True)
    boss.report(0, 7)
    boss.report(0, 8, "finished")
    row = WorkerRow("worker-0.0", 1, 1, Position(8, 0, 8))
    for shard in (0, 1):
        part = CutPart(1, "parameters", 1, 1, 0, 3, (row,))
        boss.role.receive(0.3, Peer(f"shard-{shard}", 1), part)
    boss.role.saved(0.4, "")
    answer = Evaluated(1, 0, version, Loss(5.0, 10), 9, 10, 2)
    effects = boss.role.receive(0.5, Peer("evaluator-0", 1), answer)
    assert bool(sent(effects, Evaluate)) is again
    assert (effects[-1] == Done("done")) is not again


def test_a_run_goes_on_without_its_evaluator_unless_it_alone_would_end_it() -> None:
    every = Every(amount=1, unit="steps")
    boss = Boss(replicas=1, evaluators=[("evaluator-0",)], evaluate=every)
    assert events(boss.dies("evaluator-0")) == ["lost"]
    assert boss.report(0, 8, "finished")[-1] == Done("done")
    stop = StopSpec(test_accuracy=0.9)
    boss = Boss(replicas=1, evaluators=[("evaluator-0",)], evaluate=every, stop=stop)
    assert sent(boss.dies("evaluator-0"), Halt) == [("worker-0.0", Halt(push=True))]
    done = boss.report(0, 1, "halted")[-1]
    assert isinstance(done, Done)
    assert done.status == "failed"


def test_with_no_worker_it_only_measures() -> None:
    """`dbctl eval`."""
    boss = Boss(replicas=0, evaluators=[("evaluator-0",)])
    assert boss.begun == [Send("evaluator-0", Evaluate(1))]
    assert boss.measured(1)[-1] == Done("done")


# ------------------------------------------------------------------------------------------ cuts


def saving(**changes: Any) -> Boss:
    every = Every(amount=4, unit="steps")
    return Boss(**({"stop": StopSpec(steps=1000), "save": True, "checkpoint": every} | changes))


def test_a_checkpoint_is_a_mark_in_a_grant() -> None:
    boss = saving()
    effects = boss.report(0, 4)
    marked = [(to, g) for to, g in sent(effects, Grant) if g.mark]
    [(to, grant)] = marked
    assert (to, grant.mark) == ("worker-1.0", 1)  # who is furthest back
    assert sent(boss.report(0, 8), Cut) == []


def test_a_complete_cut_is_saved_and_given_back_when_it_is_written() -> None:
    boss = saving()
    boss.report(0, 4)
    assert boss.part(1, 0) == []
    [save] = boss.part(1, 1)
    assert isinstance(save, Save)
    assert (save.cut.number, save.cut.step, save.cut.updates) == (1, 4, 3)
    assert boss.part(1, 1) == []  # said again while it is written
    assert boss.role.saved(1.0, "") == [
        Send("shard-0", Return(1)),
        Send("shard-1", Return(1)),
    ]
    assert boss.part(1, 0) == [Send("shard-0", Return(1))]  # its Return was lost


def test_the_death_of_the_marker_asks_another() -> None:
    boss = saving()
    boss.report(0, 4)
    effects = boss.dies("worker-1.0")
    assert [(to, g.mark) for to, g in sent(effects, Grant) if g.mark] == [("worker-0.0", 2)]
    assert boss.part(1, 0) == [Send("shard-0", Return(1))]  # of the cut that was dropped


def test_the_end_asks_the_shards_themselves() -> None:
    boss = saving(replicas=1, stop=StopSpec(steps=3))
    effects = boss.report(0, 3, "finished")
    assert sent(effects, Cut) == [("shard-0", Cut(1)), ("shard-1", Cut(1))]
    assert sent(boss.role.step(RESEND_S), Cut) == [("shard-0", Cut(1)), ("shard-1", Cut(1))]
    boss.part(1, 0)
    [save] = boss.part(1, 1)
    assert isinstance(save, Save)
    assert save.cut.final
    assert boss.role.saved(2.0, "")[-1] == Done("done")


def test_a_cut_being_written_at_the_end_is_followed_by_the_final_one() -> None:
    boss = saving(replicas=1, stop=StopSpec(steps=100))
    boss.report(0, 4)
    boss.part(1, 0)
    boss.part(1, 1)
    grants = [grant for _, grant in sent(boss.report(0, 16), Grant)]
    while not grants[-1].last:
        grants += [grant for _, grant in sent(boss.report(0, grants[-1].until), Grant)]
    assert sent(boss.report(0, 100, "finished"), Cut) == []
    assert sent(boss.role.saved(1.0, ""), Cut) == [("shard-0", Cut(2)), ("shard-1", Cut(2))]


def test_a_final_checkpoint_that_cannot_be_written_is_a_failed_run() -> None:
    boss = saving(replicas=1, stop=StopSpec(steps=3))
    boss.report(0, 3, "finished")
    boss.part(1, 0)
    boss.part(1, 1)
    assert boss.role.saved(2.0, "disk full")[-1] == Done("failed", "disk full")
