"""A checkpoint's cut: asked for, gathered from all shards, handed over to be written, given back.

Rules of this file: pure; no messages are sent from here. Theory of operation (docs/protocol.md,
cuts): the coordinator puts a mark into one replica's grant; its first push at or after that step
carries the mark to every shard, and each shard hands out its vectors right after applying it. When
nothing runs any more, the shards are asked directly. The manifest has one row a replica and one
update count, the greatest of the shards' values, so that nothing is applied twice on resume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dbctl.wire import CutPart, Position


@dataclass(frozen=True, kw_only=True)
class CompleteCut:
    """What is written: every part of every shard, and what the manifest says.

    `dropped` counts pushes that some shard had not applied; their steps are not done again.
    """

    number: int
    parts: Sequence[CutPart]
    rows: Mapping[int, Position]
    updates: int
    dropped: int
    final: bool

    @property
    def step(self) -> int:
        return sum(position.step for position in self.rows.values())


@dataclass(slots=True)
class _Gathering:
    number: int
    replica: int | None  # whose push carries the mark; None: the shards were asked directly
    mark_step: int
    parts: dict[tuple[str, str, int], CutPart] = field(default_factory=dict)
    final: bool = False
    handed_over: bool = False


class Cuts:
    """At most one cut is under way. `begins`: where each replica stood when the run began."""

    def __init__(self, shards: Sequence[str], begins: Mapping[int, Position]) -> None:
        self._shards = list(shards)
        self._begins = dict(begins)
        self._n_asked = 0
        self._now: _Gathering | None = None
        self._returned = dict.fromkeys(shards, 0)

    @property
    def under_way(self) -> bool:
        return self._now is not None

    @property
    def number(self) -> int:
        """Of the cut under way; 0 when there is none."""
        return self._now.number if self._now is not None else 0

    @property
    def being_written(self) -> bool:
        return self._now is not None and self._now.handed_over

    def mark_for(self, replica: int) -> tuple[int, int]:
        """The mark (number, step) that belongs into a grant of this replica, or (0, 0)."""
        cut = self._now
        if cut is None or cut.replica != replica:
            return 0, 0
        return cut.number, cut.mark_step

    @property
    def is_direct(self) -> bool:
        """The cut under way was asked of the shards directly."""
        return self._now is not None and self._now.replica is None

    def ask(self, replica: int | None, mark_step: int = 0, *, final: bool = True) -> int:
        """Begins a cut and gives its number; an unfinished one is dropped.

        `replica` None: the shards are asked directly, at the end of the run if `final`.
        """
        assert not self.being_written, "a cut is being written"
        self._n_asked += 1
        final = final and replica is None
        self._now = _Gathering(self._n_asked, replica, mark_step, final=final)
        return self._n_asked

    def dead(self, replica: int) -> bool:
        """Drops the cut that this replica was to mark; True if another must be asked for."""
        cut = self._now
        if cut is None or cut.replica != replica or cut.handed_over:
            return False
        self._now = None
        return True

    def add(self, shard: str, part: CutPart) -> CompleteCut | None:
        """Files one part; the complete cut once the last has come."""
        cut = self._now
        if cut is None or part.number != cut.number or cut.handed_over:
            return None
        cut.parts[shard, part.vector, part.start] = part
        have = dict.fromkeys(self._shards, 0)
        need = dict.fromkeys(self._shards, 1)
        for (name, _, _), each in cut.parts.items():
            have[name] += 1
            need[name] = each.of
        if have != need:
            return None
        cut.handed_over = True
        return self._complete(cut)

    def written(self) -> dict[str, int]:
        """The writer is done with the parts: for each shard, the hand-out up to which to return."""
        cut = self._now
        assert cut is not None
        for (shard, _, _), part in cut.parts.items():
            self._returned[shard] = max(self._returned[shard], part.handout)
        self._now = None
        return dict(self._returned)

    def returned(self, shard: str, part: CutPart) -> int | None:
        """For a part that came again or too late: what to return, so that the shard forgets it."""
        cut = self._now
        if cut is not None and part.number == cut.number:
            return None
        self._returned[shard] = max(self._returned[shard], part.handout)
        return self._returned[shard]

    def _complete(self, cut: _Gathering) -> CompleteCut:
        rows = dict(self._begins)
        newest: dict[str, int] = {}
        by_slice: dict[int, dict[str, int]] = {}
        for part in cut.parts.values():
            for row in part.table:
                replica = replica_of(row.worker)
                rows[replica] = max(rows.get(replica, Position()), row.position)
                newest[row.worker] = max(newest.get(row.worker, 0), row.seq)
                by_slice.setdefault(part.start, {})[row.worker] = row.seq
        dropped = sum(
            newest[worker] - seq for table in by_slice.values() for worker, seq in table.items()
        )
        return CompleteCut(
            number=cut.number,
            parts=list(cut.parts.values()),
            rows=rows,
            updates=max(part.version for part in cut.parts.values()),
            dropped=dropped,
            final=cut.final,
        )


def replica_of(worker: str) -> int:
    """worker-3.1 is partition 1 of replica 3."""
    return int(worker.removeprefix("worker-").split(".")[0])
