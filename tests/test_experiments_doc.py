"""docs/experiments.md is the reference of the file: every key, its default, and no other key."""

from __future__ import annotations

import re
from pathlib import Path

from dbctl.experiment.shape import fields_of, keys_below, shape_of
from dbctl.experiment.specs import Every, Experiment

TEXT = (Path(__file__).parent.parent / "docs" / "experiments.md").read_text(encoding="utf-8")
HEAD = "| key | default | limits | meaning |\n|---|---|---|---|\n"


def rows() -> list[tuple[str, str]]:
    """(key, default) of every row of the tables of keys."""
    tables = [text.split("\n\n")[0] for text in TEXT.split(HEAD)[1:]]
    found = re.findall(r"^\| `(\w+)` \|([^|]*)\|", "\n".join(tables), flags=re.MULTILINE)
    return [(key, default.strip()) for key, default in found]


def defaults() -> set[tuple[str, str]]:
    """(key, default as YAML says it) of every field with a plain default but tags."""
    found: set[tuple[str, str]] = set()

    def visit(spec: type) -> None:
        for name, field in fields_of(spec).items():
            default = field.default
            if isinstance(default, bool):
                found.add((name, str(default).lower()))
            elif isinstance(default, int | float | str | Every) and name not in ("type", "source"):
                found.add((name, str(default)))
            shape = shape_of(field.annotation)
            for inner in shape.specs + (shape_of(shape.items).specs if shape.items else ()):
                visit(inner)

    visit(Experiment)
    return found


def test_every_key_is_explained_and_no_other() -> None:
    short_form = {"amount", "unit"}  # an `Every` is always written as text
    assert {key for key, _ in rows()} == set(keys_below(Experiment)) - short_form


def test_every_default_is_the_one_in_force() -> None:
    missing = {d for d in defaults() if d[0] not in ("amount", "unit")} - set(rows())
    assert missing == set()
