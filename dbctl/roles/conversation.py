"""What the partitions of one replica say to each other while they compute one pass together.

Rules of this file: pure (roles/base.py). Theory of operation: a pass is a generator that yields
`Give` and `Take` (model/exchange.py). Passes are numbered alike on all partitions. What is given is
sent from memory that stays as it is until it was taken; what is taken is waited for, and asked for
again (Need) when it does not come; what comes again after it was taken is never used. Each pass
ends with an agreement, in which every partition gives and takes a few float64 numbers: nobody
begins the next pass, and so writes its outboxes again, before all have finished this one. The
agreement itself uses two outboxes in turn.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np

from dbctl.model.exchange import Exchange, Give, Key, Run, Take
from dbctl.roles.base import NOW, Allocate, Array, Buffer, Effects, Send, View
from dbctl.roles.worker import Timer
from dbctl.wire import Boxes, Message, Need

AGREEMENT = "agree"


class Conversation:
    """`names`: the nodes of the other partitions, by partition; none for a whole replica."""

    def __init__(
        self, partition: int, names: Mapping[int, str], *, allocate: Allocate, resend_s: float
    ) -> None:
        self._partition = partition
        self._names = dict(names)
        self._by_name = {name: number for number, name in names.items()}
        self._allocate = allocate
        self._agreements: dict[int, Buffer] = {}  # two, in turn
        self._number = 0
        self._work: Generator[Exchange, Any, Any] | None = None
        self._waiting: Take | None = None
        self._since: float | None = None  # when it began to wait; None: not known yet
        self._inbox: dict[tuple[int, Key, int], Array] = {}
        self._sent: dict[tuple[int, Key, int], View] = {}
        self._timer = Timer(resend_s)
        self.result: Any = None
        self.waited_s = 0.0
        self.bytes_sent = 0

    @property
    def alone(self) -> bool:
        return not self._names

    @property
    def due(self) -> float:
        """At once, where a wait begins: only a later `now` tells when what was computed is over."""
        begins = self._waiting is not None and self._since is None
        return NOW if begins else self._timer.at

    @property
    def can_go_on(self) -> bool:
        """The pass in hand does not wait for anybody."""
        return self._waiting is None or all(
            (self._number, self._waiting.key, p) in self._inbox for p in self._waiting.of
        )

    def begin(self, work: Generator[Exchange, Any, Any]) -> None:
        """The next pass; `go_on` carries it out."""
        assert self._work is None, "a pass is under way"
        self._number += 1
        self._work = work
        self._waiting = None
        # Of the pass before, only its agreement may still be asked for.
        kept = {k: v for k, v in self._sent.items() if k[0] == self._number - 1}
        self._sent = {k: v for k, v in kept.items() if k[1].phase == AGREEMENT}
        # What came again after it was taken, or else it would stay for ever.
        self._inbox = {k: v for k, v in self._inbox.items() if k[0] >= self._number}

    def go_on(self, now: float) -> tuple[Effects, bool]:
        """Until something is to be sent or waited for, or the pass is over (then True)."""
        assert self._work is not None
        answer: Any = None
        if self._waiting is not None:
            answer = self._take(now, self._waiting)
        while True:
            try:
                item = self._work.send(answer)
            except StopIteration as end:
                self._work, self.result = None, end.value
                return [], True
            if isinstance(item, Give):
                return self._give(item), False
            self._waiting, self._since = item, None
            if not self.can_go_on:
                return [], False
            answer = self._take(now, item)

    def abandon(self) -> None:
        """Leaves the pass in hand, for good: no other may be begun after it.

        What was given stays, for partners that have not left it yet.
        """
        self._waiting = None
        self._timer.stop()
        if self._work is not None:
            self._work.close()

    def _take(self, now: float, take: Take) -> dict[int, Array]:
        self._timer.stop()
        self._waiting = None
        if self._since is not None:
            self.waited_s += now - self._since
        return {p: self._inbox.pop((self._number, take.key, p)) for p in take.of}

    def _give(self, give: Give) -> Effects:
        effects: Effects = []
        for partition, (outbox, start, stop) in give.to.items():
            view = View(outbox, start, stop)
            self._sent[self._number, give.key, partition] = view
            self.bytes_sent += view.array.nbytes
            effects.append(self._boxes(self._number, give.key, partition))
        return effects

    def _boxes(self, number: int, key: Key, partition: int) -> Send:
        view = self._sent[number, key, partition]
        return Send(self._names[partition], Boxes(number, key.phase, key.layer, view))

    # ------------------------------------------------------------------------------ messages

    def receive(self, sender: str, message: Message) -> Effects:
        """Files what a partition gave; answers what it needs again."""
        partition = self._by_name.get(sender)
        if partition is None:
            return []
        match message:
            case Boxes(number, phase, layer, payload):
                if number >= self._number and isinstance(payload, np.ndarray):
                    self._inbox.setdefault((number, Key(phase, layer), partition), payload)
            case Need(number, phase, layer):
                key = Key(phase, layer)
                if (number, key, partition) in self._sent:
                    return [self._boxes(number, key, partition)]
        return []

    def resend(self, now: float) -> Effects:
        """Asks again for what is waited for; the first time, only the wait begins."""
        if self._waiting is None:
            return []
        if self._since is None:
            self._since = now
            self._timer.begin(now)
        if now < self._timer.at:
            return []
        self._timer.again(now)
        key = self._waiting.key
        missing = [p for p in self._waiting.of if (self._number, key, p) not in self._inbox]
        return [Send(self._names[p], Need(self._number, key.phase, key.layer)) for p in missing]

    # ----------------------------------------------------------------------------- agreement

    def agree(self, own: Sequence[float]) -> Generator[Exchange, Any, list[list[float]]]:
        """Everybody's numbers, in the order of partitions: the end of a pass."""
        if self.alone:
            return [list(own)]
        key, turn = Key(AGREEMENT, 0), self._number % 2
        if turn not in self._agreements:
            self._agreements[turn] = self._allocate(len(own), "<f8")
        outbox = self._agreements[turn]
        outbox.array[: len(own)] = own
        yield Give(key, dict.fromkeys(self._names, Run(outbox, 0, len(own))))
        taken = yield Take(key, tuple(sorted(self._names)))
        everybody = {**{p: a.tolist() for p, a in taken.items()}, self._partition: list(own)}
        return [everybody[p] for p in sorted(everybody)]
