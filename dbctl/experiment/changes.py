"""What differs between two experiments, in words.

Rules of this file: pure; each change is named by its key, as `--set` has it.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from dbctl.experiment.specs import Every, Experiment


def describe_changes(before: Experiment, now: Experiment) -> list[str]:
    """`shards 2 -> 3` for each key that differs, and of what is no single value `another KEY`."""
    return _changes(before, now, "")


def _changes(before: object, now: object, key: str) -> list[str]:
    if before == now:
        return []
    if type(before) is type(now) and is_dataclass(now) and not isinstance(now, Every):
        below = [(getattr(before, f.name), getattr(now, f.name), f.name) for f in fields(now)]
        return [c for b, n, name in below for c in _changes(b, n, f"{key}.{name}".lstrip("."))]
    if _is_spec(before) or _is_spec(now) or isinstance(now, tuple):
        return [f"another {key}"]
    return [f"{key} {_value(before)} -> {_value(now)}"]


def _is_spec(value: object) -> bool:
    return is_dataclass(value) and not isinstance(value, Every)


def _value(value: object) -> str:
    return "none" if value is None else f"{value:,}" if type(value) is int else str(value)
