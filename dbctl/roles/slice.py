"""One partition's slice of a shard: its parameters, optimiser state and version.

Rules of this file: pure (roles/base.py). Theory of operation: the flat vector is laid out partition
by partition, so a shard holds one slice of each partition that its range meets (one in all when
replicas are whole). Slices have nothing to do with each other: each is updated by its partition's
workers only, has buffers of its own, and counts its own updates, from which schedules go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Protocol

import numpy as np

from dbctl.optim.gradients import is_finite
from dbctl.optim.team import ALONE, Team
from dbctl.region import Range
from dbctl.roles.base import Allocate, Array, Buffer, View
from dbctl.roles.handouts import Handouts, ParameterBuffers
from dbctl.wire import Push


class Outcome(Enum):
    """What became of a push; it is acknowledged in every case."""

    APPLIED = "applied"
    REFUSED = "refused"  # not finite
    DROPPED = "dropped"  # of an evaluation that is over, or counted before


class ShardSlice(Protocol):
    """What a shard asks of a slice: one of `Slice`, and of roles/batch_slice.py."""

    @property
    def span(self) -> Range: ...

    @property
    def version(self) -> int: ...

    @property
    def current(self) -> Buffer:
        """The parameters as they are: for tests."""
        ...

    @property
    def state(self) -> dict[str, Array]:
        """What is saved beside the parameters: for tests."""
        ...

    @property
    def ready(self) -> bool:
        """Whether `take` can be called now."""
        ...

    def fits(self, push: Push) -> bool:
        """Whether this push is one of this slice, whole."""
        ...

    def take(self, push: Push, *, staleness: int) -> Outcome: ...

    def handed_to(self, reader: str) -> Buffer:
        """What a node of this name gets when it fetches."""
        ...

    def vectors(self) -> list[tuple[str, View]]:
        """For a cut: what is saved. Nobody writes it while it is handed out."""
        ...


def divide(
    span: Range, partitions: Sequence[Range], decays: Sequence[tuple[Range, float]]
) -> Iterator[tuple[Range, list[tuple[Range, float]]]]:
    """The slices of elements `span` of the flat vector, one a partition, in order.

    `decays`: L2 coefficients by elements of the span; each slice's are by its own elements.
    """
    for partition in partitions or (span,):
        part = partition.intersection(span)
        if not part:
            continue
        own = part.shift(-span.start)
        both = [
            (elements.intersection(own), decay)
            for elements, decay in decays or [(Range(0, len(span)), 0.0)]
        ]
        yield part, [(elements.shift(-own.start), decay) for elements, decay in both if elements]


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


def is_whole(push: Push, span: Range) -> bool:
    """A worker pushes its partition's whole slice."""
    if not isinstance(push.payload, np.ndarray):
        return False
    return push.start == span.start and len(push.payload) == len(span)


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
        team: Team = ALONE,
        staleness_scaling: bool = False,
    ) -> None:
        self.span = span
        self.state = state
        self.version = version
        self._rule = rule
        self._decays = list(decays)
        self._staleness_scaling = staleness_scaling
        self._team = team
        self._allocate = allocate
        self._buffers = ParameterBuffers(values, allocate=allocate, handouts=handouts)
        self._copies: list[Buffer] = []

    @property
    def current(self) -> Buffer:
        return self._buffers.current

    def writable(self) -> Buffer | None:
        """Where the next update goes; None while readers hold every buffer."""
        return self._buffers.writable()

    @property
    def ready(self) -> bool:
        return self.writable() is not None

    def fits(self, push: Push) -> bool:
        return is_whole(push, self.span)

    def take(self, push: Push, *, staleness: int) -> Outcome:
        payload = push.payload
        if not all(self._team.each(len(payload), lambda at: is_finite(payload[at]))):
            return Outcome.REFUSED
        target = self.writable()
        assert target is not None, "a push was to wait until a buffer is free"
        divide_rate = max(1, staleness) if self._staleness_scaling else 1
        self.update(payload, target, divide_rate=divide_rate)
        return Outcome.APPLIED

    def handed_to(self, reader: str) -> Buffer:
        return self.current

    def update(self, gradient: Array, target: Buffer, *, divide_rate: int) -> None:
        """One update, written into `target`, which becomes the current buffer."""
        rate = self._rule.rate(self.version) / divide_rate
        for part, decay in self._decays:
            job = self._update(part, gradient, target, rate=rate, decay=decay)
            self._team.each(len(part), job)
        self._buffers.publish(target)
        self.version += 1

    def _update(
        self, part: Range, gradient: Array, target: Buffer, *, rate: float, decay: float
    ) -> Callable[[slice], None]:
        """The job of updating elements of `part`, counted from its first."""
        current, out, version = self.current.array, target.array, self.version

        def update(some: slice) -> None:
            at = slice(part.start + some.start, part.start + some.stop)
            self._rule.update(
                current[at],
                gradient[at],
                {name: vector[at] for name, vector in self.state.items()},
                n=version,
                rate=rate,
                out=out[at],
                decay=decay,
            )

        return update

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
