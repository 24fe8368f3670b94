"""What an experiment's `cluster` means on this machine: which launcher, and where its hosts are.

Rules of this file: it chooses a launcher and looks up addresses; no host hears of it. Hosts that
ssh reaches are examined first (dbctl/run/preflight.py). `--dry-run` looks nothing up.

Theory of operation. Hosts connect to each other at IP addresses, and each listens on its own only.
A name is looked up here, once, so that all are told the same: what a host's own tables say of its
name is mostly 127.0.1.1. Without an `address` it is the name that ssh itself would connect to
(dbctl/launch/ssh_name.py): hosts are often known by ~/.ssh/config only. A loopback address is
refused unless every host is this machine: each would reach itself there.
"""

from __future__ import annotations

import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from threading import Thread

from dbctl.errors import LaunchError, PlanError, reason
from dbctl.experiment.specs import HostSpec, SshCluster
from dbctl.launch.base import Launcher
from dbctl.launch.local import LocalLauncher
from dbctl.launch.ssh import SshLauncher
from dbctl.launch.ssh_name import name_of
from dbctl.launch.ssh_words import NO_SSH, NOWHERE, Standing, errand, ssh_command
from dbctl.plan import Plan
from dbctl.run.findings import Needs
from dbctl.run.preflight import Preflight, asked_of
from dbctl.run.wiring import Wiring, wired

TOKEN_BYTES = 8
LOOK_UP_S = 10.0
GIVE_ADDRESS = "give each its `address`, where the other hosts reach it"


def members(plan: Plan) -> list[tuple[str, HostSpec]]:
    """(agent's name, host) of each host that ssh reaches and that runs something."""
    cluster = plan.experiment.cluster
    if not isinstance(cluster, SshCluster):
        return []
    by_name = {host.name: host for host in cluster.members}
    return [(plan.agent_of(name), by_name[name]) for name in plan.hosts]


def wire(plan: Plan) -> Wiring:
    """Which nodes share a host, and where hosts reach each other.

    PlanError: a host whose address nobody here knows, or that only it can reach itself at.
    LaunchError: there is no ssh here, which may know those addresses and leads to the hosts.
    """
    hosts = [host for _, host in members(plan)]
    if hosts and shutil.which("ssh") is None:
        what, do = NO_SSH
        raise LaunchError("ssh", what, about="ssh", cure=do)
    return wired(plan, addresses(hosts) if len(hosts) > 1 else {})


def addresses(
    hosts: Sequence[HostSpec], look_up: Callable[[str], list[str]] | None = None
) -> dict[str, str]:
    """The IP address of each host by its name; PlanError tells of all that have none."""
    found, faults = find_addresses(hosts, look_up)
    if faults:
        alike: dict[str, list[str]] = {}
        for name, fault in faults.items():
            alike.setdefault(fault, []).append(name)
        told = [
            f"host{'s' if len(names) > 1 else ''} {', '.join(names)}: {fault}"
            for fault, names in alike.items()
        ]
        raise PlanError(f"{'; '.join(told)}: {GIVE_ADDRESS}")
    return found


def find_addresses(
    hosts: Sequence[HostSpec], look_up: Callable[[str], list[str]] | None = None
) -> tuple[dict[str, str], dict[str, str]]:
    """By name of a host: its IP address, or what is wrong where others cannot come to it."""
    answers = _addresses(hosts, look_up or _look_up)
    found = {name: answer for name, answer in answers.items() if isinstance(answer, str)}
    faults = {name: str(answer) for name, answer in answers.items() if isinstance(answer, OSError)}
    inside = [name for name, address in found.items() if ip_address(address).is_loopback]
    if len(inside) < len(found):
        for name in inside:
            faults[name] = f"others would connect to {found.pop(name)}, and reach themselves"
    return found, faults


def _addresses(
    hosts: Sequence[HostSpec], look_up: Callable[[str], list[str]]
) -> dict[str, str | OSError]:
    """All at once, each within LOOK_UP_S: the system itself may wait for minutes."""
    answers: dict[str, str | OSError] = {}

    def ask(host: HostSpec) -> None:
        answers[host.name] = _address(host, look_up)

    threads = [Thread(target=ask, args=(host,), name="look up", daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    until = time.monotonic() + LOOK_UP_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    came = dict(answers)  # who is late may still write into the other
    return {host.name: came.get(host.name) or _no_answer(host) for host in hosts}


def _no_answer(host: HostSpec) -> OSError:
    return OSError(f"nobody said within {LOOK_UP_S:g} s what the address of {host.reached_at} is")


def _address(host: HostSpec, look_up: Callable[[str], list[str]]) -> str | OSError:
    known = _numeric(host.reached_at)
    if known is not None:
        return known
    name = host.reached_at if host.address is not None else name_of(host)
    known = _numeric(name)
    if known is not None:
        return known
    try:
        found = look_up(name)
    except OSError as error:
        return OSError(f"no address of {name} is known here ({reason(error)})")
    except UnicodeError:  # of a label that is empty or too long
        return OSError(f"no address of {name} is known here (it can be no name)")
    # A machine's own name is mostly a loopback address too.
    return next((a for a in found if not ip_address(a).is_loopback), found[0])


def _numeric(where: str) -> str | None:
    """The address, if it is one, as all write it."""
    try:
        return str(ip_address(where))
    except ValueError:
        return None


def _look_up(name: str) -> list[str]:
    """The addresses of a name as this system prefers them; at least one, or OSError."""
    rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in rows]


def launcher_of(
    plan: Plan,
    *,
    run: str,
    runtime: str,
    logs: Path,
    lease_s: float,
    interrupted: Callable[[], bool],
    needs: Mapping[str, Needs],
    wiring: Wiring,
    warn: Callable[[str], None],
    standing: Standing = NOWHERE,
) -> Launcher:
    """Of one life of a run. `interrupted`: whether a signal has come while agents come up.

    `needs`: what is wanted of each host, by its name; `warn` is told what is less than that and can
    be lived with. `standing`: where the hosts are those of a cluster that stays up.
    """
    hosts = members(plan)
    if not hosts:
        return LocalLauncher(runtime=runtime, run=run, logs=logs, lease_s=lease_s)
    launcher = SshLauncher(
        hosts=hosts,
        runtime=runtime,
        run=run,
        logs=logs,
        token=secrets.token_hex(TOKEN_BYTES),
        lease_s=lease_s,
        asked=asked_of(hosts, needs, wiring.address_of),
        standing=standing,
        interrupted=interrupted,
    )
    return Preflight(launcher, hosts, needs, warn=warn)


def commands(plan: Plan, standing: Standing = NOWHERE) -> Iterator[tuple[str, HostSpec, list[str]]]:
    """(agent, host, words) as they would be run; RUNTIME and TOKEN are made anew for each run."""
    for agent, host in members(plan):
        keeper = standing.keeper(host)
        one = errand(agent, host, runtime="RUNTIME", token="TOKEN", keeper=keeper)
        yield agent, host, ssh_command(one)
