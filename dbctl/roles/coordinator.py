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
from dbctl.roles.cuts import Cuts, replica_of
from dbctl.roles.evaluations import Evaluations, Measured
from dbctl.roles.figures import Figures, Part
from dbctl.roles.grants import Grants
from dbctl.roles.records import shard_fields, worker_fields
from dbctl.roles.recurring import Recurring
from dbctl.wire import (
    Cut,
    CutPart,
    Evaluated,
    Exited,
    Gone,
    Grant,
    Halt,
    Message,
    Peer,
    Predictions,
    Report,
    Return,
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
        )
        self._cuts = Cuts(start.shards, begins)
        self._evaluations = Evaluations(start.evaluators, predictions=start.predictions)
        self._sent: dict[int, Grant] = {n: Grant(0, p.step) for n, p in begins.items()}
        self._resting: set[str] = set()
        self._status, self._reason = "done", ""
        self._push_at_halt: bool | None = None
        self._next_evaluation = Recurring(start.evaluate if start.evaluators else None)
        self._next_checkpoint = Recurring(start.checkpoint if start.save else None)
        self._final_measured = not start.evaluators
        self._final_saved = not start.save
        self._final_begun = False
        self._final_asked = False
        self._stop_at = NEVER
        self._resend_at = NEVER
        self._retry_cut_at = NEVER

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
        return self.figures.position(replica).step < self._sent[replica].until

    @property
    def due(self) -> float:
        return NEVER if self._phase is Phase.OVER else min(self._resend_at, self._timed())

    def _timed(self) -> float:
        """When something is due by the clock: `stop: seconds`, `every: N s`."""
        return min(self._next_evaluation.at, self._next_checkpoint.at, self._stop_at)

    def start(self, now: float) -> Effects:
        self.figures.begin(now)
        self._resend_at = now + RESEND_S
        seconds = self._start.stop.seconds
        left = NEVER if seconds is None else seconds - self._start.seconds
        self._stop_at = now + left
        for each in (self._next_evaluation, self._next_checkpoint):
            each.begin(now, self.figures)
        if not self._start.workers:
            return self._measure(now)
        return [effect for n in self._live() for effect in self._grant(now, n, again=True)]

    def _live(self) -> list[int]:
        return [n for n in self._start.workers if n not in self.figures.dead]

    def _live_workers(self) -> set[str]:
        return {worker for n in self._live() for worker in self._start.workers[n]}

    # ---------------------------------------------------------------------------------- messages

    def receive(self, now: float, sender: Peer, message: Message) -> Effects:
        if self._phase is Phase.OVER:
            return []
        match message:
            case Report():
                return self._on_report(now, sender, message)
            case ShardReport():
                self.figures.shard_report(sender.node, message)
                return [Record("shard", shard_fields(sender.node, message))]
            case CutPart():
                return self._on_part(now, sender, message)
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
        resting = report.state in ("finished", "halted") and report.acked >= report.pushed
        if resting and (self._phase is not Phase.RUNNING or self._sent[replica].last):
            self._resting.add(sender.node)
        return effects + self._go_on(now)

    def _go_on(self, now: float) -> Effects:
        """New grants for all; then the end if nobody has anything left to do, else what is due."""
        if self._phase is Phase.MEASURING:
            return []
        effects: Effects = []
        if self._phase is Phase.RUNNING:
            for replica in self._live():
                effects += self._grant(now, replica, again=False)
        if self._resting >= self._live_workers():
            return effects + self._measure(now)
        return effects + (self._by_progress(now) if self._phase is Phase.RUNNING else [])

    def _grant(self, now: float, replica: int, *, again: bool) -> Effects:
        until, last = self._grants.grant(replica, now)
        mark, mark_step = self._cuts.mark_for(replica)
        old = self._sent[replica]
        if (until, last, mark) != (old.until, old.last, old.mark):
            self._sent[replica] = Grant(old.number + 1, until, last, mark, mark_step)
            self._resting.difference_update(self._start.workers[replica])
        elif not again:
            return []
        return [Send(worker, self._sent[replica]) for worker in self._start.workers[replica]]

    def _on_death(self, now: float, peer: Peer, exited: Exited) -> Effects:
        if peer.node.startswith("shard-"):
            return self._over("failed", f"{peer.node} died: the run cannot go on without it")
        gone = [Send(shard, Gone(*peer)) for shard in self._start.shards]
        if peer.node.startswith("evaluator-"):
            self._evaluations.lose(peer.node)
            effects: Effects = [*gone, Record("lost", {"node": peer.node})]
            return effects + self._after_evaluator_death(now)
        replica = replica_of(peer.node)
        if replica in self.figures.dead:
            return [*gone]
        self.figures.dead.add(replica)
        self._grants.dead(replica)
        self._resting.difference_update(self._start.workers[replica])
        effects = [*gone, Record("lost", {"node": peer.node, "rows": self._rows(replica)})]
        if self._cuts.dead(replica):
            self._retry_cut_at = now
        n_live = len(self._live())
        if n_live < self._start.min_replicas:
            reason = f"{n_live} replicas live, min_replicas is {self._start.min_replicas}"
            effects += self._halt(now, push=True, status="failed", reason=reason)
        return effects + self._go_on(now)

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
        if self._next_checkpoint.is_due(now, self.figures) and not self._cuts.under_way:
            self._next_checkpoint.advance(now, self.figures)
            self._retry_cut_at = now
        if now >= self._retry_cut_at and not self._cuts.under_way:
            self._retry_cut_at = NEVER
            effects += self._ask_for_cut(now)
        return effects

    def _ask_for_cut(self, now: float) -> Effects:
        """A mark for the replica that has most to do; none if all have their last grant already."""
        running = [n for n in self._live() if not self._sent[n].last]
        if self._grants.in_warmstart():
            running = running[:1]
        if not running:
            return []
        replica = min(running, key=lambda n: self.figures.position(n).step)
        self._cuts.ask(replica, self._sent[replica].until)
        return self._grant(now, replica, again=False)

    def _on_part(self, now: float, sender: Peer, part: CutPart) -> Effects:
        returned = self._cuts.returned(sender.node, part)
        if returned is not None:
            return [Send(sender.node, Return(returned))]
        cut = self._cuts.add(sender.node, part)
        if cut is None:
            return []
        self.figures.settle(cut.rows)
        return [Save(cut)]

    def saved(self, now: float, error: str) -> Effects:
        """The writer is done with the cut it was given; `error` is empty if it is safe on disk."""
        effects: Effects = [
            Send(shard, Return(handout)) for shard, handout in self._cuts.written().items()
        ]
        if self._phase is not Phase.MEASURING:
            return effects
        if self._final_asked:
            self._final_saved = True
            if error and self._status == "done":
                self._status, self._reason = "failed", error
            return effects + self._finish_if_complete(now)
        return effects + self._final_cut(now)

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
            if not self._final_begun:
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
        self._push_at_halt = push
        self._status, self._reason = status, reason
        self._resting.clear()
        return self._halts()

    def _halts(self) -> Effects:
        assert self._push_at_halt is not None
        effects: Effects = []
        for replica in self._live():
            # The partitions of a cut replica stop at one step, what all were granted, and push: one
            # that has seen a last grant has pushed there already.
            cut = len(self._start.workers[replica]) > 1
            halt = Halt(self._push_at_halt or cut, self._sent[replica].until if cut else 0)
            effects += [Send(worker, halt) for worker in self._start.workers[replica]]
        return effects

    def _measure(self, now: float) -> Effects:
        """Nothing runs any more: the final evaluation and the final cut."""
        self._phase = Phase.MEASURING
        self.figures.end(now)
        effects: Effects = []
        if self._status != "done":
            self._final_measured = True
        if not self._final_measured and not self._evaluations.busy:
            effects += self._final_evaluation()
        if not self._final_saved and not self._cuts.being_written:
            effects += self._final_cut(now)
        return effects + self._finish_if_complete(now)

    def _final_evaluation(self) -> Effects:
        self._final_begun = True
        return [Send(to, m) for to, m in self._evaluations.begin().items()]

    def _final_cut(self, now: float) -> Effects:
        self._final_asked = True
        number = self._cuts.ask(None)
        return [Send(shard, Cut(number)) for shard in self._start.shards]

    def _finish_if_complete(self, now: float) -> Effects:
        if self._final_measured and self._final_saved:
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
        match self._phase:
            case Phase.RUNNING:
                for replica in self._live():
                    effects += self._grant(now, replica, again=True)
            case Phase.ENDING:
                effects += self._halts()
            case Phase.MEASURING if self._final_asked and not self._cuts.being_written:
                cut = Cut(self._cuts.number)
                effects += [Send(shard, cut) for shard in self._start.shards]
        return effects
