"""The porch: connections over TCP that came here and have not proved yet whose they are.

Rules of this file: everything is told by libzmq's monitor of the socket that listens; no message is
looked at. Of strangers it makes lines for the log, and it bounds what all of them cost together.

Theory of operation. Until its handshake is over, within 3 s, a connection costs a descriptor and as
much of a frame as it has sent, up to 1.1 MiB. libzmq takes any number of them: 300 cost 200 MiB,
and some thousand all descriptors of the process. So where there is one too many, the oldest of the
address that has most of them is hung up, or its newest where even the oldest has only just come:
that is a crowd of replicas, whose handshakes are about to be over. Who may come in does not stay on
the porch for long: it has said something (`heard`) or is not counted (`_let_in`). Whose handshakes
are over the monitor does not say: as many as are, of those that came first, are let be.

The monitor names a connection by its descriptor, which is another's once it is closed; before one
is hung up, its other end is compared with what it was.
"""

from __future__ import annotations

import contextlib
import os
import socket as network
from collections import Counter, deque
from dataclasses import dataclass, field

import zmq

MOST_WAITING = 16
PROMPT_S = 1.0  # a handshake takes two round trips: over the slowest lines, half a second
STAY_S = 3.5  # the handshake's 3 s, and what events come late
UNKNOWN = "an unknown address"

# libzmq's zmq.h; pyzmq has no names for the values.
WHY = {
    0x11000001: "it does not have this node's key",
    0x11000002: "it comes without encryption, or with another kind",
}


@dataclass(eq=False, slots=True)
class Caller:
    """`end`: its address and port, as far as they could still be had."""

    end: tuple[str, int]
    came_at: float
    n_succeeded: int  # of all, when it came
    hung_up: bool = False


@dataclass(eq=False)
class Porch:
    """`callers` are all connections by descriptor; `waiting` those of which nothing is known."""

    callers: dict[int, Caller] = field(default_factory=dict)
    waiting: dict[int, Caller] = field(default_factory=dict)  # in the order in which they came
    n_succeeded: int = 0
    _let_in: deque[float] = field(default_factory=deque)  # when; of those in `waiting`
    _of_address: Counter[str] = field(default_factory=Counter)  # how many in `waiting`
    _why: str | None = None

    def hear(self, event: int, value: int, now: float) -> str | None:
        """An event of the monitor; a line about a stranger, or None."""
        if event == zmq.EVENT_ACCEPTED:
            self._come(value, now)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.n_succeeded += 1
            self._let_in.append(now)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._why = ""  # told by the guard, who knows more
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._why = WHY.get(value, f"it does not keep to ZMTP ({value:#x})")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._why = "it did not finish the handshake"
        elif event == zmq.EVENT_DISCONNECTED:
            return self._go(value)
        return None

    def heard(self, descriptor: int) -> None:
        """Something was taken that came by that connection: it is nobody's who has no key."""
        if self._settle(descriptor) is not None and self._let_in:
            self._let_in.popleft()

    def _come(self, descriptor: int, now: float) -> None:
        self._settle(descriptor)  # that of one whose end was not told
        caller = Caller(_other_end(descriptor), now, self.n_succeeded)
        self.callers[descriptor] = self.waiting[descriptor] = caller
        self._of_address[caller.end[0]] += 1
        while self._let_in and now - self._let_in[0] > STAY_S:
            self._let_in.popleft()
        for old, other in list(self.waiting.items()):
            if now - other.came_at <= STAY_S:
                break
            self._settle(old)
        while len(self.waiting) - len(self._let_in) > MOST_WAITING:
            self._make_room(now)

    def _settle(self, descriptor: int) -> Caller | None:
        """It waits no longer, whatever became of it; None: it did not."""
        caller = self.waiting.pop(descriptor, None)
        if caller is not None:
            self._of_address[caller.end[0]] -= 1
            if not self._of_address[caller.end[0]]:
                del self._of_address[caller.end[0]]
        return caller

    def _make_room(self, now: float) -> None:
        [(address, _)] = self._of_address.most_common(1)
        of_it = [d for d, other in self.waiting.items() if other.end[0] == address]
        oldest = of_it[min(len(self._let_in), len(of_it) - 1)]
        is_late = now - self.waiting[oldest].came_at > PROMPT_S
        descriptor = oldest if is_late else of_it[-1]
        caller = self._settle(descriptor)
        assert caller is not None
        caller.hung_up = True
        _hang_up(descriptor, caller.end)

    def _go(self, descriptor: int) -> str | None:
        why, self._why = self._why, None
        caller = self.callers.pop(descriptor, None)
        self._settle(descriptor)
        if caller is not None and caller.hung_up:
            why = f"more than {MOST_WAITING} connections begin at once"
        # What is not ZMTP at all is closed without another word; nobody got in meanwhile.
        elif why is None and caller is not None and caller.n_succeeded == self.n_succeeded:
            why = "what it says is not ZMTP"
        address = caller.end[0] if caller is not None else UNKNOWN
        return f"refused a connection from {address}: {why}" if why else None


def _copy_of(descriptor: int) -> network.socket | None:
    """One of libzmq's connections, to be closed here; None: it is closed by now, or no socket."""
    try:
        own = os.dup(descriptor)
    except OSError:
        return None
    try:
        return network.socket(network.AF_INET6, network.SOCK_STREAM, fileno=own)
    except OSError:
        os.close(own)
        return None


def _end_of(copy: network.socket) -> tuple[str, int]:
    with contextlib.suppress(OSError, IndexError, ValueError):
        address, port = copy.getpeername()[:2]
        return str(address).removeprefix("::ffff:"), int(port)
    return UNKNOWN, 0


def _other_end(descriptor: int) -> tuple[str, int]:
    copy = _copy_of(descriptor)
    if copy is None:
        return UNKNOWN, 0
    with copy:
        return _end_of(copy)


def _hang_up(descriptor: int, end: tuple[str, int]) -> None:
    """Ends that connection, if the descriptor is still its own; libzmq sees its end and closes."""
    copy = _copy_of(descriptor)
    if copy is None:
        return
    with copy, contextlib.suppress(OSError):
        if end[0] != UNKNOWN and _end_of(copy) == end:
            copy.shutdown(network.SHUT_RDWR)
