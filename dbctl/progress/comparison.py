"""Runs beside each other: what each took to one accuracy, as a table or as plain values.

Rules of this file: pure; numbers in, text out. Seconds are of training (docs/experiments.md,
Records), bytes are fetched + pushed + exchanged. A run that never reached the accuracy says so:
with a fixed rate Downpour often does not (Dean et al. 2012, section 5, figure 5).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dbctl.process import escape_line
from dbctl.progress.history import History, Mark, common_accuracy
from dbctl.progress.text import describe_status

_RUNS = (
    *("run", "optimizer", "replicas", "partitions", "shards", "status", "steps", "examples"),
    *("seconds", "best", "last"),
)
_SPENT = ("run", "seconds", "replica-s", "examples", "bytes")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One run: `label` is what it is called here, `status` in one word."""

    label: str
    run_dir: str
    status: str
    history: History


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """`accuracy` is to be reached; None: no run measured any. `given`: the user chose it."""

    entries: tuple[Entry, ...]
    accuracy: float | None
    given: bool


def compare(entries: Sequence[Entry], accuracy: float | None = None) -> Comparison:
    """By default to the greatest accuracy that all runs reached."""
    given = accuracy is not None
    if accuracy is None:
        accuracy = common_accuracy(entry.history for entry in entries)
    return Comparison(entries=tuple(entries), accuracy=accuracy, given=given)


def lines(comparison: Comparison) -> Iterator[str]:
    """For people: the runs, then what each spent to the accuracy."""
    yield from _table([_RUNS, *map(_run_row, comparison.entries)], n_left=2)
    yield ""
    accuracy = comparison.accuracy
    if accuracy is None:
        yield "no run has measured an accuracy: train with `evaluate: {every: 1 epoch}`"
        return
    why = "" if comparison.given else ", the greatest that all runs reached"
    unmeasured = [e.label for e in comparison.entries if e.history.best is None]
    if unmeasured and not comparison.given:
        why += f" ({', '.join(unmeasured)} measured none)"
    yield escape_line(f"to an accuracy of {_percent(accuracy)} of the test rows{why}:")
    yield ""
    rows: list[tuple[str, ...]] = [_SPENT]
    notes: list[str] = []
    for entry in comparison.entries:
        mark = entry.history.reach(accuracy)
        rows.append((entry.label, *_spent(mark)))
        if mark is None:
            best = entry.history.best
            found = "it measured none" if best is None else f"its best is {_percent(best)}"
            ending = "not yet" if entry.status == "running" else "never arrives"
            notes.append(f"{entry.label}: {ending}, {found}")
    yield from _table(rows, n_left=1)
    yield from map(escape_line, notes)


def as_object(comparison: Comparison) -> dict[str, Any]:
    """What `--json` prints; `reached` is null for a run that never arrived."""
    return {
        "event": "comparison",
        "accuracy": comparison.accuracy,
        "accuracy_given": comparison.given,
        "runs": [_run_object(entry, comparison.accuracy) for entry in comparison.entries],
    }


def _run_object(entry: Entry, accuracy: float | None) -> dict[str, Any]:
    history = entry.history
    mark = history.reach(accuracy) if accuracy is not None else None
    return {
        "label": entry.label,
        "run_dir": entry.run_dir,
        "name": history.name,
        "optimizer": history.optimizer,
        "replicas": history.replicas,
        "partitions": history.partitions,
        "shards": history.shards,
        "status": entry.status,
        "steps": history.steps,
        **_mark_object(history.spent),
        "best_accuracy": history.best,
        "last_accuracy": history.last,
        "reached": _mark_object(mark) if mark is not None else None,
    }


def _mark_object(mark: Mark) -> dict[str, float]:
    return {
        "seconds": mark.seconds,
        "replica_seconds": mark.replica_seconds,
        "examples": round(mark.examples),
        "bytes": round(mark.bytes),
    }


def _run_row(entry: Entry) -> tuple[str, ...]:
    history, spent = entry.history, entry.history.spent
    counts = (history.replicas, history.partitions, history.shards)
    return (
        entry.label,
        history.optimizer or "-",
        *("-" if count is None else f"{count:,}" for count in counts),
        describe_status(entry.status),
        f"{history.steps:,}",
        f"{spent.examples:,.0f}",
        f"{spent.seconds:,.1f}",
        _percent(history.best),
        _percent(history.last),
    )


def _spent(mark: Mark | None) -> tuple[str, ...]:
    if mark is None:
        return ("-",) * (len(_SPENT) - 1)
    return (
        f"{mark.seconds:,.1f}",
        f"{mark.replica_seconds:,.1f}",
        f"{mark.examples:,.0f}",
        f"{mark.bytes / 1e6:,.1f} MB",
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def _table(rows: Sequence[Sequence[str]], *, n_left: int) -> Iterator[str]:
    """Columns as wide as they need; the first `n_left` begin at the left."""
    safe = [[escape_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*safe, strict=True)]
    for row in safe:
        cells = [
            f"{cell:<{width}}" if place < n_left else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
