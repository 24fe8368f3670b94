"""Ranges and boxes: integers that cover what they are cut from, once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbctl.region import Box, Range

ranges = st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda e: Range(min(e), max(e)))


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    sides = [draw(st.tuples(st.integers(0, 8), st.integers(0, 8)).map(sorted)) for _ in range(3)]
    return Box(tuple(start for start, _ in sides), tuple(stop for _, stop in sides))


def elements(at: Range) -> set[int]:
    return set(range(at.start, at.stop))


@given(ranges, ranges)
def test_an_intersection_holds_what_both_hold(a: Range, b: Range) -> None:
    assert elements(a.intersection(b)) == elements(a) & elements(b)
    assert bool(a.intersection(b)) == bool(elements(a) & elements(b))
    assert len(a) == len(elements(a))


@given(ranges, st.integers(1, 9), st.integers(1, 16))
def test_a_split_covers_the_range_once_with_aligned_cuts(a: Range, count: int, align: int) -> None:
    parts = a.split(count, align=align)
    assert len(parts) == count
    assert [e for part in parts for e in range(part.start, part.stop)] == sorted(elements(a))
    assert all((part.start - a.start) % align == 0 or part.start == a.stop for part in parts)
    sizes = [-(-len(part) // align) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_a_range_as_a_slice_and_as_text() -> None:
    assert list("abcdef"[Range(3, 5).slice(2)]) == ["b", "c"]
    assert Range(3, 5).shift(-3).slice() == slice(0, 2)
    assert str(Range(3, 5)) == "[3, 5)"


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2)])
def test_what_is_no_range_is_refused(start: int, stop: int) -> None:
    with pytest.raises(AssertionError, match="not a range"):
        Range(start, stop)


def nodes(box: Box) -> set[int]:
    """The elements of a 8 x 8 x 8 array that the box holds."""
    return set(np.arange(8**3).reshape(8, 8, 8)[box.slices()].ravel().tolist())


@given(boxes(), boxes())
def test_boxes_meet_in_what_both_hold(a: Box, b: Box) -> None:
    both = a.intersection(b)
    assert nodes(both) == nodes(a) & nodes(b)
    assert len(both) == len(nodes(both))
    assert bool(both) == bool(nodes(both))


@given(boxes(), st.tuples(*[st.integers(1, 3)] * 3))
def test_a_grid_covers_the_box_once(box: Box, counts: tuple[int, int, int]) -> None:
    parts = box.split(counts)
    assert len(parts) == np.prod(counts)
    assert sum(len(part) for part in parts) == len(box)
    assert set().union(*map(nodes, parts)) == nodes(box)
    for axis in range(3):
        sides = {part.shape[axis] for part in parts}
        assert max(sides) - min(sides) <= 1


@given(boxes())
def test_a_box_in_an_array_of_its_own(box: Box) -> None:
    whole = np.arange(8**3).reshape(8, 8, 8)
    own = whole[box.slices()]
    assert own[box.slices(box.starts)].shape == box.shape
    back = box.shift(tuple(-start for start in box.starts))
    assert back == Box.whole(box.shape)


@given(boxes(), boxes())
def test_a_box_is_one_run_of_another_if_its_nodes_follow_each_other(a: Box, b: Box) -> None:
    box, n = a.intersection(b), len(a)
    if not box:
        with pytest.raises(AssertionError, match="lies nowhere"):
            box.run_in(a)
        return
    places = np.arange(n).reshape(a.shape)[box.slices(a.starts)].ravel()
    run = box.run_in(a)
    in_one_run = bool((np.diff(places) == 1).all())
    assert (run is not None) == in_one_run
    if run is not None:
        assert (run.start, run.stop) == (places[0], places[-1] + 1)


def test_a_box_as_text_and_what_is_none() -> None:
    assert str(Box((0, 2), (3, 4))) == "[0:3, 2:4]"
    for starts, stops in [((0,), (1, 2)), ((2,), (1,)), ((-1,), (1,))]:
        with pytest.raises(AssertionError):
            Box(starts, stops)
