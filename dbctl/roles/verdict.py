"""Whether a gradient may be used: what the partitions of one replica agree on about each.

Rules of this file: pure (roles/base.py). Theory of operation: a loss or a gradient that is not
finite goes nowhere (docs/reliability.md, G14). The partitions of a cut replica refuse all or none,
as a replica pushes a whole gradient: each says at the end of the pass whether its own is finite. It
looks only where the pass could not say how large an element can be (model/kernels/bounds.py): to
look at 1.9 M elements took 0.4 to 0.8 ms of a step of 12.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from math import isfinite, sqrt
from typing import Any, NamedTuple

import numpy as np

from dbctl.model.exchange import Exchange
from dbctl.optim.gradients import first_bad, is_finite
from dbctl.region import Range
from dbctl.roles.base import Array, BatchResult
from dbctl.roles.conversation import Conversation

ELSEWHERE = "another partition"
MEND = "mend or leave out that row"  # how a place ends where the data are at fault


def _is_small(bound: float, out: Array) -> bool:
    """So far below what elements can be that however it was rounded none of them overflows."""
    return bound < sqrt(np.finfo(out.dtype).max)


class Verdict(NamedTuple):
    """`loss_sum` is the whole replica's. `said`: what else each partition said, in their order.

    `bad` names what is not finite: a tensor, the loss, or ELSEWHERE, whose partner has the name;
    empty when the gradient may be used.
    """

    loss_sum: float
    bad: str
    said: list[list[float]]


def judge(
    result: BatchResult,
    out: Array,
    talk: Conversation,
    *,
    tensors: Iterable[tuple[str, Range]],
    say: Sequence[float] = (),
) -> Generator[Exchange, Any, Verdict]:
    """The end of a pass. `out`: this partition's gradient; `say`: whatever else all must know."""
    finite = isfinite(result.loss_sum) and (_is_small(result.bound, out) or is_finite(out))
    shares = yield from talk.agree([result.loss_sum, float(finite), *say])
    bad = ""
    if not finite:
        bad = first_bad(out, tensors) or "the loss"
    elif not all(share[1] for share in shares):
        bad = ELSEWHERE
    return Verdict(sum(share[0] for share in shares), bad, [share[2:] for share in shares])
