"""Vectors that hosts without a common file or memory read of each other: docs/protocol.md.

Rules of this file: as wire.py's. Who reads asks for pieces, a few at a time, and asks again.
"""

from __future__ import annotations

from typing import Any, ClassVar

from dbctl.pace import PIECE_BYTES
from dbctl.wire import Message

PIECE_ELEMENTS = PIECE_BYTES // 4  # float32, of one VectorPart or PartData
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


class ReadPart(Message, frozen=True):
    """Controller to shard: elements [start, start + n) of hand-out `handout` of a cut."""

    handout: int
    start: int
    n: int


class PartData(Message, frozen=True):
    """The answer: those elements."""

    handout: int
    start: int
    payload: Any = None

    carries_payload: ClassVar[bool] = True


FileMessage = ReadVector | VectorPart | ReadPart | PartData
