"""What a cut costs: counted exactly, against brute force over edges and against the passes."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from dbctl.experiment.read import load
from dbctl.model.costs import Share, costs_of, imbalance, nodes_kept
from dbctl.model.cut import NetworkCut, cut_network
from dbctl.model.layers.conv2d import Conv2dSpec
from dbctl.model.layers.dense import DenseSpec
from dbctl.model.layers.dropout import DropoutSpec
from dbctl.model.layers.lcn import LcnSpec
from dbctl.model.layers.local2d import Local2dSpec
from dbctl.model.layers.pool import PoolSpec
from dbctl.model.network import LossName, NetworkSpec, tensors
from dbctl.model.part import PartNetwork
from dbctl.model.passes import Network
from dbctl.region import Box
from dbctl.roles.base import PlainBuffer

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


def dense(*units: int, loss: LossName = "squared", cut: str | None = "outputs") -> NetworkSpec:
    layers = tuple(DenseSpec(units=n, cut=cut) for n in units[1:])  # type: ignore[arg-type]
    return NetworkSpec(input=(units[0],), layers=layers, loss=loss)


LOCAL = NetworkSpec(
    input=(9, 8, 2),
    layers=(
        Local2dSpec(maps=3, kernel=3),
        PoolSpec(kind="l2", size=2, stride=1),
        LcnSpec(window=3),
        Conv2dSpec(maps=2, kernel=2),
        DropoutSpec(),
        DenseSpec(units=4),
    ),
    loss="softmax",
)


def test_flops_of_a_dense_network_are_six_a_weight_but_two_less_in_the_first_layer() -> None:
    costs = costs_of(cut_network(dense(5, 7, 3)))
    assert [layer.total("flops") for layer in costs] == [2 * 2 * 5 * 7, 3 * 2 * 7 * 3, 0]


def test_the_nodes_kept_are_those_of_the_buffers_that_passes_use() -> None:
    """Of a whole network its outputs; of a part also what it needs of others."""
    for spec in (dense(5, 7, 3), LOCAL):
        whole = Network(spec, batch_size=1)
        assert nodes_kept(cut_network(spec), 0) == sum(b.rows(1).size for b in whole._outputs)
    for spec, count in product((dense(8, 12, 9, 4), dense(9, 7, 6, cut="inputs"), LOCAL), (2, 3)):
        cut = cut_network(spec, count=count)
        for partition in range(count):
            part = PartNetwork(cut, partition, batch_size=1, outbox=PlainBuffer)
            own = [layer.box for layer in part._layers]
            kept = len(own[-1])
            for below, layer in zip(own, part._layers[1:], strict=False):
                inputs = 0 if layer.is_local else layer.inputs.rows(1).size
                kept += inputs if layer.own.in_place and inputs else len(below) + inputs
            assert nodes_kept(cut, partition) == kept, (spec, partition)


def test_flops_of_filters_and_windows() -> None:
    """Counted by hand: filters 2 x window x maps below a node, pools one a position."""
    shape = (9, 8, 2)
    box = Box((1, 0, 0), (3, 4, 3))
    assert Local2dSpec(maps=3, kernel=3).flops(shape, box) == 2 * len(box) * 9 * 2
    assert Conv2dSpec(maps=3, kernel=(3, 2)).flops(shape, box) == 2 * len(box) * 6 * 2
    assert PoolSpec(kind="max", size=(2, 3)).flops(shape, box) == len(box) * 6
    assert DropoutSpec().flops(shape, box) == len(box)
    # One position of one map, window 1: a sum, then v, v^2 and its sum, y, and two products by 1.
    assert LcnSpec(window=1).flops((4, 4, 1), Box((0, 0, 0), (1, 1, 1))) == 1 + 3 + 1 + 8


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_partitions_add_up_to_the_whole(count: int) -> None:
    """Nodes and parameters once; operations of dense and filter layers the same, whoever does."""
    whole, parts = costs_of(cut_network(LOCAL)), costs_of(cut_network(LOCAL, count=count))
    for one, cut in zip(whole, parts, strict=True):
        assert one.total("nodes") == cut.total("nodes")
        assert one.total("parameters") == cut.total("parameters")
        if "lcn" not in one.name:  # borders are computed on both sides
            assert one.total("flops") == cut.total("flops")
    n_parameters = tensors(LOCAL)[-1].range.stop
    assert sum(layer.total("parameters") for layer in parts) == n_parameters


def test_nothing_is_sent_in_one_partition() -> None:
    for layer in costs_of(cut_network(LOCAL)):
        assert layer.rounds == 0
        assert layer.shares[0].bytes_sent == layer.shares[0].messages == 0


def test_the_first_layer_is_never_cheaper_for_lack_of_inputs() -> None:
    """Inputs come from the data: nothing is sent below layer 0 (model/cut.py)."""
    first = costs_of(cut_network(dense(6, 8, 4), count=2))[0]
    assert first.total("states") == first.total("sums") == 0


def crossing(cut: NetworkCut, layer: int) -> list[int]:
    """Brute force, edge by edge: nodes with an edge into another partition, once a partition.

    Forward the owner sends each; backward who computed with it sends its gradient back.
    """
    spec, shape = cut.spec.layers[layer], cut.shapes[layer]
    sent = [0] * cut.count
    for receiver, box in enumerate(cut.owned[layer + 1]):
        seen = set()
        for node in product(*(range(a, b) for a, b in box.sides())):
            one = Box(node, tuple(i + 1 for i in node))
            need = spec.input_box(shape, one)
            seen |= set(product(*(range(a, b) for a, b in need.sides())))
        for node in seen:
            owner = next(
                p
                for p, own in enumerate(cut.owned[layer])
                if all(a <= i < b for i, (a, b) in zip(node, own.sides(), strict=True))
            )
            if owner != receiver:
                sent[owner] += 1
                sent[receiver] += 1
    return sent


@pytest.mark.parametrize("count", [2, 3, 4])
def test_states_are_nodes_with_crossing_edges_once_a_destination(count: int) -> None:
    """Paper A, section 3: only those are sent, and to one machine at most once a phase."""
    cut = cut_network(LOCAL, count=count)
    costs = costs_of(cut)
    for layer in range(1, len(LOCAL.layers)):
        expected = crossing(cut, layer) if cut.ways[layer] == "outputs" else [0] * count
        assert [share.states for share in costs[layer].shares] == expected


def test_partial_sums_of_a_dense_layer_cut_by_its_inputs() -> None:
    """9 inputs and 7 outputs over 2: sums of the other's outputs up, own gradients down."""
    cut = cut_network(dense(4, 9, 7, cut="inputs"), count=2)
    layer = costs_of(cut)[1]
    assert [len(box) for box in cut.owned[2]] == [3, 4]
    assert [share.sums for share in layer.shares] == [4 + 3, 3 + 4]
    assert layer.total("states") == 0
    assert layer.total("sums") == 2 * cut.sums_sent(1)
    assert [share.messages for share in layer.shares] == [2, 2]
    assert layer.rounds == 2


