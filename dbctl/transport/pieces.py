"""Cuts a payload into pieces of bounded size and puts pieces together again. Pure.

Rules of this file: no socket and no clock; arrays, the wire's types, and nothing else, so that the
seeded in-process network loses and repeats pieces with the same code that a run uses.

Theory of operation: piece i of a payload holds its bytes [i * piece_bytes, (i + 1) * piece_bytes),
so a piece's place and size follow from its header, and a header that disagrees with its frame is
refused before anything is allocated. `serial` numbers the messages of one incarnation of a sender,
upwards. Of each sender at most `max_messages` are in assembly; when one more begins, the one with
the lowest serial is dropped (its sender sends it again under a new serial), so a late piece of an
old message can never push out a newer one. A whole message is handed over once: a few of the last
serials are remembered.

Where the memory for all senders is used up, a new message waits to be sent again: if it took that
of the stalest, eight that come at once would push each other out for ever. Only what has not gone
on for as many pieces of others as fit twice is given up: its sender is gone, or sends it anew.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import TypeVar

from dbctl.envelope import PIECE_BYTES, Inline
from dbctl.errors import PeerError
from dbctl.roles.base import Array
from dbctl.wire import Peer

BufferFor = Callable[[Peer, Inline], Array]
V = TypeVar("V")

ITEM_BYTES = {"<f4": 4, "<f8": 8, "|u1": 1}
"""The element types that travel, as numpy writes them, and their sizes."""

REMEMBERED_SERIALS = 16
REMEMBERED_PEERS = 4096


def count_pieces(size_bytes: int, piece_bytes: int = PIECE_BYTES) -> int:
    """How many pieces a payload makes; an empty one makes one empty piece."""
    return max(1, -(-size_bytes // piece_bytes))


def cut(array: Array, piece_bytes: int = PIECE_BYTES) -> Iterator[tuple[int, int, memoryview]]:
    """(piece, of, bytes) in order; the bytes are the array's own memory, nothing is copied."""
    assert array.flags.c_contiguous, "only C-contiguous payloads travel"
    assert array.dtype.str in ITEM_BYTES, f"payloads are {set(ITEM_BYTES)}, not {array.dtype.str}"
    data = array.reshape(-1).view("u1").data
    of = count_pieces(len(data), piece_bytes)
    for piece in range(of):
        yield piece, of, data[piece * piece_bytes : (piece + 1) * piece_bytes]


class _Assembly:
    """One message whose pieces are coming in."""

    def __init__(self, inline: Inline, array: Array) -> None:
        self.shape = _shape(inline)
        self.array = array
        self.seen_at = 0
        self.bytes = array.reshape(-1).view("u1")
        self.missing = set(range(inline.of))

    def place(self, inline: Inline, frame: memoryview, at: int) -> bool:
        """Puts one piece where it belongs; True when that was the last one missing."""
        if inline.piece in self.missing:
            self.bytes[at : at + len(frame)] = frame
            self.missing.discard(inline.piece)
        return not self.missing


