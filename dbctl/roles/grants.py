"""How many steps each replica may do: warmstart, `stop`, fairness and `max_lead` are only grants.

Rules of this file: pure; no messages. Theory of operation: a grant says "go to step n of yours";
the sum of all grants never passes `stop: steps`, so that 1,000 steps are exactly 1,000. Grants are
short (about `GRANT_S` of work), so that fast replicas do more and a change takes effect soon; near
the end each gets a share of what is left. Ours: grants double when they were used up early.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dbctl.wire import Position

GRANT_S = 0.5
FIRST_GRANT = 8
FIRST_GRANT_CUT = 2  # a cut replica stops only where its grant ends, and a step may take seconds


@dataclass(slots=True)
class _Replica:
    begin: Position
    steps_per_epoch: int
    done: int  # own steps, as last reported
    released: int  # own steps when all were let go: a lead counts from there
    until: int
    chunk: int
    live: bool = True
    granted_at: float | None = None


class Grants:
    """`replicas`: for each its begin and the mini-batches that its rows make.

    `steps` (of all replicas together, counted from the run's very first) and `epochs` are the run's
    stop; `warmstart` steps are done by one replica before the others are released (paper A2).
    `cut`: replicas are, so that each grant is what an interrupt waits for.
    """

    def __init__(
        self,
        replicas: Mapping[int, tuple[Position, int]],
        *,
        steps: int | None = None,
        epochs: int | None = None,
        warmstart: int = 0,
        max_lead: int | None = None,
        cut: bool = False,
    ) -> None:
        self._steps = steps
        self._epochs = epochs
        self._warmstart = warmstart
        self._max_lead = max_lead
        first = FIRST_GRANT_CUT if cut else FIRST_GRANT
        self._replicas = {
            number: _Replica(begin, steps_per_epoch, begin.step, begin.step, begin.step, first)
            for number, (begin, steps_per_epoch) in replicas.items()
        }
        self._survey()

    def _survey(self) -> None:
        """Of all replicas, what the grant of each depends on: found when one has changed, and not
        for each grant, since each report is followed by a grant for every replica.
        """
        replicas = self._replicas.values()
        self._done = sum(replica.done for replica in replicas)
        self._granted = sum(replica.until for replica in replicas)
        self._n_live = sum(replica.live for replica in replicas)
        # The replica that does the warmstart: the first live one.
        live = (number for number, replica in self._replicas.items() if replica.live)
        self._first = min(live, default=min(self._replicas, default=0))
        self._least: int | None = None
        if self._max_lead is not None:
            leads = (r.done - r.released for r in replicas if self._runs(r))
            self._least = min(leads, default=None)

    def done(self) -> int:
        """Steps of all replicas together, those of dead ones included."""
        return self._done

    def until(self, number: int) -> int:
        return self._replicas[number].until

    def advance(self, number: int, step: int) -> None:
        replica = self._replicas[number]
        warming = self.in_warmstart()
        replica.done = max(replica.done, step)
        if warming:
            replica.released = replica.done
        self._survey()

    def dead(self, number: int) -> None:
        """It does no more; what it had been granted is kept until it is known what it did."""
        self._replicas[number].live = False
        self._survey()

    def settle(self, number: int, step: int) -> None:
        """The last step of a dead replica that a shard has applied.

        What it had done besides, or had been granted, goes back to the others.
        """
        replica = self._replicas[number]
        replica.done = replica.until = max(step, replica.begin.step)
        self._survey()

    def in_warmstart(self) -> bool:
        if not self._warmstart:
            return False
        return self.done() < self._warmstart and self._runs(self._replicas[self._first])

    def grant(self, number: int, now: float) -> tuple[int, bool]:
        """The step that the replica may go to, and whether that is the last it will be given."""
        replica = self._replicas[number]
        bound, last = self._bound(number)
        wish = replica.until
        if replica.done + replica.chunk // 2 >= replica.until:
            since = GRANT_S if replica.granted_at is None else now - replica.granted_at
            if since < GRANT_S / 2:
                replica.chunk *= 2
            elif since > 2 * GRANT_S:
                replica.chunk = max(1, replica.chunk // 2)
            wish = replica.done + replica.chunk
        until = max(replica.until, min(wish, bound))
        if until > replica.until:
            replica.granted_at = now
        self._granted += until - replica.until
        replica.until = until
        return until, last and until >= bound

    def _bound(self, number: int) -> tuple[int, bool]:
        """The highest step that may be granted now; and whether it will never be higher."""
        replica = self._replicas[number]
        highest, final = self._epoch_bound(replica)
        bounds = [(highest, not final)]  # (step, may be higher later): of equal ones the final one
        if self._steps is not None:
            pool = self._steps - self._granted
            share = pool if self._n_live <= 1 else max(1, pool // (2 * self._n_live))
            bounds.append((replica.until + min(pool, share), pool > share))
        if self.in_warmstart():
            left = self._warmstart - self.done() if number == self._first else 0
            bounds.append((replica.done + left, True))
        elif self._max_lead is not None:
            least = replica.done - replica.released if self._least is None else self._least
            bounds.append((replica.released + least + self._max_lead, True))
        bound, grows = min(bounds)
        return bound, not grows

    def _epoch_bound(self, replica: _Replica) -> tuple[int, bool]:
        if replica.steps_per_epoch == 0:
            return replica.begin.step, True
        if self._epochs is None:
            return 2**62, False
        begun = replica.begin.epoch * replica.steps_per_epoch + replica.begin.index
        left = self._epochs * replica.steps_per_epoch - begun
        return replica.begin.step + max(0, left), True

    def _runs(self, replica: _Replica) -> bool:
        """Whether others must wait for it: not a dead one, nor one that is at its end."""
        return replica.live and replica.done < self._epoch_bound(replica)[0]
