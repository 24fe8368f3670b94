"""When a run is saved, and what is said to shards about it: cuts on the way and the last one.

Rules of this file: pure; roles/cuts.py gathers, from here it is asked for, handed on and given
back. Theory of operation: a cut on the way waits for its beat, then for a replica whose grant can
carry the mark; one whose marker died is asked for again. The last cut is asked of the shards
directly, once nothing runs; one that is being written then is let end first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dbctl.experiment.specs import Every
from dbctl.roles.base import NEVER, Effects, Save, Send
from dbctl.roles.cuts import Cuts
from dbctl.roles.figures import Figures
from dbctl.roles.recurring import Recurring
from dbctl.wire import Cut, CutPart, Position, Return


class Checkpoints:
    """`begins`: where each replica stood when the run began. `save` False: nothing is written."""

    def __init__(
        self,
        shards: Sequence[str],
        begins: Mapping[int, Position],
        *,
        every: Every | None,
        save: bool,
    ) -> None:
        self._shards = list(shards)
        self._cuts = Cuts(shards, begins)
        self._next = Recurring(every if save else None)
        self._ask_at = NEVER
        self._last_asked = False
        self.complete = not save  # the last one is safe, or there is none to be made

    @property
    def at(self) -> float:
        """When the next one is due by the clock."""
        return self._next.at

    def begin(self, now: float, figures: Figures) -> None:
        self._next.begin(now, figures)

    # -------------------------------------------------------------------------------- on the way

    def is_due(self, now: float, figures: Figures) -> bool:
        """Whether a replica is to be asked for a cut now; says so once."""
        if self._cuts.under_way:
            return False
        if self._next.is_due(now, figures):
            self._next.advance(now, figures)
            self._ask_at = now
        if now < self._ask_at:
            return False
        self._ask_at = NEVER
        return True

    def ask(self, replica: int, mark_step: int) -> None:
        self._cuts.ask(replica, mark_step)

    def mark_for(self, replica: int) -> tuple[int, int]:
        """The mark (number, step) that belongs into a grant of this replica, or (0, 0)."""
        return self._cuts.mark_for(replica)

    def ask_between(self) -> Effects:
        """A cut asked of the shards directly, on the way: nothing is under way (batch methods)."""
        self._cuts.ask(None, final=False)
        return self.ask_again()

    def dead(self, now: float, replica: int) -> None:
        if self._cuts.dead(replica):
            self._ask_at = now

    def add(self, shard: str, part: CutPart) -> Effects:
        returned = self._cuts.returned(shard, part)
        if returned is not None:
            return [Send(shard, Return(returned))]
        cut = self._cuts.add(shard, part)
        return [Save(cut)] if cut is not None else []

    def written(self) -> Effects:
        """The writer is done with what it was given: the shards get it back."""
        return [Send(shard, Return(handout)) for shard, handout in self._cuts.written().items()]

    # --------------------------------------------------------------------------------- the last

    @property
    def last_asked(self) -> bool:
        return self._last_asked

    def ask_last(self) -> Effects:
        """Nothing runs any more: the cut that ends the run, unless one is still being written."""
        if self.complete or self._cuts.being_written:
            return []
        self._last_asked = True
        self._cuts.ask(None)
        return self.ask_again()

    def ask_again(self) -> Effects:
        """The cut that was asked of the shards directly, as long as it has not come."""
        if not self._cuts.is_direct or self._cuts.being_written:
            return []
        cut = Cut(self._cuts.number)
        return [Send(shard, cut) for shard in self._shards]
