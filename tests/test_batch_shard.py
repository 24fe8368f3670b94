"""A batch method's shard: each command and each bundle once, readers and cuts as in Downpour."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from batch_twin import Executor
from shard_talk import BOSS, A, B, fetched, messages, parts, reported

from dbctl.optim.batch import LineSearchSpec
from dbctl.optim.commands import (
    GRADIENT,
    PARAMETERS,
    TRIAL,
    Assignment,
    Command,
    Evaluate,
    Evaluation,
    Iterated,
)
from dbctl.optim.lbfgs import lbfgs, saved_names
from dbctl.region import Range
from dbctl.rights import CONTROLLER
from dbctl.roles.base import NEVER, NOW, Array, Effects, PlainBuffer, Send
from dbctl.roles.batch_shard import BatchShard, BatchShardStart
from dbctl.wire import (
    Ack,
    Cut,
    Gone,
    Hello,
    Message,
    Peer,
    Position,
    Push,
    Return,
    Welcome,
)
from dbctl.wire_batch import Begin, Collect, Execute, Executed

READER = Peer("evaluator-0", 1)
TWICE: Assignment = (TRIAL, ((2.0, PARAMETERS),))


def welcomed(
    values: Iterable[float] = (1, 2, 3, 4), *, dtype: str = "f8", start: int = 0, **changes: Any
) -> BatchShard:
    array = np.array(list(values), dtype)
    given: dict[str, Any] = {"kept": (PARAMETERS, GRADIENT)}
    begin = BatchShardStart(
        name="shard-0",
        span=Range(start, start + len(array)),
        values=array,
        **(given | changes),
    )
    shard = BatchShard(begin, allocate=PlainBuffer)
    for peer in (A, B, READER):
        [effect] = shard.receive(0.0, peer, Hello(1))
        assert effect == Send(peer.node, Welcome(begin.term, 0, begin.version))
    return shard


def execute(number: int, *assign: Assignment, rows: Sequence[str] = (), **swap: Any) -> Execute:
    return Execute(number, assign, tuple(swap.get("swap", ())), tuple(rows), tuple(rows))


def begin(number: int, evaluation: int, *assign: Assignment, point: str = TRIAL) -> Begin:
    return Begin(number, evaluation, assign, point)


def collect(number: int, evaluation: int, *, examples: int = 1, rows: tuple[str, ...] = ()) -> Any:
    return Collect(number, evaluation, examples, GRADIENT, rows, rows)


def bundle(
    seq: int, evaluation: int, index: int, gradient: Sequence[float] = (1, 1, 1, 1), start: int = 0
) -> Push:
    at = Position(seq, evaluation, index)
    return Push(1, seq, start, evaluation, 1, at, 0, 0, np.array(gradient, "f8"))


def worked_off(shard: BatchShard, sender: Peer, message: Message) -> Effects:
    """What is answered once everything that has come was worked off."""
    effects = shard.receive(0.0, sender, message)
    while shard.due == NOW:
        effects += shard.step(0.0)
    return effects


def done(shard: BatchShard, sender: Peer, message: Message) -> list[Message]:
    return messages(worked_off(shard, sender, message))


def scalars(shard: BatchShard, command: Message) -> tuple[float, ...]:
    [answer] = done(shard, BOSS, command)
    assert isinstance(answer, Executed)
    return answer.scalars


# --------------------------------------------------------------------------------------- commands


def test_a_command_is_filed_then_carried_out_in_a_step_and_answered() -> None:
    shard = welcomed()
    command = execute(1, TWICE, rows=[TRIAL])
    assert shard.receive(0.0, BOSS, command) == []
    assert shard.due == NOW
    assert shard.step(0.0) == [Send(CONTROLLER, Executed(1, (120.0,)))]
    assert shard.due == NEVER


def test_a_repeated_command_is_answered_again_and_done_once() -> None:
    shard = welcomed()
    double: Assignment = (PARAMETERS, ((2.0, PARAMETERS),))
    command = execute(1, double, rows=[PARAMETERS])
    shard.receive(0.0, BOSS, command)
    assert shard.receive(0.0, BOSS, command) == [], "it is filed, and not done yet"
    answer = Executed(1, (120.0,))
    assert messages(shard.step(0.0)) == [answer]
    assert shard.step(0.0) == []
    assert done(shard, BOSS, command) == done(shard, BOSS, command) == [answer]
    assert shard.shard.values.tolist() == [2, 4, 6, 8]
    assert scalars(shard, execute(2, double, rows=[PARAMETERS])) == (480.0,)
    assert done(shard, BOSS, command) == [], "older than the last"


def test_a_command_from_beyond_the_next_waits_for_the_one_before_to_be_said_again() -> None:
    shard = welcomed()
    assert done(shard, BOSS, execute(2, TWICE)) == []
    assert done(shard, BOSS, execute(0, TWICE)) == [Executed(0, ())]
    assert scalars(shard, execute(1, rows=[TRIAL])) == (0.0,), "2 and 0 did nothing"
    assert scalars(shard, execute(2, TWICE, rows=[TRIAL])) == (120.0,)


@pytest.mark.parametrize("command", [execute(1, TWICE), begin(1, 1), collect(1, 0)])
def test_only_the_controller_commands(command: Message) -> None:
    shard = welcomed()
    for sender in (A, READER, Peer("shard-1", 1)):
        assert done(shard, sender, command) == []
    assert scalars(shard, execute(1, rows=[TRIAL])) == (0.0,)


def test_scalars_are_summed_over_the_slices() -> None:
    """A shard of elements 4 to 9 with slices of two partitions."""
    shard = welcomed([1, 2, 3, 4, 5], start=4, partitions=(Range(0, 6), Range(6, 12)))
    assert scalars(shard, execute(1, TWICE, rows=[PARAMETERS, TRIAL])) == (55, 110, 110, 220)
    assert scalars(shard, begin(2, 1)) == ()
    workers = (A, Peer("worker-0.1", 1))
    shard.receive(0.0, workers[1], Hello(1))
    for worker, start, gradient in zip(workers, (4, 6), ([1, 1], [2, 2, 2]), strict=True):
        assert done(shard, worker, bundle(1, 1, 0, gradient, start)) == [Ack(1, 1, 1)]
    assert scalars(shard, collect(3, 1, rows=(GRADIENT,))) == (0.0, 14.0)


def test_decay_goes_to_the_elements_of_each_slice() -> None:
    decays = ((Range(0, 1), 0.5), (Range(1, 3), 0.0), (Range(3, 4), 0.25))
    shard = welcomed([8] * 4, start=10, partitions=(Range(0, 12), Range(12, 20)), decays=decays)
    scalars(shard, begin(1, 1, point=PARAMETERS))
    assert scalars(shard, collect(2, 1)) == (0.25 * 64 + 0.125 * 64,)
    assert shard.shard.state[GRADIENT].tolist() == [4, 0, 0, 2]


def test_a_gradient_that_is_not_finite_anywhere_is_told_of_all() -> None:
    shard = welcomed(start=0, partitions=(Range(0, 2), Range(2, 4)))
    scalars(shard, begin(1, 1, point=PARAMETERS))
    assert done(shard, A, bundle(1, 1, 0, [0, np.nan])) == [Ack(1, 1, 1)]
    assert done(shard, B, bundle(1, 1, 0, [1, 1], 2)) == [Ack(1, 1, 1)]
    assert scalars(shard, collect(2, 1)) == (float("inf"),)


# ---------------------------------------------------------------------------------------- bundles


def test_a_bundle_counts_once_whoever_sends_it_and_however_often() -> None:
    """Paper A, section 4.2: copies at the end of a batch, the first result counts."""
    shard = welcomed()
    scalars(shard, begin(1, 1))
    first = bundle(1, 1, 0, [1, 2, 3, 4])
    assert done(shard, A, first) == [Ack(1, 1, 1)]
    assert done(shard, A, first) == [Ack(1, 1, 1)]
    assert done(shard, B, bundle(1, 1, 0, [1, 2, 3, 4])) == [Ack(1, 1, 1)]
    assert done(shard, B, bundle(2, 1, 1, [10, 0, 0, 0])) == [Ack(1, 2, 1)]
    assert done(shard, A, bundle(2, 0, 2)) == [Ack(1, 2, 1)]
    scalars(shard, collect(2, 1, examples=2))
    assert shard.shard.state[GRADIENT].tolist() == [5.5, 1, 1.5, 2]
    assert done(shard, A, bundle(3, 1, 5)) == [Ack(1, 3, 1)], "too late, and acknowledged"
    shard.start(0.0)
    report = reported(shard)
    assert (report.updates, report.refused) == (2, 0)
    assert report.staleness == (("worker-0.0", 0, 1), ("worker-1.0", 0, 1))
    assert [row.seq for row in report.table] == [3, 2]


def test_what_is_filed_before_the_next_evaluation_begins_is_not_of_it() -> None:
    shard = welcomed()
    scalars(shard, begin(1, 1))
    shard.receive(0.0, A, bundle(1, 1, 0))
    assert done(shard, BOSS, begin(2, 2)) == [Executed(2, ()), Ack(1, 1, 2)]
    scalars(shard, collect(3, 2))
    assert shard.shard.state[GRADIENT].tolist() == [0, 0, 0, 0]


def test_a_repeated_begin_does_not_empty_the_sums() -> None:
    shard = welcomed()
    scalars(shard, begin(1, 1))
    done(shard, A, bundle(1, 1, 0))
    assert done(shard, BOSS, begin(1, 1)) == [Executed(1, ())]
    scalars(shard, collect(2, 1))
    assert shard.shard.state[GRADIENT].tolist() == [1, 1, 1, 1]
    assert done(shard, BOSS, begin(1, 1)) == []


def test_a_refused_bundle_is_acknowledged_and_counted_as_refused() -> None:
    """reliability.md, G14."""
    shard = welcomed()
    scalars(shard, begin(1, 1))
    assert done(shard, A, bundle(1, 1, 0, [np.inf, 0, 0, 0])) == [Ack(1, 1, 1)]
    shard.start(0.0)
    report = reported(shard)
    assert (report.updates, report.refused, report.staleness) == (0, 1, ())


# ------------------------------------------------------------------------------ readers and cuts


def test_a_fetch_gets_the_point_with_the_evaluation_as_its_version() -> None:
    shard = welcomed(version=3)
    assert fetched(shard, A, 1).version == 3
    scalars(shard, begin(1, 4, TWICE))
    params, others = fetched(shard, A, 2), fetched(shard, READER, 1)
    assert (params.version, params.payload.array.tolist()) == (4, [2, 4, 6, 8])
    assert (others.version, others.payload.array.tolist()) == (4, [1, 2, 3, 4])


def test_readers_hold_what_they_got_while_names_are_swapped_and_written() -> None:
    shard = welcomed()
    scalars(shard, begin(1, 1, TWICE))
    point, accepted = fetched(shard, A, 1).payload, fetched(shard, READER, 1).payload
    scalars(shard, execute(2, swap=[(TRIAL, PARAMETERS)]))
    scalars(shard, begin(3, 2, (TRIAL, ((3.0, PARAMETERS),))))
    scalars(shard, execute(4, (PARAMETERS, ()), ("a", ()), ("b", ())))
    assert point.array.tolist() == [2, 4, 6, 8]
    assert accepted.array.tolist() == [1, 2, 3, 4]
    assert fetched(shard, B, 1).payload.array.tolist() == [6, 12, 18, 24]


def test_a_reader_that_is_gone_holds_nothing() -> None:
    shard = welcomed()
    held = fetched(shard, READER, 1).payload
    scalars(shard, execute(1, (PARAMETERS, ((2.0, PARAMETERS),))))
    shard.receive(0.0, BOSS, Gone(*READER))
    scalars(shard, execute(2, ("a", ((1.0, PARAMETERS),))))
    assert held.array.tolist() == [2, 4, 6, 8], "its buffer is that of the next name"


def test_a_cut_hands_out_the_kept_vectors_and_the_next_iteration_writes_others() -> None:
    shard = welcomed()
    scalars(shard, begin(1, 1, point=PARAMETERS))
    done(shard, A, bundle(1, 1, 0))
    scalars(shard, collect(2, 1))
    cut = parts(worked_off(shard, BOSS, Cut(1)))
    assert [(p.vector, p.of, p.version) for p in cut] == [(PARAMETERS, 2, 1), (GRADIENT, 2, 1)]
    values = [p.payload.array.tolist() for p in cut]
    assert values == [[1, 2, 3, 4], [1, 1, 1, 1]]
    scalars(shard, begin(3, 2, (PARAMETERS, ((5.0, PARAMETERS),)), point=PARAMETERS))
    done(shard, A, bundle(2, 2, 0, [7, 7, 7, 7]))
    scalars(shard, collect(4, 2))
    assert [p.payload.array.tolist() for p in cut] == values
    assert parts(shard.step(9.0)) == cut, "until they are returned"
    shard.receive(9.1, BOSS, Return(2))
    assert shard.due == NEVER
    assert [p.payload.array.tolist() for p in parts(worked_off(shard, BOSS, Cut(2)))] == [
        [5, 10, 15, 20],
        [7, 7, 7, 7],
    ]


def test_who_asks_for_a_newer_cut_has_given_back_the_last_one() -> None:
    """Its Return was lost: the buffers must not stay held for ever."""
    shard = welcomed(kept=(PARAMETERS,))
    [first] = parts(worked_off(shard, BOSS, Cut(1)))
    scalars(shard, execute(1, (PARAMETERS, ((2.0, PARAMETERS),))))
    [second] = parts(worked_off(shard, BOSS, Cut(2)))
    assert first.payload.array.tolist() == [1, 2, 3, 4]
    scalars(shard, execute(2, (PARAMETERS, ((2.0, PARAMETERS),))))
    assert second.payload.array.tolist() == [2, 4, 6, 8]
    assert first.payload.array.tolist() == [4, 8, 12, 16], "it is written again"


def test_a_shard_goes_on_from_what_was_saved() -> None:
    first = welcomed()
    scalars(first, execute(1, (GRADIENT, ((3.0, PARAMETERS),))))
    saved = {p.vector: p.payload.array for p in parts(worked_off(first, BOSS, Cut(1)))}
    again = welcomed(saved[PARAMETERS], state={GRADIENT: saved[GRADIENT]}, version=8)
    assert scalars(again, execute(1, rows=[PARAMETERS, GRADIENT])) == (30, 90, 90, 270)
    assert again.shard.version == 8


# ------------------------------------------------------------------- a method over shards (rung 7)


def quadratic(x: Array) -> tuple[float, Array]:
    """Convex, badly scaled, with a minimum that is not at zero."""
    scales = np.geomspace(1.0, 30.0, len(x))
    away = x - np.arange(len(x)) / len(x)
    return float(scales @ away**2) / 2, scales * away


class OverShards:
    """What batch_twin.Executor does, by messages to shards that come late, twice or not at all."""

    def __init__(self, start: Array, edges: Sequence[int], *, history: int, seed: int) -> None:
        self.random = Random(seed)
        self.shards = [
            welcomed(start[a:b], start=a, kept=saved_names(history)) for a, b in pairwise(edges)
        ]
        self.number = self.evaluation = 0
        self.seqs = [[0, 0] for _ in self.shards]

    def command(self, make: Any) -> tuple[float, ...]:
        self.number += 1
        found = []
        for shard in self.shards:
            answers: list[Message] = []
            while not answers or self.random.random() < 0.3:
                answers += done(shard, BOSS, make(self.number))
            assert len({a.scalars for a in answers if isinstance(a, Executed)}) == 1
            found.append(answers[0].scalars)  # type: ignore[attr-defined]
        return tuple(sum(column) for column in zip(*found, strict=True))

    def carry_out(self, request: Command | Evaluate) -> tuple[float, ...] | Evaluation:
        if isinstance(request, Command):
            return self.command(lambda number: Execute(number, *request))
        self.evaluation += 1
        number = self.evaluation
        self.command(lambda n: Begin(n, number, request.before, request.point))
        point = np.concatenate([self.fetch(i) for i in range(len(self.shards))])
        loss, gradient = quadratic(point)
        # Two bundles, each sent by both workers, in any order, with one that is late.
        sent = [(bundle_, worker) for bundle_ in (0, 1) for worker in (0, 1)]
        self.random.shuffle(sent)
        for index, worker in [*sent, (2, 0)]:
            late = index == 2
            part = gradient * 7 if late else gradient * (0.75, 0.25)[index]
            self.push(part, worker, evaluation=number - late, index=index)
        penalty, *dots = self.command(
            lambda n: Collect(n, number, 1, request.gradient, request.rows, request.columns)
        )
        return Evaluation(loss + penalty, tuple(dots))

    def fetch(self, index: int) -> Array:
        shard = self.shards[index]
        [low] = [s.span.start for s in shard.shard.slices]
        got = fetched(shard, A, self.evaluation, start=low)
        assert got.version == self.evaluation
        point: Array = got.payload.array.copy()
        if self.random.random() < 0.8:
            shard.receive(0.0, A, Return(got.handout))
        return point

    def push(self, gradient: Array, worker: int, *, evaluation: int, index: int) -> None:
        for shard, seqs in zip(self.shards, self.seqs, strict=True):
            [span] = [s.span for s in shard.shard.slices]
            seqs[worker] += 1
            part = gradient[span.slice()].tolist()
            done(shard, (A, B)[worker], bundle(seqs[worker], evaluation, index, part, span.start))

    @property
    def parameters(self) -> Array:
        return np.concatenate([shard.shard.values for shard in self.shards])


def iterations(executor: Executor | OverShards, *, history: int, limit: int) -> list[Iterated]:
    method = lbfgs(LineSearchSpec(), history=history, tolerance=1e-6)
    found: list[Iterated] = []
    answer: Any = None
    while len(found) < limit:
        try:
            request = method.send(answer)
        except StopIteration:
            break
        if isinstance(request, Iterated):
            found.append(request)
            answer = None
        else:
            answer = executor.carry_out(request)
    return found


@pytest.mark.parametrize("edges", [[0, 24], [0, 7, 24], [0, 1, 2, 23, 24]])
def test_lbfgs_over_shards_is_lbfgs_on_one_machine(edges: list[int]) -> None:
    """Copies, late bundles, commands said twice, readers that hold the point: none of it shows."""
    start = np.random.default_rng(2).normal(size=24)
    one = Executor(quadratic, start)
    expected = iterations(one, history=4, limit=99)
    many = OverShards(start, edges, history=4, seed=len(edges))
    found = iterations(many, history=4, limit=99)
    assert len(found) == len(expected) > 12
    for mine, its in zip(found, expected, strict=True):
        assert mine.evaluations == its.evaluations
        assert mine.loss == pytest.approx(its.loss, rel=1e-6, abs=1e-14)
    np.testing.assert_allclose(many.parameters, one[PARAMETERS], atol=1e-9)
    np.testing.assert_allclose(many.parameters, np.arange(24) / 24, atol=1e-4)
