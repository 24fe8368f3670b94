"""`dbctl launch-cluster`: keepers on all hosts of a file, or on none.

Rules of this file: whatever cuts a launch off, no keeper stays that no file tells of; a name is in
use until each of its hosts has said that no keeper is there.

Theory of operation. The cluster is written down once all hosts are ready and before any keeper is
told to stay (`dbctl.launch.standing` calls `keep` in between), and again with what they said then.
A failure from the first writing on takes back what may stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from dbctl.errors import LaunchError, RunError, UsageError
from dbctl.experiment.read import load_hosts
from dbctl.experiment.specs import HostSpec
from dbctl.launch.bootstrap import nobody
from dbctl.launch.standing import Keeper, bring_up
from dbctl.run import clusters
from dbctl.run.bootstrap import bootstrap as bring_dbctl
from dbctl.run.cluster_hosts import end_keepers, look
from dbctl.run.clusters import Cluster
from dbctl.run.findings import of_error, refusal
from dbctl.run.signals import Signals


def launch(
    path: str,
    name: str | None,
    *,
    bootstrap: bool = False,
    signals: Signals | None = None,
    tell: Callable[[str], object] = nobody,
) -> Cluster:
    """Keepers on all hosts of a file, or on none. `bootstrap`: dbctl is brought there first.

    ExperimentError, UsageError: the file or the name; LaunchError: all hosts where none came up;
    Interrupted: one of `signals` has come. `tell` is told what takes its time, and of keepers that
    could not be stopped.
    """
    signals = signals if signals is not None else Signals()
    name = name if name is not None else Path(path).stem
    file = clusters.path_of(name)
    hosts = load_hosts(path)
    if file.exists():
        _make_way(clusters.read(name))
    for other, shared in _shared(name, hosts):
        tell(f"warning: {shared} in cluster {other}, too: the runs of both share what is there")
    written: list[Cluster] = []

    def interrupted() -> bool:
        return signals.count > 0

    def keep(keepers: list[Keeper]) -> None:
        signals.check()
        written.append(clusters.begin(name, keepers))

    try:
        if bootstrap:
            hosts = bring_dbctl(hosts, interrupted=interrupted, tell=tell)
        keepers = bring_up(name, hosts, keep=keep, interrupted=interrupted)
        cluster = msgspec.structs.replace(written[0], keepers=tuple(keepers))
        clusters.renew(cluster)
        _check_that_they_stay(cluster)
        signals.check()
    except BaseException as error:
        for one in written:
            _take_back(one, tell)
        signals.check()
        if isinstance(error, ExceptionGroup):
            errors = [of_error(e) for e in error.exceptions if isinstance(e, LaunchError)]
            refused = refusal(errors, len(hosts))
            assert refused is not None
            raise refused from error
        raise
    return cluster


def _take_back(cluster: Cluster, tell: Callable[[str], object]) -> None:
    """Stops what may stay of it; it is forgotten only where nothing does."""
    if left := [one.host.name for one in end_keepers(cluster) if not one.is_over]:
        do = f"`dbctl stop-cluster {cluster.name}` ends it"
        tell(f"warning: {', '.join(left)}: its agent may live: {do}")


def _shared(name: str, hosts: Sequence[HostSpec]) -> Iterator[tuple[str, str]]:
    """Each other cluster that has hosts which are reached as some of `hosts` are, and which."""
    for other in (one for one in clusters.known() if one != name):
        with contextlib.suppress(RunError, UsageError):  # damaged, or stopped meanwhile
            there = {one.host.destination for one in clusters.read(other).keepers}
            if found := [host.name for host in hosts if host.destination in there]:
                yield other, f"{', '.join(found)} {'is' if len(found) == 1 else 'are'}"


def _check_that_they_stay(cluster: Cluster) -> None:
    """The ssh that started them has ended; LaunchError where keepers went with it."""
    lost = [one.host.name for one in look(cluster) if one.state == "gone"]
    if lost:
        raise LaunchError(
            "keeper",
            "does not outlive the ssh that started it",
            host=", ".join(lost),
            cure="where systemd ends what a user leaves, `loginctl enable-linger` as that user",
        )


def _make_way(cluster: Cluster) -> None:
    """Forgets a cluster that has no keeper any more; UsageError where one may live."""
    left = [one for one in look(cluster) if one.state != "gone"]
    if left:
        states = ", ".join(f"{one.host.name} is {one.state}" for one in left)
        raise UsageError(
            f"there is a cluster {cluster.name} already ({states}): give --name another, or stop "
            f"that one, `dbctl stop-cluster {cluster.name}`"
        )
    clusters.forget(cluster)
