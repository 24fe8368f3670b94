"""A text stream that is UTF-8, never raises and never blocks: no reader ends or stops a run.

Rules of this file: the only writer to standard output and error during a run. A reader that is
gone (`| head`) silences its stream; so does a full disk, but what was to be written there is missed
by somebody: `unwritten` says why. A reader that does not read (a terminal stopped with Ctrl-S,
`| less`) must not stop the process that holds every node's lease, so text is written only where it
fits: what may be lost (`write`: a frame of the bar) is dropped, what may not (`line`) waits, up to
`MAX_WAITING` lines, of which the newest are kept. That some were not taken at the end is no error:
to say so could wait for ever, where standard error is the same terminal.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from collections import deque
from typing import TextIO

MAX_WAITING = 1000
# A pipe that poll() calls writable takes PIPE_BUF (4,096) bytes without blocking; a character has
# at most four.
CHUNK_CHARS = 1000
_READER_GONE = (errno.EPIPE, errno.ECONNRESET)


class Stream:
    """`raw` made safe. In-memory streams (no file descriptor) are always ready."""

    encoding = "utf-8"  # tqdm asks, to choose its characters

    def __init__(self, raw: TextIO) -> None:
        self._raw = raw
        self._open = True
        self.unwritten = ""
        self._waiting: deque[str] = deque()
        self._poll: select.poll | None = None
        self._reader_gone: tuple[int, ...] = _READER_GONE
        reconfigure = getattr(raw, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="backslashreplace")
        try:
            number = raw.fileno()
        except (OSError, ValueError):
            return
        if stat.S_ISCHR(os.fstat(number).st_mode):  # as one that hung up before still is
            self._reader_gone += (errno.EIO,)  # a terminal that was closed; of a disk it is a fault
        self._poll = select.poll()
        self._poll.register(number, select.POLLOUT)

    def write(self, text: str) -> int:
        """Show `text` now or not at all; its length in any case, as every text stream says."""
        self.drain(0.0)
        if not self._waiting and self._ready(0.0):
            self._put(text[:CHUNK_CHARS])
        return len(text)

    def line(self, text: str) -> None:
        """Show `text` and a line end, in order, as soon as the reader takes them."""
        if len(self._waiting) >= MAX_WAITING:
            del self._waiting[1]  # the first may be half written
        self._waiting.append(text + "\n")
        self.drain(0.0)

    def drain(self, wait_s: float) -> None:
        """Write what waits; the reader has `wait_s` to make room for each part."""
        while self._waiting and self._ready(wait_s):
            text = self._waiting.popleft()
            if len(text) > CHUNK_CHARS:
                self._waiting.appendleft(text[CHUNK_CHARS:])
            self._put(text[:CHUNK_CHARS])

    def flush(self) -> None:
        """Nothing to do: every write is flushed."""

    def isatty(self) -> bool:
        return self._open and self._raw.isatty()

    def columns(self) -> int:
        """The terminal's width: 0 where it does not say one; 80 where there is no descriptor."""
        try:
            return os.get_terminal_size(self._raw.fileno()).columns
        except (OSError, ValueError):
            return 80

    def fileno(self) -> int:
        return self._raw.fileno()  # tqdm asks for the terminal's width

    def _ready(self, wait_s: float) -> bool:
        return self._open and (self._poll is None or bool(self._poll.poll(wait_s * 1000)))

    def _put(self, text: str) -> None:
        try:
            self._raw.write(text)
            self._raw.flush()
        except (OSError, ValueError) as error:
            number = getattr(error, "errno", None)
            # EAGAIN: the descriptor does not block and is full; Python keeps the text and goes on.
            if number == errno.EAGAIN:
                return
            if number is not None and number not in self._reader_gone:
                self.unwritten = os.strerror(number)
            self._silence()

    def _silence(self) -> None:
        """Write no more. What Python still holds must not fail again when the process ends."""
        self._open = False
        self._waiting.clear()
        try:
            number = self._raw.fileno()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)
        except (OSError, ValueError):
            pass
