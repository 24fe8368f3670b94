"""Boxes and ranges: half-open regions in integers, and nothing else.

Rules of this file: only integers, no numpy, no knowledge of layers. A `Range` is a slice of the
flat parameter vector, a `Box` a region of a layer's nodes (docs/architecture.md, words).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod


@dataclass(frozen=True, order=True, slots=True)
class Range:
    """Elements `start` to `stop` (not included) of the flat parameter vector."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.stop, f"not a range: [{self.start}, {self.stop})"

    def __len__(self) -> int:
        return self.stop - self.start

    def __bool__(self) -> bool:
        return self.stop > self.start

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"

    def intersection(self, other: Range) -> Range:
        """What both hold; an empty range at the greater start where they do not meet."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))

    def shift(self, by: int) -> Range:
        return Range(self.start + by, self.stop + by)

    def slice(self, origin: int = 0) -> slice:
        """The Python slice of this range in an array whose element 0 is element `origin`."""
        return slice(self.start - origin, self.stop - origin)

    def split(self, count: int, *, align: int = 1) -> list[Range]:
        """`count` ranges that cover this one in order, equal within one `align`; cuts are aligned.

        Some are empty where there are fewer aligned units than `count`.
        """
        units = -(-len(self) // align)
        cuts = [min(self.start + units * i // count * align, self.stop) for i in range(count + 1)]
        return [Range(a, b) for a, b in pairwise(cuts)]


@dataclass(frozen=True, order=True, slots=True)
class Box:
    """A half-open region of a layer's nodes: one (start, stop) a dimension."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.starts) == len(self.stops), f"not a box: {self.starts} to {self.stops}"
        assert all(0 <= a <= b for a, b in self.sides()), f"not a box: {self}"

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in self.sides()) + "]"

    def __len__(self) -> int:
        return prod(self.shape)

    def __bool__(self) -> bool:
        return len(self) > 0

    def sides(self) -> Iterator[tuple[int, int]]:
        return zip(self.starts, self.stops, strict=True)

    @property
    def shape(self) -> tuple[int, ...]:
        # A list: a plan and a cut ask for it so often that a generator's frame showed.
        return tuple([b - a for a, b in zip(self.starts, self.stops, strict=True)])

    def intersection(self, other: Box) -> Box:
        starts = tuple(max(a, b) for a, b in zip(self.starts, other.starts, strict=True))
        stops = (min(a, b) for a, b in zip(self.stops, other.stops, strict=True))
        return Box(starts, tuple(max(a, b) for a, b in zip(starts, stops, strict=True)))

    def shift(self, by: tuple[int, ...]) -> Box:
        return Box(
            tuple(a + d for a, d in zip(self.starts, by, strict=True)),
            tuple(b + d for b, d in zip(self.stops, by, strict=True)),
        )

    def slices(self, origin: tuple[int, ...] | None = None) -> tuple[slice, ...]:
        """Slices of this box in an array whose first node is `origin` (default: node 0)."""
        at = origin or (0,) * len(self.starts)
        return tuple(slice(a - o, b - o) for (a, b), o in zip(self.sides(), at, strict=True))

    def run_in(self, whole: Box) -> Range | None:
        """Where this box, not an empty one, lies in the row-major nodes of `whole`.

        None: not in one run.
        """
        assert self, f"{self} lies nowhere"
        start, length = 0, 1
        for (a, b), (first, last) in zip(self.sides(), whole.sides(), strict=True):
            # Single nodes before the first side that has more, and whole sides after it.
            if length > 1 and (a, b) != (first, last):
                return None
            start = start * (last - first) + (a - first)
            length *= b - a
        return Range(start, start + length)

    def split(self, counts: tuple[int, ...]) -> list[Box]:
        """A grid of `counts` boxes that cover this one once, row-major, sides equal within one."""
        boxes = [self]
        for axis, count in enumerate(counts):
            boxes = [part for box in boxes for part in box._split_axis(axis, count)]
        return boxes

    def _split_axis(self, axis: int, count: int) -> list[Box]:
        cuts = [self.starts[axis] + self.shape[axis] * i // count for i in range(count + 1)]
        return [
            Box(
                (*self.starts[:axis], a, *self.starts[axis + 1 :]),
                (*self.stops[:axis], b, *self.stops[axis + 1 :]),
            )
            for a, b in pairwise(cuts)
        ]
