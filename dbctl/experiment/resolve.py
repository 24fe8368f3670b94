"""An experiment as text that says everything: JSON for nodes, YAML for the run directory.

Rules of this file: no yaml at import, since nodes read the JSON. Both texts are
complete (every default written) and canonical (equal experiments give equal text), and both read
back to an equal experiment:

    from_json(to_json(e)) == e        read.load(file with to_yaml(e)) == e

JSON is a plain dump of the fields. msgspec refuses unions of dataclasses, so `from_json` picks each
class by its tag and converts the leaves. It trusts limits, which `read` has checked, not shapes.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import msgspec

from dbctl.errors import ExperimentError, Problem
from dbctl.experiment.shape import fields_of, shape_of, spec_by_tag
from dbctl.experiment.specs import EvaluateSpec, Every, Experiment

_JSON = "<resolved experiment>"


def to_json(experiment: Experiment) -> str:
    """One line of ASCII JSON with every field, in the order of the specs."""
    data = dataclasses.asdict(experiment)
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def from_json(text: str) -> Experiment:
    """The experiment that `to_json` wrote; ExperimentError where it is of another version."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise _refuse((), f"not JSON: {error}") from None
    value = _build(data, Experiment, ())
    assert isinstance(value, Experiment)
    return value


def _build(data: Any, annotation: Any, path: tuple[str, ...]) -> Any:
    shape = shape_of(annotation)
    if isinstance(data, dict) and shape.specs:
        return _spec(data, shape.specs, path)
    if isinstance(data, list) and shape.items is not None:
        items = enumerate(data)
        return tuple(_build(item, shape.items, (*path, str(index))) for index, item in items)
    if data is None and shape.optional:
        return None
    if shape.leaf is None:
        raise _refuse(path, f"expected an object, found {type(data).__name__}")
    try:
        return msgspec.convert(data, shape.leaf, strict=True)
    except msgspec.ValidationError as error:
        raise _refuse(path, str(error)) from None


def _spec(data: dict[str, Any], specs: tuple[type, ...], path: tuple[str, ...]) -> Any:
    key, by_tag = spec_by_tag(specs)
    spec = by_tag.get(data.get(key, "")) if key else specs[0]
    if spec is None:
        wanted = ", ".join(by_tag)
        raise _refuse((*path, key), f"expected one of {wanted}, found {data.get(key)!r}")
    fields = fields_of(spec)
    if odd := sorted(set(data) ^ set(fields)):
        fault = "missing" if odd[0] in fields else "unknown"
        raise _refuse((*path, odd[0]), f"{fault} key: was it written by another version of dbctl?")
    values = {
        name: _build(data[name], field.annotation, (*path, name)) for name, field in fields.items()
    }
    return spec(**values)


def _refuse(path: tuple[str, ...], message: str) -> ExperimentError:
    return ExperimentError([Problem(_JSON, 0, 0, ".".join(path), message)])


def to_yaml(experiment: Experiment) -> str:
    """The text of resolved.yaml: short forms as a person writes them, every default written."""
    import yaml

    from dbctl.experiment.tree import resolve_scalar

    class Dumper(yaml.SafeDumper):
        """Quotes text that YAML 1.2 would not read as text; PyYAML sees to YAML 1.1."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, data: str) -> yaml.ScalarNode:
        try:
            plain = isinstance(resolve_scalar(data), str) and data.isprintable()
        except ValueError:
            plain = False
        return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=None if plain else '"')

    Dumper.add_representer(str, text)
    return yaml.dump(
        _readable(experiment), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100
    )


def _readable(value: Any) -> Any:
    """Specs to what a file holds: mappings, lists, scalars and short forms."""
    if isinstance(value, Every):
        return str(value)
    if isinstance(value, EvaluateSpec) and value.every is None:
        return "off"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = fields_of(type(value))
        return {
            name: "off"
            if getattr(value, name) is None and Every in shape_of(field.annotation).specs
            else _readable(getattr(value, name))
            for name, field in fields.items()
        }
    return [_readable(item) for item in value] if isinstance(value, tuple) else value
