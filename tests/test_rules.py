"""dbctl/optim/updates.py, blocks.py and fast.py: update rules (paper A, section 4.1)."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import rule_loop

from dbctl.optim import blocks, fast
from dbctl.optim.rules import (
    RULE_SPECS,
    AdagradRuleSpec,
    AdamRuleSpec,
    MomentumRuleSpec,
    RuleSpec,
    SgdRuleSpec,
)
from dbctl.optim.schedules import ScheduleSpec
from dbctl.optim.updates import Rule, kernels_for, make_rule

Array = NDArray[Any]

SPECS: list[RuleSpec] = [
    SgdRuleSpec(rate=0.1),
    MomentumRuleSpec(rate=0.1, momentum=0.9),
    AdagradRuleSpec(rate=0.1),
    AdamRuleSpec(rate=0.01),
]
every_rule = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.type)
every_dtype = pytest.mark.parametrize("dtype", ["float32", "float64"])
needs_numba = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="the extra `fast` is not installed"
)


def run(
    rule: Rule, start: Array, gradients: list[Array], *, decay: float = 0.0
) -> tuple[Array, dict[str, Array]]:
    """Parameters and state after all gradients, in place."""
    w = start.copy()
    state = rule.new_state(w.size, w.dtype)
    for n, gradient in enumerate(gradients):
        gradient.flags.writeable = False
        rule.update(w, gradient, state, n=n, rate=rule.rate(n), out=w, decay=decay)
    return w, state


def noise(seed: int, n: int, count: int, dtype: str = "float32") -> list[Array]:
    generator = np.random.default_rng(seed)
    return [generator.normal(size=n).astype(dtype) for _ in range(count)]


def bits(array: Array) -> bytes:
    """The array's bits; every NaN counts as the same one."""
    return np.where(np.isnan(array), np.array(np.nan, array.dtype), array).tobytes()


# ---------------------------------------------------------------- Adagrad, paper A section 4.1


@every_dtype
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_numba)])
def test_adagrad_of_paper_a_section_4_1(dtype: str, compiled: bool) -> None:
    rule = make_rule(AdagradRuleSpec(rate=0.1), fast=compiled)
    w = np.ones(1, dtype)
    state = rule.new_state(1, dtype)
    seen = []
    for n, g in enumerate([3.0, 4.0, 0.0, 12.0]):
        rule.update(w, np.array([g], dtype), state, n=n, rate=rule.rate(n), out=w)
        seen.append(float(w[0]))
    assert seen == pytest.approx([0.9, 0.82, 0.82, 0.727692], abs=1e-6)
    assert state["sum_of_squares"][0] == 169.0


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_numba)])
def test_adagrad_with_a_zero_sum_makes_no_update_and_no_warning(compiled: bool) -> None:
    # 1e-30: its square underflows, so the sum is still zero and nothing moves.
    gradients = [np.array([0.0, -0.0, 1e-30, 2.0], "float32")]
    start = np.array([5.0, -7.0, 3.0, 1.0], "float32")
    w, _ = run(make_rule(AdagradRuleSpec(rate=0.5), fast=compiled), start, gradients)
    assert w.tolist() == [5.0, -7.0, 3.0, 0.5]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_numba)])
@pytest.mark.parametrize("spec", SPECS[2:], ids=lambda spec: spec.type)
def test_a_square_that_overflows_stops_its_element_and_makes_no_nan(
    spec: RuleSpec, compiled: bool
) -> None:
    top = float(np.finfo("float32").max)
    gradients = [np.array([g, 1.0], "float32") for g in (1e25, top, -top, 1.0, 0.0)]
    w, state = run(make_rule(spec, fast=compiled), np.ones(2, "float32"), gradients)
    assert w[0] == 1.0
    assert w[1] < 1.0
    assert np.isinf(state[make_rule(spec).state_names[-1]][0])


@settings(max_examples=50, deadline=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.floats(1e-3, 1.0))
def test_one_adagrad_update_moves_by_at_most_the_rate_whatever_the_gradient(
    g: float, rate: float
) -> None:
    w, _ = run(make_rule(AdagradRuleSpec(rate=rate)), np.zeros(1, "float32"), [np.float32([g])])
    # A square among the denormals has few bits, so its root may be 1.2 times too small.
    assert abs(float(w[0])) <= rate * 1.25


