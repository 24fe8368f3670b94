"""What nodes of other hosts read of this machine's files: a checkpoint's vectors, statistics.

Rules of this file: it reads, one part at a time, and keeps no part; which files these are is said
here and never by a node. Theory of operation: a node asks for as many parts at once as its line
carries (dbctl/pace.py, dbctl/node/distant.py), and each is answered when it is asked for.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dbctl.checkpoint.reader import Checkpoint, open_checkpoint
from dbctl.data.prepare import Statistics
from dbctl.errors import CheckpointError, DataError, LaunchError
from dbctl.plan import Sent
from dbctl.region import Range
from dbctl.rights import role_of
from dbctl.wire import Peer
from dbctl.wire_files import DEVIATION, MEAN, PIECE_ELEMENTS, ReadVector, VectorPart


class Vectors:
    """`checkpoint` and `statistics` are paths, or "" where a life of a run has none.

    They are opened when first asked for; LaunchError: they cannot be read any more.
    """

    def __init__(self, *, checkpoint: str, statistics: str) -> None:
        self._checkpoint_path = checkpoint
        self._statistics_path = statistics

    @property
    def sent(self) -> Sent:
        """What a node is told of what it may ask for."""
        if not self._checkpoint_path:
            return Sent()
        manifest = self._checkpoint.manifest
        return Sent(vectors=tuple(manifest.vectors), updates=manifest.updates)

    def answer(self, peer: Peer, asked: ReadVector) -> VectorPart | None:
        """None: it is not for that node. LaunchError too: that host has other data than this one.

        float32 (n,) of a checkpoint, float64 (n,) of statistics.
        """
        is_statistics = asked.vector in (MEAN, DEVIATION)
        if not is_statistics and role_of(peer.node) != "shard":
            return None
        try:
            part = self._statistic(asked) if is_statistics else self._saved(asked)
        except (CheckpointError, DataError) as error:
            raise LaunchError(peer.node, f"cannot be sent what it begins with: {error}") from error
        if part is None:
            what = f"elements {asked.start} to {asked.start + asked.n} of {asked.vector}"
            do = "expected the same data, at the same path, on its host and here"
            raise LaunchError(peer.node, f"asked for {what}, which are not there: {do}")
        return VectorPart(asked.vector, asked.start, part)

    def _saved(self, asked: ReadVector) -> NDArray[Any] | None:
        if not self._checkpoint_path or asked.vector not in self._checkpoint.vectors:
            return None
        span = _span(asked, self._checkpoint.n_elements)
        return None if span is None else self._checkpoint.read(asked.vector, span)

    def _statistic(self, asked: ReadVector) -> NDArray[Any] | None:
        if not self._statistics_path:
            return None
        found = self._statistics
        whole = found.mean if asked.vector == MEAN else found.deviation
        span = _span(asked, len(whole))
        return None if span is None else whole[span.slice()]

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        return open_checkpoint(Path(self._checkpoint_path), verify=False)  # it was verified already

    @cached_property
    def _statistics(self) -> Statistics:
        return Statistics.load(self._statistics_path)


def _span(asked: ReadVector, size: int) -> Range | None:
    """What is asked for; None: it is not within `size` elements, or more than goes at once."""
    if not (0 <= asked.start < asked.start + asked.n <= size and asked.n <= PIECE_ELEMENTS):
        return None
    return Range(asked.start, asked.start + asked.n)
