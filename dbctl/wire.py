"""The messages of dbctl: docs/protocol.md says what each means, envelope.py how each travels.

Rules of this file: pure; what roles say and hear, and the words that all messages are made of.
Messages are totals, never changes, so that each may be lost, repeated or late (reliability.md,
section 2). `seq` counts the pushes of one incarnation of one worker, from 1.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import msgspec


class Peer(NamedTuple):
    """Who sent a message: a node's name and which of its lives."""

    node: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.node}#{self.incarnation}"


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages. A subclass with a field `payload` carries one flat array."""

    carries_payload: ClassVar[bool] = False


class Position(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Where a replica stands: its own steps done, its epoch, mini-batches done in that epoch."""

    step: int = 0
    epoch: int = 0
    index: int = 0


BEGINNING = Position()


class WorkerRow(msgspec.Struct, frozen=True, array_like=True):
    """A shard's dedup table, one worker: the last push that was applied, and where it stood."""

    worker: str
    incarnation: int
    seq: int
    position: Position


class Loss(msgspec.Struct, frozen=True, array_like=True):
    """A sum of losses over `rows` rows."""

    sum: float = 0.0
    rows: int = 0


# ---------------------------------------------------------------- worker or reader <-> shard


class Hello(Message, frozen=True):
    """Said to a shard before anything else: my first unacknowledged push is `first`."""

    first: int


class Welcome(Message, frozen=True):
    """The answer to Hello: the shard's term, what it has applied of this worker, its version."""

    term: int
    applied: int
    version: int


class Fetch(Message, frozen=True):
    """Asks for a partition's slice, from element `start` on, once push `after` was applied."""

    term: int
    number: int
    after: int
    returned: int
    start: int = 0


class Params(Message, frozen=True):
    """Answers Fetch `number`: a hand-out of the current parameters, holding push `holds`.

    `start` is the first element's place in the flat vector. `payload` is read-only; it does not
    change until hand-out `handout` is returned.
    """

    term: int
    number: int
    handout: int
    version: int
    holds: int
    start: int
    payload: Any = None

    carries_payload: ClassVar[bool] = True


class Push(Message, frozen=True):
    """An accrued gradient (a sum of `n_gradients`) for the shard's range, from element `start`.

    `base` is the version its first gradient was computed on; `mark` asks for a cut (0 = none).
    """

    term: int
    seq: int
    start: int
    base: int
    n_gradients: int
    position: Position
    mark: int
    returned: int
    payload: Any = None

    carries_payload: ClassVar[bool] = True


class Ack(Message, frozen=True):
    """All pushes of this worker up to `seq` were applied (or refused as non-finite) and counted."""

    term: int
    seq: int
    version: int


class Return(Message, frozen=True):
    """A reader gives back every hand-out numbered up to `returned`."""

    returned: int


# ---------------------------------------------------------------- coordinator <-> worker


class Grant(Message, frozen=True):
    """A replica may go on to step `until`; its first push after step `mark_step` carries `mark`.

    `number` grows: an older grant than the last one seen is ignored. `last`: there will be no more
    steps; push what is unpushed and report `finished`.
    """

    number: int
    until: int
    last: bool = False
    mark: int = 0
    mark_step: int = 0


class Halt(Message, frozen=True):
    """Stop after the step in hand. `push`: push what is unpushed first (`stop` was reached).

    The partitions of a cut replica stop together: at step `until`, which they were granted.
    """

    push: bool
    until: int = 0


class Report(Message, frozen=True):
    """A worker's totals since its incarnation began; also its request for a grant."""

    state: str  # joining | waiting | running | finished | halted
    position: Position
    until: int
    pushed: int
    acked: int
    examples: int
    gradients: int
    epoch_loss: Loss
    last_epoch_loss: Loss
    compute_s: float
    fetch_wait_s: float
    push_wait_s: float
    exchange_wait_s: float
    bytes_pushed: int
    bytes_fetched: int
    bytes_exchanged: int
    refused: int
    refused_in_a_row: int
    refused_where: str = ""


