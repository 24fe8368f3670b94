"""One partition's slice of a shard in a batch method: named vectors, and the sums of gradients.

Rules of this file: pure (roles/base.py). Theory of operation (paper A, section 4.2;
docs/protocol.md, section 8): the coordinator names vectors and never sees one. A name is bound to a
buffer; a name that was never assigned reads as zeros. To assign is to write its buffer, or, where
somebody holds that, to bind another one: a spare buffer that nobody holds, or a new one. What was
bound before becomes spare, and is written again once it is given back. Swapping exchanges bindings.

The point of the evaluation in hand is held too, until the next one begins: whoever fetches it late
gets what the others got. Between Begin and Collect each bundle is counted once, in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

import numpy as np

from dbctl.optim.commands import PARAMETERS, Assignment, Scalars
from dbctl.optim.gradients import is_finite
from dbctl.optim.vectors import add_to_sums, combine, dots, mean_gradient
from dbctl.region import Range
from dbctl.roles.base import Allocate, Array, Buffer, View
from dbctl.roles.handouts import Handouts
from dbctl.roles.slice import Outcome, is_whole
from dbctl.wire import Push
from dbctl.wire_batch import Begin, Collect, Execute


class BatchSlice:
    """Elements `span` of the flat vector.

    values: PARAMETERS, (len(span),); state: others that begin with something else than zeros, by
    name. Both are copied. kept: the names that a cut hands out, PARAMETERS first. decays: (elements
    of the slice, L2 coefficient). version: how many evaluations were begun before.
    """

    def __init__(
        self,
        span: Range,
        values: Array,
        state: Mapping[str, Array],
        *,
        kept: Sequence[str],
        decays: Sequence[tuple[Range, float]],
        version: int,
        allocate: Allocate,
        handouts: Handouts,
    ) -> None:
        assert kept[0] == PARAMETERS, f"expected {PARAMETERS} first, found {list(kept)}"
        self.span = span
        self.version = version
        self._dtype = values.dtype.str
        self._kept = tuple(kept)
        self._decays = list(decays)
        self._allocate = allocate
        self._handouts = handouts
        self._bound: dict[str, Buffer] = {}
        self._spare: list[Buffer] = []
        self._unassigned: Buffer | None = None  # zeros; never written
        self._point: Buffer | None = None
        self._sums = np.zeros(len(span))
        self._counting = False
        self._counted: set[int] = set()
        self._refused: set[int] = set()
        for name, vector in {PARAMETERS: values, **state}.items():
            np.copyto(self._writable(name).array, vector)

    # ------------------------------------------------------------------------------- commands

    def execute(self, command: Execute) -> Scalars:
        self._assign(command.assign)
        for first, second in command.swap:
            bound = {first: self._bound.get(second), second: self._bound.get(first)}
            for name, buffer in bound.items():
                if buffer is None:
                    self._bound.pop(name, None)
                else:
                    self._bound[name] = buffer
        return self._dots(command.rows, command.columns)

    def begin(self, command: Begin) -> Scalars:
        self._point = None
        self._assign(command.assign)
        self._point = self._buffer(command.point)
        self.version = command.evaluation
        self._sums.fill(0)
        self._counting = True
        self._counted.clear()
        self._refused.clear()
        return ()

    def collect(self, command: Collect) -> Scalars:
        """The L2 penalty, infinite where the gradient is not finite; then the dot products."""
        assert self._counting, f"expected an evaluation in hand, found {command}"
        assert self._point is not None, command
        assert command.evaluation == self.version, f"in hand {self.version}, found {command}"
        self._counting = False
        penalty = mean_gradient(
            self._writable(command.gradient).array,
            self._sums,
            self._point.array,
            examples=command.examples,
            decays=self._decays,
        )
        if self._refused - self._counted:
            penalty = inf  # a bundle is missing: what the sums hold is no gradient
        return (penalty, *self._dots(command.rows, command.columns))

    def _assign(self, assignments: Sequence[Assignment]) -> None:
        for out, terms in assignments:
            vectors = [(factor, self._buffer(name).array) for factor, name in terms]
            combine(self._writable(out).array, vectors)

    def _dots(self, rows: Sequence[str], columns: Sequence[str]) -> Scalars:
        arrays = {name: self._buffer(name).array for name in (*rows, *columns)}
        return tuple(dots([arrays[name] for name in rows], [arrays[name] for name in columns]))

    # -------------------------------------------------------------------------------- bundles

    @property
    def ready(self) -> bool:
        """The sums are nobody's but the shard's."""
        return True

    def fits(self, push: Push) -> bool:
        return is_whole(push, self.span)

    def take(self, push: Push, *, staleness: int) -> Outcome:
        """Counts a bundle of the evaluation in hand, once."""
        evaluation, bundle = push.position.epoch, push.position.index
        if not self._counting or evaluation != self.version or bundle in self._counted:
            return Outcome.DROPPED
        if not is_finite(push.payload):
            self._refused.add(bundle)
            return Outcome.REFUSED
        add_to_sums(self._sums, push.payload)
        self._counted.add(bundle)
        return Outcome.APPLIED

    # -------------------------------------------------------------------------------- buffers

    @property
    def current(self) -> Buffer:
        return self._buffer(PARAMETERS)

    @property
    def state(self) -> dict[str, Array]:
        return {name: self._buffer(name).array for name in self._kept if name != PARAMETERS}

    def handed_to(self, reader: str) -> Buffer:
        """A worker gets the point of the evaluation in hand; any other reader the parameters."""
        if reader.startswith("worker-") and self._point is not None:
            return self._point
        return self.current

    def vectors(self) -> list[tuple[str, View]]:
        """For a cut: the kept vectors as they lie."""
        return [(name, View(self._buffer(name), 0, len(self.span))) for name in self._kept]

    def _buffer(self, name: str) -> Buffer:
        """What is read under this name."""
        bound = self._bound.get(name)
        if bound is not None:
            return bound
        if self._unassigned is None:
            self._unassigned = self._allocate(len(self.span), self._dtype)
            self._unassigned.array.fill(0)
        return self._unassigned

    def _writable(self, name: str) -> Buffer:
        """What the name is bound to from now on: nobody else holds it, all of it is written."""
        bound = self._bound.get(name)
        if bound is not None and not self._is_held(bound):
            return bound
        found = next((b for b in self._spare if not self._is_held(b)), None)
        if found is None:
            found = self._allocate(len(self.span), self._dtype)
        else:
            self._spare = [b for b in self._spare if b is not found]
        if bound is not None:
            self._spare.append(bound)
        self._bound[name] = found
        return found

    def _is_held(self, buffer: Buffer) -> bool:
        return buffer is self._point or self._handouts.held(buffer)
