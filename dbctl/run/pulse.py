"""Whether this process stood still: stopped, or swapped out, as against a thread that waited.

Rules of this file: one thread that does nothing but note the time. Theory of operation: a stopped
process stands still with all its threads, so the notes have a gap. A main thread that waits for a
slow disk leaves none: the link went on answering beats, every lease holds, and the run goes on.
"""

from __future__ import annotations

import threading
import time

PULSE_S = 0.1

_now = time.monotonic


class Pulse:
    """`start`, then ask `standstill` now and then, then `close`."""

    def __init__(self) -> None:
        self._noted_at = 0.0
        self._longest_s = 0.0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        assert self._thread is None, "a pulse is started once"
        self._noted_at = _now()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def standstill(self) -> float:
        """Seconds of the longest standstill since this was asked last, to within PULSE_S."""
        # Whoever wakes first: this thread may ask before the other one has noted the gap.
        self._note()
        with self._lock:
            longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s

    def _run(self) -> None:
        while not self._over.wait(PULSE_S):
            self._note()

    def _note(self) -> None:
        with self._lock:
            now = _now()
            self._longest_s = max(self._longest_s, now - self._noted_at)
            self._noted_at = now
