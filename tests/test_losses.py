"""Losses: values, gradients and extremes, against the definitions in float64."""

from __future__ import annotations

from math import log

import numpy as np
import pytest
from reference import check_gradient

from dbctl.model.losses import LOSSES, loss_gradient

NAMES = sorted(LOSSES)


def targets_of(kind: str, shape: tuple[int, int]) -> np.ndarray:
    rng = np.random.default_rng(1)
    return rng.integers(0, shape[0], shape[1]) if kind == "labels" else rng.random(shape)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(n, k) for n in NAMES for k in ("labels", "floats") if (n, k) != ("softmax", "floats")],
)
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_the_gradient_is_that_of_the_mean_over_rows(name: str, kind: str, rows: int) -> None:
    loss = LOSSES[name](6, batch_size=8, dtype="float64")
    z = 2 * np.random.default_rng(0).standard_normal((6, rows))
    targets = targets_of(kind, z.shape)
    gradient = z.copy()
    total = loss_gradient(loss, gradient, targets)
    assert isinstance(total, float)
    check_gradient(lambda at: loss.rows(at.copy(), targets).sum() / rows, gradient, z)
    assert total == pytest.approx(loss.rows(z.copy(), targets).sum(), rel=1e-14)


def test_values_known_without_a_computer() -> None:
    z, labels = np.zeros((4, 3)), np.array([0, 1, 3])

    def rows(name: str) -> np.ndarray:
        return LOSSES[name](4, batch_size=3, dtype="float64").rows(z.copy(), labels)

    assert rows("softmax") == pytest.approx([log(4)] * 3)
    assert rows("logistic") == pytest.approx([4 * log(2)] * 3)
    assert rows("squared") == pytest.approx([0.5] * 3)


@pytest.mark.parametrize("name", NAMES)
def test_labels_are_one_hot_targets(name: str) -> None:
    if name == "softmax":
        with pytest.raises(AssertionError, match="integer labels"):
            LOSSES[name](2, batch_size=1, dtype="float64").rows(np.ones((2, 1)), np.ones((2, 1)))
        return
    loss = LOSSES[name](6, batch_size=8, dtype="float64")
    z = np.random.default_rng(0).standard_normal((6, 8))
    labels = targets_of("labels", z.shape)
    assert loss.rows(z.copy(), labels) == pytest.approx(loss.rows(z.copy(), np.eye(6)[:, labels]))


@pytest.mark.parametrize("scale", [80.0, 1e4, 1e30])
@pytest.mark.parametrize("name", ["softmax", "logistic"])
def test_outputs_however_large_neither_overflow_nor_warn(name: str, scale: float) -> None:
    """Right answers give a loss of 0, wrong ones one that grows linearly (float32)."""
    loss = LOSSES[name](2, batch_size=2, dtype="float32")
    z = scale * np.array([[1, 1], [-1, -1]], "float32")
    predictions = z.copy()
    right, wrong = loss.rows(predictions, np.array([0, 1]))
    assert right == pytest.approx(0, abs=1e-6)
    assert wrong == pytest.approx(2 * scale, rel=1e-6)
    assert predictions == pytest.approx(np.array([[1, 1], [0, 0]]), abs=1e-6)


def test_many_outputs_do_not_lose_the_sum_in_float32() -> None:
    z = np.random.default_rng(0).standard_normal((8192, 16))
    labels = np.arange(16)
    narrow, wide = (
        LOSSES["softmax"](8192, batch_size=16, dtype=dtype).rows(z.astype(dtype), labels)
        for dtype in ("float32", "float64")
    )
    assert narrow == pytest.approx(wide, rel=1e-6)


def test_the_sum_over_rows_is_float64() -> None:
    """2^25 + 0.5 is no float32."""
    z = np.array([[2.0**13, 1.0]], "float32")
    loss = LOSSES["squared"](1, batch_size=2, dtype="float32")
    assert loss_gradient(loss, z, np.zeros((1, 2), "float32")) == 2**25 + 0.5
