"""Who owns, needs, holds and sends what (paper A, section 3; docs/architecture.md, rung 1)."""

from __future__ import annotations

import tracemalloc
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import shares_of, whole_of
from network_cases import networks, spatial

from dbctl.errors import ExperimentError, PlanError
from dbctl.experiment.read import parse
from dbctl.model.cut import NetworkCut, cut_fault, cut_network, traffic
from dbctl.model.layers.conv2d import Conv2dSpec
from dbctl.model.layers.dense import DenseSpec
from dbctl.model.layers.lcn import LcnSpec
from dbctl.model.layers.local2d import Local2dSpec
from dbctl.model.layers.pool import PoolSpec
from dbctl.model.network import LayerSpec, NetworkSpec, n_parameters
from dbctl.model.part import PartNetwork
from dbctl.model.passes import KERNELS
from dbctl.region import Box
from dbctl.roles.base import PlainBuffer

PARTS: list[dict[str, Any]] = [{"count": n} for n in (1, 2, 3, 4, 6)]
PARTS += [{"grid": grid} for grid in ((1, 3), (2, 1), (2, 2), (3, 2), (5, 1))]


def network(*layers: LayerSpec, inputs: tuple[int, ...], loss: Any = "squared") -> NetworkSpec:
    return NetworkSpec(input=inputs, layers=layers, loss=loss)


@st.composite
def cuts(draw: Any) -> NetworkCut:
    spec = draw(networks())
    fitting = [parts for parts in PARTS if cut_fault(spec, **parts) is None]
    return cut_network(spec, **draw(st.sampled_from(fitting)))


# --------------------------------------------------------------------- owned, held, what is whole


@settings(max_examples=80, deadline=None)
@given(cuts())
def test_every_node_has_one_owner(cut: NetworkCut) -> None:
    for shape, owned in zip(cut.shapes, cut.owned, strict=True):
        times = np.zeros(shape, int)
        for box in owned:
            times[box.slices()] += 1
        assert (times == 1).all()


@settings(max_examples=80, deadline=None)
@given(cuts())
def test_pieces_cover_the_flat_vector_once_and_partition_by_partition(cut: NetworkCut) -> None:
    size, at = n_parameters(cut.spec), 0
    for partition in range(cut.count):
        span = cut.span(partition)
        assert span.start == at
        for piece in cut.pieces_of(partition):
            assert (piece.range.start, len(piece.range)) == (at, len(piece.box))
            at = piece.range.stop
        assert span.stop == at
    assert at == size
    # There and back: `whole_of` refuses what comes twice, and what never comes stays NaN.
    whole = np.arange(size, dtype="float64")
    np.testing.assert_array_equal(whole_of(cut, shares_of(cut, whole)), whole)


@settings(max_examples=40, deadline=None)
@given(cuts(), st.data())
def test_runs_of_a_part_of_a_piece(cut: NetworkCut, data: st.DataObject) -> None:
    """A shard holds any range of the vector: its runs are those elements, in order, no more."""
    whole = np.arange(n_parameters(cut.spec))
    vector = np.concatenate(shares_of(cut, whole.astype("float64")))
    piece = data.draw(st.sampled_from(cut.pieces))
    start = data.draw(st.integers(piece.range.start, piece.range.stop))
    part = type(piece.range)(start, data.draw(st.integers(start, piece.range.stop)))
    at = part.start
    for first, run in piece.runs(part):
        assert run.start == at
        np.testing.assert_array_equal(vector[run.slice()], whole[first : first + len(run)])
        at = run.stop
    assert at == part.stop


SPEECH = network(
    *(DenseSpec(units=2560, activation="sigmoid") for _ in range(4)),
    DenseSpec(units=8192),
    inputs=(440,),
    loss="softmax",
)
LOCAL = network(
    Local2dSpec(maps=8, kernel=5),
    PoolSpec(kind="l2", size=2),
    Local2dSpec(maps=8, kernel=5),
    DenseSpec(units=10),
    inputs=(68, 68, 1),
)


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("spec", [SPEECH, LOCAL], ids=["speech", "local"])
def test_a_partition_holds_its_share_of_the_parameters(spec: NetworkSpec, count: int) -> None:
    cut = cut_network(spec, count=count)
    whole = n_parameters(spec)
    assert max(len(cut.span(p)) for p in range(count)) < (1 / count + 0.1) * whole


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("spec", [SPEECH, LOCAL], ids=["speech", "local"])
def test_memory_of_a_partition_falls_with_their_count(spec: NetworkSpec, count: int) -> None:
    """Its buffers, parameters and gradient: only its own, and what borders on it."""

    def held(cut: NetworkCut) -> int:
        tracemalloc.start()
        part = PartNetwork(cut, 0, batch_size=32, outbox=PlainBuffer)
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return size + 2 * part.n_parameters * part.dtype.itemsize

    whole = held(cut_network(spec))
    assert held(cut_network(spec, count=count)) < (1 / count + 0.05) * whole


