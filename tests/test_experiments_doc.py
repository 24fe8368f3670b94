"""docs/experiments.md is the reference of the file: every key, its default, and no other key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dbctl.experiment.meanings import MEANINGS
from dbctl.experiment.read import parse
from dbctl.experiment.schema import schema
from dbctl.experiment.shape import TAGS, fields_of, keys_below, shape_of
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


def meanings() -> set[tuple[str, str]]:
    """(key, meaning) of every row, as plain text: links become their words."""
    tables = [text.split("\n\n")[0] for text in TEXT.split(HEAD)[1:]]
    found = re.findall(r"^\| `(\w+)` \|.*?\|.*?\|(.*)\|$", "\n".join(tables), flags=re.MULTILINE)
    plain = [(key, re.sub(r": \[below\]\(#\w+\)", "", text)) for key, text in found]
    return {(key, re.sub(r"\[(\w+)\]\(#\w+\)", r"\1", text).strip()) for key, text in plain}


def defaults() -> set[tuple[str, str]]:
    """(key, default as YAML says it) of every field with a plain default but tags."""
    found: set[tuple[str, str]] = set()

    def visit(spec: type) -> None:
        for name, field in fields_of(spec).items():
            default = field.default
            if isinstance(default, bool):
                found.add((name, str(default).lower()))
            elif isinstance(default, int | float | str | Every) and name not in TAGS:
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


def test_the_tables_say_what_an_editor_shows() -> None:
    assert meanings() == {(key.rpartition(".")[2], text) for key, text in MEANINGS.items()}


def test_every_key_of_the_schema_has_its_meaning() -> None:
    n_keys = 0

    def visit(part: Any) -> None:
        nonlocal n_keys
        if isinstance(part, dict):
            for key, rule in part.get("properties", {}).items():
                n_keys += 1
                assert rule["description"] in {t for _, t in meanings()}, key
        for inner in part.values() if isinstance(part, dict) else part:
            if isinstance(inner, dict | list):
                visit(inner)

    whole = schema()
    visit(whole)
    assert n_keys > len(MEANINGS)
    data = whole["properties"]["data"]["properties"]["train"]["anyOf"]
    seeds = [one["properties"]["seed"] for one in data if "seed" in one["properties"]]
    assert [seed["description"] for seed in seeds] == ["of the clusters; not the experiment's"]
    assert "Experiment(" not in str(whole)


def test_every_default_is_the_one_in_force() -> None:
    missing = {d for d in defaults() if d[0] not in ("amount", "unit")} - set(rows())
    assert missing == set()
