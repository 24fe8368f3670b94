"""roles/commands.py: one command out at a time, each carried out once by every shard."""

from __future__ import annotations

from fractions import Fraction
from math import inf, isnan

import pytest

from dbctl.roles.base import Send
from dbctl.roles.commands import Commands
from dbctl.wire_batch import Execute, Executed


def execute(number: int) -> Execute:
    return Execute(number, (("d", ((-1.0, "gradient"),)),), (), ("d",), ("gradient",))


def test_a_command_goes_to_every_shard_and_its_answers_are_added() -> None:
    commands = Commands(["shard-0", "shard-1"])
    assert commands.give(execute) == [Send("shard-0", execute(1)), Send("shard-1", execute(1))]
    assert commands.busy
    assert commands.take("shard-1", Executed(1, (2.0, 0.5))) is None
    assert commands.again() == [Send("shard-0", execute(1))]
    assert commands.take("shard-1", Executed(1, (7.0, 7.0))) is None  # repeated: nothing new
    assert commands.take("shard-0", Executed(1, (1.0, 0.25))) is not None
    assert not commands.busy
    assert commands.again() == []


def test_sums_do_not_depend_on_which_shard_answers_first() -> None:
    """Float64 sums over shards are rounded once."""
    parts = {"a": 1e16, "b": 1.0, "c": -1e16, "d": 1.0}
    exact = float(sum(map(Fraction, parts.values())))
    for order in ("abcd", "dcba", "badc"):
        commands = Commands(list(parts))
        commands.give(execute)
        found = [commands.take(name, Executed(1, (parts[name],))) for name in order]
        assert found[:-1] == [None, None, None]
        assert found[-1] == (execute(1), [exact])


def test_numbers_have_no_gaps_and_old_answers_do_not_count() -> None:
    commands = Commands(["shard-0"])
    commands.give(execute)
    assert commands.take("shard-0", Executed(1, (1.0,))) == (execute(1), [1.0])
    assert commands.take("shard-0", Executed(1, (1.0,))) is None
    commands.give(execute)
    assert commands.take("shard-0", Executed(1, (9.0,))) is None
    assert commands.take("evaluator-0", Executed(2, (9.0,))) is None
    assert commands.take("shard-0", Executed(2, (2.0,))) == (execute(2), [2.0])
    assert commands.n_round_trips == {"Execute": 2, "Begin": 0, "Collect": 0}


def test_two_commands_at_once_are_a_defect() -> None:
    commands = Commands(["shard-0"])
    commands.give(execute)
    with pytest.raises(AssertionError, match="a command is out"):
        commands.give(execute)


def test_sums_that_are_not_finite_are_no_errors() -> None:
    """A trial that went too far: shards answer inf and -inf, or more than float64 holds."""
    commands = Commands(["a", "b"])
    commands.give(execute)
    commands.take("a", Executed(1, (inf, inf, 1e308)))
    found = commands.take("b", Executed(1, (-inf, 1.0, 1e308)))
    assert found is not None
    assert isnan(found[1][0])
    assert found[1][1:] == [inf, inf]
