"""Hand-outs and parameter buffers: what is in somebody's hands is not written."""

from __future__ import annotations

import numpy as np

from dbctl.roles.base import PlainBuffer
from dbctl.roles.handouts import Handouts, ParameterBuffers
from dbctl.shards import N_PARAMETER_BUFFERS
from dbctl.wire import Peer

A, B = Peer("worker-0.0", 1), Peer("worker-1.0", 1)


def buffer() -> PlainBuffer:
    return PlainBuffer(2, "f8")


def test_handouts_are_numbered_for_each_reader_from_one() -> None:
    handouts, one = Handouts(), buffer()
    assert [handouts.hand_out(A, one), handouts.hand_out(A, one)] == [1, 2]
    assert handouts.hand_out(B, one) == 1


def test_a_buffer_is_held_until_its_last_handout_is_back() -> None:
    handouts, one = Handouts(), buffer()
    for reader in (A, A, B):
        handouts.hand_out(reader, one)
    handouts.take_back(A, 1)
    assert handouts.held(one)
    assert (handouts.is_out(A, 1), handouts.is_out(A, 2)) == (False, True)
    handouts.take_back(A, 2)
    handouts.take_back(A, 2)  # a Return that came twice
    assert handouts.held(one)
    handouts.take_back(B, 1)
    assert not handouts.held(one)


def test_returning_gives_back_everything_up_to_the_number() -> None:
    handouts, buffers = Handouts(), [buffer() for _ in range(3)]
    for each in buffers:
        handouts.hand_out(A, each)
    handouts.take_back(A, 2)
    assert [handouts.held(each) for each in buffers] == [False, False, True]
    handouts.take_back(A, 1)  # an older Return that came late changes nothing
    assert [handouts.held(each) for each in buffers] == [False, False, True]


def test_a_life_that_ends_gives_back_all_and_the_next_counts_anew() -> None:
    handouts, one = Handouts(), buffer()
    handouts.hand_out(A, one)
    handouts.hand_out(A, one)
    handouts.hand_out(B, one)
    handouts.forget(A)
    assert handouts.held(one)
    assert not handouts.is_out(A, 1)
    handouts.forget(B)
    assert not handouts.held(one)
    assert handouts.hand_out(A, one) == 1
    handouts.forget(Peer("nobody", 1))


def test_taking_all_back_keeps_the_count() -> None:
    handouts, one = Handouts(), buffer()
    handouts.hand_out(A, one)
    handouts.take_back_all(A)
    assert not handouts.held(one)
    assert handouts.hand_out(A, one) == 2


def test_an_update_goes_in_place_while_nobody_holds_the_current_buffer() -> None:
    handouts = Handouts()
    parameters = ParameterBuffers(np.arange(3.0), allocate=PlainBuffer, handouts=handouts)
    assert parameters.current.array.tolist() == [0, 1, 2]
    assert parameters.writable() is parameters.current
    handouts.hand_out(A, parameters.current)
    other = parameters.writable()
    assert other is not parameters.current
    assert other is not None
    parameters.publish(other)
    assert parameters.current is other
    assert parameters.writable() is other


def test_with_three_buffers_held_the_update_waits() -> None:
    handouts = Handouts()
    parameters = ParameterBuffers(np.zeros(3), allocate=PlainBuffer, handouts=handouts)
    first = parameters.current
    for _ in range(N_PARAMETER_BUFFERS):
        buffer = parameters.writable()
        assert buffer is not None
        parameters.publish(buffer)
        handouts.hand_out(A, buffer)
    assert parameters.writable() is None
    handouts.take_back(A, 1)
    assert parameters.writable() is first


def test_a_shard_begins_with_its_values_but_no_zero_has_a_minus() -> None:
    """What the kernels of an update count on (`dbctl.optim.blocks.Operands`)."""
    values = np.array([-0.0, 0.0, -1e-45, 0.1, -3.4e38, np.inf, np.nan], "float32")
    values.flags.writeable = False
    parameters = ParameterBuffers(values, allocate=PlainBuffer, handouts=Handouts())
    begun = parameters.current.array
    assert begun.dtype == np.float32
    assert not np.signbit(begun[0])
    assert begun[1:].tobytes() == values[1:].tobytes()
