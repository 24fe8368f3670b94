"""dbctl/optim/blas.py: one call of numpy's OpenBLAS has the bits of numpy's two, or is not made."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fast import any_finite
from test_rules import Array, bits, every_dtype, every_rule, needs_numba, noise, run
from threadpoolctl import threadpool_info, threadpool_limits

from dbctl.optim import blas, blocks
from dbctl.optim.blas import FROM, Gemv, descend
from dbctl.optim.rules import RuleSpec, SgdRuleSpec
from dbctl.optim.updates import make_rule

needs_openblas = pytest.mark.skipif(
    blas._gemv(np.dtype("float32")) is None, reason="numpy is not a wheel with OpenBLAS"
)
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 1e-19, 1.0, -1.0, 1e25, 3.4e38, np.inf, -np.inf, np.nan]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threadpool_limits(1, user_api="blas"):
        yield


def expected(parameters: Array, gradient: Array, rate: float) -> Array:
    with np.errstate(all="ignore"):
        return parameters - parameters.dtype.type(rate) * gradient


def anything(seed: int, n: int, dtype: str) -> Array:
    """Every bit pattern, and a third of special values."""
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, n * np.dtype(dtype).itemsize, np.uint8).view(dtype)
    raw[np.isnan(raw)] = np.nan  # of those that are signalled, numpy would warn
    with np.errstate(all="ignore"):
        special = generator.choice(SPECIAL, n).astype(dtype)
        return np.where(generator.random(n) < 1 / 3, special, raw)


# ---------------------------------------------------------------- the bits

CODE = """
import numpy as np
from dbctl.optim import blas
from test_blas import anything, bits, expected
for dtype in ("float32", "float64"):
    for n in (*range(1, 70), 4095, 4097, 8192, 10007, 300003):
        for rate in (0.0133, 1.0, 1e-30, -7.7, np.inf):
            w, g = anything(n, n, dtype) + np.dtype(dtype).type(0), anything(n + 1, n, dtype)
            found = w.copy()
            assert blas.descend(found, g, w.dtype.type(rate)), "its check says no"
            assert bits(found) == bits(expected(w, g, rate)), (dtype, n, rate)
