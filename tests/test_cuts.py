"""Cuts: gathered from all shards, handed over once, given back (docs/protocol.md, section 5)."""

from __future__ import annotations

import pytest

from dbctl.roles.cuts import Cuts, replica_of
from dbctl.wire import CutPart, Position, WorkerRow


def row(replica: int, seq: int, step: int) -> WorkerRow:
    return WorkerRow(f"worker-{replica}.0", 1, seq, Position(step, 0, step))


def part(number: int, vector: str = "parameters", **changes: object) -> CutPart:
    fields = {"of": 2, "handout": 1, "start": 0, "version": 5, "table": (row(0, 5, 5),)}
    return CutPart(number=number, vector=vector, **(fields | changes))  # type: ignore[arg-type]


def make(shards: int = 2) -> Cuts:
    return Cuts([f"shard-{i}" for i in range(shards)], {0: Position(), 1: Position(3, 1, 0)})


def test_the_mark_belongs_into_the_grants_of_one_replica() -> None:
    cuts = make()
    assert cuts.mark_for(0) == (0, 0)
    assert cuts.ask(0, 12) == 1
    assert cuts.mark_for(0) == (1, 12)
    assert cuts.mark_for(1) == (0, 0)
    assert cuts.under_way
    assert not cuts.being_written


def test_a_cut_is_complete_with_the_last_part_of_the_last_shard() -> None:
    cuts = make()
    cuts.ask(0, 5)
    assert cuts.add("shard-0", part(1)) is None
    assert cuts.add("shard-0", part(1)) is None  # repeated
    assert cuts.add("shard-1", part(1, "momentum", start=10, handout=2)) is None
    assert cuts.add("shard-1", part(1, start=10)) is None
    cut = cuts.add("shard-0", part(1, "momentum", handout=2))
    assert cut is not None
    assert sorted((p.start, p.vector) for p in cut.parts) == [
        (0, "momentum"),
        (0, "parameters"),
        (10, "momentum"),
        (10, "parameters"),
    ]
    assert cuts.being_written
    assert cuts.add("shard-0", part(1)) is None  # once only


def test_the_manifest_has_the_greatest_of_the_shards() -> None:
    """So nothing is applied twice; what some shard had not applied is counted as dropped."""
    cuts = make(3)
    cuts.ask(None)
    tables = [(row(0, 5, 50), row(2, 9, 9)), (row(0, 4, 40), row(2, 9, 9)), (row(0, 5, 50),)]
    cut = None
    for i, table in enumerate(tables):
        cut = cuts.add(f"shard-{i}", part(1, of=1, start=4 * i, version=10 + i, table=table))
    assert cut is not None
    assert cut.rows == {0: Position(50, 0, 50), 1: Position(3, 1, 0), 2: Position(9, 0, 9)}
    assert cut.step == 62
    assert cut.updates == 12
    assert cut.dropped == 1
    assert cut.final


def test_a_push_is_dropped_by_each_slice_whose_table_is_behind() -> None:
    """A worker has a row in the tables of its own slice only, with seq 0 until its first push."""
    cuts = make(3)
    cuts.ask(None)
    tables = {10: (row(0, 5, 50), row(2, 9, 9)), 20: (row(0, 4, 40), row(2, 0, 0)), 30: ()}
    cut = None
    for i, (start, table) in enumerate(tables.items()):
        cut = cuts.add(f"shard-{i}", part(1, of=1, start=start, table=table))
    assert cut is not None
    assert cut.rows[2] == Position(9, 0, 9)
    assert cut.dropped == 1 + 9


def test_the_slices_of_one_shard_are_told_apart() -> None:
    """`of` counts a shard's vectors times its slices; a replica stands where its furthest is."""
    cuts = make(1)
    cuts.ask(0, 5)
    ahead = WorkerRow("worker-0.0", 1, 7, Position(7, 0, 7))
    behind = WorkerRow("worker-0.1", 1, 6, Position(6, 0, 6))
    assert cuts.add("shard-0", part(1, table=(ahead,), version=9)) is None
    assert cuts.add("shard-0", part(1, table=(ahead,), version=9)) is None  # repeated
    cut = cuts.add("shard-0", part(1, start=8, table=(behind,), version=8))
    assert cut is not None
    assert [p.start for p in cut.parts] == [0, 8]
    assert cut.rows[0] == Position(7, 0, 7)
    assert (cut.updates, cut.dropped, cut.final) == (9, 0, False)


def test_parts_of_another_cut_are_left_out_and_given_back() -> None:
    cuts = make(1)
    cuts.ask(0, 5)
    cuts.ask(None)  # the first is dropped
    late = part(1, handout=3)
    assert cuts.add("shard-0", late) is None
    assert cuts.returned("shard-0", late) == 3
    assert cuts.returned("shard-0", part(2, handout=4)) is None


def test_what_was_written_is_returned_up_to_the_greatest_hand_out() -> None:
    cuts = make()
    cuts.ask(0, 5)
    for shard, first in (("shard-0", 4), ("shard-1", 7)):
        for i, vector in enumerate(("parameters", "momentum")):
            cuts.add(shard, part(1, vector, handout=first + i))
    assert cuts.written() == {"shard-0": 5, "shard-1": 8}
    assert not cuts.under_way
    assert cuts.number == 0
    assert cuts.returned("shard-0", part(1, handout=4)) == 5  # again, as its Return was lost


def test_the_death_of_the_marker_drops_a_cut_that_is_not_handed_over() -> None:
    cuts = make(1)
    cuts.ask(0, 5)
    assert not cuts.dead(1)
    assert cuts.under_way
    assert cuts.dead(0)
    assert not cuts.under_way
    assert cuts.ask(1, 9) == 2
    cuts.add("shard-0", part(2, of=1))
    assert not cuts.dead(1)  # complete: its marker's death does not matter
    with pytest.raises(AssertionError, match="being written"):
        cuts.ask(None)


def test_a_worker_names_its_replica() -> None:
    assert [replica_of("worker-3.1"), replica_of("worker-12.0")] == [3, 12]
