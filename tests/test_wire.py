"""Messages and their envelope: every one goes over the wire and comes back as it was."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbctl.envelope import (
    PROTOCOL_VERSION,
    AnyMessage,
    Envelope,
    Inline,
    Shared,
    VersionError,
    WireError,
    decode,
    encode,
    with_payload,
    without_payload,
)
from dbctl.wire import Ack, Message, Params, Peer, Position
from dbctl.wire_batch import Computed, Execute, Executed

MESSAGES: list[type[Message]] = list(get_args(AnyMessage))
PAYLOADS = [None, Shared(1, 2, 3, 4, 5, 6, "<f4"), Inline(7, 0, 2, 9, "<f8")]


def example(kind: Any, number: int = 3) -> Any:
    """A value of an annotation, no field of which is its default."""
    if isinstance(kind, msgspec.inspect.StructType):
        return kind.cls(**{f.name: example(f.type, i) for i, f in enumerate(kind.fields, number)})
    if isinstance(kind, msgspec.inspect.TupleType):
        return tuple(example(item, number) for item in kind.item_types)
    if isinstance(kind, msgspec.inspect.VarTupleType):
        return (example(kind.item_type, number), example(kind.item_type, number + 1))
    simple = {
        msgspec.inspect.IntType: number,
        msgspec.inspect.FloatType: number + 0.5,
        msgspec.inspect.StrType: f"näme-{number}",
        msgspec.inspect.BytesType: b"\x00\xff %d" % number,
        msgspec.inspect.BoolType: True,
        msgspec.inspect.AnyType: None,  # the payload, which travels apart
    }
    return simple[type(kind)]


def envelope(message: Any, **changes: Any) -> Envelope:
    fields = {"version": PROTOCOL_VERSION, "run": "r", "sender": "worker-0.0", "incarnation": 2}
    return Envelope(**(fields | {"to": "shard-0", "message": message} | changes))


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("payload", PAYLOADS, ids=["none", "shared", "inline"])
def test_every_message_comes_back_as_it_was(kind: type[Message], payload: Any) -> None:
    message = example(msgspec.inspect.type_info(kind))
    sent = envelope(message, payload=payload)
    got = decode(encode(sent))
    assert got == sent
    assert type(got.message) is kind
    assert got.peer == Peer("worker-0.0", 2)
    assert str(got.peer) == "worker-0.0#2"


def test_only_messages_with_a_payload_carry_one() -> None:
    carrying = {kind.__name__ for kind in MESSAGES if kind.carries_payload}
    assert carrying == {
        "Params",
        "Push",
        "CutPart",
        "Boxes",
        "Evaluated",
        "VectorPart",
        "PartData",
        "ShipmentPart",
    }
    assert {k.__name__ for k in MESSAGES if "payload" in k.__struct_fields__} == carrying


def test_a_payload_is_taken_out_and_put_back() -> None:
    array = np.arange(3.0)
    message = Params(1, 2, 3, 4, 5, 6, array)
    bare = without_payload(message)
    assert bare == Params(1, 2, 3, 4, 5, 6)
    back = with_payload(bare, array)
    assert isinstance(back, Params)
    assert back.payload is array
    assert without_payload(Ack(1, 2, 3)) == Ack(1, 2, 3)


def test_another_version_is_told_from_nonsense() -> None:
    with pytest.raises(VersionError, match=f"protocol 1, expected {PROTOCOL_VERSION}"):
        decode(encode(envelope(Ack(1, 2, 3), version=1)))


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        [PROTOCOL_VERSION, "r", "a", 1, "b", ["Unheard", 1], None],
        [PROTOCOL_VERSION, "r", "a", 1, "b", ["Ack", 1], None],
        [PROTOCOL_VERSION, "r", "a", 1, "b", ["Ack", 1, "2", 3], None],
        [PROTOCOL_VERSION, "r", "a", "1", "b", ["Ack", 1, 2, 3], None],
        [PROTOCOL_VERSION, "r", "a", 1, "b", ["Ack", 1, 2, 3], ["Unheard"]],
    ],
)
def test_what_is_no_envelope_is_refused_with_its_reason(value: object) -> None:
    with pytest.raises(WireError, match=f"not a message of protocol {PROTOCOL_VERSION}: "):
        decode(msgspec.msgpack.encode(value))


@given(st.binary(max_size=200))
def test_no_bytes_break_the_decoder(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=4))
def test_a_damaged_frame_is_refused_or_another_message_never_an_error_of_ours(
    at: int, change: bytes
) -> None:
    frame = bytearray(encode(envelope(Ack(1, 2, 3), payload=PAYLOADS[1])))
    at %= len(frame)
    frame[at : at + len(change)] = change
    with suppress(WireError):
        assert isinstance(decode(bytes(frame)), Envelope)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(WireError):
        decode(b"\x97\x01\xa1r\xa1a\x01\xa1b" + b"\x91" * 100_000)


def test_positions_are_ordered_by_step_first() -> None:
    assert Position(2, 0, 2) > Position(1, 5, 0)
    assert max(Position(3, 1, 0), Position(3, 0, 3)) == Position(3, 1, 0)


def test_the_longest_answer_of_a_worker_fits_in_a_header() -> None:
    """The greatest `send_every`; and the widest command of the greatest `history`."""
    encode(envelope(Computed(10**9, 10**9, 10**6, (1 / 3,) * 5000)))
    names = tuple(f"{kind}{n}" for n in range(100) for kind in "sy")
    terms = tuple((1 / 3, name) for name in (*names, "gradient"))
    encode(envelope(Execute(10**9, (("direction", terms),), (), ("direction",), ("gradient",))))
    encode(envelope(Execute(10**9, (), (), ("s0", "y0", "gradient"), (*names, "gradient"))))
    encode(envelope(Executed(10**9, (1 / 3,) * 603)))
