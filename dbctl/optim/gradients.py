"""What is done to a whole gradient before a rule sees it: checked, clipped, accrued, stepped along.

Rules of this file: flat arrays; `tensors` are ranges of such an array, in the order of its layout.
Nothing here makes an array the size of a gradient or raises a warning about its values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite, sqrt

import numpy as np

from dbctl.optim import fast as compiled
from dbctl.optim.blocks import Array, Operands, parts
from dbctl.optim.updates import kernels_for
from dbctl.region import Range

# Short enough that OpenBLAS does not give a product to several threads, whose number would show in
# the last bits of a norm; long enough that Python does not show in its time.
_NORM_BLOCK = 8192
# Elements of three arrays that stay in a core's cache from one gradient to the next.
_STEP_BLOCK = 1 << 17


def is_finite(array: Array) -> bool:
    """Whether no element is infinite or NaN.

    One pass at the speed of memory: the dot product of the array with itself is finite only if
    every element is. It also overflows for large finite elements (float32: a norm above 1.8e19);
    only then is every element looked at.
    """
    with np.errstate(all="ignore"):
        return isfinite(np.dot(array, array)) or all(
            bool(np.isfinite(array[part]).all()) for part in parts(array.size)
        )


def first_bad(array: Array, tensors: Iterable[tuple[str, Range]]) -> str:
    """The name of the first tensor with an element that is not finite; "" when there is none."""
    return next((name for name, at in tensors if not is_finite(array[at.slice()])), "")


def square_sum(array: Array) -> float:
    """The sum of squares, products and sums in float64, the same for every count of threads."""
    scratch, total = np.empty(min(_NORM_BLOCK, array.size)), 0.0
    with np.errstate(all="ignore"):
        for start in range(0, array.size, _NORM_BLOCK):
            block = array[start : start + _NORM_BLOCK]
            wide = scratch[: block.size]
            np.copyto(wide, block)
            total += float(np.dot(wide, wide))
    return total


def norm(array: Array, tensors: Sequence[Range]) -> float:
    """The Euclidean norm of the given tensors together, in float64.

    A sum a tensor, added in the order given: partitions of a replica that exchange their tensors'
    `square_sum` and add them in that order get the same number (clipping is ours).
    """
    return sqrt(sum(square_sum(array[at.slice()]) for at in tensors))


def clip(array: Array, tensors: Sequence[Range], limit: float) -> float:
    """Scales `array` in place by limit / norm if its norm is above `limit`; returns the norm."""
    found = norm(array, tensors)
    clip_to(array, norm=found, limit=limit)
    return found


def clip_to(array: Array, *, norm: float, limit: float) -> None:
    """The scaling of `clip` for a norm that is known: that of a replica cut into partitions.

    A norm that is not finite scales nothing: such a gradient is refused, not clipped.
    """
    assert limit > 0, f"expected a limit above 0, found {limit}"
    if isfinite(norm) and norm > limit:
        np.multiply(array, array.dtype.type(limit / norm), out=array)


# ---------------------------------------------------------------- the worker's step (paper A, 7.1)


def accrue(accrued: Array, gradient: Array) -> None:
    """accrued = accrued + gradient."""
    with np.errstate(all="ignore"):
        np.add(accrued, gradient, out=accrued)


def prepare(n_elements: int, dtype: str) -> None:
    """Loads the kernels that a worker of so many parameters uses, before its first step."""
    if compiled.earns(n_elements):
        for name in ("sgd", "accrue_and_sgd"):
            compiled.prepare(name, np.dtype(dtype))


def local_step(
    parameters: Array, gradient: Array, rate: float, *, fast: bool | None = None
) -> None:
    """parameters = parameters - rate * gradient, in place: the sgd rule's bits.

    fast: as in `make_rule`, by the length of `parameters`.
    """
    kernels = kernels_for(parameters, gradient, fast=_fast(parameters, fast))
    with np.errstate(all="ignore"):
        kernels.sgd(_in_place(parameters, gradient), rate=parameters.dtype.type(rate))


def step_from(
    parameters: Array,
    origin: Array,
    gradients: Sequence[Array],
    *,
    rate: float,
    fast: bool | None = None,
) -> None:
    """parameters = origin - rate * gradients[0] - rate * gradients[1] ..., in that order.

    The bits of a copy and a `local_step` for each, in one pass through memory. `origin` is read.
    """
    if not gradients:
        np.copyto(parameters, origin)
        return
    kernels = kernels_for(parameters, origin, *gradients, fast=_fast(parameters, fast))
    scalar = parameters.dtype.type
    with np.errstate(all="ignore"):
        for start in range(0, parameters.size, _STEP_BLOCK):
            at = slice(start, start + _STEP_BLOCK)
            source = origin[at]
            for gradient in gradients:
                operands = Operands(parameters[at], source, gradient[at], scalar(0))
                kernels.sgd(operands, rate=scalar(rate))
                source = parameters[at]


def accrue_and_step(
    accrued: Array, gradient: Array, parameters: Array, *, rate: float, fast: bool | None = None
) -> None:
    """`accrue` and `local_step` in one pass through memory, with the same bits."""
    kernels = kernels_for(parameters, gradient, accrued, fast=_fast(parameters, fast))
    with np.errstate(all="ignore"):
        kernels.accrue_and_sgd(
            _in_place(parameters, gradient), accrued, rate=parameters.dtype.type(rate)
        )


def _fast(parameters: Array, fast: bool | None) -> bool:
    return compiled.earns(parameters.size) if fast is None else fast


def _in_place(parameters: Array, gradient: Array) -> Operands:
    return Operands(parameters, parameters, gradient, parameters.dtype.type(0))
