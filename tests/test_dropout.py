"""Dropout: which nodes, the same however it is cut; how many; what it does to a network."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import check_gradient, dropped

from dbctl.data.dataset import Dataset
from dbctl.data.sources import open_source
from dbctl.experiment.specs import DigitsSource
from dbctl.model.initial import initial_values
from dbctl.model.kernels.dropout import BLOCK, Dropout
from dbctl.model.layers.dense import DenseSpec
from dbctl.model.layers.dropout import Draw, DropoutSpec
from dbctl.model.layers.lcn import LcnSpec
from dbctl.model.layers.pool import PoolSpec
from dbctl.model.network import NetworkSpec, n_parameters
from dbctl.model.passes import Network
from dbctl.node.compute import NetworkGradient
from dbctl.region import Box, Range
from dbctl.roles.base import BatchResult
from dbctl.wire import Position

LABEL = Draw(7, 0, 12).label(3)


def mask(
    inputs: tuple[int, ...],
    box: Box | None = None,
    *,
    label: str = LABEL,
    n: int = 5,
    batch_size: int = 5,
    rate: float = 0.5,
) -> np.ndarray:
    """What the layer makes of ones."""
    box = box or Box.whole(inputs)
    layer = Dropout(DropoutSpec(rate=rate), inputs, box, batch_size=batch_size, dtype="float64")
    assert layer.tensors == ()
    assert layer.input_box == box
    layer.draw(label, n)
    out = np.full((*box.shape, n), np.nan)
    layer.forward([], np.ones_like(out), out)
    return out


@st.composite
def boxes(draw):
    inputs = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    starts = tuple(draw(st.integers(0, n - 1)) for n in inputs)
    ends = zip(starts, inputs, strict=True)
    return inputs, Box(starts, tuple(draw(st.integers(a + 1, n)) for a, n in ends))


@settings(deadline=None)
@given(boxes(), st.integers(1, 6), st.data())
def test_a_box_of_a_short_batch_drops_what_the_whole_layer_drops(case, batch_size, data) -> None:
    inputs, box = case
    n = data.draw(st.integers(1, batch_size))
    whole = mask(inputs, n=batch_size, batch_size=batch_size)
    part = mask(inputs, box, n=n, batch_size=batch_size)
    assert part.tobytes() == whole[box.slices()][..., :n].tobytes()


@pytest.mark.parametrize("batch_size", [4, 5])
def test_it_is_the_slow_twin(batch_size: int) -> None:
    """Half a word a row, the lower half first; each node begins with a word of its own."""
    found = mask((4, 3), n=4, batch_size=batch_size, rate=0.3)
    expected = dropped(LABEL, nodes=12, rows=4, batch_size=batch_size, rate=0.3)
    np.testing.assert_array_equal(found.reshape(12, 4), expected)


def test_a_layer_of_several_blocks_is_one_stream() -> None:
    nodes = 2 * BLOCK // 50 + 7
    whole = mask((nodes,), n=100, batch_size=100)
    middle = Box((BLOCK // 50 - 3,), (BLOCK // 50 + 5,))
    assert (mask((nodes,), middle, n=100, batch_size=100) == whole[middle.slices()]).all()


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_of_dropped_nodes_is_the_rate_and_the_mean_stays(rate: float) -> None:
    found = mask((2000,), n=50, batch_size=50, rate=rate)
    assert set(np.unique(found)) == {0.0, 1 / (1 - rate)}
    deviation = np.sqrt(rate * (1 - rate) / found.size)
    assert abs((found == 0).mean() - rate) < 5 * deviation
    # Neither nodes nor rows go together: neighbours agree as often as strangers.
    alike = rate**2 + (1 - rate) ** 2
    for a, b in [(found[1:], found[:-1]), (found[:, 1:], found[:, :-1])]:
        assert abs(((a == 0) == (b == 0)).mean() - alike) < 0.01


def test_seed_replica_step_and_layer_each_make_another_mask() -> None:
    labels = [
        Draw(7, 0, 12).label(3),
        Draw(8, 0, 12).label(3),
        Draw(7, 1, 12).label(3),
        Draw(7, 0, 13).label(3),
        Draw(7, 0, 12).label(4),
        Draw(7, 1, 2).label(3),
        Draw(71, 0, 12).label(3),
    ]
    masks = [mask((40,), label=label) for label in labels]
    assert len({one.tobytes() for one in masks}) == len(labels)
    assert mask((40,), label=Draw(7, 0, 12).label(3)).tobytes() == masks[0].tobytes()


def test_backward_is_the_same_mask_and_measuring_none() -> None:
    layer = Dropout(DropoutSpec(), (40,), Box.whole((40,)), batch_size=3, dtype="float64")
    x, out, dx = np.full((40, 3), 3.0), np.empty((40, 3)), np.empty((40, 3))
    layer.draw(LABEL, 3)
    layer.forward([], x, out)
    y = out.copy()
    assert set(np.unique(y)) == {0.0, 6.0}
    layer.backward([], x, out, delta=np.full((40, 3), 3.0), gradients=[], dx=dx)
    np.testing.assert_array_equal(dx, y)
    layer.backward([], x, out, delta=dx, gradients=[], dx=None)
    layer.draw(None, 3)
    layer.forward([], x, out)
    np.testing.assert_array_equal(out, x)


# ---------------------------------------------------------------- in a network


def network(*, seed: int = 0):
    spec = NetworkSpec(
        input=(6,),
        layers=(
            DropoutSpec(rate=0.2),
            DenseSpec(units=9, activation="tanh"),
            DropoutSpec(),
            DenseSpec(units=4),
        ),
        loss="softmax",
    )
    rng = np.random.default_rng(seed)
    size = n_parameters(spec)
    parameters = initial_values(spec, 1, Range(0, size), dtype="float64")
    x, labels = rng.standard_normal((6, 5)), rng.integers(0, 4, 5)
    return Network(spec, batch_size=5, dtype="float64"), parameters, x, labels


def test_the_gradient_with_a_draw_is_a_directional_difference() -> None:
    net, parameters, x, labels = network()
    gradient, scratch = np.empty_like(parameters), np.empty_like(parameters)
    draw = Draw(1, 2, 3)
    net.gradient(parameters, x, labels, out=gradient, draw=draw)

    def loss(at):
        return net.gradient(at, x, labels, out=scratch, draw=draw) / 5

    check_gradient(loss, gradient, parameters)
    assert loss(parameters) == loss(parameters)


def test_measuring_between_steps_drops_nothing_and_changes_nothing() -> None:
    net, parameters, x, labels = network()
    first, second, plain = (np.empty_like(parameters) for _ in range(3))
    net.gradient(parameters, x, labels, out=first, draw=Draw(1, 2, 3))
    measured = net.measure(parameters, x, labels).loss_sum
    assert measured == net.gradient(parameters, x, labels, out=plain)
    net.gradient(parameters, x, labels, out=second, draw=Draw(1, 2, 3))
    assert first.tobytes() == second.tobytes() != plain.tobytes()
    net.gradient(parameters, x, labels, out=second, draw=Draw(1, 2, 4))
    assert first.tobytes() != second.tobytes()


def test_a_pass_without_a_draw_for_its_rows_is_a_programming_error() -> None:
    layer = Dropout(DropoutSpec(), (4,), Box.whole((4,)), batch_size=3, dtype="float64")
    with pytest.raises(AssertionError):
        layer.forward([], np.ones((4, 3)), np.empty((4, 3)))
    layer.draw(LABEL, 3)
    with pytest.raises(AssertionError):
        layer.forward([], np.ones((4, 2)), np.empty((4, 2)))


class Recorder:
    """A share of a network that only keeps what it was asked for."""

    tensors = ()
    bound = 2.5

    def gradient(self, parameters, x, targets, *, out, draw):
        self.draw = draw
        return 0.0
        yield


def test_a_worker_draws_by_its_seed_its_replica_and_its_own_step() -> None:
    """So a resumed run, whose positions go on, drops what it would have dropped."""
    source = DigitsSource(split="train")
    rows, share = Dataset(open_source(source), source, rows=np.arange(20)), Recorder()
    worker = NetworkGradient(share, rows, seed=5, replica=1, batch_size=4)
    nothing = np.empty(0, np.float32)
    for at in (Position(33, 6, 3), Position(34, 6, 4), Position(35, 7, 0)):
        work = worker.compute(at, nothing, nothing)
        with pytest.raises(StopIteration) as ended:
            next(work)
        assert ended.value.value == BatchResult(0.0, 4, 2.5)
        assert share.draw == Draw(5, 1, at.step)


def test_a_step_allocates_no_array_of_the_size_of_a_layer() -> None:
    layers = (
        LcnSpec(window=5),
        PoolSpec(kind="l2", size=3, stride=2),
        DropoutSpec(),
        PoolSpec(kind="max"),
        DenseSpec(units=2),
    )
    spec = NetworkSpec(input=(30, 30, 20), layers=layers, loss="softmax")
    network = Network(spec, batch_size=50)
    parameters = initial_values(spec, 1, Range(0, n_parameters(spec)))
    x = np.random.default_rng(0).random((18_000, 50), np.float32)
    out, labels = np.empty_like(parameters), np.zeros(50, np.int64)
    network.gradient(parameters, x, labels, out=out, draw=Draw(1, 1, 1))
    tracemalloc.start()
    network.gradient(parameters, x, labels, out=out, draw=Draw(1, 1, 2))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 14 * 14 * 20 * 50 * 4 / 2, peak
