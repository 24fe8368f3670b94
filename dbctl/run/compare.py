"""`dbctl compare`: finished, killed or running runs beside each other.

Rules of this file: it only reads run.json and metrics.jsonl, so a run that is going on can be
compared, and one of another user. What cannot be read of one run is "-" for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dbctl.errors import RunError, UsageError
from dbctl.metrics import read_metrics
from dbctl.progress import curves
from dbctl.progress.comparison import Comparison, Entry
from dbctl.progress.comparison import compare as compare_entries
from dbctl.progress.history import History, read_history
from dbctl.run.find import find
from dbctl.rundir import RunDir


def compare(
    paths: Sequence[str], *, accuracy: float | None = None, plot: str | None = None
) -> Comparison:
    """The runs in directories `paths`; `plot`: the file of a picture to draw.

    UsageError, before anything is read: fewer than two runs, one twice, an accuracy that is none,
    no file that can be drawn.
    """
    if len(paths) < 2:
        raise UsageError(f"expected two or more run directories, found {len(paths)}")
    if accuracy is not None and not 0 < accuracy <= 1:
        raise UsageError(
            f"--accuracy {accuracy:g}: expected a share above 0 and at most 1, such as 0.85"
        )
    if plot is not None:
        curves.check(Path(plot))
    run_dirs = [find(path) for path in paths]
    given: dict[Path, str] = {}
    for path, run_dir in zip(paths, run_dirs, strict=True):
        before = given.setdefault(run_dir.path.resolve(), path)
        if before is not path:
            raise UsageError(f"{path}: is given twice (the first time as {before})")
    histories = [read_history(read_metrics(run_dir.metrics)) for run_dir in run_dirs]
    found = compare_entries(_entries(run_dirs, histories), accuracy)
    if plot is not None:
        curves.draw(found, Path(plot))
    return found


def _entries(run_dirs: Sequence[RunDir], histories: Sequence[History]) -> list[Entry]:
    """Each called by its experiment's name, or by its directory where that is not unique."""
    names = Counter(history.name for history in histories)
    return [
        Entry(
            label=history.name if history.name and names[history.name] == 1 else str(run_dir.path),
            run_dir=str(run_dir.path),
            status=history.status or _unsaid(run_dir),
            history=history,
        )
        for run_dir, history in zip(run_dirs, histories, strict=True)
    ]


def _unsaid(run_dir: RunDir) -> str:
    """Of a run whose newest life has said no end: its process still lives, or was killed."""
    try:
        return "running" if run_dir.read_info().is_alive() else "unfinished"
    except RunError:
        return "unfinished"
