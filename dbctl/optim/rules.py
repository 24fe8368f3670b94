"""Update rules: in-place updates of a slice with its own state, at memory speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from dbctl.optim.schedules import Rate

WarmUp = Annotated[int, Ge(0)]
Fraction = Annotated[float, Ge(0), Lt(1)]


@dataclass(frozen=True, kw_only=True)
class SgdRuleSpec:
    type: Literal["sgd"] = "sgd"
    rate: Rate
    warm_up: WarmUp = 0


@dataclass(frozen=True, kw_only=True)
class MomentumRuleSpec:
    type: Literal["momentum"] = "momentum"
    rate: Rate
    momentum: Fraction = 0.9
    warm_up: WarmUp = 0


@dataclass(frozen=True, kw_only=True)
class AdagradRuleSpec:
    type: Literal["adagrad"] = "adagrad"
    rate: Rate
    warm_up: WarmUp = 0


@dataclass(frozen=True, kw_only=True)
class AdamRuleSpec:
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
