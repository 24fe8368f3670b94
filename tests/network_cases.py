"""Random networks of all layer families: what the tests of cut networks share."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from dbctl.model.layers.conv2d import Conv2dSpec
from dbctl.model.layers.dense import DenseSpec
from dbctl.model.layers.dropout import DropoutSpec
from dbctl.model.layers.lcn import LcnSpec
from dbctl.model.layers.local2d import Local2dSpec
from dbctl.model.layers.pool import PoolSpec
from dbctl.model.network import LayerSpec, NetworkSpec

ACTIVATIONS = ("sigmoid", "tanh", "relu", "linear")
LOSSES = ("softmax", "logistic", "squared")

pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


def dense(
    units: st.SearchStrategy[int], activations: tuple[str, ...] = ACTIVATIONS
) -> st.SearchStrategy[DenseSpec]:
    return st.builds(
        DenseSpec,
        units=units,
        activation=st.sampled_from(activations),
        cut=st.sampled_from([None, "outputs", "inputs"]),
    )


def filters(
    family: type[Conv2dSpec] | type[Local2dSpec], activations: tuple[str, ...] = ACTIVATIONS
) -> st.SearchStrategy[Any]:
    return st.builds(
        family,
        maps=st.integers(1, 3),
        kernel=pairs,
        stride=st.tuples(st.integers(1, 2), st.integers(1, 2)),
        padding=st.sampled_from(["valid", "same"]),
        activation=st.sampled_from(activations),
    )


def pools(kinds: tuple[str, ...] = ("max", "mean", "l2")) -> st.SearchStrategy[PoolSpec]:
    return st.builds(
        PoolSpec,
        kind=st.sampled_from(kinds),
        size=pairs,
        stride=st.one_of(st.none(), st.tuples(st.integers(1, 3), st.integers(1, 2))),
    )


lcns = st.builds(LcnSpec, window=st.sampled_from([1, 3, 5]))
dropouts = st.builds(DropoutSpec, rate=st.sampled_from([0.3, 0.5]))

spatial: st.SearchStrategy[LayerSpec] = st.one_of(
    filters(Conv2dSpec), filters(Local2dSpec), pools(), lcns, dropouts
)


@st.composite
def networks(
    draw: Any,
    layers: st.SearchStrategy[LayerSpec] = spatial,
    *,
    losses: tuple[str, ...] = LOSSES,
    activations: tuple[str, ...] = ACTIVATIONS,
) -> NetworkSpec:
    """Up to three layers of positions that fit, up to two dense ones, and the outputs."""
    shape: tuple[int, ...] = (draw(st.integers(3, 9)), draw(st.integers(2, 8)))
    shape = (*shape, draw(st.integers(1, 2)))
    if draw(st.integers(0, 3)) == 0:
        shape = (draw(st.integers(1, 11)),)
    inputs, found = shape, []
    for layer in draw(st.lists(layers, max_size=3)):
        if layer.fault(shape) is None:
            found.append(layer)
            shape = layer.output_shape(shape)
    found += draw(st.lists(dense(st.integers(1, 13), activations), max_size=2))
    loss = draw(st.sampled_from(losses))
    last = activations if loss == "squared" else ("linear",)
    found.append(draw(dense(st.integers(2, 11), last)))
    return NetworkSpec(input=inputs, layers=tuple(found), loss=loss)
