"""The coordinator of batch methods: Sandblaster (paper A, section 4.2). It holds no parameters.

Rules of this file: pure (roles/base.py). Theory of operation: a method (optim/lbfgs.py and others)
is a generator that yields commands on names of vectors. A `Command` goes to every shard and its
answer, scalars, back into the generator. An `Evaluate` is Begin to every shard, then bundles of the
batch to whichever replica has room (roles/allocation.py), then Collect, once every bundle's push
was acknowledged. At an `Iterated` the run is saved, measured or ended: there PARAMETERS is the best
point, and the method's scalars with the shards' vectors are all that a resumed run needs. A signal
abandons the evaluation in hand: its bundles write no vector that the last iteration needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum, inf, isfinite
from typing import Any

from dbctl.bundles import Batch
from dbctl.optim.commands import Command, Evaluate, Evaluation, Iterated, Method
from dbctl.roles.allocation import N_AHEAD, Allocation
from dbctl.roles.base import Effect, Effects, Record, Save, Send
from dbctl.roles.batch_figures import BatchFigures
from dbctl.roles.commands import Commands, NumberedCommand
from dbctl.roles.cuts import replica_of
from dbctl.roles.leader import Leader, LeaderStart, Phase
from dbctl.roles.records import worker_fields
from dbctl.wire import CutPart, Message, Peer, Position, Report
from dbctl.wire_batch import Begin, Collect, Computed, Execute, Executed, Order, Work


@dataclass(frozen=True, kw_only=True)
class SandblasterStart(LeaderStart):
    """`method` makes the generator, of the state of a saved iteration or None.

    `rows`: of the training data; `batch`: of one evaluation. `sampled`: each iteration has a new
    sample of rows. `iteration`, `passes`: where a resumed run stands.
    """

    method: Callable[[dict[str, Any] | None], Method]
    rows: int
    batch: Batch
    sampled: bool = False
    backup: bool = True
    state: dict[str, Any] | None = None
    iteration: int = 0
    passes: float = 0.0


@dataclass(slots=True)
class _Replica:
    """What a replica was told to do and has not done; who of its workers has done which order."""

    workers: Sequence[str]
    n_orders: int = 0
    orders: list[Order] = field(default_factory=list)
    done: dict[int, dict[str, Sequence[float]]] = field(default_factory=dict)


class Sandblaster(Leader):
    _versions_tell = False  # a version is an evaluation, and the accepted point is of the same one

    def __init__(self, start: SandblasterStart) -> None:
        self.figures: BatchFigures = BatchFigures(
            len(start.workers),
            rows=start.rows,
            iteration=start.iteration,
            passes=start.passes,
            examples=start.examples,
            seconds=start.seconds,
        )
        super().__init__(start, self.figures, begins={})
        self._start = start
        self.state = start.state
        self._method = start.method(start.state)
        self._commands = Commands(start.shards)
        self._replicas = {n: _Replica(workers) for n, workers in start.workers.items()}
        self._evaluation = 0
        self._request: Evaluate | None = None
        self._allocation: Allocation | None = None  # while bundles are computed
        self._held = False  # at the end of an iteration, until its cut has come from all shards
        self._not_finite = ""  # who has met a loss or gradient that is not finite, and where
        self._at_rest: set[str] = set()  # workers that have halted, in the end
        self._cut_wanted = False
        self._outside_s = 0.0  # time in which nothing was evaluated: commands, cuts
        self._outside_since = 0.0
        self._n_bundles = self._n_backups = 0

    @property
    def n_round_trips(self) -> Mapping[str, int]:
        """Commands to the shards so far in this life of the run, by kind of message."""
        return self._commands.n_round_trips

    def is_working(self, worker: str) -> bool:
        return bool(self._replicas[replica_of(worker)].orders)

    # ---------------------------------------------------------------------------- the method

    def _begin(self, now: float) -> Effects:
        self._outside_since = now
        if self.state is not None and (reason := self._stop_reached()):
            self._status, self._reason = "max_iterations", reason
            return self._rest(now)
        return self._advance(now, None)

    def _stop_reached(self) -> str:
        """The key of `stop` that the iterations done so far have reached, or nothing."""
        stop, figures = self._start.stop, self.figures
        if stop.steps is not None and figures.steps >= stop.steps:
            return "steps"
        return "epochs" if stop.epochs is not None and figures.epochs >= stop.epochs else ""

    def _advance(self, now: float, answer: Any) -> Effects:
        """Gives the method its answer, and carries out what it asks for next."""
        try:
            request = self._method.send(answer)
        except StopIteration as end:
            if self._phase is Phase.RUNNING:
                self._status = end.value.status
                self._reason = f"{end.value.reason}{self._where()}"
            return self._rest(now)
        match request:
            case Command():
                return self._commands.give(lambda number: Execute(number, *request))
            case Evaluate():
                # Nothing that a resumed run needs is changed by an evaluation.
                if self._phase is Phase.ENDING:
                    return self._rest(now)
                return self._evaluate(now, request)
            case Iterated():
                return self._iterated(now, request)

    def _where(self) -> str:
        """What a search that failed must say, if it failed for numbers that are not finite."""
        if self._status != "line_search_failed" or not self._not_finite:
            return ""
        return f" (not finite last at {self._not_finite})"

    def _evaluate(self, now: float, request: Evaluate) -> Effects:
        self._outside_s += now - self._outside_since
        self._request = request
        self._evaluation += 1
        evaluation = self._evaluation
        return self._commands.give(
            lambda number: Begin(number, evaluation, request.before, request.point)
        )

    def _iterated(self, now: float, found: Iterated) -> Effects:
        self.figures.iterated(found)
        self.state = found.state
        fields = {
            "iteration": found.iteration,
            "loss": found.loss,
            "gradient_norm": found.gradient_norm,
            "step_length": found.step_length,
            "evaluations": found.evaluations,
            "loss_before": found.loss_before,
            "slope_before": found.slope_before,
            "slope": found.slope,
            "approximate": found.approximate,
            "restarted": found.restarted,
            "bundles": self._n_bundles,
            "backups": self._n_backups,
            "commands": self.n_round_trips["Execute"],
            "outside_s": self._outside_s,
        }
        effects: Effects = [Record("iteration", fields)]
        if self._phase is Phase.RUNNING and (reason := self._stop_reached()):
            effects += self._halt(now, push=True, status="max_iterations", reason=reason)
        self._held = True
        if self._phase is Phase.RUNNING:
            effects += self._evaluate_if_due(now)
            if self._checkpoints.is_due(now, self.figures) or self._cut_wanted:
                self._cut_wanted = False
                return effects + self._checkpoints.ask_between()
        return effects + self._let_go(now)

    def _let_go(self, now: float) -> Effects:
        """On to the next iteration, or to the end."""
        self._held = False
        return self._rest(now) if self._phase is Phase.ENDING else self._advance(now, None)

    # ---------------------------------------------------------------------------- messages

    def _hear(self, now: float, sender: Peer, message: Message) -> Effects:
        match message:
            case Report():
                return self._on_report(now, sender, message)
            case Executed():
                done = self._commands.take(sender.node, message)
                return self._executed(now, *done) if done is not None else []
            case Computed():
                return self._on_computed(now, sender, message)
        return []

    def _on_report(self, now: float, sender: Peer, report: Report) -> Effects:
        replica = replica_of(sender.node)
        if replica in self.figures.dead:
            return []
        if sender.node == self._start.workers[replica][0]:
            self.figures.report(now, replica, report)
        if report.state == "halted":
            self._at_rest.add(sender.node)
        fields = worker_fields(sender.node, report, figures=self.figures)
        # No fault: the line search tried a point that is too far.
        fields["not_finite"] = fields.pop("refused")
        del fields["refused_where"]
        return [Record("worker", fields)]

    def _executed(self, now: float, command: NumberedCommand, scalars: list[float]) -> Effects:
        match command:
            case Execute():
                return self._advance(now, tuple(scalars))
            case Begin() if self._request is not None and self._phase is Phase.RUNNING:
                self._allocation = Allocation(
                    self._start.batch.n_bundles, self.live(), backup=self._start.backup
                )
                return self._hand_out(all_of_them=True)
            case Collect() if self._request is not None and self._phase is Phase.RUNNING:
                return self._collected(now, scalars)
        return []  # of an evaluation that was abandoned

    def _collected(self, now: float, scalars: list[float]) -> Effects:
        assert self._allocation is not None
        losses = self._allocation.portion_losses
        penalty, *dots = scalars
        loss = fsum(losses) / self._start.batch.rows + penalty
        return self._evaluated(now, Evaluation(loss if isfinite(loss) else inf, tuple(dots)))

    def _evaluated(self, now: float, found: Evaluation) -> Effects:
        assert self._allocation is not None
        self._n_bundles += len(self._allocation.losses)
        self._n_backups += self._allocation.n_backups
        self.figures.evaluated(self._start.batch.rows)
        self._request = self._allocation = None
        self._outside_since = now
        return self._advance(now, found)

    # ---------------------------------------------------------------------------- bundles

    def _on_computed(self, now: float, sender: Peer, computed: Computed) -> Effects:
        number = replica_of(sender.node)
        replica = self._replicas[number]
        if number in self.figures.dead:
            return []
        order = next((o for o in replica.orders if o.number == computed.number), None)
        if order is None:
            return [self._work(replica, sender.node)]  # known: so that it is not said again
        if computed.where:
            self._not_finite = f"{sender.node}, {computed.where}"
        answers = replica.done.setdefault(order.number, {})
        answers[sender.node] = computed.losses
        if len(answers) < len(replica.workers):
            return []
        # All partitions know the whole replica's losses, and agree on what is dropped.
        losses = answers[replica.workers[0]]
        replica.orders.remove(order)
        del replica.done[order.number]
        effects = self._tell(replica)
        if self._allocation is None or order.evaluation != self._evaluation:
            return effects + self._go_on(now)  # it has room again
        if not losses:
            self._allocation.give_up(number, order.bundle)
        elif all(map(isfinite, losses)):
            self._allocation.done(number, order.bundle, losses)
        elif not self._commands.busy:
            # No other bundle makes this point one where the loss is defined.
            assert self._request is not None
            n_dots = len(self._request.rows) * len(self._request.columns)
            return effects + self._evaluated(now, Evaluation(inf, (inf,) * n_dots))
        return effects + self._go_on(now)

    def _go_on(self, now: float) -> Effects:
        if self._phase is not Phase.RUNNING or self._allocation is None or self._commands.busy:
            return []
        if not self._allocation.complete:
            return self._hand_out()
        request, evaluation, examples = self._request, self._evaluation, self._start.batch.rows
        assert request is not None
        return self._commands.give(
            lambda number: Collect(
                number, evaluation, examples, request.gradient, request.rows, request.columns
            )
        )

    def _hand_out(self, *, all_of_them: bool = False) -> Effects:
        """Orders for whoever has room, one each in turn. `all_of_them`: everybody is to know of
        this evaluation, also who has only orders of an earlier one."""
        assert self._allocation is not None
        news = set(self.live()) if all_of_them else set()
        given = True
        while given:
            given = False
            for number in self.live():
                replica = self._replicas[number]
                if len(replica.orders) >= N_AHEAD:
                    continue
                bundle = self._allocation.next(number)
                if bundle is not None:
                    replica.n_orders += 1
                    order = Order(replica.n_orders, self._evaluation, bundle, self._sample())
                    replica.orders.append(order)
                    news.add(number)
                    given = True
        return [effect for n in sorted(news) for effect in self._tell(self._replicas[n])]

    def _sample(self) -> int:
        """A new one after each Iterated, also that of iteration 0 (optim/iteration.py)."""
        if not self._start.sampled:
            return 0
        return 1 if self.state is None else self.figures.iteration + 2

    def _tell(self, replica: _Replica) -> Effects:
        return [self._work(replica, worker) for worker in replica.workers]

    def _work(self, replica: _Replica, worker: str) -> Effect:
        halt = self._phase is not Phase.RUNNING
        return Send(worker, Work(self._evaluation, tuple(replica.orders), halt))

    # ---------------------------------------------------------------------------- deaths, cuts

    def _lost(self, now: float, replica: int) -> None:
        self._replicas[replica].orders.clear()
        self._replicas[replica].done.clear()
        if self._allocation is not None:
            self._allocation.lose(replica)

    def _settled(self, now: float, settled: Mapping[int, Position]) -> Effects:
        return []  # what a dead replica pushed counts by its bundle, whoever pushes it again

    def _by_progress(self, now: float) -> Effects:
        # A cut by the clock waits for the end of the iteration.
        self._cut_wanted = self._checkpoints.is_due(now, self.figures) or self._cut_wanted
        return self._evaluate_if_due(now)

    def _on_cut_part(self, now: float, shard: str, part: CutPart) -> Effects:
        effects: Effects = []
        for effect in super()._on_cut_part(now, shard, part):
            if isinstance(effect, Save):
                effect = Save(replace(effect.cut, rows=self._rows(), dropped=0))
            effects.append(effect)
        if self._held and any(isinstance(effect, Save) for effect in effects):
            effects += self._let_go(now)
        return effects

    def _rows(self) -> dict[int, Position]:
        """A batch method has no position but its iteration: the first row stands for all."""
        done = Position(self.figures.iteration)
        return {n: done if n == 0 else Position() for n in self._replicas}

    # ---------------------------------------------------------------------------- the end

    def _halt(self, now: float, *, push: bool, status: str, reason: str) -> Effects:
        self._phase = Phase.ENDING
        self._status, self._reason = status, reason
        if self._request is None:
            return []  # a command, or a cut, is under way: the method rests after it
        return self._rest(now)

    def _out_of_time(self, now: float) -> Effects:
        return self._halt(now, push=True, status="max_iterations", reason="seconds")

    def _rest(self, now: float) -> Effects:
        """The method goes no further; what replicas still compute counts for nothing."""
        self._phase = Phase.ENDING
        self._request = self._allocation = None
        told = [effect for n in self.live() for effect in self._tell(self._replicas[n])]
        return [*told, *self._measure(now)]

    def _say_again(self, now: float) -> Effects:
        if self._phase is Phase.MEASURING:
            busy = [w for n in self.live() for w in self._replicas[n].workers]
            return [
                self._work(self._replicas[replica_of(w)], w) for w in busy if w not in self._at_rest
            ]
        effects = self._commands.again()
        if self._held:
            effects += self._checkpoints.ask_again()
        if self._allocation is not None:
            for number in self.live():
                if self._replicas[number].orders:
                    effects += self._tell(self._replicas[number])
        return effects
