"""What `dbctl status` shows of clusters and of a run: lines for people, plain values for `--json`.

Rules of this file: pure but for `of_run` and `look`, which read files and ask hosts. Words of hosts
and files are escaped before they reach a terminal; what was not measured is `-`, in JSON null.
How old figures are is told, and decides nothing: it is by the clock of who wrote them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import to_builtins

from dbctl.errors import RunError, UsageError
from dbctl.plan import describe_bytes
from dbctl.process import escape_line
from dbctl.progress.text import (
    FAILED,
    UNFINISHED,
    counted,
    describe_duration,
    describe_status,
    way_on,
)
from dbctl.run import clusters
from dbctl.run.cluster_hosts import Seen
from dbctl.run.cluster_hosts import look as look_at
from dbctl.run.clusters import Cluster, describe_known
from dbctl.run.find import RUNS, find, runs_below
from dbctl.rundir import RunDir, RunInfo

Row = Sequence[str]
LOST = "lost"  # a run whose controller ended without a word
STARTING = "starting"
FRESH_S = 3.0  # figures are replaced every second; of older ones their age is shown
SILENT_S = 10.0  # a lease: whoever writes nothing for so long is not only busy
MOST_RUNS = 20  # listed
RUN_COLUMNS: Row = ("run", "started", "state", "steps", "epochs", "test accuracy")
CLUSTER_COLUMNS: Row = ("cluster", "host", "state", "up", "runs")
NODE_COLUMNS = (
    "node", "host", "state", "steps", "examples/s", "staleness", "memory", "received", "sent",
)  # fmt: skip


# -------------------------------------------------------------------------------------- clusters


def cluster_object(cluster: Cluster, seen: Sequence[Seen]) -> dict[str, Any]:
    return {
        "cluster": cluster.name,
        "launched": cluster.launched,
        "hosts": [
            {
                "host": one.host.name,
                "ssh": one.host.destination,
                "state": one.state,
                "why": one.why or None,
                "version": one.said.version if one.said else None,
                "seconds": one.said.seconds if one.said else None,
                "runs": to_builtins(one.said.runs) if one.said else [],
            }
            for one in seen
        ],
    }


def cluster_rows(cluster: Cluster, seen: Sequence[Seen]) -> Iterator[Row]:
    """A line a host: of all clusters together they make one table."""
    for one in seen:
        runs = [run.name for run in one.said.runs] if one.said else []
        up = describe_duration(one.said.seconds) if one.said else "-"
        yield cluster.name, one.host.name, one.state, up, ", ".join(runs) or "-"


def cluster_lines(cluster: Cluster, seen: Sequence[Seen]) -> Iterator[str]:
    """Each host with its runs, and their nodes."""
    yield escape_line(f"cluster {cluster.name}, launched {cluster.launched}")
    for one in seen:
        yield escape_line(f"{one.host.name}  {_state(one)}")
        for run in one.said.runs if one.said else ():
            since = describe_duration(run.seconds)
            place = f"{run.user}: {run.run_dir}"
            yield escape_line(f"    {run.name}  {run.agent} pid {run.pid}  {since}  {place}")
            rows = [
                (
                    node.node,
                    f"pid {node.pid}",
                    describe_bytes(node.rss_bytes),
                    describe_duration(node.seconds),
                )
                for node in run.nodes
            ]
            yield from (escape_line(f"        {line}") for line in aligned(rows))


def _state(one: Seen) -> str:
    if one.said is None:
        return f"{one.state}: {one.why}" if one.why else one.state
    runs, up = counted(len(one.said.runs), "run"), describe_duration(one.said.seconds)
    return f"{one.state}, {runs}, for {up}, dbctl {one.said.version}"


# ------------------------------------------------------------------------------------------ a run


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
    info, status = run_dir.read_info(), run_dir.read_status()
    if status.get("run") != info.run:
        status = {}  # it is of an earlier life
    try:
        msgspec.convert(status, _Status)
    except msgspec.ValidationError as error:
        raise RunError(f"{run_dir.status} is not as dbctl writes it: {error}") from None
    state = str(status.get("state", STARTING))
    is_here = info.host == os.uname().nodename
    # Only its own machine knows whether its controller lives.
    if state in ("running", STARTING) and is_here and not info.is_alive():
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
        rows = [NODE_COLUMNS, *(_node_row(name, node) for name, node in nodes.items())]
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


def _node_row(name: str, node: Mapping[str, Any]) -> Row:
    def shown(key: str, form: str) -> str:
        value = node.get(key)
        return "-" if value is None else format(value, form)

    def size(key: str) -> str:
        value = node.get(key)
        return "-" if value is None else describe_bytes(int(value))

    return (
        name,
        str(node.get("host", "-")),
        str(node.get("state", "-")),
        shown("steps", ",d"),
        shown("examples_per_second", ",.0f"),
        shown("staleness", ".2f"),
        size("rss_bytes") if node.get("rss_bytes") else "-",
        size("bytes_in"),
        size("bytes_out"),
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


# ------------------------------------------------------------------------- what a command was given


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One look: plain values, lines, and whether there will be nothing new."""

    object: dict[str, Any]
    lines: list[str]
    is_over: bool = False


