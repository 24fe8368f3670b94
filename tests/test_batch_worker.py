"""The worker of a batch method (paper A, section 4.2), alone: its shard and coordinator by hand."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from math import isnan
from typing import Any

import numpy as np
import pytest

from dbctl.region import Range
from dbctl.rights import CONTROLLER
from dbctl.roles.base import Array, BatchResult, Done, Effects, PlainBuffer, Send
from dbctl.roles.batch_worker import BatchWorker, BatchWorkerStart
from dbctl.shards import ShardSpan
from dbctl.wire import (
    Ack,
    Boxes,
    Fetch,
    Finish,
    Hello,
    Loss,
    Message,
    Need,
    Params,
    Peer,
    Position,
    Push,
    Report,
    Return,
    Welcome,
)
from dbctl.wire_batch import Computed, Order, Work

SHARD, BOSS = Peer("shard-0", 1), Peer(CONTROLLER, 1)
ROWS = 3  # of a portion
EACH = 4  # portions of a bundle
Made = Callable[[int, Array], Any]


class Given:
    """Portion p has the gradient that `made` gives, loss 10 p, and 3 rows."""

    def __init__(self, made: Made) -> None:
        self.tensors: Sequence[tuple[str, Range]] = [
            ("layers.0.weight", Range(0, 1)),
            ("layers.0.bias", Range(1, 2)),
        ]
        self.seen: list[tuple[int, int, list[float]]] = []
        self.asked: list[tuple[int, int]] = []
        self._made = made

    def portions(self, sample: int, bundle: int) -> range:
        return range(EACH * bundle, EACH * (bundle + 1))

    def prefetch(self, sample: int, bundle: int) -> None:
        self.asked.append((sample, bundle))

    def compute(
        self, parameters: Array, out: Array, *, sample: int, portion: int
    ) -> Generator[Any, Any, BatchResult]:
        self.seen.append((sample, portion, parameters.tolist()))
        out[...] = self._made(portion, parameters)
        return BatchResult(10.0 * portion, ROWS)
        yield


def powers(portion: int, parameters: Array) -> Any:
    """Sums of these say which portions are in them."""
    return (2.0**portion, -(2.0**portion))


class Worker:
    """A worker and, played by hand, its one shard: each answer is given when a test says so.

    With `portions` set, `go` stops when so many have been computed.
    """

    def __init__(self, made: Made = powers, **options: Any) -> None:
        self.gradient = Given(made)
        start = BatchWorkerStart(
            gradient=self.gradient,
            shards=(ShardSpan("shard-0", 0, 2),),
            dtype="float64",
            **options,
        )
        self.role = BatchWorker(start, allocate=PlainBuffer)
        self.now = 0.0
        self.limit = 10**9
        self.sent = self.of(self.role.start(0.0))
        self.handout = 0

    @staticmethod
    def of(effects: Effects) -> list[Message]:
        return [effect.message for effect in effects if isinstance(effect, Send)]

    def tell(self, message: Message, sender: Peer = SHARD) -> list[Message]:
        """What it says until it waits again."""
        return self.of(self.role.receive(self.now, sender, message)) + self.go()

    def go(self) -> list[Message]:
        new: list[Message] = []
        for _ in range(100):
            if self.role.due > self.now or len(self.gradient.seen) >= self.limit:
                return new
            new += self.of(self.role.step(self.now))
        raise AssertionError("never waits")

    def work(self, evaluation: int, *orders: tuple[int, ...], halt: bool = False) -> list[Message]:
        """Orders are (number, evaluation, bundle) and, if not 0, sample."""
        listed = tuple(Order(*(*order, 0)[:4]) for order in orders)
        return self.tell(Work(evaluation, listed, halt), BOSS)

    def answer(self, said: Sequence[Message], *, version: int, at: Any = (0, 0)) -> list[Message]:
        """The point of evaluation `version`, for the one fetch in `said`."""
        [fetch] = only(Fetch, said)
        self.handout += 1
        payload = np.array(at, "f8")
        return self.tell(Params(1, fetch.number, self.handout, version, 0, 0, payload))

    def later(self, seconds: float) -> list[Message]:
        self.now += seconds
        return self.go()

    def quiet(self, seconds: float = 20.0) -> list[Message]:
        """What it says while nobody answers, but for reports."""
        said: list[Message] = []
        for _ in range(round(seconds * 8)):
            said += self.later(0.125)
        return [message for message in said if not isinstance(message, Report)]


def only(kind: type, messages: Sequence[Message]) -> list[Any]:
    return [message for message in messages if type(message) is kind]


def content(push: Push) -> list[float]:
    return list(push.payload.array.tolist())


def bundle_sum(bundle: int) -> float:
    return sum(2.0**p for p in range(EACH * bundle, EACH * (bundle + 1)))


def bundle_losses(bundle: int) -> tuple[float, ...]:
    return tuple(10.0 * p for p in range(EACH * bundle, EACH * (bundle + 1)))


def joined(made: Made = powers, **options: Any) -> Worker:
    worker = Worker(made, **options)
    [report] = worker.tell(Welcome(1, 0, 7))
    assert isinstance(report, Report)
    assert report.state == "waiting"
    return worker


# --------------------------------------------------------------------------------- one order


def test_it_says_hello_until_it_is_welcomed_and_reports_that_it_waits() -> None:
    worker = Worker()
    assert worker.sent == [Hello(1)]
    assert Hello(1) in worker.quiet(1.0)
    joined()


def test_a_bundle_is_one_fetch_its_portions_one_push_and_one_answer() -> None:
    worker = joined()
    said = worker.work(3, (1, 3, 2, 5))
    assert said == [Fetch(1, 1, 0, 0)]
    said = worker.answer(said, version=3, at=(5, 6))
    assert said[0] == Return(1)  # at once, before anything is computed
    assert worker.gradient.seen == [(5, p, [5, 6]) for p in (8, 9, 10, 11)]
    [push] = only(Push, said)
    assert content(push) == [bundle_sum(2), -bundle_sum(2)]
    assert (push.seq, push.base, push.n_gradients) == (1, 3, EACH)
    assert push.position == Position(4, 3, 2)
    assert only(Computed, said) == [], "a push that is not acknowledged may be lost"
    assert worker.tell(Ack(1, 1, 1))[0] == Computed(1, 3, 2, bundle_losses(2))


def test_one_step_computes_at_most_one_portion() -> None:
    worker = joined()
    fetch = worker.work(1, (1, 1, 0))
    for n in range(1, EACH + 1):
        worker.limit = n
        worker.go() if n > 1 else worker.answer(fetch, version=1)
        assert len(worker.gradient.seen) == n


def test_the_point_is_fetched_once_an_evaluation() -> None:
    worker = joined()
    said = worker.answer(worker.work(1, (1, 1, 0), (2, 1, 1)), version=1, at=(1, 1))
    worker.tell(Ack(1, 2, 2))
    assert only(Fetch, said) == []
    said = worker.work(2, (3, 2, 0))
    worker.answer(said, version=2, at=(2, 2))
    assert [at[0] for _, _, at in worker.gradient.seen] == [1] * 8 + [2] * 4


def test_a_welcome_of_the_same_number_is_no_point() -> None:
    """The shard's version may be that of the evaluation in hand before anything was fetched."""
    worker = joined()  # the shard welcomed at 7
    assert only(Fetch, worker.work(7, (1, 7, 0))) != []


