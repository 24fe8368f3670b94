"""dbctl/transport/lease.py: the controller lived after the beat that it answered was sent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dbctl.transport.lease import REMEMBERED_BEATS, Lease


def test_it_counts_from_the_start_until_the_first_answer() -> None:
    lease = Lease(10.0, now=100.0)
    assert lease.in_force(109.9)
    assert not lease.in_force(110.0)


def test_an_answer_counts_from_when_its_beat_was_sent() -> None:
    lease = Lease(10.0, now=0.0)
    number = lease.beat(4.0)
    lease.renew(number, 9.0)
    assert lease.until == 14.0


def test_late_repeated_and_invented_answers_never_move_it_on_or_back() -> None:
    lease = Lease(10.0, now=0.0)
    first, second = lease.beat(1.0), lease.beat(2.0)
    lease.renew(second, 3.0)
    for number in (first, second, 0, -1, 99):
        assert lease.renew(number, 8.0) == {}
    assert lease.until == 12.0


def test_what_has_run_out_is_not_renewed() -> None:
    """A process that was stopped wakes, and beats before its loop has looked at the clock."""
    lease = Lease(10.0, now=0.0)
    lease.renew(lease.beat(60.0), 60.1)
    assert not lease.in_force(60.2)


def test_a_node_is_answered_by_what_the_relay_learnt_later() -> None:
    lease = Lease(10.0, now=0.0)
    lease.hear("worker-0.0", 7)
    first = lease.beat(1.0)
    lease.hear("worker-0.0", 8)
    lease.hear("shard-0", 3)
    assert lease.renew(first, 1.1) == {"worker-0.0": 7}
    second = lease.beat(2.0)
    assert lease.renew(second, 2.1) == {"worker-0.0": 8, "shard-0": 3}
    assert lease.renew(lease.beat(3.0), 3.1) == {}


def test_a_lost_answer_is_made_good_by_the_next() -> None:
    lease = Lease(10.0, now=0.0)
    lease.hear("worker-0.0", 7)
    lease.beat(1.0)
    assert lease.renew(lease.beat(2.0), 2.1) == {"worker-0.0": 7}


def test_nobody_is_answered_by_a_relay_without_a_lease() -> None:
    lease = Lease(1.0, now=0.0)
    lease.hear("worker-0.0", 1)
    assert lease.renew(lease.beat(0.5), 60.0) == {}


def test_memory_is_bounded() -> None:
    lease = Lease(10.0, now=0.0)
    for number in range(10 * REMEMBERED_BEATS):
        lease.hear(f"node-{number}", 1)
        lease.beat(float(number))
    assert len(lease._sent) == len(lease._waiting) == REMEMBERED_BEATS


@given(st.lists(st.tuples(st.sampled_from("bhr"), st.integers(0, 9)), max_size=60))
def test_at_second_hand_it_ends_no_later(events: list[tuple[str, int]]) -> None:
    """Node, relay and controller on one clock: no lease outlives the controller's last word by
    more than a lease."""
    relay, node = Lease(5.0, now=0.0), Lease(5.0, now=0.0)
    last_word = 0.0
    for now, (event, number) in enumerate(events, 1):
        if event == "h":
            relay.hear("n", node.beat(now - 0.5))
        elif event == "b":
            relay.beat(float(now))
        else:
            # The controller answers any beat it has seen, at this moment.
            last_word = float(now)
            for answered in relay.renew(number, float(now)).values():
                node.renew(answered, float(now))
        assert node.until <= last_word + 5.0
        assert relay.until <= last_word + 5.0