from threadpoolctl import threadpool_info
print(*{library["architecture"] for library in threadpool_info() if "architecture" in library})
"""
# What OpenBLAS calls a processor, what it then says it is, an instruction set that it takes.
CORES = [
    ("SkylakeX", "SkylakeX", "avx512dq"),
    ("Haswell", "Haswell", "avx2"),
    ("Zen", "Haswell", "avx2"),  # whose kernels it has
    ("Sandybridge", "Sandybridge", "avx"),
    ("Nehalem", "Nehalem", "sse4_2"),
    ("Prescott", "Katmai", "pni"),
]


@needs_openblas
@pytest.mark.parametrize(("core", "name", "instructions"), CORES)
def test_the_kernels_of_other_processors_have_numpys_bits(
    core: str, name: str, instructions: str
) -> None:
    about = Path("/proc/cpuinfo")
    if not about.exists() or instructions not in about.read_text().split():
        pytest.skip(f"this processor has no {instructions}")
    env = {
        **os.environ,
        "OPENBLAS_CORETYPE": core,
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    ran = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.split()) == (0, [name]), ran.stderr


@needs_openblas
@every_dtype
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32), n=st.integers(1, 5000), rate=st.floats(width=32, allow_nan=False)
)
def test_the_bits_are_numpys_for_every_parameter_but_a_zero_with_a_minus(
    dtype: str, seed: int, n: int, rate: float
) -> None:
    w, gradient = anything(seed, n, dtype), anything(seed + 1, n, dtype)
    gradient.flags.writeable = False
    w += w.dtype.type(0)
    found = w.copy()
    assert descend(found, gradient, w.dtype.type(rate)) is (rate != 0)
    assert bits(found) == bits(expected(w, gradient, rate) if rate else w)


@every_dtype
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_numba)])
@pytest.mark.parametrize("rate", [0.1, 0.0, 1e39])
def test_the_rule_has_the_same_bits_with_and_without(
    monkeypatch: pytest.MonkeyPatch, dtype: str, compiled: bool, rate: float
) -> None:
    start = anything(1, FROM + 33, dtype)
    start += start.dtype.type(0)
    gradients = [anything(seed, start.size, dtype) for seed in (2, 3)]
    spec = SgdRuleSpec(rate=rate)
    with_it, _ = run(make_rule(spec, fast=False), start, gradients)
    monkeypatch.setattr(blocks, "descend", lambda *_: False)
    without, _ = run(make_rule(spec, fast=compiled), start, gradients)
    assert bits(with_it) == bits(without)


@every_rule
@every_dtype
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_numba)])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), decay=st.sampled_from([0.0, 1e-4, 1e30]))
def test_no_update_makes_a_zero_with_a_minus(
    spec: RuleSpec, dtype: str, compiled: bool, seed: int, decay: float
) -> None:
    """What `blocks.Operands` counts on."""
    start, *gradients = [any_finite(seed + i, 200, dtype) for i in range(4)]
    start += start.dtype.type(0)
    gradients[0][::5] = start[::5]  # with a rate of 1: differences of zero
    rule = make_rule(dataclasses.replace(spec, rate=1.0), fast=compiled)
    w, _ = run(rule, start, gradients, decay=decay)
    assert not (np.signbit(w) & (w == 0)).any()


# ---------------------------------------------------------------- when the call is made


@needs_openblas
@every_dtype
def test_an_update_in_place_is_one_call_from_a_size_on(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    sizes = []
    call = Gemv.descend

    def counted(self: Gemv, parameters: Array, *rest: Any) -> None:
        sizes.append(parameters.size)
        call(self, parameters, *rest)

    (w, g), rule = (
        noise(4, 3 * blocks.BLOCK, 2, dtype),
        make_rule(SgdRuleSpec(rate=0.1), fast=False),
    )
    rule.update(w, g, {}, n=0, rate=0.1, out=w)  # the check, if it was not made
    monkeypatch.setattr(Gemv, "descend", counted)
    rule.update(w, g, {}, n=0, rate=0.1, out=w)
    rule.update(w[: FROM - 1], g[: FROM - 1], {}, n=0, rate=0.1, out=w[: FROM - 1])
    rule.update(w[:FROM], g[:FROM], {}, n=0, rate=0.1, out=w[:FROM])
    rule.update(w, g, {}, n=0, rate=0.1, out=w, decay=0.1)
    rule.update(w, g, {}, n=0, rate=0.1, out=np.empty_like(w))
    assert sizes == [w.size, FROM]


@needs_openblas
@every_dtype
def test_memory_that_the_call_does_not_take_is_left_alone(dtype: str) -> None:
    w, g = noise(5, FROM, 2, dtype)
    rate, kept = w.dtype.type(0.1), bits(w)
    read_only = w.view()
    read_only.flags.writeable = False
    odd = np.zeros(w.nbytes + 1, np.uint8)[1:].view(dtype)
    wide = np.zeros(2 * FROM, dtype)[::2]
    for parameters, gradient in [(read_only, g), (odd, g), (w, odd), (wide, g), (w, wide)]:
        assert not descend(parameters, gradient, rate)
    assert (bits(w), odd.any(), wide.any()) == (kept, False, False)
    assert descend(w, g, rate)


@needs_openblas
def test_a_call_of_other_lengths_or_dtypes_is_not_made() -> None:
    """It would read behind the end of the shorter one."""
    w, g = noise(13, FROM, 2)
    kept, rate = bits(w), np.float32(0.1)
    for parameters, gradient, by in [
        (w, g[:-1], rate),
        (w[:-1], g, rate),
        (w, np.zeros(FROM), rate),
        (w, g, np.float64(0.1)),
        (w, g.reshape(2, -1), rate),
    ]:
        assert not descend(parameters, gradient, by)
    assert bits(w) == kept
    assert descend(w, g, rate)


def test_a_read_only_output_is_numpys_error() -> None:
    w, g = noise(6, FROM, 2)
    w.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        make_rule(SgdRuleSpec(rate=0.1), fast=False).update(w, g, {}, n=0, rate=0.1, out=w)


@pytest.mark.parametrize("dtype", [">f4", "float16", "longdouble"])
def test_only_float32_and_float64_are_taken(dtype: str) -> None:
    w, g = (values.astype(dtype) for values in noise(7, FROM, 2))
    assert not descend(w, g, w.dtype.type(0.1))


@needs_openblas
def test_a_call_that_several_threads_would_share_is_not_made() -> None:
    w, g = noise(8, FROM, 2)
    with threadpool_limits(2, user_api="blas"):
        if {library["num_threads"] for library in threadpool_info()} != {2}:
            pytest.skip("the library takes one thread only")
        assert not descend(w, g, np.float32(0.1))
    assert descend(w, g, np.float32(0.1))


@needs_openblas
def test_a_vector_longer_than_its_integers_say_is_not_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w, g = noise(9, FROM + 1, 2)
    gemv = blas._gemv(w.dtype)
    assert gemv is not None
    assert gemv.longest in (2**31 - 1, 2**63 - 1)
    monkeypatch.setattr(gemv, "longest", FROM)
    assert not descend(w, g, np.float32(0.1))
    assert descend(w[1:], g[1:], np.float32(0.1))


# ---------------------------------------------------------------- a library that will not do


class Library:
    """As ctypes shows one, with a gemv by numpy that a test may spoil."""

    def __init__(self, spoil: Callable[[Array, Array, Any], Array], *, prefix: str = "") -> None:
        self._spoil = spoil
        self._prefix = prefix
        self.calls = 0

    def __getitem__(self, name: str) -> Any:
        known = {"openblas_get_num_threads": lambda: 1, "cblas_sgemv": self._gemv}
        try:
            return Entry(known[name.removeprefix(self._prefix)])
        except KeyError:
            raise AttributeError(name) from None

    def _gemv(self, order: int, trans: int, n: int, columns: int, alpha: float, *rest: Any) -> None:
        g, stride, x, _, beta, w, _ = rest
        assert (order, trans, columns, alpha, beta, stride) == (102, 111, 1, 1.0, 1.0, n)
        self.calls += 1
        room = n + 1 if n < 64 else n
        parameters = np.ctypeslib.as_array((ctypes.c_float * room).from_address(w))
        gradient = np.ctypeslib.as_array((ctypes.c_float * n).from_address(g))
        with np.errstate(all="ignore"):
            parameters[:n] = self._spoil(parameters, gradient, np.float32(x._obj.value))


class Entry:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)


def good(w: Array, g: Array, x: Any) -> Array:
    return w[: g.size] + x * g


def one_bit(w: Array, g: Array, x: Any) -> Array:
    result = good(w, g, x)
    if g.size == 61:
        result.view(np.uint32)[60] ^= 1
    return result


def contracted(w: Array, g: Array, x: Any) -> Array:
    return (w[: g.size] + np.float64(x) * g).astype(np.float32)


def one_too_far(w: Array, g: Array, x: Any) -> Array:
    result = good(w, g, x)
    w[g.size :] += np.float32(1)
    return result


def flushed(w: Array, g: Array, x: Any) -> Array:
    result = good(w, g, x)
    result[np.abs(result) < np.finfo("float32").tiny] = 0
    return result


def without_beta(w: Array, g: Array, x: Any) -> Array:
    return x * g


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes these the libraries that numpy has loaded."""

    def put(*libraries: Any) -> None:
        monkeypatch.setattr(blas, "_loaded", lambda: iter(libraries))
        blas._gemv.cache_clear()

    yield put
    blas._gemv.cache_clear()