def test_an_epsilon_that_float32_cannot_hold_does_not_divide_zero_by_zero() -> None:
    rule = make_rule(AdamRuleSpec(epsilon=1e-60))
    w, _ = run(rule, np.ones(2, "float32"), [np.array([0.0, 1.0], "float32")])
    assert w[0] == 1.0
    assert w[1] == pytest.approx(0.999)


# ---------------------------------------------------------------- independent twins


@every_rule
@every_dtype
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_every_rule_is_the_element_by_element_loop_bit_for_bit(
    spec: RuleSpec, dtype: str, decay: float
) -> None:
    start, *gradients = noise(1, 37, 5, dtype)
    gradients[2][::3] = 0
    w, state = run(make_rule(spec, fast=False), start, gradients, decay=decay)
    slow, slow_state = rule_loop(spec, start, gradients, decay=decay)
    assert bits(w) == bits(slow)
    assert [bits(v) for v in state.values()] == [bits(v) for v in slow_state]


@pytest.mark.parametrize("decay", [0.0, 0.02])
@pytest.mark.parametrize("spec", [SPECS[1], SPECS[3]], ids=lambda spec: spec.type)
@pytest.mark.filterwarnings("default")  # torch's own
def test_momentum_and_adam_are_torchs(spec: RuleSpec, decay: float) -> None:
    torch = pytest.importorskip("torch")
    start, *gradients = noise(2, 50, 30, "float64")
    w, _ = run(make_rule(spec), start, gradients, decay=decay)
    theirs = torch.tensor(start, requires_grad=True)
    if isinstance(spec, MomentumRuleSpec):
        optimizer = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, weight_decay=decay)
    else:
        optimizer = torch.optim.Adam([theirs], lr=0.01, weight_decay=decay)
    for gradient in gradients:
        theirs.grad = torch.tensor(gradient)
        optimizer.step()
    np.testing.assert_allclose(w, theirs.detach().numpy(), rtol=1e-12, atol=1e-13)


def test_sgd_is_the_numpy_expression_bit_for_bit() -> None:
    # The ladder's rung 5 stands on this formula and on the rate as a float32.
    start, *gradients = noise(3, 1000, 4)
    w, _ = run(make_rule(SgdRuleSpec(rate=0.1)), start, gradients)
    for gradient in gradients:
        start = start - np.float32(0.1) * gradient
    assert bits(w) == bits(start)


# ---------------------------------------------------------------- numba = blocks

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


# ---------------------------------------------------------------- seams


@every_rule
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_numba)])
def test_read_only_memory_is_read_only_and_out_alone_is_written(
    spec: RuleSpec, compiled: bool
) -> None:
    start, gradient = noise(5, 100, 2)
    held, pushed, out = start.copy(), gradient.copy(), np.full_like(start, np.nan)
    held.flags.writeable = pushed.flags.writeable = False
    rule = make_rule(spec, fast=compiled)
    rule.update(held, pushed, rule.new_state(100, "float32"), n=0, rate=0.1, out=out, decay=0.1)
    in_place = start.copy()
    rule.update(
        in_place, gradient, rule.new_state(100, "float32"), n=0, rate=0.1, out=in_place, decay=0.1
    )
    assert bits(out) == bits(in_place)
    assert bits(out) != bits(start)
    assert bits(held) == bits(start)
    assert bits(pushed) == bits(gradient)


@every_rule
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_numba)])
def test_overflow_is_silent(spec: RuleSpec, compiled: bool) -> None:
    """cases: `squared` loss with rate 1e6; a number too large for float32 is no warning here."""
    rule = make_rule(dataclasses.replace(spec, rate=1e39), fast=compiled)
    top = np.full(3, np.finfo("float32").max)
    w, _ = run(rule, top, [-top, top], decay=1.0)
    assert not np.isfinite(w).all()


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


@every_rule
@settings(max_examples=20, deadline=None)
@given(cut=st.integers(0, 60))
@example(cut=0)
def test_a_cut_does_not_show(spec: RuleSpec, cut: int) -> None:
    """Rung 4 of the ladder, as far as the rule goes: two shards equal one, bit for bit."""
    start, *gradients = noise(7, 60, 4)
    whole, _ = run(make_rule(spec), start, gradients)
    left, _ = run(make_rule(spec), start[:cut], [g[:cut].copy() for g in gradients])
    right, _ = run(make_rule(spec), start[cut:], [g[cut:].copy() for g in gradients])
    assert bits(whole) == bits(np.concatenate([left, right]))


