"""The Downpour SGD client: one model replica's loop (paper A, section 4.1 and appendix 7.1).

Rules of this file: pure (roles/base.py). Theory of operation, with `step` from 0:

    if step mod n_fetch == 0: fetch             overlap: asked for one step earlier
    g          <- gradient(parameters, next mini-batch)
    accrued    <- accrued + g                   in a push slot
    parameters <- parameters - alpha g          skipped when a fetch replaces them anyway
    if step mod n_push == 0: push accrued
    step       <- step + 1

A worker is in one phase at a time (roles/rounds.py); `enter` is the table. The arithmetic is in
roles/local.py.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

from dbctl.model.exchange import Exchange
from dbctl.optim.gradients import clip_to, square_sum
from dbctl.roles.base import NOW, Allocate, Array, BatchResult, Effects, Gradient
from dbctl.roles.rounds import Phase, Rounds, WorkerStart
from dbctl.roles.verdict import judge
from dbctl.wire import BEGINNING, Grant, Halt, Message, Peer, Position

_IN_USE = (Phase.COMPUTE, Phase.COMPUTED)  # the parameters are, by the step in hand


@dataclass(frozen=True, kw_only=True)
class DownpourStart(WorkerStart):
    """What a worker begins with. `rate(n)` is the rule's rate at a shard's n-th update."""

    gradient: Gradient
    rate: Callable[[int], float]
    n_fetch: int = 1
    n_push: int = 1
    overlap: bool = True
    in_place: bool = False  # of few replicas (shards.READERS_IN_PLACE) that wait at each step
    clip: float | None = None
    position: Position = BEGINNING
    tensors: Sequence[str] = ()  # of the whole network, in order; none: the gradient's own


class Downpour:
    def __init__(self, start: DownpourStart, *, allocate: Allocate, resend_s: float = 0.25) -> None:
        assert not start.in_place or (start.n_fetch == 1 and not start.overlap), "moves its copy"
        self._start = start
        self._gradient = start.gradient
        self._rounds = Rounds(
            start,
            rate=start.rate,
            later=start.n_push > 1,
            read_own=start.overlap,
            in_place=start.in_place,
            allocate=allocate,
            resend_s=resend_s,
        )
        self.local = self._rounds.local
        self.at = start.position
        self._talk = self._rounds.talk
        self._totals = self._rounds.totals
        self._fresh = True  # the next step begins with a fetch, whatever its number
        self._grant = Grant(0, start.position.step)
        self._granted_from = start.position.step
        self._halt: Halt | None = None
        self._mark: tuple[int, int] | None = None
        self._marked = 0
        self._asked_at = -1
        self._fetched_step = -1  # the step that the last fetch was asked for
        self._started = False

    # ---------------------------------------------------------------------------------- messages

    @property
    def due(self) -> float:
        return NOW if self.can_go_on() or self._holding() else self._rounds.due

    @property
    def until(self) -> int:
        return self._grant.until

    def start(self, now: float) -> Effects:
        return self._rounds.start(now)

    def receive(self, now: float, sender: Peer, message: Message) -> Effects:
        match message:
            case Grant():
                self._on_grant(message)
                return []
            case Halt():
                self._halt = self._halt or message
                return []
        return self._rounds.receive(now, sender, message)

    def _on_grant(self, grant: Grant) -> None:
        if grant.number <= self._grant.number:
            return
        self._granted_from = self.at.step
        self._grant = grant
        if grant.mark > self._marked:
            self._mark = (grant.mark, grant.mark_step)

    # -------------------------------------------------------------------------------------- work

    def can_go_on(self) -> bool:
        match self._rounds.phase:
            case Phase.IDLE:
                return self._must_end() or self.at.step < self._step_bound()
            case Phase.FINISHED:
                return self._halt is not None or self.at.step < self._step_bound()
        return self._rounds.can_go_on()

    def _holding(self) -> bool:
        """An answer can be copied. Not while its parameters are in use by the step in hand."""
        return self.local.holding and self._rounds.phase not in _IN_USE

    def _step_bound(self) -> int:
        """Partitions of a cut replica halt at a step that some may not have been granted yet."""
        return max(self._grant.until, self._halt.until if self._halt is not None else 0)

    def _must_end(self) -> bool:
        if self._halt is not None and (self._talk.alone or self.at.step >= self._halt.until):
            return True
        return self._grant.last and self.at.step >= self._grant.until

    def step(self, now: float) -> Effects:
        effects = self._rounds.resend(now)
        if self._holding():
            effects += self.local.copy_answers(now)
        return self._rounds.go_on(now, effects, self)

    def enter(self, now: float) -> Effects:
        match self._rounds.phase:
            case Phase.IDLE:
                return self._flush(now) if self._must_end() else self._begin_step(now)
            case Phase.FETCHING:
                self._rounds.to(now, Phase.SLOT)
                return []
            case Phase.SLOT:
                if self._halt is not None and self._talk.alone:
                    return self._flush(now)
                effects = self._ask_ahead(now)
                self._rounds.compute(now, self._one_gradient())
                return effects
            case Phase.COMPUTED:
                return self._end_step(now)
            case Phase.FLUSH:
                halted = self._halt is not None and self._must_end()
                self._rounds.to(now, Phase.HALTED if halted else Phase.FINISHED)
                return self._rounds.report(now, self)
            case Phase.FINISHED:
                # More steps were granted, or the partitions of a replica stop at a later one.
                if self._must_end():
                    return self._flush(now)
                self._rounds.to(now, Phase.IDLE)
                return []
            case _:
                raise AssertionError(self._rounds.phase)

    # ---------------------------------------------------------------------------- one step's parts

    def _begin_step(self, now: float) -> Effects:
        fetch = self._fresh or self.at.step % self._start.n_fetch == 0
        self._rounds.to(now, Phase.FETCHING if fetch else Phase.SLOT)
        self._fresh = False
        if not fetch or self._fetched_step == self.at.step:
            return []
        self._fetched_step = self.at.step
        return self.local.ask(now, after=self.local.pushed)

    def _ask_ahead(self, now: float) -> Effects:
        """With overlap, the fetch of the next step: it must hold the last push but one."""
        if not self._start.overlap or (self.at.step + 1) % self._start.n_fetch:
            return []
        self._fetched_step = self.at.step + 1
        return self.local.ask(now, after=self.local.pushed - 1)

    def _one_gradient(self) -> Generator[Exchange, Any, BatchResult | None]:
        """Computes, checks, clips and accrues; what partitions must agree on, they agree on.

        None: it was refused.
        """
        out = self.local.begin()
        result = yield from self._gradient.compute(self.at, self.local.parameters, out)
        clip = self._start.clip
        squares = self._squares(out) if clip is not None else []
        verdict = yield from judge(
            result, out, self._talk, tensors=self._gradient.tensors, say=squares
        )
        if verdict.bad:
            self._totals.refused_one(f"step {self.at.step}, {verdict.bad}")
            self._fresh = True
            return None
        if clip is not None:
            # Tensor by tensor in order, partition by partition within one.
            norm = sqrt(sum(sum(parts) for parts in zip(*verdict.said, strict=True)))
            clip_to(out, norm=norm, limit=clip)
        # A fetch before the next step replaces the copy: moving it would be for nothing.
        self.local.add(out, step=(self.at.step + 1) % self._start.n_fetch != 0)
        return BatchResult(verdict.loss_sum, result.rows)

    def _squares(self, out: Array) -> list[float]:
        """The sum of squares of each of the network's tensors, 0.0 of those held elsewhere."""
        own = {name: square_sum(out[span.slice()]) for name, span in self._gradient.tensors}
        return [own.get(name, 0.0) for name in self._start.tensors or own]

    def _end_step(self, now: float) -> Effects:
        # Not before: a report says examples and position of the same step.
        if self._talk.result is not None:
            self._totals.accepted(self._talk.result)
        step, spe = self.at.step, self._gradient.steps_per_epoch
        epoch, index = self.at.epoch, self.at.index + 1
        if index >= spe:
            epoch, index = epoch + 1, 0
            self._totals.end_epoch()
        self.at = Position(step + 1, epoch, index)
        self._rounds.to(now, Phase.IDLE)
        effects = self._push(now) if step % self._start.n_push == 0 else []
        rests = not self.can_go_on()
        if rests:
            effects += self.local.rest(now)
        if self._wants_report() or rests:
            effects += self._rounds.report(now, self)
        return effects

    def _wants_report(self) -> bool:
        """At once: the first step, a refused gradient, half of the grant used."""
        if not self._started or self._totals.news:
            self._started, self._totals.news = True, False
            return True
        half = (self._granted_from + self._grant.until) // 2
        if self.at.step < half or self._asked_at == self._grant.number or self._grant.last:
            return False
        self._asked_at = self._grant.number
        return True

    def _push(self, now: float) -> Effects:
        mark = 0
        if self._mark is not None and self.at.step >= self._mark[1] and self.local.n_accrued:
            mark = self._marked = self._mark[0]
            self._mark = None
        return self.local.push(now, self.at, mark=mark)

    def _flush(self, now: float) -> Effects:
        """The end: at its stop a run pushes what is unpushed; stopped by a signal it does not."""
        push = self._halt is None or self._halt.push
        effects = self._push(now) if push else []
        effects += self.local.rest(now)
        self._rounds.to(now, Phase.FLUSH)
        return effects
