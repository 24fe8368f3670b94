"""What a node reads where it has none of the run's files: its controller has them, and sends parts.

Rules of this file: one part is on its way, and is asked for again until it comes; what is read is
in memory once. It is used while a role is built, before the node has said Ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from dbctl.data.prepare import Statistics
from dbctl.plan import Sent
from dbctl.region import Range
from dbctl.roles.base import Array
from dbctl.wire import Message, Peer
from dbctl.wire_files import DEVIATION, MEAN, PART_ELEMENTS, ReadVector, VectorPart

AGAIN_S = 2.0
AGAIN_MOST_S = 30.0  # a slow line brings the part meanwhile
CONTROLLER = "controller"

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

    def read(self, vector: str, span: Range) -> Array:
        """Elements `span` of a vector of the checkpoint: float32 (len(span),)."""
        return self._read(vector, span, "float32")

    def statistics(self, n_features: int) -> Statistics:
        """Those of the training rows: float64 (n_features,) each."""
        whole = Range(0, n_features)
        return Statistics(*(self._read(name, whole, "float64") for name in (MEAN, DEVIATION)))

    def _read(self, vector: str, span: Range, dtype: str) -> Array:
        out = np.empty(len(span), dtype)
        for start in range(span.start, span.stop, PART_ELEMENTS):
            part = Range(start, min(start + PART_ELEMENTS, span.stop))
            out[part.slice(span.start)] = self._part(ReadVector(vector, start, len(part)))
        return out

    def _part(self, asked: ReadVector) -> Array:
        again_s = AGAIN_S
        while True:
            self.send(asked)
            ends = time.monotonic() + again_s
            while (wait_s := ends - time.monotonic()) > 0.0:
                for peer, message in self.hear(wait_s):
                    if peer.node == CONTROLLER and _answers(message, asked):
                        assert isinstance(message, VectorPart)
                        return np.asarray(message.payload)
            again_s = min(2.0 * again_s, AGAIN_MOST_S)


def _answers(message: Message, asked: ReadVector) -> bool:
    if not isinstance(message, VectorPart):
        return False
    said = (message.vector, message.start, len(message.payload))
    return said == (asked.vector, asked.start, asked.n)
