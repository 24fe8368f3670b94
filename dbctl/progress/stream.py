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
import time
from collections import deque
from typing import TextIO

MAX_WAITING = 1000
# A pipe that poll() calls writable takes so many bytes without blocking. A terminal may take one
# only, or none where that one is half of a line end: it is asked again after a while.
CHUNK_BYTES = select.PIPE_BUF
AGAIN_S = 0.01
_READER_GONE = (errno.EPIPE, errno.ECONNRESET)


class Stream:
    """`raw` made safe. In-memory streams (no file descriptor) are always ready."""

    encoding = "utf-8"  # tqdm asks, to choose its characters

    def __init__(self, raw: TextIO) -> None:
        self._raw = raw
        self._open = True
        self.unwritten = ""
        self._waiting: deque[bytes] = deque()
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
        """Show `text` now or not at all; its length in any case, as every text stream says.

        What the reader took the beginning of waits, so that no character and no line is cut.
        """
        self.drain(0.0)
        if not self._waiting and self._ready(0.0):
            data = _encode(text)
            taken = self._put(data)
            if 0 < taken < len(data):
                self._waiting.append(data[taken:])
        return len(text)

    def line(self, text: str) -> None:
        """Show `text` and a line end, in order, as soon as the reader takes them."""
        if len(self._waiting) >= MAX_WAITING:
            del self._waiting[1]  # the first may be half written
        self._waiting.append(_encode(text + "\n"))
        self.drain(0.0)

    def drain(self, wait_s: float) -> None:
        """Write what waits; the reader has `wait_s` to make room for each part."""
        until = time.monotonic() + wait_s
        while self._waiting and self._ready(max(0.0, until - time.monotonic())):
            data = self._waiting.popleft()
            taken = self._put(data)
            if taken < len(data):
                self._waiting.appendleft(data[taken:])
            if taken > 0:
                until = time.monotonic() + wait_s
            elif time.monotonic() >= until:
                return
            else:
                time.sleep(AGAIN_S)

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

    def _put(self, data: bytes) -> int:
        """Write what there is room for; how many bytes of `data` are done with."""
        try:
            if self._poll is None:
                self._raw.write(data.decode())
                self._raw.flush()
                return len(data)
            self._raw.flush()  # what others wrote before
            return _write(self._raw.fileno(), data[:CHUNK_BYTES])
        except BlockingIOError:
            return 0
        except (OSError, ValueError) as error:
            number = getattr(error, "errno", None)
            if number is not None and number not in self._reader_gone:
                self.unwritten = os.strerror(number)
            self._silence()
            return len(data)

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


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _write(number: int, data: bytes) -> int:
    """os.write; a terminal takes what fits, where poll() promised one byte and more would block.

    That needs a file description that does not block. The one we were given is shared with the
    shell and others, so this is our own; it is opened for each time, and no fork keeps it.
    """
    try:
        own = os.open(os.ttyname(number), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:  # no terminal, or one that may not be opened again, or hung up
        return os.write(number, data)
    try:
        return os.write(own, data)
    finally:
        os.close(own)