def look(what: str | None) -> Shown:
    """All clusters and the runs in ./runs, or the cluster or run that `what` names.

    UsageError: it is neither.

    A cluster's name comes first: a directory of that name is ./NAME.
    """
    if what is None:
        return _everything()
    if what in clusters.known():
        cluster = clusters.read(what)
        seen = look_at(cluster)
        return Shown(object=cluster_object(cluster, seen), lines=list(cluster_lines(cluster, seen)))
    if not Path(what).exists() and os.sep not in what:
        raise UsageError(f"{what}: neither a cluster nor a run directory; {describe_known()}")
    with find(what) as run_dir:
        run = of_run(run_dir)
    return Shown(object=run_object(run), lines=list(run_lines(run)), is_over=run.is_over)


def _everything() -> Shown:
    all_clusters, runs = _all_clusters(), _runs_in(RUNS)
    between = [""] if runs.lines else []
    lines = [*all_clusters.lines, *between, *runs.lines]
    return Shown(object=all_clusters.object | runs.object, lines=lines)


def _runs_in(root: Path) -> Shown:
    """A line a run, newest first."""
    objects, rows, faults = [], [RUN_COLUMNS], []
    found = runs_below(root)
    for path in found[:MOST_RUNS]:
        try:
            seen = of_run(RunDir(path))
        except RunError as error:
            objects.append({"run_dir": str(path), "error": str(error)})
            faults.append(str(error))
        else:
            objects.append({k: v for k, v in run_object(seen).items() if k != "nodes"})
            rows.append(_run_row(seen))
    if len(found) > MOST_RUNS:
        faults.append(f"and {counted(len(found) - MOST_RUNS, 'older run')}")
    table = aligned(rows, right=(3, 4, 5)) if len(rows) > 1 else []
    return Shown(object={"runs": objects}, lines=[*map(escape_line, [*table, *faults])])


def _run_row(seen: RunSeen) -> Row:
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


def _all_clusters() -> Shown:
    """All are asked at once."""
    names = clusters.known()
    if not names:
        return Shown(object={"clusters": []}, lines=[f"no clusters; {describe_known()}"])
    with ThreadPoolExecutor(len(names)) as pool:
        found = list(pool.map(_try_cluster, names))
    objects, rows, faults = [], [CLUSTER_COLUMNS], []
    for name, one in zip(names, found, strict=True):
        if one is None:
            continue
        if isinstance(one, RunError):
            objects.append({"cluster": name, "error": str(one)})
            faults.append(escape_line(str(one)))
        else:
            objects.append(cluster_object(*one))
            rows += cluster_rows(*one)
    lines = [*map(escape_line, aligned(rows)), *faults]
    return Shown(object={"clusters": objects}, lines=lines)


def _try_cluster(name: str) -> tuple[Cluster, list[Seen]] | RunError | None:
    """None: it was stopped meanwhile."""
    try:
        cluster = clusters.read(name)
        return cluster, look_at(cluster)
    except RunError as error:
        return error
    except UsageError:
        return None


# ------------------------------------------------------------------------------- a launched cluster


def launched_object(cluster: Cluster) -> dict[str, Any]:
    return {
        "cluster": cluster.name,
        "launched": cluster.launched,
        "hosts": [
            {"host": one.host.name, "ssh": one.host.destination, "pid": one.pid,
             "python": one.python, "workdir": one.host.workdir, "slots": one.host.slots}
            for one in cluster.keepers
        ],
    }  # fmt: skip


def launched_lines(cluster: Cluster) -> Iterator[str]:
    rows: list[Row] = [("host", "ssh", "slots", "pid", "python")]
    for one in cluster.keepers:
        slots = "-" if one.host.slots is None else str(one.host.slots)
        rows.append((one.host.name, one.host.destination, slots, str(one.pid), one.python))
    yield from map(escape_line, aligned(rows))
    n = counted(len(cluster.keepers), "host")
    yield f"cluster {cluster.name} stands on {n}: dbctl train FILE.yaml --cluster {cluster.name}"
