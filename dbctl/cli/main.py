"""The command line: one group of commands, each imported when it is run, and one place for errors.

Rules of this package: a command parses, calls one function and prints; results go to stdout, the
talk to stderr. A command returns its exit status, or None for 0, and raises a DbctlError where
something is wrong: `main` prints it without a traceback and ends with its exit status. Text that
may come from a file or a peer is escaped, so it cannot steer a terminal. `dbctl --help` imports no
command: the help lines stand in COMMANDS.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

import click

from dbctl import __version__
from dbctl.errors import DbctlError, ExperimentError
from dbctl.process import escape_line

MAX_PROBLEMS = 50  # of one file, printed; a hundred lines help nobody


class Command(NamedTuple):
    """Where a command is: `function` of `module`; and its line in the help."""

    module: str
    function: str
    help: str


COMMANDS = {
    "train": Command("dbctl.cli.train", "train", "Start a run from an experiment file."),
    "resume": Command("dbctl.cli.resume", "resume", "Go on from a run's newest good checkpoint."),
    "eval": Command("dbctl.cli.evaluate", "evaluate", "Measure a checkpoint on a data split."),
    "doctor": Command("dbctl.cli.doctor", "doctor", "Examine hosts, or this machine."),
    "status": Command("dbctl.cli.status", "status", "Show clusters, or the nodes of a run."),
    "logs": Command("dbctl.cli.status", "logs", "Print what the processes of a run wrote."),
    "launch-cluster": Command(
        "dbctl.cli.cluster", "launch_cluster", "Start agents that stay, on hosts."
    ),
    "stop-cluster": Command("dbctl.cli.cluster", "stop_cluster", "End a cluster and its runs."),
    "compare": Command("dbctl.cli.compare", "compare", "Print what runs took to one accuracy."),
    "validate": Command("dbctl.cli.check", "validate", "Check an experiment file."),
    "schema": Command("dbctl.cli.check", "schema", "Print the JSON Schema of experiment files."),
}


class _LazyGroup(click.Group):
    """A group that imports a command when it is run or asked for its own help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        where = COMMANDS[cmd_name]
        command = getattr(import_module(where.module), where.function)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in COMMANDS.items()])


@click.group(cls=_LazyGroup, no_args_is_help=False)
@click.version_option(__version__, prog_name="dbctl", message="%(prog)s %(version)s")
def cli() -> None:
    """Train neural networks with Downpour SGD and Sandblaster on the machines you have.

    A run is one YAML file: dbctl train EXPERIMENT.yaml
    """


def main(argv: Sequence[str]) -> int:
    """Run one command line; the exit status: 0, 1, 2, 3, 75 or 130."""
    _fill_streams()
    for stream in (sys.stdout, sys.stderr):
        # UTF-8 whatever the locale says; what cannot be encoded is escaped, never an error.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        status = cli.main(list(argv), prog_name="dbctl", standalone_mode=False)
    except DbctlError as error:
        report(error)
        return error.exit_code
    except click.ClickException as error:
        _say(_usage(error))
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        _say("interrupted")
        return 130
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        _say(_without_temporary(error) or f"{name}{error.strerror or error}")
        return 1
    return status if isinstance(status, int) else 0


def _fill_streams() -> None:
    """What was closed by the caller (`>&-`) leads to nothing: no file of a run takes its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def report(error: DbctlError) -> None:
    """Print an error on stderr, one `dbctl: error:` a problem."""
    if not isinstance(error, ExperimentError):
        first, *more = str(error).splitlines() or [type(error).__name__]
        _say(first)
        for line in more:
            click.echo(escape_line(line), err=True)
        return
    for problem in error.problems[:MAX_PROBLEMS]:
        _say(str(problem))
    if len(error.problems) > MAX_PROBLEMS:
        n_more = len(error.problems) - MAX_PROBLEMS
        _say(f"and {n_more} more problem{'s' * (n_more > 1)}")


def status_of_run(status: int, unwritten: str) -> int:
    """Its exit status; 1 instead of 0, and an error, where standard output could not be written."""
    if unwritten:
        _say(f"standard output: {unwritten}; the run went on without it")
    return status or int(bool(unwritten))


def _say(message: str) -> None:
    click.echo(f"dbctl: error: {escape_line(message)}", err=True)


def _without_temporary(error: OSError) -> str:
    """What tempfile found wrong, which does not say what keeps it from writing; or ""."""
    _, found, places = f"{error.strerror}".partition("No usable temporary directory found in ")
    why = "no right to write there, or no space or no inodes left on the device"
    return f"no temporary file can be made in any of {places}: {why}; set TMPDIR" if found else ""


def _usage(error: click.ClickException) -> str:
    message = error.format_message().rstrip(".")
    message = message[:1].lower() + message[1:]
    if isinstance(error, click.UsageError) and error.ctx is not None:
        message += f"; try `{error.ctx.command_path} --help`"
    return message
