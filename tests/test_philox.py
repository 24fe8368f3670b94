"""Streams of words by label, and the numbers made of them."""

from __future__ import annotations

import numpy as np
import pytest

from dbctl.philox import normals, stream, uniforms
from tests.reference import serial_normals

EDGES = [2**64 - 1, 0, 0, 2**64 - 1]  # the greatest and the least word in either place


@pytest.mark.parametrize("first", [0, 1, 3, 4, 5, 1000, 1003])
def test_any_word_is_reached_directly(first: int) -> None:
    whole = stream("7/a").random_raw(1010)
    assert stream("7/a", first).random_raw(7).tolist() == whole[first : first + 7].tolist()


def test_streams_of_other_labels_differ() -> None:
    words = {int(stream(label).random_raw()) for label in ("1 a", "12 a", "1 2 a", "1/a", "")}
    assert len(words) == 5


def test_normals_equal_their_slow_twin() -> None:
    words = [*stream("x").random_raw(200).tolist(), *EDGES]
    got = normals(np.array(words, np.uint64), 2.0)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, [2 * n for n in serial_normals(words)], rtol=1e-12, atol=1e-15)


def test_uniforms_lie_in_their_half_open_interval() -> None:
    got = uniforms(np.array([*EDGES, 2**63], np.uint64), 0.5)
    assert got.tolist() == [0.5 - 2.0**-53, -0.5, -0.5, 0.5 - 2.0**-53, 0.0]


def test_normals_made_in_parts_are_those_of_the_whole_bit_for_bit() -> None:
    whole = normals(stream("x").random_raw(2 * 999))
    parts = [normals(stream("x", 2 * i).random_raw(2 * n)) for i, n in ((0, 1), (1, 7), (8, 991))]
    assert np.concatenate(parts).tobytes() == whole.tobytes()
