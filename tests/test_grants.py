"""Grants: exactly N steps, epochs of one's own, warmstart, leads and deaths are only grants."""

from __future__ import annotations

import time
from random import Random

import pytest

from dbctl.roles.grants import FIRST_GRANT, FIRST_GRANT_CUT, GRANT_S, Grants
from dbctl.wire import BEGINNING, Position

BIG = 10**6


def make(replicas: int = 2, *, steps_per_epoch: int = BIG, **stop: int | None) -> Grants:
    return Grants(dict.fromkeys(range(replicas), (BEGINNING, steps_per_epoch)), **stop)


def run(grants: Grants, replicas: int, *, seed: int = 0, dead: dict[int, int] | None = None) -> int:
    """Random replicas do what they were granted until all have their last grant; steps done."""
    random, done, live = Random(seed), [0] * replicas, set(range(replicas))
    finished: set[int] = set()
    now = 0.0
    for _ in range(100_000):
        if finished >= live:
            return sum(done)
        number = random.choice(sorted(live))
        now += random.random() * GRANT_S
        until, last = grants.grant(number, now)
        assert until >= done[number]
        done[number] = random.randint(done[number], until)
        grants.advance(number, done[number])
        if dead and number in dead and done[number] >= dead[number]:
            grants.dead(number)
            grants.settle(number, done[number])
            live.discard(number)
        if last and done[number] == until:
            finished.add(number)
    raise AssertionError(f"no end: {done}")


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("steps", [1, 7, 1000])
def test_steps_are_exact_for_every_count_of_replicas(replicas: int, steps: int) -> None:
    for seed in range(10):
        grants = make(replicas, steps=steps)
        assert run(grants, replicas, seed=seed) == steps
        assert grants.done() == steps


@pytest.mark.parametrize("seed", range(10))
def test_what_a_dead_replica_did_not_do_is_done_by_the_others(seed: int) -> None:
    grants = make(3, steps=500)
    assert run(grants, 3, seed=seed, dead={1: 20}) == 500


@pytest.mark.parametrize("seed", range(5))
def test_what_is_known_of_all_is_their_sum_after_every_change(seed: int) -> None:
    random, n = Random(seed), 5
    grants = make(n, steps=400, warmstart=20, max_lead=30)
    for now in range(300):
        number = random.randrange(n)
        replica = grants._replicas[number]
        match random.randrange(12):
            case 0 if replica.live and grants._n_live > 1:
                grants.dead(number)
            case 1 if not replica.live:
                grants.settle(number, random.randint(0, replica.until))
            case 2 | 3 | 4 | 5 if replica.live:
                grants.advance(number, random.randint(replica.done, replica.until))
            case _:
                grants.grant(number, float(now))
        replicas = grants._replicas.values()
        assert grants.done() == sum(replica.done for replica in replicas)
        assert grants._granted == sum(replica.until for replica in replicas) <= 400
        assert grants._n_live == sum(replica.live for replica in replicas)
    assert grants.done() > 0


def test_the_sum_of_grants_never_passes_the_stop() -> None:
    grants = make(4, steps=10)
    granted = [grants.grant(n, 0.0)[0] for n in range(4)]
    assert sum(granted) <= 10
    assert min(granted) >= 1  # each gets a share of what is left


def test_a_last_grant_is_said_to_be_the_last() -> None:
    grants = make(1, steps=5)
    assert grants.grant(0, 0.0) == (5, True)
    grants.advance(0, 5)
    assert grants.grant(0, 0.0) == (5, True)


def test_a_resumed_run_counts_from_its_very_first_step() -> None:
    begins = {0: (Position(30, 3, 0), 10), 1: (Position(20, 2, 0), 10)}
    grants = Grants(begins, steps=60)
    for number in (0, 1) * 8:
        grants.advance(number, grants.grant(number, 0.0)[0])
    assert grants.done() == 60


def test_epochs_end_each_replica_after_its_own_passes() -> None:
    grants = Grants({0: (BEGINNING, 7), 1: (BEGINNING, 3)}, epochs=20)
    ends = {}
    for number in (0, 1):
        last = False
        while not last:
            until, last = grants.grant(number, 0.0)
            grants.advance(number, until)
        ends[number] = until
    assert ends == {0: 140, 1: 60}


def test_epochs_of_a_resumed_replica_are_those_that_are_left() -> None:
    """Its position says where it stands in its epoch; its steps may come of another cut."""
    grants = Grants({0: (Position(100, 3, 2), 4)}, epochs=5)
    grants.advance(0, grants.grant(0, 0.0)[0])
    assert grants.grant(0, 0.0) == (100 + 2 + 4, True)


