"""The run directory that a command was given, or what was probably meant by something else.

Rules of this file: it opens nothing but directories, and guesses only in messages: a command never
goes on with another run than the one that was named.
"""

from __future__ import annotations

import os
from pathlib import Path

from dbctl.errors import UsageError
from dbctl.rundir import RunDir, open_

RUNS = Path("runs")  # where they are unless --run-dir says, in the directory of who calls


def find(path: str) -> RunDir:
    """The run in directory `path`. UsageError: there is none; it says which to give."""
    given = Path(path)
    if given.is_file():
        raise UsageError(
            f"{path}: is a file, expected the directory of a run, like runs/NAME/TIMESTAMP; "
            "`dbctl train` takes an experiment file"
        )
    try:
        return open_(given)
    except UsageError as error:
        found = runs_below(given)
        if not found:
            raise
        raise UsageError(
            f"{path}: not a run directory; the newest run in it is {found[0]}"
        ) from error


def runs_below(path: Path) -> list[Path]:
    """The runs in runs/NAME or runs, newest first: by the last change of run.json."""
    found: list[tuple[float, Path]] = []
    for pattern in ("*/run.json", "*/*/run.json"):
        for info in path.glob(pattern):
            try:
                found.append((os.stat(info).st_mtime, info.parent))
            except OSError:
                continue
    return [run for _, run in sorted(found, reverse=True)]
