"""What a worker reports: totals, losses by epoch, refusals in a row."""

from __future__ import annotations

from typing import Any

from dbctl.roles.base import BatchResult
from dbctl.roles.totals import Totals
from dbctl.wire import Loss, Position, Report


class Local:
    pushed, acked, bytes_pushed, bytes_fetched = 7, 5, 1000, 2000


class Talk:
    waited_s, bytes_sent = 1.5, 3000


def report(totals: Totals, state: str = "running") -> Report:
    local: Any = Local()
    talk: Any = Talk()
    return totals.report(state, Position(3, 1, 0), until=12, local=local, talk=talk)


def test_a_new_worker_has_nothing_to_tell() -> None:
    said = report(Totals(), "joining")
    assert (said.state, said.position, said.until) == ("joining", Position(3, 1, 0), 12)
    assert (said.examples, said.gradients, said.refused, said.refused_where) == (0, 0, 0, "")
    assert (said.epoch_loss, said.last_epoch_loss) == (Loss(), Loss())


def test_what_others_count_is_in_the_report() -> None:
    said = report(Totals())
    assert (said.pushed, said.acked, said.bytes_pushed, said.bytes_fetched) == (7, 5, 1000, 2000)
    assert (said.exchange_wait_s, said.bytes_exchanged) == (1.5, 3000)


def test_seconds_are_reported_each_under_its_name() -> None:
    totals = Totals()
    totals.compute_s, totals.fetch_wait_s, totals.push_wait_s = 1.0, 2.0, 4.0
    said = report(totals)
    assert (said.compute_s, said.fetch_wait_s, said.push_wait_s) == (1.0, 2.0, 4.0)


def test_losses_are_kept_by_epoch_and_all_else_from_the_beginning() -> None:
    totals = Totals()
    totals.accepted(BatchResult(6.0, 3))
    totals.accepted(BatchResult(2.0, 1))
    assert report(totals).epoch_loss == Loss(8.0, 4)
    totals.end_epoch()
    said = report(totals)
    assert (said.epoch_loss, said.last_epoch_loss) == (Loss(), Loss(8.0, 4))
    totals.accepted(BatchResult(1.0, 3))
    said = report(totals)
    assert (said.epoch_loss, said.last_epoch_loss) == (Loss(1.0, 3), Loss(8.0, 4))
    assert (said.examples, said.gradients) == (7, 3)


def test_refused_gradients_count_in_a_row_until_one_is_accepted() -> None:
    totals = Totals()
    assert not totals.news
    totals.refused_one("step 3, layers.0.weight")
    totals.refused_one("step 4, the loss")
    assert totals.news, "the coordinator should hear of it at once"
    said = report(totals)
    assert (said.refused, said.refused_in_a_row, said.refused_where) == (2, 2, "step 4, the loss")
    assert (said.examples, said.gradients) == (0, 0), "their rows are not counted"
    totals.accepted(BatchResult(1.0, 1))
    totals.refused_one("step 6, the loss")
    said = report(totals)
    assert (said.refused, said.refused_in_a_row) == (3, 1)
