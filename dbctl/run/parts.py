"""The parts of a cut that are on another host: read from there while they are written here.

Rules of this file: at most WINDOW pieces are on their way or wait to be written, whatever the size
of the network; a lost one is asked for again.

Theory of operation. A shard that shares no memory with this machine hands its buffers out as ever,
but says only how long they are; they do not change before they are given back. The saver's thread
takes a part piece by piece (`pieces`), and waits; the session's loop says what is to be asked for
(`due`) and brings what has come (`take`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from dbctl.errors import CheckpointError
from dbctl.roles.base import Array
from dbctl.shards import ShardSpan
from dbctl.wire import CutPart, Message
from dbctl.wire_files import PIECE_ELEMENTS, PartData, ReadPart

WINDOW = 4  # with 256 KiB each a lease is not held up by them, on a line of 1 Mbit/s
AGAIN_S = 2.0
AGAIN_MOST_S = 30.0

Key = tuple[str, ReadPart]


@dataclass(slots=True)
class _Wish:
    again_at: float = -inf
    pause_s: float = AGAIN_S
    values: Array | None = None


class FarParts:
    """`shards`: who holds which range; `wake` makes the loop look at `due`."""

    def __init__(self, shards: Sequence[ShardSpan], wake: Callable[[], None]) -> None:
        self._shards = shards
        self._wake = wake
        self._changed = threading.Condition()
        self._wishes: dict[Key, _Wish] = {}
        self._closed = False

    # ------------------------------------------------------------ the saver's thread

    def pieces(self, part: CutPart) -> Iterator[tuple[int, Array]]:
        """What the part holds, in order: (first element's place in the flat vector, elements).

        CheckpointError: the run is over, and nothing more comes.
        """
        holder = next(s.node for s in self._shards if s.start <= part.start < s.stop)
        left = deque(
            (holder, ReadPart(part.handout, start, min(PIECE_ELEMENTS, part.size - start)))
            for start in range(0, part.size, PIECE_ELEMENTS)
        )
        under_way: deque[Key] = deque()
        try:
            while left or under_way:
                while left and len(under_way) < WINDOW:
                    under_way.append(left.popleft())
                    self._wish(under_way[-1])
                yield part.start + under_way[0][1].start, self._wait(under_way[0])
                self._drop(under_way.popleft())
        finally:
            for key in under_way:
                self._drop(key)

    def _wish(self, key: Key) -> None:
        with self._changed:
            self._wishes[key] = _Wish()
        self._wake()

    def _drop(self, key: Key) -> None:
        with self._changed:
            self._wishes.pop(key, None)

    def _wait(self, key: Key) -> Array:
        with self._changed:
            wish = self._wishes[key]
            self._changed.wait_for(lambda: self._closed or wish.values is not None)
            if wish.values is None:
                raise CheckpointError(key[0], "was asked for its parameters when the run ended")
            return wish.values

    # ------------------------------------------------------------ the session's loop

    def due(self, now: float) -> list[tuple[str, Message]]:
        """What is to be asked for now, of whom."""
        found: list[tuple[str, Message]] = []
        with self._changed:
            for key, wish in self._wishes.items():
                if wish.values is None and now >= wish.again_at:
                    wish.again_at = now + wish.pause_s
                    wish.pause_s = min(2.0 * wish.pause_s, AGAIN_MOST_S)
                    found.append(key)
        return found

    def take(self, node: str, data: PartData) -> None:
        """Nothing where nobody waits for it (any more)."""
        key = (node, ReadPart(data.handout, data.start, len(data.payload)))
        with self._changed:
            wish = self._wishes.get(key)
            if wish is not None and wish.values is None:
                wish.values = data.payload
                self._changed.notify_all()

    def close(self) -> None:
        """Nothing comes any more: who waits gets an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
