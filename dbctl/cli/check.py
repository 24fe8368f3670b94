"""`dbctl validate` and `dbctl schema`: what an experiment file may say, and whether one says it."""

from __future__ import annotations

import json

import click

from dbctl.process import escape_line


@click.command()
@click.argument("file", type=click.Path())
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override one key.")
def validate(file: str, overrides: tuple[str, ...]) -> None:
    """Check an experiment file: one line if it is good, else every problem and exit status 2."""
    from dbctl.experiment.read import load
    from dbctl.progress.text import counted
    from dbctl.run.doubts import unlike_splits

    experiment = load(file, overrides)
    what = f"{experiment.optimizer.type}, {counted(len(experiment.network.layers), 'layer')}"
    replicas = counted(experiment.replicas, "replica")
    sizes = f"{replicas}, {counted(experiment.shards, 'shard')}"
    data = "its data are looked at by `dbctl train --dry-run`"
    click.echo(escape_line(f"{file}: ok: {experiment.name}: {what}, {sizes}; {data}"))
    for doubt in unlike_splits(experiment):
        warn_absent(doubt)
    if experiment.initialize_from is not None:
        from dbctl.run.initial_run import absent

        warn_absent(absent(experiment))


def warn_absent(text: str) -> None:
    """On stderr: what a run would need and is not there, which is no fault of the file."""
    if text:
        click.echo(f"warning: {escape_line(text)}", err=True)


@click.command()
def schema() -> None:
    """Print the JSON Schema of experiment files, for editors that complete and check YAML."""
    from dbctl.experiment.schema import schema as make_schema

    click.echo(json.dumps(make_schema(), indent=2))
