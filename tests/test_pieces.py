"""dbctl/transport/pieces.py: any order, repeats and loss; whole messages only, once."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbctl.envelope import Inline
from dbctl.errors import PeerError
from dbctl.transport import pieces
from dbctl.transport.pieces import Assembler, count_pieces, cut
from dbctl.wire import Peer

PEER = Peer("worker-1.0", 1)
Piece = tuple[Inline, bytes]


def pieces_of(array: Any, serial: int, piece_bytes: int = 8) -> list[Piece]:
    return [
        (Inline(serial, piece, of, array.size, array.dtype.str), bytes(data))
        for piece, of, data in cut(array, piece_bytes)
    ]


def put(assembler: Assembler, *sent: Piece, peer: Peer = PEER) -> list[list[float]]:
    whole = [assembler.add(peer, inline, frame) for inline, frame in sent]
    return [array.tolist() for array in whole if array is not None]


def test_no_socket_is_imported() -> None:
    """The in-process network uses this module."""
    tree = ast.parse(inspect.getsource(pieces))
    names = [n for x in ast.walk(tree) if isinstance(x, ast.Import) for n in [x.names[0].name]]
    names += [x.module or "" for x in ast.walk(tree) if isinstance(x, ast.ImportFrom)]
    assert not [name for name in names if "zmq" in name or "sockets" in name]


@pytest.mark.parametrize(("size", "n"), [(0, 1), (1, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_count_pieces(size: int, n: int) -> None:
    assert count_pieces(size, 8) == n


def test_cut_copies_nothing_and_covers_all() -> None:
    array = np.arange(5, dtype="<f4")
    parts = list(cut(array, 8))
    assert [(piece, of, len(data)) for piece, of, data in parts] == [
        (0, 3, 8),
        (1, 3, 8),
        (2, 3, 4),
    ]
    array[4] = 9
    assert np.frombuffer(parts[2][2], "<f4").tolist() == [9]


def test_cut_refuses_what_is_not_flat_memory() -> None:
    with pytest.raises(AssertionError):
        list(cut(np.zeros(10, "<f4")[::2]))
    with pytest.raises(AssertionError):
        list(cut(np.zeros(10, "<i4")))


def test_an_empty_payload_travels() -> None:
    assert put(Assembler(), *pieces_of(np.zeros(0, "<f8"), 1)) == [[]]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    choice=st.data(),
    dtype=st.sampled_from(["<f4", "<f8"]),
)
def test_loss_repeats_and_reorder(sizes: list[int], choice: st.DataObject, dtype: str) -> None:
    """Whatever arrives whole within the window is right, once; nothing else is handed over."""
    messages = {
        serial: np.arange(size, dtype=dtype) + 100 * serial
        for serial, size in enumerate(sizes, start=1)
    }
    sent = [piece for serial, array in messages.items() for piece in pieces_of(array, serial)]
    stream = choice.draw(st.lists(st.sampled_from(sent), max_size=60))
    assembler = Assembler(max_messages=2, piece_bytes=8)
    got: list[int] = []
    for inline, frame in stream:
        array = assembler.add(PEER, inline, frame)
        if array is not None:
            assert array.tolist() == messages[inline.serial].tolist()
            assert array.dtype.str == dtype
            assert not array.flags.writeable
            got.append(inline.serial)
        assert assembler.held_bytes <= 2 * 9 * 8
    assert len(got) == len(set(got))
    arrived = {(inline.serial, inline.piece) for inline, _ in stream}
    for serial in got:
        of = count_pieces(messages[serial].nbytes, 8)
        assert {(serial, piece) for piece in range(of)} <= arrived


@settings(max_examples=40, deadline=None)
@given(st.permutations(range(6)), st.lists(st.integers(0, 5), max_size=6))
def test_two_messages_interleaved_in_any_order(order: list[int], again: list[int]) -> None:
    first, second = np.arange(6, dtype="<f4"), np.arange(6, dtype="<f4") + 50
    sent = pieces_of(first, 1) + pieces_of(second, 2)
    stream = [sent[i] for i in order] + [sent[i] for i in again]
    got = put(Assembler(piece_bytes=8), *stream)
    assert sorted(got) == [first.tolist(), second.tolist()]


def test_at_most_two_of_a_peer_are_in_assembly() -> None:
    one, two, three = (pieces_of(np.full(4, s, "<f4"), s) for s in (1, 2, 3))
    assembler = Assembler(piece_bytes=8)
    assert put(assembler, one[0], two[0], three[0]) == []
    assert assembler.held_bytes == 32
    assert put(assembler, one[1]) == []
    assert put(assembler, two[1], three[1]) == [[2.0] * 4, [3.0] * 4]
    assert assembler.held_bytes == 0


def test_a_late_piece_of_an_old_message_pushes_nothing_out() -> None:
    one, two, three = (pieces_of(np.full(4, s, "<f4"), s) for s in (1, 2, 3))
    assembler = Assembler(piece_bytes=8)
    assert put(assembler, two[0], three[0], one[0], one[1], two[1], three[1]) == [
        [2.0] * 4,
        [3.0] * 4,
    ]


def test_peers_and_incarnations_do_not_mix() -> None:
    a = pieces_of(np.full(4, 1, "<f4"), 7)
    b = pieces_of(np.full(4, 2, "<f4"), 7)
    assembler = Assembler(piece_bytes=8)
    put(assembler, a[0])
    put(assembler, b[0], peer=Peer(PEER.node, 2))
    assert put(assembler, b[1], peer=Peer(PEER.node, 2)) == [[2.0] * 4]
    assert put(assembler, a[1]) == [[1.0] * 4]


def test_forget_drops_what_a_dead_sender_left() -> None:
    sent = pieces_of(np.zeros(4, "<f4"), 1)
    assembler = Assembler(piece_bytes=8)
    put(assembler, sent[0])
    assembler.forget(PEER)
    assert assembler.held_bytes == 0
    assert put(assembler, sent[1]) == []


def test_all_senders_together_are_bounded() -> None:
    """G12: a stranger costs no more than the bound, whatever names it invents."""
    assembler = Assembler(max_bytes=100, piece_bytes=8)
    for number in range(500):
        sent = pieces_of(np.zeros(10, "<f4"), 1)
        put(assembler, sent[0], peer=Peer(f"stranger-{number}", 1))
        assert assembler.held_bytes <= 100
    tries = [put(assembler, *pieces_of(np.ones(10, "<f4"), serial)) for serial in range(1, 8)]
    assert [[1.0] * 10] in tries, "what strangers left is given up"


@pytest.mark.parametrize("n_peers", [2, 4, 5, 8, 16])
def test_of_many_that_come_at_once_as_many_as_fit_are_put_together(n_peers: int) -> None:
    """Five and more pushed each other out for ever, where each took the stalest's memory."""
    assembler = Assembler(max_bytes=4 * 10 * 8, piece_bytes=8)
    missing = {Peer(f"worker-{i}.0", 1) for i in range(n_peers)}
    for serial in range(1, 6):
        sent = pieces_of(np.full(20, serial, "<f4"), serial)
        done = {p for piece in sent for p in missing if put(assembler, piece, peer=p)}
        assert len(done) == min(4, len(missing))
        missing -= done
    assert not missing


