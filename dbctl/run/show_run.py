"""What is seen of one run directory, and how `dbctl status` says it.

Rules of this file: pure but for `of_run`, which reads files. Words of files are escaped before they
reach a terminal; what was not measured is `-`. How old figures are is told, and decides nothing: it
is by the clock of who wrote them. What a node was when its run ended is told as what it was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dbctl.errors import RunError
from dbctl.plan import describe_bytes
from dbctl.process import escape_line
from dbctl.progress.text import FAILED, UNFINISHED, describe_duration, describe_status, way_on
from dbctl.rundir import RunDir, RunInfo

Row = Sequence[str]
LOST = "lost"  # a run whose controller ended without a word
STARTING = "starting"
LIVING = (STARTING, "up", "running", "waiting", "halted")  # states of a node that has not ended
FRESH_S = 3.0  # figures are replaced every second; of older ones their age is shown
SILENT_S = 10.0  # a lease: whoever writes nothing for so long is not only busy
RUN_COLUMNS: Row = ("run", "started", "state", "steps", "epochs", "test accuracy")
NODE_COLUMNS = (
    "node", "host", "state", "steps", "examples/s", "staleness", "memory", "received", "sent",
)  # fmt: skip


class _NodeStatus(msgspec.Struct, kw_only=True):
    """The form of what is shown of one node in status.json; there may be more."""

    host: str = "-"
    state: str = "-"
    steps: int | None = None
    examples_per_second: float | None = None
    staleness: float | None = None
    rss_bytes: int | None = None
    bytes_in: int | None = None
    bytes_out: int | None = None


class _Status(msgspec.Struct, kw_only=True):
    """The form of what is shown of status.json."""

    state: str = STARTING
    reason: str | None = None
    steps: int = 0
    epochs: float = 0.0
    examples_per_second: float | None = None
    test_accuracy: float | None = None
    nodes: dict[str, _NodeStatus] = {}


@dataclass(frozen=True, kw_only=True)
class RunSeen:
    """A run directory at one moment. `status` is status.json, `state` what can be said of it.

    `age_s`: how old the figures of a run are that has no end of its own, in seconds, None where
    there are none; `is_here`: its controller is of this machine; `is_saved`: there is a checkpoint.
    """

    run_dir: str
    info: RunInfo
    state: str
    status: dict[str, Any]
    age_s: float | None
    is_here: bool
    is_saved: bool

    @property
    def is_over(self) -> bool:
        return self.state not in ("running", STARTING)


def of_run(run_dir: RunDir) -> RunSeen:
    """RunError: a file of it is damaged."""
    info = run_dir.read_info()
    is_here = info.host == os.uname().nodename
    # Only its own machine knows. Before the status is read: a controller writes how the run ended.
    is_dead = is_here and not info.is_alive()
    status = run_dir.read_status()
    if status.get("run") != info.run:
        status = {}  # it is of an earlier life
    try:
        msgspec.convert(status, _Status)
    except msgspec.ValidationError as error:
        raise RunError(f"{run_dir.status} is not as dbctl writes it: {error}") from None
    state = str(status.get("state", STARTING))
    if state in ("running", STARTING) and is_dead:
        state = LOST
    return RunSeen(
        run_dir=str(run_dir.path),
        info=info,
        state=state,
        status=status,
        age_s=_age_s(run_dir.status) if status and state in ("running", LOST) else None,
        is_here=is_here,
        is_saved=any(run_dir.checkpoints.glob("step-*")),
    )


def _age_s(path: Path) -> float | None:
    try:
        return max(0.0, time.time() - os.stat(path).st_mtime)
    except OSError:  # removed meanwhile
        return None


def run_object(seen: RunSeen) -> dict[str, Any]:
    own = {"run_dir": seen.run_dir, "state": seen.state, "age_s": seen.age_s}
    return {**seen.status, **own}


def run_lines(seen: RunSeen) -> Iterator[str]:
    status = seen.status
    parts = [f"{seen.run_dir}: {describe_status(seen.state)}"]
    if "steps" in status:
        parts.append(f"step {status['steps']:,}")
        parts.append(f"epoch {status.get('epochs', 0.0):.2f}")
    if (rate := status.get("examples_per_second")) is not None:
        parts.append(f"{rate:,.0f} examples/s")
    if (accuracy := status.get("test_accuracy")) is not None:
        parts.append(f"test accuracy {100 * accuracy:.2f} %")
    yield escape_line(", ".join(parts))
    yield from map(escape_line, _remarks(seen))
    nodes = status.get("nodes", {})
    if nodes:
        rows = [NODE_COLUMNS, *(_node_row(seen, name) for name in nodes)]
        yield from map(escape_line, aligned(rows, right=range(3, len(NODE_COLUMNS))))


def _remarks(seen: RunSeen) -> Iterator[str]:
    """How old the figures are, why it ended, and how it goes on."""
    controller = f"its controller (process {seen.info.pid} on {seen.info.host})"
    age = f"figures of {_ago(seen.age_s)}" if (seen.age_s or 0.0) > FRESH_S else ""
    if seen.state == LOST:
        yield f"{age}{age and ': '}{controller} ended without a word"
    elif age and seen.is_here and (seen.age_s or 0.0) > SILENT_S:
        yield f"{age}: {controller} does not answer"
    elif age:
        yield age
    if seen.state in FAILED and seen.status.get("reason"):
        yield f"cause: {seen.status['reason']}"
    if seen.state in (LOST, *UNFINISHED):
        way = way_on(seen.state, seen.run_dir)
        yield way if seen.is_saved else "nothing was saved: train it anew"


def _ago(age_s: float | None) -> str:
    if age_s is None:
        return "-"
    return f"{age_s:.0f} s ago" if age_s < 60.0 else f"{describe_duration(age_s)} ago"


def _node_row(seen: RunSeen, name: str) -> Row:
    node: Mapping[str, Any] = seen.status["nodes"][name]
    state = str(node.get("state", "-"))

    def shown(key: str, form: str) -> str:
        value = node.get(key)
        return "-" if value is None else format(value, form)

    def size(key: str) -> str:
        value = node.get(key)
        return "-" if value is None else describe_bytes(int(value))

    return (
        name,
        str(node.get("host", "-")),
        f"was {state}" if seen.is_over and state in LIVING else state,
        shown("steps", ",d"),
        shown("examples_per_second", ",.0f"),
        shown("staleness", ".2f"),
        size("rss_bytes") if node.get("rss_bytes") else "-",
        size("bytes_in"),
        size("bytes_out"),
    )


def run_row(seen: RunSeen) -> Row:
    """Of RUN_COLUMNS."""
    status, state = seen.status, describe_status(seen.state)
    if state == "running" and (seen.age_s or 0.0) > FRESH_S:
        state = f"running, {_ago(seen.age_s)}"
    accuracy = status.get("test_accuracy")
    return (
        seen.run_dir,
        seen.info.started[:19].replace("T", " "),
        state,
        format(status["steps"], ",d") if "steps" in status else "-",
        format(status["epochs"], ".2f") if "epochs" in status else "-",
        "-" if accuracy is None else f"{100 * accuracy:.2f} %",
    )


def aligned(rows: Sequence[Row], *, right: Sequence[int] = ()) -> list[str]:
    """Columns as wide as their widest cell; those in `right` end in one column."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
