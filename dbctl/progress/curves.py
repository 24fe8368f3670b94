"""The picture of a comparison: Figure 4 of the paper, and against resources as in Figure 5.

Rules of this file: matplotlib (extra `plot`) is imported inside the function that draws; `check`
says that it is missing before anything is read. The same numbers give the same bytes of SVG.

Training loss above, hold-out accuracy below; against seconds of training, against replica-seconds
(processes that compute x seconds) and against examples, which no other program on the machine
changes. Source of the form: Dean et al. 2012, figures 4 and 5.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dbctl.errors import UsageError, reason
from dbctl.progress.comparison import Comparison
from dbctl.progress.history import Point

SUFFIXES = (".png", ".svg")
MAX_POINTS = 400  # of one curve: more is no wider than a pixel
_AXES = (  # of a mark, divided by, called
    ("seconds", 1, "seconds of training"),
    ("replica_seconds", 1, "replica-seconds"),
    ("examples", 1000, "thousands of training examples"),
)


def check(path: Path) -> None:
    """UsageError unless a picture can be drawn into the file `path`."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {path}: expected a name that ends in .png or .svg")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot {path}: there is no directory {path.absolute().parent}")
    if find_spec("matplotlib") is None:
        raise UsageError(
            "--plot needs matplotlib, which is not installed: pip install matplotlib, or "
            "pip install '.[plot]' in a clone of dbctl"
        )


def draw(comparison: Comparison, path: Path) -> None:
    """Both rows of curves of all runs; UsageError where the file cannot be written."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {"svg.hashsalt": "dbctl", "svg.fonttype": "none"}
    with mpl.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a letter that the font has not
        figure = Figure(figsize=(12, 6.5), layout="constrained")
        axes = figure.subplots(2, len(_AXES), sharex="col", sharey="row")
        _fill(axes, comparison)
        is_svg = path.suffix.lower() == ".svg"
        try:
            figure.savefig(path, dpi=120, metadata={"Date": None} if is_svg else None)
        except OSError as error:
            raise UsageError(f"--plot {path}: cannot be written: {reason(error)}") from error


def _fill(axes: Any, comparison: Comparison) -> None:
    handles: list[Any] = []
    for number, entry in enumerate(comparison.entries):
        for column, (key, unit, _) in enumerate(_AXES):
            for row, (points, scale) in enumerate(
                ((entry.history.losses, 1.0), (entry.history.accuracies, 100.0))
            ):
                shown = thinned(points)
                (handle,) = axes[row][column].plot(
                    [getattr(point.mark, key) / unit for point in shown],
                    [scale * point.value for point in shown],
                    color=f"C{number}",
                    marker="." if row else "",
                    linewidth=1.2,
                )
        handles.append(handle)
    for column, (_, _, label) in enumerate(_AXES):
        axes[1][column].set_xlabel(label)
        axes[1][column].set_xlim(left=0)
        for row in (0, 1):
            axes[row][column].grid(alpha=0.3)
        if comparison.accuracy is not None:
            axes[1][column].axhline(100 * comparison.accuracy, color="gray", linestyle=":")
    axes[0][0].set(ylabel="training loss", yscale="log")
    axes[1][0].set(ylabel="accuracy on the test rows, %")
    # A label that begins with _ would be left out of the legend.
    labels = [f" {e.label}" if e.label.startswith("_") else e.label for e in comparison.entries]
    legend = axes[0][0].legend(handles, labels)
    for text in legend.get_texts():
        text.set_parse_math(False)


def thinned(points: Sequence[Point]) -> list[Point]:
    """Every n-th point, with the last: at most `MAX_POINTS` and one."""
    stride = -(-len(points) // MAX_POINTS) or 1
    kept = list(points[::stride])
    if points and kept[-1] is not points[-1]:
        kept.append(points[-1])
    return kept
