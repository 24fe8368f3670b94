"""Logs that are written on another host: read there, sent in pieces, filed here.

Rules of this file: it reads and writes log files and knows no link. Both sides hold totals (how far
a log was read, how far it was filed), so any message may be lost, repeated or late.

Theory of operation. `LogSender` (in the agent) has at most one piece under way: it is said again
until it is filed, with growing pauses, and only then comes the next, of the next log in turn that
has grown. So hardly more than one piece of logs is ever in front of a beat, and a controller that
does not read costs nothing. `LogFiles` (in the controller) appends what begins where it stands and
answers with where it stands. A full disk here must end nobody: what cannot be written is passed
over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from dbctl.wire_logs import TEXT_BYTES, LogFiled, LogText

AGAIN_S = 0.5
AGAIN_MOST_S = 8.0  # a line that stands still for a lease is not filled with one piece


class LogSender:
    """`directory` holds NODE.log of each node; `filed` says how far the controller has each."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.filed: dict[str, int] = {}
        self._under_way: LogText | None = None
        self._again_at = 0.0
        self._pause_s = AGAIN_S
        self._last = ""

    def due(self, nodes: Iterable[str], now: float) -> LogText | None:
        """What to say now, of the logs of `nodes`; None: nothing, or it waits for an answer."""
        if self._under_way is None:
            self._under_way = self._next(sorted(nodes))
            self._pause_s = AGAIN_S
        elif now < self._again_at:
            return None
        self._again_at = now + self._pause_s
        self._pause_s = min(2.0 * self._pause_s, AGAIN_MOST_S)
        return self._under_way

    def take(self, answer: LogFiled) -> None:
        self.filed[answer.node] = max(answer.upto, self.filed.get(answer.node, 0))
        asked = self._under_way
        if asked is not None and asked.node == answer.node and answer.upto > asked.start:
            self._under_way = None

    @property
    def waits(self) -> bool:
        """Whether a piece is on its way."""
        return self._under_way is not None

    def _next(self, nodes: list[str]) -> LogText | None:
        after = [node for node in nodes if node > self._last]
        for node in [*after, *(node for node in nodes if node <= self._last)]:
            start = self.filed.get(node, 0)
            with contextlib.suppress(OSError), open(self.directory / f"{node}.log", "rb") as file:
                file.seek(start)
                if text := file.read(TEXT_BYTES):
                    self._last = node
                    return LogText(node, start, text)
        return None

    def remove(self, nodes: Iterable[str]) -> None:
        """The logs that were filed, and the directory once nothing else is in it."""
        for node in nodes:
            path = self.directory / f"{node}.log"
            with contextlib.suppress(OSError):
                if path.stat().st_size <= self.filed.get(node, 0):
                    path.unlink()
        with contextlib.suppress(OSError):
            self.directory.rmdir()


class LogFiles:
    """The controller's copies; `paths` names the only files that are ever written, by node."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = dict(paths)
        self._upto: dict[str, int] = {}

    def take(self, piece: LogText) -> LogFiled | None:
        """Files it if it is the next; the answer. None: no node of this run."""
        path = self._paths.get(piece.node)
        if path is None:
            return None
        at = self._upto.get(piece.node, 0)
        if piece.start == at:
            with contextlib.suppress(OSError), open(path, "ab") as file:
                file.write(piece.text)
            at = self._upto[piece.node] = at + len(piece.text)
        return LogFiled(piece.node, at)
