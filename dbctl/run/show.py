"""What `dbctl status` shows: of clusters, and which runs; lines for people, values for `--json`.

Rules of this file: pure but for `look`, which reads files and asks hosts. Words of hosts and files
are escaped before they reach a terminal; what was not measured is `-`, in JSON null.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from dbctl.errors import RunError, UsageError
from dbctl.plan import describe_bytes
from dbctl.process import escape_line
from dbctl.progress.text import counted, describe_duration
from dbctl.run import clusters
from dbctl.run.cluster_hosts import Seen
from dbctl.run.cluster_hosts import look as look_at
from dbctl.run.clusters import Cluster, describe_known
from dbctl.run.find import RUNS, find, runs_below
from dbctl.run.show_run import (
    RUN_COLUMNS,
    Row,
    aligned,
    of_run,
    run_lines,
    run_object,
    run_row,
)
from dbctl.rundir import RunDir

MOST_RUNS = 20  # listed
CLUSTER_COLUMNS: Row = ("cluster", "host", "state", "up", "runs")


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
            rows.append(run_row(seen))
    if len(found) > MOST_RUNS:
        faults.append(f"and {counted(len(found) - MOST_RUNS, 'older run')}")
    table = aligned(rows, right=(3, 4, 5)) if len(rows) > 1 else []
    return Shown(object={"runs": objects}, lines=[*map(escape_line, [*table, *faults])])


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
