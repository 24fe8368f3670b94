"""What a person or a script sees of a run: one bar, plain lines, or JSON lines.

Rules of this file: it only shows. Results go to `out` (standard output), talk to `err`; with `json`
everything is a JSON line on `out`. Progress is shown at once the first time and then at a pace:
`BAR_S` on a terminal, `LINE_S` elsewhere, so callers may tell every step. Events, warnings and the
summary are shown when they come. Time is monotonic, in seconds.
"""

from __future__ import annotations

import json as json_text
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Protocol, TextIO

from dbctl.process import escape
from dbctl.progress.stream import Stream
from dbctl.progress.text import (
    Snapshot,
    Summary,
    describe_bar,
    describe_duration,
    describe_figures,
    describe_place,
    describe_summary,
    to_json,
)

BAR_S = 0.1
LINE_S = 5.0
CLOSE_S = 2.0  # how long the last lines wait for a reader that does not read

Clock = Callable[[], float]


class Display(Protocol):
    """Where a run tells what happens. No method raises because of a stream."""

    @property
    def unwritten(self) -> str:
        """Why results are not on standard output, "" where they are or its reader has gone."""

    def begins(self, run_dir: str) -> None:
        """A new run, and where it is kept: for people, who may want to look while it goes on."""

    def progress(self, snapshot: Snapshot) -> None: ...

    def event(self, name: str, text: str, fields: Mapping[str, Any] | None = None) -> None:
        """Something that happened once (`checkpoint`, `evaluation`); shown at once.

        `text` is for people; `name` and `fields` are what a script reads.
        """

    def warn(self, text: str) -> None: ...

    def finished(self, summary: Summary) -> None:
        """The last line of the run."""

    def close(self) -> None:
        """Take the bar away and wait at most `CLOSE_S` for a slow reader. May be called twice."""


def make_display(
    *,
    json: bool,
    stderr_is_tty: bool,
    quiet: bool = False,
    out: TextIO | None = None,
    err: TextIO | None = None,
    clock: Clock = time.monotonic,
) -> Display:
    """The display for these streams (default: sys.stdout, sys.stderr).

    `quiet` leaves only warnings and the summary.
    """
    out_stream, err_stream = Stream(out or sys.stdout), Stream(err or sys.stderr)
    if json:
        return JsonDisplay(out_stream, quiet=quiet, clock=clock)
    if stderr_is_tty and not quiet and err_stream.columns() > 0:
        return BarDisplay(out_stream, err_stream, clock=clock)
    return LineDisplay(out_stream, err_stream, quiet=quiet, clock=clock)


class LineDisplay:
    """Not a terminal: a plain line now and then, never a carriage return."""

    def __init__(self, out: Stream, err: Stream, *, quiet: bool, clock: Clock) -> None:
        self._out = out
        self._err = err
        self._quiet = quiet
        self._pace = _Pace(LINE_S, clock)
        self._eta = _Eta(clock)

    @property
    def unwritten(self) -> str:
        return self._out.unwritten

    def begins(self, run_dir: str) -> None:
        self.event("begins", f"run directory: {run_dir}")

    def progress(self, snapshot: Snapshot) -> None:
        if self._quiet or not self._pace.due():
            return
        figures = f"{describe_figures(snapshot)}  {self._eta.text(snapshot)}".rstrip()
        self._err.write(f"{describe_place(snapshot)}  {figures}\n")

    def event(self, name: str, text: str, fields: Mapping[str, Any] | None = None) -> None:
        if not self._quiet:
            self._err.line(escape(text))

    def warn(self, text: str) -> None:
        self._err.line(f"warning: {escape(text)}")

    def finished(self, summary: Summary) -> None:
        self._out.line(describe_summary(summary))

    def close(self) -> None:
        self._err.drain(CLOSE_S)
        self._out.drain(CLOSE_S)


