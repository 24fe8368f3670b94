"""The evaluator: fetches from every shard, gives back at once, then measures."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import msgspec
import numpy as np

from dbctl.envelope import without_payload
from dbctl.rights import CONTROLLER
from dbctl.roles.base import NEVER, NOW, Array, Done, Effects, PlainBuffer, Send, Tally
from dbctl.roles.evaluator import WINDOW, Evaluator
from dbctl.shards import ShardSpan
from dbctl.wire import (
    Boxes,
    Evaluate,
    Evaluated,
    Fetch,
    Filed,
    Finish,
    Hello,
    Loss,
    Message,
    Params,
    Peer,
    Predictions,
    Return,
    Welcome,
)

SHARDS = (ShardSpan("shard-0", 0, 2), ShardSpan("shard-1", 2, 3))
BOSS = Peer(CONTROLLER, 1)


class Counted:
    """Each batch is one row whose loss is the sum of the parameters."""

    n_parameters = 3
    n_batches = 2

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []
        self.measured: list[tuple[int, int]] = []  # (number, index)
        self._rows = 0

    def begin(self, part: int, of: int) -> int:
        self.begun.append((part, of))
        self._rows = 0
        return self.n_batches

    def measure(
        self, index: int, parameters: Array, *, number: int, predictions: bool
    ) -> Generator[Any, Any, tuple[float, Predictions | None]]:
        self.measured.append((number, index))
        self._rows += 1
        piece = Predictions(number, index, (index,), (1.0,), (1.0,), (0.5,))
        return float(parameters.sum()), piece if predictions else None
        yield

    def tally(self) -> Tally:
        return Tally(self._rows, 1, 2, 2, np.array([[self._rows, 0], [0, 1]]))


def make(*, welcomed: bool = True) -> tuple[Evaluator, Counted]:
    measure = Counted()
    evaluator = Evaluator(measure, SHARDS, dtype="float64", allocate=PlainBuffer)
    assert evaluator.start(0.0) == [Send("shard-0", Hello(1)), Send("shard-1", Hello(1))]
    if welcomed:
        for shard in ("shard-0", "shard-1"):
            assert evaluator.receive(0.0, Peer(shard, 1), Welcome(1, 0, 0)) == []
    return evaluator, measure


def asked(evaluator: Evaluator, number: int = 1, **fields: Any) -> Effects:
    assert evaluator.receive(0.0, BOSS, Evaluate(number, **fields)) == []
    return evaluator.step(0.0)


def answer(evaluator: Evaluator, shard: int, values: list[float], **fields: int) -> None:
    given = {"number": 1, "handout": 1, "version": 5} | fields
    span = SHARDS[shard]
    params = Params(term=1, holds=0, start=span.start, payload=np.array(values), **given)
    assert evaluator.receive(0.0, Peer(span.node, 1), params) == []


def finish(evaluator: Evaluator) -> Effects:
    effects: Effects = []
    while evaluator.due == NOW:
        effects += evaluator.step(0.0)
    return effects


def test_it_waits_for_every_welcome_before_it_asks() -> None:
    evaluator, _ = make(welcomed=False)
    assert asked(evaluator) == []
    evaluator.receive(0.0, Peer("shard-0", 1), Welcome(1, 0, 0))
    assert evaluator.due > NOW
    evaluator.receive(0.0, Peer("shard-1", 1), Welcome(1, 0, 0))
    assert evaluator.step(0.0) == [
        Send("shard-0", Fetch(1, 1, 0, 0)),
        Send("shard-1", Fetch(1, 1, 0, 0, start=2)),
    ]


def test_it_gives_back_before_it_measures_and_answers_with_sums() -> None:
    evaluator, measure = make()
    assert len(asked(evaluator, part=1, of=3)) == 2
    answer(evaluator, 0, [1, 2], version=5)
    assert evaluator.due > NOW  # one is missing
    answer(evaluator, 1, [4], version=7, handout=9)
    assert evaluator.step(0.0) == [Send("shard-0", Return(1)), Send("shard-1", Return(9))]
    assert measure.begun == [(1, 3)]
    assert evaluator.step(0.0) == []
    [sent] = answers(evaluator.step(0.0))
    evaluated = Evaluated(1, 1, 5, Loss(14.0, 2), 1, 2, 2)  # the older version
    assert without_payload(sent) == evaluated
    assert sent.payload.array.tolist() == [2, 0, 0, 1]
    assert evaluator.due > NOW


def answers(effects: Effects) -> list[Evaluated]:
    sent = [e.message for e in effects if isinstance(e, Send) and e.to == CONTROLLER]
    return [message for message in sent if isinstance(message, Evaluated)]


def test_counts_stay_as_they_were_sent_until_more_is_asked_for() -> None:
    """The controller reads this memory in place; it is used again, not allocated again."""
    evaluator, measure = make()
    sent: list[Evaluated] = []
    for number in (1, 2):
        asked(evaluator, number)
        for shard in (0, 1):
            values = [0.0, 0.0][: 2 - shard]
            answer(evaluator, shard, values, number=number, handout=number)
        sent += answers(finish(evaluator))
        measure.n_batches += 1
        assert len(sent) == number
        assert sent[-1].payload.array.tolist() == [1 + number, 0, 0, 1]
    assert sent[0].payload.buffer is sent[1].payload.buffer
    [again] = answers(evaluator.step(10.0))
    assert again is sent[1], "the last is said again as it was"


def test_predictions_come_batch_by_batch_before_the_answer() -> None:
    evaluator, _ = make()
    asked(evaluator, predictions=True)
    answer(evaluator, 0, [0, 0])
    answer(evaluator, 1, [0])
    assert kinds(finish(evaluator)) == [Predictions, Predictions]
    evaluator.receive(0.0, BOSS, Filed(1, 1))
    assert evaluator.due > NOW  # the answer waits until every piece has come
    evaluator.receive(0.0, BOSS, Filed(1, 2))
    assert kinds(finish(evaluator)) == [Evaluated]


def kinds(effects: Effects) -> list[type]:
    return [type(e.message) for e in effects if isinstance(e, Send) and e.to == CONTROLLER]


def test_a_window_of_pieces_is_out_and_said_again_until_they_are_filed() -> None:
    evaluator, measure = make()
    measure.n_batches = WINDOW + 3
    asked(evaluator, predictions=True)
    answer(evaluator, 0, [0, 0])
    answer(evaluator, 1, [0])
    assert kinds(finish(evaluator)) == [Predictions] * WINDOW
    assert kinds(evaluator.step(0.5)) == [Predictions] * WINDOW
    evaluator.receive(0.5, BOSS, Filed(1, 2))
    evaluator.receive(0.5, BOSS, Filed(1, 1))  # late
    evaluator.receive(0.5, BOSS, Filed(9, 99))  # of another evaluation
    assert kinds(finish(evaluator)) == [Predictions] * 2
    evaluator.receive(0.5, BOSS, Filed(1, 6))
    assert kinds(finish(evaluator)) == [Predictions]
    evaluator.receive(0.5, BOSS, Filed(1, WINDOW + 3))
    assert kinds(finish(evaluator)) == [Evaluated]


def test_a_repeated_request_starts_nothing_and_the_answer_is_said_again() -> None:
    evaluator, measure = make()
    asked(evaluator)
    assert asked(evaluator) == []
    answer(evaluator, 0, [0, 0])
    answer(evaluator, 1, [0])
    last = finish(evaluator)[-1]
    assert asked(evaluator) == []
    assert measure.begun == [(0, 1)]
    assert last in evaluator.step(0.5)
    assert last in evaluator.step(1.5)


def test_the_next_request_ends_the_repeats() -> None:
    evaluator, measure = make()
    asked(evaluator)
    answer(evaluator, 0, [0, 0])
    answer(evaluator, 1, [0])
    last = finish(evaluator)[-1]
    assert len(asked(evaluator, 2)) == 2
    assert last not in evaluator.step(5.0)
    answer(evaluator, 0, [1, 1], number=2, handout=2)
    answer(evaluator, 1, [1], number=2, handout=2)
    [evaluated] = [e for e in finish(evaluator) if isinstance(e, Send) and e.to == CONTROLLER]
    assert isinstance(evaluated.message, Evaluated)
    assert (evaluated.message.number, evaluated.message.loss) == (2, Loss(6.0, 2))
    assert len(measure.begun) == 2


def test_a_newer_request_replaces_one_that_is_under_way() -> None:
    evaluator, _ = make()
    asked(evaluator, 1)
    answer(evaluator, 0, [0, 0])
    evaluator.receive(0.0, BOSS, Evaluate(2))
    answer(evaluator, 1, [0])
    [evaluated] = [e for e in finish(evaluator) if isinstance(e, Send) and e.to == CONTROLLER]
    assert isinstance(evaluated.message, Evaluated)
    assert evaluated.message.number == 2
    assert evaluator.receive(0.0, BOSS, Evaluate(1)) == []  # late
    assert evaluator.due > NOW


def test_finish_is_the_end_and_nobody_else_is_heard() -> None:
    evaluator, _ = make()
    assert evaluator.receive(0.0, BOSS, Finish()) == [Done("finished")]
    assert evaluator.receive(0.0, Peer("stranger", 1), Welcome(9, 0, 0)) == []
    assert evaluator.due == NEVER


# ------------------------------------------------------------------------------- a cut evaluator


def pair() -> tuple[list[Evaluator], list[Counted]]:
    """Two partitions of an evaluator, each with a shard of its own, asked and fetched."""
    measures = [Counted(), Counted()]
    evaluators = []
    for partition, measure in enumerate(measures):
        evaluators.append(
            Evaluator(
                measure,
                (ShardSpan("shard-0", 3 * partition, 3 * partition + 3),),
                dtype="float64",
                allocate=PlainBuffer,
                origin=3 * partition,
                partition=partition,
                partners={1 - partition: f"evaluator-0.{1 - partition}"},
            )
        )
        evaluators[-1].start(0.0)
        evaluators[-1].receive(0.0, Peer("shard-0", 1), Welcome(1, 0, 0))
    return evaluators, measures


def give_parameters(evaluator: Evaluator, partition: int, number: int) -> None:
    evaluator.step(0.0)
    values = np.full(3, 10.0**partition)
    params = Params(1, number, number, 5, 0, 3 * partition, values)
    evaluator.receive(0.0, Peer("shard-0", 1), params)


def carry(evaluators: list[Evaluator], effects: list[Effects], *, hold: str = "") -> list[Message]:
    """What partitions say to each other is delivered; the rest, or what is for `hold`, is left."""
    left: list[Message] = []
    for sender, each in enumerate(effects):
        for effect in each:
            assert isinstance(effect, Send)
            message: Any = effect.message
            if effect.to.startswith("evaluator-") and effect.to != hold:
                if isinstance(message, Boxes):
                    message = msgspec.structs.replace(message, payload=message.payload.array.copy())
                peer = Peer(f"evaluator-0.{sender}", 1)
                evaluators[int(effect.to[-1])].receive(0.0, peer, message)
            else:
                left.append(message)
    return left


def run_dry(evaluators: list[Evaluator]) -> list[Message]:
    left: list[Message] = []
    while any(e.due == NOW for e in evaluators):
        left += carry(evaluators, [e.step(0.0) if e.due == NOW else [] for e in evaluators])
    return left


def test_partitions_add_their_shares_and_the_first_answers() -> None:
    evaluators, _ = pair()
    for partition, evaluator in enumerate(evaluators):
        evaluator.receive(0.0, BOSS, Evaluate(1, predictions=True))
        give_parameters(evaluator, partition, 1)
    said = run_dry(evaluators)
    assert [m.index for m in said if isinstance(m, Predictions)] == [0, 1]
    evaluators[0].receive(0.0, BOSS, Filed(1, 2))
    [evaluated] = run_dry(evaluators)
    assert isinstance(evaluated, Evaluated)
    assert evaluated.loss == Loss(2 * 33.0, 2)


def test_a_request_that_comes_before_the_last_agreement_waits_for_it() -> None:
    """The first partition is done and answers; the other still waits for what it gave last.

    Were the second to begin anew, the two would measure different batches together.
    """
    evaluators, measures = pair()
    for partition, evaluator in enumerate(evaluators):
        evaluator.receive(0.0, BOSS, Evaluate(1))
        give_parameters(evaluator, partition, 1)
    first, second = evaluators
    held: Effects = []
    while first.due == NOW or second.due == NOW:
        effects = first.step(0.0) if first.due == NOW else []
        held += [e for e in effects if isinstance(e, Send) and e.to == "evaluator-0.1"]
        if len(measures[0].measured) == 1:
            carry(evaluators, [held, []])
            held = []
        carry(evaluators, [[], second.step(0.0) if second.due == NOW else []])
    assert len(held) == 1, "the last agreement is on its way"
    for partition, evaluator in enumerate(evaluators):
        evaluator.receive(0.0, BOSS, Evaluate(2))
        if partition == 1:
            carry(evaluators, [held, []])
    assert run_dry(evaluators) == [Fetch(1, 2, 0, 1), Fetch(1, 2, 0, 1, start=3)]
    for partition, evaluator in enumerate(evaluators):
        give_parameters(evaluator, partition, 2)
    [evaluated] = [m for m in run_dry(evaluators) if isinstance(m, Evaluated)]
    assert (evaluated.number, evaluated.loss) == (2, Loss(66.0, 2))
    assert measures[0].measured == measures[1].measured == [(1, 0), (1, 1), (2, 0), (2, 1)]
