"""The evaluator: one more replica that only measures (design: Evaluator; paper A, section 5).

Rules of this file: pure (roles/base.py). Theory of operation: asked to Evaluate, it fetches from
every shard, copies and gives back at once, then measures one batch a step and answers with sums and
counts. Accuracy is measured on the servers' parameters, never on a replica's copy. With predictions
at most `WINDOW` pieces of them are out at once, and are sent again until they are filed, so that a
controller whose disk is slow loses none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np

from dbctl.model.exchange import Exchange
from dbctl.region import Range
from dbctl.rights import CONTROLLER
from dbctl.roles.base import NOW, Allocate, Array, Buffer, Done, Effects, Measure, Send, View
from dbctl.roles.conversation import Conversation
from dbctl.roles.worker import Channel, Timer
from dbctl.shards import ShardSpan
from dbctl.wire import (
    Evaluate,
    Evaluated,
    Filed,
    Finish,
    Loss,
    Message,
    Peer,
    Predictions,
)

WINDOW = 4


class Evaluator:
    def __init__(
        self,
        measure: Measure,
        shards: Sequence[ShardSpan],
        *,
        allocate: Allocate,
        origin: int = 0,
        partition: int = 0,
        partners: Mapping[int, str] | None = None,
        dtype: str = "float32",
        resend_s: float = 0.25,
    ) -> None:
        self._measure = measure
        self._channels = [
            Channel(s.node, Range(s.start, s.stop), resend_s=resend_s) for s in shards
        ]
        self._by_shard = {channel.shard: channel for channel in self._channels}
        self._origin = origin
        self._leads = partition == 0  # it answers for the other partitions
        self._talk = Conversation(partition, partners or {}, allocate=allocate, resend_s=resend_s)
        self._measuring = False
        self._loss_sum = 0.0
        self._parameters = np.zeros(measure.n_parameters, dtype)
        self._asked: Evaluate | None = None  # to be answered; None: at rest
        self._next: Evaluate | None = None  # came while a cut evaluator was busy
        self._fetched = False
        self._index = 0
        self._n_batches = 0
        self._version = 0
        self._answer: Evaluated | None = None
        self._allocate = allocate
        self._confusion: Buffer | None = None  # is free again once there is a next Evaluate
        self._answer_timer = Timer(2 * resend_s)
        self._unfiled: deque[Predictions] = deque()
        self._unfiled_timer = Timer(2 * resend_s)

    @property
    def due(self) -> float:
        if self._asked is not None and self._can_go_on():
            return NOW
        timers = min(self._answer_timer.at, self._unfiled_timer.at, self._talk.due)
        return min([timers, *(channel.due for channel in self._channels)])

    def start(self, now: float) -> Effects:
        return [effect for channel in self._channels for effect in channel.hello(now)]

    def receive(self, now: float, sender: Peer, message: Message) -> Effects:
        match message:
            case Evaluate(number):
                if self._answer is None or number > self._answer.number:
                    self._begin(message)
                return []
            case Filed():
                self._on_filed(now, message)
                return []
            case Finish():
                return [Done("finished")]
        channel = self._by_shard.get(sender.node)
        if channel is not None:
            channel.receive(now, message)
        return self._talk.receive(sender.node, message)

    def _begin(self, asked: Evaluate) -> None:
        if self._asked is not None and asked.number <= self._asked.number:
            return
        if self._asked is not None and not self._talk.alone:
            # The other partitions go on with the one in hand: so does this one, to its end.
            self._next = asked
            return
        self._asked = asked
        self._fetched = False
        self._index = 0
        self._loss_sum = 0.0
        self._answer_timer.stop()
        self._unfiled.clear()
        self._unfiled_timer.stop()

    def _on_filed(self, now: float, filed: Filed) -> None:
        if self._asked is None or filed.number != self._asked.number:
            return
        while self._unfiled and self._unfiled[0].index < filed.pieces:
            self._unfiled.popleft()
            self._unfiled_timer.begin(now)
        if not self._unfiled:
            self._unfiled_timer.stop()

    def _can_go_on(self) -> bool:
        """Once asked: parameters to ask for or copy, a batch to measure, an answer to give."""
        if not self._fetched:
            return self._can_copy() or self._can_ask()
        if self._measuring:
            return self._talk.can_go_on
        return len(self._unfiled) < WINDOW if self._index < self._n_batches else not self._unfiled

    def _can_ask(self) -> bool:
        return all(c.term for c in self._channels) and not all(c.asked for c in self._channels)

    def _can_copy(self) -> bool:
        return all(channel.answer is not None for channel in self._channels)

    def step(self, now: float) -> Effects:
        effects = self._talk.resend(now)
        for channel in self._channels:
            if now >= channel.due:
                effects += channel.resend(now)
        if now >= self._answer_timer.at and self._answer is not None:
            self._answer_timer.again(now)
            effects.append(Send(CONTROLLER, self._answer))
        if now >= self._unfiled_timer.at:
            self._unfiled_timer.again(now)
            effects += [Send(CONTROLLER, piece) for piece in self._unfiled]
        if self._asked is None or not self._can_go_on():
            return effects
        if self._fetched:
            return effects + self._measure_one(now, self._asked)
        if self._can_copy():
            return effects + self._copy(now, self._asked)
        if self._can_ask():
            for channel in self._channels:
                if not channel.asked:
                    effects += channel.ask(now, after=0)
        return effects

    def _copy(self, now: float, asked: Evaluate) -> Effects:
        effects: Effects = []
        for channel in self._channels:
            assert channel.answer is not None
            np.copyto(self._parameters[channel.span.slice(self._origin)], channel.answer.payload)
            effects += channel.give_back(now)
        # That of the oldest: no update up to it is missing.
        self._version = min((channel.version for channel in self._channels), default=0)
        self._n_batches = self._measure.begin(asked.part, asked.of)
        self._fetched = True
        return effects

    def _measure_one(self, now: float, asked: Evaluate) -> Effects:
        effects: Effects = []
        if self._index < self._n_batches:
            if not self._measuring:
                self._talk.begin(self._one_batch(asked))
                self._measuring = True
            effects, over = self._talk.go_on(now)
            if not over:
                return effects
            self._measuring = False
            self._index += 1
            effects += self._file(now, self._talk.result)
        if self._index < self._n_batches or self._unfiled:
            return effects
        return effects + self._finish(now, asked)

    def _one_batch(self, asked: Evaluate) -> Generator[Exchange, Any, Predictions | None]:
        loss, predictions = yield from self._measure.measure(
            self._index, self._parameters, number=asked.number, predictions=asked.predictions
        )
        shares = yield from self._talk.agree([loss])
        self._loss_sum += sum(share[0] for share in shares)
        return predictions

    def _file(self, now: float, predictions: Predictions | None) -> Effects:
        if predictions is None or not self._leads:
            return []
        if not self._unfiled:
            self._unfiled_timer.begin(now)
        self._unfiled.append(predictions)
        return [Send(CONTROLLER, predictions)]

    def _counts(self, confusion: Array | None) -> View | None:
        if confusion is None or not self._leads:
            return None
        if self._confusion is None:
            self._confusion = self._allocate(confusion.size, "<f8")  # exact up to 2^53 rows
        np.copyto(self._confusion.array, confusion.ravel())
        return View(self._confusion, 0, confusion.size)

    def _finish(self, now: float, asked: Evaluate) -> Effects:
        tally = self._measure.tally()
        self._answer = Evaluated(
            asked.number,
            asked.part,
            self._version,
            Loss(self._loss_sum, tally.rows),
            tally.correct,
            tally.top5,
            tally.classes,
            self._counts(tally.confusion),
        )
        self._asked = None
        effects: Effects = []
        if self._leads:
            self._answer_timer.begin(now)
            effects = [Send(CONTROLLER, self._answer)]
        if self._next is not None:
            asked, self._next = self._next, None
            self._begin(asked)
        return effects
