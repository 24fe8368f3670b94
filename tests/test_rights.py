"""dbctl/rights.py: the table of who may say what to which role."""

from __future__ import annotations

from typing import get_args

import pytest

from dbctl import wire
from dbctl.envelope import AnyMessage
from dbctl.rights import RIGHTS, Rights, partition_of, role_of
from dbctl.wire import BEGINNING, Boxes, Fetch, Message, Need, Peer, Push
from dbctl.wire_processes import Peers

CONTROLLER = Peer("controller", 1)
ORDERS = {
    *("Grant", "Halt", "Cut", "Gone", "Evaluate", "Filed", "Peers", "Finish", "Start", "Kill"),
    *("Execute", "Begin", "Collect", "Work", "Lease", "LogFiled", "VectorPart", "ReadPart"),
    "ShipmentPart",
}


def test_names() -> None:
    assert [role_of(n) for n in ("worker-1.0", "shard-0", "controller")] == [
        "worker",
        "shard",
        "controller",
    ]
    names = ("worker-1.2", "evaluator-0", "evaluator-0.3", "worker-0.x", "worker-0.-1")
    assert [partition_of(n) for n in names] == [2, 0, 3, -1, -1]


def test_only_the_controller_gives_orders() -> None:
    """Every message that somebody but the controller may send is in the table, and no order is."""
    told = {kind.__name__ for kinds in RIGHTS.values() for kind in kinds}
    assert told | ORDERS == {kind.__name__ for kind in get_args(AnyMessage)}
    assert not told & ORDERS
    assert Rights("shard-0").may(CONTROLLER, wire.Cut(1))


@pytest.mark.parametrize("sender", ["worker-0.0", "evaluator-0", "shard-1", "agent-0", "x", ""])
@pytest.mark.parametrize("order", [wire.Cut(1), wire.Finish(), wire.Gone("a", 1), Peers(())])
def test_an_order_of_anybody_else_is_none(sender: str, order: Message) -> None:
    for me in ("shard-0", "worker-0.0", "evaluator-0", "agent-0", "controller"):
        assert not Rights(me).may(Peer(sender, 1), order)


def test_an_evaluator_pushes_nothing() -> None:
    push = Push(1, 1, 0, 0, 1, BEGINNING, 0, 0)
    assert not Rights("shard-0").may(Peer("evaluator-0", 1), push)
    assert Rights("shard-0").may(Peer("worker-0.0", 1), push)


def test_a_partition_has_its_own_range_only() -> None:
    rights = Rights("shard-1", starts=(None, 100, 200))

    def may(node: str, start: int) -> bool:
        fetch = rights.may(Peer(node, 1), Fetch(1, 1, 0, 0, start))
        assert fetch == rights.may(Peer(node, 1), Push(1, 1, start, 0, 1, BEGINNING, 0, 0)) or (
            node.startswith("evaluator")
        )
        return fetch

    assert [may("worker-0.1", start) for start in (100, 200, 0, 150)] == [True] + [False] * 3
    assert may("evaluator-0.2", 200)
    assert not may("worker-0.0", 0), "it has nothing here"
    assert not may("worker-0.3", 200)
    assert not may("worker-0.-1", 200)


def test_boxes_come_from_partners() -> None:
    rights = Rights("worker-0.0", partners=["worker-0.1"])
    for message in (Boxes(1, "x", 0), Need(1, "x", 0)):
        assert rights.may(Peer("worker-0.1", 1), message)
        assert not rights.may(Peer("worker-1.1", 1), message)
        assert not rights.may(Peer("shard-0", 1), message)
