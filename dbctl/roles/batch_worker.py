"""The worker of a batch method: gradients of bundles of portions (paper A, section 4.2).

Rules of this file: pure (roles/base.py). Theory of operation (docs/protocol.md, section 8): the
coordinator gives numbered orders, each for one bundle of one evaluation, and a worker carries them
out by number, none left out:

    fetch the point                           once an evaluation
    for each portion of the bundle: accrued <- accrued + gradient of the sum of its rows' losses
    push accrued; once every shard has acknowledged it, say Computed

The next bundle is computed while the last push is on its way. An order of an evaluation that is
over is dropped: by a whole replica at once. The partitions of a cut one hear of it at different
moments; each goes along to the end of a portion, where one that has heard is enough for all to
drop it. One that heard before it had the point computes on whatever it holds: nothing comes of it.

`Work.halt` is final, so that nobody needs to agree about it: each leaves its pass where it stands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum
from math import nan
from typing import Any

from dbctl.model.exchange import Exchange
from dbctl.roles.answers import Answers
from dbctl.roles.base import (
    NEVER,
    NOW,
    Allocate,
    BatchResult,
    Effects,
    PortionGradient,
)
from dbctl.roles.rounds import Phase, Rounds, WorkerStart
from dbctl.roles.verdict import ELSEWHERE, judge
from dbctl.roles.worker import Timer
from dbctl.wire import Message, Peer, Position
from dbctl.wire_batch import Computed, Order, Work


@dataclass(frozen=True, kw_only=True)
class BatchWorkerStart(WorkerStart):
    """What a worker begins with."""

    gradient: PortionGradient


class Fate(Enum):
    """What became of a portion, alike on all partitions."""

    ACCRUED = "accrued"
    DROPPED = "dropped"  # its evaluation is over
    REFUSED = "refused"  # loss or gradient is not finite


class BatchWorker:
    def __init__(
        self, start: BatchWorkerStart, *, allocate: Allocate, resend_s: float = 0.25
    ) -> None:
        self._gradient = start.gradient
        self._rounds = Rounds(
            start,
            rate=lambda n: 0.0,  # a worker of a batch method never steps on its own
            later=len(start.gradient.portions(0, 0)) > 1,
            read_own=False,
            allocate=allocate,
            resend_s=resend_s,
        )
        self.local = self._rounds.local
        self._talk = self._rounds.talk
        self._totals = self._rounds.totals
        self._evaluation = 0  # the latest heard of
        self._halting = False
        self._orders: dict[int, Order] = {}  # not begun
        self._order = Order(0, 0, 0, 0)  # the last one begun
        self._left: deque[int] = deque()  # its portions that are not computed
        self._losses: list[float] = []
        self._where = ""  # what was not finite last, if it was this worker's
        self._prefetched = 0  # the last order whose rows were asked for
        self._asked = False  # a point was fetched, or is on its way
        self._again = Timer(resend_s)  # the point of the evaluation was not there yet
        self._pushed: deque[tuple[int, Computed]] = deque()  # by seq, not acknowledged
        self._answers = Answers(resend_s)
        self.at = Position()

    # ---------------------------------------------------------------------------------- messages

    @property
    def due(self) -> float:
        if self.can_go_on() or self.local.holding or self._acknowledged():
            return NOW
        return min(self._rounds.due, self._again.at, self._answers.due)

    @property
    def until(self) -> int:
        return self._order.number

    def start(self, now: float) -> Effects:
        return self._rounds.start(now)

    def receive(self, now: float, sender: Peer, message: Message) -> Effects:
        if isinstance(message, Work):
            self._on_work(now, message)
            return []
        return self._rounds.receive(now, sender, message)

    def _on_work(self, now: float, work: Work) -> None:
        """An order never changes, so that it may be taken from a Work that was overtaken."""
        self._evaluation = max(self._evaluation, work.evaluation)
        self._halting = self._halting or work.halt
        for order in work.orders:
            if order.number > self._order.number:
                self._orders[order.number] = order
        self._answers.heard(now, (order.number for order in work.orders))

    # -------------------------------------------------------------------------------------- work

    def _is_over(self) -> bool:
        """The evaluation of the order in hand is over, as far as this worker has heard."""
        return self._order.evaluation < self._evaluation

    def _acknowledged(self) -> bool:
        return bool(self._pushed) and self._pushed[0][0] <= self.local.acked

    def can_go_on(self) -> bool:
        if self._must_leave():
            return True
        match self._rounds.phase:
            case Phase.IDLE:
                return self._order.number + 1 in self._orders
            case Phase.FETCHING:
                return self._is_over() or (self.local.complete and self._again.at == NEVER)
            case Phase.SLOT:
                return self.local.has_slot or self._may_drop()
        return self._rounds.can_go_on()

    def _must_leave(self) -> bool:
        return self._halting and self._rounds.phase not in (Phase.FLUSH, Phase.HALTED)

    def _may_drop(self) -> bool:
        """Without asking anybody."""
        return self._talk.alone and self._is_over()

    def step(self, now: float) -> Effects:
        effects = self._rounds.resend(now) + self._answers.resend(now)
        # Also during a portion: what comes then is a later point, and the portion is dropped.
        effects += self.local.copy_answers(now)
        while self._acknowledged():
            effects += self._answers.say(now, self._pushed.popleft()[1])
        if now >= self._again.at:
            self._again.stop()
            effects += self._ask(now)
        if self._must_leave():
            self._leave(now)
        return self._rounds.go_on(now, effects, self)

    def enter(self, now: float) -> Effects:
        match self._rounds.phase:
            case Phase.IDLE:
                return self._begin_order(now)
            case Phase.FETCHING:
                return self._end_fetch(now)
            case Phase.SLOT:
                if self._may_drop():
                    return self._drop(now)
                self._look_ahead()
                self._rounds.compute(now, self._one_portion(self._left.popleft()))
                return []
            case Phase.COMPUTED:
                return self._end_portion(now)
            case Phase.FLUSH:
                self._rounds.to(now, Phase.HALTED)
                return self._rounds.report(now, self)
            case _:
                raise AssertionError(self._rounds.phase)

    def _leave(self, now: float) -> None:
        """Halted: everything in hand is dropped, and nothing is begun any more."""
        self._talk.abandon()
        self._pushed.clear()
        self._answers.forget()
        self._again.stop()
        self._rounds.to(now, Phase.FLUSH)

    # ------------------------------------------------------------------------- one order's parts

    def _begin_order(self, now: float) -> Effects:
        self._order = self._orders.pop(self._order.number + 1)
        if self._order.evaluation != self.at.epoch:
            self._totals.end_epoch()
        self.at = Position(self.at.step, self._order.evaluation, self._order.bundle)
        self._left.extend(self._gradient.portions(self._order.sample, self._order.bundle))
        self._losses = []
        if self._may_drop():
            return self._drop(now)
        self._prefetch(self._order)
        self._rounds.to(now, Phase.FETCHING)
        if self._has_point() or not self.local.complete:
            return []  # the fetch under way may bring it
        return self._ask(now)

    def _has_point(self) -> bool:
        """Every shard's answer was of this evaluation. Without shards there is nothing to fetch."""
        versions = self.local.versions
        asked = self._asked or not versions
        return asked and self.local.complete and set(versions) <= {self._order.evaluation}

    def _ask(self, now: float) -> Effects:
        self._asked = True
        return self.local.ask(now, after=0)

    def _end_fetch(self, now: float) -> Effects:
        if not self._has_point() and self.local.complete:
            # A shard hands out a later point: it has been told of an evaluation, we have not yet.
            self._evaluation = max(self._evaluation, *self.local.versions)
        if not self._has_point() and not self._is_over():
            # A shard has not begun the evaluation yet.
            self._again.begin(now)
            return []
        self._again.stop()
        if self._may_drop():
            return self._drop(now)
        self._rounds.to(now, Phase.SLOT)
        return []

    def _one_portion(self, portion: int) -> Generator[Exchange, Any, Fate]:
        """Computes, checks and accrues; what partitions must agree on, they agree on."""
        out = self.local.begin()
        result = yield from self._gradient.compute(
            self.local.parameters, out, sample=self._order.sample, portion=portion
        )
        verdict = yield from judge(
            result, out, self._talk, tensors=self._gradient.tensors, say=[float(self._is_over())]
        )
        if any(over for [over] in verdict.said):
            return Fate.DROPPED
        if verdict.bad:
            self._refuse(portion, verdict.bad)
            return Fate.REFUSED
        self.local.add(out, step=False)
        self._losses.append(verdict.loss_sum)
        self._totals.accepted(BatchResult(self._losses[-1], result.rows))
        return Fate.ACCRUED

    def _refuse(self, portion: int, bad: str) -> None:
        """Counted, but no fault: a line search may try a point that is too far."""
        where = f"evaluation {self.at.epoch}, portion {portion}, {bad}"
        self._where = "" if bad == ELSEWHERE else where
        self._totals.refused_one(where)

    def _end_portion(self, now: float) -> Effects:
        fate = self._talk.result
        if fate is Fate.DROPPED:
            return self._drop(now)
        if fate is Fate.REFUSED:
            return self._answer(now, (nan,), where=self._where)
        self.at = Position(self.at.step + 1, self.at.epoch, self.at.index)
        if self._left:
            self._rounds.to(now, Phase.SLOT)
            return []
        effects = self.local.push(now, self.at, mark=0)
        self._pushed.append((self.local.pushed, self._computed(tuple(self._losses))))
        return effects + self._end_order(now)

    def _drop(self, now: float) -> Effects:
        return self._answer(now, ())

    def _answer(self, now: float, losses: tuple[float, ...], *, where: str = "") -> Effects:
        """An order that ends without a push."""
        self.local.discard()
        return self._answers.say(now, self._computed(losses, where)) + self._end_order(now)

    def _computed(self, losses: tuple[float, ...], where: str = "") -> Computed:
        order = self._order
        return Computed(order.number, order.evaluation, order.bundle, losses, where)

    def _end_order(self, now: float) -> Effects:
        self._left.clear()
        self._rounds.to(now, Phase.IDLE)
        if self._totals.news or not self.can_go_on():
            self._totals.news = False
            return self._rounds.report(now, self)
        return []

    # ---------------------------------------------------------------------------------- prefetch

    def _look_ahead(self) -> None:
        """The rows of the next order, while those of this one are computed."""
        following = self._orders.get(self._order.number + 1)
        if following is not None:
            self._prefetch(following)

    def _prefetch(self, order: Order) -> None:
        if order.number > self._prefetched and order.evaluation >= self._evaluation:
            self._prefetched = order.number
            self._gradient.prefetch(order.sample, order.bundle)
