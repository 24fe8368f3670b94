"""roles/allocation.py: who computes which bundle; paper A, section 4.2."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from dbctl.roles.allocation import N_AHEAD, Allocation


def test_a4_2_sequential_bundles_go_to_the_same_replica() -> None:
    """Paper A, section 4.2: data access is sequential, and the same in every evaluation."""
    for _ in range(2):
        allocation = Allocation(9, [0, 1, 2], backup=True)
        taken: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for _ in range(3):
            for replica in taken:
                bundle = allocation.next(replica)
                assert bundle is not None
                taken[replica].append(bundle)
                allocation.done(replica, bundle, (1.0,))
        assert taken == {0: [0, 1, 2], 1: [3, 4, 5], 2: [6, 7, 8]}
        assert allocation.complete
        assert allocation.n_backups == 0


def test_a4_2_a_fast_replica_does_more() -> None:
    """A replica that is done takes over the rear half of the longest interval that is left."""
    allocation = Allocation(8, [0, 1], backup=False)
    assert allocation.next(1) == 4
    taken = []
    for _ in range(6):
        bundle = allocation.next(0)
        assert bundle is not None
        taken.append(bundle)
        allocation.done(0, bundle, (1.0,))
    assert taken == [0, 1, 2, 3, 6, 7]


def test_a4_2_copies_of_what_is_out_go_to_idle_replicas_and_the_first_answer_counts() -> None:
    allocation = Allocation(2, [0, 1, 2], backup=True)
    slow = allocation.next(1)
    assert slow == 0
    other = allocation.next(2)
    assert other == 1
    allocation.done(2, other, (5.0,))
    assert allocation.next(0) == slow  # nothing is left to begin
    assert allocation.next(0) is None  # one copy at a time
    assert allocation.n_backups == 1
    allocation.done(0, slow, (3.0,))
    assert allocation.complete
    allocation.done(1, slow, (99.0,))
    assert allocation.portion_losses == [3.0, 5.0]


def test_without_backup_copies_idle_replicas_wait() -> None:
    allocation = Allocation(1, [0, 1], backup=False)
    assert allocation.next(1) == 0
    assert allocation.next(0) is None


def test_a_copy_goes_where_the_fewest_are() -> None:
    allocation = Allocation(2, [0, 1, 2, 3], backup=True)
    # Of two bundles over four replicas, replicas 1 and 3 have an interval.
    first, second = allocation.next(1), allocation.next(3)
    assert (first, second) == (0, 1)
    assert {allocation.next(0), allocation.next(2)} == {0, 1}


def test_a_replica_has_the_bundle_in_hand_and_the_next_one() -> None:
    allocation = Allocation(10, [0], backup=True)
    taken = [allocation.next(0) for _ in range(N_AHEAD + 1)]
    assert taken == [0, 1, None]


def test_what_a_dead_replica_had_goes_to_the_others() -> None:
    allocation = Allocation(6, [0, 1], backup=False)
    assert [allocation.next(1), allocation.next(1)] == [3, 4]
    allocation.done(1, 3, (1.0,))
    allocation.lose(1)
    taken = []
    while (bundle := allocation.next(0)) is not None:
        taken.append(bundle)
        allocation.done(0, bundle, (1.0,))
    assert sorted(taken) == [0, 1, 2, 4, 5]
    assert allocation.complete


def test_a_bundle_that_is_given_up_is_begun_anew_unless_somebody_has_a_copy() -> None:
    allocation = Allocation(1, [0, 1], backup=True)
    assert allocation.next(1) == 0
    assert allocation.next(0) == 0
    allocation.give_up(0, 0)
    assert allocation.next(0) == 0  # as a copy: replica 1 has it
    assert allocation.n_backups == 2
    allocation.give_up(0, 0)
    allocation.give_up(1, 0)
    assert allocation.next(0) == 0
    assert allocation.n_backups == 2


@settings(max_examples=200, deadline=None)
@given(
    n_bundles=st.integers(1, 30),
    n_replicas=st.integers(1, 6),
    seed=st.integers(0, 10**6),
    backup=st.booleans(),
)
def test_every_bundle_is_computed_whatever_the_order_of_events(
    n_bundles: int, n_replicas: int, seed: int, backup: bool
) -> None:
    """Random answers, refusals and deaths: the evaluation ends, each bundle's first answer kept."""
    random = Random(seed)
    live = set(range(n_replicas))
    allocation = Allocation(n_bundles, live, backup=backup)
    held: dict[int, list[int]] = {replica: [] for replica in live}
    first: dict[int, float] = {}
    for moment in range(10_000):
        if allocation.complete:
            break
        replica = random.choice(sorted(live))
        bundle = allocation.next(replica)
        if bundle is not None:
            assert bundle not in held[replica]
            held[replica].append(bundle)
        chance = random.random()
        if held[replica] and chance < 0.5:
            done = held[replica].pop(0)
            first.setdefault(done, float(moment))
            allocation.done(replica, done, (float(moment),))
        elif held[replica] and chance < 0.6:
            allocation.give_up(replica, held[replica].pop(0))
        elif chance > 0.98 and len(live) > 1:
            live.remove(replica)
            held[replica] = []
            allocation.lose(replica)
    assert allocation.complete
    assert allocation.portion_losses == [first[bundle] for bundle in range(n_bundles)]
