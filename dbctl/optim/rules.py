"""Update rules as the experiment file names them.

Rules of this file: specifications only, no numpy, because `dbctl --help` and `validate` read it.
optim/updates.py makes the rule that a specification asks for, and states each formula.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from dbctl.optim.schedules import Rate

WarmUp = Annotated[int, Ge(0)]
Fraction = Annotated[float, Ge(0), Lt(1)]


@dataclass(frozen=True, kw_only=True)
class SgdRuleSpec:
    """w <- w - rate g (paper A, section 4.1)."""

    type: Literal["sgd"] = "sgd"
    rate: Rate
    warm_up: WarmUp = 0


@dataclass(frozen=True, kw_only=True)
class MomentumRuleSpec:
    """v <- momentum v + g; w <- w - rate v: as torch.optim.SGD with momentum (ours)."""

    type: Literal["momentum"] = "momentum"
    rate: Rate
    momentum: Fraction = 0.9
    warm_up: WarmUp = 0


@dataclass(frozen=True, kw_only=True)
class AdagradRuleSpec:
    """s <- s + g g; w <- w - rate g / sqrt(s), element by element (paper A, section 4.1)."""

    type: Literal["adagrad"] = "adagrad"
    rate: Rate
    warm_up: WarmUp = 0


@dataclass(frozen=True, kw_only=True)
class AdamRuleSpec:
    """As torch.optim.Adam (Kingma and Ba 2015; ours)."""

    type: Literal["adam"] = "adam"
    rate: Rate = 0.001
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    epsilon: Annotated[float, Gt(0)] = 1e-8
    warm_up: WarmUp = 0


RuleSpec = SgdRuleSpec | MomentumRuleSpec | AdagradRuleSpec | AdamRuleSpec
RULE_SPECS = {
    "sgd": SgdRuleSpec,
    "momentum": MomentumRuleSpec,
    "adagrad": AdagradRuleSpec,
    "adam": AdamRuleSpec,
}
