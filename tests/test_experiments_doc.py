"""docs/experiments.md is the reference of the file: every key, its default, and no other key."""

from __future__ import annotations

import re
from pathlib import Path

from dbctl.experiment.read import parse
from dbctl.experiment.shape import fields_of, keys_below, shape_of
from dbctl.experiment.specs import DigitsSource, Every, Experiment
from dbctl.plan import make_plan
from dbctl.run.setting import open_data

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


def examples() -> list[str]:
    return re.findall(r"^```yaml\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)


def test_the_examples_are_good_files_and_can_be_placed() -> None:
    names = []
    for text in examples():
        experiment = parse(text)
        names.append(experiment.name)
        make_plan(experiment, rows=100, test_rows=10, cores=2)
        if isinstance(experiment.data.train, DigitsSource):
            open_data(experiment)  # of the shape that the network takes
    assert names == ["mine", "digits-conv", "digits-cut"]


def test_every_key_is_explained_and_no_other() -> None:
    short_form = {"amount", "unit"}  # an `Every` is always written as text
    assert {key for key, _ in rows()} == set(keys_below(Experiment)) - short_form


def test_every_default_is_the_one_in_force() -> None:
    missing = {d for d in defaults() if d[0] not in ("amount", "unit")} - set(rows())
    assert missing == set()
