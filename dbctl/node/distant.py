"""What a node reads where it has none of the run's files: its controller has them, and sends parts.

Rules of this file: what is on its way is what the line allows (pace.py), and is asked for again
until it comes; what is read is in memory once. It is used while a role is built, before the node
has said Ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from dbctl.data.prepare import Statistics
from dbctl.pace import AGAIN_S, WINDOW_MOST, Pace
from dbctl.plan import Sent
from dbctl.region import Range
from dbctl.rights import CONTROLLER
from dbctl.roles.base import Array
from dbctl.wire import Message, Peer
from dbctl.wire_files import DEVIATION, MEAN, PIECE_ELEMENTS, ReadVector, VectorPart

WAIT_S = 1.0

Hear = Callable[[float], Sequence[tuple[Peer, Message]]]


class Distant:
    """`send` says something to the controller; `hear` waits for what comes, at most so long.

    `vectors` and `updates` are those of the checkpoint that the node begins with.
    """

    def __init__(self, sent: Sent, *, send: Callable[[Message], None], hear: Hear) -> None:
        self.vectors = sent.vectors
        self.updates = sent.updates
        self.send = send
        self.hear = hear
        self._window = 1

    def read_each(self, vector: str, spans: Sequence[Range]) -> Iterator[Array]:
        """Elements of a vector of the checkpoint, for each of `spans`: float32 (len(span),).

        The next ones are asked for while the first are on their way.
        """
        return self._read(vector, spans, "float32")

    def statistics(self, n_features: int) -> Statistics:
        """Those of the training rows: float64 (n_features,) each."""
        whole = [Range(0, n_features)]
        return Statistics(*(next(self._read(name, whole, "float64")) for name in (MEAN, DEVIATION)))

    def _read(self, vector: str, spans: Sequence[Range], dtype: str) -> Iterator[Array]:
        pace: Pace[ReadVector] = Pace(AGAIN_S)
        pace.window = self._window
        came: dict[ReadVector, Array] = {}
        ahead = (asked for span in spans for asked in _parts(vector, span))
        n_wanted = 0
        for span in spans:
            out = np.empty(len(span), dtype)
            for part in _parts(vector, span):
                while part not in came:
                    # As many as may be on their way are known to be wanted.
                    while n_wanted < WINDOW_MOST and (asked := next(ahead, None)) is not None:
                        pace.want(asked)
                        n_wanted += 1
                    self._turn(pace, came)
                out[part.start - span.start :][: part.n] = came.pop(part)
                n_wanted -= 1
            self._window = pace.window
            yield out

    def _turn(self, pace: Pace[ReadVector], came: dict[ReadVector, Array]) -> None:
        """Asks for what is due, and waits for what comes."""
        now = time.monotonic()
        for asked in pace.due(now):
            self.send(asked)
        for peer, message in self.hear(min(WAIT_S, max(0.0, pace.again_at - now))):
            if peer.node == CONTROLLER and isinstance(message, VectorPart):
                answered = ReadVector(message.vector, message.start, len(message.payload))
                if pace.came(time.monotonic(), answered):
                    came[answered] = np.asarray(message.payload)


def _parts(vector: str, span: Range) -> Iterator[ReadVector]:
    for start in range(span.start, span.stop, PIECE_ELEMENTS):
        yield ReadVector(vector, start, min(PIECE_ELEMENTS, span.stop - start))
