"""Beats and leases: whether the controller still lives, as far as one process can know. Pure.

Rules of this file: time comes in as an argument (seconds, monotonic, this process's own clock).

Theory of operation: a beat is numbered and its sending time kept. The answer to beat n extends the
lease to `lease_s` after beat n was *sent*: the controller lived at some later moment, so no clock
and no delay can make the lease too long. Until the first answer it counts from the start. A lease
that has run out stays so: whoever of a process has seen its end acts by it, and all must agree.

A relay (the agent) answers its nodes itself, and only with what it knows: a node's beat that came
before the relay sent its own beat k is answered when k is. The controller then lived after the
node's beat was sent, so the node's lease is as true as the relay's, and ends no later for having
been given at second hand. Ours; an answer at once could double the time a cut-off node goes on.
"""

from __future__ import annotations

from collections import OrderedDict

REMEMBERED_BEATS = 64
MAX_NODES = 4096  # of which a process remembers anything


class Lease:
    """`until`: when the lease ends, seconds on the clock that `now` is given in."""

    def __init__(self, lease_s: float, *, now: float) -> None:
        self.lease_s = lease_s
        self.until = now + lease_s
        self._number = 0
        self._sent: OrderedDict[int, float] = OrderedDict()
        self._heard: dict[str, int] = {}
        self._waiting: OrderedDict[int, dict[str, int]] = OrderedDict()

    def in_force(self, now: float) -> bool:
        return now < self.until

    def beat(self, now: float) -> int:
        """The number of the beat that is being sent now, from 1."""
        self._number += 1
        self._sent[self._number] = now
        self._waiting[self._number] = self._heard
        self._heard = {}
        if len(self._sent) > REMEMBERED_BEATS:
            self._sent.popitem(last=False)
            self._waiting.popitem(last=False)
        return self._number

    def hear(self, node: str, number: int) -> None:
        """A node's beat came by on its way to the controller."""
        if node in self._heard or len(self._heard) < MAX_NODES:
            self._heard[node] = max(number, self._heard.get(node, number))

    def renew(self, number: int, now: float) -> dict[str, int]:
        """Beat `number` was answered; which beat of which node can be answered now.

        An answer to a beat never sent, or forgotten, or after the end of the lease changes nothing.
        """
        if number not in self._sent or not self.in_force(now):
            return {}
        self.until = max(self.until, self._sent[number] + self.lease_s)
        answers: dict[str, int] = {}
        while self._sent and next(iter(self._sent)) <= number:
            self._sent.popitem(last=False)
            answers |= self._waiting.popitem(last=False)[1]
        return answers
