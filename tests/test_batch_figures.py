"""roles/batch_figures.py: iterations as steps, passes as epochs, the batch's loss."""

from __future__ import annotations

from dbctl.optim.commands import Iterated
from dbctl.roles.batch_figures import BatchFigures
from dbctl.wire import Loss, Position, Report


def iterated(number: int, loss: float) -> Iterated:
    return Iterated(
        iteration=number,
        loss=loss,
        gradient_norm=loss / 10,
        step_length=1.0,
        evaluations=number + 1,
        loss_before=loss + 1,
        slope_before=-1.0,
        slope=-0.1,
        approximate=False,
        restarted=False,
        state={},
    )


def report(examples: int) -> Report:
    position = Position(3, 1, 2)
    counts = dict.fromkeys(("pushed", "acked", "gradients", "refused_in_a_row"), 1)
    times = dict.fromkeys(("compute_s", "fetch_wait_s", "push_wait_s", "exchange_wait_s"), 0.5)
    moved = dict.fromkeys(("bytes_pushed", "bytes_fetched", "bytes_exchanged"), 8)
    return Report(
        state="running",
        position=position,
        until=4,
        examples=examples,
        epoch_loss=Loss(99.0, 1),
        last_epoch_loss=Loss(),
        refused=2,
        **counts,
        **times,
        **moved,
    )


def test_steps_are_iterations_and_epochs_are_passes() -> None:
    figures = BatchFigures(2, rows=100, iteration=3, passes=4.0, examples=400, seconds=1.0)
    figures.begin(10.0)
    assert (figures.steps, figures.epochs) == (3, 4.0)
    figures.evaluated(100)
    figures.evaluated(50)
    figures.iterated(iterated(4, 0.75))
    assert (figures.steps, figures.epochs) == (4, 5.5)
    assert figures.reachable_epochs(20) == 20
    assert figures.gradient_norm == 0.075


def test_the_loss_is_the_whole_batchs_not_what_workers_report() -> None:
    figures = BatchFigures(2, rows=100)
    figures.begin(0.0)
    figures.report(1.0, 0, report(60))
    assert figures.loss(last_epoch=False) is None
    figures.iterated(iterated(1, 0.5))
    assert figures.loss(last_epoch=True) == 0.5
    summary = figures.summary(2.0)
    assert (summary["train_loss"], summary["examples"], summary["steps"]) == (0.5, 60, 1)


def test_a_dead_replica_leaves_nothing_out_and_a_trial_too_far_is_no_fault() -> None:
    figures = BatchFigures(2, rows=100)
    figures.begin(0.0)
    figures.report(1.0, 1, report(60))
    figures.dead.add(1)
    assert figures.left_out() == {}
    assert figures.refused() == 0
    assert figures.mean_staleness() is None
    assert figures.examples_at({0: Position(9)}) == 60
