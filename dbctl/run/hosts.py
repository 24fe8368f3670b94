"""How the agents of a run come up, by its experiment's `cluster`.

Rules of this file: it chooses a launcher and refuses what cannot be reached yet; it starts nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from dbctl.errors import PlanError
from dbctl.experiment.specs import HostSpec, SshCluster
from dbctl.launch.base import Launcher
from dbctl.launch.local import LocalLauncher
from dbctl.launch.ssh import SshLauncher, errand, ssh_command
from dbctl.plan import Plan

TOKEN_BYTES = 8


def check_reach(plan: Plan) -> None:
    """PlanError where processes of different hosts would have to speak to each other."""
    if len(plan.hosts) > 1:
        used = ", ".join(plan.hosts)
        raise PlanError(
            f"the plan needs {len(plan.hosts)} hosts ({used}), and data between hosts is not sent "
            "yet: expected one; give one host slots for all processes, or leave the others out"
        )


def members(plan: Plan) -> list[tuple[str, HostSpec]]:
    """(agent's name, host) of each host that ssh reaches and that runs something."""
    cluster = plan.experiment.cluster
    if not isinstance(cluster, SshCluster):
        return []
    by_name = {host.name: host for host in cluster.members}
    return [(plan.agent_of(name), by_name[name]) for name in plan.hosts]


def launcher_of(
    plan: Plan,
    *,
    run: str,
    runtime: str,
    logs: Path,
    lease_s: float,
    interrupted: Callable[[], bool],
) -> Launcher:
    """Of one life of a run. `interrupted`: whether a signal has come while agents come up."""
    hosts = members(plan)
    if not hosts:
        return LocalLauncher(runtime=runtime, run=run, logs=logs, lease_s=lease_s)
    return SshLauncher(
        hosts=hosts,
        runtime=runtime,
        run=run,
        logs=logs,
        token=secrets.token_hex(TOKEN_BYTES),
        lease_s=lease_s,
        interrupted=interrupted,
    )


def commands(plan: Plan) -> Iterator[tuple[str, HostSpec, list[str]]]:
    """(agent, host, words) as they would be run; RUNTIME and TOKEN are made anew for each run."""
    for agent, host in members(plan):
        one = errand(agent, host, runtime="RUNTIME", token="TOKEN")
        yield agent, host, ssh_command(one)
