"""The header frame of a message and how its payload travels: docs/protocol.md, section 1.

Rules of this file: pure; nothing is ever pickled. A ZeroMQ message is one header frame (msgpack of
an `Envelope`) and at most one payload frame of at most `PIECE_BYTES`, raw little-endian elements.
A payload travels in one of two ways, which the roles do not see: `Shared` names memory that its
sender owns, `Inline` follows in pieces.
"""

from __future__ import annotations

import msgspec

from dbctl import wire
from dbctl.wire import Message, Peer
from dbctl.wire_batch import BatchMessage
from dbctl.wire_files import FileMessage
from dbctl.wire_logs import LogMessage
from dbctl.wire_processes import ProcessMessage
from dbctl.wire_ship import ShipMessage

AnyMessage = (
    wire.AnyMessage | BatchMessage | ProcessMessage | LogMessage | FileMessage | ShipMessage
)

PROTOCOL_VERSION = 2
HEADER_BYTES = 64 << 10
PIECE_BYTES = 1 << 20


class Shared(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A payload in its sender's memory: /proc/`pid`/fd/`fd`, checked by inode and size."""

    pid: int
    fd: int
    inode: int
    size_bytes: int
    offset_bytes: int
    n_elements: int
    dtype: str


class Inline(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A payload in pieces: this frame holds piece `piece` of `of` of message `serial`."""

    serial: int
    piece: int
    of: int
    n_elements: int
    dtype: str


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The header frame: who sends what to whom in which run."""

    version: int
    run: str
    sender: str
    incarnation: int
    to: str
    message: AnyMessage
    payload: Shared | Inline | None = None

    @property
    def peer(self) -> Peer:
        return Peer(self.sender, self.incarnation)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


class WireError(ValueError):
    """A frame that is no envelope of this protocol version."""


class VersionError(WireError):
    """An envelope of another protocol version."""


def encode(envelope: Envelope) -> bytes:
    """The header frame; the message's own `payload` was taken out (`without_payload`)."""
    frame = _encoder.encode(envelope)
    # Receivers drop a longer one, each time it is said again: who waits for it waits for ever.
    kind = type(envelope.message).__name__
    assert len(frame) <= HEADER_BYTES, f"{kind} of {len(frame)} bytes, expected {HEADER_BYTES}"
    return frame


def decode(frame: bytes | memoryview) -> Envelope:
    """The envelope in a header frame; WireError says what is wrong with it."""
    try:
        envelope = _decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a message of protocol {PROTOCOL_VERSION}: {error}") from error
    if envelope.version != PROTOCOL_VERSION:
        raise VersionError(f"protocol {envelope.version}, expected {PROTOCOL_VERSION}")
    return envelope


def without_payload(message: Message) -> Message:
    return msgspec.structs.replace(message, payload=None) if message.carries_payload else message


def with_payload(message: Message, payload: object) -> Message:
    return msgspec.structs.replace(message, payload=payload)
