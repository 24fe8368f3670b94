"""What replicas are told, and when their workers count as at rest."""

from __future__ import annotations

from typing import Any

import pytest

from dbctl.roles.base import Effects, Send
from dbctl.roles.orders import Orders
from dbctl.wire import Grant, Halt, Loss, Position, Report

WORKERS = {0: ("worker-0.0", "worker-0.1"), 1: ("worker-1.0",)}


def make() -> Orders:
    return Orders(WORKERS, {0: Position(), 1: Position(5, 1, 0)})


def grant(orders: Orders, until: int, replica: int = 0, **changes: Any) -> Effects:
    fields: dict[str, Any] = {"last": False, "mark": (0, 0), "again": False} | changes
    return orders.grant(replica, until, **fields)


def report(state: str, step: int, *, pushed: int = 3, acked: int = 3) -> Report:
    return Report(
        state=state, position=Position(step, 0, step), until=0, pushed=pushed, acked=acked,
        examples=0, gradients=0, epoch_loss=Loss(), last_epoch_loss=Loss(), compute_s=0.0,
        fetch_wait_s=0.0, push_wait_s=0.0, exchange_wait_s=0.0, bytes_pushed=0, bytes_fetched=0,
        bytes_exchanged=0, refused=0, refused_in_a_row=0,
    )  # fmt: skip


def test_a_replica_stands_where_it_began_until_it_is_told_otherwise() -> None:
    orders = make()
    assert (orders.until(0), orders.until(1)) == (0, 5)
    assert not orders.is_last(1)


def test_all_partitions_are_told_the_same_under_one_number() -> None:
    orders = make()
    assert grant(orders, 8) == [
        Send("worker-0.0", Grant(1, 8)),
        Send("worker-0.1", Grant(1, 8)),
    ]
    assert grant(orders, 8) == []
    assert grant(orders, 8, again=True)[1] == Send("worker-0.1", Grant(1, 8))
    assert grant(orders, 8, mark=(3, 8))[0] == Send("worker-0.0", Grant(2, 8, False, 3, 8))
    assert grant(orders, 9, last=True)[0] == Send("worker-0.0", Grant(3, 9, last=True))
    assert (orders.until(0), orders.is_last(0)) == (9, True)
    assert orders.until(1) == 5


@pytest.mark.parametrize("push", [True, False])
def test_a_cut_replica_halts_at_its_granted_step_and_pushes(push: bool) -> None:
    orders = make()
    grant(orders, 8)
    cut, whole = Halt(push=True, until=8), Halt(push=push)
    expected = [
        Send("worker-0.0", cut),
        Send("worker-0.1", cut),
        Send("worker-1.0", whole),
    ]
    assert orders.halt([0, 1], push=push) == expected
    assert orders.halt_again([0, 1]) == expected
    assert orders.halt_again([1]) == expected[2:]


def test_a_replica_is_at_rest_when_all_its_partitions_are() -> None:
    orders = make()
    grant(orders, 8, last=True)
    orders.heard("worker-0.0", 0, report("finished", 8))
    assert not orders.at_rest([0])
    orders.heard("worker-0.1", 0, report("finished", 8))
    assert orders.at_rest([0])
    assert not orders.at_rest([0, 1])
    assert orders.at_rest([])
    orders.wake(0)
    assert not orders.at_rest([0])


@pytest.mark.parametrize(
    "heard",
    [
        report("finished", 7),  # of before the last grant
        report("running", 8),
        report("waiting", 8),
        report("finished", 8, acked=2),
    ],
)
def test_who_has_something_left_to_do_is_not_at_rest(heard: Report) -> None:
    orders = make()
    grant(orders, 8, last=True)
    orders.heard("worker-0.0", 0, heard)
    orders.heard("worker-0.1", 0, report("finished", 8))
    assert not orders.at_rest([0])


def test_finished_is_no_rest_before_the_last_grant_nor_after_a_new_one() -> None:
    orders = make()
    grant(orders, 6, replica=1)
    orders.heard("worker-1.0", 1, report("finished", 6))
    assert not orders.at_rest([1])
    grant(orders, 6, replica=1, last=True)
    orders.heard("worker-1.0", 1, report("finished", 6))
    assert orders.at_rest([1])
    grant(orders, 7, replica=1, last=True)
    assert not orders.at_rest([1])


def test_after_a_halt_only_halted_is_rest() -> None:
    orders = make()
    grant(orders, 6, replica=1, last=True)
    orders.heard("worker-1.0", 1, report("finished", 6))
    orders.halt([1], push=True)
    assert not orders.at_rest([1])
    orders.heard("worker-1.0", 1, report("finished", 6))
    assert not orders.at_rest([1])
    orders.heard("worker-1.0", 1, report("halted", 6))
    assert orders.at_rest([1])
