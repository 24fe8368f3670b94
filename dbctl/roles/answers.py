"""What a worker of a batch method says of its orders, until the coordinator has heard it.

Rules of this file: pure (roles/base.py). Theory of operation: Computed is said again until a Work
comes that has no such order, and anew when one comes that has it. A Work that was overtaken may be
older than an order that is done already, and silence its answer: the next one that still has the
order brings it back.
"""

from __future__ import annotations

from collections.abc import Iterable

from dbctl.rights import CONTROLLER
from dbctl.roles.base import NEVER, Effects, Send
from dbctl.roles.worker import Timer
from dbctl.wire_batch import Computed

KEPT = 8  # with silenced ones: more than a replica ever has orders out


class Answers:
    def __init__(self, resend_s: float) -> None:
        self._kept: dict[int, Computed] = {}  # by number
        self._open: set[int] = set()  # of those: not heard yet
        self._timer = Timer(resend_s)

    @property
    def due(self) -> float:
        return self._timer.at

    def say(self, now: float, computed: Computed) -> Effects:
        self._kept[computed.number] = computed
        self._open.add(computed.number)
        # What is not heard yet stays, however many they are: the coordinator waits for each.
        silenced = sorted(self._kept.keys() - self._open)
        for old in silenced[: max(0, len(self._kept) - KEPT)]:
            del self._kept[old]
        if self._timer.at == NEVER:
            self._timer.begin(now)  # a later one does not put off an earlier one
        return [Send(CONTROLLER, computed)]

    def heard(self, now: float, listed: Iterable[int]) -> None:
        """`listed`: the orders that the coordinator takes for not done."""
        before = self._open
        self._open = self._kept.keys() & set(listed)
        if not self._open:
            self._timer.stop()
        elif not before:
            self._timer.begin(now)

    def resend(self, now: float) -> Effects:
        if now < self._timer.at:
            return []
        self._timer.again(now)
        return [Send(CONTROLLER, self._kept[number]) for number in sorted(self._open)]

    def forget(self) -> None:
        self._kept.clear()
        self._open.clear()
        self._timer.stop()
