"""dbctl/roles/worker.py: when something is sent again. What is sent: test_downpour.py."""

from __future__ import annotations

from typing import Any

import pytest

from dbctl.region import Range
from dbctl.roles.base import NEVER
from dbctl.roles.worker import MAX_BACK_OFF_S, SLOW_LINE, Channel, Timer
from dbctl.wire import BEGINNING, Ack, Fetch, Message, Params, Push, Welcome


def test_back_off_doubles_up_to_a_limit() -> None:
    timer, now, waits = Timer(0.25), 10.0, []
    timer.begin(now)
    for _ in range(7):
        waits.append(timer.at - now)
        now = timer.at
        timer.again(now)
    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0, MAX_BACK_OFF_S, MAX_BACK_OFF_S]


def first_wait(timer: Timer) -> float:
    timer.begin(100.0)
    return timer.at - 100.0


def test_the_first_wait_is_twice_what_answers_take() -> None:
    timer = Timer(0.25)
    for took_s, wait_s in ((0.01, 0.25), (0.6, 1.2), (0.6, 1.2), (2.0, 4.0), (4.0, MAX_BACK_OFF_S)):
        timer.begin(0.0)
        timer.answered(took_s)
        assert timer.at == NEVER
        assert first_wait(timer) == pytest.approx(wait_s)
    for _ in range(50):
        timer.begin(0.0)
        timer.answered(0.01)
    assert first_wait(timer) == 0.25, "slowly it forgets"


def test_an_answer_to_what_was_sent_twice_measures_nothing_but_keeps_the_wait() -> None:
    """Karn and Partridge, 1987: else a slow line is never known, or a lost message believed."""
    timer = Timer(0.25)
    timer.begin(0.0)
    timer.again(0.25)
    timer.again(0.75)
    timer.answered(1.1)
    assert first_wait(timer) == 1.0
    timer.answered(100.01)
    assert first_wait(timer) == 0.25, "one clean answer is enough"


def test_what_is_late_or_was_not_waited_for_teaches_nothing() -> None:
    timer = Timer(0.25)
    timer.answered(50.0)
    assert first_wait(timer) == 0.25
    timer.stop()
    timer.answered(130.0)
    assert first_wait(timer) == 0.25


class Line:
    """One worker and its shard: what is sent needs `transfer_s` each way, one after the other."""

    def __init__(self, n_elements: int, transfer_s: float) -> None:
        self.channel = Channel("shard-0", Range(0, n_elements), resend_s=0.25)
        self.transfer_s = transfer_s
        self.now = 0.0
        self.free_at = 0.0
        self.arrivals: list[tuple[float, Message]] = []
        self.n_sent = 0

    def carry(self, effects: list[Any]) -> None:
        for send in effects:
            self.n_sent += 1
            message = send.message
            self.free_at = max(self.free_at, self.now) + self.transfer_s
            if isinstance(message, Push):
                self.arrivals.append((self.free_at, Ack(1, message.seq, message.seq)))
            elif isinstance(message, Fetch):
                n, payload = message.number, object()
                self.arrivals.append((self.free_at, Params(1, n, n, 0, 0, 0, payload)))

    def until(self, done: Any) -> None:
        while not done():
            self.now += 0.01
            for arrival in [a for a in self.arrivals if a[0] <= self.now]:
                self.arrivals.remove(arrival)
                self.channel.receive(self.now, arrival[1])
            self.carry(self.channel.resend(self.now))


@pytest.mark.parametrize("transfer_s", [0.1, 0.6, 3.0])
def test_a_slow_line_is_not_filled_with_what_is_on_its_way(transfer_s: float) -> None:
    """At 100 Mbit/s pushes of 7 MB were sent four times, and a step took four times as long."""
    line = Line(100, transfer_s)
    line.channel.receive(0.0, Welcome(1, 0, 0))
    sent = []
    for seq in range(1, 13):
        before = line.n_sent
        line.carry(line.channel.push(line.now, Push(1, seq, 0, 0, 1, BEGINNING, 0, 0)))
        line.until(lambda seq=seq: line.channel.acked >= seq)
        sent.append(line.n_sent - before)
    assert sent[4:] == [1] * 8, sent


def test_a_large_payload_is_given_time_from_the_first_one_on() -> None:
    n_elements = 1_800_000
    line = Line(n_elements, 0.6)
    line.channel.receive(0.0, Welcome(1, 0, 0))
    assert 4 * n_elements / SLOW_LINE > 0.6
    line.carry(line.channel.ask(0.0, after=0))
    line.until(lambda: line.channel.answer is not None)
    line.carry(line.channel.push(line.now, Push(1, 1, 0, 0, 1, BEGINNING, 0, 0)))
    line.until(lambda: line.channel.acked == 1)
    assert line.n_sent == 2