@every_rule
def test_20_updates_equal_10_and_a_resume_of_10(spec: RuleSpec) -> None:
    """mxnet#15923, as far as the rule goes: state, count and parameters are all there is."""
    warm = dataclasses.replace(spec, warm_up=15)
    start, *gradients = noise(8, 30, 20)
    whole, whole_state = run(make_rule(warm), start, gradients)
    w, state = run(make_rule(warm), start, gradients[:10])
    again = make_rule(warm)
    for n, gradient in enumerate(gradients[10:], start=10):
        again.update(w, gradient, state, n=n, rate=again.rate(n), out=w)
    assert bits(w) == bits(whole)
    assert [bits(v) for v in state.values()] == [bits(v) for v in whole_state.values()]


def test_the_eight_thousand_pushes_of_elasticdl_1125() -> None:
    """8 replicas x 1000 pushes of -1 at rate 1: every entry exactly 8000."""
    w, _ = run(make_rule(SgdRuleSpec(rate=1.0)), np.zeros(3, "float32"), [-np.ones(3, "f4")] * 8000)
    assert w.tolist() == [8000.0] * 3


@every_rule
def test_every_rule_learns(spec: RuleSpec) -> None:
    """mxnet#11965, one replica's part: a convex problem with its minimum at 3."""
    rule = make_rule(dataclasses.replace(spec, rate=0.05))
    w, state = np.zeros(4, "float32"), rule.new_state(4, "float32")
    for n in range(500):
        rule.update(w, w - np.float32(3), state, n=n, rate=rule.rate(n), out=w)
    assert abs(w - 3).max() < (1.5 if spec.type == "adagrad" else 0.05)


@every_rule
def test_schedules_and_a_divided_rate_reach_the_update(spec: RuleSpec) -> None:
    """The shard may divide the rate by the staleness of a push; the rule takes it as it comes."""
    schedule = ScheduleSpec(type="step", initial=0.4, every=1, factor=0.5)
    rule = make_rule(dataclasses.replace(spec, rate=schedule))
    assert [rule.rate(n) for n in range(3)] == [0.4, 0.2, 0.1]
    moved = []
    for rate in (0.4, 0.1):
        w = np.zeros(1, "float64")
        state = rule.new_state(1, "float64")
        rule.update(w, np.ones(1), state, n=0, rate=rate, out=w)
        moved.append(w[0])
    assert moved[0] == pytest.approx(4 * moved[1])


@every_rule
@every_dtype
def test_state_is_named_zeroed_and_in_the_dtype_of_the_parameters(
    spec: RuleSpec, dtype: str
) -> None:
    rule = make_rule(spec)
    state = rule.new_state(5, dtype)
    assert tuple(state) == rule.state_names
    assert all(v.dtype == dtype and v.tolist() == [0.0] * 5 for v in state.values())


def test_state_names_are_what_checkpoints_hold() -> None:
    # Renaming one makes old checkpoints unreadable.
    assert {spec.type: make_rule(spec).state_names for spec in SPECS} == {
        "sgd": (),
        "momentum": ("momentum",),
        "adagrad": ("sum_of_squares",),
        "adam": ("first_moment", "second_moment"),
    }
    assert {spec.type for spec in SPECS} == set(RULE_SPECS)


@every_rule
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_numba)])
def test_an_update_makes_no_array_of_the_size_of_the_slice(spec: RuleSpec, compiled: bool) -> None:
    n = 8 * blocks.BLOCK
    rule = make_rule(spec, fast=compiled)
    w, state, g = np.ones(n, "float32"), rule.new_state(n, "float32"), np.zeros(n, "float32")
    rule.update(w, g, state, n=0, rate=0.1, out=w, decay=0.1)  # scratch is made once
    tracemalloc.start()
    try:
        rule.update(w, g, state, n=1, rate=0.1, out=w, decay=0.1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < w.nbytes / 16


def test_arrays_that_do_not_fit_are_a_programming_error() -> None:
    rule = make_rule(SgdRuleSpec(rate=0.1))
    w = np.zeros(4, "float32")
    for gradient in (np.zeros(3, "float32"), np.zeros(4, "float64"), np.zeros((2, 2), "float32")):
        with pytest.raises(AssertionError, match="one length and dtype"):
            rule.update(w, gradient, {}, n=0, rate=0.1, out=w)


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