def test_the_speech_network_of_the_paper_has_42_million_parameters() -> None:
    """Section 5: "approximately 42 million model parameters"."""
    assert n_parameters(SPEECH) == 41_777_152


def test_a_wide_layer_and_a_narrow_one_cost_one_exchange() -> None:
    """Cut by outputs, then by inputs: what the wide one computes never leaves its partition."""
    spec = network(DenseSpec(units=2048), DenseSpec(units=64), DenseSpec(units=10), inputs=(784,))
    cut = cut_network(spec, count=2)
    assert cut.ways == ("outputs", "inputs", "inputs")
    assert [cut.states_sent(layer) for layer in range(3)] == [0, 0, 0]
    assert [cut.sums_sent(layer) for layer in range(3)] == [0, 64, 10]
    assert traffic(cut) == 2 * (64 + 10)
    by_outputs = NetworkCut(spec, cut.owned, ("outputs",) * 3)
    assert traffic(by_outputs) == 2 * (2048 + 64)


def test_of_equal_ways_a_layer_is_cut_by_its_inputs() -> None:
    """As many sums as states, but sums are on their way during a product; 8192 sums are more."""
    cut = cut_network(SPEECH, count=2)
    assert cut.ways == ("outputs", "inputs", "inputs", "inputs", "outputs")
    assert [cut.sums_sent(layer) for layer in range(5)] == [0, 2560, 2560, 2560, 0]
    assert [cut.states_sent(layer) for layer in range(5)] == [0, 0, 0, 0, 2560]
    assert traffic(NetworkCut(SPEECH, cut.owned, ("outputs",) * 5)) == traffic(cut)


def test_a_layer_may_say_how_it_is_cut() -> None:
    layers = (DenseSpec(units=8, cut="inputs"), DenseSpec(units=8, cut="outputs"))
    assert cut_network(network(*layers, inputs=(6,)), count=2).ways == ("inputs", "outputs")
    assert cut_network(network(*layers, inputs=(6,))).ways == ("outputs", "outputs")


# --------------------------------------------------------- what a box needs, and what is sent


def influence(spec: LayerSpec, inputs: tuple[int, ...]) -> Any:
    """edges[i, o]: whether output o changes when input i does. By trying each, on all nodes."""
    whole = Box.whole(spec.output_shape(inputs))
    kernel = KERNELS[spec.type](spec, inputs, whole, batch_size=1, dtype="float64")
    rng = np.random.default_rng(0)
    parameters = [rng.uniform(0.5, 1, t.shape) for t in spec.tensors(inputs, whole)]
    x = rng.uniform(1, 2, (*inputs, 1))

    def outputs(x: Any) -> Any:
        out = np.zeros((*whole.shape, 1))
        if spec.type == "dropout":
            kernel.draw(None, 1)
        kernel.forward(parameters, np.ascontiguousarray(x[kernel.input_box.slices()]), out)
        return out.ravel().copy()

    before = outputs(x)
    edges = np.zeros((prod(inputs), len(whole)), bool)
    for i in range(prod(inputs)):
        changed = x.copy()
        changed.reshape(-1)[i] += 7.0  # greater than all: it is any window's maximum
        edges[i] = outputs(changed) != before
    return edges


def nodes_of(shape: tuple[int, ...], box: Box) -> Any:
    """Which of a level's nodes a box holds, flat."""
    held = np.zeros(shape, bool)
    held[box.slices()] = True
    return held.ravel()


def crossing(cut: NetworkCut, layer: int) -> int:
    """Nodes whose states another partition's outputs see, once for each such partition."""
    edges = influence(cut.spec.layers[layer], cut.shapes[layer])
    total = 0
    for receiver in range(cut.count):
        outputs = nodes_of(cut.shapes[layer + 1], cut.owned[layer + 1][receiver])
        seen = edges[:, outputs].any(axis=1)
        own = nodes_of(cut.shapes[layer], cut.owned[layer][receiver])
        total += int((seen & ~own).sum())
    return total


