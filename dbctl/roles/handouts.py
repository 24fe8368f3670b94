"""Which buffers of a shard are in somebody's hands, and which one may be written.

Rules of this file: pure. Theory of operation: who writes a buffer owns it; a buffer handed out is
not written until it is handed back. Hand-outs to a reader are numbered from 1, and the reader gives
them back up to a number. A shard has three parameter buffers: it updates in place when nobody holds
the current one, else into a free one; with none free the push waits (docs/protocol.md, buffers).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from dbctl.roles.base import Allocate, Array, Buffer
from dbctl.shards import N_PARAMETER_BUFFERS
from dbctl.wire import Peer


class Handouts:
    """Numbers hand-outs for each reader and counts the holders of each buffer."""

    def __init__(self) -> None:
        self._last: dict[Peer, int] = {}
        self._held: dict[Peer, dict[int, Buffer]] = {}
        self._holders: Counter[int] = Counter()

    def hand_out(self, reader: Peer, buffer: Buffer) -> int:
        """The number of this new hand-out of `buffer` to `reader`."""
        number = self._last.get(reader, 0) + 1
        self._last[reader] = number
        self._held.setdefault(reader, {})[number] = buffer
        self._holders[id(buffer)] += 1
        return number

    def take_back(self, reader: Peer, returned: int) -> None:
        """`reader` has given back every hand-out numbered up to `returned`."""
        held = self._held.get(reader)
        if not held:
            return
        for number in [n for n in held if n <= returned]:
            self._holders[id(held.pop(number))] -= 1

    def take_back_all(self, reader: Peer) -> None:
        self.take_back(reader, self._last.get(reader, 0))

    def forget(self, reader: Peer) -> None:
        """The reader's life is over, and with it all it held."""
        self.take_back_all(reader)
        self._last.pop(reader, None)
        self._held.pop(reader, None)

    def is_out(self, reader: Peer, number: int) -> bool:
        return number in self._held.get(reader, {})

    def held(self, buffer: Buffer) -> bool:
        return self._holders[id(buffer)] > 0


class ParameterBuffers:
    """The parameters of one shard: the current buffer and two more to go on in while it is read."""

    def __init__(self, values: Array, *, allocate: Allocate, handouts: Handouts) -> None:
        self._handouts = handouts
        self._buffers: Sequence[Buffer] = [
            allocate(len(values), values.dtype.str) for _ in range(N_PARAMETER_BUFFERS)
        ]
        self.current = self._buffers[0]
        # A copy without -0.0, which no update makes (optim/blocks.py, Operands).
        np.add(values, 0.0, out=self.current.array)

    def writable(self) -> Buffer | None:
        """The buffer that the next update is written into; None while readers hold all three."""
        if not self._handouts.held(self.current):
            return self.current
        for buffer in self._buffers:
            if buffer is not self.current and not self._handouts.held(buffer):
                return buffer
        return None

    def publish(self, buffer: Buffer) -> None:
        """From now on `buffer` is what is handed out."""
        self.current = buffer
