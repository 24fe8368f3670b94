"""The coordinator: it grants steps, asks for evaluations and cuts, ends the run. No parameters.

Rules of this file: pure (roles/base.py). Theory of operation: a run is RUNNING until its stop is
reached, somebody interrupts it, or too few replicas live; then ENDING: every replica reports that
it is at rest with everything acknowledged; then MEASURING: the final evaluation and the final cut,
side by side; then OVER. What it says to others are totals, sent again each second until their
effect is reported. Killing it and killing the controller is one fault: it lives in that process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from dbctl.experiment.specs import Every, StopSpec
from dbctl.roles.base import NEVER, Done, Effects, Record, Save, Send
from dbctl.roles.checkpoints import Checkpoints
from dbctl.roles.cuts import replica_of
from dbctl.roles.departures import Departures
from dbctl.roles.evaluations import Evaluations, Measured
from dbctl.roles.figures import Figures, Part
from dbctl.roles.grants import Grants
from dbctl.roles.orders import Orders
from dbctl.roles.records import shard_fields, worker_fields
from dbctl.roles.recurring import Recurring
from dbctl.wire import (
    CutPart,
    Evaluated,
    Exited,
    Message,
    Peer,
    Predictions,
    Report,
    ShardReport,
)

MAX_REFUSED_IN_A_ROW = 10
RESEND_S = 1.0


@dataclass(frozen=True, kw_only=True)
class CoordinatorStart:
    """`workers`: for each replica the workers of its partitions. Rows of a resumed run: `parts`."""

    workers: Mapping[int, Sequence[str]]
    parts: Mapping[int, Part]
    shards: Sequence[str]
    evaluators: Sequence[Sequence[str]] = ()  # for each the nodes of its partitions
    stop: StopSpec
    evaluate: Every | None = None
    checkpoint: Every | None = None
    save: bool = True  # False: nothing is written, `dbctl eval`
    predictions: bool = False
    warmstart: int = 0
    max_lead: int | None = None
    min_replicas: int = 1
    examples: int = 0
    seconds: float = 0.0


class Phase(Enum):
    RUNNING = 1
    ENDING = 2
    MEASURING = 3
    OVER = 4


class Coordinator:
    def __init__(self, start: CoordinatorStart) -> None:
        self._start = start
        self._phase = Phase.RUNNING
        begins = {number: part.begin for number, part in start.parts.items()}
        self.figures = Figures(start.parts, examples=start.examples, seconds=start.seconds)
        self._grants = Grants(
            {n: (part.begin, part.steps_per_epoch) for n, part in start.parts.items()},
            steps=start.stop.steps,
            epochs=start.stop.epochs,
            warmstart=start.warmstart,
            max_lead=start.max_lead,
            cut=any(len(workers) > 1 for workers in start.workers.values()),
        )
        self._checkpoints = Checkpoints(
            start.shards, begins, every=start.checkpoint, save=start.save
        )
        self._evaluations = Evaluations(start.evaluators, predictions=start.predictions)
        self._orders = Orders(start.workers, begins)
        self._departures = Departures(start.shards)
        self._status, self._reason = "done", ""
        self._next_evaluation = Recurring(start.evaluate if start.evaluators else None)
        self._final_measured = not start.evaluators
        self._final_begun = False
        self._final_updates = NEVER  # of the final cut, as far as it has come
        self._stop_at = NEVER
        self._resend_at = NEVER

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def status(self) -> str:
        """How the run will have ended: done, failed, or what `interrupt` was told."""
        return self._status

    @property
    def stop(self) -> StopSpec:
        return self._start.stop

    def is_working(self, worker: str) -> bool:
        """Whether the worker has steps to do: one that waits for a grant makes no progress."""
        replica = replica_of(worker)
        return self.figures.position(replica).step < self._orders.until(replica)

    @property
    def due(self) -> float:
        return NEVER if self._phase is Phase.OVER else min(self._resend_at, self._timed())

    def _timed(self) -> float:
        """When something is due by the clock: `stop: seconds`, `every: N s`."""
        return min(self._next_evaluation.at, self._checkpoints.at, self._stop_at)

    def start(self, now: float) -> Effects:
        self.figures.begin(now)
        self._resend_at = now + RESEND_S
        seconds = self._start.stop.seconds
        left = NEVER if seconds is None else seconds - self._start.seconds
        self._stop_at = now + left
        self._next_evaluation.begin(now, self.figures)
        self._checkpoints.begin(now, self.figures)
        if not self._start.workers:
            return self._measure(now)
        return [effect for n in self._live() for effect in self._grant(now, n, again=True)]

    def _live(self) -> list[int]:
        return [n for n in self._start.workers if n not in self.figures.dead]

    # ---------------------------------------------------------------------------------- messages

    def receive(self, now: float, sender: Peer, message: Message) -> Effects:
        if self._phase is Phase.OVER:
            return []
        match message:
            case Report():
                return self._on_report(now, sender, message)
            case ShardReport():
                return self._on_shard_report(now, sender.node, message)
            case CutPart():
                return self._on_cut_part(sender.node, message)
            case Evaluated():
                measured = self._evaluations.add(sender.node, message)
                return self._on_measured(now, measured) if measured is not None else []
            case Predictions():
                return self._on_predictions(sender, message)
            case Exited(node, incarnation):
                return self._on_death(now, Peer(node, incarnation), message)
        return []

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
            reason = (
                f"{sender.node} refused {report.refused_in_a_row} non-finite gradients in a row,"
                f" the last at {report.refused_where}; lower optimizer.rule.rate, or use adagrad"
                " with a warmstart"
            )
            return [*effects, *self._over("failed", reason)]
        self._orders.heard(sender.node, replica, report)
        return effects + self._go_on(now)

    def _go_on(self, now: float) -> Effects:
        """New grants for all; then the end if nobody has anything left to do, else what is due."""
        if self._phase is Phase.MEASURING:
            return []
        effects: Effects = []
        if self._phase is Phase.RUNNING:
            for replica in self._live():
                effects += self._grant(now, replica, again=False)
        if self._orders.at_rest(self._live()) and not self._departures:
            return effects + self._measure(now)
        return effects + (self._by_progress(now) if self._phase is Phase.RUNNING else [])

    def _grant(self, now: float, replica: int, *, again: bool) -> Effects:
        until, last = self._grants.grant(replica, now)
        mark = self._checkpoints.mark_for(replica)
        return self._orders.grant(replica, until, last=last, mark=mark, again=again)

    def _on_death(self, now: float, peer: Peer, exited: Exited) -> Effects:
        if peer.node.startswith("shard-"):
            return self._over("failed", f"{peer.node} died: the run cannot go on without it")
        if peer.node.startswith("evaluator-"):
            self._evaluations.lose(peer.node)
            self._departures.add(peer)
            effects: Effects = [*self._gone(), Record("lost", {"node": peer.node})]
            return effects + self._after_evaluator_death(now)
        replica = replica_of(peer.node)
        if replica in self.figures.dead or self._phase is Phase.MEASURING:
            return []  # known, or all that it was to do is done and acknowledged
        # Its other partitions are being ended too: from now on all of them are over.
        for worker in self._start.workers[replica]:
            self._departures.add(Peer(worker, peer.incarnation), replica)
        self.figures.dead.add(replica)
        self._grants.dead(replica)
        self._orders.wake(replica)
        lost = Record("lost", {"node": peer.node, "rows": self._rows(replica)})
        effects = [*self._gone(), lost]
        self._checkpoints.dead(now, replica)
        n_live = len(self._live())
        # Who was interrupted is: it ends as that, and what is saved can be resumed.
        if n_live < self._start.min_replicas and self._status == "done":
            reason = f"{n_live} replicas live, min_replicas is {self._start.min_replicas}"
            effects += self._halt(now, push=True, status="failed", reason=reason)
        return effects + self._go_on(now)

    def _gone(self) -> Effects:
        return [Send(shard, gone) for shard, gone in self._departures.pending()]

    def _on_shard_report(self, now: float, shard: str, report: ShardReport) -> Effects:
        self.figures.shard_report(shard, report)
        effects: Effects = [Record("shard", shard_fields(shard, report))]
        settled = self._departures.confirm(shard, report)
        for replica, position in settled.items():
            self.figures.settle(replica, position)
            self._grants.settle(replica, position.step)
        return effects + (self._go_on(now) if settled else [])

    def _rows(self, replica: int) -> int:
        return self._start.parts[replica].rows

    def _after_evaluator_death(self, now: float) -> Effects:
        if not self._start.workers:
            return self._over("failed", "an evaluator died: its rows were not measured")
        if self._evaluations:
            return []
        self._final_measured = True
        self._next_evaluation = Recurring(None)
        # What it measured last was not the end: the last line must not show it as if it were.
        self.figures.test_loss = self.figures.test_accuracy = None
        stop = self._start.stop
        if self._phase is Phase.RUNNING and (stop.steps, stop.epochs, stop.seconds) == (None,) * 3:
            reason = "the evaluator died, and only stop.test_accuracy would end the run"
            return self._halt(now, push=True, status="failed", reason=reason)
        return self._finish_if_complete(now) if self._phase is Phase.MEASURING else []

    # ---------------------------------------------------------------------- evaluations and cuts

    def _by_progress(self, now: float) -> Effects:
        """Evaluations and checkpoints that the steps done, or the clock, call for."""
        effects: Effects = []
        if self._next_evaluation.is_due(now, self.figures) and not self._evaluations.busy:
            self._next_evaluation.advance(now, self.figures)
            effects += [Send(to, m) for to, m in self._evaluations.begin().items()]
        if self._checkpoints.is_due(now, self.figures):
            effects += self._ask_for_cut(now)
        return effects

    def _ask_for_cut(self, now: float) -> Effects:
        """A mark for the replica that has most to do; none if all have their last grant already."""
        running = [n for n in self._live() if not self._orders.is_last(n)]
        if self._grants.in_warmstart():
            running = running[:1]
        if not running:
            return []
        replica = min(running, key=lambda n: self.figures.position(n).step)
        self._checkpoints.ask(replica, self._orders.until(replica))
        return self._grant(now, replica, again=False)

    def saved(self, now: float, error: str) -> Effects:
        """The writer is done with the cut it was given; `error` is empty if it is safe on disk."""
        effects = self._checkpoints.written()
        if self._phase is not Phase.MEASURING:
            return effects
        if not self._checkpoints.last_asked:
            return effects + self._checkpoints.ask_last()
        self._checkpoints.complete = True
        if error and self._status == "done":
            self._status, self._reason = "failed", error
        return effects + self._finish_if_complete(now)

    def _on_cut_part(self, shard: str, part: CutPart) -> Effects:
        effects = self._checkpoints.add(shard, part)
        whole = all(len(nodes) == 1 for nodes in self._start.evaluators)
        for effect in effects:
            # The partitions of a cut evaluator fetch each for itself, and one of them answers.
            if isinstance(effect, Save) and effect.cut.final and whole:
                self._final_updates = effect.cut.updates
        return effects

    def _on_predictions(self, sender: Peer, message: Predictions) -> Effects:
        is_next, filed = self._evaluations.file(sender.node, message)
        effects: Effects = [Record("predictions", {"message": message})] if is_next else []
        return effects + ([Send(sender.node, filed)] if filed is not None else [])

    def _on_measured(self, now: float, measured: Measured) -> Effects:
        figures = self.figures
        figures.test_loss, figures.test_accuracy = measured.loss, measured.accuracy
        fields = {**measured.fields(), "steps": figures.steps, "epochs": figures.epochs}
        effects: Effects = [Record("evaluation", {**fields, "measured": measured})]
        if self._phase is Phase.MEASURING:
            # It was under way at the end: of the final parameters all the same, if it says so.
            if not self._final_begun and measured.version < self._final_updates:
                return effects + self._final_evaluation()
            self._final_measured = True
            return effects + self._finish_if_complete(now)
        target = self._start.stop.test_accuracy
        if target is not None and measured.accuracy is not None and measured.accuracy >= target:
            effects += self._halt(now, push=True, status="done", reason="test_accuracy")
        return effects

    # ------------------------------------------------------------------------------------ the end

    def interrupt(self, now: float, status: str) -> Effects:
        """Ctrl-C or a signal: stop after the step in hand, save, end. `status` names which."""
        if self._phase is Phase.RUNNING:
            return self._halt(now, push=False, status=status, reason="")
        self._status = status if self._status == "done" else self._status
        self._final_measured = True
        return self._finish_if_complete(now) if self._phase is Phase.MEASURING else []

    def _halt(self, now: float, *, push: bool, status: str, reason: str) -> Effects:
        self._phase = Phase.ENDING
        self._status, self._reason = status, reason
        return self._orders.halt(self._live(), push=push)

    def _measure(self, now: float) -> Effects:
        """Nothing runs any more: the final evaluation and the final cut."""
        self._phase = Phase.MEASURING
        self.figures.end(now)
        effects: Effects = []
        if self._status != "done":
            self._final_measured = True
        if not self._final_measured and not self._evaluations.busy:
            effects += self._final_evaluation()
        effects += self._checkpoints.ask_last()
        return effects + self._finish_if_complete(now)

    def _final_evaluation(self) -> Effects:
        self._final_begun = True
        return [Send(to, m) for to, m in self._evaluations.begin().items()]

    def _finish_if_complete(self, now: float) -> Effects:
        if self._final_measured and self._checkpoints.complete:
            return self._over(self._status, self._reason)
        return []

    def _over(self, status: str, reason: str) -> Effects:
        self._phase = Phase.OVER
        return [Done(status, reason)]

    # -------------------------------------------------------------------------------------- clock

    def step(self, now: float) -> Effects:
        effects: Effects = []
        if self._phase is Phase.RUNNING:
            if now >= self._stop_at:
                effects += self._halt(now, push=True, status="done", reason="seconds")
            else:
                effects += self._by_progress(now)
        if now >= self._resend_at:
            self._resend_at = now + RESEND_S
            effects += self._again(now)
        return effects

    def _again(self, now: float) -> Effects:
        """Totals whose effect has not been reported are said again."""
        effects: Effects = [Send(to, m) for to, m in self._evaluations.pending().items()]
        effects += self._gone()
        match self._phase:
            case Phase.RUNNING:
                for replica in self._live():
                    effects += self._grant(now, replica, again=True)
            case Phase.ENDING:
                effects += self._orders.halt_again(self._live())
            case Phase.MEASURING:
                effects += self._checkpoints.ask_again()
        return effects
