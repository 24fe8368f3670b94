"""The parts of a cut that are on another host: read from there while they are written here.

Rules of this file: at most WINDOW_MOST pieces are on their way or wait to be written, whatever the
size of the network; how many of them are on their way at once is what the line allows (pace.py).

Theory of operation. A shard that shares no memory with this machine hands its buffers out as ever,
but says only how long they are; they do not change before they are given back. The saver's thread
takes a part piece by piece (`pieces`), and waits; the session's loop says what is to be asked for
(`due`) and brings what has come (`take`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from dbctl.errors import CheckpointError
from dbctl.pace import WINDOW_MOST, Pace
from dbctl.roles.base import Array
from dbctl.shards import ShardSpan
from dbctl.wire import CutPart, Message
from dbctl.wire_files import PIECE_ELEMENTS, PartData, ReadPart

QUICK_S = 1.0  # pushes and answers of the training are on the same line
Key = tuple[str, ReadPart]


class FarParts:
    """`shards`: who holds which range; `wake` makes the loop look at `due`."""

    def __init__(self, shards: Sequence[ShardSpan], wake: Callable[[], None]) -> None:
        self._shards = shards
        self._wake = wake
        self._changed = threading.Condition()
        self._pace: Pace[Key] = Pace(quick_s=QUICK_S)
        self._values: dict[Key, Array | None] = {}  # of those that are waited for; None: not there
        self._closed = False

    # ------------------------------------------------------------ the saver's thread

    def pieces(self, part: CutPart) -> Iterator[tuple[int, Array]]:
        """What the part holds, in order: (first element's place in the flat vector, elements).

        CheckpointError: the run is over, and nothing more comes; or no shard holds that.
        """
        holder = self._holder(part)
        left = (
            (holder, ReadPart(part.handout, start, min(PIECE_ELEMENTS, part.size - start)))
            for start in range(0, part.size, PIECE_ELEMENTS)
        )
        under_way: deque[Key] = deque()
        try:
            while True:
                for key in islice(left, WINDOW_MOST - len(under_way)):
                    under_way.append(key)
                    self._wish(key)
                if not under_way:
                    return
                yield part.start + under_way[0][1].start, self._wait(under_way[0])
                self._drop(under_way.popleft())
        finally:
            for key in under_way:
                self._drop(key)

    def _holder(self, part: CutPart) -> str:
        stop = part.start + part.size
        for shard in self._shards:
            if shard.start <= part.start < stop <= shard.stop:
                return shard.node
        raise CheckpointError(
            part.vector, f"elements {part.start} to {stop} were handed out, which no shard holds"
        )

    def _wish(self, key: Key) -> None:
        with self._changed:
            self._values[key] = None
            self._pace.want(key)
        self._wake()

    def _drop(self, key: Key) -> None:
        with self._changed:
            self._values.pop(key, None)
            self._pace.drop(key)

    def _wait(self, key: Key) -> Array:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._values[key] is not None)
            values = self._values[key]
            if values is None:
                raise CheckpointError(key[0], "was asked for its parameters when the run ended")
            return values

    # ------------------------------------------------------------ the session's loop

    def due(self, now: float) -> list[tuple[str, Message]]:
        """What is to be asked for now, of whom."""
        with self._changed:
            return list(self._pace.due(now))

    def take(self, now: float, node: str, data: PartData) -> None:
        """Nothing where nobody waits for it (any more)."""
        key = (node, ReadPart(data.handout, data.start, len(data.payload)))
        with self._changed:
            if self._pace.came(now, key):
                self._values[key] = data.payload
                self._changed.notify_all()

    def close(self) -> None:
        """Nothing comes any more: who waits gets an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
