"""A whole network's passes, against the slow twin, differences, and themselves."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import check_gradient, dense_network

from dbctl.model.initial import initial_values
from dbctl.model.layers.conv2d import Conv2dSpec
from dbctl.model.layers.dense import DenseSpec
from dbctl.model.layers.lcn import LcnSpec
from dbctl.model.layers.pool import PoolSpec
from dbctl.model.network import NetworkSpec, n_parameters
from dbctl.model.passes import Network
from dbctl.region import Range

LOSSES = ["softmax", "logistic", "squared"]
ACTIVATIONS = ["sigmoid", "tanh", "relu", "linear"]


def network_spec(*units: int, activation: str = "tanh", loss: str = "softmax", last: str = ""):
    hidden = tuple(DenseSpec(units=u, activation=activation) for u in units[:-1])
    output = DenseSpec(units=units[-1], activation=last or "linear")
    return NetworkSpec(input=(4, 3, 2), layers=(*hidden, output), loss=loss)


def made(spec: NetworkSpec, rows: int, *, dtype: str = "float64"):
    """Parameters with biases that are not zero, x (features, rows), labels (rows,)."""
    rng = np.random.default_rng(0)
    parameters = initial_values(spec, 1, Range(0, n_parameters(spec)), dtype=dtype)
    parameters += rng.uniform(-0.1, 0.1, parameters.shape).astype(dtype)
    x = rng.standard_normal((24, rows)).astype(dtype)
    return parameters, x, rng.integers(0, spec.layers[-1].units, rows)


@pytest.mark.parametrize("last", ["linear", "sigmoid"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_loss_gradient_and_outputs_are_the_slow_twins(activation, loss, last) -> None:
    spec = network_spec(9, 8, 7, activation=activation, loss=loss, last=last)
    network = Network(spec, batch_size=6, dtype="float64")
    parameters, x, labels = made(spec, 6)
    gradient = np.full(network.n_parameters, np.nan)
    total = network.gradient(parameters, x, labels, out=gradient)
    loss_sum, expected, outputs = dense_network(spec, parameters, x.T, labels)
    assert total == pytest.approx(loss_sum, rel=1e-12)
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-13)
    np.testing.assert_allclose(network.outputs(parameters, x), outputs.T, rtol=0, atol=1e-13)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gradient_is_a_directional_difference(activation: str, loss: str) -> None:
    spec = network_spec(9, 7, activation=activation, loss=loss)
    network = Network(spec, batch_size=5, dtype="float64")
    parameters, x, labels = made(spec, 5)
    gradient = np.empty(network.n_parameters)
    network.gradient(parameters, x, labels, out=gradient)
    scratch = np.empty_like(gradient)
    check_gradient(
        lambda at: network.gradient(at, x, labels, out=scratch) / 5, gradient, parameters
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_short_mini_batches_use_the_buffers_and_leave_nothing_behind(sizes: list[int]) -> None:
    """A used network gives the bits of a fresh one; the mean is over the rows there are."""
    spec = network_spec(9, 7, activation="relu")
    used = Network(spec, batch_size=7)
    for rows in sizes:
        parameters, x, labels = made(spec, rows, dtype="float32")
        mine, fresh = np.full((2, used.n_parameters), np.nan, "float32")
        total = used.gradient(parameters, x, labels, out=mine)
        assert total == Network(spec, batch_size=7).gradient(parameters, x, labels, out=fresh)
        assert mine.tobytes() == fresh.tobytes()
        assert used.outputs(parameters, x).flags.c_contiguous
        _, expected, _ = dense_network(spec, parameters.astype(float), x.T.astype(float), labels)
        np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_a_border_that_a_pool_drops_has_no_gradient_whatever_was_there_before() -> None:
    """In a shorter mini-batch it lies where the last one had nodes that a window saw."""
    layers = (Conv2dSpec(maps=2, kernel=2), PoolSpec(kind="mean"), DenseSpec(units=3))
    spec = NetworkSpec(input=(6, 6, 1), layers=layers, loss="softmax")
    used = Network(spec, batch_size=5)
    rng = np.random.default_rng(0)
    parameters = initial_values(spec, 1, Range(0, n_parameters(spec)))
    for rows in (5, 3, 4):
        x = rng.standard_normal((36, rows)).astype("float32")
        labels = rng.integers(0, 3, rows)
        mine, fresh = np.full((2, used.n_parameters), np.nan, "float32")
        used.gradient(parameters, x, labels, out=mine)
        Network(spec, batch_size=5).gradient(parameters, x, labels, out=fresh)
        assert mine.tobytes() == fresh.tobytes()


def test_rows_first_data_may_be_given_as_a_transposed_view() -> None:
    spec = network_spec(9, 7)
    network = Network(spec, batch_size=5)
    parameters, x, labels = made(spec, 5, dtype="float32")
    mine, other = np.empty((2, network.n_parameters), "float32")
    total = network.gradient(parameters, x, labels, out=mine)
    strided = np.ascontiguousarray(x.T).T
    assert network.gradient(parameters, strided, labels, out=other) == pytest.approx(total)
    np.testing.assert_allclose(other, mine, rtol=0, atol=1e-6 * np.abs(mine).max())


def test_it_writes_every_element_into_memory_it_is_given_and_only_reads_parameters() -> None:
    spec = network_spec(9, 7)
    network = Network(spec, batch_size=5)
    parameters, x, labels = made(spec, 5, dtype="float32")
    before = parameters.copy()
    parameters.flags.writeable = x.flags.writeable = labels.flags.writeable = False
    slot = np.full(network.n_parameters + 2, np.nan, "float32")
    network.gradient(parameters, x, labels, out=slot[1:-1])
    assert np.isfinite(slot[1:-1]).all()
    assert np.isnan(slot[[0, -1]]).all()
    assert parameters.tobytes() == before.tobytes()


def test_a_step_allocates_no_array_of_the_size_of_a_layer() -> None:
    spec = network_spec(300, 300, 10, activation="sigmoid")
    network = Network(spec, batch_size=200)
    parameters, x, labels = made(spec, 200, dtype="float32")
    gradient = np.zeros_like(parameters)
    network.gradient(parameters, x, labels, out=gradient)
    tracemalloc.start()
    network.gradient(parameters, x, labels, out=gradient)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 300 * 200 * 4 / 4, peak


def test_numbers_that_are_not_finite_show_in_the_loss_and_warn_nobody() -> None:
    """cases: one row with NaN; squared loss with a rate of 1e6."""
    spec = network_spec(9, 7, activation="relu")
    network = Network(spec, batch_size=5)
    parameters, x, labels = made(spec, 5, dtype="float32")
    x[3, 2] = np.nan
    assert np.isnan(network.gradient(parameters, x, labels, out=np.empty_like(parameters)))
    assert np.isnan(network.bound)
    x[3, 2] = 0
    huge = network.gradient(parameters * np.float32(1e30), x, labels, out=parameters)
    assert not np.isfinite(huge)
    assert not network.bound < np.inf


def test_another_length_dtype_or_too_many_rows_is_a_programming_error() -> None:
    spec = network_spec(9, 7)
    network = Network(spec, batch_size=5)
    parameters, x, labels = made(spec, 5, dtype="float32")
    out = np.empty_like(parameters)
    with pytest.raises(AssertionError):
        network.gradient(parameters[1:], x, labels, out=out)
    with pytest.raises(AssertionError):
        network.gradient(parameters, x.astype(float), labels, out=out)
    with pytest.raises(AssertionError):
        network.gradient(parameters, x, labels, out=np.empty((2 * len(out)), "float32")[::2])
    with pytest.raises(AssertionError):
        network.gradient(parameters, np.zeros((24, 6), "float32"), labels, out=out)


@pytest.mark.parametrize("first", ["pool", "lcn"])
def test_a_network_with_rows_and_columns_has_the_gradient_of_a_difference(first: str) -> None:
    """7 x 6 over windows of 2 leaves a row over. Rows-first data is a view there too."""
    pool = PoolSpec(kind="l2", size=2)
    layers = (pool, LcnSpec(window=3)) if first == "pool" else (LcnSpec(window=3), pool)
    dense = DenseSpec(units=9, activation="tanh")
    spec = NetworkSpec(input=(7, 6, 2), layers=(*layers, dense, DenseSpec(units=3)), loss="softmax")
    network = Network(spec, batch_size=4, dtype="float64")
    rng = np.random.default_rng(0)
    parameters = initial_values(spec, 1, Range(0, n_parameters(spec)), dtype="float64")
    x, labels = rng.standard_normal((84, 4)), rng.integers(0, 3, 4)
    gradient, scratch = np.empty((2, network.n_parameters))
    network.gradient(parameters, x, labels, out=gradient)
    check_gradient(
        lambda at: network.gradient(at, x, labels, out=scratch) / 4, gradient, parameters
    )
    rows_first = np.ascontiguousarray(x.T).T
    network.gradient(parameters, rows_first, labels, out=scratch)
    np.testing.assert_allclose(scratch, gradient, rtol=0, atol=1e-12)


# ---------------------------------------------------------------- measurement


def identity(n: int, loss: str) -> tuple[Network, np.ndarray]:
    """A network whose outputs are its inputs."""
    spec = NetworkSpec(input=(n,), layers=(DenseSpec(units=n),), loss=loss)
    parameters = np.concatenate([np.eye(n).ravel(), np.zeros(n)])
    return Network(spec, batch_size=8, dtype="float64"), parameters


@pytest.mark.parametrize("loss", LOSSES)
def test_measure_gives_the_loss_of_gradient_and_the_outputs_best_class(loss: str) -> None:
    spec = network_spec(9, 7, loss=loss)
    network = Network(spec, batch_size=5, dtype="float64")
    parameters, x, labels = made(spec, 5)
    outputs = network.outputs(parameters, x).copy()
    measured = network.measure(parameters, x, labels)
    total = network.gradient(parameters, x, labels, out=np.empty_like(parameters))
    assert measured.loss_sum == total
    assert (measured.predicted == outputs.argmax(axis=0)).all()
    assert measured.correct == int((measured.predicted == labels).sum())
    ranked = np.argsort(-outputs, axis=0)[:5]
    assert measured.top5 == int((ranked == labels).any(axis=0).sum())
    prediction = {
        "softmax": np.exp(outputs) / np.exp(outputs).sum(axis=0),
        "logistic": 1 / (1 + np.exp(-outputs)),
        "squared": outputs,
    }[loss]
    np.testing.assert_allclose(measured.scores, prediction.max(axis=0), rtol=1e-12)


def test_equal_outputs_rank_by_index_and_nan_is_never_right() -> None:
    network, parameters = identity(7, "softmax")
    measured = network.measure(parameters, np.ones((7, 7)), np.arange(7))
    assert (measured.correct, measured.top5) == (1, 5)
    for outputs in (2, 7):
        network, parameters = identity(outputs, "softmax")
        x = np.full((outputs, outputs), np.nan)
        measured = network.measure(parameters, x, np.arange(outputs))
        assert (measured.correct, measured.top5) == (0, 0)


def test_float_targets_have_no_accuracy() -> None:
    network, parameters = identity(2, "squared")
    x = np.array([[1.0, 2.0], [3.0, 4.0]])
    measured = network.measure(parameters, x, np.array([[0.0, 2.0], [3.0, 2.0]]))
    assert measured.loss_sum == 0.5 * 1 + 0.5 * 4
    assert (measured.correct, measured.top5) == (-1, -1)
    assert measured.predicted.tolist() == measured.scores.tolist() == [1.0, 2.0]
