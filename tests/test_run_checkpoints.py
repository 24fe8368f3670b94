"""When a run is saved, and what shards are told of it (roles/checkpoints.py)."""

from __future__ import annotations

from typing import Any

from dbctl.experiment.specs import Every
from dbctl.roles.base import NEVER, Save, Send
from dbctl.roles.checkpoints import Checkpoints
from dbctl.wire import Cut, CutPart, Position, Return

SHARDS = ("shard-0", "shard-1")
EVERY = Every(amount=10, unit="steps")


class Progress:
    """Of roles.figures.Figures, what is read here."""

    def __init__(self, steps: int = 0) -> None:
        self.steps, self.epochs = steps, 0.0


def make(*, every: Every | None = EVERY, save: bool = True) -> tuple[Checkpoints, Any]:
    checkpoints, progress = (
        Checkpoints(SHARDS, {0: Position()}, every=every, save=save),
        Progress(),
    )
    checkpoints.begin(0.0, progress)  # type: ignore[arg-type]
    return checkpoints, progress


def part(number: int, handout: int = 1) -> CutPart:
    return CutPart(number, "parameters", 1, handout, 0, 5, ())


def gather(checkpoints: Checkpoints, number: int) -> None:
    assert checkpoints.add("shard-0", part(number)) == []
    [save] = checkpoints.add("shard-1", part(number))
    assert isinstance(save, Save)


def test_a_beat_asks_once_and_not_while_a_cut_is_under_way() -> None:
    checkpoints, progress = make()
    assert not checkpoints.is_due(0.0, progress)
    progress.steps = 12
    assert checkpoints.is_due(0.0, progress)
    assert not checkpoints.is_due(0.0, progress)
    checkpoints.ask(0, 20)
    assert checkpoints.mark_for(0) == (1, 20)
    progress.steps = 35
    assert not checkpoints.is_due(0.0, progress)
    gather(checkpoints, 1)
    assert checkpoints.written() == [Send(shard, Return(1)) for shard in SHARDS]
    assert checkpoints.is_due(0.0, progress)


def test_a_cut_whose_marker_died_is_asked_for_again() -> None:
    checkpoints, progress = make()
    progress.steps = 10
    assert checkpoints.is_due(0.0, progress)
    checkpoints.ask(0, 20)
    checkpoints.dead(3.0, 1)  # another one
    assert not checkpoints.is_due(3.0, progress)
    checkpoints.dead(4.0, 0)
    assert checkpoints.is_due(4.0, progress)


def test_a_part_that_is_late_is_given_back() -> None:
    checkpoints, _ = make()
    checkpoints.ask(0, 20)
    checkpoints.dead(0.0, 0)
    assert checkpoints.add("shard-0", part(1, handout=4)) == [Send("shard-0", Return(4))]


def test_the_last_cut_is_asked_of_the_shards_until_it_has_come() -> None:
    checkpoints, _ = make(every=None)
    assert checkpoints.ask_again() == []
    asked = [Send(shard, Cut(1)) for shard in SHARDS]
    assert checkpoints.ask_last() == asked
    assert checkpoints.last_asked
    assert checkpoints.ask_again() == asked
    gather(checkpoints, 1)
    assert checkpoints.ask_again() == []
    checkpoints.written()
    checkpoints.complete = True
    assert checkpoints.ask_again() == []


def test_the_last_cut_waits_for_one_that_is_being_written() -> None:
    checkpoints, _ = make()
    checkpoints.ask(0, 20)
    gather(checkpoints, 1)
    assert checkpoints.ask_last() == []
    assert not checkpoints.last_asked
    checkpoints.written()
    assert checkpoints.ask_last() == [Send(shard, Cut(2)) for shard in SHARDS]


def test_the_last_cut_replaces_one_that_is_still_gathered() -> None:
    checkpoints, _ = make()
    checkpoints.ask(0, 20)
    checkpoints.add("shard-0", part(1))
    assert checkpoints.ask_last() == [Send(shard, Cut(2)) for shard in SHARDS]
    gather(checkpoints, 2)


def test_where_nothing_is_saved_nothing_is_asked_for() -> None:
    checkpoints, progress = make(save=False)
    progress.steps = 100
    assert not checkpoints.is_due(1e9, progress)
    assert checkpoints.at == NEVER
    assert checkpoints.complete
    assert checkpoints.ask_last() == []
