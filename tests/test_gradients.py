"""dbctl/optim/gradients.py: finite checks, norms, clipping, and the worker's step."""

from __future__ import annotations

import importlib.util
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dbctl.optim import blocks, gradients
from dbctl.optim.gradients import (
    accrue,
    accrue_and_step,
    clip,
    clip_to,
    first_bad,
    is_finite,
    local_step,
    norm,
    square_sum,
    step_from,
)
from dbctl.optim.rules import SgdRuleSpec
from dbctl.optim.updates import make_rule
from dbctl.region import Range

TENSORS = [
    ("layers.0.weight", Range(0, 6)),
    ("layers.0.bias", Range(6, 8)),
    ("layers.1.weight", Range(8, 20)),
]
RANGES = [at for _, at in TENSORS]
every_dtype = pytest.mark.parametrize("dtype", ["float32", "float64"])
both_kernels = pytest.mark.parametrize(
    "fast",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                importlib.util.find_spec("numba") is None, reason="numba is not installed"
            ),
        ),
    ],
)

# ---------------------------------------------------------------- finite (reliability, G14)


@every_dtype
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 1, blocks.BLOCK, -1])
def test_one_bad_element_anywhere_is_seen(dtype: str, bad: float, at: int) -> None:
    array = np.ones(blocks.BLOCK + 100, dtype)
    assert is_finite(array)
    array[at] = bad
    assert not is_finite(array)


@every_dtype
def test_a_product_that_overflows_is_looked_at_element_by_element(dtype: str) -> None:
    # Warnings are errors here: numpy's about the overflow must not come through.
    array = np.full(blocks.BLOCK + 9, np.finfo(dtype).max, dtype)
    assert is_finite(array)
    array[-1] = np.nan
    assert not is_finite(array)


@settings(max_examples=200)
@given(hnp.arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32)))
def test_is_finite_is_numpys_isfinite(array: np.ndarray) -> None:
    assert is_finite(array) is bool(np.isfinite(array).all())


def test_the_first_bad_tensor_is_named() -> None:
    array = np.zeros(20, "float32")
    assert first_bad(array, TENSORS) == ""
    array[15] = np.inf
    assert first_bad(array, TENSORS) == "layers.1.weight"
    array[7] = np.nan
    assert first_bad(array, TENSORS) == "layers.0.bias"


# ---------------------------------------------------------------- norm and clipping (ours)


@every_dtype
def test_the_norm_is_that_of_all_tensors_together(dtype: str) -> None:
    array = np.random.default_rng(0).normal(size=20).astype(dtype)
    assert norm(array, RANGES) == pytest.approx(np.linalg.norm(array.astype(float)), rel=1e-14)


def test_the_norm_of_float32_is_made_in_float64() -> None:
    # In float32 the square overflows, and ones beyond 2^24 no longer count.
    assert norm(np.full(4, 1e30, "float32"), [Range(0, 4)]) == pytest.approx(2e30, rel=1e-6)
    array = np.ones(40_000, "float32")
    array[0] = 4096.0
    assert square_sum(array) == 4096.0**2 + 39_999


def test_the_norm_adds_a_sum_a_tensor_in_the_order_given() -> None:
    array = np.random.default_rng(1).normal(size=20_000).astype("float32")
    ranges = [Range(0, 9000), Range(9000, 9001), Range(9001, 20_000)]
    total = 0.0
    for at in ranges:
        total += square_sum(array[at.slice()])
    assert norm(array, ranges) == math.sqrt(total)


@pytest.mark.parametrize("n", [0, 1, 8191, 8192, 8193, 30_000])
def test_square_sum_of_every_length(n: int) -> None:
    array = np.random.default_rng(2).normal(size=n)
    assert square_sum(array) == pytest.approx(math.fsum(array * array), rel=1e-13)


def test_clip_scales_down_to_the_limit_and_says_what_the_norm_was() -> None:
    array = np.array([3.0, 4.0], "float32")
    assert clip(array, [Range(0, 2)], 2.5) == 5.0
    assert array.tolist() == [1.5, 2.0]


@pytest.mark.parametrize("limit", [5.0, 6.0])
def test_clip_leaves_a_gradient_within_the_limit_alone(limit: float) -> None:
    array = np.array([3.0, 4.0], "float32")
    array.flags.writeable = False  # not even multiplied by one
    assert clip(array, [Range(0, 2)], limit) == 5.0


