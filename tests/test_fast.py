"""dbctl/optim/fast.py: compiled kernels have the bits of those in dbctl/optim/blocks.py."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rules import Array, bits, every_dtype, every_rule, needs_numba, noise, run

from dbctl.optim import blocks, fast
from dbctl.optim.rules import RuleSpec
from dbctl.optim.updates import kernels_for, make_rule

EDGES = [0.0, -0.0, 1e-45, -1e-40, 1e-30, 1e-19, 1.0, -1.0, 1e19, 1e25, 3.4e38, -3.4e38]


def any_finite(seed: int, n: int, dtype: str) -> Array:
    """Every finite bit pattern with equal chance, and a third of the edges."""
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, n * np.dtype(dtype).itemsize, np.uint8).view(dtype)
    edge = (generator.random(n) < 1 / 3) | ~np.isfinite(raw)
    return np.where(edge, generator.choice(EDGES, n), raw).astype(dtype)


@needs_numba
@every_rule
@every_dtype
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), n=st.integers(0, 200), decay=st.sampled_from([0.0, 1e-4, 1e30]))
def test_numba_equals_blocks_bit_for_bit_at_the_edges(
    spec: RuleSpec, dtype: str, seed: int, n: int, decay: float
) -> None:
    start, *gradients = [any_finite(seed + i, n, dtype) for i in range(4)]
    slow, slow_state = run(make_rule(spec, fast=False), start, gradients, decay=decay)
    quick, quick_state = run(make_rule(spec, fast=True), start, gradients, decay=decay)
    assert bits(slow) == bits(quick)
    assert [bits(v) for v in slow_state.values()] == [bits(v) for v in quick_state.values()]


@needs_numba
@every_rule
@every_dtype
@pytest.mark.parametrize("in_place", [True, False])
def test_numba_equals_blocks_over_block_and_vector_boundaries(
    spec: RuleSpec, dtype: str, in_place: bool
) -> None:
    # A contracted multiply-add would differ in a third of so many elements.
    start, *gradients = noise(4, blocks.BLOCK + 4097, 3, dtype)
    start.flags.writeable = False
    results = []
    for compiled in (False, True):
        rule = make_rule(spec, fast=compiled)
        state = rule.new_state(start.size, dtype)
        w = start.copy() if in_place else start
        for n, gradient in enumerate(gradients):
            out = w if in_place else np.full_like(start, np.nan)
            rule.update(w, gradient, state, n=n, rate=0.1, out=out, decay=0.01)
            w = out
        results.append([bits(w), *map(bits, state.values())])
    assert results[0] == results[1]


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nowhere to keep compiled code: numba refuses, and compiles anew without."""
    import numba

    compile_kernel = numba.njit

    def njit(*args: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compile_kernel(*args, **options)

    monkeypatch.setattr(numba, "njit", njit)


@needs_numba
@every_rule
@pytest.mark.usefixtures("no_cache")
def test_the_compiled_loops_are_vectorised_in_both_forms(spec: RuleSpec) -> None:
    for in_place in (True, False):
        kernel: Any = fast._kernel.__wrapped__(spec.type, "float32", in_place)
        (code,) = kernel.inspect_asm().values()
        if "mulss" not in code:
            pytest.skip("not an x86 processor")
        assert "mulps" in code, f"{spec.type}, in place {in_place}: only scalar products"


@needs_numba
@pytest.mark.usefixtures("no_cache")
def test_a_cache_that_cannot_be_written_costs_time_only() -> None:
    kernel = fast._kernel.__wrapped__("sgd", "float32", True)
    w, g = np.ones(3, "float32"), np.ones(3, "float32")
    g.flags.writeable = False
    kernel(w, None, g, np.float32(0), False, np.float32(0.5))
    assert w.tolist() == [0.5] * 3


@needs_numba
@every_rule
def test_a_payload_at_an_odd_address_is_taken(spec: RuleSpec) -> None:
    start, gradient = noise(6, 50, 2)
    raw = bytearray(1 + gradient.nbytes)
    raw[1:] = gradient.tobytes()
    odd = np.frombuffer(raw, "float32", offset=1)
    assert not odd.flags.aligned
    assert kernels_for(start, fast=True) is fast
    assert kernels_for(start, odd, fast=True) is blocks  # compiled code counts on alignment
    rule = make_rule(spec, fast=True)
    expected, _ = run(rule, start, [gradient])
    found, _ = run(rule, start, [odd])
    assert bits(found) == bits(expected)


# ---------------------------------------------------------------- when numba is used at all


def test_numba_is_imported_only_where_it_earns_its_import() -> None:
    code = (
        "import sys; from dbctl.optim.updates import make_rule;"
        "from dbctl.optim.rules import AdagradRuleSpec;"
        "make_rule(AdagradRuleSpec(rate=0.1), size=1000).new_state(1000, 'float32');"
        "sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_numba_that_cannot_be_imported_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    # Missing, or an old one that refuses this numpy: both are an ImportError.
    monkeypatch.setitem(sys.modules, "numba", None)
    assert not fast.usable.__wrapped__()
    monkeypatch.setitem(sys.modules, "numba", sys)
    assert fast.usable.__wrapped__()


def test_size_decides_and_only_where_numba_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for there in (True, False):
        monkeypatch.setattr(fast, "usable", lambda there=there: there)
        assert fast.earns(fast.FAST_FROM) is there
        assert not fast.earns(fast.FAST_FROM - 1)
