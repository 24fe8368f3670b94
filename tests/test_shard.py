"""The shard: each rule of docs/protocol.md, section 2, one by one, as lists of effects."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from shard_talk import BOSS, A, B, fetched, messages, parts, reported

from dbctl.optim.rules import (
    AdagradRuleSpec,
    AdamRuleSpec,
    MomentumRuleSpec,
    RuleSpec,
    SgdRuleSpec,
)
from dbctl.optim.schedules import ScheduleSpec
from dbctl.optim.updates import make_rule
from dbctl.region import Range
from dbctl.rights import CONTROLLER
from dbctl.roles.base import NEVER, NOW, Effects, PlainBuffer, Send, View
from dbctl.roles.shard import MAX_STALENESS_COUNTS, Shard, ShardStart
from dbctl.wire import (
    Ack,
    Cut,
    Fetch,
    Gone,
    Hello,
    Params,
    Peer,
    Position,
    Push,
    Return,
    ShardReport,
    Welcome,
    WorkerRow,
)
from tests.reference import rule_loop

Array = NDArray[Any]

PLAIN = SgdRuleSpec(rate=1.0)
RULES: list[RuleSpec] = [
    SgdRuleSpec(rate=0.1),
    MomentumRuleSpec(rate=0.1, momentum=0.5),
    AdagradRuleSpec(rate=0.1),
    AdamRuleSpec(rate=0.1),
]


def make_shard(
    values: Iterable[float] = (0, 0, 0, 0),
    rule: RuleSpec = PLAIN,
    *,
    start: int = 0,
    dtype: str = "f8",
    **changes: Any,
) -> Shard:
    array = np.array(list(values), dtype)
    made = make_rule(rule, fast=False)
    begin = ShardStart(
        name="shard-0",
        span=Range(start, start + len(array)),
        values=array,
        state=made.new_state(len(array), dtype),
        rule=made,
        **changes,
    )
    return Shard(begin, allocate=PlainBuffer)


def welcomed(*peers: Peer, **changes: Any) -> Shard:
    shard = make_shard(**changes)
    for peer in peers or (A,):
        shard.receive(0.0, peer, Hello(1))
    return shard


def push(seq: int, gradient: Iterable[float] = (-1, -1, -1, -1), **changes: Any) -> Push:
    given: dict[str, Any] = {
        "term": 1,
        "start": 0,
        "base": 0,
        "n_gradients": 1,
        "position": Position(seq, 0, seq),
        "mark": 0,
        "returned": 0,
        "payload": np.array(list(gradient), "f8"),
    }
    return Push(seq=seq, **(given | changes))


def pushed(shard: Shard, sender: Peer, message: Push) -> Effects:
    """The push arrives and is applied."""
    return shard.receive(0.0, sender, message) + shard.step(0.0)


# ------------------------------------------------------------------------------------- 1 Hello


def test_hello_is_answered_with_term_applied_and_version() -> None:
    shard = make_shard(version=7, term=3)
    assert shard.receive(0.0, A, Hello(1)) == [Send("worker-0.0", Welcome(3, 0, 7))]
    assert shard.receive(0.0, A, Hello(1)) == [Send("worker-0.0", Welcome(3, 0, 7))]


def test_who_was_not_welcomed_is_ignored() -> None:
    shard = make_shard()
    assert shard.receive(0.0, A, push(1)) == []
    assert shard.receive(0.0, A, Fetch(1, 1, 0, 0)) == []
    assert shard.due == NEVER
    assert shard.values.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("term", [1, 3])
def test_messages_of_another_term_are_ignored(term: int) -> None:
    shard = welcomed(term=2)
    assert shard.receive(0.0, A, push(1, term=term)) == []
    assert shard.receive(0.0, A, Fetch(term, 1, 0, 0)) == []
    assert shard.due == NEVER


def test_a_new_life_ends_the_old_one() -> None:
    """Its hand-outs are back, what it had queued is dropped, what still comes of it is ignored."""
    shard = welcomed()
    pushed(shard, A, push(1))
    held = fetched(shard, A, 1)
    shard.receive(0.0, A, push(2))
    newer = Peer("worker-0.0", 2)
    assert shard.receive(0.0, newer, Hello(1)) == [Send("worker-0.0", Welcome(1, 0, 1))]
    assert shard.due == NEVER  # nothing queued
    assert shard.receive(0.0, A, push(2)) == []
    assert shard.receive(0.0, A, Hello(1)) == []
    pushed(shard, newer, push(1))
    assert shard.values.tolist() == [2, 2, 2, 2]
    assert held.payload.array.tolist() == [2, 2, 2, 2]  # written in place: nobody held it


def test_pushes_that_only_an_earlier_life_of_the_shard_had_are_counted_as_lost() -> None:
    """reliability.md, G6: at most what was under way is lost, and the user is told."""
    shard = make_shard(term=2)
    assert shard.receive(0.0, A, Hello(6)) == [Send("worker-0.0", Welcome(2, 5, 0))]
    assert shard.receive(0.0, A, Hello(6)) == [Send("worker-0.0", Welcome(2, 5, 0))]
    assert shard.lost == {"worker-0.0": 5}
    assert pushed(shard, A, push(6, term=2)) == [Send("worker-0.0", Ack(2, 6, 1))]


# --------------------------------------------------------------------------- 2 and 3: seq, dedup


def test_a_push_is_acknowledged_after_it_was_applied() -> None:
    shard = welcomed()
    assert shard.receive(0.0, A, push(1)) == []
    assert shard.due == NOW
    assert shard.step(0.0) == [Send("worker-0.0", Ack(1, 1, 1))]
    assert shard.values.tolist() == [1, 1, 1, 1]
    assert shard.due == NEVER


def test_a_repeated_push_is_acknowledged_again_and_changes_nothing() -> None:
    shard = welcomed()
    pushed(shard, A, push(1))
    pushed(shard, A, push(2))
    assert shard.receive(0.0, A, push(1)) == [Send("worker-0.0", Ack(1, 2, 2))]
    assert shard.due == NEVER
    assert shard.values.tolist() == [2, 2, 2, 2]


def test_a_push_that_comes_twice_before_it_is_applied_is_applied_once() -> None:
    shard = welcomed()
    shard.receive(0.0, A, push(1))
    assert shard.receive(0.0, A, push(1)) == []
    assert shard.step(0.0) == [Send("worker-0.0", Ack(1, 1, 1))]
    assert shard.step(0.0) == []
    assert shard.values.tolist() == [1, 1, 1, 1]


def test_a_push_from_beyond_the_next_is_ignored() -> None:
    shard = welcomed()
    assert pushed(shard, A, push(2)) == []
    assert pushed(shard, A, push(1)) == [Send("worker-0.0", Ack(1, 1, 1))]
    assert pushed(shard, A, push(2)) == [Send("worker-0.0", Ack(1, 2, 2))]


def test_pushes_are_applied_in_the_order_they_came_one_a_step() -> None:
    shard = welcomed(A, B, rule=AdagradRuleSpec(rate=1.0))
    for sender, message in [(A, push(1, [1, 1, 1, 1])), (B, push(1, [3, 3, 3, 3])), (A, push(2))]:
        shard.receive(0.0, sender, message)
    effects = [shard.step(0.0) for _ in range(3)]
    assert effects == [
        [Send("worker-0.0", Ack(1, 1, 1))],
        [Send("worker-1.0", Ack(1, 1, 2))],
        [Send("worker-0.0", Ack(1, 2, 3))],
    ]
    expected, _ = rule_loop(
        AdagradRuleSpec(rate=1.0), np.zeros(4), [np.full(4, g) for g in (1.0, 3.0, -1.0)]
    )
    assert shard.values.tolist() == expected.tolist()


def test_eight_thousand_pushes_of_one_are_exactly_eight_thousand() -> None:
    """Whatever the interleaving, and with each push coming twice."""
    peers = [Peer(f"worker-{i}.0", 1) for i in range(8)]
    shard = welcomed(*peers, values=[0, 0])
    random, left = Random(3), [p for p in peers for _ in range(1000)]
    random.shuffle(left)
    seqs = dict.fromkeys(peers, 0)
    for peer in left:
        seqs[peer] += 1
        message = push(seqs[peer], [-1, -1])
        shard.receive(0.0, peer, message)
        shard.receive(0.0, peer, message)
        if random.random() < 0.7:
            shard.step(0.0)
    while shard.due == NOW:
        shard.step(0.0)
    assert shard.values.tolist() == [8000, 8000]
    assert shard.version == 8000
    assert [row.seq for row in shard.table()] == [1000] * 8


def test_a_gradient_that_is_not_finite_is_counted_and_acknowledged_and_touches_nothing() -> None:
    """reliability.md, G14. Its position is kept: those steps are not done again."""
    shard = welcomed(rule=MomentumRuleSpec(rate=1.0))
    bad = push(1, [0, np.nan, 0, np.inf])
    assert pushed(shard, A, bad) == [Send("worker-0.0", Ack(1, 1, 0))]
    assert shard.values.tolist() == [0, 0, 0, 0]
    assert shard.state["momentum"].tolist() == [0, 0, 0, 0]
    assert shard.version == 0
    assert shard.table() == (WorkerRow("worker-0.0", 1, 1, Position(1, 0, 1)),)
    shard.start(0.0)
    report = reported(shard)
    assert (report.refused, report.updates, report.staleness) == (1, 0, ())


def test_a_push_outside_the_shard_or_without_its_payload_is_not_filed() -> None:
    shard = welcomed(start=10)
    for message in (
        push(1, start=9),
        push(1, start=11),
        push(1, start=10, payload=None),
    ):
        assert pushed(shard, A, message) == []
    assert pushed(shard, A, push(1, start=10)) == [Send("worker-0.0", Ack(1, 1, 1))]


def test_a_push_is_of_the_whole_slice_or_is_not_filed() -> None:
    shard = welcomed(values=[5, 6, 7, 8], start=10)
    for start, gradient in ((10, [-1, -1]), (11, [-1, -1, -1]), (10, [-1] * 5), (12, [-1, -1])):
        assert pushed(shard, A, push(1, gradient, start=start)) == []
    assert shard.values.tolist() == [5, 6, 7, 8]
    assert pushed(shard, A, push(1, start=10)) == [Send("worker-0.0", Ack(1, 1, 1))]
    assert shard.values.tolist() == [6, 7, 8, 9]


# ------------------------------------------------------------------------- 6 to 8: fetch, buffers


def test_a_fetch_is_answered_at_once_with_the_current_parameters() -> None:
    shard = welcomed(values=[1, 2, 3, 4], start=10, version=7)
    params = fetched(shard, A, 1, start=10)
    assert (params.term, params.number, params.handout) == (1, 1, 1)
    assert (params.version, params.holds, params.start) == (7, 0, 10)
    assert isinstance(params.payload, View)
    assert params.payload.array.tolist() == [1, 2, 3, 4]


def test_a_fetch_waits_until_the_push_that_it_names_was_applied() -> None:
    shard = welcomed(A, B)
    assert shard.receive(0.0, A, Fetch(1, 1, 2, 0)) == []
    assert len(pushed(shard, A, push(1))) == 1  # only an Ack
    pushed(shard, B, push(1))
    assert shard.receive(0.0, A, push(2)) == []
    assert shard.receive(0.0, A, Fetch(1, 1, 2, 0)) == []  # it has come, but is not applied
    ack, answer = shard.step(0.0)
    assert ack == Send("worker-0.0", Ack(1, 2, 3))
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Params)
    assert (answer.message.holds, answer.message.version) == (2, 3)
    assert answer.message.payload.array.tolist() == [3, 3, 3, 3]


def test_a_repeated_fetch_gets_the_same_hand_out_as_long_as_it_is_out() -> None:
    shard = welcomed(A, B)
    first = fetched(shard, A, 1)
    pushed(shard, B, push(1))
    assert fetched(shard, A, 1) == first
    shard.receive(0.0, A, Return(1))
    assert shard.receive(0.0, A, Fetch(1, 1, 0, 0)) == []
    assert fetched(shard, A, 2).handout == 2
    assert shard.receive(0.0, A, Fetch(1, 1, 0, 0)) == []


def test_what_is_handed_out_is_not_written_until_it_is_back() -> None:
    shard = welcomed(A, B)
    held = fetched(shard, A, 1).payload.array
    pushed(shard, B, push(1))
    pushed(shard, B, push(2))
    assert held.tolist() == [0, 0, 0, 0]
    assert shard.values.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("how", ["return", "fetch", "push", "gone", "hello"])
def test_with_three_buffers_held_pushes_wait_and_every_message_of_a_reader_gives_back(
    how: str,
) -> None:
    peers = [Peer(f"evaluator-{i}", 1) for i in range(3)]
    shard = welcomed(A, *peers)
    for number, peer in enumerate(peers, 1):
        fetched(shard, peer, 1)
        shard.receive(0.0, A, push(number))
        if number < 3:
            shard.step(0.0)
    assert shard.due == NEVER
    assert shard.step(0.0) == []
    first = peers[0]
    match how:
        case "return":
            shard.receive(0.0, first, Return(1))
        case "fetch":
            shard.receive(0.0, first, Fetch(1, 2, 99, 1))
        case "push":
            shard.receive(0.0, first, push(9, returned=1))
        case "gone":
            shard.receive(0.0, BOSS, Gone(*first))
        case "hello":
            shard.receive(0.0, Peer(first.node, 2), Hello(1))
    assert shard.due == NOW
    assert shard.step(0.0) == [Send("worker-0.0", Ack(1, 3, 3))]


def test_what_comes_of_a_life_that_is_gone_changes_nothing() -> None:
    shard = welcomed(A, B)
    shard.receive(0.0, A, push(1))
    [told] = messages(shard.receive(0.0, BOSS, Gone(*A)))
    assert isinstance(told, ShardReport)
    assert told.over == (A.node,)  # from here on its row is final
    assert shard.due == NEVER
    assert pushed(shard, A, push(1)) == []
    assert shard.receive(0.0, A, Hello(1)) == []
    assert shard.receive(0.0, A, Fetch(1, 1, 0, 0)) == []
    assert shard.receive(0.0, Peer("worker-0.0", 2), Hello(1)) != []
    shard.receive(0.0, BOSS, Gone("worker-0.0", 1))  # late: the next life lives
    assert pushed(shard, Peer("worker-0.0", 2), push(1)) == [Send("worker-0.0", Ack(1, 1, 1))]


def test_a_life_that_was_over_before_its_hello_came_is_over() -> None:
    shard = welcomed()
    shard.receive(0.0, BOSS, Gone("worker-0.0", 2))
    assert shard.receive(0.0, Peer("worker-0.0", 2), Hello(1)) == []
    assert shard.receive(0.0, A, Hello(1)) == []  # nor does its older life come back
    assert shard.receive(0.0, Peer("worker-0.0", 3), Hello(1)) != []


def test_a_new_life_stands_where_the_last_one_did_until_it_pushes() -> None:
    """A checkpoint made meanwhile must not say that the replica is at its beginning."""
    shard = welcomed()
    pushed(shard, A, push(1))
    shard.receive(0.0, Peer("worker-0.0", 2), Hello(1))
    assert shard.table() == (WorkerRow("worker-0.0", 2, 0, Position(1, 0, 1)),)
    assert parts(shard.receive(0.0, BOSS, Cut(1)))[0].table == shard.table()


# ------------------------------------------------------------- staleness, L2, rates, what a push is


def test_staleness_is_the_version_before_applying_minus_the_base() -> None:
    """docs/protocol.md, rule 9."""
    shard = welcomed(A, B)
    for sender, message in [
        (A, push(1)),  # 0 - 0
        (B, push(1)),  # 1 - 0
        (B, push(2, base=0)),  # 2 - 0
        (A, push(2, base=3)),  # 3 - 3
    ]:
        pushed(shard, sender, message)
    shard.start(5.0)
    assert reported(shard, 5.0).staleness == (
        ("worker-0.0", 0, 2),
        ("worker-1.0", 1, 1),
        ("worker-1.0", 2, 1),
    )


def test_staleness_above_the_last_bin_is_counted_in_it() -> None:
    shard = welcomed(version=1000)
    pushed(shard, A, push(1, base=1))
    shard.start(0.0)
    assert reported(shard).staleness == (("worker-0.0", 255, 1),)


def test_reports_of_many_staleness_counts_tell_them_in_turn() -> None:
    """A header is bounded; the counts of 32 replicas for an hour are not."""
    shard = welcomed()
    n = MAX_STALENESS_COUNTS + 10
    shard._staleness.update({(f"worker-{i}.0", 3): i + 1 for i in range(n)})
    shard.start(0.0)
    told: list[tuple[str, int, int]] = []
    sizes = []
    for second in range(3):
        staleness = reported(shard, float(second)).staleness
        sizes.append(len(staleness))
        told += staleness
    assert sizes == [MAX_STALENESS_COUNTS, 10, MAX_STALENESS_COUNTS]
    assert set(told[:n]) == {(f"worker-{i}.0", 3, i + 1) for i in range(n)}


def test_staleness_scaling_divides_the_rate() -> None:
    """Ours, after Zhang et al. 2016: rate / max(1, staleness)."""
    shard = welcomed(staleness_scaling=True, version=4)
    for base, expected in [(4, 1.0), (4, 2.0), (4, 2.5), (3, 2.75), (7, 3.75)]:
        pushed(shard, A, push(shard.version - 3, base=base))
        assert shard.values.tolist() == [expected] * 4


def test_l2_acts_on_weights_and_not_on_biases_once_a_push() -> None:
    decays = ((Range(0, 2), 0.5), (Range(2, 3), 0.0), (Range(3, 4), 0.25))
    shard = welcomed(values=[8, 8, 8, 8], decays=decays)
    pushed(shard, A, push(1, [0, 0, 0, 0], n_gradients=5))
    assert shard.values.tolist() == [4, 4, 8, 6]
    pushed(shard, A, push(2, [0, 0, 0, 0]))
    assert shard.values.tolist() == [2, 2, 8, 4.5]


def test_a_schedule_counts_the_shards_own_updates() -> None:
    rate = ScheduleSpec(type="inverse_time", initial=1.0, every=1)
    shard = welcomed(rule=SgdRuleSpec(rate=rate))
    values = []
    for seq in (1, 2, 3):
        pushed(shard, A, push(seq))
        values.append(shard.values[0])
    assert values == pytest.approx([1, 1 + 1 / 2, 1 + 1 / 2 + 1 / 3])


# ----------------------------------------------------------------------------- cuts and reports


def test_a_marked_push_makes_a_cut_right_after_it_was_applied() -> None:
    shard = welcomed(A, B, rule=AdamRuleSpec(rate=1.0))
    pushed(shard, B, push(1))
    shard.receive(0.0, A, push(1, mark=1))
    shard.receive(0.0, B, push(2))
    cut = parts(shard.step(0.0))
    assert [(p.number, p.vector, p.of, p.handout) for p in cut] == [
        (1, "parameters", 3, 1),
        (1, "first_moment", 3, 2),
        (1, "second_moment", 3, 3),
    ]
    assert {p.version for p in cut} == {2}
    assert cut[0].table == (
        WorkerRow("worker-0.0", 1, 1, Position(1, 0, 1)),
        WorkerRow("worker-1.0", 1, 1, Position(1, 0, 1)),
    )
    before = [p.payload.array.copy() for p in cut]
    shard.step(0.0)  # training goes on
    assert shard.version == 3
    assert [p.payload.array.tolist() for p in cut] == [b.tolist() for b in before]
    assert shard.values.tolist() != before[0].tolist()


def test_each_cut_is_made_once() -> None:
    shard = welcomed(A, B)
    assert len(parts(pushed(shard, A, push(1, mark=2)))) == 1
    assert parts(pushed(shard, B, push(1, mark=2))) == []
    assert parts(pushed(shard, B, push(2, mark=1))) == []
    assert parts(shard.receive(0.0, BOSS, Cut(2))) == []
    assert [p.number for p in parts(shard.receive(0.0, BOSS, Cut(3)))] == [3]


C = Peer("worker-0.1", 1)
PARTITIONS = (Range(0, 7), Range(7, 12))


def test_each_partition_has_a_slice_with_a_version_of_its_own() -> None:
    """A shard of elements 4 to 10 holds three of each partition."""
    shard = welcomed(A, C, values=[0] * 6, start=4, version=3, partitions=PARTITIONS)
    assert pushed(shard, A, push(1, [-1] * 3, start=4)) == [Send("worker-0.0", Ack(1, 1, 4))]
    assert pushed(shard, A, push(2, [-1] * 3, start=4)) == [Send("worker-0.0", Ack(1, 2, 5))]
    assert pushed(shard, C, push(1, [-5] * 3, start=7)) == [Send("worker-0.1", Ack(1, 1, 4))]
    assert shard.values.tolist() == [2, 2, 2, 5, 5, 5]
    assert pushed(shard, A, push(3, [-1] * 6, start=4)) == []
    mine, others = fetched(shard, A, 1, start=4), fetched(shard, C, 1, start=7)
    assert (mine.start, mine.version, mine.holds) == (4, 5, 2)
    assert mine.payload.array.tolist() == [2, 2, 2]
    assert (others.start, others.version, others.holds) == (7, 4, 1)
    assert others.payload.array.tolist() == [5, 5, 5]
    assert shard.receive(0.0, A, Fetch(1, 2, 0, 1, start=5)) == []


def test_readers_of_one_slice_do_not_hold_up_another() -> None:
    shard = welcomed(A, C, B, values=[0] * 6, start=4, partitions=PARTITIONS)
    for number, reader in enumerate((A, B, A)):
        fetched(shard, reader, number + 1, start=4)
        pushed(shard, A, push(number + 1, [-1] * 3, start=4))
    assert shard.due > NOW  # all three buffers of the first slice are out
    assert shard.values.tolist() == [2, 2, 2, 0, 0, 0]  # so the third push waits
    shard.receive(0.0, C, push(1, [-1] * 3, start=7))
    applied = [shard.step(0.0), shard.step(0.0)]
    assert [bool(each) for each in applied] == [True, False]
    assert shard.values.tolist() == [2, 2, 2, 1, 1, 1]
    shard.receive(0.0, B, Return(1))
    assert len(shard.step(0.0)) == 1
    assert shard.values.tolist() == [3, 3, 3, 1, 1, 1]


def test_a_cut_is_made_slice_by_slice_with_the_rows_of_its_own_workers() -> None:
    shard = welcomed(
        A, C, B, values=[0] * 6, start=4, rule=MomentumRuleSpec(rate=1.0), partitions=PARTITIONS
    )
    fetched(shard, B, 1, start=4)
    pushed(shard, A, push(1, [-1] * 3, start=4))
    first = parts(pushed(shard, A, push(2, [-1] * 3, start=4, mark=1)))
    assert [(p.vector, p.of, p.start, p.version) for p in first] == [
        ("parameters", 4, 4, 2),
        ("momentum", 4, 4, 2),
    ]
    assert first[0].table == (
        WorkerRow("worker-0.0", 1, 2, Position(2, 0, 2)),
        WorkerRow("worker-1.0", 1, 0, Position(0, 0, 0)),
    )
    assert parts(pushed(shard, A, push(3, [-1] * 3, start=4, mark=1))) == []
    second = parts(pushed(shard, C, push(1, [-1] * 3, start=7, mark=1)))
    assert [(p.vector, p.of, p.start, p.version) for p in second] == [
        ("parameters", 4, 7, 1),
        ("momentum", 4, 7, 1),
    ]
    assert second[0].table == (WorkerRow("worker-0.1", 1, 1, Position(1, 0, 1)),)
    assert parts(shard.step(9.0)) == [*first, *second]


def test_a_slice_makes_no_cut_older_than_the_newest_of_the_shard() -> None:
    """Its marker died and the cut was given up: to return its parts would return the newer ones."""
    shard = welcomed(A, C, values=[0] * 6, start=4, partitions=PARTITIONS)
    [newer] = parts(pushed(shard, A, push(1, [-1] * 3, start=4, mark=2)))
    assert parts(pushed(shard, C, push(1, [-1] * 3, start=7, mark=1))) == []
    assert parts(shard.step(9.0)) == [newer]
    assert len(parts(pushed(shard, C, push(2, [-1] * 3, start=7, mark=2)))) == 1


def test_parts_are_sent_again_until_they_are_returned() -> None:
    shard = welcomed(rule=MomentumRuleSpec(rate=1.0))
    cut = parts(shard.receive(1.0, BOSS, Cut(1)))
    assert shard.due == 1.5
    assert parts(shard.step(1.4)) == []
    assert parts(shard.step(1.5)) == cut
    shard.receive(1.6, BOSS, Return(1))
    assert parts(shard.step(2.0)) == cut[1:]
    shard.receive(2.1, BOSS, Return(2))
    assert shard.due == NEVER


def test_a_cut_copies_the_optimiser_state_and_not_the_parameters() -> None:
    shard = welcomed(rule=MomentumRuleSpec(rate=1.0))
    made = parts(pushed(shard, A, push(1, mark=1)))
    assert np.shares_memory(made[0].payload.array, shard.values)
    assert not np.shares_memory(made[1].payload.array, shard.state["momentum"])
    pushed(shard, A, push(2))
    assert made[1].payload.array.tolist() == [-1, -1, -1, -1]


def test_the_report_is_totals_each_second() -> None:
    shard = welcomed(A)
    assert shard.start(10.0) == []
    pushed(shard, A, push(1))
    fetched(shard, A, 1)
    assert shard.due == 10.0
    table = (WorkerRow("worker-0.0", 1, 1, Position(1, 0, 1)),)
    report = ShardReport(1, 1, 1, 32, 32, 0, table, (("worker-0.0", 0, 1),))
    assert shard.step(10.0) == [Send(CONTROLLER, report)]
    assert shard.due == 11.0
    assert shard.step(10.9) == []


# ------------------------------------------------------------------------ the ladder, rung 4


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.type)
@pytest.mark.parametrize("cuts", [[3], [1, 2, 30], [7, 16, 17, 36]])
def test_any_cut_into_shards_is_one_shard_bit_for_bit(rule: RuleSpec, cuts: list[int]) -> None:
    """Same order of application; delivery differs: repeats, readers in between, later steps."""
    n, dtype = 37, "f4"
    random, generator = Random(1), np.random.default_rng(1)
    begin = generator.normal(size=n).astype(dtype)
    gradients = [generator.normal(size=n).astype(dtype) for _ in range(12)]
    decays = ((Range(0, 20), 0.01), (Range(20, n), 0.0))
    whole = welcomed(values=begin, rule=rule, dtype=dtype, decays=decays)
    for seq, gradient in enumerate(gradients, 1):
        pushed(whole, A, push(seq, payload=gradient))
    edges = [0, *cuts, n]
    values, states = [], []
    for first, last in pairwise(edges):
        span = Range(first, last)
        own = [(part.intersection(span), decay) for part, decay in decays]
        shard = welcomed(
            values=begin[span.slice()],
            rule=rule,
            dtype=dtype,
            start=first,
            decays=[(part.shift(-first), decay) for part, decay in own if part],
        )
        shard.receive(0.0, B, Hello(1))
        for seq, gradient in enumerate(gradients, 1):
            message = push(seq, start=first, payload=gradient[span.slice()])
            for _ in range(random.choice([1, 1, 3])):
                shard.receive(0.0, A, message)
            if random.random() < 0.4:
                shard.receive(0.0, B, Fetch(1, seq, 0, random.choice([0, seq - 1])))
            if random.random() < 0.5:
                shard.step(0.0)
        shard.receive(0.0, B, Return(99))
        while shard.due == NOW:
            shard.step(0.0)
        values.append(shard.values)
        states.append(shard.state)
    assert np.concatenate(values).tobytes() == whole.values.tobytes()
    for name, vector in whole.state.items():
        assert np.concatenate([state[name] for state in states]).tobytes() == vector.tobytes()
