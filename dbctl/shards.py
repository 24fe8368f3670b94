"""Which shard holds what of the flat parameter vector.

Rules of this file: pure; ranges with the name of who holds them, nothing of what they hold.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from dbctl.region import Range

# Cuts between shards fall on multiples of a cache line of float32.
SHARD_ALIGN = 16
N_PARAMETER_BUFFERS = 3  # of each shard: roles/handouts.py says what for


class ShardSpan(msgspec.Struct, frozen=True, array_like=True):
    """Shard `node` holds elements `start` to `stop` of the flat parameter vector."""

    node: str
    start: int
    stop: int


def shard_spans(n_parameters: int, shards: int) -> tuple[ShardSpan, ...]:
    """Equal slices by bytes, whatever the tensors; shards that would hold nothing are left out."""
    count = min(shards, max(1, -(-n_parameters // SHARD_ALIGN)))
    cuts = [cut for cut in Range(0, n_parameters).split(count, align=SHARD_ALIGN) if cut]
    return tuple(ShardSpan(f"shard-{i}", cut.start, cut.stop) for i, cut in enumerate(cuts))


def spans_within(spans: Iterable[ShardSpan], part: Range) -> tuple[ShardSpan, ...]:
    """What each shard holds of `part`; shards that hold nothing of it are left out."""
    both = ((span.node, Range(span.start, span.stop).intersection(part)) for span in spans)
    return tuple(ShardSpan(node, r.start, r.stop) for node, r in both if r)
