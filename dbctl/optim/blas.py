"""One BLAS call for `parameters - rate * gradient` in place: numpy's bits in one pass.

Rules of this file: only the OpenBLAS that numpy has loaded is called, never another one, which
would bring threads of its own. Where it is not there (Accelerate, MKL, a distribution's libblas)
or a bit differs, `descend` says so, and optim/blocks.py does the work.

Theory of operation: gemv makes y + A x. With the gradient as the one column of A and x = [-rate],
OpenBLAS forms A x in a register or a buffer, rounded, and adds that to y: the two roundings of
numpy's two passes (axpy and ger contract them to one). No standard says so; a process therefore
tries its library once, `Gemv.agrees`. One thing is known to differ, a parameter of -0.0, and there
is none (`blocks.Operands`).

With more than one thread a call waits for the last of them: 8.7 ms and not 0.4 for 1 M parameters
on a busy machine. Shards have one; workers make the call too (local steps), and in one that has
more threads the block form stays.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Scalar = np.floating[Any]

# Elements from which on the call is worth it, as ctypes takes some microseconds: 11 us instead of
# 11 at 32 K, 15 instead of 19 here.
FROM = 1 << 16

# What numpy's wheels call OpenBLAS's functions, and how wide its integers are under that name.
SYMBOLS = (
    ("scipy_", "64_", ctypes.c_int64),
    ("", "64_", ctypes.c_int64),
    ("scipy_", "", ctypes.c_int),
    ("", "", ctypes.c_int),
)
_COLUMN_MAJOR, _AS_IT_IS = 102, 111  # CBLAS_ORDER, CBLAS_TRANSPOSE
_REALS: dict[np.dtype[Any], tuple[str, Any]] = {
    np.dtype(np.float32): ("s", ctypes.c_float),
    np.dtype(np.float64): ("d", ctypes.c_double),
}


def descend(parameters: Array, gradient: Array, rate: Scalar) -> bool:
    """parameters = parameters - rate * gradient; False: nothing was done, do it otherwise.

    Flat arrays and a rate, taken only if they are of one length and dtype. The bits are those of
    numpy's expression for parameters without -0.0.
    """
    if parameters.shape != gradient.shape or not parameters.dtype == gradient.dtype == rate.dtype:
        return False
    # Of a rate of zero a library may know the outcome without a look at the gradient's infinities.
    if rate == 0:
        return False
    if not (_plain(parameters) and _plain(gradient) and parameters.flags.writeable):
        return False
    gemv = _gemv(parameters.dtype)
    if gemv is None or parameters.size > gemv.longest or gemv.n_threads() != 1:
        return False
    if not gemv.agrees:
        return False
    gemv.descend(parameters, gradient, rate)
    return True


def _plain(array: Array) -> bool:
    return array.flags.c_contiguous and array.flags.aligned


@final
class Gemv:
    """A library's gemv for one dtype, under one of SYMBOLS. AttributeError: it has none there."""

    def __init__(self, library: Any, symbols: tuple[str, str, Any], dtype: np.dtype[Any]) -> None:
        prefix, suffix, integer = symbols
        letter, self._real = _REALS[dtype]
        self._dtype = dtype
        self.longest = (1 << (8 * ctypes.sizeof(integer) - 1)) - 1
        # Subscripts, not attributes: those would be shared with whoever else asks ctypes.
        self.n_threads = library[f"{prefix}openblas_get_num_threads{suffix}"]
        self.n_threads.argtypes, self.n_threads.restype = (), ctypes.c_int
        self._call = library[f"{prefix}cblas_{letter}gemv{suffix}"]
        matrix = vector = ctypes.c_void_p, integer  # with the stride
        self._call.argtypes = (
            *(ctypes.c_int, ctypes.c_int, integer, integer),
            *(self._real, *matrix, *vector),
            *(self._real, *vector),
        )
        self._call.restype = None

    @cached_property
    def agrees(self) -> bool:
        """Whether it does what numpy does, bit for bit: 1 ms, once a process and dtype."""
        parameters, gradient = _samples(self._dtype)
        rate = self._dtype.type(_CHECK_RATE)
        with np.errstate(all="ignore"):
            expected = parameters - rate * gradient
        start = 0
        for n in _PIECES:
            self.descend(parameters[start : start + n], gradient[start : start + n], rate)
            start += n
        bits = f"u{self._dtype.itemsize}"
        same = parameters.view(bits) == expected.view(bits)
        return bool((same | np.isnan(parameters) & np.isnan(expected)).all())

    def descend(self, parameters: Array, gradient: Array, rate: Scalar) -> None:
        n, x = parameters.size, self._real(-rate)
        self._call(
            *(_COLUMN_MAJOR, _AS_IT_IS, n, 1),
            *(1.0, gradient.ctypes.data, n, ctypes.byref(x), 1),
            *(1.0, parameters.ctypes.data, 1),
        )


@cache
def _gemv(dtype: np.dtype[Any]) -> Gemv | None:
    if dtype not in _REALS:
        return None
    for library in _loaded():
        for symbols in SYMBOLS:
            try:
                return Gemv(library, symbols, dtype)
            except AttributeError:
                continue
    return None


def _loaded() -> Iterator[Any]:
    """The OpenBLAS of numpy's wheel, if this process has it already."""
    only_if_loaded = getattr(os, "RTLD_NOLOAD", None)
    if only_if_loaded is None:
        return
    for path in sorted((Path(np.__file__).parents[1] / "numpy.libs").glob("*openblas*")):
        try:
            yield ctypes.CDLL(str(path), mode=only_if_loaded)
        except OSError:
            continue


# ---------------------------------------------------------------- is it numpy's arithmetic?

# One after the other, so that what is written beside a piece shows. A kernel treats whole vectors
# of 4 to 64 elements and what is left over in different ways, and blocks of 4096 or so apart; a
# library chooses kernels by size.
_PIECES = (*range(1, 65), 4096 + 33, FROM + 63)
_N_SPECIAL = 6000  # every third of them, in the shorter pieces: denormals are slow
_N_DISTINCT = 4099
_CHECK_RATE = 0.7


def _samples(dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Parameters and a gradient for all pieces: of about one size, some pairs of special values."""
    limits = np.finfo(dtype)
    top, tiny, least = limits.max, limits.tiny, limits.smallest_subnormal
    special = [0.0, 1.0, -1.0, top, -top, tiny, -tiny, least, -least, np.inf, -np.inf, np.nan]
    # Multiples of the golden ratio, modulo one: spread evenly, with all bits of a number in use.
    numbers = np.arange(1, 2 * _N_DISTINCT + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    distinct = (numbers.view(np.int64) / 2.0**63).astype(dtype).reshape(2, _N_DISTINCT)
    parameters, gradient = (np.resize(row, sum(_PIECES)) for row in distinct)
    pairs = np.array(list(product(special, [*special, -0.0])), dtype)
    some = np.resize(pairs, (_N_SPECIAL // 3, 2))
    parameters[:_N_SPECIAL:3], gradient[:_N_SPECIAL:3] = some[:, 0], some[:, 1]
    return parameters, gradient