def test_shared_weights_go_from_their_owner_and_their_gradients_back() -> None:
    """3 partitions: the owner sends the weights twice, each other its gradients once."""
    cut = cut_network(LOCAL, count=3)
    owner, size = cut.owner_of_shared(3), 2 * 2 * 2 * 3 + 2
    shared = [share.shared for share in costs_of(cut)[3].shares]
    assert shared == [2 * size if p == owner else size for p in range(3)]


@pytest.mark.parametrize(("loss", "numbers"), [("softmax", 3), ("logistic", 0), ("squared", 0)])
def test_softmax_costs_three_numbers_a_row_and_partner(loss: LossName, numbers: int) -> None:
    costs = costs_of(cut_network(dense(4, 6, 6, loss=loss), count=3))
    assert [share.sums for share in costs[-1].shares] == [2 * numbers] * 3
    assert costs[-1].rounds == (2 if numbers else 0)


def test_imbalance_is_the_greatest_share_over_the_mean() -> None:
    cut = cut_network(dense(4, 7, loss="squared"), count=2)
    assert imbalance(costs_of(cut)) == pytest.approx(4 / 3.5)
    assert imbalance(costs_of(cut_network(dense(4, 7)))) == 1.0


def test_the_paper_s_speech_network_costs_what_its_parameters_say() -> None:
    """Paper A, section 5: 41,777,152 parameters; six operations a weight, four in layer 0."""
    costs = costs_of(cut_network(load(str(EXPERIMENTS / "speech-paper.yaml")).network, count=8))
    assert sum(layer.total("parameters") for layer in costs) == 41_777_152
    weights = 41_777_152 - 4 * 2560 - 8192
    assert sum(layer.total("flops") for layer in costs) == 6 * weights - 2 * 440 * 2560


def test_extremes_and_bytes() -> None:
    layer = costs_of(cut_network(dense(4, 7), count=2))[0]
    assert layer.extremes("nodes") == (3, 4)
    assert Share(states=3, sums=2, shared=9).bytes_sent == 20
