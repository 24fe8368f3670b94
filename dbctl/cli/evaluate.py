"""`dbctl eval RUN_DIR`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dbctl.process import escape_line

if TYPE_CHECKING:
    from dbctl.run.eval_figures import Class, Evaluation

MAX_SHOWN_CLASSES = 20  # a wider matrix fits no terminal; --json has it whole


@click.command("eval")
@click.argument("run_dir", type=click.Path())
@click.option("--split", type=click.Choice(["test", "train"]), default="test", show_default=True)
@click.option("--step", type=click.IntRange(min=0), help="Which checkpoint; default: the newest.")
@click.option("--workers", type=click.IntRange(1, 64), default=1, help="Processes that measure.")
@click.option("--predictions", type=click.Path(), help="Write row,label,predicted,score as CSV.")
@click.option("--bootstrap", is_flag=True, help="Bring dbctl to the hosts first.")
@click.option("--cluster", metavar="NAME", help="On the hosts of a cluster (launch-cluster).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def evaluate(
    *,
    run_dir: str,
    as_json: bool,
    predictions: str | None,
    cluster: str | None,
    bootstrap: bool,
    **options: Any,
) -> int:
    """Measure a checkpoint on a data split."""
    from dbctl.cli.cluster import cluster_of
    from dbctl.progress.display import make_display
    from dbctl.run import evaluate as run
    from dbctl.run.life import EXIT_CODES

    display = make_display(json=False, stderr_is_tty=sys.stderr.isatty(), quiet=True)
    where = Path(predictions) if predictions is not None else None
    hosts = cluster_of(cluster, bootstrap=bootstrap)
    tell = partial(click.echo, err=True)
    request = run.Request(
        predictions=where, cluster=hosts, bootstrap=bootstrap, tell=tell, **options
    )
    status, found = run.evaluate(run_dir, request, warn=display.warn)
    if found is not None:
        for line in [json_line(found)] if as_json else lines(found):
            click.echo(line)
    return EXIT_CODES[status]


def json_line(found: Evaluation) -> str:
    """One JSON object; what is not measured, or is no number, is null."""
    from dataclasses import asdict

    from dbctl.progress.text import to_json

    return json.dumps(to_json(asdict(found)), allow_nan=False)


def lines(found: Evaluation) -> Iterator[str]:
    """For people: figures, a table of classes and, where it fits, the confusion matrix."""
    yield escape_line(
        f"{found.run_dir}: step {found.step:,}, {found.examples:,} rows of the {found.split} split"
    )
    yield f"loss      {found.loss:.6g}"
    if found.accuracy is not None:
        yield f"accuracy  {_percent(found.accuracy)}"
    if found.top5 is not None:
        yield f"top-5     {_percent(found.top5)}"
    if found.classes is None or found.confusion is None:
        return
    yield ""
    yield f"{'class':>6}{'rows':>9}{'correct':>9}{'recall':>10}{'precision':>11}"
    yield from map(_class_line, found.classes)
    if len(found.classes) > MAX_SHOWN_CLASSES:
        return
    width = max(4, *(len(str(n)) + 1 for row in found.confusion for n in row))
    yield ""
    yield "true \\ predicted"
    yield " " * 6 + "".join(f"{c.number:>{width}}" for c in found.classes)
    for number, row in enumerate(found.confusion):
        yield f"{number:>6}" + "".join(f"{n:>{width}}" for n in row)


def _class_line(one: Class) -> str:
    recall, precision = _percent(one.recall), _percent(one.precision)
    return f"{one.number:>6}{one.rows:>9,}{one.correct:>9,}{recall:>10}{precision:>11}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"
