"""What partitions say to each other in a pass (docs/protocol.md, section 4)."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from dbctl.launch.inproc import Faults, Network
from dbctl.model.exchange import Give, Key, Run, Take
from dbctl.roles.base import NEVER, NOW, Array, Effects, PlainBuffer, Send, View
from dbctl.roles.conversation import AGREEMENT, Conversation
from dbctl.wire import Ack, Boxes, Message, Need, Peer

NAMES = ("worker-0.0", "worker-0.1", "worker-0.2")
RESEND_S = 0.25
STATES = Key("states", 1)


def make(partition: int = 0, count: int = 2) -> Conversation:
    others = {p: NAMES[p] for p in range(count) if p != partition}
    return Conversation(partition, others, allocate=PlainBuffer, resend_s=RESEND_S)


def outbox(*values: float) -> PlainBuffer:
    buffer = PlainBuffer(len(values), "<f4")
    buffer.array[:] = values
    return buffer


def boxes(number: int, *values: float, key: Key = STATES) -> Boxes:
    return Boxes(number, *key, np.array(values, "f4"))


def agreed(number: int, *values: float) -> Boxes:
    return Boxes(number, AGREEMENT, 0, np.array(values, "f8"))


def said(effects: Effects) -> list[tuple[str, Message, list[float]]]:
    """(to, the message without its payload, the payload) of each."""
    found: list[tuple[str, Message, list[float]]] = []
    for effect in effects:
        assert isinstance(effect, Send)
        message = effect.message
        if isinstance(message, Boxes):
            assert isinstance(message.payload, View)
            bare = Boxes(message.number, message.phase, message.layer)
            found.append((effect.to, bare, message.payload.array.tolist()))
        else:
            found.append((effect.to, message, []))
    return found


def give_and_take(box: PlainBuffer, *, other: int = 1) -> Generator[Any, Any, list[float]]:
    yield Give(STATES, {other: Run(box, 0, len(box.array))})
    taken = yield Take(STATES, (other,))
    values: list[float] = taken[other].tolist()
    return values


def with_agreement(talk: Conversation, box: PlainBuffer) -> Generator[Any, Any, Any]:
    values = yield from give_and_take(box)
    shares = yield from talk.agree([sum(values), 1.0])
    return values, shares


# --------------------------------------------------------------------------------- one pass


def test_a_pass_gives_then_waits_and_goes_on_when_the_box_is_there() -> None:
    talk = make()
    talk.begin(give_and_take(outbox(1, 2, 3)))
    assert talk.can_go_on
    effects, over = talk.go_on(0.0)
    assert not over
    assert said(effects) == [("worker-0.1", Boxes(1, "states", 1), [1, 2, 3])]
    assert talk.go_on(0.5) == ([], False)
    assert not talk.can_go_on
    assert talk.due == NOW
    assert talk.resend(1.0) == []
    assert talk.due == 1.25
    assert talk.receive("worker-0.1", boxes(1, 7, 8)) == []
    assert talk.can_go_on
    assert talk.go_on(1.5) == ([], True)
    assert talk.result == [7, 8]
    assert talk.waited_s == 0.5
    assert talk.due == NEVER


def test_what_is_computed_before_a_box_is_asked_for_is_not_waiting() -> None:
    """A step's `now` is its beginning: between a Give and a Take may lie a product of seconds."""
    talk = make()
    talk.begin(give_and_take(outbox(1)))
    talk.go_on(0.0)
    talk.go_on(0.0)  # computes until 20.0
    talk.receive("worker-0.1", boxes(1, 7, 8))  # which came meanwhile
    assert talk.resend(20.0) == []
    assert talk.go_on(20.0) == ([], True)
    assert talk.waited_s == 0.0
    assert talk.due == NEVER


def test_what_came_before_it_is_asked_for_is_not_waited_for() -> None:
    talk = make()
    talk.receive("worker-0.1", boxes(1, 7, 8))  # the other was faster, also to begin
    talk.begin(give_and_take(outbox(1)))
    talk.go_on(0.0)
    assert talk.go_on(3.0) == ([], True)
    assert (talk.result, talk.waited_s) == ([7, 8], 0.0)


def test_a_whole_replica_talks_to_nobody() -> None:
    talk = make(count=1)
    assert talk.alone

    def work() -> Generator[Any, Any, Any]:
        return (yield from talk.agree([3.0, 1.0]))

    for _ in range(3):
        talk.begin(work())
        assert talk.go_on(0.0) == ([], True)
        assert talk.result == [[3.0, 1.0]]
    assert (talk.bytes_sent, talk.waited_s) == (0, 0.0)


def test_only_as_much_of_an_outbox_is_sent_as_was_said_and_bytes_are_counted() -> None:
    talk = make(count=3)

    def work() -> Generator[Any, Any, None]:
        yield Give(STATES, {1: Run(outbox(1, 2, 3), 0, 2), 2: Run(outbox(3, 4, 5, 6), 1, 4)})

    talk.begin(work())
    effects, _ = talk.go_on(0.0)
    assert [(to, values) for to, _, values in said(effects)] == [
        ("worker-0.1", [1, 2]),
        ("worker-0.2", [4, 5, 6]),
    ]
    assert talk.bytes_sent == 4 * (2 + 3)