class BarDisplay:
    """A terminal: one bar, which events push up."""

    def __init__(self, out: Stream, err: Stream, *, clock: Clock) -> None:
        self._lines = LineDisplay(out, err, quiet=False, clock=clock)
        self._err = err
        self._pace = _Pace(BAR_S, clock)
        self._eta = _Eta(clock)
        self._clock = clock
        self._began = clock()
        self._bar: Any = None
        self._newest: Snapshot | None = None
        self._is_ending = False

    @property
    def unwritten(self) -> str:
        return self._lines.unwritten

    def begins(self, run_dir: str) -> None:
        self._above(lambda: self._lines.begins(run_dir))

    def progress(self, snapshot: Snapshot) -> None:
        self._newest = snapshot
        if not self._pace.due():
            return
        if self._bar is None:
            self._began = self._clock()
            self._bar = _new_bar(self._err)
        self._draw(snapshot, eta=self._eta.text(snapshot))

    def _draw(self, snapshot: Snapshot, *, eta: str) -> None:
        line = describe_bar(
            snapshot,
            columns=self._err.columns() or 80,
            elapsed=describe_duration(self._clock() - self._began),
            eta="" if self._is_ending else eta,
        )
        self._bar.set_description_str(line, refresh=True)

    def event(self, name: str, text: str, fields: Mapping[str, Any] | None = None) -> None:
        if name == "stopping":  # what was left to do is not done any more
            self._is_ending = True
        self._above(lambda: self._lines.event(name, text, fields))

    def warn(self, text: str) -> None:
        self._above(lambda: self._lines.warn(text))

    def finished(self, summary: Summary) -> None:
        self._end_bar()
        self._lines.finished(summary)

    def close(self) -> None:
        self._end_bar()
        self._lines.close()

    def _above(self, show: Callable[[], None]) -> None:
        if self._bar is not None:
            self._bar.clear()
        show()
        if self._bar is not None:
            assert self._newest is not None
            self._draw(self._newest, eta=self._eta.text(self._newest))

    def _end_bar(self) -> None:
        """The newest figures stay on the screen, and no time left."""
        if self._bar is not None:
            assert self._newest is not None
            self._is_ending = True
            self._draw(self._newest, eta="")
            self._bar.close()
            self._bar = None


class JsonDisplay:
    """One JSON object a line on standard output, in ASCII: every reader's line ends are ours."""

    def __init__(self, out: Stream, *, quiet: bool, clock: Clock) -> None:
        self._out = out
        self._quiet = quiet
        self._pace = _Pace(LINE_S, clock)

    @property
    def unwritten(self) -> str:
        return self._out.unwritten

    def begins(self, run_dir: str) -> None:
        """Nothing: run.json is there for scripts, and `finished` names the directory."""

    def progress(self, snapshot: Snapshot) -> None:
        if not self._quiet and self._pace.due():
            self._line("progress", asdict(snapshot))

    def event(self, name: str, text: str, fields: Mapping[str, Any] | None = None) -> None:
        if not self._quiet:
            self._line(name, {"text": text, **(fields or {})})

    def warn(self, text: str) -> None:
        self._line("warning", {"text": text})

    def finished(self, summary: Summary) -> None:
        self._line("finished", asdict(summary))

    def close(self) -> None:
        self._out.drain(CLOSE_S)

    def _line(self, event: str, fields: Mapping[str, Any]) -> None:
        # A field called "event" must not change what kind of line this is.
        rest = {key: value for key, value in fields.items() if key != "event"}
        self._out.line(json_text.dumps(to_json({"event": event, **rest}), allow_nan=False))


class _Pace:
    """At once the first time, then at most each `every_s`."""

    def __init__(self, every_s: float, clock: Clock) -> None:
        self._every_s = every_s
        self._clock = clock
        self._next = float("-inf")

    def due(self) -> bool:
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + self._every_s
        return True


class _Eta:
    """Time left, from the mean speed since the first snapshot: a resumed run starts at its own."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._first: tuple[float, float] | None = None

    def text(self, snapshot: Snapshot) -> str:
        """`eta 1:05`, or nothing while it cannot be known."""
        fraction, now = snapshot.fraction, self._clock()
        if fraction is None:
            return ""
        if self._first is None:
            self._first = now, fraction
        done, passed = fraction - self._first[1], now - self._first[0]
        return f"eta {describe_duration((1 - fraction) * passed / done)}" if done > 0 else ""


def _new_bar(err: Stream) -> Any:
    """A tqdm line, drawn over itself when told to and never else; what it says is ours."""
    from tqdm import tqdm

    # tqdm would make a named semaphore, for processes that share a bar, and a thread that redraws.
    tqdm.set_lock(threading.RLock())
    tqdm.monitor_interval = 0
    return tqdm(total=None, file=err, bar_format="{desc}", dynamic_ncols=True)
