"""Deaths that every shard must confirm before what the dead had been granted is given away."""

from __future__ import annotations

from dbctl.roles.departures import Departures
from dbctl.wire import Gone, Peer, Position, ShardReport, WorkerRow

DEAD = Peer("worker-2.0", 1)


def report(steps: int, *over: str) -> ShardReport:
    row = WorkerRow(DEAD.node, 1, steps, Position(steps, 0, steps))
    return ShardReport(1, 0, 0, 0, 0, 0, (row,), (), over)


def test_a_death_is_told_to_every_shard_until_each_has_confirmed_it() -> None:
    departures = Departures(["shard-0", "shard-1"])
    assert not departures
    departures.add(DEAD, 2)
    assert departures.pending() == [("shard-0", Gone(*DEAD)), ("shard-1", Gone(*DEAD))]
    assert departures.confirm("shard-0", report(4, DEAD.node)) == {}
    assert departures.pending() == [("shard-1", Gone(*DEAD))]
    assert departures.confirm("shard-1", report(5, DEAD.node)) == {2: Position(5, 0, 5)}
    assert not departures


def test_a_report_from_before_the_death_confirms_nothing() -> None:
    departures = Departures(["shard-0"])
    departures.add(DEAD, 2)
    assert departures.confirm("shard-0", report(3)) == {}
    assert departures.confirm("shard-0", report(7, DEAD.node)) == {2: Position(7, 0, 7)}


def test_a_cut_replica_is_settled_when_all_its_partitions_are() -> None:
    departures = Departures(["shard-0"])
    departures.add(DEAD, 2)
    departures.add(Peer("worker-2.1", 1), 2)
    assert departures.confirm("shard-0", report(3, DEAD.node)) == {}
    settled = departures.confirm("shard-0", report(3, DEAD.node, "worker-2.1"))
    assert settled == {2: Position(3, 0, 3)}


def test_an_evaluator_settles_no_replica() -> None:
    departures = Departures(["shard-0"])
    departures.add(Peer("evaluator-0", 1))
    assert departures
    assert departures.confirm("shard-0", report(0, "evaluator-0")) == {}
    assert not departures
