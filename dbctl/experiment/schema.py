"""The JSON Schema of an experiment file, for editors.

Rules of this file: made from the annotations that `read` walks, so that it cannot drift from them;
leaf.py writes the leaves. It accepts the short forms. What one key says against another
(checks.py) is beyond it: an editor helps, `dbctl validate` decides.
"""

from __future__ import annotations

import inspect
from typing import Any

from annotated_types import MaxLen, MinLen

from dbctl.experiment.leaf import json_schemas
from dbctl.experiment.meanings import meaning
from dbctl.experiment.shape import fields_of, shape_of, spec_by_tag, tag_of
from dbctl.experiment.specs import EVERY_PATTERN, EvaluateSpec, Every, Experiment


def schema() -> dict[str, Any]:
    """The schema (draft 2020-12) of a whole file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "dbctl experiment",
        **_spec(Experiment),
    }


def _spec(spec: type) -> dict[str, Any]:
    tag = tag_of(spec)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, field in fields_of(spec).items():
        properties[name] = _annotation(field.annotation)
        if tag is not None and name == tag.key:
            properties[name] = {"const": tag.value}
        elif not field.required and isinstance(field.default, bool | int | float | str):
            properties[name]["default"] = field.default
        properties[name]["description"] = meaning(spec, name)
        if field.required or (tag is not None and name == tag.key):
            required.append(name)
    text = inspect.cleandoc(spec.__doc__ or "")
    if text.startswith(f"{spec.__name__}("):  # what @dataclass writes where nobody did
        text = ""
    return {
        "type": "object",
        **({"description": text} if text else {}),
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _annotation(annotation: Any) -> dict[str, Any]:
    shape = shape_of(annotation)
    options: list[dict[str, Any]] = []
    if Every in shape.specs:
        options.append({"type": "string", "pattern": f"^{EVERY_PATTERN}$"})
        options += [{"const": "off"}] if shape.optional else []
        return _any_of(options)
    if shape.specs:
        key, by_tag = spec_by_tag(shape.specs)
        options += [_spec(spec) for spec in (by_tag.values() if key else shape.specs)]
    if EvaluateSpec in shape.specs:
        options.append({"const": "off"})
    if shape.items is not None:
        options.append({"type": "array", "items": _annotation(shape.items)})
        for limit in shape.metadata:
            if isinstance(limit, MinLen):
                options[-1]["minItems"] = limit.min_length
            if isinstance(limit, MaxLen):
                options[-1]["maxItems"] = limit.max_length
    if shape.leaf is not None:
        options += json_schemas(shape.leaf)
    if shape.optional:
        options.append({"type": "null"})
    return _any_of(options)


def _any_of(options: list[dict[str, Any]]) -> dict[str, Any]:
    return options[0] if len(options) == 1 else {"anyOf": options}