def test_a_take_of_several_waits_for_all_of_them() -> None:
    talk = make(count=3)

    def work() -> Generator[Any, Any, Any]:
        return (yield Take(STATES, (1, 2)))

    talk.begin(work())
    talk.go_on(0.0)
    talk.receive("worker-0.2", boxes(1, 2))
    assert not talk.can_go_on
    talk.receive("worker-0.1", boxes(1, 1))
    assert talk.go_on(0.0) == ([], True)
    assert {p: a.tolist() for p, a in talk.result.items()} == {1: [1], 2: [2]}


def test_passes_follow_each_other_one_at_a_time() -> None:
    talk = make()
    talk.begin(give_and_take(outbox(1)))
    with pytest.raises(AssertionError, match="under way"):
        talk.begin(give_and_take(outbox(1)))


def test_a_pass_that_is_left_asks_for_nothing_and_still_answers() -> None:
    talk, closed = make(), []

    def passing() -> Generator[Any, Any, None]:
        try:
            yield from give_and_take(outbox(1))
        finally:
            closed.append(True)

    talk.begin(passing())
    talk.go_on(0.0)
    talk.go_on(0.0)
    talk.abandon()
    assert closed == [True]
    assert talk.due == NEVER
    assert talk.resend(99.0) == []
    assert len(talk.receive(NAMES[1], Need(1, *STATES))) == 1
    alone = make(count=1)
    alone.abandon()  # nothing in hand
    assert alone.due == NEVER


# ------------------------------------------------------------------------------ lost and late


def test_what_does_not_come_is_asked_for_with_doubling_back_off() -> None:
    talk = make(count=3)

    def work() -> Generator[Any, Any, Any]:
        return (yield Take(STATES, (1, 2)))

    talk.begin(work())
    talk.go_on(9.0)
    assert talk.resend(10.0) == []
    assert talk.due == 10.25
    assert talk.resend(10.2) == []
    need = Need(1, "states", 1)
    assert talk.resend(10.25) == [Send("worker-0.1", need), Send("worker-0.2", need)]
    talk.receive("worker-0.1", boxes(1, 1))
    assert talk.due == 10.75
    assert talk.resend(10.75) == [Send("worker-0.2", need)]  # only what is missing
    assert talk.due == 11.75
    talk.receive("worker-0.2", boxes(1, 2))
    assert talk.go_on(11.0) == ([], True)
    assert talk.due == NEVER
    assert talk.resend(99.0) == []


def test_a_need_is_answered_with_the_same_memory_until_the_pass_is_over_everywhere() -> None:
    talk = make()
    box = outbox(1, 2)
    talk.begin(with_agreement(talk, box))
    first, _ = talk.go_on(0.0)
    need, need_agreement = Need(1, "states", 1), Need(1, AGREEMENT, 0)
    assert talk.receive("worker-0.1", need) == first
    assert talk.receive("worker-0.1", need_agreement) == []  # it has not come to that
    talk.receive("worker-0.1", boxes(1, 5, 6))
    agreement, _ = talk.go_on(0.0)
    assert said(agreement) == [("worker-0.1", Boxes(1, AGREEMENT, 0), [11, 1])]
    talk.receive("worker-0.1", agreed(1, 3, 1))
    assert talk.go_on(0.0) == ([], True)
    assert talk.receive("worker-0.1", need_agreement) == agreement
    assert talk.receive("worker-0.1", need) == first  # harmless: nothing is written yet


def test_of_the_pass_before_only_the_agreement_is_said_again() -> None:
    """Who gave his agreement has taken all else; the outboxes may be in use again."""
    talk = make()
    box = outbox(1, 2)
    agreements = []
    for number in (1, 2, 3):
        talk.begin(with_agreement(talk, box))
        talk.receive("worker-0.1", boxes(number, 5, 6))
        talk.receive("worker-0.1", agreed(number, number, 1))
        talk.go_on(0.0)
        agreements.append(talk.go_on(0.0)[0])
        assert talk.go_on(0.0) == ([], True)
    talk.begin(with_agreement(talk, box))
    assert talk.receive("worker-0.1", Need(3, AGREEMENT, 0)) == agreements[2]
    assert talk.receive("worker-0.1", Need(2, AGREEMENT, 0)) == []
    assert talk.receive("worker-0.1", Need(3, "states", 1)) == []


def test_agreements_of_two_passes_in_a_row_have_memory_of_their_own() -> None:
    """The next pass may end here while the other still waits for the end of this one."""
    talk = make()
    views: list[Array] = []
    for number in (1, 2, 3):

        def work(number: int = number) -> Generator[Any, Any, Any]:
            return (yield from talk.agree([10.0 * number]))

        talk.begin(work())
        [sent], _ = talk.go_on(0.0)
        assert isinstance(sent, Send)
        assert isinstance(sent.message, Boxes)
        views.append(sent.message.payload.array)
        talk.receive("worker-0.1", agreed(number, number))
        talk.go_on(0.0)
        assert talk.result == [[10.0 * number], [float(number)]]
        assert views[-1].tolist() == [10.0 * number]
        if number > 1:
            assert views[-2].tolist() == [10.0 * (number - 1)], "still as it was given"
    assert np.shares_memory(views[0], views[2])