def test_what_stands_still_is_given_up_for_what_comes() -> None:
    assembler = Assembler(max_bytes=80, piece_bytes=8)
    for name in ("gone", "lost"):
        put(assembler, pieces_of(np.zeros(10, "<f4"), 1)[0], peer=Peer(name, 1))
    for serial in range(1, 9):
        whole = put(assembler, *pieces_of(np.ones(10, "<f4"), serial))
        if whole:
            break
    assert whole == [[1.0] * 10]
    assert 2 < serial < 8, "they had time to go on"


def test_the_receiver_gives_the_buffer() -> None:
    mine = np.zeros(4, "<f4")
    assembler = Assembler(piece_bytes=8, buffer_for=lambda peer, inline: mine)
    put(assembler, *pieces_of(np.arange(4, dtype="<f4"), 1))
    assert mine.tolist() == [0, 1, 2, 3]
    assert mine.flags.writeable


@pytest.mark.parametrize(
    ("inline", "size"),
    [
        (Inline(1, 0, 2, 4, "<f4"), 7),
        (Inline(1, 1, 2, 4, "<f4"), 4),
        (Inline(1, 0, 1, 4, "<f4"), 8),
        (Inline(1, 0, 3, 4, "<f4"), 8),
        (Inline(1, 2, 2, 4, "<f4"), 8),
        (Inline(1, -1, 2, 4, "<f4"), 8),
        (Inline(1, 0, 2, -4, "<f4"), 8),
        (Inline(1, 0, 2, 4, "|O8"), 8),
        (Inline(1, 0, 2, 4, "<i4"), 8),
        (Inline(1, 0, 1 << 60, 1 << 62, "<f8"), 8),
        (Inline(1, 0, 0, 0, "<f8"), 0),
    ],
)
def test_a_header_that_lies_is_refused_before_anything_is_allocated(
    inline: Inline, size: int
) -> None:
    def nothing(peer: Peer, inline: Inline) -> Any:
        raise AssertionError("allocated")

    assembler = Assembler(piece_bytes=8, buffer_for=nothing)
    with pytest.raises(PeerError):
        assembler.add(PEER, inline, bytes(size))
    assert assembler.held_bytes == 0


def test_pieces_of_one_serial_must_agree() -> None:
    assembler = Assembler(piece_bytes=8)
    put(assembler, *pieces_of(np.zeros(4, "<f4"), 1)[:1])
    with pytest.raises(PeerError, match="disagree"):
        put(assembler, *pieces_of(np.zeros(2, "<f8"), 1)[1:])