def test_a_replica_without_rows_has_nothing_to_do() -> None:
    grants = Grants({0: (BEGINNING, 5), 1: (BEGINNING, 0)}, steps=20)
    assert grants.grant(1, 0.0) == (0, True)
    grants.advance(0, grants.grant(0, 0.0)[0])


def test_warmstart_is_done_by_one_replica_then_all_are_released() -> None:
    """Paper A2, section 3: a single replica trains before the others start."""
    grants = make(3, warmstart=12)
    assert [grants.grant(n, 0.0) for n in range(3)] == [(8, False), (0, False), (0, False)]
    grants.advance(0, 8)
    assert grants.grant(0, 1.0) == (12, False)
    assert grants.in_warmstart()
    grants.advance(0, 12)
    assert not grants.in_warmstart()
    assert [grants.grant(n, 1.0)[0] > (12 if n == 0 else 0) for n in range(3)] == [True] * 3


def test_another_replica_does_the_warmstart_when_the_first_is_dead() -> None:
    grants = make(3, warmstart=12)
    grants.advance(0, 5)
    grants.dead(0)
    assert grants.grant(1, 0.0) == (7, False)
    assert grants.grant(2, 0.0) == (0, False)


def test_warmstart_is_part_of_the_stop() -> None:
    assert run(make(3, steps=40, warmstart=12), 3) == 40
    assert run(make(3, steps=10, warmstart=12), 3) == 10


def test_nobody_gets_further_ahead_of_the_slowest_than_max_lead() -> None:
    grants = make(3, max_lead=5)
    assert [grants.grant(n, 0.0)[0] for n in range(3)] == [5, 5, 5]
    for number in (0, 1):
        grants.advance(number, 5)
    assert grants.grant(0, 1.0) == (5, False)
    grants.advance(2, 3)
    assert grants.grant(0, 1.0) == (8, False)


def test_a_dead_replica_is_not_waited_for() -> None:
    grants = make(2, max_lead=5)
    grants.advance(0, grants.grant(0, 0.0)[0])
    grants.dead(1)
    assert grants.grant(0, 1.0)[0] > 5


def test_a_replica_at_its_end_is_not_waited_for() -> None:
    grants = Grants({0: (BEGINNING, 10), 1: (BEGINNING, 100)}, epochs=1, max_lead=5)
    for _ in range(2):
        grants.advance(1, grants.grant(1, 0.0)[0])
        grants.advance(0, grants.grant(0, 0.0)[0])
    assert grants.grant(0, 0.0) == (10, True)
    grants.advance(1, grants.grant(1, 0.0)[0])
    assert grants.grant(1, 0.0)[0] > 10 + 5


def test_a_lead_counts_from_the_release() -> None:
    grants = make(2, warmstart=20, max_lead=5)
    while grants.in_warmstart():
        grants.advance(0, grants.grant(0, 0.0)[0])
    assert [grants.grant(n, 0.0)[0] for n in range(2)] == [25, 5]


def test_grants_double_when_they_were_used_up_early_and_halve_when_late() -> None:
    grants = make(1)
    sizes, at, now = [], 0, 0.0
    for wait in (0.0, 0.1, 0.1, 2.0, 2.0, 0.5):
        now += wait
        until, _ = grants.grant(0, now)
        sizes.append(until - at)
        at = until
        grants.advance(0, at)
    assert sizes == [n * FIRST_GRANT for n in (1, 2, 4, 2, 1, 1)]


def test_an_interrupt_of_cut_replicas_waits_for_two_slow_steps_at_most() -> None:
    """They stop only where their grant ends; of a step of 10 s two fit in G11's 30 s."""
    grants = Grants({0: (BEGINNING, BIG)}, cut=True)
    at, now, longest = 0, 0.0, 0
    for _ in range(20):
        until, _ = grants.grant(0, now)
        longest = max(longest, until - at)
        at, now = at + 1, now + 10.0
        grants.advance(0, at)
    assert longest == FIRST_GRANT_CUT == 2


def test_a_grant_is_never_taken_back() -> None:
    grants = make(2, max_lead=50)
    until, _ = grants.grant(0, 0.0)
    assert grants.grant(0, 100.0)[0] >= until
    grants.advance(0, 1)
    assert grants.grant(0, 200.0)[0] >= until


def test_new_grants_for_all_take_time_that_grows_with_them() -> None:
    """After each report; with their square, 200 replicas kept a controller from all else."""

    def seconds(replicas: int) -> float:
        grants = make(replicas, steps=BIG, warmstart=BIG, max_lead=3)
        began = time.thread_time()
        grants.advance(0, 1)
        for number in range(replicas):
            grants.grant(number, 1.0)
        return time.thread_time() - began

    few, many = (min(seconds(replicas) for _ in range(3)) for replicas in (100, 2000))
    assert many < 100 * few
