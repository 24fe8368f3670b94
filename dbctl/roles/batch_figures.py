"""What the leader of a batch method knows of the run in numbers.

Rules of this file: pure. `steps` are iterations, `epochs` passes over the training rows, and the
training loss is that of the whole batch at the accepted point. Examples, rates and waits are the
workers' (roles/figures.py), copies of bundles included.
"""

from __future__ import annotations

from collections.abc import Mapping

from dbctl.optim.commands import Iterated
from dbctl.roles.figures import Figures, Part
from dbctl.wire import Position


class BatchFigures(Figures):
    """`rows`: of the training data. `iteration` and `passes`: of earlier lives of the run."""

    def __init__(
        self,
        replicas: int,
        *,
        rows: int,
        iteration: int = 0,
        passes: float = 0.0,
        examples: int = 0,
        seconds: float = 0.0,
    ) -> None:
        parts = {n: Part(rows=rows, steps_per_epoch=1) for n in range(replicas)}
        super().__init__(parts, examples=examples, seconds=seconds)
        self._rows = rows
        self.iteration = iteration
        self.passes = passes
        self.batch_loss: float | None = None

    def iterated(self, found: Iterated) -> None:
        self.iteration = found.iteration
        self.batch_loss, self.gradient_norm = found.loss, found.gradient_norm

    def evaluated(self, rows: int) -> None:
        """One more loss and gradient of a batch of so many rows."""
        self.passes += rows / self._rows

    @property
    def steps(self) -> int:
        return self.iteration

    @property
    def epochs(self) -> float:
        return self.passes

    def reachable_epochs(self, wanted: float) -> float:
        return wanted

    def loss(self, *, last_epoch: bool) -> float | None:
        return self.batch_loss

    def examples_at(self, positions: Mapping[int, Position]) -> int:
        """A cut is made while nobody's work counts for the next point: all that was done."""
        return super().examples_at({})

    def left_out(self) -> dict[int, int]:
        """None: what a dead replica had is computed by the others."""
        return {}

    def diverged(self) -> bool:
        """Never: no step is accepted that does not lower the loss of its batch."""
        return False

    def refused(self) -> int:
        """None: a point where the gradient is not finite is a trial that went too far."""
        return 0

    def refused_pushes(self) -> int:
        """None, likewise: its bundle is answered as infinite."""
        return 0

    def mean_staleness(self) -> float | None:
        """None: a gradient of an earlier point does not count at all."""
        return None
