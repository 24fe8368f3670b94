"""`dbctl status [CLUSTER | RUN_DIR]` and `dbctl logs RUN_DIR [NODE]`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import click

WATCH_S = 2.0
CLEAR = "\033[H\033[2J\033[3J"


@click.command()
@click.argument("what", metavar="[CLUSTER | RUN_DIR]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.option("--watch", is_flag=True, help="Show it anew every two seconds, until Ctrl-C.")
def status(*, what: str | None, as_json: bool, watch: bool) -> None:
    """Show all clusters, one cluster with its runs, or the nodes of a run.

    With --watch a run is shown until it has ended.
    """
    from dbctl.progress.text import to_json
    from dbctl.run.show import look

    clears = watch and not as_json and sys.stdout.isatty()
    while True:
        seen = look(what)
        text = [json.dumps(to_json(seen.object), allow_nan=False)] if as_json else seen.lines
        _print([*([CLEAR.rstrip()] if clears else []), *text])
        if not watch or seen.is_over:
            return
        time.sleep(WATCH_S)


def _print(lines: Sequence[Any]) -> None:
    for line in lines:
        click.echo(line)
    sys.stdout.flush()


@click.command()
@click.argument("run_dir", type=click.Path())
@click.argument("node", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on until the run has ended.")
def logs(*, run_dir: str, node: str | None, follow: bool) -> None:
    """Print the log of a node, or all logs in the order of time.

    A node is shard-0, worker-1.0, evaluator-0, agent-0; each log that there is can be named.
    """
    from dbctl.run.find import find
    from dbctl.run.show_logs import logs as lines_of

    with find(run_dir) as found:
        for line in lines_of(found, node, follow=follow):
            click.echo(line)
            if follow:
                sys.stdout.flush()
