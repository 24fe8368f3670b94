"""What `dbctl status` shows of clusters and of a run: lines for people, plain values for `--json`.

Rules of this file: pure but for `of_run` and `look`, which read files and ask hosts. Words of hosts
and files are escaped before they reach a terminal; what was not measured is `-`, in JSON null.
"""

from __future__ import annotations

import os
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
from dbctl.progress.text import counted, describe_duration
from dbctl.run import clusters
from dbctl.run.cluster_hosts import Seen
from dbctl.run.cluster_hosts import look as look_at
from dbctl.run.clusters import Cluster, describe_known
from dbctl.run.find import find
from dbctl.rundir import RunDir

Row = Sequence[str]
LOST = "lost"  # a run whose controller ended without a word
STARTING = "starting"
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
    steps: int = 0
    epochs: float = 0.0
    examples_per_second: float | None = None
    test_accuracy: float | None = None
    nodes: dict[str, _NodeStatus] = {}


@dataclass(frozen=True, kw_only=True)
class RunSeen:
    """A run directory at one moment. `status` is status.json, `state` what can be said of it."""

    run_dir: str
    state: str
    status: dict[str, Any]

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
    # Only its own machine knows whether its controller lives.
    if state in ("running", STARTING) and info.host == os.uname().nodename and not info.is_alive():
        state = LOST
    return RunSeen(run_dir=str(run_dir.path), state=state, status=status)


def run_object(seen: RunSeen) -> dict[str, Any]:
    return {**seen.status, "run_dir": seen.run_dir, "state": seen.state}


def run_lines(seen: RunSeen) -> Iterator[str]:
    status = seen.status
    parts = [f"{seen.run_dir}: {seen.state}"]
    if "steps" in status:
        parts.append(f"step {status['steps']:,}")
        parts.append(f"epoch {status.get('epochs', 0.0):.2f}")
    if (rate := status.get("examples_per_second")) is not None:
        parts.append(f"{rate:,.0f} examples/s")
    if (accuracy := status.get("test_accuracy")) is not None:
        parts.append(f"test accuracy {100 * accuracy:.2f} %")
    yield escape_line(", ".join(parts))
    if seen.state == LOST:
        yield "its controller ended without a word: `dbctl resume` goes on from the last checkpoint"
    nodes = status.get("nodes", {})
    if nodes:
        rows = [NODE_COLUMNS, *(_node_row(name, node) for name, node in nodes.items())]
        yield from map(escape_line, aligned(rows, right=range(3, len(NODE_COLUMNS))))


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
    """All clusters, the cluster or the run that `what` names. UsageError: it is neither.

    A cluster's name comes first: a directory of that name is ./NAME.
    """
    if what is None:
        return _all_clusters()
    if what in clusters.known():
        cluster = clusters.read(what)
        seen = look_at(cluster)
        return Shown(object=cluster_object(cluster, seen), lines=list(cluster_lines(cluster, seen)))
    if not Path(what).exists() and os.sep not in what:
        raise UsageError(f"{what}: neither a cluster nor a run directory; {describe_known()}")
    with find(what) as run_dir:
        run = of_run(run_dir)
    return Shown(object=run_object(run), lines=list(run_lines(run)), is_over=run.is_over)


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
