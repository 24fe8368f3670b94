"""Learning-rate schedules: a rate as a function of the shard's own count of updates.

Rules of this file: no numpy, no state. A rate is a pure function of the specification and of `n`,
the updates that the shard has applied so far (0 at the first one), so a resumed run continues its
schedule from the count in the checkpoint and nothing else has to be saved. Shards count for
themselves: with several replicas two shards may be at different points of one schedule (paper A,
section 4.1, leaves schedules open; this is ours).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Annotated, Literal

from annotated_types import Ge, Gt


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """initial x factor^floor(n/every) | initial x factor^(n/every) | initial / (1 + n/every)."""

    type: Literal["step", "exponential", "inverse_time"]
    initial: Annotated[float, Gt(0)]
    every: Annotated[int, Ge(1)]
    factor: Annotated[float, Gt(0)] | None = None  # required but for inverse_time, refused there


Rate = Annotated[float, Gt(0)] | ScheduleSpec


def rate_at(spec: Rate, warm_up: int, n: int) -> float:
    """The learning rate of update `n` (from 0) of a shard.

    While n < warm_up the scheduled rate is multiplied by (n + 1) / warm_up: it rises linearly from
    1 / warm_up of the rate, never zero, to the whole rate at update warm_up - 1. The schedule
    itself does not wait for the warm-up. Warm-up is ours: the paper has none.
    """
    assert min(n, warm_up) >= 0, f"expected counts, found n={n}, warm_up={warm_up}"
    rate = _scheduled(spec, n) if isinstance(spec, ScheduleSpec) else float(spec)
    return rate * min(1.0, (n + 1) / warm_up) if warm_up else rate


def _scheduled(spec: ScheduleSpec, n: int) -> float:
    if spec.type == "inverse_time":
        return spec.initial / (1.0 + n / spec.every)
    assert spec.factor is not None, f"a schedule of type {spec.type} has a factor"
    exponent = n // spec.every if spec.type == "step" else n / spec.every
    try:
        return float(spec.initial * spec.factor**exponent)
    except OverflowError:
        # A growing schedule that has left the range of a float: the parameters overflow next, the
        # finite checks refuse every gradient after that, and the run ends with its reason.
        return inf
