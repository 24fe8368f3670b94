"""`dbctl doctor [FILE]`."""

from __future__ import annotations

import json
from functools import partial

import click


@click.command()
@click.argument("file", required=False, type=click.Path())
@click.option("--bootstrap", is_flag=True, help="Bring dbctl to the hosts first.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def doctor(*, file: str | None, bootstrap: bool, as_json: bool) -> int:
    """Examine hosts, or this machine, and start nothing; exit status 1 if one is not ready.

    FILE is a hosts file or an experiment; without it this machine is examined.
    """
    from dbctl.run import doctor as run

    report = run.doctor(file, bootstrap=bootstrap, tell=partial(click.echo, err=True))
    if as_json:
        click.echo(json.dumps(run.as_object(report), allow_nan=False))
    else:
        for line in run.lines(report):
            click.echo(line)
    return 0 if report.is_well else 1
