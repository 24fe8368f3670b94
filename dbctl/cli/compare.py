"""`dbctl compare RUN_DIR RUN_DIR ...`."""

from __future__ import annotations

import json

import click


@click.command()
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path())
@click.option("--accuracy", type=float, help="The share of test rows to reach, such as 0.85.")
@click.option(
    "--split",
    type=click.Choice(["test"]),
    default="test",
    expose_value=False,
    help="Whose accuracy: a run measures only its test split.",
)
@click.option("--plot", metavar="FILE", type=click.Path(), help="Draw curves: .png or .svg.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def compare(
    *, run_dirs: tuple[str, ...], accuracy: float | None, plot: str | None, as_json: bool
) -> None:
    """Print what each run took to one accuracy.

    By default to the greatest accuracy that all of them reached.
    """
    from dbctl.progress.comparison import as_object, lines
    from dbctl.progress.text import to_json
    from dbctl.run.compare import compare as compare_runs

    found = compare_runs(run_dirs, accuracy=accuracy, plot=plot)
    if as_json:
        click.echo(json.dumps(to_json(as_object(found)), allow_nan=False))
        return
    for line in lines(found):
        click.echo(line)
