"""Ctrl-C, SIGTERM and SIGHUP as counts: the session asks, nothing happens inside a handler.

Rules of this file: handlers only count and wake. The exit status of an interrupted run: 130 for
Ctrl-C, 75 for SIGTERM and SIGHUP; both are resumable.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupted(Exception):
    """What takes its time was given up: a signal has come."""


STATUS = {signal.SIGINT: "interrupted", signal.SIGTERM: "stopped", signal.SIGHUP: "stopped"}


class Signals:
    """While it is entered: how many signals have come, and what the first of them means."""

    def __init__(self) -> None:
        self.count = 0
        self.status = ""
        self.wake: Callable[[], None] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in STATUS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's SIGHUP stays ignored
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        # A run that a signal has ended says so by its exit status, whatever comes after it.
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.count else handler)

    def check(self) -> None:
        """For what takes its time before there is a session: Interrupted if a signal has come."""
        if self.count:
            raise Interrupted(self.status)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.status = self.status or STATUS[signal.Signals(number)]
        if self.wake is not None:
            self.wake()
