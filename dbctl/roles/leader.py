"""What every coordinator does: evaluations and checkpoints on the way, deaths, the end of the run.

Rules of this file: pure (roles/base.py). Theory of operation: a run is RUNNING until its stop is
reached, somebody interrupts it, or too few replicas live; then ENDING: what is under way comes to
rest; then MEASURING: the final evaluation and the final cut, side by side; then OVER. What it says
to others are totals, sent again each second until their effect is reported. Killing it and killing
the controller is one fault: it lives in that process. roles/coordinator.py leads Downpour,
roles/sandblaster.py batch methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from dbctl.experiment.specs import Every, StopSpec
from dbctl.roles.base import NEVER, Done, Effects, Record, Save, Send
from dbctl.roles.checkpoints import Checkpoints
from dbctl.roles.cuts import replica_of
from dbctl.roles.departures import Departures
from dbctl.roles.evaluations import Evaluations, Measured
from dbctl.roles.figures import Figures
from dbctl.roles.records import shard_fields
from dbctl.roles.recurring import Recurring
from dbctl.wire import (
    CutPart,
    Evaluated,
    Exited,
    Message,
    Peer,
    Position,
    Predictions,
    ShardReport,
)

RESEND_S = 1.0
UNMEASURED = ("failed", "stopped", "interrupted")  # a run that ended so is saved, not measured


@dataclass(frozen=True, kw_only=True)
class LeaderStart:
    """`workers`: for each replica the workers of its partitions."""

    workers: Mapping[int, Sequence[str]]
    shards: Sequence[str]
    evaluators: Sequence[Sequence[str]] = ()  # for each the nodes of its partitions
    stop: StopSpec
    evaluate: Every | None = None
    checkpoint: Every | None = None
    save: bool = True  # False: nothing is written, `dbctl eval`
    predictions: bool = False
    min_replicas: int = 1
    examples: int = 0
    seconds: float = 0.0


class Phase(Enum):
    RUNNING = 1
    ENDING = 2
    MEASURING = 3
    OVER = 4


class Leader(ABC):
    """`figures` is what the run's records and display are made of."""

    _versions_tell = True  # parameters of one version are the same ones

    def __init__(
        self, start: LeaderStart, figures: Figures, *, begins: Mapping[int, Position]
    ) -> None:
        self._lead = start
        self._phase = Phase.RUNNING
        self.figures = figures
        self._checkpoints = Checkpoints(
            start.shards, begins, every=start.checkpoint, save=start.save
        )
        self._evaluations = Evaluations(start.evaluators, predictions=start.predictions)
        self._departures = Departures(start.shards)
        self._status, self._reason = "done", ""
        self._next_evaluation = Recurring(start.evaluate if start.evaluators else None)
        self._final_measured = not start.evaluators
        self.unmeasured = False  # the end will not be, as who would have measured it is lost
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
    def is_saved(self) -> bool:
        """Whether the writer has answered for the final cut, or none is to be made."""
        return self._checkpoints.complete

    @property
    def stop(self) -> StopSpec:
        return self._lead.stop

    @property
    def due(self) -> float:
        return NEVER if self._phase is Phase.OVER else min(self._resend_at, self._timed())

    def _timed(self) -> float:
        """When something is due by the clock: `stop: seconds`, `every: N s`."""
        evaluation_at = NEVER if self._evaluations.busy else self._next_evaluation.at
        return min(evaluation_at, self._checkpoints.at, self._stop_at)

    def start(self, now: float) -> Effects:
        self.figures.begin(now)
        self._resend_at = now + RESEND_S
        seconds = self._lead.stop.seconds
        left = NEVER if seconds is None else seconds - self._lead.seconds
        self._stop_at = now + left
        self._next_evaluation.begin(now, self.figures)
        self._checkpoints.begin(now, self.figures)
        return self._begin(now) if self._lead.workers else self._measure(now)

    def live(self) -> list[int]:
        return [n for n in self._lead.workers if n not in self.figures.dead]

    # ------------------------------------------------------------- what differs between methods

    @abstractmethod
    def is_working(self, worker: str) -> bool:
        """Whether the worker has something to do: one that waits makes no progress."""

    @abstractmethod
    def _begin(self, now: float) -> Effects:
        """The first things that replicas are told."""

    @abstractmethod
    def _hear(self, now: float, sender: Peer, message: Message) -> Effects:
        """A message of the training itself."""

    @abstractmethod
    def _lost(self, now: float, replica: int) -> None:
        """A replica is over; `figures.dead` has it already."""

    @abstractmethod
    def _settled(self, now: float, settled: Mapping[int, Position]) -> Effects:
        """How far the shards have applied replicas that are over."""

    @abstractmethod
    def _halt(self, now: float, *, push: bool, status: str, reason: str) -> Effects:
        """The run is to come to rest: ENDING. `push`: what is unpushed counts."""

    @abstractmethod
    def _go_on(self, now: float) -> Effects:
        """Whatever can be done now; the end if nobody has anything left to do."""

    @abstractmethod
    def _by_progress(self, now: float) -> Effects:
        """Evaluations and checkpoints that the steps done, or the clock, call for."""

    @abstractmethod
    def _say_again(self, now: float) -> Effects:
        """Of the training itself, what is not yet known to have arrived."""

    # ---------------------------------------------------------------------------------- messages

    def receive(self, now: float, sender: Peer, message: Message) -> Effects:
        if self._phase is Phase.OVER:
            return []
        match message:
            case ShardReport():
                return self._on_shard_report(now, sender.node, message)
            case CutPart():
                return self._on_cut_part(now, sender.node, message)
            case Evaluated():
                measured = self._evaluations.add(sender.node, message)
                return self._on_measured(now, measured) if measured is not None else []
            case Predictions():
                return self._on_predictions(sender, message)
            case Exited(node, incarnation):
                return self._on_death(now, Peer(node, incarnation))
        return self._hear(now, sender, message)

    def _on_death(self, now: float, peer: Peer) -> Effects:
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
        for worker in self._lead.workers[replica]:
            self._departures.add(Peer(worker, peer.incarnation), replica)
        self.figures.dead.add(replica)
        self._lost(now, replica)
        rows = self.figures.left_out().get(replica, 0)
        effects = [*self._gone(), Record("lost", {"node": peer.node, "rows": rows})]
        n_live = len(self.live())
        # Who was interrupted is: it ends as that, and what is saved can be resumed.
        if n_live < self._lead.min_replicas and self._status == "done":
            reason = f"{n_live} replicas live, min_replicas is {self._lead.min_replicas}"
            effects += self._halt(now, push=True, status="failed", reason=reason)
        return effects + self._go_on(now)

    def _gone(self) -> Effects:
        return [Send(shard, gone) for shard, gone in self._departures.pending()]

    def _on_shard_report(self, now: float, shard: str, report: ShardReport) -> Effects:
        self.figures.shard_report(shard, report)
        effects: Effects = [Record("shard", shard_fields(shard, report))]
        settled = self._departures.confirm(shard, report)
        return effects + (self._settled(now, settled) if settled else [])

    def _after_evaluator_death(self, now: float) -> Effects:
        if not self._lead.workers:
            return self._over("failed", "an evaluator died: its rows were not measured")
        if self._evaluations or (self._phase is Phase.MEASURING and self._final_measured):
            return []
        self._final_measured = self.unmeasured = True
        self._next_evaluation = Recurring(None)
        # What it measured last was not the end: the last line must not show it as if it were.
        self.figures.test_loss = self.figures.test_accuracy = None
        stop = self._lead.stop
        if self._phase is Phase.RUNNING and (stop.steps, stop.epochs, stop.seconds) == (None,) * 3:
            reason = "the evaluator died, and only stop.test_accuracy would end the run"
            return self._halt(now, push=True, status="failed", reason=reason)
        return self._finish_if_complete(now) if self._phase is Phase.MEASURING else []

    # ---------------------------------------------------------------------- evaluations and cuts

    def _evaluate_if_due(self, now: float) -> Effects:
        if not self._next_evaluation.is_due(now, self.figures) or self._evaluations.busy:
            return []
        self._next_evaluation.advance(now, self.figures)
        return [Send(to, m) for to, m in self._evaluations.begin().items()]

    def saved(self, now: float, error: str) -> Effects:
        """The writer is done with the cut it was given; `error` is empty if it is safe on disk."""
        effects = self._checkpoints.written()
        if self._phase is not Phase.MEASURING:
            return effects
        if not self._checkpoints.last_asked:
            return effects + self._checkpoints.ask_last()
        self._checkpoints.complete = True
        if error and self._status not in UNMEASURED:
            self._status, self._reason = "failed", error
        return effects + self._finish_if_complete(now)

    def _on_cut_part(self, now: float, shard: str, part: CutPart) -> Effects:
        effects = self._checkpoints.add(shard, part)
        whole = self._versions_tell and all(len(nodes) == 1 for nodes in self._lead.evaluators)
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
        if self._phase is not Phase.RUNNING:
            return effects  # what ends a run is the first reason: a signal is not undone
        target = self._lead.stop.test_accuracy
        if target is not None and measured.accuracy is not None and measured.accuracy >= target:
            effects += self._halt(now, push=True, status="done", reason="test_accuracy")
        return effects

    # ------------------------------------------------------------------------------------ the end

    def interrupt(self, now: float, status: str) -> Effects:
        """Ctrl-C or a signal: stop after the step in hand, save, end. `status` names which."""
        if self._phase is Phase.RUNNING:
            return self._halt(now, push=False, status=status, reason="")
        if self._status not in UNMEASURED:
            self._status, self._reason = status, ""
        self._final_measured = True
        return self._finish_if_complete(now) if self._phase is Phase.MEASURING else []

    def _measure(self, now: float) -> Effects:
        """Nothing runs any more: the final evaluation and the final cut."""
        self._phase = Phase.MEASURING
        self.figures.end(now)
        effects: Effects = []
        if self._status in UNMEASURED:
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
                effects += self._out_of_time(now)
            else:
                effects += self._by_progress(now)
        if now >= self._resend_at:
            self._resend_at = now + RESEND_S
            effects += self._again(now)
        return effects

    def _out_of_time(self, now: float) -> Effects:
        return self._halt(now, push=True, status="done", reason="seconds")

    def _again(self, now: float) -> Effects:
        """Totals whose effect has not been reported are said again."""
        effects: Effects = [Send(to, m) for to, m in self._evaluations.pending().items()]
        effects += self._gone()
        if self._phase is Phase.MEASURING:
            effects += self._checkpoints.ask_again()
        return effects + self._say_again(now)
