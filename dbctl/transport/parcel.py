"""A message as frames, and frames as a message: what is believed of a frame, and what is not.

Rules of this file: no socket and no state. A ZeroMQ message is a header frame and at most one
payload frame (docs/protocol.md). A payload in shared memory travels as its description; any other
travels in pieces, each with the whole header, whose bytes are the array's own: an owner leaves a
buffer alone until it is acknowledged or handed back, and by then it was sent (what is sent once
more after that is old by its number, and the receiver ignores it).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dbctl.envelope import (
    HEADER_BYTES,
    PROTOCOL_VERSION,
    Envelope,
    Inline,
    VersionError,
    WireError,
    decode,
    encode,
    without_payload,
)
from dbctl.roles.base import View
from dbctl.transport.memory import SharedBuffer, describe
from dbctl.transport.pieces import cut
from dbctl.wire import Message, Peer

NAME_CHARACTERS = 100
TEXT_CHARACTERS = 300


class Refused(Exception):
    """Frames that are no message of this run. `kind` is what is logged once."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind = kind
        # Some of it came from a peer: nothing of it may act on a terminal, or fill a log.
        self.text = ascii(text)[1:-1][:TEXT_CHARACTERS]


class Packer:
    """Makes the frames of this process's messages; numbers those that go in pieces."""

    def __init__(self, *, run: str, me: Peer, bulk: str) -> None:
        assert bulk in ("memory", "inline"), f"bulk is memory or inline, not {bulk}"
        self.far: frozenset[str] = frozenset()  # nodes of other hosts, which map nothing of ours
        self.run = run
        self.me = me
        self.bulk = bulk
        self._serial = 0

    def pack(self, to: str, message: Message) -> list[list[bytes | memoryview]]:
        """One [header] or [header, piece] a ZeroMQ message.

        A `View` goes without a copy; an array of nobody's buffer is copied first.
        """
        payload = getattr(message, "payload", None)
        envelope = Envelope(
            version=PROTOCOL_VERSION,
            run=self.run,
            sender=self.me.node,
            incarnation=self.me.incarnation,
            to=to,
            message=without_payload(message),  # type: ignore[arg-type]
        )
        if payload is None:
            return [[encode(envelope)]]
        if isinstance(payload, View):
            near = self.bulk == "memory" and to not in self.far
            if near and isinstance(payload.buffer, SharedBuffer):
                return [[encode(msgspec.structs.replace(envelope, payload=describe(payload)))]]
            array = payload.array
        else:
            array = payload.copy()
        self._serial += 1
        return [
            [
                encode(
                    msgspec.structs.replace(
                        envelope,
                        payload=Inline(self._serial, piece, of, array.size, array.dtype.str),
                    )
                ),
                data,
            ]
            for piece, of, data in cut(array)
        ]


def unpack(frames: Sequence[memoryview], run: str) -> Envelope:
    """The envelope of [header] or [header, piece]; Refused says why it is none of this run."""
    if not 1 <= len(frames) <= 2:
        raise Refused("frames", f"a message of {len(frames)} frames, expected 1 or 2")
    if len(frames[0]) > HEADER_BYTES:
        raise Refused("header", f"a header of {len(frames[0])} bytes, expected {HEADER_BYTES}")
    try:
        envelope = decode(frames[0])
    except VersionError as error:
        raise Refused("version", str(error)) from error
    except WireError as error:
        raise Refused("undecodable", str(error)) from error
    if envelope.run != run:
        raise Refused("run", f"a message of run {envelope.run}, expected {run}")
    if not 0 < len(envelope.sender) <= NAME_CHARACTERS or envelope.incarnation < 0:
        raise Refused("sender", f"a message of {envelope.peer}")
    _check_payload(envelope, frames)
    return envelope


def _check_payload(envelope: Envelope, frames: Sequence[memoryview]) -> None:
    """A payload where the message has none, a frame too many or missing: refused."""
    message = envelope.message
    inline = isinstance(envelope.payload, Inline)
    if inline != (len(frames) == 2):
        raise Refused("payload", f"{envelope.peer}: {len(frames)} frames for {envelope.payload}")
    if envelope.payload is not None and not message.carries_payload:
        raise Refused("payload", f"{envelope.peer}: {type(message).__name__} with a payload")
    if message.carries_payload and getattr(message, "payload", None) is not None:
        raise Refused("payload", f"{envelope.peer}: a payload inside the header")
