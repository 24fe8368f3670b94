"""A network in P partitions is the network in one (docs/architecture.md: rung 3 of the ladder)."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import COPIED, Batch, Parts, Uncut, make_batch, run, shares_of
from network_cases import LOSSES, filters, networks, pools

from dbctl.experiment.read import load
from dbctl.model.cut import NetworkCut, cut_fault, cut_network
from dbctl.model.layers.conv2d import Conv2dSpec
from dbctl.model.layers.dense import DenseSpec
from dbctl.model.layers.dropout import DropoutSpec
from dbctl.model.layers.lcn import LcnSpec
from dbctl.model.layers.local2d import Local2dSpec
from dbctl.model.layers.pool import PoolSpec
from dbctl.model.network import NetworkSpec, n_parameters, node_shapes, tensors
from dbctl.model.part import box_of_rows
from dbctl.model.part_layer import PartLayer, Post
from dbctl.model.passes import Measurement
from dbctl.roles.base import PlainBuffer

BATCH = 5
EXPERIMENTS = Path(__file__).parents[1] / "experiments"
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
GRIDS = [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (4, 1), (2, 3), (6, 1)]

seeds = st.integers(0, 999)


@st.composite
def cuts(draw: Any, specs: st.SearchStrategy[NetworkSpec]) -> NetworkCut:
    """Into 1, 2, 3, 4 or 6 partitions, by count or by grid, whatever of it is possible."""
    spec = draw(specs)
    wanted: list[dict[str, Any]] = [{"count": count} for count in (1, 2, 3, 4, 6)]
    wanted += [{"grid": grid} for grid in GRIDS]
    return cut_network(
        spec, **draw(st.sampled_from([w for w in wanted if cut_fault(spec, **w) is None]))
    )


def check_close(cut: NetworkCut, found: Any, expected: Any, *, dtype: str) -> None:
    """Tensor by tensor, to a tolerance of its largest entry.

    Where a tensor's sums cancel (a bias under a contrast normalisation), what is left of it is the
    rounding of terms as large as the rest of the gradient.
    """
    floor = 100 * float(np.finfo(dtype).eps) * np.abs(expected).max(initial=0)
    for tensor in tensors(cut.spec):
        part = tensor.range.slice()
        most = TOLERANCE[dtype] * np.abs(expected[part]).max(initial=0) + floor
        error = np.abs(found[part] - expected[part]).max(initial=0)
        assert error <= most, f"{tensor}: {error} of {most} in {cut.owned} {cut.ways}"


def check_measured(parts: Parts, batch: Batch, expected: Measurement, *, dtype: str) -> None:
    found = parts.measure(batch)
    close = {"rtol": TOLERANCE[dtype], "atol": 10 * TOLERANCE[dtype]}
    assert np.isclose(sum(m.loss_sum for m in found), expected.loss_sum, **close)
    labelled = batch.targets.ndim == 1
    for one in found:
        assert (one.correct, one.top5) == (expected.correct, expected.top5)
        np.testing.assert_allclose(one.scores, expected.scores, **close)
        if labelled:
            np.testing.assert_array_equal(one.predicted, expected.predicted)
        else:
            np.testing.assert_allclose(one.predicted, expected.predicted, **close)


def check_bounds(parts: Parts, uncut: Uncut, *, gradient: Any, shares: Any) -> None:
    """What the passes say that no element exceeds: finite, and true but for rounding."""
    assert np.abs(gradient).max(initial=0) <= uncut.network.bound * (1 + 1e-5) < np.inf
    for own, network in zip(shares_of(parts.cut, shares), parts.networks, strict=True):
        assert np.abs(own).max(initial=0) <= network.bound * (1 + 1e-5) < np.inf


def check_cut(cut: NetworkCut, *, n: int, seed: int, floats: bool, dtype: str) -> None:
    spec = cut.spec
    floats = floats and spec.loss != "softmax"
    parts = Parts(cut, batch_size=BATCH, dtype=dtype)
    uncut = Uncut(spec, batch_size=BATCH, dtype=dtype)
    # A whole mini-batch after a short one: in the same memory.
    for rows in (n, BATCH):
        batch = make_batch(spec, rows, seed=seed, dtype=dtype, floats=floats)
        loss, gradient = uncut.gradient(batch)
        found, shares, ran = parts.gradient(batch, seed=seed)
        check_bounds(parts, uncut, gradient=gradient, shares=shares)
        assert abs(found - loss) <= TOLERANCE[dtype] * abs(loss) + 10 * TOLERANCE[dtype]
        check_close(cut, shares, gradient, dtype=dtype)
        layers = range(len(spec.layers))
        states = rows * sum(cut.states_sent(layer) for layer in layers)
        sums = rows * sum(cut.sums_sent(layer) for layer in layers)
        phases = {"states": states, "back": states, "sums": sums, "deltas": sums}
        assert {phase: ran.of_phase(phase) for phase in phases} == phases
    check_measured(parts, batch, uncut.measure(batch), dtype=dtype)


@pytest.mark.parametrize(
    "first",
    [
        Conv2dSpec(maps=3, kernel=3),
        Local2dSpec(maps=3, kernel=3),
        DenseSpec(units=8, cut="outputs"),
        DenseSpec(units=8, cut="inputs"),
    ],
    ids=lambda spec: f"{spec.type} {getattr(spec, 'cut', '')}",
)
def test_each_layer_is_in_the_bound(first: Any) -> None:
    """Where nearly all of the gradient is by one node of the first layer: its outputs are 0."""
    spec = NetworkSpec(input=(6, 6, 2), layers=(first, DenseSpec(units=4)), loss="softmax")
    cut = cut_network(spec, count=2)
    parts, uncut = Parts(cut, batch_size=BATCH), Uncut(spec, batch_size=BATCH)
    batch = make_batch(spec, BATCH)
    batch.parameters[...] = 0
    [weight] = [tensor for tensor in tensors(spec) if tensor.name == "layers.1.weight"]
    batch.parameters[weight.range.slice()].reshape(weight.shape)[:, 0] = [1e6, 2e6, 3e6, 4e6]
    _, gradient = uncut.gradient(batch)
    _, shares, _ = parts.gradient(batch)
    check_bounds(parts, uncut, gradient=gradient, shares=shares)


@settings(max_examples=120, deadline=None)
@given(cut=cuts(networks()), n=st.integers(1, BATCH), seed=seeds, floats=st.booleans())
def test_any_network_in_any_cut_is_the_network(
    cut: NetworkCut, n: int, seed: int, floats: bool
) -> None:
    check_cut(cut, n=n, seed=seed, floats=floats, dtype="float64")


# The same examples each time: in float32 two maxima or an edge of relu may be a rounding apart.
@settings(max_examples=30, deadline=None, derandomize=True)
@given(cut=cuts(networks()), n=st.integers(1, BATCH), seed=seeds, floats=st.booleans())
def test_in_float32(cut: NetworkCut, n: int, seed: int, floats: bool) -> None:
    check_cut(cut, n=n, seed=seed, floats=floats, dtype="float32")


# ------------------------------------------------------------------- where arithmetic is exact

exact_layers = st.one_of(
    pools(("max", "mean")).map(lambda p: _edge_to_edge(p)),
    filters(Conv2dSpec, ("linear", "relu")),
    filters(Local2dSpec, ("linear", "relu")),
    st.just(DropoutSpec(rate=0.5)),
)


def _edge_to_edge(pool: PoolSpec) -> PoolSpec:
    """Means of 4. No norms: their gradient x dy / y is rounded, and sums of it may differ."""
    size = (2, 2) if pool.kind == "mean" else pool.size
    return PoolSpec(kind=pool.kind, size=size, stride=pool.stride)


@settings(max_examples=60, deadline=None)
@given(
    cut=cuts(networks(exact_layers, losses=("squared",), activations=("linear", "relu"))),
    n=st.sampled_from([1, 2, 4]),
    seed=seeds,
)
def test_bit_for_bit_where_no_sum_is_rounded(cut: NetworkCut, n: int, seed: int) -> None:
    """Whole numbers: whatever the order of the sums, nothing may differ in any bit."""
    rng = np.random.default_rng(seed)
    shapes = node_shapes(cut.spec)
    batch = Batch(
        rng.integers(-2, 3, n_parameters(cut.spec)).astype("float64"),
        rng.integers(-3, 4, (prod(shapes[0]), n)).astype("float64"),
        rng.integers(0, prod(shapes[-1]), n),
        make_batch(cut.spec, n, seed=seed).draw,
    )
    loss, gradient = Uncut(cut.spec, batch_size=BATCH).gradient(batch)
    found, shares, _ = Parts(cut, batch_size=BATCH).gradient(batch, seed=seed)
    assert found == loss
    np.testing.assert_array_equal(shares, gradient)


@pytest.mark.parametrize("kind", ["max", "mean", "l2"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_pooling_is_exact(kind: Any, count: int) -> None:
    """Pooled nodes have the bits of the whole layer: weights that pick a node show it."""
    spec = NetworkSpec(
        input=(12, 9, 1),
        layers=(PoolSpec(kind=kind, size=3, stride=(2, 3)), DenseSpec(units=15, cut="outputs")),
        loss="squared",
    )
    weight = np.eye(15)
    batch = make_batch(spec, BATCH)
    batch = batch._replace(parameters=np.concatenate([weight.ravel(), np.zeros(15)]))
    _, gradient = Uncut(spec, batch_size=BATCH).gradient(batch)
    cut = cut_network(spec, count=count)
    assert cut.states_sent(1) > 0
    _, found, _ = Parts(cut, batch_size=BATCH).gradient(batch)
    bias = tensors(spec)[1].range.slice()
    np.testing.assert_array_equal(found[bias], gradient[bias])


# --------------------------------------------------------------------------- cases of their own


def every_family(loss: Any = "softmax") -> NetworkSpec:
    """28 rows over 3 partitions, and 7 units over 2."""
    return NetworkSpec(
        input=(28, 6, 1),
        layers=(
            Conv2dSpec(maps=2, kernel=3, padding="same", activation="tanh"),
            PoolSpec(kind="max", size=2),
            DropoutSpec(rate=0.5),
            Local2dSpec(maps=2, kernel=(3, 2), activation="sigmoid"),
            LcnSpec(window=3),
            PoolSpec(kind="l2", size=(2, 1), stride=1),
            DenseSpec(units=7, activation="relu"),
            DenseSpec(units=5, activation="sigmoid"),
            DenseSpec(units=3),
        ),
        loss=loss,
    )


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("parts", [2, 3, 4, 6, (3, 1), (1, 2), (2, 3), (5, 2)])
def test_uneven_sizes(parts: Any, loss: Any) -> None:
    given_as = {"count": parts} if isinstance(parts, int) else {"grid": parts}
    cut = cut_network(every_family(loss), **given_as)
    for floats in (False, True):
        check_cut(cut, n=3, seed=1, floats=floats, dtype="float64")


def test_more_partitions_than_outputs_of_the_last_layer() -> None:
    layers = (DenseSpec(units=11, activation="tanh"), DenseSpec(units=3))
    for ways in (("outputs", "outputs"), ("inputs", "outputs"), ("outputs", "inputs")):
        cut_layers = tuple(
            DenseSpec(units=layer.units, activation=layer.activation, cut=way)
            for layer, way in zip(layers, ways, strict=True)
        )
        cut = cut_network(NetworkSpec(input=(4,), layers=cut_layers, loss="softmax"), count=11)
        assert sum(not box for box in cut.owned[-1]) == 8
        check_cut(cut, n=2, seed=0, floats=False, dtype="float64")


def test_the_same_mask_however_it_is_cut() -> None:
    """Dropout: the gradient by the bias above is what is kept of it, so the mask shows exactly."""
    spec = NetworkSpec(
        input=(6, 5, 2), layers=(DropoutSpec(rate=0.5), DenseSpec(units=4)), loss="squared"
    )
    batch = make_batch(spec, BATCH, floats=True)
    batch = batch._replace(x=np.ones_like(batch.x), parameters=np.zeros_like(batch.parameters))
    uncut = Uncut(spec, batch_size=BATCH)
    _, whole = uncut.gradient(batch)
    for kinds in ({"count": 3}, {"grid": (2, 2)}, {"grid": (3, 1)}):
        _, found, _ = Parts(cut_network(spec, **kinds), batch_size=BATCH).gradient(batch)
        np.testing.assert_allclose(found, whole, rtol=1e-12)
    _, other = uncut.gradient(batch._replace(draw=None))
    assert np.abs(other - whole).max() > 0.1


def test_shared_weights_have_one_owner_and_are_given_once() -> None:
    """Each pass: weights to every other partition, partial gradients back; counted apart."""
    spec = every_family()
    cut = cut_network(spec, grid=(3, 1))
    owner = cut.owner_of_shared(0)
    assert owner is not None
    held = [p.partition for p in cut.pieces if p.layer == 0]
    assert held == [owner, owner]
    batch = make_batch(spec, BATCH)
    _, _, ran = Parts(cut, batch_size=BATCH).gradient(batch)
    n_shared = sum(len(t.range) for t in tensors(spec) if t.name.startswith("layers.0."))
    assert ran.of_phase("weights") == ran.of_phase("shares") == 2 * n_shared
    senders = {s for (key, s, _), _ in ran.sent.items() if key.phase == "weights"}
    assert senders == {owner}


def test_softmax_costs_two_reductions() -> None:
    """One number a row, then two; logistic and squared take none (model/part_loss.py)."""
    for loss, numbers in (("softmax", 3), ("logistic", 0), ("squared", 0)):
        spec = NetworkSpec(input=(4,), layers=(DenseSpec(units=9),), loss=loss)  # type: ignore[arg-type]
        _, _, ran = Parts(cut_network(spec, count=3), batch_size=BATCH).gradient(
            make_batch(spec, BATCH)
        )
        assert ran.of_phase("max") + ran.of_phase("total") == numbers * BATCH * 3 * 2
        assert sum(ran.sent.values()) == ran.of_phase("max") + ran.of_phase("total")


def test_nothing_depends_on_who_is_first() -> None:
    cut = cut_network(every_family(), count=4)
    parts, batch = Parts(cut, batch_size=BATCH), make_batch(cut.spec, BATCH)
    first_loss, first, _ = parts.gradient(batch, seed=0)
    for seed in range(1, 6):
        loss, found, _ = parts.gradient(batch, seed=seed)
        assert loss == first_loss
        assert found.tobytes() == first.tobytes()


def test_what_others_wait_for_is_given_first() -> None:
    """Between two layers cut by inputs and by outputs: gradients by inputs before by weights."""
    layers = (DenseSpec(units=6, cut="inputs"), DenseSpec(units=6, cut="outputs"))
    cut = cut_network(NetworkSpec(input=(4,), layers=layers, loss="squared"), count=2)
    parts, batch = Parts(cut, batch_size=BATCH), make_batch(cut.spec, BATCH)
    shares = shares_of(cut, batch.parameters)
    outs = [np.full_like(share, np.nan) for share in shares]
    weight = next(p for p in cut.pieces_of(0) if p.layer == 1 and p.tensor.kind == "weight")
    seen = []

    def watched(p: int) -> Any:
        network = parts.networks[p]
        x = box_of_rows(batch.x, cut.spec.input, network.input_box)
        work = network.gradient(shares[p], x, batch.targets, out=outs[p])
        answer = None
        while True:
            try:
                item = work.send(answer)
            except StopIteration as end:
                return end.value
            if p == 0:
                done = not np.isnan(outs[0][weight.range.slice()]).any()
                seen.append((type(item).__name__, item.key.phase, done))
            answer = yield item

    run([watched(0), watched(1)])
    back = [(kind, done) for kind, phase, done in seen if phase == "back"]
    assert back == [("Give", False), ("Take", True)]


def test_numbers_that_are_not_finite_raise_nothing_and_leave_no_trace() -> None:
    """They show in the loss; how numpy reports is as it was while others compute."""
    spec = NetworkSpec(
        input=(4,),
        layers=(DenseSpec(units=6, activation="relu"), DenseSpec(units=3)),
        loss="softmax",
    )
    cut = cut_network(spec, count=2)
    batch = make_batch(spec, BATCH)
    batch.parameters[...] = 1e200
    parts = Parts(cut, batch_size=BATCH)
    before = np.geterr()
    loss, _, _ = parts.gradient(batch)
    assert not np.isfinite(loss)
    assert np.geterr() == before
    network = parts.networks[0]
    x = box_of_rows(batch.x, spec.input, network.input_box)
    work = network.gradient(
        shares_of(cut, batch.parameters)[0], x, batch.targets, out=np.empty(len(cut.span(0)))
    )
    next(work)
    assert np.geterr() == before
    work.close()


def test_a_partition_asks_for_its_own_box_and_its_own_vector() -> None:
    cut = cut_network(every_family(), grid=(3, 1))
    parts = Parts(cut, batch_size=BATCH)
    network, batch = parts.networks[1], make_batch(cut.spec, BATCH)
    assert network.n_parameters == len(cut.span(1))
    assert network.input_box.shape == (11, 6, 1)  # 9 or 10 rows, and one on each side
    share = shares_of(cut, batch.parameters)[1]
    whole = batch.x.reshape(*cut.spec.input, BATCH)
    with pytest.raises(AssertionError, match="not"):
        next(network.measure(share, whole, batch.targets))
    x = box_of_rows(batch.x, cut.spec.input, network.input_box)
    with pytest.raises(AssertionError, match="not"):
        next(network.measure(batch.parameters, x, batch.targets))
    wide = np.concatenate([x, x], axis=-1)
    with pytest.raises(AssertionError, match="a batch of 5"):
        next(network.measure(share, wide, batch.targets))


def post_of(batch_size: int) -> Post:
    return Post(PlainBuffer, batch_size=batch_size, dtype="float64")


def test_whole_rows_are_sent_from_where_they_lie_and_columns_are_copied() -> None:
    """Also of a short mini-batch, whose nodes lie closer together."""
    layers = (Conv2dSpec(maps=2, kernel=3, padding="same"), LcnSpec(window=3), DenseSpec(units=4))
    spec = NetworkSpec(input=(12, 6, 1), layers=layers, loss="softmax")
    for grid, copies in (((3, 1), False), ((1, 3), True)):
        parts = Parts(cut_network(spec, grid=grid), batch_size=BATCH)
        for n in (BATCH, BATCH - 2):
            loss, gradient, _ = parts.gradient(make_batch(spec, n))
            wanted, whole = Uncut(spec, batch_size=BATCH).gradient(make_batch(spec, n))
            assert np.allclose(loss, wanted)
            assert np.allclose(gradient, whole)
        assert copied_phases(parts) == (COPIED if copies else set())


def copied_phases(parts: Parts) -> set[str]:
    """Of those whose boxes need not be copied."""
    return {key.phase for network in parts.networks for key, _ in network._post._boxes} & COPIED


@pytest.mark.parametrize("name", ["fashion-local", "figure3"])
def test_of_cuts_of_equal_traffic_the_one_is_taken_whose_boxes_need_no_copy(name: str) -> None:
    spec = load(str(EXPERIMENTS / f"{name}.yaml")).network
    parts = Parts(cut_network(spec, count=2), batch_size=2)
    _, _, ran = parts.gradient(make_batch(spec, 2))
    assert ran.of_phase("states") > 0
    assert copied_phases(parts) == set()


def test_a_pass_that_only_measures_makes_no_memory_for_gradients() -> None:
    spec = load(str(EXPERIMENTS / "fashion-local.yaml")).network
    parts = Parts(cut_network(spec, count=2), batch_size=2)
    parts.measure(make_batch(spec, 2))
    layers = [layer for network in parts.networks for layer in network._layers[1:-1]]
    assert any(layer.inputs.outbox is not None for layer in layers)
    assert all(layer.dx.outbox is None for layer in layers)
    parts.gradient(make_batch(spec, 2))
    assert any(layer.dx.outbox is not None for layer in layers)


@settings(max_examples=60, deadline=None)
@given(cuts(networks()))
def test_outputs_are_written_among_the_next_inputs_where_all_are_needed(cut: NetworkCut) -> None:
    """`in_place` exactly where all that is owned is needed; it may have strides there."""
    for index in range(1, len(cut.spec.layers)):
        for partition in range(cut.count):
            layer = PartLayer(cut, index, partition, batch_size=2, dtype="float64", post=post_of(2))
            mine = cut.owned[index][partition]
            part = np.zeros((*layer.need.shape, 2))[layer.own.in_needed]
            assert layer.own.in_place == (part.size == 2 * len(mine) > 0)
            assert layer.is_local == (layer.need == mine)


def test_a_layer_cut_by_its_inputs_takes_nothing_and_has_what_every_layer_has() -> None:
    layers = (DenseSpec(units=64), DenseSpec(units=2))
    spec = NetworkSpec(input=(8,), layers=layers, loss="softmax")
    cut = cut_network(spec, count=2)
    assert cut.ways[1] == "inputs"
    for partition in range(2):
        layer = PartLayer(cut, 1, partition, batch_size=2, dtype="float64", post=post_of(2))
        assert layer.by_inputs is not None
        assert layer.takes == {}
        assert layer.dx.rows(2).shape == (*layer.need.shape, 2)
        assert layer.inputs.rows(2).size == 0, "they lie where they were computed"


def test_box_of_rows_is_a_copy_of_its_own_box() -> None:
    cut = cut_network(every_family(), grid=(3, 1))
    x = np.arange(28 * 6 * 2, dtype="float32").reshape(28 * 6, 2)
    box = cut.needs(0, 2)
    found = box_of_rows(x, (28, 6, 1), box)
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, x.reshape(28, 6, 1, 2)[box.slices()])
