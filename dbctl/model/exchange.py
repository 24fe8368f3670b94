"""What the partitions of a replica say to each other in a pass: arrays given, arrays taken.

Rules of this file: data only. A pass over a part of a network is a generator that yields `Give`
(send these) and `Take` (go on once those are here; it is sent a dict of flat read-only arrays, one
a partition). A key says which exchange of a pass it is: its phase and the layer or level.

    states   nodes of a level to whoever needs them             forward
    sums     partial sums of a layer cut by its inputs          forward
    weights  shared weights, from their owner                   forward
    max, total   the two reductions of softmax                  loss
    rank     how the label's output stands among all            measuring
    deltas   gradients by the outputs of a layer cut by inputs  backward
    back     gradients by nodes, to their owner                 backward
    shares   partial gradients of shared weights, to the owner  backward
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:  # an agent loads the roles' types, never numpy
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"


class Key(NamedTuple):
    phase: str
    layer: int


class Outbox(Protocol):
    """Memory that a partition sends from; others map it (roles.base.Buffer)."""

    @property
    def array(self) -> Array: ...


class Run(NamedTuple):
    """Elements `start` to `stop` of an outbox."""

    outbox: Outbox
    start: int
    stop: int


class Give(NamedTuple):
    """To each partition named: a run of an outbox, which stays as it is until it was taken."""

    key: Key
    to: dict[int, Run]


class Take(NamedTuple):
    """What the partitions `of` gave under the same key in the same pass."""

    key: Key
    of: tuple[int, ...]


Exchange = Give | Take
