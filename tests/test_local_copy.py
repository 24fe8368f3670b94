"""A worker's local copy: what a fetch, a step and a push make of it (roles/local.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dbctl.roles.base import Effects, PlainBuffer, Send, View
from dbctl.roles.local import LocalCopy
from dbctl.shards import ShardSpan
from dbctl.wire import Ack, Fetch, Hello, Params, Position, Push, Return, Welcome

SHARDS = (ShardSpan("shard-0", 10, 12), ShardSpan("shard-1", 12, 15))
AT = Position(1, 0, 1)


def make(
    *,
    later: bool = True,
    read_own: bool = True,
    rate: float = 0.5,
    in_place: bool = False,
    shards: Sequence[ShardSpan] = SHARDS,
) -> LocalCopy:
    local = LocalCopy(
        shards,
        origin=10,
        n_elements=5,
        dtype="f8",
        rate=lambda n: rate / (n + 1),
        slots=2,
        later=later,
        read_own=read_own,
        in_place=in_place,
        allocate=PlainBuffer,
        resend_s=0.25,
    )
    assert local.hello(0.0) == [Send(span.node, Hello(1)) for span in shards]
    for span in shards:
        assert not local.joined
        local.receive(0.0, span.node, Welcome(1, 0, 0))
    assert local.joined
    return local


def answer(local: LocalCopy, shard: int, values: Sequence[float], **changes: Any) -> None:
    fields = {"term": 1, "number": 1, "handout": 1, "version": 0, "holds": 0} | changes
    span = SHARDS[shard]
    params = Params(start=span.start, payload=np.array(values, "f8"), **fields)
    local.receive(0.0, span.node, params)


def fetch(local: LocalCopy, values: Sequence[float], **changes: Any) -> Effects:
    local.ask(0.0, after=0)
    answer(local, 0, values[:2], **changes)
    answer(local, 1, values[2:], **changes)
    return local.copy_answers(0.0)


def accrue(local: LocalCopy, gradient: Sequence[float], *, step: bool = True) -> None:
    assert local.has_slot
    slot = local.begin()
    slot[:] = gradient
    local.add(slot, step=step)


def pushes(effects: Effects) -> list[Push]:
    sent = [e.message for e in effects if isinstance(e, Send)]
    return [m for m in sent if isinstance(m, Push)]


# --------------------------------------------------------------------------------- fetching


def test_a_fetch_names_the_first_element_of_what_is_shared_with_each_shard() -> None:
    local = make()
    assert local.ask(0.0, after=3) == [
        Send("shard-0", Fetch(1, 1, 3, 0, start=10)),
        Send("shard-1", Fetch(1, 1, 3, 0, start=12)),
    ]
    assert not local.complete


def test_each_answer_is_copied_to_its_place_and_given_back_at_once() -> None:
    local = make()
    local.ask(0.0, after=0)
    answer(local, 1, [3, 4, 5], handout=7)
    assert local.holding
    assert local.copy_answers(0.0) == [Send("shard-1", Return(7))]
    assert (local.holding, local.complete) == (False, False)
    answer(local, 0, [1, 2])
    assert local.copy_answers(0.0) == [Send("shard-0", Return(1))]
    assert local.complete
    assert local.parameters.tolist() == [1, 2, 3, 4, 5]
    assert local.bytes_fetched == 5 * 8


ALL = ShardSpan("shard-0", 10, 15)


def kept(local: LocalCopy, *, number: int) -> Params:
    """A fetch of the one shard, whose answer is kept."""
    params = Params(1, number, number + 6, number + 3, 0, ALL.start, np.arange(5.0) + number)
    local.receive(0.0, ALL.node, params)
    assert local.holding
    assert local.copy_answers(0.0) == [], "nothing is given back yet"
    assert (local.holding, local.complete) == (False, True)
    assert local.parameters is params.payload
    assert local.versions == [number + 3]
    return params


def test_the_only_replica_reads_the_answer_where_it_lies_until_it_pushes() -> None:
    local = make(read_own=False, in_place=True, shards=[ALL])
    assert local.ask(0.0, after=0) == [Send("shard-0", Fetch(1, 1, 0, 0, start=10))]
    kept(local, number=1)
    accrue(local, [1, 2, 3, 4, 5], step=False)
    [push] = pushes(local.push(0.0, AT, mark=0))
    assert (push.base, push.returned) == (4, 7)
    assert local.ask(0.0, after=1) == [Send("shard-0", Fetch(1, 2, 1, 7, start=10))]
    kept(local, number=2)
    # A gradient that is refused makes no push: the next fetch gives back.
    local.begin()
    assert local.push(0.0, AT, mark=0) == []
    assert local.ask(0.0, after=1) == [Send("shard-0", Fetch(1, 3, 1, 8, start=10))]
    assert local.bytes_fetched == 2 * 5 * 8


def test_answers_of_several_shards_are_copied_all_the_same() -> None:
    local = make(read_own=False, in_place=True)
    before = local.parameters
    fetch(local, [1, 2, 3, 4, 5])
    assert local.parameters is before
    assert before.tolist() == [1, 2, 3, 4, 5]


def test_messages_of_strangers_change_nothing() -> None:
    local = make()
    local.ask(0.0, after=0)
    local.receive(0.0, "shard-9", Params(1, 1, 1, 0, 0, 10, np.ones(2)))
    assert not local.holding


# ------------------------------------------------------------------- accruing (appendix 7.1)


def test_a_gradient_moves_the_copy_by_the_rate_at_each_shards_version() -> None:
    local = make(rate=0.5)
    local.ask(0.0, after=0)
    answer(local, 0, [0, 0], version=0)
    answer(local, 1, [0, 0, 0], version=4)
    local.copy_answers(0.0)
    accrue(local, [1, 2, 1, 2, 3])
    np.testing.assert_allclose(local.parameters, [-0.5, -1.0, -0.1, -0.2, -0.3])
    accrue(local, [1, 0, 1, 0, 0])
    np.testing.assert_allclose(local.parameters, [-1.0, -1.0, -0.2, -0.2, -0.3])


def test_a_copy_that_a_fetch_replaces_anyway_is_not_moved() -> None:
    local = make()
    accrue(local, [1] * 5, step=False)
    accrue(local, [1] * 5, step=False)
    assert local.parameters.tolist() == [0] * 5
    [first, second] = pushes(local.push(0.0, AT, mark=0))
    assert first.payload.array.tolist() == [2, 2]
    assert second.payload.array.tolist() == [2, 2, 2]


def test_a_push_goes_to_every_shard_from_one_slot_and_is_the_sum() -> None:
    local = make()
    fetch(local, [0] * 5, version=6)
    accrue(local, [1, 2, 3, 4, 5])
    accrue(local, [1, 1, 1, 1, 1])
    first, second = pushes(local.push(2.0, Position(2, 0, 2), mark=9))
    for push in (first, second):
        assert (push.seq, push.n_gradients, push.base, push.mark) == (1, 2, 6, 9)
        assert (push.position, push.returned) == (Position(2, 0, 2), 1)
        assert isinstance(push.payload, View)
    assert (first.start, first.payload.array.tolist()) == (10, [2, 3])
    assert (second.start, second.payload.array.tolist()) == (12, [4, 5, 6])
    assert first.payload.buffer is second.payload.buffer
    assert (local.pushed, local.n_accrued, local.bytes_pushed) == (1, 0, 40)


def test_the_base_is_the_version_of_the_first_gradient() -> None:
    local = make()
    fetch(local, [0] * 5, version=3)
    accrue(local, [1] * 5)
    fetch(local, [0] * 5, version=8, number=2, handout=2)
    accrue(local, [1] * 5)
    assert [p.base for p in pushes(local.push(0.0, AT, mark=0))] == [3, 3]


def test_nothing_accrued_is_no_push_and_uses_no_seq() -> None:
    local = make()
    assert local.push(0.0, AT, mark=1) == []
    assert local.pushed == 0
    accrue(local, [1] * 5)
    assert {p.seq for p in pushes(local.push(0.0, AT, mark=0))} == {1}


def test_a_slot_is_free_when_every_shard_has_acknowledged_it() -> None:
    local = make()
    for _ in range(2):
        accrue(local, [1] * 5)
        local.push(0.0, AT, mark=0)
    assert not local.has_slot
    local.receive(0.0, "shard-0", Ack(1, 2, 2))
    assert (local.acked, local.has_slot) == (0, False)
    local.receive(0.0, "shard-1", Ack(1, 1, 1))
    assert (local.acked, local.has_slot) == (1, True)


def test_a_push_is_sent_again_as_it_was_until_it_is_acknowledged() -> None:
    local = make()
    accrue(local, [1] * 5)
    sent = pushes(local.push(0.0, AT, mark=0))
    local.receive(0.0, "shard-0", Ack(1, 1, 1))
    assert local.due == 0.25
    assert pushes(local.resend(0.3)) == sent[1:]


# -------------------------------------------------------------------------------- read own


@pytest.mark.parametrize("read_own", [True, False])
def test_an_answer_that_lacks_own_pushes_has_them_subtracted(read_own: bool) -> None:
    """A fetch that was asked for early is brought up to this worker's own last step."""
    local = make(read_own=read_own, rate=0.5)
    fetch(local, [0] * 5)
    for gradient in ([1] * 5, [10] * 5):
        accrue(local, gradient)
        local.push(0.0, AT, mark=0)
    local.receive(0.0, "shard-0", Ack(1, 1, 1))
    local.receive(0.0, "shard-1", Ack(1, 1, 1))
    accrue(local, [100] * 5, step=False)
    fetch(local, [-0.5] * 5, number=2, handout=2, holds=1)
    # Of holds = 1 the first push is in the answer; the second and what is accrued are not.
    expected = -0.5 - 0.5 * (10 + 100) if read_own else -0.5
    np.testing.assert_allclose(local.parameters, [expected] * 5)


def test_what_is_discarded_is_not_pushed() -> None:
    local = make()
    fetch(local, [0, 0, 0, 0, 0])
    accrue(local, [1, 1, 1, 1, 1], step=False)
    local.discard()
    assert local.push(0.0, AT, mark=0) == []
    accrue(local, [2, 2, 2, 2, 2], step=False)
    assert local.has_slot
    first, _ = local.push(0.0, AT, mark=0)
    assert isinstance(first, Send)
    push = first.message
    assert isinstance(push, Push)
    assert (push.seq, push.n_gradients, push.payload.array.tolist()) == (1, 1, [2, 2])


def test_versions_are_those_of_the_answers_shard_by_shard() -> None:
    local = make()
    local.ask(0.0, after=0)
    answer(local, 0, [0, 0], version=4)
    local.copy_answers(0.0)
    assert local.versions == [4, 0]
    answer(local, 1, [0, 0, 0], version=5)
    local.copy_answers(0.0)
    assert local.versions == [4, 5]