class Assembler:
    """Puts the pieces of many senders' messages together; holds at most `max_bytes` of arrays.

    `buffer_for` gives the array that a message is received into (flat, of the header's length and
    dtype); without it each message gets a fresh one.
    """

    def __init__(
        self,
        max_messages: int = 2,
        max_bytes: int = 64 << 20,
        *,
        piece_bytes: int = PIECE_BYTES,
        buffer_for: BufferFor | None = None,
    ) -> None:
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self.piece_bytes = piece_bytes
        self.held_bytes = 0
        self._buffer_for = buffer_for or _fresh_buffer
        self._n_pieces = 0
        self._patience = 2 * count_pieces(max_bytes, piece_bytes)
        # By age of the last piece over all senders: the stalest is the first.
        self._open: OrderedDict[tuple[Peer, int], _Assembly] = OrderedDict()
        self._delivered: OrderedDict[Peer, deque[int]] = OrderedDict()
        self._refused: OrderedDict[Peer, int] = OrderedDict()

    def add(self, peer: Peer, inline: Inline, frame: bytes | memoryview) -> Array | None:
        """Takes one piece, in any order and twice; the whole payload once all are there, read-only.

        PeerError: the header contradicts itself, its frame, or the message's earlier pieces.
        """
        data = memoryview(frame)
        at = self._check(peer, inline, data)
        delivered = self._delivered.get(peer)
        if delivered is not None and inline.serial in delivered:
            return None
        key = (peer, inline.serial)
        self._n_pieces += 1
        assembly = self._open.get(key)
        if assembly is None and inline.serial > self._refused.get(peer, -1):
            assembly = self._begin(peer, inline)
        if assembly is None:
            return None
        if assembly.shape != _shape(inline):
            raise PeerError(str(peer), f"pieces of message {inline.serial} disagree: {inline}")
        self._open.move_to_end(key)
        assembly.seen_at = self._n_pieces
        if not assembly.place(inline, data, at):
            return None
        self._drop(key)
        self._remember(peer, inline.serial)
        whole = assembly.array.view()
        whole.flags.writeable = False
        return whole

    def forget(self, peer: Peer) -> None:
        """The sender has ended: what it left incomplete is dropped."""
        for key in [key for key in self._open if key[0] == peer]:
            self._drop(key)
        self._delivered.pop(peer, None)
        self._refused.pop(peer, None)

    def _check(self, peer: Peer, inline: Inline, frame: memoryview) -> int:
        """Where in the payload this piece begins; PeerError unless all sizes agree."""
        item_bytes = ITEM_BYTES.get(inline.dtype)
        if item_bytes is None:
            raise PeerError(str(peer), f"payload of {inline.dtype!r}, expected {list(ITEM_BYTES)}")
        size = inline.n_elements * item_bytes
        if not 0 <= size <= self.max_bytes:
            raise PeerError(str(peer), f"payload of {size} bytes, expected 0 to {self.max_bytes}")
        if inline.of != count_pieces(size, self.piece_bytes) or not 0 <= inline.piece < inline.of:
            raise PeerError(str(peer), f"piece {inline.piece} of {inline.of} for {size} bytes")
        at = inline.piece * self.piece_bytes
        expected = min(self.piece_bytes, size - at)
        if frame.nbytes != expected:
            raise PeerError(
                str(peer), f"piece {inline.piece} has {frame.nbytes} bytes, expected {expected}"
            )
        return at

    def _begin(self, peer: Peer, inline: Inline) -> _Assembly | None:
        mine = sorted(serial for other, serial in self._open if other == peer)
        if len(mine) >= self.max_messages:
            if inline.serial < mine[0]:
                return None
            self._drop((peer, mine[0]))
        size = inline.n_elements * ITEM_BYTES[inline.dtype]
        while self.held_bytes + size > self.max_bytes:
            stalest = next(iter(self._open))
            if self._n_pieces - self._open[stalest].seen_at <= self._patience:
                _keep(self._refused, peer, inline.serial)  # what follows of it would never be whole
                return None
            self._drop(stalest)
        array = self._buffer_for(peer, inline)
        assert array.dtype.str == inline.dtype, f"{array.dtype.str} given for {inline.dtype}"
        assert array.shape == (inline.n_elements,), f"{array.shape} given for {inline.n_elements}"
        assembly = self._open[peer, inline.serial] = _Assembly(inline, array)
        self.held_bytes += size
        return assembly

    def _drop(self, key: tuple[Peer, int]) -> None:
        self.held_bytes -= self._open.pop(key).array.nbytes

    def _remember(self, peer: Peer, serial: int) -> None:
        serials = self._delivered.get(peer) or deque(maxlen=REMEMBERED_SERIALS)
        serials.append(serial)
        _keep(self._delivered, peer, serials)


def _keep(by_peer: OrderedDict[Peer, V], peer: Peer, value: V) -> None:
    """As the newest; of too many peers the oldest is forgotten."""
    by_peer[peer] = value
    by_peer.move_to_end(peer)
    if len(by_peer) > REMEMBERED_PEERS:
        by_peer.popitem(last=False)


def _shape(inline: Inline) -> tuple[int, int, str]:
    return inline.of, inline.n_elements, inline.dtype


def _fresh_buffer(peer: Peer, inline: Inline) -> Array:
    import numpy as np  # not above: an agent receives no payload, and starts without it

    return np.empty(inline.n_elements, inline.dtype)
