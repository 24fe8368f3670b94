"""Layers of filters, conv2d and local2d alike: against their definition, on boxes (ladder, rung 1),
their gradient (rung 2), windows and padding."""

from __future__ import annotations

import tracemalloc
from math import sqrt

import numpy as np
import pytest
from filter_cases import BATCH, boxes, cases, make_case, make_kernel, parameters_of, run
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import check_gradient, filter_zeros, filtered, filtered_back

from dbctl.model.initial import initial_values
from dbctl.model.layers.conv2d import Conv2dSpec
from dbctl.model.layers.dense import DenseSpec
from dbctl.model.layers.filters import FilterSpec
from dbctl.model.layers.local2d import Local2dSpec
from dbctl.model.layers.window import Axis
from dbctl.model.network import NetworkSpec, n_parameters, tensors
from dbctl.model.passes import Network
from dbctl.model.tensor import Initial
from dbctl.region import Box, Range

each_family = pytest.mark.parametrize(
    "family", [Conv2dSpec, Local2dSpec], ids=lambda family: family.type
)
Family = type[FilterSpec]


def spec_of(family: Family, kernel=3, **keys) -> FilterSpec:
    return family(type=family.type, maps=3, kernel=kernel, **keys)


@each_family
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_it_is_the_slow_twin(family: Family, data) -> None:
    case = data.draw(cases(family))
    found = run(case, case.whole)
    y = filtered(case.spec, case.parameters, case.x)
    gradients, dx = filtered_back(case.spec, case.parameters, case.x, dy=case.dy)
    np.testing.assert_allclose(found.y, y, rtol=0, atol=1e-12)
    for mine, expected in zip(found.gradients, gradients, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-11)
    np.testing.assert_allclose(found.dx, dx[found.seen.slices()], rtol=0, atol=1e-11)
    dx[found.seen.slices()] = 0
    assert not dx.any(), "a node outside the input box has a gradient"


@each_family
@settings(deadline=None)
@given(data=st.data())
def test_on_any_box_it_is_the_box_cut_from_the_layer_on_everything(family: Family, data) -> None:
    """Ladder, rung 1. Gradients: of a loss that only sees the box."""
    case = data.draw(cases(family))
    box = data.draw(boxes(case.whole))
    only = np.zeros_like(case.dy)
    only[box.slices()] = case.dy[box.slices()]
    whole, found = run(case._replace(dy=only), case.whole), run(case, box)
    np.testing.assert_allclose(found.y, whole.y[box.slices()], rtol=0, atol=1e-12)
    of_box = parameters_of(case._replace(parameters=whole.gradients), box)
    for mine, expected in zip(found.gradients, of_box, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-11)
    expected, mine = np.zeros_like(case.x), np.zeros_like(case.x)
    expected[whole.seen.slices()] = whole.dx
    mine[found.seen.slices()] = found.dx
    np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-11)


@each_family
@settings(deadline=None, max_examples=50)
@given(data=st.data(), counts=st.tuples(*[st.integers(1, 4)] * 3))
def test_what_boxes_that_cover_it_contribute_sums_up(family: Family, data, counts) -> None:
    """Uneven ones too. An untied weight is in one box only."""
    case = data.draw(cases(family))
    whole = run(case, case.whole)
    dx = np.zeros_like(case.x)
    gradients = [np.zeros_like(array) for array in case.parameters]
    for box in filter(None, case.whole.split(counts)):
        part = run(case, box)
        dx[part.seen.slices()] += part.dx
        where = tuple(box.slices()[axis] for axis in case.spec.tensor_axes)
        for total, own in zip(gradients, part.gradients, strict=True):
            total[where] += own
    np.testing.assert_allclose(dx[whole.seen.slices()], whole.dx, rtol=0, atol=1e-11)
    for total, expected in zip(gradients, whole.gradients, strict=True):
        np.testing.assert_allclose(total, expected, rtol=0, atol=1e-11)