def test_a_replica_in_two_partitions_clips_as_one_does() -> None:
    whole = np.random.default_rng(3).normal(size=20).astype("float32")
    parts = [whole[:8].copy(), whole[8:].copy()]
    sums = [square_sum(parts[0][:6]), square_sum(parts[0][6:]), square_sum(parts[1])]
    found = math.sqrt(sum(sums))
    for part in parts:
        clip_to(part, norm=found, limit=0.5)
    assert clip(whole, RANGES, 0.5) == found
    assert np.concatenate(parts).tobytes() == whole.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_norm_that_is_not_finite_scales_nothing(bad: float) -> None:
    array = np.array([bad, 4.0], "float32")
    assert not math.isfinite(clip(array, [Range(0, 2)], 1.0))
    assert array[1] == 4.0


def test_nothing_the_size_of_the_gradient_is_made() -> None:
    array = np.full(16 * blocks.BLOCK, 1e25, "float32")  # the slow path of is_finite too
    tracemalloc.start()
    try:
        assert is_finite(array)
        clip(array, [Range(0, array.size)], 1.0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < array.nbytes / 16


# ---------------------------------------------------------------- the worker's step (appendix 7.1)


def triple(n: int, dtype: str) -> list[Any]:
    generator = np.random.default_rng(n)
    return [generator.normal(size=n).astype(dtype) for _ in range(3)]


@both_kernels
@every_dtype
@pytest.mark.parametrize("n", [0, 1, 33, blocks.BLOCK + 5])
def test_the_local_step_has_the_bits_of_the_sgd_rule(n: int, dtype: str, fast: bool) -> None:
    parameters, gradient, expected = triple(n, dtype)
    gradient.flags.writeable = False
    make_rule(SgdRuleSpec(rate=0.1), fast=False).update(
        parameters, gradient, {}, n=0, rate=0.1, out=expected
    )
    local_step(parameters, gradient, 0.1, fast=fast)
    assert parameters.tobytes() == expected.tobytes()


@both_kernels
@every_dtype
@pytest.mark.parametrize("n", [0, 1, 33, blocks.BLOCK + 5])
def test_accruing_and_stepping_at_once_is_accruing_and_then_stepping(
    n: int, dtype: str, fast: bool
) -> None:
    accrued, gradient, parameters = triple(n, dtype)
    gradient.flags.writeable = False
    accrued2, parameters2 = accrued.copy(), parameters.copy()
    accrue(accrued2, gradient)
    local_step(parameters2, gradient, 0.1, fast=False)
    accrue_and_step(accrued, gradient, parameters, rate=0.1, fast=fast)
    assert accrued.tobytes() == accrued2.tobytes()
    assert parameters.tobytes() == parameters2.tobytes()


@both_kernels
def test_a_step_that_overflows_is_silent(fast: bool) -> None:
    top = np.full(3, np.finfo("float32").max)
    accrued, gradient, parameters = top.copy(), top, -top
    local_step(parameters, gradient, 2.0, fast=fast)
    accrue_and_step(accrued, gradient, parameters, rate=2.0, fast=fast)
    accrue(accrued, gradient)
    assert np.isinf(parameters).all()
    assert np.isinf(accrued).all()
    step_from(accrued, -gradient, [gradient], rate=2.0, fast=fast)
    assert np.isneginf(accrued).all()


def test_the_accrued_gradient_of_appendix_7_1_is_a_sum() -> None:
    accrued = np.zeros(2, "float32")
    for g in (1.0, 2.0, 4.0):
        accrue(accrued, np.full(2, g, "float32"))
    assert accrued.tolist() == [7.0, 7.0]


def test_small_vectors_do_not_import_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("numba was asked for")

    monkeypatch.setattr(gradients.compiled, "sgd", refuse)
    local_step(np.ones(10, "float32"), np.ones(10, "float32"), 0.1)
    with pytest.raises(AssertionError, match="asked for"):
        local_step(np.ones(10, "float32"), np.ones(10, "float32"), 0.1, fast=True)


@pytest.mark.parametrize("n_gradients", [0, 1, 2, 3])
@pytest.mark.parametrize("fast", [False, True])
def test_step_from_has_the_bits_of_a_copy_and_a_step_for_each(n_gradients: int, fast: bool) -> None:
    rng = np.random.default_rng(n_gradients)
    n = (1 << 17) + 77  # a whole block and a rest
    origin = rng.standard_normal(n).astype(np.float32)
    gradients = [rng.standard_normal(n).astype(np.float32) for _ in range(n_gradients)]
    origin.flags.writeable = False
    expected = origin.copy()
    for gradient in gradients:
        local_step(expected, gradient, 0.3, fast=False)
    found = np.full(n, np.nan, np.float32)
    step_from(found, origin, gradients, rate=0.3, fast=fast)
    assert found.tobytes() == expected.tobytes()
