"""Single values of an experiment: numbers, text, literals, tuples of those. msgspec judges them.

Rules of this file: nothing of any one spec. msgspec is strict where YAML is not: `1` may stand for
a float, and neither `true` nor `"0.1"` for a number. Its limits are its own `Meta`, so those of
annotated_types, which the specs are written in, are turned into these.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from functools import lru_cache
from types import GenericAlias
from typing import Annotated, Any, get_args, get_origin

import msgspec
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen

from dbctl.experiment.shape import alternatives, unwrap

LIMITS = (Ge, Gt, Le, Lt, MinLen, MaxLen)  # each has one field, with the name that it has in Meta


def judge(annotation: Any, data: Any) -> Any:
    """`data`, which is JSON's, as `annotation` has it; ValueError where it may not stand there."""
    # Not a union at once: msgspec 0.23 crashes where one has a limited int and a tuple of two.
    for member in alternatives(annotation):
        with suppress(msgspec.ValidationError):
            return msgspec.convert(data, _limited(member), strict=True)
    raise ValueError(f"{data!r} is not {annotation}")


def json_schemas(annotation: Any) -> list[dict[str, Any]]:
    """The JSON Schemas (draft 2020-12) of what `judge` accepts: it may be any of them."""
    return [msgspec.json.schema(_limited(member)) for member in alternatives(annotation)]


@lru_cache(maxsize=256)
def _limited(annotation: Any) -> Any:
    """A member of a union, with msgspec's limits."""
    inner, marks = unwrap(annotation)
    if get_origin(inner) is tuple:
        items = (item if item is Ellipsis else _limited(item) for item in get_args(inner))
        inner = GenericAlias(tuple, tuple(items))
    limits = {
        field.name: getattr(mark, field.name)
        for mark in marks
        if isinstance(mark, LIMITS)
        for field in dataclasses.fields(mark)
    }
    return Annotated[inner, msgspec.Meta(**limits)] if limits else inner
