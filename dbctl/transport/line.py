"""The line: a pipe from loop to loop for short messages between two processes of one host.

Rules of this file: no socket, and no thread of its own: whoever calls is the loop. Nothing blocks
but `wait`. Frames are not looked into: `link` believes what a peer says that was connected, and
leaves all others to the link thread, which judges them as if they had come by a socket.

Theory of operation. Through ZeroMQ a message wakes four threads one after the other, each on a core
that may sleep: 175 us, and a partition waits for one in every exchange of a pass. So each process
that listens on ipc:// also reads a named pipe beside its socket, in the same 0700 directory, which
others write to. A frame is its length and a header frame (envelope.py), no longer than what the
kernel writes whole (PIPE_BUF), so that those of several writers never mix. A full pipe takes
nothing, and the message goes by the socket. A payload is in shared memory, as ever.

The loop waits for its pipe and for the link thread (`ring`) at once. A core that sleeps takes some
50 us to wake up, so whoever has just sent what is answered at once looks again and again for about
as long before it sleeps. Others do not: their core is wanted by those that compute.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import stat
import struct
from pathlib import Path

from dbctl.wire import Peer

NODE_NAME = re.compile(r"[a-z][a-z0-9-]*(\.[0-9]+)*")
SUFFIX = ".line"
READ_BYTES = 1 << 16
LOOKS = 100  # before sleeping, each about a microsecond
_LENGTH = struct.Struct("<H")


class Line:
    """Until `listen` nobody writes to this process: it is only woken."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._fd = -1
        self._to: dict[str, int] = {}
        self._rest = b""
        self._expects = False
        self._rung = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._wake_fd, select.POLLIN)

    def listen(self, path: Path) -> None:
        """Reads a pipe beside the endpoint's file `path`. OSError: it cannot be made there."""
        self._path = _pipe_of(path)
        self._path.unlink(missing_ok=True)
        os.mkfifo(self._path, 0o600)
        # For writing too: with no writer the pipe would be at its end for ever.
        self._fd = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll.register(self._fd, select.POLLIN)

    @property
    def listens(self) -> bool:
        return self._path is not None

    def close(self) -> None:
        """The last thing, once no thread can call `ring`."""
        for fd in (self._wake_fd, self._fd, *self._to.values()):
            if fd >= 0:
                os.close(fd)
        self._to.clear()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    # ------------------------------------------------------------ to others

    def connect(self, node: str, path: Path) -> None:
        """Opens the pipe of `node` if it has one; in place of that of an older life."""
        self.forget(node)
        with contextlib.suppress(OSError):
            fd = os.open(_pipe_of(path), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if stat.S_ISFIFO(os.fstat(fd).st_mode):
                self._to[node] = fd
            else:
                os.close(fd)

    def forget(self, node: str) -> None:
        fd = self._to.pop(node, None)
        if fd is not None:
            os.close(fd)

    def send(self, node: str, frame: bytes | memoryview, *, expects: bool = False) -> bool:
        """False: there is no line to `node`, it is full, or the frame is too long for it.

        `expects`: an answer is likely to come at once.
        """
        fd = self._to.get(node)
        if fd is None or _LENGTH.size + len(frame) > select.PIPE_BUF:
            return False
        try:
            os.write(fd, _LENGTH.pack(len(frame)) + frame)
        except BlockingIOError:
            return False
        except BrokenPipeError:  # it ended; what is sent to it is lost in any case
            self.forget(node)
            return False
        self._expects = self._expects or expects
        return True

    # ------------------------------------------------------------ from others

    def ring(self) -> None:
        """Ends the wait that is under way, or the next; from any thread or signal handler."""
        if not self._rung:
            self._rung = True
            os.eventfd_write(self._wake_fd, 1)

    def wait(self, timeout_s: float | None) -> None:
        """Until something came, `ring`, or `timeout_s` (None: for ever)."""
        found = []
        if self._expects and timeout_s != 0:
            self._expects = False
            for _ in range(LOOKS):
                found = self._poll.poll(0)
                if found:
                    break
                os.sched_yield()
        if not found:
            found = self._poll.poll(
                None if timeout_s is None else math.ceil(1000 * max(timeout_s, 0.0))
            )
        if any(fd == self._wake_fd for fd, _ in found):
            os.eventfd_read(self._wake_fd)
            # Before the caller looks for what came, so that whatever comes later rings again.
            self._rung = False

    def read(self) -> list[bytes]:
        """The frames that came."""
        if self._fd < 0:
            return []
        try:
            found = self._rest + os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return []
        frames, at = [], 0
        while at + _LENGTH.size <= len(found):
            (size,) = _LENGTH.unpack_from(found, at)
            if at + _LENGTH.size + size > len(found):
                break
            frames.append(found[at + _LENGTH.size : at + _LENGTH.size + size])
            at += _LENGTH.size + size
        self._rest = found[at:]
        return frames


def socket_name(peer: Peer) -> str:
    """Of the file that a life of a node listens at, in the private directory of its run.

    ValueError: a name that is no node's.
    """
    if not NODE_NAME.fullmatch(peer.node):
        raise ValueError(f"{peer.node!r} is not a node's name")
    return f"{peer.node}.{peer.incarnation}.sock"


def _pipe_of(path: Path) -> Path:
    return path.with_name(path.name + SUFFIX)