# ---------------------------------------------------------------- partitions of one replica


class Boxes(Message, frozen=True):
    """What one partition gives another in pass `number`: exchange (`phase`, `layer`) of it.

    The sender's memory does not change before the receiver has taken it (docs/protocol.md).
    """

    number: int
    phase: str
    layer: int
    payload: Any = None

    carries_payload: ClassVar[bool] = True


class Need(Message, frozen=True):
    """Asks a partition to send an exchange of pass `number` again: it has not come."""

    number: int
    phase: str
    layer: int


# ---------------------------------------------------------------- coordinator <-> shard


class ShardReport(Message, frozen=True):
    """A shard's totals, its dedup table, and staleness counts: (worker, staleness, count).

    `over`: the nodes of which it hears nothing more (Gone), whose rows are final. Of long staleness
    counts each report has a part, and the next one the next.
    """

    term: int
    version: int
    updates: int
    bytes_in: int
    bytes_out: int
    refused: int
    table: tuple[WorkerRow, ...]
    staleness: tuple[tuple[str, int, int], ...]
    over: tuple[str, ...] = ()


class Cut(Message, frozen=True):
    """Hand out a cut `number` now: nothing is in flight (end of a run)."""

    number: int


class CutPart(Message, frozen=True):
    """One vector of a shard's cut: `vector` is `parameters` or the name of an optimiser state.

    `of` vectors make the shard's cut. The payload is read-only until `handout` is returned; None on
    another host: `size` elements, which ReadPart (wire_files.py) asks for.
    """

    number: int
    vector: str
    of: int
    handout: int
    start: int
    version: int
    table: tuple[WorkerRow, ...]
    payload: Any = None
    size: int = 0

    carries_payload: ClassVar[bool] = True


class Gone(Message, frozen=True):
    """An incarnation is over: forget its hand-outs, ignore what still comes of it."""

    node: str
    incarnation: int


# ---------------------------------------------------------------- coordinator <-> evaluator


class Evaluate(Message, frozen=True):
    """Measure the shards' parameters on rows `part`, `part + of`, ... of the split."""

    number: int
    part: int = 0
    of: int = 1
    predictions: bool = False


class Evaluated(Message, frozen=True):
    """Sums and counts over the evaluator's rows; `correct` and `top5` are -1 for float targets.

    Payload: rows by true and predicted class, float64, until the next Evaluate; or none.
    """

    number: int
    part: int
    version: int
    loss: Loss
    correct: int
    top5: int
    classes: int
    payload: Any = None

    carries_payload: ClassVar[bool] = True


class Predictions(Message, frozen=True):
    """Piece `index` of an evaluation: row numbers, true labels, predicted labels, probability.

    It is sent again until a Filed says that it has come.
    """

    number: int
    index: int
    rows: tuple[int, ...]
    labels: tuple[float, ...]
    predicted: tuple[float, ...]
    scores: tuple[float, ...]


class Filed(Message, frozen=True):
    """Controller to evaluator: of evaluation `number`, pieces 0 to `pieces` - 1 have come."""

    number: int
    pieces: int


# ------------------------------------------------------------------- the end of every process


class Finish(Message, frozen=True):
    """The node's work is over: close and exit with status 0."""


class Exited(Message, frozen=True):
    """Agent to controller: `status` as Popen.returncode (negative = signal), the log's tail."""

    node: str
    incarnation: int
    status: int
    log_tail: str
    word: str = ""


AnyMessage = (
    Hello | Welcome | Fetch | Params | Push | Ack | Return
    | Grant | Halt | Report | Boxes | Need
    | ShardReport | Cut | CutPart | Gone
    | Evaluate | Evaluated | Predictions | Filed
    | Finish | Exited
)  # fmt: skip
