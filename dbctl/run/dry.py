"""`dbctl train --dry-run`: what a run would be, with nothing started and nothing written.

Rules of this file: text for people, or one JSON object with `--json`. With counts of partitions the
speeds of this machine are measured, for a few seconds.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from dbctl.data.sources import open_source
from dbctl.errors import PlanError
from dbctl.experiment.read import load
from dbctl.experiment.specs import SandblasterSpec
from dbctl.forecast import as_object, cuts_of, lines, parse_counts, tables
from dbctl.launch.bootstrap import nobody
from dbctl.launch.ssh_words import NOWHERE, Standing
from dbctl.plan import Plan, describe_bytes
from dbctl.process import one_line
from dbctl.run.clusters import Cluster, overrides_on
from dbctl.run.hosts import commands
from dbctl.run.methods import evaluation_lines
from dbctl.run.room import without_rows
from dbctl.run.shipments import sets_for
from dbctl.run.train import prepare
from dbctl.run.wiring import UNENCRYPTED, wired

ENCRYPTED = "encrypted, with a key of its own for each process"


def dry_run(
    path: str,
    overrides: Sequence[str],
    *,
    partitions: str | None,
    as_json: bool,
    warn: Callable[[str], None],
    tell: Callable[[str], None] = nobody,
    run_dir: str | None = None,
    cluster: Cluster | None = None,
) -> Iterator[str]:
    """Lines of the plan and, for counts of partitions like `1,2,4`, of the forecast.

    DbctlError where `prepare` refuses a run, or a count is bad: before anything is measured. `warn`
    is told as for a run, and where the run of `initialize_from` is not there yet; `tell` what takes
    its time.
    """
    overrides = overrides_on(cluster, overrides)
    standing = NOWHERE if cluster is None else cluster.standing()
    counts = parse_counts(partitions) if partitions is not None else []
    plan = prepare(path, overrides, run_dir=run_dir, warn=warn, starts=False).plan
    experiment = plan.experiment
    if not counts:
        yield from [json.dumps(plan_object(plan, standing))] if as_json else text(plan, standing)
        return
    from dbctl.run.speeds import measure

    cuts = cuts_of(experiment, counts)
    # Not as many as this machine has cores for: each partition is taken to have its own.
    threads = load(path, overrides).threads or 1
    n = experiment.optimizer.batch_size
    tell("measuring this machine: that takes 5 to 15 seconds, of a large network more")
    try:
        speeds = measure(experiment, open_source(experiment.data.train), threads=threads)
    except MemoryError as error:
        fault = f"a mini-batch of {n:,} rows does not fit into memory here ({one_line(error)})"
        raise PlanError(f"--partitions: {fault}; take a smaller batch_size") from None
    found, cores = tables(experiment, cuts, speeds), len(os.sched_getaffinity(0))
    if as_json:
        forecast = as_object(found, batch_size=n, speeds=speeds)
        forecast |= {"threads": threads, "cores": cores}
        yield json.dumps({**plan_object(plan, standing), "forecast": forecast})
        return
    yield from text(plan, standing)
    yield ""
    yield from lines(found, batch_size=n, cores=cores)


def text(plan: Plan, standing: Standing = NOWHERE) -> Iterator[str]:
    """The plan, and for hosts that ssh reaches their addresses and the commands."""
    yield from evaluation_lines(plan)
    yield from plan_lines(plan)
    for agent, host, words in commands(plan, standing):
        n = sum(node.host == host.name for node in plan.nodes)
        slots = f" of {host.slots} slots" if host.slots is not None else ""
        yield ""
        yield f"{host.name}: {agent}, {n} processes{slots}, others connect to {host.reached_at}"
        yield f"    {shlex.join(words)}"
        if sets := sets_for(plan, host.name):
            yield f"    is sent what it does not have of: {'; '.join(sets)}"
    if len(plan.hosts) > 1:
        yield ""
        yield "between hosts: tcp, " + (ENCRYPTED if wired(plan, {}).encrypted else UNENCRYPTED)


def plan_lines(plan: Plan) -> Iterator[str]:
    """Placement, ranges, bytes a step, memory a process."""
    fetched, pushed = plan.bytes_a_step()
    yield f"parameters  {plan.n_parameters:,} in {len(plan.tensors)} tensors"
    sizes = f"fetches {describe_bytes(fetched)} and pushes {describe_bytes(pushed)}"
    yield f"a step      {sizes} a replica{_meanwhile(plan)}"
    if plan.experiment.initialize_from is not None:
        yield f"begin       with the parameters of {plan.experiment.initialize_from}"
    yield f"rows        {', '.join(f'{n:,}' for n in plan.rows if n)} (one figure a replica)"
    yield ""
    node_width = 2 + max(12, *(len(node.node) for node in plan.nodes))
    host_width = 2 + max(10, *(len(node.host) for node in plan.nodes))
    yield f"{'node':<{node_width}}{'host':<{host_width}}{'threads':>7}{'memory':>12}  what"
    for node in plan.nodes:
        if node.role == "worker" and not plan.rows[node.replica]:
            continue
        memory = describe_bytes(node.memory_bytes)
        where = f"{node.node:<{node_width}}{node.host:<{host_width}}"
        yield f"{where}{node.threads:>7}{memory:>12}  {node.what}"
    if said := without_rows(plan):
        yield said


def _meanwhile(plan: Plan) -> str:
    """What a worker does while they are on their way: which is left open by most files."""
    optimizer = plan.experiment.optimizer
    if isinstance(optimizer, SandblasterSpec):
        return ""
    return ", which computes meanwhile" if optimizer.client.overlap else ", which waits for both"


def plan_object(plan: Plan, standing: Standing = NOWHERE) -> dict[str, object]:
    """The plan as plain values."""
    fetched, pushed = plan.bytes_a_step()
    return {
        "event": "plan",
        "name": plan.experiment.name,
        "parameters": plan.n_parameters,
        "bytes_fetched": fetched,
        "bytes_pushed": pushed,
        "overlap": getattr(plan.experiment.optimizer, "overlap", None),
        "initialize_from": plan.experiment.initialize_from,
        "rows": plan.rows,
        "partitions": plan.cut.count,
        "nodes": [asdict(node) for node in plan.nodes],
        "hosts": [
            {
                "name": host.name,
                "agent": agent,
                "address": host.reached_at,
                "command": words,
                "is_sent": sets_for(plan, host.name),
            }
            for agent, host, words in commands(plan, standing)
        ],
    }
