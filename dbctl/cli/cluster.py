"""`dbctl launch-cluster HOSTS.yaml` and `dbctl stop-cluster NAME`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from dbctl.process import escape_line

if TYPE_CHECKING:
    from dbctl.run.clusters import Cluster


def cluster_of(name: str | None, *, bootstrap: bool) -> Cluster | None:
    """What --cluster of another command names; None where it is not given."""
    if name is None:
        return None
    if bootstrap:
        raise click.UsageError(
            "--bootstrap is for launch-cluster: the agents of a cluster stand already"
        )
    from dbctl.run import clusters

    return clusters.read(name)


@click.command("launch-cluster")
@click.argument("hosts", metavar="HOSTS.yaml", type=click.Path())
@click.option("--name", metavar="NAME", help="What to call it; default: the file's name.")
@click.option("--bootstrap", is_flag=True, help="Bring dbctl to the hosts first.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def launch_cluster(*, hosts: str, name: str | None, bootstrap: bool, as_json: bool) -> int:
    """Start an agent on each host of a file, and leave them running.

    `dbctl train --cluster NAME` runs on them. They end by `dbctl stop-cluster NAME`, or after 12
    hours without a run.
    """
    from dbctl.run import launching, show
    from dbctl.run.signals import Interrupted, Signals

    with Signals() as signals:
        try:
            cluster = launching.launch(
                hosts, name, bootstrap=bootstrap, signals=signals, tell=_tell
            )
        except Interrupted:
            _tell(f"dbctl: error: {signals.status} before the cluster was up")
            return 130 if signals.status == "interrupted" else 75
    if as_json:
        click.echo(json.dumps(show.launched_object(cluster)))
        return 0
    for line in show.launched_lines(cluster):
        click.echo(line)
    return 0


@click.command("stop-cluster")
@click.argument("name")
@click.option(
    "--force", is_flag=True, help="Do not wait for runs; forget hosts that cannot be reached."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def stop_cluster(*, name: str, force: bool, as_json: bool) -> int:
    """End the agents of a cluster, and the runs that are on it.

    Runs of yours on this machine are asked first, and have 30 seconds for a final checkpoint (exit
    75); with --force no run is waited for.
    """
    from dbctl.run import clusters, show, stopping

    cluster = clusters.read(name)
    try:
        found, runs = stopping.stop_all(cluster, force=force, tell=_tell)
    except KeyboardInterrupt:
        _tell(f"dbctl: error: interrupted; `dbctl stop-cluster {name}` ends what is left of it")
        return 130
    if as_json:
        told = {**show.cluster_object(cluster, found), "runs": stopping.objects(runs)}
        click.echo(json.dumps(told))
    else:
        for line in (*show.cluster_lines(cluster, found), *(run.line() for run in runs)):
            click.echo(line)
    left = [one.host.name for one in found if not one.is_over]
    if left and not force:
        what = f"{', '.join(left)}: its agent may live; run this again when it can be reached, or"
        _tell(f"dbctl: error: {what} give --force to forget it")
    elif left:
        what = f"an agent that lives on {', '.join(left)} ends after 12 hours without a run"
        _tell(f"warning: {what}")
    return 1 if left and not force else 0


def _tell(text: str) -> None:
    click.echo(escape_line(text), err=True)
