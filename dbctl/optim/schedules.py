"""Learning-rate schedules: a rate as a function of the shard's own count of updates."""

from __future__ import annotations

from dataclasses import dataclass
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
