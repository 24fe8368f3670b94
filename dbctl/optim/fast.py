"""The kernels of optim/blocks.py compiled by numba: the same bits, at memory speed.

Rules of this file: numba is an extra and is imported by the first kernel that is asked for, never
before: 0.4 s (1 s where nothing is cached) and 130 MB, which a small shard would not earn back.
Each kernel repeats the order of operations of its twin in optim/blocks.py; no fastmath and no
contraction, so products and sums round one by one.

Theory of operation, each point seen in the machine code or in its absence of speed:
- a choice inside a loop is a conditional expression; an `if` with an assignment is not vectorised;
- a loop whose output may be its input is not vectorised when they are the same: `parameters` is
  None for an update in place, which compiles to a loop that reads `out`;
- every scalar comes in the working dtype: a literal 0.0 or inf would make the loop float64;
- read-only arrays are another type to numba; parameters and gradients are always passed read-only,
  so that one signature is enough;
- `error_model="numpy"`: a check for division by zero would end vectorising.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from dbctl.optim.blocks import AdamFactors, Array, Operands, Scalar

FAST_FROM = 1 << 20  # elements


@cache
def usable() -> bool:
    """Whether numba is there and takes this numpy, which only its import can tell."""
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


def earns(n_elements: int) -> bool:
    """Whether a vector of this length pays for numba and numba is there.

    From FAST_FROM on an Adagrad update saves a millisecond or more, which returns the import within
    some hundred updates, and its memory is no longer many times the shard's own.
    """
    return n_elements >= FAST_FROM and usable()


# ---------------------------------------------------------------- what numba compiles


def _sgd(out, parameters, gradient, decay, decayed, rate):  # type: ignore[no-untyped-def]
    for i in range(out.shape[0]):
        p = out[i] if parameters is None else parameters[i]
        g = gradient[i] + decay * p if decayed else gradient[i]
        out[i] = p - rate * g


def _momentum(  # type: ignore[no-untyped-def]
    out, parameters, gradient, decay, decayed, velocity, rate, momentum
):
    for i in range(out.shape[0]):
        p = out[i] if parameters is None else parameters[i]
        g = gradient[i] + decay * p if decayed else gradient[i]
        v = momentum * velocity[i] + g
        velocity[i] = v
        out[i] = p - rate * v


def _adagrad(  # type: ignore[no-untyped-def]
    out, parameters, gradient, decay, decayed, squares, rate, infinity
):
    for i in range(out.shape[0]):
        p = out[i] if parameters is None else parameters[i]
        g = gradient[i] + decay * p if decayed else gradient[i]
        s = squares[i] + g * g
        squares[i] = s
        root = np.sqrt(s)
        out[i] = p - rate * (g / (infinity if root == 0 else root))


def _adam(  # type: ignore[no-untyped-def]
    out, parameters, gradient, decay, decayed, first, second,
    beta1, beta2, rest1, rest2, step, epsilon,
):  # fmt: skip
    for i in range(out.shape[0]):
        p = out[i] if parameters is None else parameters[i]
        g = gradient[i] + decay * p if decayed else gradient[i]
        m = beta1 * first[i] + rest1 * g
        v = beta2 * second[i] + (rest2 * g) * g
        first[i] = m
        second[i] = v
        out[i] = p - step * (m / (np.sqrt(v) + epsilon))


def _accrue_and_sgd(  # type: ignore[no-untyped-def]
    out, parameters, gradient, decay, decayed, accrued, rate
):
    for i in range(out.shape[0]):
        p = out[i] if parameters is None else parameters[i]
        g = gradient[i] + decay * p if decayed else gradient[i]
        accrued[i] = accrued[i] + g
        out[i] = p - rate * g


# function, how many arrays of state, how many further scalars
_SOURCES: dict[str, tuple[Callable[..., None], int, int]] = {
    "sgd": (_sgd, 0, 1),
    "momentum": (_momentum, 1, 2),
    "adagrad": (_adagrad, 1, 2),
    "adam": (_adam, 2, 6),
    "accrue_and_sgd": (_accrue_and_sgd, 1, 1),
}


@cache
def _kernel(name: str, dtype: str, in_place: bool) -> Callable[..., None]:
    """One compiled kernel: 0.1 to 0.3 s the first time on a machine, from a file after that."""
    import numba
    from numba import types

    source, n_state, n_scalars = _SOURCES[name]
    scalar = getattr(types, dtype)
    writable = types.Array(scalar, 1, "C")
    read_only = types.Array(scalar, 1, "C", readonly=True)
    signature = types.void(
        writable,
        types.none if in_place else read_only,
        read_only,
        scalar,
        types.boolean,
        *[writable] * n_state,
        *[scalar] * n_scalars,
    )
    compiled: Callable[..., None]
    try:
        compiled = numba.njit([signature], error_model="numpy", nogil=True, cache=True)(source)
    except Exception:
        # No directory to write to, a full disk, a cache file cut short: the cache only saves time.
        # What is wrong with the kernel itself is raised again here.
        compiled = numba.njit([signature], error_model="numpy", nogil=True)(source)
    return compiled


def prepare(name: str, dtype: np.dtype[Any]) -> None:
    """Compiles or loads both forms of a kernel now and not in the middle of the first update."""
    for in_place in (True, False):
        _kernel(name, dtype.name, in_place)


# ---------------------------------------------------------------- the same calls as optim/blocks.py


def _run(name: str, operands: Operands, *rest: Array | Scalar) -> None:
    out, parameters, gradient, decay = operands
    in_place = operands.in_place
    _kernel(name, out.dtype.name, in_place)(
        out,
        None if in_place else _read_only(parameters),
        _read_only(gradient),
        decay,
        bool(decay != 0),
        *rest,
    )


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view


def sgd(operands: Operands, *, rate: Scalar) -> None:
    _run("sgd", operands, rate)


def momentum(operands: Operands, velocity: Array, *, rate: Scalar, momentum: Scalar) -> None:
    _run("momentum", operands, velocity, rate, momentum)


def adagrad(operands: Operands, squares: Array, *, rate: Scalar) -> None:
    _run("adagrad", operands, squares, rate, squares.dtype.type(np.inf))


def adam(operands: Operands, first: Array, second: Array, *, factors: AdamFactors) -> None:
    _run("adam", operands, first, second, *factors)


def accrue_and_sgd(operands: Operands, accrued: Array, *, rate: Scalar) -> None:
    _run("accrue_and_sgd", operands, accrued, rate)
