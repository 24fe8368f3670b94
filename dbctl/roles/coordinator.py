"""The coordinator of Downpour: it grants steps, asks for evaluations and cuts, ends the run.

Rules of this file: pure (roles/base.py); it holds no parameters. Theory of operation: replicas work
on grants of steps (roles/grants.py), and ENDING is over when every replica reports that it is at
rest with everything acknowledged. The rest is every leader's (roles/leader.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dbctl.roles.base import Effects, Record
from dbctl.roles.cuts import replica_of
from dbctl.roles.figures import Figures, Part
from dbctl.roles.grants import Grants
from dbctl.roles.leader import Leader, LeaderStart, Phase
from dbctl.roles.orders import Orders
from dbctl.roles.records import worker_fields
from dbctl.roles.verdict import MEND
from dbctl.wire import Message, Peer, Position, Report, ShardReport

MAX_REFUSED_IN_A_ROW = 10
LOWER = "lower optimizer.rule.rate, or use adagrad with a warmstart"


@dataclass(frozen=True, kw_only=True)
class CoordinatorStart(LeaderStart):
    """`parts`: each replica's rows, and where it stands when the run begins or goes on."""

    parts: Mapping[int, Part]
    warmstart: int = 0
    max_lead: int | None = None


class Coordinator(Leader):
    def __init__(self, start: CoordinatorStart) -> None:
        begins = {number: part.begin for number, part in start.parts.items()}
        figures = Figures(start.parts, examples=start.examples, seconds=start.seconds)
        super().__init__(start, figures, begins=begins)
        self._start = start
        self._grants = Grants(
            {n: (part.begin, part.steps_per_epoch) for n, part in start.parts.items()},
            steps=start.stop.steps,
            epochs=start.stop.epochs,
            warmstart=start.warmstart,
            max_lead=start.max_lead,
            cut=any(len(workers) > 1 for workers in start.workers.values()),
        )
        self._orders = Orders(start.workers, begins)

    def is_working(self, worker: str) -> bool:
        replica = replica_of(worker)
        return self.figures.position(replica).step < self._orders.until(replica)

    def _begin(self, now: float) -> Effects:
        return [effect for n in self.live() for effect in self._grant(now, n, again=True)]

    # ---------------------------------------------------------------------------------- messages

    def _hear(self, now: float, sender: Peer, message: Message) -> Effects:
        return self._on_report(now, sender, message) if isinstance(message, Report) else []

    def _on_shard_report(self, now: float, shard: str, report: ShardReport) -> Effects:
        effects = super()._on_shard_report(now, shard, report)
        in_a_row = self.figures.refused_in_a_row(shard)
        # Those that a run which is over has still had refused end nothing: what is there is saved.
        if in_a_row <= MAX_REFUSED_IN_A_ROW or self._phase is not Phase.RUNNING:
            return effects
        reason = f"{shard} refused {in_a_row} pushes in a row, whose sums were not finite; {LOWER}"
        return [*effects, *self._over("failed", reason)]

    def _on_report(self, now: float, sender: Peer, report: Report) -> Effects:
        replica = replica_of(sender.node)
        if replica in self.figures.dead:
            return []
        if sender.node == self._start.workers[replica][0]:
            # All partitions of a replica do the same steps: one of them is counted.
            self.figures.report(now, replica, report)
            self._grants.advance(replica, report.position.step)
        effects: Effects = [
            Record("worker", worker_fields(sender.node, report, figures=self.figures))
        ]
        if report.refused_in_a_row > MAX_REFUSED_IN_A_ROW:
            where = report.refused_where
            reason = (
                f"{sender.node} refused {report.refused_in_a_row} non-finite gradients in a row,"
                f" the last at {where}"
            )
            if not where.endswith(MEND):  # the data are not at fault
                reason += f"; {LOWER}"
            return [*effects, *self._over("failed", reason)]
        self._orders.heard(sender.node, replica, report)
        return effects + self._go_on(now)

    def _go_on(self, now: float) -> Effects:
        """New grants for all; then the end if nobody has anything left to do, else what is due."""
        if self._phase is Phase.MEASURING:
            return []
        effects: Effects = []
        if self._phase is Phase.RUNNING:
            for replica in self.live():
                effects += self._grant(now, replica, again=False)
        if self._orders.at_rest(self.live()) and not self._departures:
            return effects + self._measure(now)
        return effects + (self._by_progress(now) if self._phase is Phase.RUNNING else [])

    def _grant(self, now: float, replica: int, *, again: bool) -> Effects:
        until, last = self._grants.grant(replica, now)
        mark = self._checkpoints.mark_for(replica)
        return self._orders.grant(replica, until, last=last, mark=mark, again=again)

    def _lost(self, now: float, replica: int) -> None:
        self._grants.dead(replica)
        self._orders.wake(replica)
        self._checkpoints.dead(now, replica)

    def _settled(self, now: float, settled: Mapping[int, Position]) -> Effects:
        for replica, position in settled.items():
            self.figures.settle(replica, position)
            self._grants.settle(replica, position.step)
        return self._go_on(now)

    # ---------------------------------------------------------------------- evaluations and cuts

    def _by_progress(self, now: float) -> Effects:
        effects = self._evaluate_if_due(now)
        if self._checkpoints.is_due(now, self.figures):
            effects += self._ask_for_cut(now)
        return effects

    def _ask_for_cut(self, now: float) -> Effects:
        """A mark for the replica that has most to do; none if all have their last grant already."""
        running = [n for n in self.live() if not self._orders.is_last(n)]
        if self._grants.in_warmstart():
            running = running[:1]
        if not running:
            return []
        replica = min(running, key=lambda n: self.figures.position(n).step)
        self._checkpoints.ask(replica, self._orders.until(replica))
        return self._grant(now, replica, again=False)

    # ------------------------------------------------------------------------------------ the end

    def _halt(self, now: float, *, push: bool, status: str, reason: str) -> Effects:
        self._phase = Phase.ENDING
        self._status, self._reason = status, reason
        return self._orders.halt(self.live(), push=push)

    def _say_again(self, now: float) -> Effects:
        if self._phase is Phase.ENDING:
            return self._orders.halt_again(self.live())
        if self._phase is Phase.MEASURING:
            return []
        return [effect for n in self.live() for effect in self._grant(now, n, again=True)]