def test_nothing_of_an_old_pass_and_nothing_of_a_stranger_is_taken() -> None:
    talk = make()
    for number in (1, 2):
        talk.begin(give_and_take(outbox(1)))
        talk.go_on(0.0)
        talk.receive("worker-0.1", boxes(number, number))
        talk.go_on(0.0)
    talk.begin(give_and_take(outbox(1)))
    talk.go_on(0.0)
    talk.go_on(0.0)
    talk.receive("worker-0.1", boxes(2, 666))
    talk.receive("worker-7.1", boxes(3, 666))
    talk.receive("worker-0.1", boxes(3, 666, key=Key("states", 2)))
    talk.receive("worker-0.1", boxes(3, 666, key=Key("back", 1)))
    talk.receive("worker-0.1", Boxes(3, *STATES, None))
    talk.receive("worker-0.1", Ack(1, 1, 1))
    assert talk.receive("worker-7.1", Need(3, *STATES)) == []
    assert not talk.can_go_on
    talk.receive("worker-0.1", boxes(3, 3))
    assert talk.go_on(0.0) == ([], True)
    assert talk.result == [3]


def test_what_came_twice_does_not_stay() -> None:
    """Each box that is kept is memory of another process that stays mapped."""
    talk = make()
    for number in range(1, 6):
        talk.begin(give_and_take(outbox(1)))
        talk.go_on(0.0)
        talk.receive("worker-0.1", boxes(number, number))
        assert talk.go_on(0.0) == ([], True)
        talk.receive("worker-0.1", boxes(number, number))
    assert len(talk._inbox) <= 1


# ------------------------------------------------------------------------------- over a network


class Talker:
    """A role that does `passes` passes of `rounds` exchanges each with all other partitions.

    Its outboxes are written anew in each pass; what it takes must name pass, round and sender.
    """

    def __init__(self, partition: int, count: int, *, passes: int) -> None:
        self.talk = make(partition, count)
        self._partition, self._passes = partition, passes
        self._others = [p for p in range(count) if p != partition]
        self._boxes = {(r, p): PlainBuffer(3, "<f8") for r in range(3) for p in self._others}
        self.n_done = 0
        self.wrong: list[str] = []
        self._busy = False

    @property
    def due(self) -> float:
        if (self._busy and self.talk.can_go_on) or (not self._busy and self.n_done < self._passes):
            return NOW
        return self.talk.due

    def start(self, now: float) -> Effects:
        return []

    def receive(self, now: float, sender: Peer, message: Message) -> Effects:
        return self.talk.receive(sender.node, message)

    def step(self, now: float) -> Effects:
        effects = self.talk.resend(now)
        if not self._busy and self.n_done < self._passes:
            self.talk.begin(self._pass(self.n_done))
            self._busy = True
        if self._busy and self.talk.can_go_on:
            more, over = self.talk.go_on(now)
            effects += more
            self._busy = not over
            self.n_done += over
        return effects

    def _pass(self, number: int) -> Generator[Any, Any, None]:
        kept: list[tuple[Array, list[float]]] = []
        for turn in range(3):
            to: dict[int, Run] = {}
            for p in self._others:
                box = self._boxes[turn, p]
                box.array[:] = (number, turn, 10 * self._partition + p)
                to[p] = Run(box, 0, 3)
            yield Give(Key("states", turn), to)
            taken = yield Take(Key("states", turn), tuple(self._others))
            kept += [(taken[p], [number, turn, 10 * p + self._partition]) for p in self._others]
        self.wrong += [f"{a} not {e}" for a, e in kept if a.tolist() != e]
        shares = yield from self.talk.agree([number, self._partition])
        if shares != [[number, p] for p in range(len(shares))]:
            self.wrong.append(f"agreed on {shares} in pass {number}")


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_passes_are_exact_over_a_network_that_loses_and_repeats(seed: int, count: int) -> None:
    faults = Faults(
        drop=0.2, duplicate=0.3, delay_s=0.02, in_pieces=0.5 * (seed % 3), piece_bytes=8
    )
    net = Network(seed, faults)
    talkers = [Talker(p, count, passes=12) for p in range(count)]
    for partition, talker in enumerate(talkers):
        net.add(NAMES[partition], talker)
    net.at(0.5, lambda: net.pause(NAMES[seed % count], 2.0))
    assert net.run(until=lambda: all(t.n_done == 12 for t in talkers), limit_s=1000.0)
    assert [t.wrong for t in talkers] == [[]] * count
    assert net.happened["message lost"] + net.happened["piece lost"] > 10
    each = 12 * (count - 1) * (3 * 3 + 2) * 8
    assert [t.talk.bytes_sent for t in talkers] == [each] * count  # what is said again is not
    assert max(len(t.talk._inbox) for t in talkers) <= 2 * 4 * (count - 1)
