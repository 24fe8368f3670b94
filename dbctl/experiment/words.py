"""What an error says: what was expected, what was found, what was perhaps meant.

Rules of this file: pure text from types and trees. An expectation is made from the annotation that
the value failed, so it cannot drift from the limit that is checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from math import isfinite
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen

from dbctl.errors import Problem
from dbctl.experiment.checks import HOST_NAME, SSH_DESTINATION
from dbctl.experiment.shape import alternatives, keys_below, shape_of, spec_by_tag, unwrap
from dbctl.experiment.specs import EvaluateSpec, Every, Experiment, HostSpec, RelativeToFile
from dbctl.experiment.tree import Listing, Mapping, Place, Scalar, Tree, problem, shown

_NOUNS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_BOUNDS = {Ge: ("of at least", "ge"), Gt: ("greater than", "gt")}
_UPPER = {Le: ("at most", "le"), Lt: ("less than", "lt")}
_NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
MAX_INT = 2**63 - 1  # what every process and file format of a run can hold


def expected(annotation: Any) -> str:
    """`a whole number of at least 1`, ...; that null is also taken goes without saying."""
    members = alternatives(annotation)
    said = [_member(member) for member in members if unwrap(member)[0] not in (None, type(None))]
    shape = shape_of(annotation)
    if EvaluateSpec in shape.specs or (Every in shape.specs and shape.optional):
        said.append("off")
    return " or ".join(dict.fromkeys(said))


def _member(annotation: Any) -> str:
    inner, metadata = unwrap(annotation)
    if inner is Every:
        return "`N steps`, `N epochs`, `N s`, `N min`"
    if shape_of(annotation).specs:
        key, _ = spec_by_tag(shape_of(annotation).specs)
        return f"a mapping with `{key}`" if key else "a mapping"
    if get_origin(inner) is Literal:
        values = [f"`{value}`" for value in get_args(inner)]
        return values[0] if len(values) == 1 else f"one of {', '.join(values)}"
    if get_origin(inner) is tuple:
        args = get_args(inner)
        if len(args) == 2 and args[1] is Ellipsis:
            some = " of at least one" if MinLen(1) in metadata else ""
            return f"a list{some}, each {expected(args[0])}"
        return f"a list of {len(args)}, each {expected(args[0])}"
    for mark in metadata:
        if isinstance(mark, RelativeToFile):
            return mark.what
    lengths = _lengths(metadata)
    bounds = [
        f"{words} {getattr(limit, name)}"
        for table in (_BOUNDS, _UPPER)
        for limit in metadata
        for words, name in [table.get(type(limit), ("", ""))]
        if words
    ]
    return " ".join([_NOUNS[inner], *lengths, " and ".join(bounds)]).strip()


def _lengths(metadata: tuple[Any, ...]) -> list[str]:
    least = next((limit.min_length for limit in metadata if isinstance(limit, MinLen)), 0)
    most = next((limit.max_length for limit in metadata if isinstance(limit, MaxLen)), None)
    if most is not None:
        return [f"of {least} to {most} characters"]
    return ["that is not empty"] if least else []


def found(tree: Tree) -> str:
    """What stands in the file, with a hint where quotes or their lack are the fault."""
    if isinstance(tree, Listing):
        return f"a list of {len(tree.items)}"
    if isinstance(tree, Mapping):
        return "a mapping"
    if tree.quoted:
        return f'the text "{shown(tree.text)}"'
    if tree.value is None:
        return "nothing (null)"
    kind = "the text " if isinstance(tree.value, str) else ""
    return f"{kind}`{shown(tree.text)}`"


def no_mapping(tree: Tree | None, start: Place, wanted: str) -> Problem:
    """Of a file that holds no mapping, or nothing; it begins at `start`."""
    what = "nothing: the file is empty" if tree is None else found(tree)
    return problem(tree.place if tree else start, (), f"expected a mapping {wanted}, found {what}")


def hint(annotation: Any, tree: Tree) -> str:
    """`; did you mean ...` or `; write ...`, or nothing."""
    if not isinstance(tree, Scalar):
        return ""
    if HostSpec in shape_of(annotation).specs and isinstance(tree.value, str):
        return _host_hint(tree.value)
    members = [unwrap(member)[0] for member in alternatives(annotation)]
    names = [str(value) for m in members if get_origin(m) is Literal for value in get_args(m)]
    if isinstance(tree.value, str) and (near := nearest(tree.value, names)):
        return f"; did you mean `{near}`?"
    numeric = int in members or float in members
    if numeric and (limit := _limit_hint(tree.value)):
        return limit
    if numeric and tree.quoted and re.fullmatch(_NUMBER, tree.text.strip()):
        return "; write it without quotes"
    if bool in members and str(tree.value) in ("yes", "no", "on", "off"):
        return f"; write `{'true' if tree.value in ('yes', 'on') else 'false'}`"
    if isinstance(tree.value, float) and int in members and tree.value % 1 == 0:
        return f"; write `{int(tree.value)}`" if abs(tree.value) < 1e15 else ""
    if str in members and int not in members and not isinstance(tree.value, str | None):
        return f'; write "{shown(tree.text)}" in quotes'
    if Every in members and isinstance(tree.value, int | float):
        is_count = not isinstance(tree.value, bool) and tree.value > 0
        return f"; say of what, such as `{shown(tree.text)} s`" if is_count else ""
    return ""


def _limit_hint(value: object) -> str:
    """Of a number that nothing could hold, whatever its place allows."""
    if isinstance(value, float) and not isfinite(value):
        return "; it must be finite"
    if isinstance(value, int) and abs(value) > MAX_INT:
        return f"; at most {MAX_INT} (2^63 - 1) fits"
    return ""


def _host_hint(text: str) -> str:
    """Of a host that is a text and no mapping: its name, or what ssh calls it."""
    if re.fullmatch(HOST_NAME, text):
        return f"; write `{{name: {shown(text)}}}`"
    if re.fullmatch(SSH_DESTINATION, text):
        return f'; write `{{name: NAME, ssh: "{shown(text)}"}}`'
    return ""


def nearest(name: str, known: Iterable[str]) -> str:
    """The name that was perhaps meant, or ""."""
    by_form = {one.lower().replace("-", "_"): one for one in known}
    form = name[:100].lower().replace("-", "_").replace(" ", "_")
    return next((by_form[near] for near in get_close_matches(form, by_form, 1, 0.7)), "")


def unknown_key(
    name: str, path: tuple[str, ...], known: Iterable[str], *, kin: dict[str, str] | None = None
) -> tuple[str, str]:
    """The message for an unknown key of the mapping at `path`, and the key here that was meant.

    `kin`: the keys of the other types that may stand there, and what is said of each.
    """
    names, kin = list(known), kin or {}
    if near := nearest(name, names):
        return f"unknown key; did you mean `{near}`?", near
    elsewhere = keys_below(Experiment)
    if name in elsewhere:
        homes = [f"under `{home}`" if home else "at the top level" for home in elsewhere[name]]
        return f"unknown key here; it belongs {' or '.join(homes[:3])}", ""
    if near := nearest(name, kin):
        return f"unknown key; `{near}` {kin[near]}", ""
    if near := nearest(name, elsewhere):
        home = elsewhere[near][0]
        return f"unknown key; did you mean `{home + '.' if home else ''}{near}`?", ""
    where = f"`{'.'.join(path)}`" if path else "the top level"
    return f"unknown key; {where} takes {', '.join(names)}", ""
