"""Losses on split outputs are those on gathered ones (dbctl/model/part_loss.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import Ran, run

from dbctl.model.layers.dense import DenseSpec
from dbctl.model.losses import LOSSES, loss_gradient
from dbctl.model.network import NetworkSpec
from dbctl.model.part_layer import Post
from dbctl.model.part_loss import PartLoss, PartMeasurement
from dbctl.model.passes import Measurement, Network
from dbctl.region import Box
from dbctl.roles.base import PlainBuffer

BATCH = 6


def losses(loss: str, outputs: int, *, count: int, dtype: str = "float64") -> list[PartLoss]:
    owned = Box.whole((outputs,)).split((count,))
    return [
        PartLoss(
            loss,
            owned,
            p,
            batch_size=BATCH,
            dtype=dtype,
            post=Post(PlainBuffer, batch_size=BATCH, dtype=dtype),
        )
        for p in range(count)
    ]


def split(z: Any, count: int) -> list[Any]:
    owned = Box.whole(z.shape[:1]).split((count,))
    return [z[box.slices()].copy() for box in owned]


def gradients(parts: list[PartLoss], z: Any, targets: Any) -> tuple[float, Any, Ran]:
    own = split(z, len(parts))
    with np.errstate(all="ignore"):
        ran = run([part.gradient(a, targets) for part, a in zip(parts, own, strict=True)])
    return sum(ran.results), np.concatenate(own), ran


def measured(parts: list[PartLoss], z: Any, targets: Any) -> list[PartMeasurement]:
    own = split(z, len(parts))
    with np.errstate(all="ignore"):
        return run([part.measure(a, targets) for part, a in zip(parts, own, strict=True)]).results


def measured_whole(loss: Any, z: Any, targets: Any) -> Measurement:
    """A network that passes its inputs on."""
    n = len(z)
    spec = NetworkSpec(input=(n,), layers=(DenseSpec(units=n),), loss=loss)
    whole = Network(spec, batch_size=z.shape[1], dtype="float64")
    parameters = np.concatenate([np.eye(n).ravel(), np.zeros(n)])
    return whole.measure(parameters, z, targets)


outputs_of_rows = st.tuples(st.integers(2, 9), st.integers(1, BATCH), st.integers(0, 99))


@settings(max_examples=80, deadline=None)
@given(
    outputs_of_rows, st.sampled_from(list(LOSSES)), st.sampled_from([1, 2, 3, 4, 6]), st.booleans()
)
def test_the_loss_and_its_gradient(
    size: tuple[int, int, int], loss: str, count: int, floats: bool
) -> None:
    """Also of more partitions than outputs, and again in the same memory with other labels."""
    outputs, n, seed = size
    rng = np.random.default_rng(seed)
    parts = losses(loss, outputs, count=count)
    for _ in range(2):
        z = 3 * rng.standard_normal((outputs, n))
        targets: Any = rng.integers(0, outputs, n)
        if floats and loss != "softmax":
            targets = rng.uniform(0, 1, (outputs, n))
        expected = z.copy()
        loss_sum = loss_gradient(
            LOSSES[loss](outputs, batch_size=n, dtype="float64"), expected, targets
        )
        found, gradient, _ = gradients(parts, z, targets)
        assert found == pytest.approx(loss_sum, rel=1e-12)
        np.testing.assert_allclose(gradient, expected, rtol=1e-11, atol=1e-14)


@settings(max_examples=80, deadline=None)
@given(
    outputs_of_rows, st.sampled_from(list(LOSSES)), st.sampled_from([1, 2, 3, 4, 6]), st.booleans()
)
def test_measuring_with_ties(
    size: tuple[int, int, int], loss: str, count: int, floats: bool
) -> None:
    """Few values, so that outputs are often equal: the lower index is the greater."""
    outputs, n, seed = size
    rng = np.random.default_rng(seed)
    z = rng.integers(0, 3, (outputs, n)).astype("float64")
    targets: Any = rng.integers(0, outputs, n)
    if floats and loss != "softmax":
        targets = rng.uniform(0, 1, (outputs, n))
    expected = measured_whole(loss, z, targets)
    for found in (parts := measured(losses(loss, outputs, count=count), z, targets)):
        assert (found.correct, found.top5) == (expected.correct, expected.top5)
        np.testing.assert_allclose(found.predicted, expected.predicted, rtol=1e-12)
        np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-12)
    assert sum(p.loss_sum for p in parts) == pytest.approx(expected.loss_sum, rel=1e-12)


def test_top5_of_fewer_outputs_than_five() -> None:
    z = np.array([[3.0], [2.0], [1.0], [0.0]])
    for label in range(4):
        (first, *_) = measured(losses("softmax", 4, count=3), z, np.array([label]))
        assert (first.correct, first.top5) == (int(label == 0), int(label < 4))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_numbers_that_are_not_finite_are_measured_as_if_whole(count: int) -> None:
    nan, inf = np.nan, np.inf
    z = np.array([[nan, 1.0, 0.0], [2.0, nan, inf], [5.0, 3.0, 1.0], [7.0, nan, 2.0]])
    for labels in ([0, 1, 1], [3, 3, 0], [1, 2, 3]):
        # Of the outputs themselves: a product with an identity would spread the NaN.
        best = np.argmax(z, axis=0)
        own = z[labels, np.arange(3)]
        before = ~(z <= own) | ((z == own) & (np.arange(4)[:, None] < labels))
        found = measured(losses("squared", 4, count=count), z, np.array(labels))[0]
        np.testing.assert_array_equal(found.predicted, best)
        assert found.correct == int((before.sum(axis=0) == 0).sum())


def test_outputs_as_great_as_they_come_do_not_overflow() -> None:
    """The greatest output is of the whole row, not of the own part."""
    z = np.array([[-1e4], [0.0], [1e4], [9e3]])
    loss, gradient, _ = gradients(losses("softmax", 4, count=4), z, np.array([0]))
    assert loss == 2e4
    np.testing.assert_array_equal(gradient[:, 0], [-1, 0, 1, 0])


@pytest.mark.parametrize(("loss", "numbers"), [("softmax", 3), ("logistic", 0), ("squared", 0)])
def test_outputs_are_not_gathered(loss: str, numbers: int) -> None:
    """Two reductions of softmax: one number a row, then two, to each other partition."""
    parts = losses(loss, 500, count=4)
    _, _, ran = gradients(parts, np.zeros((500, BATCH)), np.zeros(BATCH, np.int64))
    assert sum(ran.sent.values()) == numbers * BATCH * 4 * 3


def test_who_has_no_outputs_gives_nothing_and_learns_everything() -> None:
    z, labels = np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([0, 0])
    parts = losses("softmax", 2, count=5)
    _, _, ran = gradients(parts, z, labels)
    assert {sender for _, sender, _ in ran.sent} == {2, 4}
    found = measured(parts, z, labels)
    assert {(m.correct, m.top5, tuple(m.predicted)) for m in found} == {(1, 2, (0, 1))}
    assert [m.loss_sum for m in found if m.loss_sum] == [found[2].loss_sum]  # counted once


def test_softmax_refuses_float_targets() -> None:
    parts = losses("softmax", 4, count=2)
    with pytest.raises(AssertionError, match="integer labels"):
        gradients(parts, np.zeros((4, 2)), np.zeros((4, 2)))
