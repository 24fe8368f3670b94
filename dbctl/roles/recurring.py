"""What happens every N steps, epochs or seconds: evaluations and checkpoints.

Rules of this file: pure. Steps and epochs count from the run's very first, so that a resumed run
keeps the beat.
"""

from __future__ import annotations

from math import floor

from dbctl.experiment.specs import Every
from dbctl.roles.base import NEVER
from dbctl.roles.figures import Figures


class Recurring:
    """When it is due next; `every` None is never. `at` is a time, only for seconds."""

    def __init__(self, every: Every | None) -> None:
        self._every = every
        self._threshold = NEVER
        self.at = NEVER

    def begin(self, now: float, figures: Figures) -> None:
        if self._every is None:
            return
        amount = self._every.amount
        if self._every.unit == "seconds":
            self.at = now + amount
        else:
            self._threshold = (floor(self._value(figures) / amount + 1e-9) + 1) * amount

    def is_due(self, now: float, figures: Figures) -> bool:
        if self._every is None:
            return False
        return now >= self.at or self._value(figures) >= self._threshold - 1e-9

    def advance(self, now: float, figures: Figures) -> None:
        self.begin(now, figures)

    def _value(self, figures: Figures) -> float:
        assert self._every is not None
        return figures.steps if self._every.unit == "steps" else figures.epochs
