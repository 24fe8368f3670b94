"""One partition's slice of a shard: its parameters, optimiser state and version.

Rules of this file: pure (roles/base.py). Theory of operation: the flat vector is laid out partition
by partition, so a shard holds one slice of each partition that its range meets (one in all when
replicas are whole). Slices have nothing to do with each other: each is updated by its partition's
workers only, has buffers of its own, and counts its own updates, from which schedules go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from dbctl.region import Range
from dbctl.roles.base import Allocate, Array, Buffer, View
from dbctl.roles.handouts import Handouts, ParameterBuffers
from dbctl.wire import Push


class UpdateRule(Protocol):
    """What a shard asks of a rule (optim/updates.py): element-wise, state beside the parameters."""

    def rate(self, n: int) -> float: ...

    def update(
        self,
        parameters: Array,
        gradient: Array,
        state: dict[str, Array],
        *,
        n: int,
        rate: float,
        out: Array,
        decay: float = 0.0,
    ) -> None: ...


class Slice:
    """Elements `span` of the flat vector. `decays`: (elements of the slice, L2 coefficient)."""

    def __init__(
        self,
        span: Range,
        values: Array,
        state: dict[str, Array],
        *,
        rule: UpdateRule,
        decays: Sequence[tuple[Range, float]],
        version: int,
        allocate: Allocate,
        handouts: Handouts,
    ) -> None:
        self.span = span
        self.state = state
        self.version = version
        self._rule = rule
        self._decays = list(decays)
        self._allocate = allocate
        self._buffers = ParameterBuffers(values, allocate=allocate, handouts=handouts)
        self._copies: list[Buffer] = []

    @property
    def current(self) -> Buffer:
        return self._buffers.current

    def writable(self) -> Buffer | None:
        """Where the next update goes; None while readers hold every buffer."""
        return self._buffers.writable()

    def fits(self, push: Push) -> bool:
        """A worker pushes its partition's whole slice."""
        if not isinstance(push.payload, np.ndarray):
            return False
        return push.start == self.span.start and len(push.payload) == len(self.span)

    def update(self, gradient: Array, target: Buffer, *, divide_rate: int) -> None:
        """One update, written into `target`, which becomes the current buffer."""
        rate = self._rule.rate(self.version) / divide_rate
        current, out = self.current.array, target.array
        for part, decay in self._decays:
            at = part.slice()
            self._rule.update(
                current[at],
                gradient[at],
                {name: vector[at] for name, vector in self.state.items()},
                n=self.version,
                rate=rate,
                out=out[at],
                decay=decay,
            )
        self._buffers.publish(target)
        self.version += 1

    def vectors(self) -> list[tuple[str, View]]:
        """For a cut: the current parameters as they lie, and copies of the optimiser state."""
        found = [("parameters", self._view(self.current))]
        for index, (name, vector) in enumerate(self.state.items()):
            if index == len(self._copies):
                self._copies.append(self._allocate(len(vector), vector.dtype.str))
            np.copyto(self._copies[index].array, vector)
            found.append((name, self._view(self._copies[index])))
        return found

    def _view(self, buffer: Buffer) -> View:
        return View(buffer, 0, len(self.span))