def test_the_next_bundle_is_computed_while_the_last_push_is_on_its_way() -> None:
    worker = joined()
    said = worker.answer(worker.work(1, (1, 1, 0), (2, 1, 1), (3, 1, 2)), version=1)
    pushes = only(Push, said)
    assert [content(push)[0] for push in pushes] == [bundle_sum(0), bundle_sum(1)]
    assert len(worker.gradient.seen) == 2 * EACH, "two slots: the third waits"
    said = worker.tell(Ack(1, 1, 1))
    assert only(Computed, said) == [Computed(1, 1, 0, bundle_losses(0))]
    assert [content(push)[0] for push in only(Push, said)] == [bundle_sum(2)]
    said = worker.tell(Ack(1, 3, 3))
    assert [computed.number for computed in only(Computed, said)] == [2, 3]


def test_orders_are_carried_out_by_number_and_none_left_out() -> None:
    """A Work that overtook another: the partitions of a replica must do the same orders."""
    worker = joined()
    assert worker.work(1, (2, 1, 1)) == []
    worker.answer(worker.work(1, (1, 1, 0)), version=1)
    assert [portion // EACH for _, portion, _ in worker.gradient.seen] == [0] * 4 + [1] * 4


def test_an_order_is_carried_out_once() -> None:
    worker = joined()
    worker.answer(worker.work(1, (1, 1, 0)), version=1)
    worker.work(1, (1, 1, 0))
    worker.tell(Ack(1, 1, 1))
    worker.work(1, (1, 1, 0))
    assert len(worker.gradient.seen) == EACH


def test_a_point_that_is_not_there_yet_is_fetched_again() -> None:
    """A shard that was not told of the evaluation yet hands out the one before."""
    worker = joined()
    said = worker.answer(worker.work(5, (1, 5, 0)), version=4, at=(4, 4))
    assert only(Fetch, said) == []
    said = worker.later(0.3)
    worker.answer(said, version=5, at=(5, 5))
    assert [at for _, _, at in worker.gradient.seen] == [[5, 5]] * EACH


# ------------------------------------------------------------------- lost, repeated, late, again


def test_what_is_not_answered_is_said_again() -> None:
    worker = joined()
    said = worker.work(1, (1, 1, 0))
    assert set(worker.quiet(3.0)) == set(said)
    [push] = only(Push, worker.answer(said, version=1))
    again = worker.quiet(3.0)
    assert only(Push, again)[0] == push
    assert push.payload.buffer.array.tolist() == [bundle_sum(0), -bundle_sum(0)]


def test_an_answer_is_said_again_until_no_work_has_the_order() -> None:
    worker = joined()
    worker.answer(worker.work(1, (1, 1, 0)), version=1)
    [computed] = only(Computed, worker.tell(Ack(1, 1, 1)))
    assert set(worker.quiet(1.0)) == {computed, Return(1)}
    worker.work(1, (1, 1, 0), (2, 1, 1))  # it has not come yet
    assert computed in worker.quiet(6.0)
    worker.work(1, (2, 1, 1))
    assert only(Computed, worker.quiet()) == []


def test_a_work_that_was_overtaken_silences_an_answer_only_until_the_next() -> None:
    worker = joined()
    worker.answer(worker.work(1, (1, 1, 0)), version=1)
    [computed] = only(Computed, worker.tell(Ack(1, 1, 1)))
    worker.work(0)  # older than the order
    assert only(Computed, worker.quiet()) == []
    worker.work(1, (1, 1, 0))
    assert computed in worker.quiet(1.0)


# ------------------------------------------------------------------------------- over, dropped


def dropped(said: Sequence[Message], *numbers: int) -> bool:
    found = [c.number for c in only(Computed, said) if c.losses == ()]
    return found == list(numbers) and not only(Push, said)


def test_an_order_that_is_over_before_it_is_begun_is_dropped() -> None:
    worker = joined()
    said = worker.work(2, (1, 1, 0), (2, 1, 1), (3, 2, 0))
    assert dropped(said, 1, 2)
    assert worker.answer(said, version=2)
    assert [portion for _, portion, _ in worker.gradient.seen] == [0, 1, 2, 3]


def test_an_order_is_dropped_while_its_point_is_fetched_and_the_fetch_serves_the_next() -> None:
    """One fetch a shard can be under way: its answer may be of the evaluation in hand."""
    worker = joined()
    fetch = worker.work(1, (1, 1, 0))
    said = worker.work(2, (1, 1, 0), (2, 2, 3))
    assert dropped(said, 1)
    assert only(Fetch, said) == []
    said = worker.answer(fetch, version=2, at=(2, 2))
    assert [at for _, _, at in worker.gradient.seen] == [[2, 2]] * EACH


def test_after_a_drop_a_fetch_of_the_older_point_is_made_again() -> None:
    worker = joined()
    fetch = worker.work(1, (1, 1, 0))
    worker.work(2, (2, 2, 0))
    assert worker.gradient.seen == []
    worker.answer(fetch, version=1, at=(1, 1))
    worker.answer(worker.later(0.3), version=2, at=(2, 2))
    assert [at for _, _, at in worker.gradient.seen] == [[2, 2]] * EACH


def test_a_point_that_is_waited_for_is_forgotten_with_its_order() -> None:
    """Else it would be asked for once more while the next one's is under way."""
    worker = joined()
    worker.answer(worker.work(5, (1, 5, 0)), version=4)
    said = worker.work(6, (1, 5, 0), (2, 6, 0))
    assert dropped(said, 1)
    assert len(only(Fetch, said)) == 1
    assert set(only(Fetch, worker.quiet(1.0))) == set(only(Fetch, said))


def test_a_later_point_says_that_the_order_is_over() -> None:
    worker = joined()
    said = worker.answer(worker.work(1, (1, 1, 0), (2, 1, 1)), version=2)
    assert dropped(said, 1, 2)
    assert worker.gradient.seen == []
    said = worker.work(2, (3, 2, 0))
    assert only(Fetch, said) == [], "it has that point already"
    assert len(only(Push, said)) == 1


def test_an_order_is_dropped_while_it_waits_for_a_slot() -> None:
    worker = joined()
    worker.answer(worker.work(1, (1, 1, 0), (2, 1, 1), (3, 1, 2)), version=1)
    said = worker.work(2, (1, 1, 0), (2, 1, 1), (3, 1, 2))
    assert dropped(said, 3)
    said = worker.tell(Ack(1, 2, 2))
    assert [c.losses for c in only(Computed, said)] == [bundle_losses(0), bundle_losses(1)]


@pytest.mark.parametrize("n", range(1, EACH))
def test_an_order_is_dropped_between_two_portions(n: int) -> None:
    worker = joined()
    worker.limit = n
    worker.answer(worker.work(1, (1, 1, 0)), version=1)
    worker.limit = 10**9
    said = worker.work(2, (1, 1, 0), (2, 2, 1))
    assert dropped(said, 1)
    assert len(worker.gradient.seen) == n, "at once"
    [push] = only(Push, worker.answer(said, version=2))
    assert content(push)[0] == bundle_sum(1), "nothing of the dropped one is left"
    assert (push.seq, push.position) == (1, Position(n + EACH, 2, 1))


def test_an_order_is_dropped_after_its_last_portion_is_computed_but_not_pushed() -> None:
    """Where the replica is whole it is pushed: what a shard does not count does no harm."""
    worker = joined()
    worker.limit = EACH
    worker.answer(worker.work(1, (1, 1, 0)), version=1)
    worker.limit = 10**9
    said = worker.work(2, (1, 1, 0))
    assert [push.position.epoch for push in only(Push, said)] == [1]


def test_a_work_of_an_older_evaluation_changes_nothing() -> None:
    worker = joined()
    worker.work(3)
    assert dropped(worker.work(2, (1, 2, 0)), 1)


# ---------------------------------------------------------------------------------- not finite


def bad_at(portion: int) -> Made:
    return lambda p, w: (1.0, np.inf) if p == portion else (1.0, 1.0)


@pytest.mark.parametrize("portion", [0, 2, 3])
def test_a_gradient_that_is_not_finite_is_not_pushed(portion: int) -> None:
    worker = joined(bad_at(portion))
    said = worker.answer(worker.work(1, (1, 1, 0), (2, 1, 1)), version=1)
    [computed] = only(Computed, said)
    assert (computed.number, len(computed.losses)) == (1, 1)
    assert isnan(computed.losses[0])
    assert len([p for _, p, _ in worker.gradient.seen if p < EACH]) == portion + 1
    [push] = only(Push, said)
    assert content(push) == [4.0, 4.0], "the next bundle has nothing of it"
    report = next(r for r in only(Report, said) if r.refused)
    assert said.index(report) < said.index(push), "at once, whatever comes next"
    assert report.refused_where == f"evaluation 1, portion {portion}, layers.0.bias"


def test_who_refuses_and_has_another_order_does_not_say_that_it_waits() -> None:
    worker = joined(bad_at(0))
    said = worker.answer(worker.work(1, (1, 1, 0), (2, 1, 1)), version=1)
    reports = [(report.state, report.until, report.refused) for report in only(Report, said)]
    assert reports == [("running", 1, 1), ("waiting", 2, 1)]


def test_a_loss_that_is_not_finite_is_not_pushed() -> None:
    worker = joined()

    def compute(
        parameters: Array, out: Array, *, sample: int, portion: int
    ) -> Generator[Any, Any, BatchResult]:
        out.fill(1.0)
        return BatchResult(float("nan"), ROWS)
        yield

    worker.gradient.compute = compute  # type: ignore[method-assign]
    said = worker.answer(worker.work(1, (1, 1, 0)), version=1)
    assert only(Push, said) == []
    [computed] = only(Computed, said)
    assert isnan(computed.losses[0])
    assert only(Report, said)[-1].refused_where == "evaluation 1, portion 0, the loss"


# ---------------------------------------------------------------------------------------- halt


def halts(worker: Worker, said: Sequence[Message]) -> bool:
    """It reports so, and then does nothing whatever it is told."""
    report = only(Report, said)[-1]
    n = len(worker.gradient.seen)
    more = worker.work(9, (1, 9, 0), (2, 9, 0), (3, 9, 0)) + worker.quiet()
    silent = not [m for m in more if type(m) in (Computed, Push, Fetch)]
    return report.state == "halted" and silent and len(worker.gradient.seen) == n


def test_halt_before_it_has_joined_or_was_ordered_anything() -> None:
    worker = Worker()
    assert halts(worker, worker.work(0, halt=True))
    worker = joined()
    assert halts(worker, worker.work(0, halt=True))


def test_a_work_that_the_halt_overtook_does_not_undo_it() -> None:
    worker = joined()
    worker.role.receive(0.0, BOSS, Work(1, (), True))
    assert halts(worker, worker.work(1, (1, 1, 0)))


def test_halt_while_it_fetches() -> None:
    worker = joined()
    fetch = worker.work(1, (1, 1, 0))
    said = worker.work(1, (1, 1, 0), halt=True)
    assert only(Report, said)[-1].state == "halted"
    assert only(Return, worker.answer(fetch, version=1)) == [Return(1)], "nothing is held"
    assert halts(worker, said)


def test_halt_while_it_waits_for_the_point_to_be_there() -> None:
    worker = joined()
    worker.answer(worker.work(5, (1, 5, 0)), version=4)
    assert halts(worker, worker.work(5, (1, 5, 0), halt=True))


def test_halt_between_portions() -> None:
    worker = joined()
    worker.limit = 2
    worker.answer(worker.work(1, (1, 1, 0)), version=1)
    worker.limit = 10**9
    said = worker.work(1, (1, 1, 0), halt=True)
    assert len(worker.gradient.seen) == 2
    assert only(Push, said) == []
    assert halts(worker, said)


def test_halt_waits_until_what_was_pushed_is_acknowledged() -> None:
    """Its memory is read until then."""
    worker = joined()
    worker.answer(worker.work(1, (1, 1, 0), (2, 1, 1), (3, 1, 2)), version=1)
    said = worker.work(1, (1, 1, 0), (2, 1, 1), (3, 1, 2), halt=True)
    assert said == []
    assert worker.tell(Ack(1, 1, 1)) == []
    said = worker.tell(Ack(1, 2, 2))
    assert halts(worker, said)
    assert only(Report, said)[-1].pushed == 2


def test_halt_silences_answers() -> None:
    worker = joined()
    worker.answer(worker.work(1, (1, 1, 0)), version=1)
    worker.tell(Ack(1, 1, 1))
    assert halts(worker, worker.work(1, (1, 1, 0), halt=True))


def test_finish_is_the_end() -> None:
    worker = joined()
    assert worker.role.receive(0.0, BOSS, Finish()) == [Done("finished")]


# --------------------------------------------------------------------- a partition of a replica

OTHER = Peer("worker-0.1", 1)


class Partition(Worker):
    """One of two partitions; the other, played by hand, computes nothing but agrees."""

    def __init__(self, made: Made = powers) -> None:
        super().__init__(made, partners={1: OTHER.node})
        self.tell(Welcome(1, 0, 0))

    def agree(self, number: int, *, over: bool = False, finite: bool = True) -> list[Message]:
        """The other's end of pass `number`, whose loss was 1000 there."""
        share = np.array([1000.0, finite, over], "f8")
        return self.tell(Boxes(number, "agree", 0, share), OTHER)


def agreements(said: Sequence[Message]) -> list[list[float]]:
    """What it gave the other: loss, finite, over."""
    return [m.payload.array.tolist() for m in only(Boxes, said)]


def test_partitions_agree_at_the_end_of_each_portion() -> None:
    worker = Partition()
    said = worker.answer(worker.work(1, (1, 1, 0)), version=1)
    for number in range(1, EACH + 1):
        assert agreements(said) == [[10.0 * (number - 1), 1.0, 0.0]]
        assert only(Push, said) == []
        said = worker.agree(number)
    [push] = only(Push, said)
    assert content(push)[0] == bundle_sum(0)
    [computed] = only(Computed, worker.tell(Ack(1, 1, 1)))
    assert computed.losses == (1000.0, 1010.0, 1020.0, 1030.0), "those of the whole replica"


def test_one_that_hears_late_drops_with_the_others() -> None:
    worker = Partition()
    worker.answer(worker.work(1, (1, 1, 0)), version=1)
    worker.agree(1)
    assert dropped(worker.agree(2, over=True), 1)
    assert len(worker.gradient.seen) == 2


def test_one_that_hears_early_goes_on_to_the_end_of_the_portion() -> None:
    worker = Partition()
    worker.answer(worker.work(1, (1, 1, 0)), version=1)
    said = worker.work(2, (1, 1, 0))
    assert only(Computed, said) == []
    said = worker.agree(1)
    assert agreements(said) == [[10.0, 1.0, 1.0]], "in the next portion it can say so"
    assert dropped(worker.agree(2), 1)


def test_one_that_hears_after_the_last_portion_pushes_with_the_others() -> None:
    worker = Partition()
    worker.answer(worker.work(1, (1, 1, 0)), version=1)
    for number in range(1, EACH):
        worker.agree(number)
    worker.work(2, (1, 1, 0))  # it has given its last agreement
    assert len(only(Push, worker.agree(EACH))) == 1


def test_one_that_hears_before_it_begins_goes_along_for_a_portion() -> None:
    """The other may be in that portion, and wait. What is computed on does not matter."""
    worker = Partition()
    said = worker.work(2, (1, 1, 0), (2, 2, 1))
    assert agreements(worker.go() + said) == [[0.0, 1.0, 1.0]]
    assert worker.gradient.asked == [(0, 1)], "rows of the next order, not of this one"
    said += worker.agree(1)
    assert dropped(said, 1)
    worker.answer(said, version=2, at=(2, 2))
    assert worker.gradient.seen == [(0, 0, [0, 0]), (0, EACH, [2, 2])]


def test_one_that_is_fetching_when_it_hears_goes_along_and_gives_the_answer_back() -> None:
    worker = Partition()
    fetch = worker.work(1, (1, 1, 0))
    said = worker.work(2, (1, 1, 0))
    assert agreements(said) == [[0.0, 1.0, 1.0]]
    assert only(Return, worker.answer(fetch, version=2)) == [Return(1)], "also in a pass"
    assert dropped(worker.agree(1), 1)


def test_one_whose_share_is_finite_refuses_with_the_other() -> None:
    worker = Partition()
    worker.answer(worker.work(1, (1, 1, 0)), version=1)
    worker.agree(1)
    said = worker.agree(2, finite=False)
    assert only(Push, said) == []
    [computed] = only(Computed, said)
    assert isnan(computed.losses[0])
    assert only(Report, said)[0].refused_where == "evaluation 1, portion 1, another partition"


def test_one_that_is_over_does_not_count_what_is_not_finite() -> None:
    """It computed on whatever it held."""
    worker = Partition(bad_at(0))
    worker.work(2, (1, 1, 0))
    said = worker.agree(1)
    assert dropped(said, 1)
    assert [report.refused for report in only(Report, said)] == [0]


def test_halt_leaves_a_pass_where_it_stands_and_asks_nobody() -> None:
    worker = Partition()
    worker.answer(worker.work(1, (1, 1, 0)), version=1)
    assert only(Need, worker.later(0.3)) == [Need(1, "agree", 0)]
    said = worker.work(1, (1, 1, 0), halt=True)
    assert only(Report, said)[-1].state == "halted"
    assert only(Need, worker.quiet()) == []
    assert agreements(worker.tell(Need(1, "agree", 0), OTHER)) == [[0.0, 1.0, 0.0]]


# --------------------------------------------------------------------------- prefetch, reports


def test_rows_are_asked_for_ahead_once_an_order() -> None:
    worker = joined()
    said = worker.work(1, (1, 1, 0, 6))
    assert worker.gradient.asked == [(6, 0)], "while the point is fetched"
    worker.limit = 1
    worker.answer(said, version=1)
    worker.limit = 2
    worker.work(1, (1, 1, 0, 6), (2, 1, 1, 6), (3, 1, 2, 6))
    assert worker.gradient.asked == [(6, 0), (6, 1)], "the next one's while this is computed"
    worker.limit = 10**9
    worker.go()
    worker.tell(Ack(1, 1, 1))
    assert worker.gradient.asked == [(6, 0), (6, 1), (6, 2)]


def test_rows_of_an_order_that_is_over_are_not_asked_for() -> None:
    worker = joined()
    worker.work(2, (1, 1, 0), (2, 2, 5))
    assert worker.gradient.asked == [(0, 5)]


def test_reports_are_totals_and_say_where_it_stands() -> None:
    worker = joined()
    said = worker.work(1, (1, 1, 0), (2, 1, 1))
    worker.now = 2.0
    worker.answer(said, version=1)
    worker.now = 3.0
    [done] = only(Computed, worker.tell(Ack(1, 1, 1)))
    assert done.number == 1
    worker.now = 3.6
    report = only(Report, worker.go())[-1]
    assert (report.state, report.position, report.until) == ("waiting", Position(8, 1, 1), 2)
    assert (report.pushed, report.acked, report.examples) == (2, 1, 8 * ROWS)
    assert report.gradients == 8
    assert report.fetch_wait_s == 2.0
    assert report.epoch_loss == Loss(10.0 * sum(range(8)), 8 * ROWS)
    assert (report.bytes_fetched, report.bytes_pushed) == (16, 32)


def test_time_is_counted_to_what_it_went_by_for() -> None:
    worker = joined()
    fetch = worker.work(1, (1, 1, 0), (2, 1, 1), (3, 1, 2))
    worker.limit = 1
    worker.answer(fetch, version=1)
    for n in range(2, 2 * EACH + 2):  # each portion takes a second
        worker.now += 1.0
        worker.limit = n
        worker.go()
    worker.limit = 10**9
    worker.go()
    worker.now += 5.0  # for an acknowledgement
    worker.tell(Ack(1, 1, 1))
    report = only(Report, worker.later(0.6))[-1]
    assert report.compute_s == pytest.approx(8.0)
    assert report.push_wait_s == pytest.approx(5.0)


def test_an_evaluation_s_loss_is_kept_when_the_next_begins() -> None:
    worker = joined()
    worker.answer(worker.work(1, (1, 1, 0)), version=1)
    worker.tell(Ack(1, 1, 1))
    worker.answer(worker.work(2, (2, 2, 1)), version=2)
    report = only(Report, worker.later(1.0))[-1]
    assert report.last_epoch_loss == Loss(sum(bundle_losses(0)), EACH * ROWS)
    assert report.epoch_loss == Loss(sum(bundle_losses(1)), EACH * ROWS)


def test_a_partition_without_parameters_fetches_and_pushes_nothing() -> None:
    worker = Worker.__new__(Worker)
    worker.gradient = Given(lambda p, w: np.empty(0))
    worker.gradient.tensors = []
    start = BatchWorkerStart(gradient=worker.gradient, shards=(), dtype="float64")
    worker.role = BatchWorker(start, allocate=PlainBuffer)
    worker.now, worker.limit, worker.handout = 0.0, 10**9, 0
    assert worker.of(worker.role.start(0.0)) == []
    worker.go()
    said = worker.work(1, (1, 1, 0), (2, 1, 1))
    assert [c.losses for c in only(Computed, said)] == [bundle_losses(0), bundle_losses(1)]
    assert len(only(Computed, said)) + len(only(Report, said)) == len(said)
