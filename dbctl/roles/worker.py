"""A worker's side of the shard protocol: one channel a shard, and the slots that pushes lie in.

Rules of this file: pure (roles/base.py). Theory of operation (docs/protocol.md): a channel says
Hello, numbers fetches, sends each push and keeps it until it is acknowledged, and sends again with
doubling back-off whatever is not answered. A slot holds one push for all shards at once and is free
when every one of them has acknowledged it. Nobody holds a hand-out while waiting: an answer is
copied and given back at once, or kept by one of few replicas while it computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dbctl.region import Range
from dbctl.roles.base import NEVER, Allocate, Array, Buffer, Effects, Send
from dbctl.wire import Ack, Fetch, Hello, Message, Params, Push, Return, Welcome

MAX_BACK_OFF_S = 5.0
MAX_PAYLOAD_BACK_OFF_S = 20.0
SLOW_LINE = 1e6  # bytes a second: nothing is sent again before a line like that has brought it
MAX_RESENT = 2


class Timer:
    """When to send again: after `first_s`, then with doubling back-off up to `most_s`.

    It learns from what is `answered` (as TCP does: Karn and Partridge, 1987): a payload that is
    sent again too early on a slow line only makes those behind it late, which are then sent again
    too. The first wait is twice what an answer has taken lately; after an answer to something that
    was sent again, which may be one to either, it is the wait that it had come to.
    """

    def __init__(self, first_s: float, most_s: float = MAX_BACK_OFF_S) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._wait_s = first_s
        self._next_s = first_s
        self._usual_s = 0.0
        self._begun_at = 0.0
        self._repeated = False
        self.at = NEVER

    def begin(self, now: float) -> None:
        self._wait_s = self._next_s
        self._begun_at, self._repeated = now, False
        self.at = now + self._wait_s

    def again(self, now: float) -> None:
        self._wait_s = min(2 * self._wait_s, self._most_s)
        self._repeated = True
        self.at = now + self._wait_s

    def answered(self, now: float) -> None:
        if self.at == NEVER:
            return
        self.at = NEVER
        if self._repeated:
            self._next_s = self._wait_s
            return
        took_s = now - self._begun_at
        self._usual_s = max(took_s, self._usual_s + (took_s - self._usual_s) / 8)
        self._next_s = min(max(self._first_s, 2 * self._usual_s), self._most_s)

    def stop(self) -> None:
        self.at = NEVER


class Channel:
    """One worker's or reader's side of one shard; `span` is what they share of the flat vector."""

    def __init__(self, shard: str, span: Range, *, resend_s: float) -> None:
        self.shard = shard
        self.span = span
        self.term = 0  # 0: not welcomed yet
        self.version = 0  # of the last answer taken; what the parameters in use were computed from
        self.acked = 0
        self.answer: Params | None = None
        self._pushed = 0
        self._unacked: dict[int, Push] = {}
        self._number = 0
        self._returned = 0
        self._kept = 0
        self._told = 0  # the last Push, Fetch or Return said that so much is given back
        self._fetch: Fetch | None = None
        self._hello_timer = Timer(resend_s)
        patient_s = min(max(resend_s, 4 * len(span) / SLOW_LINE), MAX_PAYLOAD_BACK_OFF_S)
        self._fetch_timer = Timer(patient_s, MAX_PAYLOAD_BACK_OFF_S)
        self._push_timer = Timer(patient_s, MAX_PAYLOAD_BACK_OFF_S)
        self._return_timer = Timer(2 * resend_s)

    @property
    def due(self) -> float:
        # Asked for before and after each message; a generator here took 0.1 ms a step.
        return min(
            self._hello_timer.at, self._fetch_timer.at, self._push_timer.at, self._return_timer.at
        )

    @property
    def asked(self) -> bool:
        """A fetch is under way, or its answer has not been taken yet."""
        return self._fetch is not None or self.answer is not None

    @property
    def returned(self) -> int:
        return self._returned

    def hello(self, now: float) -> Effects:
        self._hello_timer.begin(now)
        return [Send(self.shard, Hello(self.acked + 1))]

    def receive(self, now: float, message: Message) -> None:
        match message:
            case Welcome(term, applied, version):
                self._on_welcome(now, term, applied=applied, version=version)
            case Ack(term, seq) if term == self.term:
                self._acknowledged(now, seq)
            case Params(term) if term == self.term:
                self._on_params(now, message)

    def _on_welcome(self, now: float, term: int, *, applied: int, version: int) -> None:
        if self.term:
            return
        self.term = term
        self.version = version
        self._hello_timer.stop()
        self._acknowledged(now, applied)

    def _acknowledged(self, now: float, seq: int) -> None:
        if seq <= self.acked:
            return
        self.acked = seq
        for old in [s for s in self._unacked if s <= seq]:
            del self._unacked[old]
        self._push_timer.answered(now)
        if self._unacked:
            self._push_timer.begin(now)

    def _on_params(self, now: float, params: Params) -> None:
        # Its Ack may be lost, or later: nothing that the answer holds is waited for again.
        self._acknowledged(now, params.holds)
        if self._fetch is None or params.number != self._fetch.number:
            return  # repeated, or late
        if params.handout <= self._returned:
            return
        self._fetch = None
        self._fetch_timer.answered(now)
        self.answer = params

    # ----------------------------------------------------------------------------------- sending

    def ask(self, now: float, *, after: int) -> Effects:
        """Asks for the parameters once push `after` is in them."""
        assert not self.asked, f"{self.shard}: a second fetch while one is under way"
        self._number += 1
        self._fetch = Fetch(self.term, self._number, max(after, 0), self._returned, self.span.start)
        self._told = self._returned
        self._fetch_timer.begin(now)
        return [Send(self.shard, self._fetch)]

    def give_back(self, now: float) -> Effects:
        """The answer was copied: its buffer is the shard's again.

        Nothing acknowledges a Return, and one that is lost can stop everybody: it is said again
        for as long as no newer one follows.
        """
        assert self.answer is not None
        self._returned = self.answer.handout
        self.version = self.answer.version
        self.answer = None
        return self.say_returned(now)

    def say_returned(self, now: float) -> Effects:
        """A word of its own for what is given back, if no other message has said it."""
        if self._told == self._returned:
            return []
        self._told = self._returned
        self._return_timer.begin(now)
        return [Send(self.shard, Return(self._returned))]

    def keep(self) -> Array:
        """The answer, to be read where it lies until `let_go`."""
        assert self.answer is not None
        self._kept, self.version = self.answer.handout, self.answer.version
        kept: Array = self.answer.payload
        self.answer = None
        return kept

    def let_go(self) -> None:
        """What was kept is the shard's again: a Push, a Fetch or `say_returned` says so next."""
        self._returned = self._kept

    def push(self, now: float, push: Push) -> Effects:
        assert push.seq == self._pushed + 1, f"push {push.seq} after {self._pushed}"
        self._pushed = push.seq
        self._told = push.returned
        if not self._unacked:
            self._push_timer.begin(now)
        self._unacked[push.seq] = push
        return [Send(self.shard, push)]

    def resend(self, now: float) -> Effects:
        effects: Effects = []
        if now >= self._hello_timer.at:
            self._hello_timer.again(now)
            effects.append(Send(self.shard, Hello(self.acked + 1)))
        if now >= self._fetch_timer.at and self._fetch is not None:
            self._fetch_timer.again(now)
            effects.append(Send(self.shard, self._fetch))
        if now >= self._return_timer.at:
            self._return_timer.again(now)
            effects.append(Send(self.shard, Return(self._returned)))
        if now >= self._push_timer.at:
            self._push_timer.again(now)
            # The oldest only: a receiver has few messages in assembly, and files nothing else.
            oldest = list(self._unacked.values())[:MAX_RESENT]
            effects += [Send(self.shard, push) for push in oldest]
        return effects


