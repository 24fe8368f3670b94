"""The coordinator's commands to the shards: one out at a time, said again until all have answered.

Rules of this file: pure. Theory of operation (docs/protocol.md, section 8): commands are numbered
without gaps and go to every shard; a shard carries out each once. The answers are scalars, float64
sums over each shard's elements, which are added in the order of the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import fsum

from dbctl.roles.base import Effects, Send
from dbctl.wire_batch import Begin, Collect, Execute, Executed

NumberedCommand = Execute | Begin | Collect


class Commands:
    """`n_round_trips` counts the commands of this life of the run, by kind."""

    def __init__(self, shards: Sequence[str]) -> None:
        self._shards = list(shards)
        self._number = 0
        self._now: NumberedCommand | None = None
        self._answers: dict[str, tuple[float, ...]] = {}
        self.n_round_trips: dict[str, int] = {"Execute": 0, "Begin": 0, "Collect": 0}

    @property
    def busy(self) -> bool:
        """A command is out."""
        return self._now is not None

    def give(self, make: Callable[[int], NumberedCommand]) -> Effects:
        """Sends the command that `make` makes of the next number."""
        assert self._now is None, f"a command is out: {self._now}"
        self._number += 1
        self._now = make(self._number)
        self._answers = {}
        self.n_round_trips[type(self._now).__name__] += 1
        return self.again()

    def again(self) -> Effects:
        """What is out, to the shards that have not answered."""
        if self._now is None:
            return []
        return [Send(shard, self._now) for shard in self._shards if shard not in self._answers]

    def take(self, shard: str, answer: Executed) -> tuple[NumberedCommand, list[float]] | None:
        """The command and the sums over all shards, once the last has answered."""
        if self._now is None or answer.number != self._now.number or shard not in self._shards:
            return None
        self._answers[shard] = answer.scalars
        if len(self._answers) < len(self._shards):
            return None
        done, self._now = self._now, None
        in_order = [self._answers[name] for name in self._shards]
        return done, [_sum(column) for column in zip(*in_order, strict=True)]


def _sum(values: Sequence[float]) -> float:
    """Rounded once; infinities and numbers near the end of float64 as arithmetic has them."""
    try:
        return fsum(values)
    except (OverflowError, ValueError):
        return sum(values)
