"""docs/protocol.md is normative: it names every message and every field that travels, no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from dbctl import wire, wire_batch, wire_files, wire_logs, wire_processes, wire_ship
from dbctl.envelope import PIECE_BYTES, PROTOCOL_VERSION, AnyMessage, Envelope, Inline, Shared

TEXT = (Path(__file__).parent.parent / "docs" / "protocol.md").read_text(encoding="utf-8")
MESSAGES = get_args(AnyMessage)
PARTS = (wire_batch.Order, wire.Position, wire.WorkerRow, wire.Loss, Shared, Inline, Envelope)
STRUCTS = {struct.__name__: struct for struct in (*MESSAGES, *PARTS)}


def documented() -> dict[str, list[str]]:
    """Each struct of the tables: the name and its fields, in order."""
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", TEXT, flags=re.MULTILINE)
    return {name: re.findall(r"`(\w+)`", fields) for name, fields in rows}


def test_every_message_is_documented_and_no_other() -> None:
    assert len(MESSAGES) >= 27
    assert set(documented()) == set(STRUCTS)


def test_every_message_class_can_be_sent() -> None:
    """A message that is missing from AnyMessage would be refused by every receiver."""
    files = (wire, wire_batch, wire_files, wire_logs, wire_processes, wire_ship)
    modules = {module.__name__ for module in files}
    defined = {c.__name__ for c in wire.Message.__subclasses__() if c.__module__ in modules}
    assert defined == {message.__name__ for message in MESSAGES}


@pytest.mark.parametrize("name", sorted(STRUCTS))
def test_the_fields_are_documented_in_the_order_they_travel(name: str) -> None:
    """Messages are arrays on the wire: the order is part of the protocol."""
    fields = [field.name for field in msgspec.structs.fields(STRUCTS[name])]
    assert documented()[name] == fields


def test_the_numbers_of_the_protocol() -> None:
    assert f"protocol version {PROTOCOL_VERSION}" in TEXT.lower()
    assert PIECE_BYTES == 1 << 20
    assert "1 MiB" in TEXT
