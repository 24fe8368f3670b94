"""`dbctl logs`: what the processes of a run wrote, one log or all of them in the order of time.

Rules of this file: reading only. Lines are escaped: a control character in a log must not move the
cursor of the terminal that shows it.

Theory of operation. Lines begin with the time of day (dbctl/process.py), by which several logs are
merged; a line without it belongs to the one before. Where the time goes back by more than half a
day, a midnight was between. Each host writes the time of its own clock and zone, so the order is
true within one log, and among logs only as far as the clocks agree and the run has had one life.
No log is read whole: of each one block is in memory. What comes while
it follows is shown in the order that it is seen.
"""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dbctl.errors import UsageError
from dbctl.process import escape_line
from dbctl.run.show_run import of_run
from dbctl.rundir import RunDir

LOOK_S = 0.2
BLOCK_BYTES = 1 << 16  # of each log, in memory
STAMP = re.compile(rb"(\d\d):(\d\d):(\d\d)\.(\d{3}) ")
DAY_S = 86_400.0


@dataclass
class Log:
    """One node's log, read as far as `start`; `at_s`: the time of its last line."""

    node: str
    path: Path
    start: int = 0
    at_s: float = 0.0

    def read(self, *, whole: bool) -> Iterator[tuple[float, str, str]]:
        """(time, node, line) of what is new by now. `whole`: a last line without its end, too.

        The times never go back.
        """
        for line in self._lines(whole=whole):
            if stamp := STAMP.match(line):
                hours, minutes, seconds, millis = map(int, stamp.groups())
                at_s = 3600.0 * hours + 60.0 * minutes + seconds + millis / 1000.0
                days = round((self.at_s - at_s) / DAY_S)
                self.at_s = max(self.at_s, at_s + max(0, days) * DAY_S)
            yield self.at_s, self.node, line.decode("utf-8", "backslashreplace")

    def _lines(self, *, whole: bool) -> Iterator[bytes]:
        """What is there when it begins: a log that grows faster than it is read has an end, too."""
        size = self._size()
        while self.start < size:
            data = self._block(size)
            end = data.rfind(b"\n") + 1
            if not end and len(data) == BLOCK_BYTES:
                end = BLOCK_BYTES  # a line that is longer is shown in pieces
            elif whole and self.start + len(data) == size:
                end = len(data)
            if not end:
                return
            self.start += end
            yield from data[:end].splitlines()

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def _block(self, size: int) -> bytes:
        """Opened each time: there may be more logs than files that may be open."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.start)
                return file.read(min(BLOCK_BYTES, size - self.start))
        except OSError:
            return b""


class Logs:
    """All logs of a run, or that of `node`."""

    def __init__(self, run_dir: RunDir, node: str | None) -> None:
        self._run_dir = run_dir
        self._node = node
        self._logs: dict[str, Log] = {}
        self._width = 0

    def find(self) -> list[str]:
        """The nodes that have one."""
        found = sorted(path.name.removesuffix(".log") for path in self._run_dir.logs.glob("*.log"))
        for name in found:
            if name not in self._logs and self._node in (None, name):
                self._logs[name] = Log(name, self._run_dir.logs / f"{name}.log")
        self._width = max([len(name) for name in self._logs], default=0)
        return found

    def new_lines(self, *, whole: bool) -> Iterator[str]:
        found = [log.read(whole=whole) for log in self._logs.values()]
        for _, node, line in heapq.merge(*found, key=lambda row: row[0]):
            prefix = f"{node:<{self._width}} | " if self._node is None else ""
            yield f"{prefix}{escape_line(line.expandtabs(4))}"


def logs(run_dir: RunDir, node: str | None, *, follow: bool) -> Iterator[str]:
    """The lines. With `follow` it goes on until the run has ended.

    UsageError: there is no such node.
    """
    all_logs = Logs(run_dir, node)
    names = all_logs.find()
    if node is not None and node not in names:
        raise UsageError(
            f"{run_dir.path}: there is no log of {node}; there are {', '.join(names) or 'none'}"
        )
    while follow:
        is_over = of_run(run_dir).is_over  # before the last look: what it still wrote is seen
        yield from all_logs.new_lines(whole=False)
        if is_over:
            break
        time.sleep(LOOK_S)
        all_logs.find()
    yield from all_logs.new_lines(whole=True)
