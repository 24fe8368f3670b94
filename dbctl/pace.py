"""Pieces that are asked for one after the other: how many at once, and when again. Pure.

Rules of this file: no clock, no message; time comes in as an argument, a piece is any key.

Theory of operation. What is on its way queues in front of everything else on the same line, leases
among it. So the window follows the line: it begins with one piece; one that came within `quick_s`
of being asked for widens it by one, one that took twice as long narrows it. What queues is then one
to two times that of the line's time, whether it carries a megabit or ten gigabits a second, and a
line with a long delay is full. Nothing is lost but what a full queue dropped; when nothing comes
for a while, all that is on its way is asked for again in its turn, one at first and with growing
pauses, so that a line that stands still is not filled with repetitions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from math import inf
from typing import Generic, TypeVar, final

PIECE_BYTES = 128 << 10  # a second of a line of 1 Mbit/s
WINDOW_MOST = 32
QUICK_S = 0.5
AGAIN_S = 4.0
AGAIN_TIMES = 4.0  # of what a piece took
AGAIN_MOST_S = 30.0

K = TypeVar("K", bound=Hashable)


@final
class Pace(Generic[K]):
    """`window`: how many may be on their way. A key is wanted until it `came`, or is dropped.

    `quick_s` is half a second, or more where others fill the line: with less it would get nothing.
    """

    def __init__(self, again_s: float = AGAIN_S, *, quick_s: float = QUICK_S) -> None:
        self.window = 1
        self._quick_s = quick_s
        self._wanted: OrderedDict[K, None] = OrderedDict()
        self._asked: dict[K, float] = {}  # when
        self._repeated: set[K] = set()
        self._again_s = again_s
        self._pause_s = again_s
        self._heard_at = -inf

    @property
    def again_at(self) -> float:
        """When `due` has something to say, if nothing comes until then."""
        return self._heard_at + self._pause_s if self._asked else inf

    def want(self, key: K) -> None:
        self._wanted[key] = None

    def drop(self, key: K) -> None:
        """Nobody waits for it any more."""
        self._wanted.pop(key, None)
        self._asked.pop(key, None)
        self._repeated.discard(key)

    def due(self, now: float) -> list[K]:
        """What is to be asked for now, in the order in which it was wanted."""
        if now >= self.again_at:
            for key in reversed(self._asked):
                self._wanted[key] = None
                self._wanted.move_to_end(key, last=False)
            self._repeated.update(self._asked)
            self._asked.clear()
            self.window = 1
            self._pause_s = min(2.0 * self._pause_s, AGAIN_MOST_S)
        found = []
        while self._wanted and len(self._asked) < self.window:
            key, _ = self._wanted.popitem(last=False)
            if not self._asked:
                self._heard_at = now
            self._asked[key] = now
            found.append(key)
        return found

    def came(self, now: float, key: K) -> bool:
        """Whether it was waited for: the first of its answers is."""
        asked_at = self._asked.get(key)
        if asked_at is None and not (key in self._wanted and key in self._repeated):
            return False
        self._heard_at = now
        if asked_at is not None and key not in self._repeated:  # else: which time does it answer?
            self._adapt(now - asked_at)
        self.drop(key)
        return True

    def _adapt(self, took_s: float) -> None:
        self._pause_s = min(max(self._again_s, AGAIN_TIMES * took_s), AGAIN_MOST_S)
        if took_s <= self._quick_s:
            self.window = min(self.window + 1, WINDOW_MOST)
        elif took_s >= 2 * self._quick_s:
            self.window = max(self.window - 1, 1)