class Slots:
    """Where gradients are accrued and pushed from: `count` pushes may be unacknowledged."""

    def __init__(self, count: int, n_elements: int, *, dtype: str, allocate: Allocate) -> None:
        self._buffers: Sequence[Buffer] = [
            allocate(n_elements, np.dtype(dtype).str) for _ in range(count)
        ]
        self._seqs = [0] * count  # the push that lies in each

    def available(self, acked: int) -> bool:
        """The oldest push is acknowledged by every shard (`acked`: the least of their counts)."""
        return min(self._seqs) <= acked

    def take(self) -> Buffer:
        """The buffer of the oldest push, so that the newest can still be read."""
        index = min(range(len(self._seqs)), key=self._seqs.__getitem__)
        self._seqs[index] = 0  # it holds no push from here on
        return self._buffers[index]

    def pushed(self, buffer: Buffer, seq: int) -> None:
        self._seqs[self._index(buffer)] = seq

    def later_than(self, holds: int) -> list[Buffer]:
        """The pushes after `holds` that still lie in their slots, oldest first."""
        later = sorted((s, i) for i, s in enumerate(self._seqs) if s > holds)
        return [self._buffers[i] for _, i in later]

    def _index(self, buffer: Buffer) -> int:
        return next(i for i, mine in enumerate(self._buffers) if mine is buffer)
