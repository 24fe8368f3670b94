"""Who comes to a keeper's socket, read and told things without waiting; and what is noted of them.

Rules of this file: nobody's slowness holds a keeper up; what a request may cost is bounded; the
descriptors that came with a request are closed by whoever ends it; words of others are escaped.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
from dataclasses import dataclass, field
from math import inf
from typing import Any

from dbctl.options_line import OPTIONS_BYTES_MAX
from dbctl.process import escape_line, log

N_DESCRIPTORS = 2  # standard output and error of a run's agent


@dataclass(eq=False)
class Visitor:
    """A connection that has not yet said, in one line, what it wants.

    Once it has, `data` is what is left of the answer; `until`: when its time is over.
    """

    connection: socket.socket
    until: float
    data: bytearray = field(default_factory=bytearray)
    descriptors: list[int] = field(default_factory=list)

    def read(self) -> dict[str, Any] | None:
        """The request once it is whole. ValueError, OSError: it never will be."""
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:
            data, descriptors, _, _ = socket.recv_fds(self.connection, 65536, 4, flags)
        except BlockingIOError:
            return None
        self.descriptors += descriptors
        if (n := len(self.descriptors)) > N_DESCRIPTORS:
            self.close_descriptors()
            raise ValueError(f"expected {N_DESCRIPTORS} descriptors with the request, found {n}")
        self.data += data
        if not data:
            raise ValueError("it left before its request was whole")
        if len(self.data) > OPTIONS_BYTES_MAX:
            raise ValueError(f"a request of more than {OPTIONS_BYTES_MAX} bytes")
        if not self.data.endswith(b"\n"):
            return None
        request = json.loads(self.data)
        if not isinstance(request, dict):
            raise ValueError("a request that is no JSON object")
        return request

    def close(self) -> None:
        self.connection.close()
        self.close_descriptors()

    def close_descriptors(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


class Answers:
    """Those on their way, at most `n_most`: each is sent as fast as who asked takes it."""

    def __init__(self, selector: selectors.BaseSelector, n_most: int) -> None:
        self._selector = selector
        self._n_most = n_most
        self._left: list[Visitor] = []

    def give(self, visitor: Visitor, answer: dict[str, Any], *, until: float) -> None:
        """What can be sent at once is; the visitor is closed after the rest, or at `until`."""
        visitor.data, visitor.until = bytearray(json.dumps(answer).encode() + b"\n"), until
        if len(self._left) >= self._n_most:
            self._leave(self._left[0])
        self._left.append(visitor)
        send = selectors.EVENT_WRITE
        self._selector.register(visitor.connection, send, lambda: self._send(visitor))
        self._send(visitor)

    def _send(self, visitor: Visitor) -> None:
        if visitor not in self._left:  # dropped in this very turn
            return
        try:
            del visitor.data[: visitor.connection.send(visitor.data, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            return
        except OSError:
            visitor.data.clear()
        if not visitor.data:
            self._leave(visitor)

    def _leave(self, visitor: Visitor) -> None:
        self._left.remove(visitor)
        self._selector.unregister(visitor.connection)
        visitor.close()

    def due(self) -> float:
        return min((visitor.until for visitor in self._left), default=inf)

    def drop(self, now: float = inf) -> None:
        """Those that are late; all of them, for the end."""
        for visitor in [one for one in self._left if one.until <= now]:
            self._leave(visitor)


def tell(connection: socket.socket, **words: object) -> None:
    """One line, if it can be sent at once: or not at all."""
    with contextlib.suppress(OSError):
        connection.send(json.dumps(words).encode() + b"\n", socket.MSG_DONTWAIT)


def note(text: str) -> None:
    """An event in the keeper's log, in one line: what others called their runs is escaped."""
    log("keeper", escape_line(text))


def peer_uid(connection: socket.socket) -> int:
    """Who is at the other end, as the kernel says."""
    form = "3i"
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(form))
    _, uid, _ = struct.unpack(form, data)
    return int(uid)
