"""How a batch is cut: rows into portions, portions into bundles (paper A, section 4.2).

Rules of this file: pure integers. Theory of operation: the rows of a batch have numbers from 0. A
portion is `portion` consecutive rows, a bundle `send_every` consecutive portions; the last of each
may be short. So what is in a bundle depends on the batch alone, never on how many replicas there
are or who computes it: the coordinator orders bundles by number, and a worker knows their rows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Batch:
    """`rows` in portions of `portion` rows, in bundles of `send_every` portions; all above 0."""

    rows: int
    portion: int
    send_every: int = 1

    def __post_init__(self) -> None:
        assert min(self.rows, self.portion, self.send_every) > 0, f"nothing to compute: {self}"

    @property
    def n_portions(self) -> int:
        return -(-self.rows // self.portion)

    @property
    def n_bundles(self) -> int:
        return -(-self.n_portions // self.send_every)

    def portions_of(self, bundle: int) -> range:
        """The numbers of the bundle's portions."""
        assert 0 <= bundle < self.n_bundles, f"no bundle {bundle} of {self.n_bundles}"
        first = bundle * self.send_every
        return range(first, min(first + self.send_every, self.n_portions))

    def rows_of(self, portion: int) -> range:
        """The numbers of the portion's rows within the batch."""
        assert 0 <= portion < self.n_portions, f"no portion {portion} of {self.n_portions}"
        first = portion * self.portion
        return range(first, min(first + self.portion, self.rows))

    def rows_of_bundle(self, bundle: int) -> range:
        """The numbers of the bundle's rows within the batch."""
        portions = self.portions_of(bundle)
        return range(self.rows_of(portions[0]).start, self.rows_of(portions[-1]).stop)
