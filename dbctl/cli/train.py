"""`dbctl train EXPERIMENT.yaml`."""

from __future__ import annotations

import sys

import click


@click.command()
@click.argument("file", type=click.Path())
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key.")
@click.option("--run-dir", type=click.Path(), help="Where the run is kept (new or empty).")
@click.option("--dry-run", is_flag=True, help="Print the plan and start nothing.")
@click.option(
    "--partitions", metavar="N,N,...", help="With --dry-run: costs and times for these counts."
)
@click.option("--bootstrap", is_flag=True, help="Bring dbctl to the hosts first.")
@click.option("--cluster", metavar="NAME", help="On the hosts of a cluster (launch-cluster).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines on stdout.")
@click.option("--quiet", is_flag=True, help="Only warnings and the last line.")
def train(
    *,
    file: str,
    overrides: tuple[str, ...],
    run_dir: str | None,
    dry_run: bool,
    partitions: str | None,
    bootstrap: bool,
    cluster: str | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Start a run from an experiment file."""
    from dbctl.cli.cluster import cluster_of
    from dbctl.cli.main import status_of_run
    from dbctl.progress.display import make_display
    from dbctl.run import train as run

    hosts = cluster_of(cluster, bootstrap=bootstrap)
    if partitions is not None and not dry_run:
        raise click.UsageError("--partitions is for --dry-run")
    if dry_run:
        from dbctl.cli.check import warn_absent
        from dbctl.process import escape_line
        from dbctl.run.dry import dry_run as print_plan

        def tell(text: str) -> None:
            if not (as_json or quiet):
                click.echo(escape_line(text), err=True)

        for line in print_plan(
            file,
            overrides,
            partitions=partitions,
            as_json=as_json,
            warn=warn_absent,
            tell=tell,
            run_dir=run_dir,
            cluster=hosts,
        ):
            click.echo(line)
        return 0
    display = make_display(json=as_json, stderr_is_tty=sys.stderr.isatty(), quiet=quiet)
    status = run.train(
        file, overrides, run_dir=run_dir, display=display, bootstrap=bootstrap, cluster=hosts
    )
    return status_of_run(status, display.unwritten)
