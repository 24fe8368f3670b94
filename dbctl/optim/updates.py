"""The update rules at work: one update of a slice of parameters, with its own state.

Rules of this file: a rule knows no shard, range or message; it never writes the gradient (the
worker's memory) nor, unless they are the output, the parameters (a reader may hold them); it makes
no array the size of the slice. Every operation is element-wise, so how parameters are cut over
shards does not show in a single bit.

The formulas, each operation rounded in the working dtype (float32 or float64) in the order written;
rate, decay and the other factors are first rounded to that dtype. With decay, g is
gradient + decay * w. K counts from 1:

    sgd         w <- w - rate * g
    momentum    v <- momentum * v + g                       w <- w - rate * v
    adagrad     s <- s + g * g                              w <- w - rate * (g / sqrt(s))
    adam        m <- beta1 * m + (1 - beta1) * g            v <- beta2 * v + ((1 - beta2) * g) * g
                w <- w - step * (m / (sqrt(v) + epsilon'))
                step = rate * c / (1 - beta1^K)   epsilon' = epsilon * c   c = sqrt(1 - beta2^K)

Adagrad is paper A's (section 4.1), gamma / sqrt(sum of squares, this one included): it has no
epsilon, and a zero sum is no update. g / sqrt(s) is formed first because it is at most 1 whatever
the gradient's size, so no finite gradient can make a parameter infinite. Momentum and Adam are
torch.optim's within rounding; Adam's two corrections are folded into `step` and `epsilon'`, which
saves a division an element.

At the ends of a dtype's range (float32: g below 1e-23 or above 1.8e19): a square that underflows
counts as zero, so the element is not updated until its sum is more than that; a square that
overflows makes the sum infinite and the update of that element zero from then on, in Adagrad and in
Adam. Neither makes NaN, nor a warning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import sqrt
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import DTypeLike

from dbctl.optim import blocks
from dbctl.optim import fast as compiled
from dbctl.optim.blocks import AdamFactors, Array, Operands, Scalar
from dbctl.optim.rules import (
    AdagradRuleSpec,
    AdamRuleSpec,
    MomentumRuleSpec,
    RuleSpec,
    SgdRuleSpec,
)
from dbctl.optim.schedules import Rate, rate_at


class Kernels(Protocol):
    """What optim/blocks.py and optim/fast.py both are."""

    def sgd(self, operands: Operands, *, rate: Scalar) -> None: ...

    def momentum(
        self, operands: Operands, velocity: Array, *, rate: Scalar, momentum: Scalar
    ) -> None: ...

    def adagrad(self, operands: Operands, squares: Array, *, rate: Scalar) -> None: ...

    def adam(
        self, operands: Operands, first: Array, second: Array, *, factors: AdamFactors
    ) -> None: ...

    def accrue_and_sgd(self, operands: Operands, accrued: Array, *, rate: Scalar) -> None: ...


def kernels_for(*arrays: Array, fast: bool) -> Kernels:
    """The kernels that can take these flat arrays: compiled ones if `fast`."""
    one = arrays[0]
    assert all(a.ndim == 1 and a.size == one.size and a.dtype == one.dtype for a in arrays), (
        f"expected flat arrays of one length and dtype: {[(a.dtype, a.shape) for a in arrays]}"
    )
    # A payload may begin anywhere in a frame; to numba an unaligned array is another type.
    plain = all(a.flags.c_contiguous and a.flags.aligned for a in arrays)
    return compiled if fast and plain else blocks


class Rule(ABC):
    """One update rule. It holds no state of a slice, so one rule may serve several.

    `state_names` are the vectors, as long as the slice, that a checkpoint keeps beside the
    parameters.
    """

    state_names: tuple[str, ...] = ()

    def __init__(self, kind: str, *, rate: Rate, warm_up: int, fast: bool) -> None:
        self._kind = kind
        self._rate = rate
        self._warm_up = warm_up
        self._fast = fast

    def new_state(self, n_elements: int, dtype: DTypeLike) -> dict[str, Array]:
        """State before the first update: zeros. Compiles the kernels where numba was chosen."""
        if self._fast:
            compiled.prepare(self._kind, np.dtype(dtype))
        state: dict[str, Array] = {name: np.empty(n_elements, dtype) for name in self.state_names}
        for vector in state.values():
            # Not np.zeros: its pages would come one by one in the middle of the first update.
            vector.fill(0)
        return state

    def rate(self, n: int) -> float:
        """The rate of update `n`, counted from 0."""
        return rate_at(self._rate, self._warm_up, n)

    def update(
        self,
        parameters: Array,
        gradient: Array,
        state: dict[str, Array],
        *,
        n: int,
        rate: float,
        out: Array,
        decay: float = 0.0,
    ) -> None:
        """Applies one gradient to one slice. All arrays are flat, of one length and dtype.

        `parameters` and `gradient` are read; `out`, which is `parameters` itself or memory apart
        from it, and the vectors of `state` are written. `n`: updates of this slice before this one.
        `rate`: `self.rate(n)`, or what the shard makes of it. `decay`: L2 coefficient.
        """
        vectors = [state[name] for name in self.state_names]
        kernels = kernels_for(out, parameters, gradient, *vectors, fast=self._fast)
        with np.errstate(all="ignore"):
            operands = Operands(out, parameters, gradient, out.dtype.type(decay))
            self._apply(kernels, operands, vectors, n=n, rate=rate)

    @abstractmethod
    def _apply(
        self, kernels: Kernels, operands: Operands, state: list[Array], *, n: int, rate: float
    ) -> None: ...


@final
class _Sgd(Rule):
    def _apply(
        self, kernels: Kernels, operands: Operands, state: list[Array], *, n: int, rate: float
    ) -> None:
        kernels.sgd(operands, rate=operands.out.dtype.type(rate))


@final
class _Momentum(Rule):
    state_names = ("momentum",)

    def __init__(self, momentum: float, **common: Any) -> None:
        super().__init__("momentum", **common)
        self._momentum = momentum

    def _apply(
        self, kernels: Kernels, operands: Operands, state: list[Array], *, n: int, rate: float
    ) -> None:
        scalar = operands.out.dtype.type
        kernels.momentum(operands, *state, rate=scalar(rate), momentum=scalar(self._momentum))


@final
class _Adagrad(Rule):
    state_names = ("sum_of_squares",)

    def _apply(
        self, kernels: Kernels, operands: Operands, state: list[Array], *, n: int, rate: float
    ) -> None:
        kernels.adagrad(operands, *state, rate=operands.out.dtype.type(rate))


@final
class _Adam(Rule):
    state_names = ("first_moment", "second_moment")

    def __init__(self, spec: AdamRuleSpec, **common: Any) -> None:
        super().__init__("adam", **common)
        self._spec = spec

    def _apply(
        self, kernels: Kernels, operands: Operands, state: list[Array], *, n: int, rate: float
    ) -> None:
        spec, dtype = self._spec, operands.out.dtype
        correction = sqrt(1.0 - spec.beta2 ** (n + 1))
        factors = (
            spec.beta1,
            spec.beta2,
            1.0 - spec.beta1,
            1.0 - spec.beta2,
            rate * correction / (1.0 - spec.beta1 ** (n + 1)),
            # An epsilon that the dtype rounds to zero would make 0/0 where there is no gradient.
            max(spec.epsilon * correction, float(np.finfo(dtype).tiny)),
        )
        kernels.adam(operands, *state, factors=AdamFactors(*map(dtype.type, factors)))


def make_rule(spec: RuleSpec, *, fast: bool | None = None, size: int = 0) -> Rule:
    """The rule that `spec` describes, for slices of about `size` elements.

    fast: True compiles with numba (ImportError without it), False never does, None does where
    `size` earns numba's import and it works (optim/fast.py). No bit depends on it: see
    `blocks.Operands` for the one thing that might.
    """
    use_fast = compiled.earns(size) if fast is None else fast
    common: dict[str, Any] = {"rate": spec.rate, "warm_up": spec.warm_up, "fast": use_fast}
    if isinstance(spec, SgdRuleSpec):
        return _Sgd("sgd", **common)
    if isinstance(spec, MomentumRuleSpec):
        return _Momentum(spec.momentum, **common)
    if isinstance(spec, AdagradRuleSpec):
        return _Adagrad("adagrad", **common)
    return _Adam(spec, **common)
