"""`dbctl resume RUN_DIR`."""

from __future__ import annotations

import sys

import click


@click.command()
@click.argument("run_dir", type=click.Path())
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key.")
@click.option("--bootstrap", is_flag=True, help="Bring dbctl to the hosts first.")
@click.option("--cluster", metavar="NAME", help="On the hosts of a cluster (launch-cluster).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines on stdout.")
@click.option("--quiet", is_flag=True, help="Only warnings and the last line.")
def resume(
    *,
    run_dir: str,
    overrides: tuple[str, ...],
    bootstrap: bool,
    cluster: str | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Go on from a run's newest good checkpoint.

    Only stop, replicas, min_replicas, shards, partition, evaluate, checkpoint, cluster and the ship
    of data can be set anew.
    """
    from dbctl.cli.cluster import cluster_of
    from dbctl.cli.main import status_of_run
    from dbctl.progress.display import make_display
    from dbctl.run import resume as run

    hosts = cluster_of(cluster, bootstrap=bootstrap)
    display = make_display(json=as_json, stderr_is_tty=sys.stderr.isatty(), quiet=quiet)
    status = run.resume(run_dir, overrides, display=display, bootstrap=bootstrap, cluster=hosts)
    return status_of_run(status, display.unwritten)