@settings(max_examples=60, deadline=None)
@given(spatial, st.tuples(st.integers(3, 8), st.integers(2, 6), st.integers(1, 2)), st.data())
def test_outputs_see_nothing_outside_of_what_they_need(
    spec: Any, inputs: tuple[int, int, int], data: st.DataObject
) -> None:
    """Rung 1 for `needs`: brute force over every input node and every output node."""
    if spec.fault(inputs) is not None:
        return
    net = network(spec, spec, DenseSpec(units=2), inputs=inputs)
    if spec.fault(spec.output_shape(inputs)) is not None:
        net = network(spec, DenseSpec(units=2), inputs=inputs)
    fitting = [parts for parts in PARTS if cut_fault(net, **parts) is None]
    cut = cut_network(net, **data.draw(st.sampled_from(fitting)))
    edges = influence(spec, inputs)
    for partition in range(cut.count):
        outputs = nodes_of(cut.shapes[1], cut.owned[1][partition])
        seen = edges[:, outputs].any(axis=1)
        needed = nodes_of(inputs, cut.needs(0, partition))
        assert not (seen & ~needed).any()
        assert outputs.any() == needed.any()


GAPLESS = {
    "conv2d same": Conv2dSpec(maps=2, kernel=3, padding="same"),
    "conv2d valid": Conv2dSpec(maps=2, kernel=(3, 2)),
    "conv2d stride": Conv2dSpec(maps=1, kernel=3, stride=2, padding="same"),
    "local2d": Local2dSpec(maps=2, kernel=3),
    "pool": PoolSpec(kind="max", size=2),
    "pool overlapping": PoolSpec(kind="mean", size=3, stride=2),
    "lcn": LcnSpec(window=3),
    "dense": DenseSpec(units=7, cut="outputs"),
}


@pytest.mark.parametrize("parts", [{"count": 2}, {"grid": (3, 1)}, {"grid": (2, 2)}, {"count": 6}])
@pytest.mark.parametrize("name", GAPLESS)
def test_states_sent_are_the_crossing_edges_sources(name: str, parts: dict[str, Any]) -> None:
    """Paper A, section 3: only edges that cross have their nodes' state sent, and each once."""
    spec = network(
        Conv2dSpec(maps=2, kernel=1),  # what the layer's inputs are cut by
        GAPLESS[name],
        DenseSpec(units=3, cut="outputs"),
        inputs=(9, 8, 1),
    )
    cut = cut_network(spec, **parts)
    assert cut.states_sent(0) == 0
    assert cut.states_sent(1) == crossing(cut, 1)
    assert cut.states_sent(2) == crossing(cut, 2) > 0


@settings(max_examples=40, deadline=None)
@given(cuts())
def test_no_node_state_is_sent_twice_to_one_partition(cut: NetworkCut) -> None:
    for layer in range(len(cut.spec.layers)):
        for receiver in range(cut.count):
            times = np.zeros(cut.shapes[layer], int)
            for sender in range(cut.count):
                box = cut.sent(layer, sender, receiver)
                times[box.slices()] += 1
                assert not box or cut.owned[layer][sender].intersection(box) == box
            need = nodes_of(cut.shapes[layer], cut.needs(layer, receiver))
            own = nodes_of(cut.shapes[layer], cut.owned[layer][receiver])
            expected = np.zeros_like(need) if layer == 0 else need & ~own
            np.testing.assert_array_equal(times.ravel(), expected)


# ------------------------------------------------------------------------------ choosing a cut


def test_count_takes_the_grid_of_least_traffic() -> None:
    """Windows of 1 row and 9 columns: cut by rows, nothing crosses; turned, by columns."""
    rows = network(
        Local2dSpec(maps=2, kernel=(1, 9)),
        Local2dSpec(maps=2, kernel=(1, 9)),
        DenseSpec(units=4),
        inputs=(20, 40, 1),
    )
    cut = cut_network(rows, count=4)
    assert (cut.states_sent(1), cut.owned[1][0].shape) == (0, (5, 32, 2))
    columns = network(
        Local2dSpec(maps=2, kernel=(9, 1)),
        Local2dSpec(maps=2, kernel=(9, 1)),
        DenseSpec(units=4),
        inputs=(40, 20, 1),
    )
    cut = cut_network(columns, count=4)
    assert (cut.states_sent(1), cut.owned[1][0].shape) == (0, (32, 5, 2))


