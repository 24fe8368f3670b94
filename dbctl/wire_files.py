"""What a node reads of its controller's files: docs/protocol.md, section 7.

Rules of this file: as wire.py's. A piece at a time: a node asks for the next when it has the last.
"""

from __future__ import annotations

from typing import Any, ClassVar

from dbctl.wire import Message

PART_ELEMENTS = 1 << 18  # of one VectorPart: 1 MiB of float32
MEAN, DEVIATION = "statistics.mean", "statistics.deviation"


class ReadVector(Message, frozen=True):
    """Node to controller: elements [start, start + n) of a vector; again until they come.

    `vector`: one of the run's checkpoint, or `statistics.mean`, `statistics.deviation`.
    """

    vector: str
    start: int
    n: int


class VectorPart(Message, frozen=True):
    """The answer: those elements."""

    vector: str
    start: int
    payload: Any = None

    carries_payload: ClassVar[bool] = True


FileMessage = ReadVector | VectorPart
