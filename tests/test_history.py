"""A run's records as curves (dbctl/progress/history.py)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbctl.progress.history import Mark, common_accuracy, read_history

NOTHING = Mark(0.0)


def start(time: float = 0.0, **fields: Any) -> dict[str, Any]:
    made = {"name": "a", "optimizer": "downpour", "method": "sgd", "shards": 2}
    return {"event": "start", "time": time, "replicas": 2, "partitions": 1, **made, **fields}


def worker(time: float, replica: int, examples: int, **fields: Any) -> dict[str, Any]:
    made = {"node": f"worker-{replica}.0", "replica": replica, "examples": examples}
    return {"event": "worker", "time": time, **made, **fields}


def evaluation(time: float, accuracy: float | None, **fields: Any) -> dict[str, Any]:
    return {"event": "evaluation", "time": time, "accuracy": accuracy, "loss": 0.5, **fields}


def finished(time: float, **fields: Any) -> dict[str, Any]:
    return {"event": "finished", "time": time, "status": "done", "steps": 9, **fields}


def test_no_records() -> None:
    history = read_history([])
    assert (history.name, history.optimizer, history.status, history.steps) == (None, None, None, 0)
    assert history.spent == NOTHING
    assert history.best is history.last is history.reach(0.1) is None


def test_what_a_run_is() -> None:
    history = read_history([start(), finished(4.0, examples=90)])
    assert (history.name, history.optimizer) == ("a", "downpour sgd")
    assert read_history([start(optimizer="sgd")]).optimizer == "sgd"
    assert (history.replicas, history.partitions, history.shards) == (2, 1, 2)
    assert (history.status, history.steps) == ("done", 9)
    assert history.spent == Mark(4.0, 8.0, 90, 0)


# ----------------------------------------------------------------------------------- what is spent


def test_totals_of_all_nodes_are_summed_and_read_off_between_reports() -> None:
    history = read_history(
        [
            start(),
            worker(1.0, 0, 100, bytes_fetched=10, bytes_pushed=20, bytes_exchanged=0),
            worker(1.0, 1, 60, bytes_fetched=4, bytes_pushed=6),
            evaluation(2.0, 0.7),
            worker(3.0, 0, 300, bytes_fetched=30, bytes_pushed=60, bytes_exchanged=1),
            {"event": "shard", "time": 3.0, "node": "shard-0", "bytes_in": 999, "version": 7},
        ]
    )
    assert history.reach(0.7) == Mark(2.0, 4.0, (160 + 360) / 2, (40 + 101) / 2)
    assert history.spent == Mark(3.0, 6.0, 360, 101)


def test_partitions_of_a_replica_count_the_same_examples_and_their_own_bytes() -> None:
    parts = [
        worker(1.0, 0, 100, bytes_exchanged=5),
        worker(1.1, 0, 100, bytes_exchanged=7) | {"node": "worker-0.1"},
    ]
    history = read_history([start(replicas=1, partitions=2), *parts])
    assert (history.spent.examples, history.spent.bytes) == (100, 12)
    assert history.spent.replica_seconds == pytest.approx(2.2)


def test_a_lost_replica_is_not_counted_any_longer() -> None:
    """Its partitions are ended with it; that all of them are told as lost adds nothing."""
    lost = [
        {"event": "lost", "time": 3.0, "node": "worker-1.0", "rows": 5},
        {"event": "lost", "time": 3.0, "node": "worker-1.1"},
        {"event": "lost", "time": 4.0, "node": "evaluator-0"},
    ]
    history = read_history([start(partitions=2), *lost, finished(5.0)])
    assert history.spent.replica_seconds == 3 * 4 + 2 * 2


def test_without_counts_the_processes_are_those_that_reported() -> None:
    records = [
        {"event": "start", "time": 0.0}, worker(1.0, 0, 1), worker(1.0, 1, 1), finished(3.0),
    ]  # fmt: skip
    assert read_history(records).spent.replica_seconds == 1 + 2 * 2


# ----------------------------------------------------------------------------------------- curves


def test_the_training_loss_is_the_mean_over_the_replicas() -> None:
    history = read_history(
        [
            start(),
            worker(1.0, 0, 10, loss=2.0),
            worker(2.0, 1, 10, loss=1.0),
            worker(3.0, 0, 20, loss=None),
            worker(4.0, 0, 30, loss=0.5),
        ]
    )
    found = [(point.mark.seconds, point.value) for point in history.losses]
    assert found == [(1.0, 2.0), (2.0, 1.5), (4.0, 0.75)]


def test_a_batch_method_tells_its_own_loss_and_iterations() -> None:
    """Whatever the event is called; the workers then have no say in it."""
    iterations = [
        {"event": "iteration", "time": float(n), "iteration": n, "loss": 1 / n, "step_length": 1.0}
        for n in (1, 2)
    ]
    records = [start(optimizer="sandblaster", method="lbfgs"), worker(0.5, 0, 10, loss=9.0, step=7)]
    history = read_history([*records, *iterations, evaluation(2.5, 0.5)])
    assert [(p.mark.seconds, p.value) for p in history.losses] == [(1.0, 1.0), (2.0, 0.5)]
    assert (history.optimizer, history.steps) == ("sandblaster lbfgs", 2)


def test_steps_of_a_run_that_is_going_on() -> None:
    """Of all replicas; the newest evaluation may be older."""
    history = read_history([start(), worker(1.0, 0, 10, step=5), worker(1.0, 1, 10, step=6)])
    assert (history.steps, history.status) == (11, None)


def test_best_last_and_first_reached() -> None:
    history = read_history(
        [start(), *(evaluation(t, a) for t, a in [(1, 0.5), (2, 0.8), (3, 0.6)])]
    )
    assert (history.best, history.last) == (0.8, 0.6)
    reached = [history.reach(accuracy) for accuracy in (0.5, 0.51, 0.8, 0.81)]
    assert [mark and mark.seconds for mark in reached] == [1, 2, 2, None]


def test_float_targets_have_no_accuracy() -> None:
    history = read_history([start(), evaluation(1.0, None)])
    assert history.accuracies == ()


def test_the_common_accuracy_is_what_all_reached_that_measured() -> None:
    runs = [[0.5, 0.9], [0.7], [0.8, 0.6], []]
    histories = [read_history([start(), *(evaluation(1.0, a) for a in run)]) for run in runs]
    assert common_accuracy(histories) == 0.7
    assert common_accuracy(histories[3:]) is None


# ------------------------------------------------------------------------------------------ lives


def test_a_resume_takes_back_what_came_after_its_checkpoint() -> None:
    """docs/reliability.md, G18: time goes on from the checkpoint, and totals with it."""
    history = read_history(
        [
            start(),
            worker(4.0, 0, 400, bytes_pushed=40, loss=1.0),
            evaluation(4.0, 0.6),
            worker(8.0, 0, 800, bytes_pushed=80, loss=0.5),
            evaluation(8.0, 0.9),
            start(6.0, restore="x", replicas=1),
            worker(7.0, 0, 50, bytes_pushed=5, loss=0.8),
            evaluation(7.0, 0.7),
            finished(10.0, examples=700, status="stopped", steps=70),
        ]
    )
    assert [(p.mark.seconds, p.value) for p in history.accuracies] == [(4.0, 0.6), (7.0, 0.7)]
    assert history.reach(0.7) == Mark(7.0, 6 * 2 + 1, 650, 65)
    assert [p.value for p in history.losses] == [1.0, 0.8]
    assert history.spent == Mark(10.0, 6 * 2 + 4, 700, 65)
    assert (history.status, history.steps, history.replicas) == ("stopped", 70, 1)


def test_a_life_that_has_not_ended_is_not_done() -> None:
    assert read_history([start(), finished(4.0), start(4.0)]).status is None


def test_of_a_life_killed_before_its_first_report_nothing_is_counted_twice() -> None:
    records = [start(), worker(4.0, 0, 400), start(4.0), start(4.0), worker(5.0, 0, 100)]
    assert read_history(records).spent == Mark(5.0, 10.0, 500, 0)


# ---------------------------------------------------------------------------------- any records

FIELDS = ("accuracy", "loss", "examples", "steps", "step", "bytes_pushed", "replica", "iteration")
VALUES = st.one_of(
    st.none(), st.booleans(), st.text(max_size=3), st.integers(-5, 10**18),
    st.floats(), st.lists(st.integers(), max_size=2),
)  # fmt: skip
RECORDS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "event": st.sampled_from(["start", "worker", "evaluation", "finished", "lost", "new"]),
            "time": VALUES,
            "node": st.sampled_from(["worker-0.0", "worker-1.0", "shard-0", 7]),
            **dict.fromkeys(FIELDS, VALUES),
            **dict.fromkeys(("name", "optimizer", "status", "replicas", "partitions"), VALUES),
        },
    ),
    max_size=12,
)


@given(RECORDS)
def test_no_record_breaks_it(records: list[dict[str, Any]]) -> None:
    history = read_history(records)
    assert all(amount >= 0 for amount in history.spent)
    for curve in (history.losses, history.accuracies):
        marks = [point.mark for point in curve]
        assert all(
            later >= earlier
            for before, after in pairwise(marks)
            for earlier, later in zip(before, after, strict=True)
        )