@pytest.mark.parametrize("count", [2, 3, 4, 6, 8])
def test_no_other_grid_has_less_traffic(count: int) -> None:
    chosen = cut_network(LOCAL, count=count)
    grids = [(r, count // r) for r in range(1, count + 1) if count % r == 0]
    assert traffic(chosen) == min(traffic(cut_network(LOCAL, grid=grid)) for grid in grids)


def test_balance_comes_before_traffic() -> None:
    """Five columns over four partitions send nothing, but one would have two fifths of all."""
    layers = [Local2dSpec(maps=4, kernel=(3, 1)), Local2dSpec(maps=4, kernel=(3, 1))]
    spec = network(*layers, DenseSpec(units=2), inputs=(25, 5, 1))
    cut, columns = cut_network(spec, count=4), cut_network(spec, grid=(1, 4))
    assert traffic(columns) < traffic(cut)
    assert max(len(box) for box in cut.owned[1]) < max(len(box) for box in columns.owned[1])


def test_a_dense_network_on_an_image_is_cut_by_units() -> None:
    """11 partitions of a network on 8 x 8 pixels: no grid is asked of the pixels."""
    spec = network(DenseSpec(units=22), DenseSpec(units=10), inputs=(8, 8, 1), loss="softmax")
    cut = cut_network(spec, count=11)
    assert [len(box) for box in cut.owned[1]] == [2] * 11


# ------------------------------------------------------------------------------------- bad cuts

DENSE = network(DenseSpec(units=12), DenseSpec(units=5), inputs=(6, 6, 1))
CONV = network(Conv2dSpec(maps=2, kernel=3), DenseSpec(units=90), inputs=(8, 7, 1))

BAD = [
    (DENSE, {"count": 40}, "partition.count", ["at most 12", "found 40", "28 partitions"]),
    (DENSE, {"grid": (2, 2)}, "partition.grid", ["found 2 x 2", "count: 4"]),
    (CONV, {"grid": (7, 1)}, "partition.grid", ["at most 6 x 5", "found 7 x 1"]),
    (CONV, {"grid": (1, 6)}, "partition.grid", ["at most 6 x 5", "found 1 x 6"]),
    (CONV, {"count": 7}, "partition.count", ["6 x 5", "found 7", "7 x 1, 1 x 7 do not fit"]),
    (CONV, {"count": 31}, "partition.count", ["6 x 5", "found 31"]),
]


@pytest.mark.parametrize(("spec", "parts", "key", "words"), BAD)
def test_a_bad_cut_shows_the_arithmetic(
    spec: NetworkSpec, parts: dict[str, Any], key: str, words: list[str]
) -> None:
    with pytest.raises(PlanError) as error:
        cut_network(spec, **parts)
    assert str(error.value).startswith(f"{key}: ")
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("parts", [{"count": 2}, {"grid": (1, 2)}])
def test_outputs_with_rows_and_columns_are_not_cut(parts: dict[str, Any]) -> None:
    """Losses reduce over one row of outputs (model/part_loss.py)."""
    spec = network(Conv2dSpec(maps=2, kernel=3), inputs=(8, 8, 1))
    assert cut_network(spec).count == 1
    with pytest.raises(PlanError, match=r"outputs in one row, found nodes of shape \[6, 6, 2\]"):
        cut_network(spec, **parts)


FILE = """version: 1
name: cut
data: {train: {source: digits, split: train}, test: {source: digits, split: test}}
network:
  input: [8, 8, 1]
  layers:
    - LAYER
    - {type: dense, units: 10}
  loss: softmax
partition:
  PARTITION
optimizer: {type: sgd, batch_size: 10, rule: {type: sgd, rate: 0.1}}
stop: {epochs: 1}
"""
CONV_LINE = "{type: conv2d, maps: 2, kernel: 3}"
DENSE_LINE = "{type: dense, units: 12}"


@pytest.mark.parametrize(
    ("layer", "partition", "key", "words"),
    [
        (DENSE_LINE, "count: 40", "partition.count", "at most 12"),
        (DENSE_LINE, "grid: [2, 2]", "partition.grid", "count: 4"),
        (CONV_LINE, "grid: [7, 1]", "partition.grid", "at most 6 x 6"),
        (CONV_LINE, "count: 7", "partition.count", "do not fit"),
    ],
)
def test_a_bad_cut_is_an_error_of_the_file(
    layer: str, partition: str, key: str, words: str
) -> None:
    """`dbctl validate` and `train` exit 2 with the line (docs/experiments.md)."""
    text = FILE.replace("LAYER", layer).replace("PARTITION", partition)
    with pytest.raises(ExperimentError) as error:
        parse(text, file="cut.yaml")
    (problem,) = error.value.problems
    assert (problem.key, problem.line) == (key, 11)
    assert words in problem.message
    parse(text, overrides=["partition={count: 2}"])


def test_a_network_that_cannot_stand_hides_its_cut() -> None:
    text = FILE.replace("LAYER", "{type: conv2d, maps: 2, kernel: 9}")
    with pytest.raises(ExperimentError) as error:
        parse(text.replace("PARTITION", "count: 40"))
    assert [p.key for p in error.value.problems] == ["network.layers.0.kernel"]