@each_family
@pytest.mark.parametrize("rows", [1, 3, BATCH])
@pytest.mark.parametrize("padding", ["valid", "same"])
@pytest.mark.parametrize("activation", ["sigmoid", "tanh", "relu", "linear"])
def test_the_gradient_of_a_network_is_a_directional_difference(
    family, activation, padding, rows
) -> None:
    """Ladder, rung 2: two of them, so that one has no gradient by its input and one has."""
    layers = (
        spec_of(family, padding=padding, activation=activation),
        spec_of(family, (2, 3), stride=2, padding=padding, activation=activation),
        DenseSpec(units=4),
    )
    spec = NetworkSpec(input=(7, 8, 2), layers=layers, loss="softmax")
    network = Network(spec, batch_size=BATCH, dtype="float64")
    rng = np.random.default_rng(1)
    parameters = initial_values(spec, 1, Range(0, n_parameters(spec)), dtype="float64")
    parameters += rng.uniform(-0.1, 0.1, parameters.shape)
    x, labels = rng.standard_normal((112, rows)), rng.integers(0, 4, rows)
    gradient = np.full_like(parameters, np.nan)
    network.gradient(parameters, x, labels, out=gradient)

    def loss(at: np.ndarray) -> float:
        return network.gradient(at, x, labels, out=np.empty_like(at)) / rows

    check_gradient(loss, gradient, parameters)
    by_rows = np.full_like(gradient, np.nan)
    network.gradient(parameters, np.ascontiguousarray(x.T).T, labels, out=by_rows)
    np.testing.assert_allclose(by_rows, gradient, rtol=0, atol=1e-13)


@each_family
@pytest.mark.parametrize("padding", ["valid", "same"])
def test_a_short_mini_batch_leaves_nothing_behind(family: Family, padding: str) -> None:
    """A layer that has seen four rows gives two the bits that a new one does, and four again."""
    spec = spec_of(family, stride=2, padding=padding, activation="tanh")
    case = make_case(spec, (6, 7, 2), n=4)
    short = case._replace(x=case.x[..., :2].copy(), dy=case.dy[..., :2].copy())
    layer = make_kernel(case, case.whole)
    for each in (case, short, case):
        used, new = run(each, each.whole, layer=layer), run(each, each.whole)
        assert used.y.tobytes() == new.y.tobytes()
        assert used.dx.tobytes() == new.dx.tobytes()
        for mine, expected in zip(used.gradients, new.gradients, strict=True):
            assert mine.tobytes() == expected.tobytes()


@each_family
def test_without_dx_the_other_gradients_are_the_same(family: Family) -> None:
    case = make_case(spec_of(family, activation="tanh"), (6, 7, 2), n=3)
    first, inner = run(case, case.whole, first=True), run(case, case.whole)
    for mine, expected in zip(first.gradients, inner.gradients, strict=True):
        assert mine.tobytes() == expected.tobytes()


@each_family
def test_nodes_may_lie_in_larger_arrays(family: Family) -> None:
    """A border that no window reaches is left out of x and dx as a view."""
    case = make_case(spec_of(family, stride=2), (6, 8, 2), n=3)
    found, layer = run(case, case.whole), make_kernel(case, case.whole)
    seen = layer.input_box.slices()
    assert layer.input_box.shape == (5, 7, 2)
    out, dx = np.empty_like(case.dy), np.full_like(case.x, np.nan)
    gradients = [np.empty_like(array) for array in case.parameters]
    layer.forward(case.parameters, case.x[seen], out)
    layer.backward(
        case.parameters, case.x[seen], out, delta=case.dy, gradients=gradients, dx=dx[seen]
    )
    assert dx[seen].tobytes() == found.dx.tobytes()
    assert np.isnan(dx).sum() == dx.size - found.dx.size


@each_family
def test_a_step_makes_nothing_of_the_size_of_the_nodes(family: Family) -> None:
    """numpy casts a mask in pieces of 64 KiB; all the rest are views."""
    case = make_case(spec_of(family, 5, activation="relu"), (24, 24, 4), n=64)
    layer = make_kernel(case, case.whole, batch_size=64)
    run(case, case.whole, layer=layer)
    out, dx = np.empty_like(case.dy), np.empty_like(case.x)
    gradients = [np.empty_like(array) for array in case.parameters]
    tracemalloc.start()
    try:
        layer.forward(case.parameters, case.x, out)
        layer.backward(case.parameters, case.x, out, delta=case.dy, gradients=gradients, dx=dx)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200_000 < case.x.nbytes


