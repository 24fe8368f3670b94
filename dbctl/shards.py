"""Which shard holds what of the flat parameter vector.

Rules of this file: pure; ranges with the name of who holds them, nothing of what they hold.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from dbctl.region import Range

# Equal cuts between shards fall on multiples of a cache line of float32.
SHARD_ALIGN = 16
NEAR = 1 / 8  # of a slice: so far a cut may move, to where a partition ends
N_PARAMETER_BUFFERS = 3  # of each shard: roles/handouts.py says what for
# Replicas that may read a hand-out while they compute. Who pushes holds none: the other one, and a
# cut, leave a buffer to write.
READERS_IN_PLACE = N_PARAMETER_BUFFERS - 1


class ShardSpan(msgspec.Struct, frozen=True, array_like=True):
    """Shard `node` holds elements `start` to `stop` of the flat parameter vector."""

    node: str
    start: int
    stop: int


def shard_spans(
    n_parameters: int, shards: int, *, partitions: Sequence[Range] = ()
) -> tuple[ShardSpan, ...]:
    """Equal slices by bytes, whatever the tensors; shards that would hold nothing are left out.

    Where one of `partitions` ends close to a cut, the cut is there: each shard more that a
    partition talks to is a push and a fetch more a step, whatever is in them.
    """
    count = min(shards, max(1, -(-n_parameters // SHARD_ALIGN)))
    slices = [cut for cut in Range(0, n_parameters).split(count, align=SHARD_ALIGN) if cut]
    near = n_parameters / count * NEAR
    ends = sorted({part.stop for part in partitions} - {0, n_parameters})
    cuts = [0, *(_nearest(ends, cut.start, near) for cut in slices[1:]), n_parameters]
    return tuple(ShardSpan(f"shard-{i}", *pair) for i, pair in enumerate(pairwise(cuts)))


def _nearest(ends: Sequence[int], cut: int, near: float) -> int:
    """Of the ascending `ends` the one closest to `cut`; `cut` itself if none is `near` enough."""
    at = bisect_left(ends, cut)
    return min(
        (end for end in ends[max(0, at - 1) : at + 1] if abs(end - cut) <= near),
        key=lambda end: abs(end - cut),
        default=cut,
    )


def spans_within(spans: Iterable[ShardSpan], part: Range) -> tuple[ShardSpan, ...]:
    """What each shard holds of `part`; shards that hold nothing of it are left out."""
    both = ((span.node, Range(span.start, span.stop).intersection(part)) for span in spans)
    return tuple(ShardSpan(node, r.start, r.stop) for node, r in both if r)
