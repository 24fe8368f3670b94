"""dbctl/transport/parcel.py: a message as frames and back (docs/protocol.md)."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from dbctl import wire
from dbctl.envelope import (
    HEADER_BYTES,
    PIECE_BYTES,
    PROTOCOL_VERSION,
    Envelope,
    Inline,
    Shared,
    decode,
    encode,
)
from dbctl.roles.base import PlainBuffer, View
from dbctl.roles.shard import MAX_STALENESS_COUNTS
from dbctl.transport.memory import SharedBuffer
from dbctl.transport.parcel import Packer, Refused, unpack
from dbctl.transport.pieces import Assembler
from dbctl.wire import Ack, Params, Peer, Position
from dbctl.wire_processes import Failed

RUN = "run-1"
ME = Peer("shard-0", 3)


def params(payload: object) -> Params:
    return Params(1, 2, 3, 4, 5, 6, payload)


def packer(bulk: str = "memory") -> Packer:
    return Packer(run=RUN, me=ME, bulk=bulk)


def test_a_message_without_payload_is_one_frame() -> None:
    [[header]] = packer().pack("worker-0.0", Ack(1, 2, 3))
    assert unpack([memoryview(header)], RUN) == Envelope(
        PROTOCOL_VERSION, RUN, "shard-0", 3, "worker-0.0", Ack(1, 2, 3)
    )


def test_shared_memory_is_described_not_sent() -> None:
    buffer = SharedBuffer(1 << 20, "<f8")
    [[header]] = packer().pack("w", params(View(buffer, 5, 1 << 20)))
    envelope = unpack([memoryview(header)], RUN)
    assert isinstance(envelope.payload, Shared)
    assert (envelope.payload.offset_bytes, envelope.payload.n_elements) == (40, (1 << 20) - 5)
    assert envelope.message == params(None)
    buffer.close()


@pytest.mark.parametrize("n_elements", [0, 1, 1 << 18, (1 << 19) + 1])
def test_pieces_hold_the_owners_bytes_and_the_whole_header(n_elements: int) -> None:
    buffer = PlainBuffer(n_elements, "<f4")
    buffer.array[:] = np.arange(n_elements)
    messages = packer().pack("w", params(View(buffer, 0, n_elements)))
    assembler, whole = Assembler(), []
    for header, data in messages:
        assert len(data) <= PIECE_BYTES
        envelope = unpack([memoryview(header), memoryview(data)], RUN)
        assert envelope.message == params(None)
        assert isinstance(envelope.payload, Inline)
        whole.append(assembler.add(envelope.peer, envelope.payload, data))
    assert [array is None for array in whole] == [True] * (len(messages) - 1) + [False]
    np.testing.assert_array_equal(whole[-1], buffer.array)
    if n_elements:
        assert np.shares_memory(np.frombuffer(messages[0][1], "<f4"), buffer.array)


def test_serials_grow() -> None:
    pack = packer("inline").pack
    serials = []
    for _ in range(3):
        [[header, _]] = pack("w", params(np.zeros(3, "<f4")))
        payload = decode(header).payload
        assert isinstance(payload, Inline)
        serials.append(payload.serial)
    assert serials == [1, 2, 3]


def test_what_a_peer_says_cannot_act_on_a_terminal() -> None:
    header = encode(Envelope(PROTOCOL_VERSION, "\x1b[2J\n" + "é" * 500, "x", 1, "y", Ack(1, 1, 1)))
    with pytest.raises(Refused) as caught:
        unpack([memoryview(header)], RUN)
    assert caught.value.kind == "run"
    assert caught.value.text.isascii()
    assert caught.value.text.isprintable()
    assert len(caught.value.text) <= 300


def test_header_of_every_message_fits() -> None:
    """A shard's table of 200 workers."""
    row = wire.WorkerRow("worker-100.100", 3, 1 << 40, Position(1 << 40, 1 << 20, 1 << 20))
    staleness = tuple(("worker-100.100", s, 1 << 30) for s in range(MAX_STALENESS_COUNTS))
    report = wire.ShardReport(1, 1 << 40, 1 << 40, 1 << 50, 1 << 50, 0, (row,) * 200, staleness)
    header = encode(Envelope(PROTOCOL_VERSION, RUN, "shard-100.100", 1, "controller", report))
    assert len(header) <= HEADER_BYTES == 64 << 10
    assert msgspec.msgpack.decode(header)


def test_a_header_that_no_receiver_would_take_is_a_defect_of_its_sender() -> None:
    with pytest.raises(AssertionError, match=r"Failed of 7.* bytes, expected 65536"):
        encode(Envelope(PROTOCOL_VERSION, RUN, "x", 1, "y", Failed("x" * 70_000)))
