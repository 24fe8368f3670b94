"""`--set a.b=v`: put one value into the tree of an experiment file.

Rules of this file: an override changes the tree before anything is checked, so a wrong key or value
is found by the reader like one in the file, and named by the text of the --set itself. Lists go by
index from 0. A mapping that is not there is made, and a scalar on the way gives way to one: with
`evaluate: off` in the file, `--set 'evaluate.every=1 epoch'` turns it on.
"""

from __future__ import annotations

from collections.abc import Sequence

from dbctl.errors import Problem
from dbctl.experiment.tree import Listing, Mapping, Place, Tree, parse_tree, problem, shown


def apply_overrides(tree: Mapping, overrides: Sequence[str], problems: list[Problem]) -> None:
    """Change `tree` by each `key=value` in order; the last one of a key counts."""
    for override in overrides:
        place = Place(f"--set {shown(override, 200)}")
        dotted, equals, text = override.partition("=")
        path = tuple(part.strip() for part in dotted.split("."))
        if not equals or not all(path):
            message = "expected KEY.KEY=VALUE, such as optimizer.n_push=5"
            problems.append(problem(place, (), message))
            continue
        n_problems = len(problems)
        value = parse_tree(text if text.strip() else "null", place, problems)
        if value is None and n_problems == len(problems):  # only a comment
            problems.append(problem(place, path, "expected a value, found none; quote a `#`"))
        elif value is not None:
            _put(tree, path, value, problems=problems)


def _put(tree: Mapping, path: tuple[str, ...], value: Tree, *, problems: list[Problem]) -> None:
    at: Tree = tree
    for depth, name in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(at, Listing):
            if not (name.isascii() and name.isdigit() and int(name[:9]) < len(at.items)):
                here = ".".join(path[:depth])
                what = f"expected an index from 0 to {len(at.items) - 1} of `{here}`"
                message = f"{what}, found `{shown(name)}`"
                problems.append(problem(value.place, path, message))
                return
            index = int(name[:9])
            if last or not isinstance(at.items[index], Listing | Mapping):
                at.items[index] = value if last else Mapping({}, value.place)
            at = at.items[index]
        else:
            assert isinstance(at, Mapping), "a scalar on the way was replaced"
            if last or not isinstance(at.items.get(name), Listing | Mapping):
                at.items[name] = value if last else Mapping({}, value.place)
                at.keys[name] = value.place
            at = at.items[name]
