"""What every role is: messages and time in, effects out (design.md, section 4).

Rules of this package: no socket, file, clock, thread, process or log. Time comes in as an argument
(seconds, monotonic, any origin); randomness is a function of seed, replica and step; memory comes
from an `allocate` that the node gives. So a whole cluster runs in one thread in a test.

`receive` only files what came and answers. `step` does one bounded unit of work: a mini-batch, an
update, a portion. `due` says when `step` wants to be called: 0.0 at once, infinity never (only a
message can change that), else a time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from dbctl.model.exchange import Exchange
from dbctl.region import Range
from dbctl.wire import Message, Peer, Position, Predictions

if TYPE_CHECKING:  # what relays messages starts in half the time without numpy
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"

NOW = 0.0
NEVER = inf


class Buffer(Protocol):
    """A flat array that its owner writes and others map read-only; shared memory or plain."""

    @property
    def array(self) -> Array: ...


class PlainBuffer:
    """A buffer in this process's own memory: tests, and what never leaves the process."""

    def __init__(self, n_elements: int, dtype: str) -> None:
        import numpy as np

        self.array: Array = np.zeros(n_elements, dtype)


Allocate = Callable[[int, str], Buffer]


class View(NamedTuple):
    """Elements `start` to `stop` of a buffer: the payload of a message on its sender's side.

    The receiver's message holds a read-only flat array in its place.
    """

    buffer: Buffer
    start: int
    stop: int

    @property
    def array(self) -> Array:
        return self.buffer.array[self.start : self.stop]


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Send:
    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class Record:
    """One line for metrics.jsonl and the progress display."""

    event: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Save:
    """A complete cut, to be written; the writer answers with the coordinator's `saved`."""

    cut: Any


@dataclass(frozen=True, slots=True)
class Done:
    """The role's work is over."""

    status: str
    reason: str = ""


Effect = Send | Record | Save | Done
Effects = list[Effect]


class Role(Protocol):
    @property
    def due(self) -> float: ...

    def start(self, now: float) -> Effects: ...

    def receive(self, now: float, sender: Peer, message: Message) -> Effects: ...

    def step(self, now: float) -> Effects: ...


# ---------------------------------------------------------------- what a worker computes


class BatchResult(NamedTuple):
    """One mini-batch: the sum of its rows' losses, and how many rows it had.

    `bound`: no element of the gradient is larger; infinite or NaN where that is not known.
    """

    loss_sum: float
    rows: int
    bound: float = inf


class Gradient(Protocol):
    """The gradient of the mean loss over one mini-batch, at given parameters.

    `tensors` names what the worker's flat vector holds, in order. `steps_per_epoch` is how many
    mini-batches the replica's rows make. `compute` is a generator that yields what it exchanges
    with the other partitions (nothing when the replica is whole) and returns a BatchResult; it
    writes the gradient into `out` (same length and dtype as `parameters`).
    """

    @property
    def tensors(self) -> Sequence[tuple[str, Range]]: ...

    @property
    def steps_per_epoch(self) -> int: ...

    def compute(
        self, at: Position, parameters: Array, out: Array
    ) -> Generator[Exchange, Any, BatchResult]: ...


class PortionGradient(Protocol):
    """The gradient of one portion of a batch: what a batch method's worker computes.

    `sample` says which rows the batch is: 0 all of them, another number that seeded sample. Every
    replica can compute any portion, and what it gets depends on sample, portion and parameters
    only. `portions` are those of a bundle, in order. `compute` is a generator as
    Gradient.compute; it writes the gradient of the *sum* of the rows' losses into `out`, so that
    portions can be added and divided by the batch's count of rows. `prefetch` says that a bundle's
    rows will be needed soon: it waits for nothing, and may do nothing.
    """

    @property
    def tensors(self) -> Sequence[tuple[str, Range]]: ...

    def portions(self, sample: int, bundle: int) -> range: ...

    def compute(
        self, parameters: Array, out: Array, *, sample: int, portion: int
    ) -> Generator[Exchange, Any, BatchResult]: ...

    def prefetch(self, sample: int, bundle: int) -> None: ...


# ------------------------------------------------------------------- what an evaluator computes


class Tally(NamedTuple):
    """Sums and counts over the rows measured; `correct` and `top5` are -1 for float targets.

    `confusion`: int64 (classes, classes), true class first; None where it is not counted.
    """

    rows: int
    correct: int
    top5: int
    classes: int
    confusion: Array | None = None


class Measure(Protocol):
    """A split's rows and a forward pass over rows `part`, `part + of`, ... in batches.

    `begin` forgets the last tally and says how many batches there are. `measure` takes one: a
    generator as Gradient.compute, which returns this partition's share of the sum of the rows'
    losses and, with `predictions`, the rows as one message.
    """

    @property
    def n_parameters(self) -> int: ...

    def begin(self, part: int, of: int) -> int: ...

    def measure(
        self, index: int, parameters: Array, *, number: int, predictions: bool
    ) -> Generator[Exchange, Any, tuple[float, Predictions | None]]: ...

    def tally(self) -> Tally: ...