@pytest.mark.parametrize(
    ("family", "whole", "of_box"),
    [
        (Conv2dSpec, [(3, 2, 2, 3), (3,)], [(2, 2, 2, 3), (2,)]),
        (Local2dSpec, [(5, 3, 3, 2, 3, 2), (5, 3, 3)], [(2, 3, 2, 2, 3, 2), (2, 3, 2)]),
    ],
    ids=["conv2d", "local2d"],
)
def test_tensors_of_a_network_and_of_a_box(family, whole, of_box) -> None:
    spec = NetworkSpec(
        input=(6, 7, 2),
        layers=(spec_of(family, (2, 3), stride=(1, 2)), DenseSpec(units=4)),
        loss="softmax",
    )
    assert [(t.name, t.shape) for t in tensors(spec)] == [
        ("layers.0.weight", whole[0]),
        ("layers.0.bias", whole[1]),
        ("layers.1.weight", (4, 45)),
        ("layers.1.bias", (4,)),
    ]
    box = Box((1, 0, 1), (3, 3, 3))
    assert spec.layers[0].input_box((6, 7, 2), box) == Box((1, 0, 0), (4, 7, 2))
    found = spec.layers[0].tensors((6, 7, 2), box)
    assert [t.shape for t in found] == of_box


@each_family
@pytest.mark.parametrize(
    ("activation", "init", "expected"),
    [
        ("relu", None, Initial("normal", sqrt(2 / 12))),
        ("sigmoid", None, Initial("uniform", sqrt(6 / (12 + 18)))),
        ("linear", 0.05, Initial("uniform", 0.05)),
    ],
)
def test_a_node_s_fan_in_is_its_window_whatever_the_box(family, activation, init, expected) -> None:
    spec = spec_of(family, (2, 3), activation=activation, init=init)
    weight, bias = spec.tensors((6, 7, 2), Box((1, 0, 1), (3, 3, 3)))
    assert (weight.initial, bias.initial) == (expected, Initial("zero"))


@pytest.mark.parametrize(
    ("inputs", "kernel", "stride", "padding", "outputs", "before"),
    [
        (28, 5, 1, "valid", 24, 0),
        (28, 5, 1, "same", 28, 2),
        (28, 4, 1, "same", 28, 1),  # the third zero comes after
        (28, 5, 2, "same", 14, 1),
        (7, 3, 2, "same", 4, 1),
        (7, 3, 3, "valid", 2, 0),
        (7, 3, 3, "same", 3, 1),
        (8, 2, 3, "same", 3, 0),
        (2, 5, 1, "same", 2, 2),
        (100, 10, 5, "valid", 19, 0),
    ],
)
def test_how_many_positions_there_are_and_where_they_begin(
    inputs, kernel, stride, padding, outputs, before
) -> None:
    axis = Axis(inputs, kernel, stride, padding)
    assert (axis.outputs, axis.before) == (outputs, before)
    if padding == "same":
        assert filter_zeros(inputs, kernel, stride) == before


@given(st.integers(1, 30), st.integers(1, 9), st.integers(1, 9), st.data())
def test_what_outputs_see_is_never_nothing_and_never_outside(inputs, kernel, stride, data) -> None:
    axis = Axis(inputs, kernel, stride, data.draw(st.sampled_from(["valid", "same"])))
    if not axis.fits:
        assert kernel > inputs
        return
    start = data.draw(st.integers(0, axis.outputs - 1))
    stop = data.draw(st.integers(start + 1, axis.outputs))
    places = [o * stride + i - axis.before for o in range(start, stop) for i in range(kernel)]
    inside = [place for place in places if 0 <= place < inputs]
    assert axis.seen(start, stop) == (min(inside), max(inside) + 1)
    assert axis.seen(start, start) == (0, 0)
