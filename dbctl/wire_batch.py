"""The messages of batch methods (Sandblaster): docs/protocol.md, section 8.

Rules of this file: as wire.py's. Nothing here grows with the model: names and scalars only (paper
A, section 4.2). Gradients of bundles travel as `Push`, whose `position` says of which evaluation
(`epoch`) and bundle (`index`) they are; parameters as `Params`.
"""

from __future__ import annotations

import msgspec

from dbctl.wire import Message

Term = tuple[float, str]
Assignment = tuple[str, tuple[Term, ...]]


class Execute(Message, frozen=True):
    """Coordinator to shard: command `number`, on names of vectors (optim/commands.py).

    Numbers have no gaps; a shard carries out each once and answers a repeated one again.
    """

    number: int
    assign: tuple[Assignment, ...]
    swap: tuple[tuple[str, str], ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]


class Begin(Message, frozen=True):
    """Command `number`: assign, set the sums to zero, hand out `point` in evaluation `evaluation`.

    From here on a push of another evaluation is acknowledged and not counted.
    """

    number: int
    evaluation: int
    assign: tuple[Assignment, ...]
    point: str


class Collect(Message, frozen=True):
    """Command `number`: every bundle of `evaluation` was counted; make the mean gradient of it.

    `gradient` = sums / examples + decay * point. The first scalar of the answer is the L2 penalty,
    infinite where the gradient is not finite; then the dot products of `rows` and `columns`.
    """

    number: int
    evaluation: int
    examples: int
    gradient: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]


class Executed(Message, frozen=True):
    """Shard to coordinator: command `number` was carried out; float64 sums over its elements."""

    number: int
    scalars: tuple[float, ...]


class Order(msgspec.Struct, frozen=True, array_like=True):
    """One bundle for one replica: its `number`-th order, from 1.

    `sample`: which seeded sample of rows the batch is, or 0 for all of them.
    """

    number: int
    evaluation: int
    bundle: int
    sample: int


class Work(Message, frozen=True):
    """Coordinator to worker: the orders that are not done, in the order of their numbers.

    `evaluation` is the one in hand: orders of earlier ones are dropped, and reported as such.
    """

    evaluation: int
    orders: tuple[Order, ...]
    halt: bool = False


class Computed(Message, frozen=True):
    """Worker to coordinator: its order `number` is done, and every shard has acknowledged it.

    `losses`: sums over the rows of each portion, in order; empty when the order was dropped. A
    value that is not finite: nothing was pushed, and `where` says what was not finite, as far as
    this worker knows. Sent again until `Work` has no such order.
    """

    number: int
    evaluation: int
    bundle: int
    losses: tuple[float, ...]
    where: str = ""


BatchMessage = Execute | Begin | Collect | Executed | Work | Computed
