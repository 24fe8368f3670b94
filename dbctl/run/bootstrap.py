"""`--bootstrap` of a run: dbctl is brought to the hosts of its plan, which then use that one.

Rules of this file: nothing else of the plan changes. The Python of a host becomes that of its
virtual environment, also in resolved.yaml: `resume` and `eval` use it without being told again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dbctl.errors import LaunchError
from dbctl.experiment.specs import HostSpec, SshCluster
from dbctl.launch.bootstrap import bring, nobody
from dbctl.plan import Plan
from dbctl.run.findings import of_error, refusal
from dbctl.run.hosts import members
from dbctl.run.signals import Signals


def bootstrap(
    hosts: Sequence[HostSpec],
    *,
    interrupted: Callable[[], bool] = lambda: False,
    tell: Callable[[str], object] = nobody,
) -> tuple[HostSpec, ...]:
    """The hosts, each with a `python` that has the dbctl of here; LaunchError tells of all others.

    `tell` is told what takes its time.
    """
    outcomes = bring(hosts, interrupted=interrupted, tell=tell)
    errors = [of_error(one) for one in outcomes if isinstance(one, LaunchError)]
    if (error := refusal(errors, len(hosts))) is not None:
        raise error
    return tuple(one for one in outcomes if isinstance(one, HostSpec))


def bootstrapped(
    plan: Plan, signals: Signals, *, tell: Callable[[str], object] = nobody
) -> Plan | None:
    """The plan, its hosts with the `python` that was made; a plan of this machine as it is.

    None: a signal came meanwhile. LaunchError: of all hosts that dbctl was not brought to.
    """

    def interrupted() -> bool:
        return signals.count > 0

    cluster = plan.experiment.cluster
    if not isinstance(cluster, SshCluster):
        return plan
    try:
        made = bootstrap([host for _, host in members(plan)], interrupted=interrupted, tell=tell)
    except LaunchError:
        if interrupted():
            return None
        raise
    by_name = {host.name: host for host in made}
    hosts = tuple(by_name.get(host.name, host) for host in cluster.members)
    experiment = replace(plan.experiment, cluster=replace(cluster, hosts=hosts))
    return replace(plan, experiment=experiment)
