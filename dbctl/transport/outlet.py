"""What waits to be sent to one peer: a bounded queue before a socket that is full or not yet up.

Rules of this file: nothing blocks; the order of a peer's messages is kept; a message (all pieces of
it) is taken whole or not at all. Nothing here sends again: the roles' protocol does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dbctl.transport.sockets import Frame, Socket, send

MAX_WAITING = 4096
"""ZeroMQ messages. A piece of our own payload costs no memory while it waits: it is a view."""

MAX_RELAYED_BYTES = 4 << 20
"""Of others' messages, which do cost memory here: the credit of bulk through an agent."""


class Outlet:
    """The way to one peer: a DEALER of its own, or a ROUTER and the routing id it came by.

    `incarnation` is the life of the peer it leads to; None where any will do (the keeper).
    """

    def __init__(
        self, socket: Socket, *, route: bytes | None = None, incarnation: int | None = None
    ) -> None:
        self.socket = socket
        self.route = route
        self.incarnation = incarnation
        self._prefix: list[Frame] = [] if route is None else [route]
        self._waiting: deque[Sequence[Frame]] = deque()
        self._relayed: deque[int] = deque()
        self._relayed_bytes = 0

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def describe_loss(self) -> str:
        """What there is to say where nobody is there any more: "" where nothing waited, as when
        the other one has ended in order.
        """
        waiting = self.n_waiting
        return f"a peer is gone with {waiting} messages for it" if waiting else ""

    def post(self, messages: Sequence[Sequence[Frame]], *, relayed_bytes: int = 0) -> bool:
        """Sends or queues; False: no room, all of it is dropped. Gone: nobody is there any more."""
        if not self._waiting and len(messages) == 1:
            if send(self.socket, [*self._prefix, *messages[0]]):
                return True
        elif self._waiting and (
            len(self._waiting) + len(messages) > MAX_WAITING
            or self._relayed_bytes + relayed_bytes > MAX_RELAYED_BYTES
        ):
            return False
        self._waiting.extend(messages)
        self._relayed.extend([relayed_bytes] * len(messages))
        self._relayed_bytes += relayed_bytes * len(messages)
        self.flush()
        return True

    def flush(self) -> bool:
        """Sends what the socket takes; True when nothing waits. Gone: nobody is there any more."""
        while self._waiting:
            if not send(self.socket, [*self._prefix, *self._waiting[0]]):
                return False
            self._waiting.popleft()
            self._relayed_bytes -= self._relayed.popleft()
        return True
