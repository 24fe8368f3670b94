"""Rows of data that hosts without the data's files ask of their controller: docs/protocol.md.

Rules of this file: as wire.py's. A shipment is a file that is named by the SHA-256 of its bytes;
who wants it asks for pieces, few at a time, and asks again (dbctl/shipment.py).
"""

from __future__ import annotations

from typing import Any, ClassVar

from dbctl.wire import Message


class ReadShipment(Message, frozen=True):
    """Worker or evaluator to controller: bytes [start, start + n) of a shipment."""

    digest: str
    start: int
    n: int


class ShipmentPart(Message, frozen=True):
    """The answer: those bytes."""

    digest: str
    start: int
    payload: Any = None

    carries_payload: ClassVar[bool] = True


ShipMessage = ReadShipment | ShipmentPart
