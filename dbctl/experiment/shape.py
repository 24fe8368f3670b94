"""The spec types seen as data: fields, tags, and what may stand where.

Rules of this file: only the standard library; no knowledge of any one spec. An annotation is a
`Shape`: specs (dataclasses, told apart by their tag when there are several), a tuple of specs, a
leaf (numbers, text, literals, tuples of those), or None, in any union of these. Everything that
walks an experiment (read, schema, resolve, words) walks it by these functions, so a new layer,
rule or source is only a new dataclass in its union.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

TAGS = ("type", "source", "launcher")


class Tag(NamedTuple):
    """The key and value by which one spec of a union is known: `type: adagrad`."""

    key: str
    value: str


class Field(NamedTuple):
    annotation: Any
    required: bool
    default: Any


@dataclass(frozen=True)
class Shape:
    """What an annotation allows; `leaf` is None or an annotation without specs and None.

    `items` is the annotation of one item of a tuple of specs, `metadata` that tuple's limits.
    """

    specs: tuple[type, ...] = ()
    items: Any = None
    metadata: tuple[Any, ...] = ()
    leaf: Any = None
    optional: bool = False


def unwrap(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type inside `Annotated`, and its metadata."""
    if get_origin(annotation) is Annotated:
        return get_args(annotation)[0], tuple(annotation.__metadata__)
    return annotation, ()


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; any other annotation is its own only one."""
    inner, _ = unwrap(annotation)
    return get_args(inner) if get_origin(inner) in (Union, UnionType) else (annotation,)


@lru_cache(maxsize=1024)
def shape_of(annotation: Any) -> Shape:
    specs: list[type] = []
    leaves: list[Any] = []
    items: Any = None
    limits: tuple[Any, ...] = ()
    optional = False
    for member in alternatives(annotation):
        inner, metadata = unwrap(member)
        if inner in (None, NoneType):
            optional = True
        elif dataclasses.is_dataclass(inner):
            specs.append(inner)  # type: ignore[arg-type]
        elif get_origin(inner) is tuple and shape_of(get_args(inner)[0]).specs:
            items, limits = get_args(inner)[0], metadata
        else:
            leaves.append(member)
    leaf = Union[tuple(leaves)] if leaves else None  # noqa: UP007
    return Shape(tuple(specs), items, limits, leaf, optional)


@lru_cache(maxsize=256)
def fields_of(spec: type) -> dict[str, Field]:
    """The fields of a spec by name, in order, with what they default to."""
    hints = get_type_hints(spec, include_extras=True)
    found: dict[str, Field] = {}
    for field in dataclasses.fields(spec):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        required = default is dataclasses.MISSING
        found[field.name] = Field(hints[field.name], required, None if required else default)
    return found


def tag_of(spec: type) -> Tag | None:
    """The tag of a spec that is one of several, else None."""
    for key in TAGS:
        field = fields_of(spec).get(key)
        if field is not None and not field.required:
            literal, _ = unwrap(field.annotation)
            if get_origin(literal) is Literal and len(get_args(literal)) == 1:
                return Tag(key, get_args(literal)[0])
    return None


def spec_by_tag(specs: tuple[type, ...]) -> tuple[str, dict[str, type]]:
    """The tag key of these specs and each spec by its tag; ("", {}) for one without a tag."""
    tags = [tag_of(spec) for spec in specs]
    if len(specs) == 1 and tags[0] is None:
        return "", {}
    named = [tag for tag in tags if tag is not None]
    assert len(named) == len(specs), f"a spec without a tag among {specs}"
    assert len({tag.key for tag in named}) == 1, f"different tag keys in {specs}"
    return named[0].key, {tag.value: spec for tag, spec in zip(named, specs, strict=True)}


@lru_cache(maxsize=8)
def keys_below(spec: type) -> dict[str, tuple[str, ...]]:
    """Every key that a file of this spec may hold: where it belongs, as dotted paths ("" = top)."""
    found: dict[str, list[str]] = {}

    def visit(spec: type, path: str) -> None:
        for name, field in fields_of(spec).items():
            places = found.setdefault(name, [])
            if path not in places:
                places.append(path)
            shape = shape_of(field.annotation)
            inner = shape.specs + (shape_of(shape.items).specs if shape.items else ())
            for member in inner:
                visit(member, f"{path}.{name}" if path else name)

    visit(spec, "")
    return {name: tuple(places) for name, places in found.items()}
