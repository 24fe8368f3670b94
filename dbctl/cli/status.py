"""`dbctl status [CLUSTER | RUN_DIR]` and `dbctl logs RUN_DIR [NODE]`."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import click

WATCH_S = 2.0  # from one look's beginning to the next one's
PAUSE_S = 0.5  # at least, where a look takes longer
SILENCE_S = 1.0  # then whoever waits is told what for
CLEAR = "\033[H\033[2J\033[3J"


@click.command()
@click.argument("what", metavar="[CLUSTER | RUN_DIR]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.option("--watch", is_flag=True, help="Show it anew every two seconds, until Ctrl-C.")
def status(*, what: str | None, as_json: bool, watch: bool) -> int:
    """Show all clusters and the runs in ./runs, one cluster with its runs, or the nodes of a run.

    Of a run that failed it says why, and how it goes on. With --watch a run is shown until it has
    ended. Hosts are asked over ssh: where that takes longer than two seconds, so does each look.
    """
    with _until_told(watch) as told:
        _show(what, as_json=as_json, watch=watch)
    return told.status


def _show(what: str | None, *, as_json: bool, watch: bool) -> None:
    from dbctl.progress.text import to_json
    from dbctl.run.show import look

    clears = watch and not as_json and sys.stdout.isatty()
    with _patience():
        began = time.monotonic()
        seen = look(what)
    while True:
        text = [json.dumps(to_json(seen.object), allow_nan=False)] if as_json else seen.lines
        _print([*([CLEAR.rstrip()] if clears else []), *text])
        if not watch or seen.is_over:
            return
        time.sleep(max(PAUSE_S, began + WATCH_S - time.monotonic()))
        began = time.monotonic()
        seen = look(what)


def _print(lines: Sequence[Any]) -> None:
    for line in lines:
        click.echo(line)
    sys.stdout.flush()


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """Says why nothing is to be seen yet, if it takes a while."""
    text = "hosts are being asked; one that does not answer takes ten seconds"
    timer = threading.Timer(SILENCE_S, click.echo, [text], {"err": True})
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


class _Told(KeyboardInterrupt):
    """SIGTERM or SIGHUP has come."""


def _tell(number: int, frame: FrameType | None) -> None:
    raise _Told


@dataclass
class _Until:
    status: int = 0


@contextlib.contextmanager
def _until_told(endless: bool) -> Iterator[_Until]:
    """Of what goes on until it is told to end: that is then no error, and nothing is said of it."""
    until, before = _Until(), {}
    for number in (signal.SIGTERM, signal.SIGHUP) if endless else ():
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, _tell)
    try:
        yield until
    except KeyboardInterrupt as error:
        if not endless:
            raise
        until.status = 75 if isinstance(error, _Told) else 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@click.command()
@click.argument("run_dir", type=click.Path())
@click.argument("node", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on until the run has ended, or Ctrl-C.")
def logs(*, run_dir: str, node: str | None, follow: bool) -> int:
    """Print the log of a node, or all logs in the order of time.

    A node is shard-0, worker-1.0, evaluator-0, agent-0; each log that there is can be named.
    """
    from dbctl.run.find import find
    from dbctl.run.show_logs import logs as lines_of

    with _until_told(follow) as told, find(run_dir) as found:
        for line in lines_of(found, node, follow=follow):
            click.echo(line)
            if follow:
                sys.stdout.flush()
    return told.status
