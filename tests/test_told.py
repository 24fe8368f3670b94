"""dbctl/transport/told.py: a stranger is seen whoever came before, a flood costs a few lines."""

from __future__ import annotations

from dbctl.transport.told import TEXTS, Told


def test_each_text_of_a_kind_is_told_once() -> None:
    told = Told()
    assert told.line("key", "a came") == "a came (the same again is only counted)"
    assert told.line("key", "a came") is None
    assert told.line("key", "b came") == "b came (the same again is only counted)"
    assert told.line("role", "a came") is not None, "kinds have nothing to do with each other"
    assert told.line("key", "b came") is None


def test_a_flood_is_a_few_lines_with_its_size() -> None:
    told = Told()
    lines = [told.line("key", f"{i} came") for i in range(1, 100_001)]
    said = [line for line in lines if line is not None]
    assert len(said) == TEXTS + 4
    assert said[-1] == "100000 came (100,000 of this kind so far)"
    same = Told()
    said = [line for _ in range(1_000) if (line := same.line("key", "x")) is not None]
    assert [line.rpartition("(")[2] for line in said] == [
        "the same again is only counted)",
        "10 of this kind so far)",
        "100 of this kind so far)",
        "1,000 of this kind so far)",
    ]