@pytest.mark.parametrize("spoil", [one_bit, contracted, one_too_far, flushed, without_beta])
def test_a_library_with_other_bits_is_done_without(
    use: Callable[..., None], spoil: Callable[..., Array]
) -> None:
    library = Library(spoil)
    use(library)
    w, g = noise(10, FROM, 2)
    want = bits(expected(w, g, 0.1))
    make_rule(SgdRuleSpec(rate=0.1), fast=False).update(w, g, {}, n=0, rate=0.1, out=w)
    assert bits(w) == want
    checked = library.calls
    assert checked == len(blas._PIECES)
    assert not descend(w, g, np.float32(0.1))
    assert library.calls == checked  # once a process


@pytest.mark.parametrize("prefix", ["scipy_", ""])
def test_a_library_is_found_under_either_name_and_asked_once(
    use: Callable[..., None], prefix: str
) -> None:
    library = Library(good, prefix=prefix)
    use(ctypes.CDLL(None), library)  # the first has no such function
    w, g = noise(11, FROM, 2)
    want = bits(expected(w, g, 0.1))
    assert descend(w, g, np.float32(0.1))
    assert bits(w) == want
    assert descend(w, g, np.float32(0.1))
    assert library.calls == len(blas._PIECES) + 2


def test_without_a_library_or_the_functions_nothing_is_called(use: Callable[..., None]) -> None:
    w, g = noise(12, FROM, 2)
    want = bits(expected(w, g, 0.1))
    for libraries in ([], [ctypes.CDLL(None)]):
        use(*libraries)
        assert not descend(w, g, np.float32(0.1))
    make_rule(SgdRuleSpec(rate=0.1), fast=False).update(w, g, {}, n=0, rate=0.1, out=w)
    assert bits(w) == want


@needs_openblas
def test_no_library_is_loaded_that_numpy_has_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "numpy.libs").mkdir()
    loaded = next(blas._loaded())
    monkeypatch.setattr(np, "__file__", str(tmp_path / "numpy" / "__init__.py"))
    assert not list(blas._loaded())
    # The same under another name is another library to the loader.
    shutil.copy(loaded._name, tmp_path / "numpy.libs" / "libopenblas64.so")
    (tmp_path / "numpy.libs" / "libopenblas.so").write_text("no library at all")
    assert not list(blas._loaded())


def test_where_the_loader_cannot_be_asked_nothing_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "RTLD_NOLOAD", raising=False)
    assert not list(blas._loaded())
