"""Element-wise kernels in numpy, a block at a time: the meaning of every rule, and its base speed.

Rules of this file: no array the size of the slice is made; scratch is a few blocks a dtype and
thread, made once (a fresh page costs more than the arithmetic on it). The order of the operations
in each docstring is part of the interface: optim/fast.py repeats it and must give the same bits.
Who calls a kernel silences numpy's warnings, which numba's code does not have: what overflow and
underflow come to is said in optim/updates.py.

Theory of operation: a numpy expression over a large slice goes through memory once an operation.
Over a block that stays in the cache it goes through memory once altogether. Blocks do not show in
the result, as nothing here adds across elements. The two operations of `sgd` in place are one call
of BLAS where that has their bits (optim/blas.py): one pass is faster than blocks by a half.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dbctl.optim.blas import FROM, descend

Array = NDArray[Any]
Scalar = np.floating[Any]

# Elements. Of 32 to 512 K at 1 and 4 M parameters, 128 is the fastest or within 6 % of it for every
# rule where the second-level cache has 2 MiB (256 is 10 to 20 % slower there, and was 5 to 20 %
# faster on a machine with 1 MiB).
BLOCK = 1 << 17
PAGE_BYTES = 4096


class Operands(NamedTuple):
    """What every rule works on: flat arrays of one length and dtype, and the L2 coefficient.

    `out` is `parameters` itself (in place) or memory that does not overlap it. `parameters` and
    `gradient` are only read. Where `decay` is not zero, gradient + decay * parameters stands for
    the gradient in every formula.

    No parameter is -0.0: whether that minus a product of zero stays -0.0 is all that may depend on
    which kernel runs. p - x is -0.0 for no other p, so no update makes one, and what a shard begins
    with has none (roles/handouts.py); nor has what workers fetch of it and take local steps on.
    """

    out: Array
    parameters: Array
    gradient: Array
    decay: Scalar

    @property
    def in_place(self) -> bool:
        return np.may_share_memory(self.out, self.parameters)


class _Block(NamedTuple):
    part: slice
    out: Array
    parameters: Array
    gradient: Array  # with decay
    scratch: Array
    mask: NDArray[np.bool_]  # scratch too


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.arrays: dict[np.dtype[Any], tuple[Array, Array, NDArray[np.bool_]]] = {}

    def of(self, dtype: np.dtype[Any]) -> tuple[Array, Array, NDArray[np.bool_]]:
        if dtype not in self.arrays:
            first, second, mask = (_at_a_page(t) for t in (dtype, dtype, np.dtype(np.bool_)))
            self.arrays[dtype] = first, second, mask
        return self.arrays[dtype]


def _at_a_page(dtype: np.dtype[Any]) -> Array:
    """BLOCK zeros that begin where parameters in shared memory do.

    numpy's own arrays begin 16 bytes after a cache line: half of all wide loads would be two.
    """
    size_bytes = BLOCK * dtype.itemsize
    memory = np.zeros(size_bytes + PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES
    return memory[start : start + size_bytes].view(dtype)


_scratch = _Scratch()


def parts(n_elements: int) -> Iterator[slice]:
    """Slices of at most BLOCK elements that cover `n_elements` in order."""
    for start in range(0, n_elements, BLOCK):
        yield slice(start, min(start + BLOCK, n_elements))


def _blocks(operands: Operands) -> Iterator[_Block]:
    out, parameters, gradient, decay = operands
    first, second, mask = _scratch.of(out.dtype)
    for part in parts(out.size):
        p, g, size = parameters[part], gradient[part], part.stop - part.start
        if decay != 0:
            decayed = second[:size]
            np.multiply(p, decay, out=decayed)
            g = np.add(g, decayed, out=decayed)
        yield _Block(part, out[part], p, g, first[:size], mask[:size])


def sgd(operands: Operands, *, rate: Scalar) -> None:
    """out = parameters - rate * gradient."""
    whole, _, gradient, decay = operands
    if whole.size >= FROM and decay == 0 and operands.in_place and descend(whole, gradient, rate):
        return
    for _, out, parameters, gradient, t, _ in _blocks(operands):
        np.multiply(gradient, rate, out=t)
        np.subtract(parameters, t, out=out)


def momentum(operands: Operands, velocity: Array, *, rate: Scalar, momentum: Scalar) -> None:
    """velocity = momentum * velocity + gradient; out = parameters - rate * velocity."""
    for part, out, parameters, gradient, t, _ in _blocks(operands):
        v = velocity[part]
        np.multiply(v, momentum, out=v)
        np.add(v, gradient, out=v)
        np.multiply(v, rate, out=t)
        np.subtract(parameters, t, out=out)


def adagrad(operands: Operands, squares: Array, *, rate: Scalar) -> None:
    """squares += gradient * gradient; out = parameters - rate * (gradient / root).

    root = sqrt(squares), and infinity where that is zero: gradient / infinity is no update.
    """
    for part, out, parameters, gradient, t, mask in _blocks(operands):
        s = squares[part]
        np.multiply(gradient, gradient, out=t)
        np.add(s, t, out=s)
        np.sqrt(s, out=t)
        # The replacement costs as much as the rest of the block, and after the first updates few
        # blocks hold a zero; `not >` rather than `== 0` takes blocks with a NaN the slow way too.
        if not t.min() > 0:
            np.equal(t, 0, out=mask)
            np.putmask(t, mask, np.inf)
        np.divide(gradient, t, out=t)
        np.multiply(t, rate, out=t)
        np.subtract(parameters, t, out=out)


class AdamFactors(NamedTuple):
    """Adam's factors for one update, in the working dtype; optim/updates.py derives them."""

    beta1: Scalar
    beta2: Scalar
    rest1: Scalar  # 1 - beta1
    rest2: Scalar  # 1 - beta2
    step: Scalar
    epsilon: Scalar


def adam(operands: Operands, first: Array, second: Array, *, factors: AdamFactors) -> None:
    """out = parameters - step * (first / (sqrt(second) + epsilon)), with the moments

    first = beta1 * first + rest1 * gradient,
    second = beta2 * second + (rest2 * gradient) * gradient.
    """
    beta1, beta2, rest1, rest2, step, epsilon = factors
    for part, out, parameters, gradient, t, _ in _blocks(operands):
        m, v = first[part], second[part]
        np.multiply(m, beta1, out=m)
        np.multiply(gradient, rest1, out=t)
        np.add(m, t, out=m)
        np.multiply(v, beta2, out=v)
        np.multiply(gradient, rest2, out=t)
        np.multiply(t, gradient, out=t)
        np.add(v, t, out=v)
        np.sqrt(v, out=t)
        np.add(t, epsilon, out=t)
        np.divide(m, t, out=t)
        np.multiply(t, step, out=t)
        np.subtract(parameters, t, out=out)


def accrue_and_sgd(operands: Operands, accrued: Array, *, rate: Scalar) -> None:
    """accrued = accrued + gradient, then as sgd, in one pass through memory."""
    for part, out, parameters, gradient, t, _ in _blocks(operands):
        a = accrued[part]
        np.add(a, gradient, out=a)
        np.multiply(gradient, rate, out=t)
        np.subtract(parameters, t, out=out)
