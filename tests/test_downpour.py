"""The Downpour client (paper A, section 4.1, appendix 7.1): alone, and over a network in memory."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import pytest

from dbctl.experiment.specs import StopSpec
from dbctl.launch.inproc import Network
from dbctl.optim.rules import SgdRuleSpec
from dbctl.optim.updates import make_rule
from dbctl.region import Range
from dbctl.rights import CONTROLLER
from dbctl.roles.base import (
    NEVER,
    NOW,
    Array,
    BatchResult,
    Done,
    Effects,
    PlainBuffer,
    Send,
)
from dbctl.roles.coordinator import Coordinator, CoordinatorStart
from dbctl.roles.downpour import Downpour, DownpourStart
from dbctl.roles.figures import Part
from dbctl.roles.shard import Shard, ShardStart
from dbctl.shards import ShardSpan
from dbctl.wire import (
    BEGINNING,
    Ack,
    Fetch,
    Finish,
    Grant,
    Halt,
    Hello,
    Loss,
    Message,
    Params,
    Peer,
    Position,
    Push,
    Report,
    Return,
    Welcome,
)

SHARD, BOSS = Peer("shard-0", 1), Peer(CONTROLLER, 1)
Batch = Callable[[Position, Array], Any]


class Given:
    """A gradient that a function gives; its loss is 2 a row, of 3 rows."""

    def __init__(self, batch: Batch, *, size: int = 2, steps_per_epoch: int = 4) -> None:
        self.tensors: Sequence[tuple[str, Range]] = [
            ("layers.0.weight", Range(0, size - 1)),
            ("layers.0.bias", Range(size - 1, size)),
        ]
        self.steps_per_epoch = steps_per_epoch
        self.seen: list[tuple[Position, list[float]]] = []
        self._batch = batch

    def compute(
        self, at: Position, parameters: Array, out: Array
    ) -> Generator[Any, Any, BatchResult]:
        self.seen.append((at, parameters.tolist()))
        out[...] = self._batch(at, parameters)
        return BatchResult(6.0, 3)
        yield


def ones(at: Position, parameters: Array) -> Any:
    return 1.0


class Worker:
    """A worker and, played by hand, its one shard: each answer is given when a test says so."""

    def __init__(self, batch: Batch = ones, *, begin: Position = BEGINNING, **options: Any) -> None:
        self.gradient = Given(batch)
        start = DownpourStart(
            gradient=self.gradient,
            shards=(ShardSpan("shard-0", 0, 2),),
            rate=lambda n: 0.5,
            dtype="float64",
            position=begin,
            **({"overlap": False} | options),
        )
        self.role = Downpour(start, allocate=PlainBuffer)
        self.now = 0.0
        self.sent: list[Message] = self.of(self.role.start(0.0))
        self.handout = 0

    @staticmethod
    def of(effects: Effects) -> list[Message]:
        return [effect.message for effect in effects if isinstance(effect, Send)]

    def tell(self, message: Message, sender: Peer = SHARD) -> list[Message]:
        """What it says until it waits again."""
        new = self.of(self.role.receive(self.now, sender, message))
        return new + self.go()

    def go(self) -> list[Message]:
        new: list[Message] = []
        for _ in range(100):
            if self.role.due > self.now:
                return new
            new += self.of(self.role.step(self.now))
        raise AssertionError("never waits")

    def join(self, until: int = 100, **grant: Any) -> list[Message]:
        self.tell(Welcome(1, 0, 0))
        return self.grant(until, **grant)

    def grant(self, until: int, number: int = 1, **fields: Any) -> list[Message]:
        return self.tell(Grant(number, until, **fields), BOSS)

    def answer(self, fetch: Message, values: Any = (0, 0), **fields: int) -> list[Message]:
        assert isinstance(fetch, Fetch)
        self.handout += 1
        given = {"version": 0, "holds": 0, "handout": self.handout} | fields
        payload = np.array(values, "f8")
        return self.tell(Params(term=1, number=fetch.number, start=0, payload=payload, **given))


def only(kind: type, messages: list[Message]) -> list[Any]:
    return [message for message in messages if type(message) is kind]


def content(push: Push) -> list[float]:
    return list(push.payload.array.tolist())


# ------------------------------------------------------------------------- joining and granting


def test_it_says_hello_until_it_is_welcomed_then_asks_for_a_grant() -> None:
    worker = Worker()
    assert worker.sent == [Hello(1)]
    worker.now = 0.3
    assert only(Hello, worker.go()) == [Hello(1)]
    [report] = worker.tell(Welcome(1, 0, 0))
    assert isinstance(report, Report)
    assert report.state == "waiting"
    worker.now = 1.0
    assert only(Hello, worker.go()) == []


def test_one_step_is_fetch_return_compute_push() -> None:
    worker = Worker()
    assert only(Fetch, worker.join()) == [Fetch(1, 1, 0, 0)]
    said = worker.answer(Fetch(1, 1, 0, 0), (5, 7), version=9)
    assert said[0] == Return(1)  # at once, before anything is computed
    [push] = only(Push, said)
    assert worker.gradient.seen == [(Position(0, 0, 0), [5, 7])]
    assert (push.seq, push.base, push.n_gradients, push.position) == (1, 9, 1, Position(1, 0, 1))
    assert (push.start, push.mark, push.returned, content(push)) == (0, 0, 1, [1, 1])


def test_blocking_names_its_last_push_in_the_next_fetch() -> None:
    """docs/protocol.md, rule 6."""
    worker = Worker()
    [fetch] = only(Fetch, worker.join())
    said = worker.answer(fetch)
    assert only(Fetch, said) == [Fetch(1, 2, 1, 1)]


@pytest.mark.parametrize("partners", [{}, {1: "replica-0.1"}])
def test_one_of_few_blocking_replicas_gives_back_with_its_push(partners: dict[int, str]) -> None:
    """What it was handed is read where it lies: no copy, and no word for it."""
    worker = Worker(in_place=True, partners=partners)
    [fetch] = only(Fetch, worker.join(1))
    sent = worker.answer(fetch, [4, 5])
    assert worker.gradient.seen == [(BEGINNING, [4, 5])]
    assert only(Return, sent) == []
    assert [push.returned for push in only(Push, sent)] == ([] if partners else [1])


def test_what_is_read_in_place_is_kept_no_longer_than_a_step() -> None:
    """Protocol, rule 8: nobody holds a hand-out while it waits for a grant, or for nothing."""
    worker = Worker(in_place=True, n_push=2)
    [fetch] = only(Fetch, worker.join(2))
    [fetch] = only(Fetch, worker.answer(fetch))  # the push of step 0 has said so
    assert fetch.returned == 1
    assert only(Return, worker.answer(fetch)) == [Return(2)], "no push, and no grant"
    worker = Worker(bad_at(0), in_place=True)
    [fetch] = only(Fetch, worker.join(1))
    assert only(Return, worker.answer(fetch)) == [Return(1)], "its gradient was refused"
    worker = Worker(in_place=True)
    [fetch] = only(Fetch, worker.join(5))
    worker.tell(Halt(False), BOSS)
    assert only(Return, worker.answer(fetch)) == [Return(1)], "halted before it computed"
    worker.now += 1.0
    assert only(Return, worker.go()) == [Return(1)], "nothing acknowledges it"


def test_a_report_between_a_pass_and_its_push_counts_neither() -> None:
    """Examples and position are of the same step, or a resume would count some twice."""
    worker = Worker(in_place=True)
    [fetch] = only(Fetch, worker.join())
    [fetch] = only(Fetch, worker.answer(fetch))
    worker.now += 10.0  # a report is due when the next pass is over, and nothing else is
    [report] = only(Report, worker.answer(fetch, holds=1))
    assert report.examples == 3 * report.position.step, report


@pytest.mark.parametrize("options", [{"overlap": True}, {"n_fetch": 2}, {}])
def test_a_replica_that_others_wait_for_or_that_moves_its_copy_gives_back_at_once(
    options: dict[str, Any],
) -> None:
    worker = Worker(**options)
    [fetch] = only(Fetch, worker.join(1))
    sent = worker.answer(fetch, [4, 5])
    assert only(Return, sent) == [Return(1)]


def test_an_older_grant_is_ignored() -> None:
    worker = Worker()
    worker.join(until=0, number=5)
    assert only(Fetch, worker.grant(50, number=4)) == []
    assert only(Fetch, worker.grant(50, number=6)) == [Fetch(1, 1, 0, 0)]


def test_it_does_exactly_what_it_was_granted_and_reports() -> None:
    worker = Worker()
    [fetch] = only(Fetch, worker.join(until=2))
    [fetch] = only(Fetch, worker.answer(fetch))
    said = worker.answer(fetch, holds=1)
    assert only(Fetch, said) == []
    assert worker.role.at == Position(2, 0, 2)
    report = only(Report, said)[-1]
    assert (report.state, report.position, report.until) == ("waiting", Position(2, 0, 2), 2)


def states(said: list[Message]) -> list[tuple[str, int]]:
    return [(report.state, report.position.step) for report in only(Report, said)]


def test_a_report_says_waiting_only_when_it_has_nothing_to_do() -> None:
    """Not at half of a grant, where it asks for the next one."""
    worker = Worker(n_fetch=100, n_push=100)
    [fetch] = only(Fetch, worker.join(until=8))
    assert states(worker.answer(fetch)) == [("running", 1), ("running", 4), ("waiting", 8)]
    assert states(worker.grant(12, number=2)) == [("running", 10), ("waiting", 12)]


def test_who_was_granted_steps_before_it_joined_does_not_say_that_it_waits() -> None:
    worker = Worker()
    worker.grant(8)
    assert states(worker.tell(Welcome(1, 0, 0))) == [("running", 0)]


def test_messages_of_another_term_are_ignored() -> None:
    worker = Worker()
    [fetch] = only(Fetch, worker.join())
    payload = np.zeros(2)
    assert worker.tell(Params(2, fetch.number, 1, 0, 0, 0, payload)) == []
    assert worker.tell(Ack(2, 9, 9)) == []
    assert worker.tell(Welcome(2, 0, 0)) == []  # a second welcome changes nothing
    assert only(Push, worker.answer(fetch)) != []


def test_a_repeated_answer_is_ignored() -> None:
    worker = Worker()
    [fetch] = only(Fetch, worker.join())
    said = worker.answer(fetch)
    again = Params(1, fetch.number, 1, 0, 0, 0, np.full(2, 99.0))
    assert worker.tell(again) == []
    [second] = only(Fetch, said)
    old = Params(1, second.number, 1, 0, 0, 0, np.full(2, 99.0))  # a hand-out it gave back
    assert worker.tell(old) == []
    worker.answer(second, (3, 3))
    assert worker.gradient.seen[1][1] == [3, 3]


# ------------------------------------------------------------------------------ window, sent again


def test_no_more_pushes_are_under_way_than_slots() -> None:
    """docs/protocol.md, rule 4. It fetches and gives back, but does not compute."""
    worker = Worker(slots=2)
    [fetch] = only(Fetch, worker.join())
    [fetch] = only(Fetch, worker.answer(fetch))
    [fetch] = only(Fetch, worker.answer(fetch))
    assert worker.answer(fetch, (4, 4)) == [Return(3)]
    assert len(worker.gradient.seen) == 2
    said = worker.tell(Ack(1, 1, 1))
    assert [push.seq for push in only(Push, said)] == [3]


def test_an_answer_acknowledges_what_it_holds() -> None:
    """One slot, and the Ack is lost: the answer that the push is in frees it."""
    worker = Worker(slots=1)
    [fetch] = only(Fetch, worker.join())
    [fetch] = only(Fetch, worker.answer(fetch))
    assert worker.answer(fetch, holds=0) == [Return(2)], "of nothing that is not in it"
    [fetch] = only(Fetch, worker.tell(Ack(1, 1, 1)))
    said = worker.answer(fetch, holds=2)
    assert [push.seq for push in only(Push, said)] == [3]
    [fetch] = only(Fetch, said)
    again = worker.answer(fetch, holds=3)
    worker.now += 40
    again += worker.go()
    assert [push.seq for push in only(Push, again)] == [4, 4], "3 is not sent again"


def test_an_unacknowledged_push_is_sent_again_with_doubling_back_off() -> None:
    worker = Worker()
    [fetch] = only(Fetch, worker.join(until=1))
    [push] = only(Push, worker.answer(fetch))
    times = []
    for tick in range(1, 600):
        worker.now = tick * 0.125
        times += [worker.now] * len(only(Push, worker.go()))
    assert [b - a for a, b in zip([0.0, *times], times, strict=False)][:9] == [
        *(0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 20.0, 20.0)
    ]
    worker.tell(Ack(1, 1, 1))
    worker.now += 40
    assert only(Push, worker.go()) == []
    assert push.payload.buffer.array.tolist() == [1, 1]


def test_an_ack_is_cumulative() -> None:
    worker = Worker(slots=3)
    [fetch] = only(Fetch, worker.join(until=3))
    for _ in range(2):
        [fetch] = only(Fetch, worker.answer(fetch))
    report = only(Report, worker.answer(fetch))[-1]
    assert (report.pushed, report.acked) == (3, 0)
    worker.tell(Ack(1, 3, 3))
    worker.tell(Ack(1, 2, 2))  # late
    worker.now = 10.0
    report = only(Report, worker.go())[-1]
    assert (report.pushed, report.acked) == (3, 3)


# ------------------------------------------------------------------------------------ paper A, 7.1


def test_pushes_of_one_five_and_five_gradients_for_n_push_five() -> None:
    """Appendix 7.1: `if step mod n_push == 0` with step from 0."""
    worker = Worker(n_push=5, n_fetch=100, slots=3)
    [fetch] = only(Fetch, worker.join(until=11, last=True))
    pushes = only(Push, worker.answer(fetch))
    assert [(p.n_gradients, content(p)[0], p.position.step) for p in pushes] == [
        *((1, 1, 1), (5, 5, 6), (5, 5, 11))
    ]


def test_fetches_every_n_fetch_steps_and_local_steps_between() -> None:
    """Section 4.1 and appendix 7.1: parameters <- parameters - alpha * gradient."""
    worker = Worker(n_fetch=3)
    [fetch] = only(Fetch, worker.join(until=4))
    said = worker.answer(fetch, (10, 20))
    said += worker.tell(Ack(1, 1, 1))
    said += worker.tell(Ack(1, 2, 2))
    assert [values for _, values in worker.gradient.seen] == [[10, 20], [9.5, 19.5], [9, 19]]
    [fetch] = only(Fetch, said)
    assert fetch.after == 3
    worker.tell(Ack(1, 3, 3))
    worker.answer(fetch, (7, 7), holds=3)
    assert worker.gradient.seen[3] == (Position(3, 0, 3), [7, 7])


def test_positions_count_passes_over_its_own_rows() -> None:
    worker = Worker(n_fetch=100, n_push=100)
    [fetch] = only(Fetch, worker.join(until=6))
    worker.answer(fetch)
    assert [at for at, _ in worker.gradient.seen][3:] == [
        Position(3, 0, 3),
        Position(4, 1, 0),
        Position(5, 1, 1),
    ]


def test_overlap_asks_one_step_earlier_and_reads_its_own_writes() -> None:
    """Ours: the answer holds all but the last push, which is subtracted while copying."""
    worker = Worker(overlap=True)
    [first] = only(Fetch, worker.join())
    said = worker.answer(first, (10, 20))
    [ahead] = only(Fetch, said)
    assert ahead.after == 0
    assert said.index(ahead) < said.index(only(Push, said)[0])
    said = worker.answer(ahead, (10, 20), holds=0)
    assert worker.gradient.seen[1][1] == [9.5, 19.5]
    [third] = only(Fetch, said)
    assert third.after == 0  # asked while push 1 is the last: it may be missing from the answer
    worker.tell(Ack(1, 1, 1))
    said = worker.answer(third, (9.5, 19.5), holds=1)
    assert worker.gradient.seen[2][1] == [9, 19]
    assert only(Fetch, said)[0].after == 1


def test_a_resumed_replica_begins_with_a_fetch_whatever_its_step() -> None:
    worker = Worker(n_fetch=5, begin=Position(7, 1, 3))
    assert only(Fetch, worker.join(until=8)) == [Fetch(1, 1, 0, 0)]


def test_a_resumed_replica_goes_on_at_its_position() -> None:
    worker = Worker(begin=Position(7, 1, 3))
    [fetch] = only(Fetch, worker.join(until=8))
    [push] = only(Push, worker.answer(fetch))
    assert push.seq == 1  # seq counts the pushes of an incarnation
    assert push.position == Position(8, 2, 0)


def test_clipping_acts_on_the_gradient_before_accruing() -> None:
    worker = Worker(lambda at, w: (3.0, 4.0), clip=1.0, n_push=2, n_fetch=100)
    [fetch] = only(Fetch, worker.join(until=3))
    said = worker.answer(fetch) + worker.tell(Ack(1, 1, 1))
    assert [content(p) for p in only(Push, said)] == [
        pytest.approx([0.6, 0.8]),
        pytest.approx([1.2, 1.6]),
    ]


# ------------------------------------------------------------------------- gradients not finite


def bad_at(*steps: int) -> Batch:
    return lambda at, w: (1.0, np.nan) if at.step in steps else (1.0, 1.0)


def test_a_refused_gradient_uses_no_seq_and_the_next_push_carries_the_position() -> None:
    """reliability.md, G14."""
    worker = Worker(bad_at(0))
    [fetch] = only(Fetch, worker.join())
    said = worker.answer(fetch)
    assert only(Push, said) == []
    [report] = [r for r in only(Report, said) if r.refused]
    assert (report.refused, report.refused_in_a_row) == (1, 1)
    assert report.refused_where == "step 0, layers.0.bias"
    [fetch] = only(Fetch, said)
    [push] = only(Push, worker.answer(fetch))
    assert (push.seq, push.position, push.n_gradients) == (1, Position(2, 0, 2), 1)


def test_a_refused_gradient_does_not_spoil_what_is_accrued_and_the_next_step_fetches() -> None:
    worker = Worker(bad_at(2), n_push=5, n_fetch=100)
    [fetch] = only(Fetch, worker.join(until=6))
    said = worker.answer(fetch)
    [again] = only(Fetch, said)
    assert worker.role.at.step == 3
    said = worker.answer(again, (50, 50), holds=1)
    [push] = only(Push, said)
    assert (push.n_gradients, content(push), push.position.step) == (4, [4, 4], 6)


def test_a_loss_that_is_not_finite_is_refused_too() -> None:
    worker = Worker()
    worker.gradient.compute = lossless(worker.gradient)  # type: ignore[method-assign]
    [fetch] = only(Fetch, worker.join(until=1))
    said = worker.answer(fetch)
    assert only(Push, said) == []
    assert next(r.refused_where for r in only(Report, said) if r.refused) == "step 0, the loss"


def lossless(gradient: Given) -> Any:
    def compute(at: Position, parameters: Array, out: Array) -> Generator[Any, Any, BatchResult]:
        out.fill(1.0)
        return BatchResult(float("inf"), 3)
        yield

    return compute


def test_refusals_in_a_row_are_counted_and_end_with_a_good_one() -> None:
    worker = Worker(bad_at(0, 1))
    said = worker.join(until=3)
    rows = []
    for _ in range(3):
        said = worker.answer(only(Fetch, said)[0])
        rows.append(only(Report, said)[-1].refused_in_a_row if only(Report, said) else None)
    worker.now = 5.0
    report = only(Report, worker.go())[-1]
    assert rows[:2] == [1, 2]
    assert (report.refused, report.refused_in_a_row, report.examples) == (2, 0, 3)


# ---------------------------------------------------------------------------------- marks, the end


def test_the_first_push_at_or_after_the_marked_step_carries_the_mark_once() -> None:
    worker = Worker(n_push=2, n_fetch=100, slots=8)
    [fetch] = only(Fetch, worker.join(until=8, mark=3, mark_step=4))
    pushes = only(Push, worker.answer(fetch))
    assert [(p.position.step, p.mark) for p in pushes] == [(1, 0), (3, 0), (5, 3), (7, 0)]
    more = only(Push, worker.grant(10, number=2, mark=3, mark_step=4))  # said again
    assert [(p.position.step, p.mark) for p in more] == [(9, 0)]


def test_a_mark_for_the_very_step_of_a_push_goes_with_it() -> None:
    worker = Worker(n_push=2, n_fetch=100, slots=8)
    [fetch] = only(Fetch, worker.join(until=6, mark=1, mark_step=3))
    assert [p.mark for p in only(Push, worker.answer(fetch))] == [0, 1, 0]


def test_the_last_grant_pushes_what_is_unpushed_and_finishes_when_all_is_acknowledged() -> None:
    worker = Worker(n_push=5, n_fetch=100)
    [fetch] = only(Fetch, worker.join(until=3, last=True))
    said = worker.answer(fetch)
    assert [(p.seq, p.n_gradients) for p in only(Push, said)] == [(1, 1), (2, 2)]
    assert worker.tell(Ack(1, 1, 1)) == []
    [report] = worker.tell(Ack(1, 2, 2))
    assert isinstance(report, Report)
    assert (report.state, report.pushed, report.acked) == ("finished", 2, 2)
    assert (report.examples, report.gradients) == (9, 3)
    assert report.epoch_loss == Loss(18.0, 9)


def test_a_finished_replica_goes_on_with_steps_that_a_dead_one_left() -> None:
    worker = Worker()
    [fetch] = only(Fetch, worker.join(until=1, last=True))
    worker.answer(fetch)
    worker.tell(Ack(1, 1, 1))
    assert only(Fetch, worker.grant(2, number=2, last=True)) == [Fetch(1, 2, 1, 1)]


@pytest.mark.parametrize(("push", "pushes"), [(True, 2), (False, 1)])
def test_halt_stops_after_the_step_in_hand(push: bool, pushes: int) -> None:
    """Stop reached: what is unpushed is pushed. A signal: those steps are done again."""
    worker = Worker(n_push=5, n_fetch=2)
    [fetch] = only(Fetch, worker.join())
    said = worker.answer(fetch)
    assert worker.role.at.step == 2
    [fetch] = only(Fetch, said)
    said += worker.tell(Halt(push), BOSS)
    said += worker.answer(fetch, holds=1)
    for seq in (1, 2):
        said += worker.tell(Ack(1, seq, seq))
    assert worker.role.at.step == 2
    assert len(only(Push, said)) == pushes
    assert only(Report, said)[-1].state == "halted"
    assert worker.role.due > worker.now


def test_finish_is_the_end() -> None:
    worker = Worker()
    assert worker.role.receive(0.0, BOSS, Finish()) == [Done("finished")]


def test_a_replica_without_a_grant_rests() -> None:
    worker = Worker()
    worker.tell(Welcome(1, 0, 0))
    assert NOW < worker.role.due < NEVER


# -------------------------------------------------------------- clusters in memory, closed forms


def cluster(
    batch: Batch,
    *,
    replicas: int,
    stop: StopSpec,
    size: int = 4,
    shards: int = 2,
    steps_per_epoch: int = 10,
    options: dict[str, Any] | None = None,
    rules: dict[str, Any] | None = None,
) -> tuple[Network, list[Given], Array]:
    """A whole run with rate 0.5 (a power of two: sums are exact) from parameters 0, float64."""
    net = Network(1)
    cuts = Range(0, size).split(shards)
    spread = tuple(ShardSpan(f"shard-{i}", c.start, c.stop) for i, c in enumerate(cuts))
    rule = make_rule(SgdRuleSpec(rate=0.5), fast=False)
    servers = []
    for span, cut in zip(spread, cuts, strict=True):
        start = ShardStart(name=span.node, span=cut, values=np.zeros(len(cut)), state={}, rule=rule)
        servers.append(Shard(start, allocate=PlainBuffer))
        net.add(span.node, servers[-1])
    gradients = []
    for replica in range(replicas):
        gradients.append(Given(batch, size=size, steps_per_epoch=steps_per_epoch))
        worker = DownpourStart(
            gradient=gradients[-1],
            shards=spread,
            rate=lambda n: 0.5,
            dtype="float64",
            **(options or {}),
        )
        net.add(f"worker-{replica}.0", Downpour(worker, allocate=PlainBuffer))
    part = Part(rows=3 * steps_per_epoch, steps_per_epoch=steps_per_epoch)
    net.add(
        CONTROLLER,
        Coordinator(
            CoordinatorStart(
                workers={r: (f"worker-{r}.0",) for r in range(replicas)},
                parts=dict.fromkeys(range(replicas), part),
                shards=[span.node for span in spread],
                stop=stop,
                save=False,
                **(rules or {}),
            )
        ),
    )
    assert net.run(until=lambda: CONTROLLER in net.done, limit_s=1000)
    assert net.done[CONTROLLER] == Done("done", "")
    return net, gradients, np.concatenate([server.values for server in servers])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("n_fetch", "n_push"), [(1, 1), (3, 5), (5, 3), (1, 4)])
def test_a_constant_gradient_has_a_closed_form(overlap: bool, n_fetch: int, n_push: int) -> None:
    """A sum does not care how it was accrued or when it was fetched: w = -rate x steps x g."""
    options = {"overlap": overlap, "n_fetch": n_fetch, "n_push": n_push}
    stop = StopSpec(steps=37)
    _, [gradient], values = cluster(ones, replicas=1, stop=stop, options=options)
    assert values.tolist() == [-0.5 * 37] * 4
    if overlap or n_push == 1:
        # And the worker always reads its own writes.
        assert [w[0] for _, w in gradient.seen] == [-0.5 * s for s in range(37)]


def test_what_a_blocking_worker_with_n_fetch_3_and_n_push_5_sees() -> None:
    """Appendix 7.1 by hand: a fetch replaces the local steps that were not pushed yet."""
    options = {"overlap": False, "n_fetch": 3, "n_push": 5}
    _, [gradient], _ = cluster(ones, replicas=1, stop=StopSpec(steps=12), options=options)
    pushed = [0, 0, 0, 1, 1, 1, 6, 6, 6, 6, 6, 6]  # gradients in the server at the last fetch
    local = [0, 1, 2] * 4
    expected = [-0.5 * (p + n) for p, n in zip(pushed, local, strict=True)]
    assert [w[0] for _, w in gradient.seen] == expected


@pytest.mark.parametrize("replicas", [1, 3, 8])
def test_exactly_n_steps_with_any_count_of_replicas(replicas: int) -> None:
    _, gradients, values = cluster(ones, replicas=replicas, stop=StopSpec(steps=100))
    assert sum(len(gradient.seen) for gradient in gradients) == 100
    assert values.tolist() == [-50] * 4


def test_eight_replicas_of_a_thousand_steps_are_exactly_eight_thousand() -> None:
    stop = StopSpec(epochs=100)
    _, gradients, values = cluster(ones, replicas=8, stop=stop, options={"n_push": 5})
    assert [len(gradient.seen) for gradient in gradients] == [1000] * 8
    assert values.tolist() == [-4000] * 4


def test_warmstart_is_one_replica_and_then_all() -> None:
    """Paper A2: one replica trains alone at first."""
    _, gradients, values = cluster(
        ones, replicas=3, stop=StopSpec(steps=120), rules={"warmstart": 30}
    )
    assert values.tolist() == [-60] * 4
    for gradient in gradients[1:]:
        assert gradient.seen
        assert gradient.seen[0][1][0] <= -0.5 * 30  # its first parameters hold the warmstart
    assert [w[0] for _, w in gradients[0].seen[:30]] == [-0.5 * s for s in range(30)]


def test_epochs_end_each_replica_after_its_own_passes() -> None:
    _, gradients, _ = cluster(ones, replicas=2, stop=StopSpec(epochs=3), steps_per_epoch=7)
    assert [len(gradient.seen) for gradient in gradients] == [21, 21]
    assert [at for at, _ in gradients[0].seen][-1] == Position(20, 2, 6)
