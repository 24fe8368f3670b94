"""dbctl/optim/updates.py and its kernels in blocks.py: update rules (paper A, section 4.1)."""

from __future__ import annotations

import dataclasses
import importlib.util
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import rule_loop

from dbctl.optim import blocks
from dbctl.optim.rules import (
    RULE_SPECS,
    AdagradRuleSpec,
    AdamRuleSpec,
    MomentumRuleSpec,
    RuleSpec,
    SgdRuleSpec,
)
from dbctl.optim.schedules import ScheduleSpec
from dbctl.optim.updates import Rule, make_rule

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
