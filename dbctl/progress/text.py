"""What is said of a run: the figures of one moment, of its end, and how they read.

Rules of this file: pure; text and numbers only. Foreign text (paths, log tails, words of peers)
goes through `escape_line` before it is shown, so that no control sequence reaches a terminal. What
was not measured is None, and so is what is not a number in JSON.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from dbctl.process import escape_line

_LONG = ("accuracy", "examples/s", "staleness")
FINISHED = ("done", "converged", "max_iterations")  # a run's own ends, all of them "done" in words
SEARCH_FAILED = "line_search_failed"
FAILED = ("failed", SEARCH_FAILED)
STOPPED = ("stopped", "interrupted")
UNFINISHED = (*FAILED, *STOPPED)  # ends of which it is said how the run goes on


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A run at one moment. `epochs` may be a fraction; shares and accuracies are 0 to 1.

    A total is None where the experiment sets no such limit, a figure where it is not known yet.
    """

    steps: int
    total_steps: int | None = None
    epochs: float
    total_epochs: float | None = None
    seconds: float = 0.0
    total_seconds: float | None = None
    loss: float | None = None
    gradient_norm: float | None = None  # batch methods
    test_accuracy: float | None = None
    examples: int
    examples_per_second: float | None = None
    staleness_mean: float | None = None
    fetch_wait_share: float | None = None
    replicas_live: int
    replicas: int

    @property
    def fraction(self) -> float | None:
        """How much is done, 0 to 1, by whichever limit comes first; None without a limit."""
        parts = []
        if self.total_steps:
            parts.append(self.steps / self.total_steps)
        if self.total_epochs:
            parts.append(self.epochs / self.total_epochs)
        if self.total_seconds:
            parts.append(self.seconds / self.total_seconds)
        return min(max(parts), 1.0) if parts else None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The end of a run; None: not measured. `notes` are what the last line must say besides,
    `error` is why it failed.

    Steps, epochs, examples and seconds are of all `lives`; `life_examples`, `life_seconds` and the
    rate of the last one. `measured_steps` and `measured_epochs`: done when the test figures were
    measured. `evaluations_left_out`: of those due, how many were not made.
    """

    run_dir: str
    status: str
    steps: int
    epochs: float
    examples: int
    seconds: float
    examples_per_second: float | None = None
    lives: int = 1
    life_examples: int | None = None
    life_seconds: float | None = None
    train_loss: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    measured_steps: int | None = None
    measured_epochs: float | None = None
    evaluations_left_out: int | None = None
    error: str | None = None
    notes: tuple[str, ...] = ()


def describe_place(snapshot: Snapshot, *, short: bool = False) -> str:
    """Epochs and steps done, with their limits where they are set."""
    s = snapshot
    epochs = f"/{round(s.total_epochs, 2):g}" if s.total_epochs else ""
    steps = f"/{s.total_steps:,}" if s.total_steps else ""
    word, gap = ("ep", " ") if short else ("epoch", "  ")
    return f"{word} {s.epochs:.2f}{epochs}{gap}step {s.steps:,}{steps}"


def describe_figures(snapshot: Snapshot) -> str:
    """All figures that are known."""
    return "  ".join(text for _, text in _figures(snapshot, short=False))


def describe_bar(snapshot: Snapshot, *, columns: int, elapsed: str, eta: str) -> str:
    """The line of a terminal of `columns`: the bar shrinks first, then words, then fields go.

    The last to go are place, loss, accuracy, speed and staleness.
    """
    line = ""
    for short, cells in ((False, 20), (False, 8), (True, 8), (True, 0)):
        parts = [(0, describe_place(snapshot, short=short))]
        if snapshot.fraction is not None:
            parts.append((6, _gauge(snapshot.fraction, cells)))
        parts.append((8, elapsed))
        parts += [*_figures(snapshot, short=short), (5, eta)]
        for least in range(9, -1, -1):
            line = (" " if short else "  ").join(t for rank, t in parts if t and rank <= least)
            if len(line) < columns:
                break
        if least >= (5 if short else 6):
            break
    return line[: max(0, columns - 1)]


def _gauge(fraction: float, cells: int) -> str:
    full = int(fraction * cells)
    return f"{100 * fraction:.0f}%" + (f"|{'█' * full:{cells}}|" if cells else "")


def _figures(snapshot: Snapshot, *, short: bool) -> list[tuple[int, str]]:
    """Each with its rank: on a narrow terminal the greatest goes first."""
    s = snapshot
    accuracy, speed, stale = ("acc", "ex/s", "stale") if short else _LONG
    parts = [(1, f"loss {_number(s.loss)}")]
    if s.gradient_norm is not None:
        parts.append((5, f"|g| {_number(s.gradient_norm)}"))
    if s.test_accuracy is not None:
        share = _percent(s.test_accuracy, 1 if short else 2)
        parts.append((2, f"{accuracy} {share.replace(' ', '') if short else share}"))
    if s.examples_per_second is not None:
        parts.append((3, f"{s.examples_per_second:,.0f} {speed}"))
    if s.staleness_mean is not None:
        parts.append((4, f"{stale} {s.staleness_mean:.2f}"))
    if s.fetch_wait_share is not None:
        parts.append((9, f"fetch wait {_percent(s.fetch_wait_share, 0)}"))
    if s.replicas_live < s.replicas:
        of, what = ("/", "live") if short else (" of ", "replicas")
        parts.append((4, f"{s.replicas_live}{of}{s.replicas} {what}"))
    return parts


def describe_summary(summary: Summary) -> str:
    """The results line: one line, whatever the notes hold."""
    s = summary
    parts = [
        f"{'done' if s.status in FINISHED else s.status}: {s.steps:,} steps, {s.epochs:.2f} epochs,"
        f" {s.examples:,} examples in {s.seconds:.1f} s{_of_lives(s)}"
    ]
    if s.train_loss is not None:
        parts.append(f"train loss {_number(s.train_loss)}")
    if s.test_loss is not None:
        parts.append(f"test loss {_number(s.test_loss)}")
    if s.test_accuracy is not None:
        parts.append(f"test accuracy {_percent(s.test_accuracy, 2)}")
    if s.status in UNFINISHED and s.test_loss is not None and s.measured_steps is not None:
        parts.append(f"measured at step {s.measured_steps:,}, epoch {s.measured_epochs:.2f}")
    parts += [*s.notes, s.run_dir]
    return escape_line(" · ".join(parts))


def describe_status(status: str) -> str:
    """How a run stands, for people: each end of its own is done, as its last line says."""
    if status not in FINISHED:
        return status
    return "done (converged)" if status == "converged" else "done"


def way_on(status: str, run_dir: str) -> str:
    """How a run goes on that was saved; a search that failed does so again: nothing is random."""
    if status == SEARCH_FAILED:
        return (
            "a resume would end alike: a new run with another method or line search can begin with "
            f"its parameters, initialize_from: {run_dir}"
        )
    return f"resume: dbctl resume {shlex.quote(run_dir)}"


def _of_lives(summary: Summary) -> str:
    """The rate, and where it is not that of all examples and seconds, of which."""
    s = summary
    rate = [f"{s.examples_per_second:,.0f} examples/s"] if s.examples_per_second else []
    if s.lives == 1:
        return f" ({rate[0]})" if rate else ""
    whose, own = "the last one", []
    if s.life_examples is not None and s.life_seconds is not None:
        whose, own = "this one", [f"{s.life_examples:,} in {s.life_seconds:.1f} s"]
    last = f"; {whose} {', '.join([*own, *rate])}" if own or rate else ""
    return f" in {s.lives} lives{last}"


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def describe_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _percent(share: float, digits: int) -> str:
    return f"{100 * share:.{digits}f} %"


def to_json(value: Any) -> Any:
    """`value` as JSON holds it: NaN and infinity are null, numpy scalars numbers, the rest text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if hasattr(value, "item"):
        return to_json(value.item())
    return str(value)
