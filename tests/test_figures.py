"""The run in numbers: sums and differences of totals."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from dbctl.roles.figures import RATE_WINDOW_S, Figures, Part
from dbctl.wire import Loss, Position, Report, ShardReport


def report(step: int = 0, epoch: int = 0, index: int = 0, **changes: Any) -> Report:
    fields: dict[str, Any] = dict.fromkeys(Report.__struct_fields__, 0)
    fields |= {"state": "running", "epoch_loss": Loss(), "last_epoch_loss": Loss()}
    return Report(**(fields | {"position": Position(step, epoch, index)} | changes))


def make(**changes: Any) -> Figures:
    return Figures(
        {
            0: Part(rows=30, steps_per_epoch=3, batch_size=12),
            1: Part(rows=10, steps_per_epoch=1, batch_size=12),
        },
        **changes,
    )


def test_steps_are_the_sum_over_replicas_and_begin_where_they_stood() -> None:
    figures = Figures(
        {
            0: Part(rows=4, steps_per_epoch=2, begin=Position(6, 3, 0)),
            1: Part(rows=4, steps_per_epoch=2),
        }
    )
    assert (figures.steps, figures.n_replicas) == (6, 2)
    figures.report(0.0, 1, report(5, 2, 1))
    assert figures.steps == 11


def test_epochs_are_passes_of_all_replicas_weighted_by_rows_and_a_death_is_no_jump() -> None:
    figures = make()
    figures.report(0.0, 0, report(7, 2, 1))
    figures.report(0.0, 1, report(4, 4, 0))
    before = figures.epochs
    assert before == pytest.approx((30 * (2 + 1 / 3) + 10 * 4) / 40)
    assert figures.reachable_epochs(10) == 10
    figures.dead.add(0)
    assert figures.epochs == before
    assert figures.left_out() == {0: 30}
    assert figures.steps == 11  # what it did was done
    figures.report(1.0, 1, report(10, 10, 0))
    assert figures.epochs == figures.reachable_epochs(10) > before  # the bar ends at its end
    figures.dead.add(1)
    assert figures.epochs == pytest.approx((30 * (2 + 1 / 3) + 10 * 10) / 40)  # not none


def test_a_checkpoint_may_be_ahead_of_the_last_reports() -> None:
    figures = make(examples=7)
    figures.report(0.0, 0, report(7, 2, 1, examples=72))
    figures.report(0.0, 1, report(4, 4, 0, examples=40))
    figures.reach({0: Position(8, 2, 2), 1: Position(3, 3, 0)})
    assert figures.steps == 8 + 4
    assert figures.epochs == pytest.approx((30 * (2 + 2 / 3) + 10 * 4) / 40)
    assert figures.examples == 7 + 72 + 12 + 40


def test_examples_at_a_cut_that_is_ahead_of_the_reports_or_behind_them() -> None:
    figures = make(examples=7)
    at = {0: Position(8, 2, 2), 1: Position(3, 3, 0)}  # replica 0: batches of 12, 12 and 6
    assert figures.examples_at(at) == 7 + 2 * 30 + 24 + 3 * 10
    figures.report(0.0, 0, report(7, 2, 1, examples=70))  # 2 of its 72 were refused
    figures.report(0.0, 1, report(5, 5, 0, examples=50))
    assert figures.examples_at(at) == 7 + 70 + 12 + 50 - 20
    at = {0: Position(9, 3, 0), 1: Position(5, 5, 0)}
    assert figures.examples_at(at) == 7 + 70 + 18 + 50


def test_examples_of_a_dead_replica_are_those_that_the_shards_have_applied() -> None:
    """As a checkpoint says it and a resume counts on; it may be ahead of the last report."""
    figures = make(examples=7)
    figures.report(0.0, 0, report(7, 2, 1, examples=70))  # 2 of its 72 were refused
    figures.report(0.0, 1, report(5, 5, 0, examples=50))
    for place, examples in ((Position(9, 3, 0), 70 + 18), (Position(6, 2, 0), 70 - 12)):
        figures.settle(0, place)
        assert figures.examples == 7 + examples + 50
        assert figures.examples_at({0: place, 1: Position(5, 5, 0)}) == figures.examples
        assert figures.summary(1.0)["examples"] == figures.examples


def test_examples_are_the_sum_over_replicas_whatever_came_before() -> None:
    random = Random(3)
    figures = make(examples=7)
    for _ in range(200):
        replica = random.randrange(2)
        at = Position(random.randrange(99), random.randrange(9), 0)
        match random.randrange(12):
            case 0:
                figures.settle(replica, at)
            case 1:
                figures.reach({replica: at})
            case _:
                figures.report(0.0, replica, report(at.step, at.epoch, examples=10 * at.step))
        assert figures.examples == figures.examples_at({})


def test_loss_of_the_epoch_in_hand_or_of_the_last_whole_one() -> None:
    figures = make()
    assert figures.loss(last_epoch=False) is None
    figures.report(0.0, 0, report(epoch_loss=Loss(10.0, 5), last_epoch_loss=Loss(40.0, 10)))
    figures.report(0.0, 1, report(epoch_loss=Loss(), last_epoch_loss=Loss(20.0, 10)))
    assert figures.loss(last_epoch=False) == (10 + 20) / (5 + 10)
    assert figures.loss(last_epoch=True) == (40 + 20) / 20


def test_seconds_run_from_the_begin_to_the_end_and_add_to_an_earlier_life() -> None:
    figures = make(examples=100, seconds=50.0)
    assert figures.seconds(7.0) == 50.0
    figures.begin(10.0)
    figures.report(12.0, 0, report(examples=40))
    assert figures.seconds(14.0) == 54.0
    figures.end(20.0)
    figures.end(99.0)
    assert figures.seconds(100.0) == 60.0
    assert figures.examples == 140
    assert figures.mean_examples_per_second(100.0) == 4.0  # of this life


def test_the_rate_shown_is_that_of_the_last_seconds() -> None:
    figures = make()
    figures.begin(0.0)
    assert figures.examples_per_second(0.0) is None
    figures.report(0.0, 0, report(examples=0))
    figures.report(1.0, 0, report(examples=1000))
    assert figures.examples_per_second(1.0) == 1000
    figures.report(RATE_WINDOW_S + 1, 0, report(examples=1500))
    assert figures.examples_per_second(RATE_WINDOW_S + 1) == 100


def test_there_is_no_rate_before_the_first_example_of_this_life() -> None:
    """Workers report from the first second on; "0 examples/s" said the run stood still."""
    figures = make(examples=5000, seconds=60.0)
    figures.begin(0.0)
    for now in (0.5, 1.0, 3.0):
        figures.report(now, 0, report(examples=0))
        assert figures.examples_per_second(now) is None
        assert figures.summary(now)["examples_per_second"] is None
    figures.report(4.0, 0, report(1, examples=12))
    assert figures.examples_per_second(4.0) == figures.mean_examples_per_second(4.0) == 12 / 4.0


def test_the_first_record_makes_no_rate_of_its_moment() -> None:
    """Two reports a millisecond apart once said 3 million examples a second."""
    figures = make(examples=5000)
    figures.begin(100.0)
    figures.report(100.010, 0, report(examples=32))
    figures.report(100.011, 1, report(examples=32))
    assert figures.examples_per_second(100.011) is None
    figures.report(100.5, 0, report(1, examples=136))
    assert figures.examples_per_second(100.5) == pytest.approx((136 + 32) / 0.5)


def losses(now: float, *, first: Loss, last: Loss | None = None) -> Figures:
    figures = make()
    figures.begin(0.0)
    figures.report(0.5, 0, report(1, epoch_loss=first))
    if last is not None:
        figures.report(now, 0, report(9, 1, 0, last_epoch_loss=last))
    return figures


@pytest.mark.parametrize(
    ("last", "diverged"),
    [
        (None, False),
        (Loss(100.0, 40), False),
        (Loss(39.9 * 25, 40), False),
        (Loss(40.1 * 25, 40), True),
        (Loss(float("inf"), 40), True),
        (Loss(float("nan"), 40), True),
    ],
)
def test_a_loss_ten_times_the_first_or_not_finite_has_diverged(
    last: Loss | None, diverged: bool
) -> None:
    figures = losses(9.0, first=Loss(80.0, 32), last=last)
    assert figures.first_loss == 2.5
    assert figures.diverged() is diverged


def test_a_first_loss_of_few_rows_says_little() -> None:
    figures = losses(9.0, first=Loss(0.001, 1), last=Loss(100.0, 40))
    assert figures.first_loss is None
    assert not figures.diverged()
    figures.report(10.0, 0, report(10, 1, 1, epoch_loss=Loss(float("inf"), 32)))
    assert figures.first_loss is None
    assert not make().diverged()


def test_staleness_adds_shards_and_workers() -> None:
    figures = make()
    assert figures.mean_staleness() is None
    for shard, counts in {"shard-0": (("a", 0, 3), ("b", 2, 1)), "shard-1": (("a", 2, 4),)}.items():
        figures.shard_report(shard, ShardReport(1, 8, 8, 0, 0, 0, (), counts))
    assert figures.staleness() == {0: 3, 2: 5}
    assert figures.mean_staleness() == 10 / 8
    # Totals, of which a report may hold a part: the others stay.
    figures.shard_report("shard-0", ShardReport(1, 9, 9, 0, 0, 0, (), (("b", 2, 4),)))
    assert figures.staleness() == {0: 3, 2: 8}


def test_the_staleness_of_each_worker_is_its_own() -> None:
    figures = make()
    told = [("worker-0.0", 0, 1), ("worker-1.0", 0, 4), ("worker-0.0", 2, 3)]
    for shard, more in (("shard-0", 0), ("shard-1", 1), ("shard-1", 2)):
        counts = tuple((worker, value, count + more) for worker, value, count in told)
        figures.shard_report(shard, ShardReport(1, 4, 4, 7, 9, 0, (), counts))
    assert figures.staleness_of("worker-0.0") == {0: 1 + 3, 2: 3 + 5}
    assert figures.staleness_of("worker-1.0") == {0: 4 + 6}
    assert figures.staleness_of("shard-0") == {}
    assert figures.staleness() == {0: 14, 2: 8}


def test_figures_of_all_replicas_take_time_that_grows_with_them() -> None:
    """With their square, those of 500 were more than a second of each second."""

    def filled(replicas: int) -> Figures:
        parts = {n: Part(rows=30, steps_per_epoch=3) for n in range(replicas)}
        figures = Figures(parts)
        counts = tuple((f"worker-{n}.0", value, 1) for n in parts for value in range(4))
        figures.shard_report("shard-0", ShardReport(1, 4, 4, 7, 9, 0, (), counts))
        return figures

    def tell(figures: Figures) -> None:
        for n in range(figures.n_replicas):
            figures.staleness_of(f"worker-{n}.0")

    def hear(figures: Figures) -> None:
        for n in range(figures.n_replicas):
            figures.report(0.0, n, report(1, examples=1))

    def seconds(replicas: int, work: Callable[[Figures], None]) -> float:
        figures = filled(replicas)
        began = time.thread_time()
        work(figures)
        return time.thread_time() - began

    for work in (tell, hear):
        few, many = (min(seconds(n, work) for _ in range(3)) for n in (100, 2000))
        assert many < 100 * few, work.__name__


def test_waits_and_refusals() -> None:
    figures = make()
    assert figures.fetch_wait_share() is None
    figures.report(0.0, 0, report(compute_s=3.0, fetch_wait_s=0.5, push_wait_s=0.5, refused=2))
    figures.report(0.0, 1, report(compute_s=6.0, refused=1))
    assert figures.fetch_wait_share() == 0.1
    assert figures.refused() == 3


def test_pushes_that_a_shard_refuses_are_counted_and_in_a_row_until_it_applies_one() -> None:
    figures = make()

    def say(updates: int, refused: int, shard: str = "shard-0") -> int:
        figures.shard_report(shard, ShardReport(1, updates, updates, 0, 0, refused, (), ()))
        return figures.refused_in_a_row(shard)

    assert figures.refused_in_a_row("shard-0") == 0
    assert [say(0, 2), say(0, 3), say(4, 3), say(4, 5), say(5, 9), say(5, 20)] == [
        2,
        3,
        0,
        2,
        0,
        11,
    ]
    assert say(7, 1, "shard-1") == 0
    assert figures.refused_pushes() == 21
    assert figures.refused() == 0


def test_what_was_not_measured_is_none() -> None:
    figures = make()
    assert figures.summary(0.0) == {
        "steps": 0,
        "epochs": 0.0,
        "examples": 0,
        "seconds": 0.0,
        "examples_per_second": None,
        "train_loss": None,
        "test_loss": None,
        "test_accuracy": None,
    }
