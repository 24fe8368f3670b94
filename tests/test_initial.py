"""Initial values: a function of seed, tensor and index, the same for any cut."""

from __future__ import annotations

from hashlib import blake2b
from itertools import pairwise
from math import cos, log, pi, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbctl.model import initial
from dbctl.model.initial import initial_values
from dbctl.model.layers.dense import DenseSpec
from dbctl.model.network import NetworkSpec, n_parameters, tensors
from dbctl.region import Range

SPEC = NetworkSpec(
    input=(5, 3, 2),
    layers=(
        DenseSpec(units=40, activation="relu"),
        DenseSpec(units=30, activation="sigmoid"),
        DenseSpec(units=7, init=0.25),
    ),
    loss="softmax",
)
SIZE = n_parameters(SPEC)
WHOLE = initial_values(SPEC, 7, Range(0, SIZE))
GOLDEN = [0.5838411450386047, 0.28295621275901794, -0.03561026602983475]  # of each weight, 0


@settings(deadline=None)
@given(st.lists(st.integers(0, SIZE), max_size=12), st.sampled_from([5, 64, initial.BLOCK]))
def test_any_cut_is_the_slice_of_the_whole_bit_for_bit(cuts: list[int], block: int) -> None:
    edges = [0, *sorted(cuts), SIZE]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial, "BLOCK", block)
        parts = [initial_values(SPEC, 7, Range(a, b)) for a, b in pairwise(edges)]
    assert np.concatenate(parts).tobytes() == WHOLE.tobytes()


def test_element_i_is_made_of_its_own_words_of_its_tensors_stream() -> None:
    """The definition, one element at a time in plain Python."""
    values = initial_values(SPEC, 7, Range(0, SIZE), dtype="float64")
    for tensor in tensors(SPEC):
        if tensor.kind == "bias":
            continue
        key = int.from_bytes(
            blake2b(f"7/{tensor.name}".encode(), digest_size=16).digest(), "little"
        )
        words = np.random.Philox(key=key).random_raw(2 * 50)
        u = [int(word >> 11) * 2.0**-53 for word in words]
        scale = tensor.initial.scale
        for i in range(50):
            got = values[tensor.range.start + i]
            if tensor.initial.distribution == "uniform":
                expected = (2 * u[i] - 1) * scale
            else:
                expected = scale * sqrt(-2 * log(1 - u[2 * i])) * cos(2 * pi * u[2 * i + 1])
            assert got == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_golden_values_so_that_a_run_can_be_repeated_by_a_later_version() -> None:
    starts = [tensor.range.start for tensor in tensors(SPEC)[::2]]
    assert [WHOLE[start].item() for start in starts] == pytest.approx(GOLDEN, rel=1e-6)


def test_biases_are_zero_and_weights_have_the_papers_spread() -> None:
    spec = NetworkSpec(
        input=(300,),
        layers=(
            DenseSpec(units=200, activation="relu"),
            DenseSpec(units=100, activation="tanh"),
            DenseSpec(units=300, init=0.05),
            DenseSpec(units=100, init="he"),
        ),
        loss="squared",
    )
    values = initial_values(spec, 3, Range(0, n_parameters(spec)))
    of = {t.name: values[t.range.slice()].astype(float) for t in tensors(spec)}
    assert all(not of[f"layers.{i}.bias"].any() for i in range(4))
    he, glorot = of["layers.0.weight"], of["layers.1.weight"]
    assert he.std() == pytest.approx(sqrt(2 / 300), rel=0.02)
    assert np.mean(np.abs(he) < he.std()) == pytest.approx(0.6827, abs=0.01)  # normal
    half_width = sqrt(6 / (200 + 100))
    assert np.abs(glorot).max() == pytest.approx(half_width, rel=1e-3)
    assert np.mean(np.abs(glorot) < half_width / 2) == pytest.approx(0.5, abs=0.02)  # uniform
    assert np.abs(of["layers.2.weight"]).max() == pytest.approx(0.05, rel=1e-3)
    assert of["layers.3.weight"].std() == pytest.approx(sqrt(2 / 300), rel=0.02)
    assert all(abs(v.mean()) < 4 * v.std() / sqrt(v.size) for n, v in of.items() if "weight" in n)


def test_seeds_and_tensors_have_streams_of_their_own() -> None:
    other = initial_values(SPEC, 8, Range(0, SIZE))
    first, second = (t.range for t in tensors(SPEC)[0:3:2])
    assert not np.any(other[first.slice()] == WHOLE[first.slice()])
    a, b = WHOLE[first.slice()][: len(second)], WHOLE[second.slice()][: len(first)]
    n = min(len(a), len(b))
    assert abs(np.corrcoef(a[:n], b[:n])[0, 1]) < 4 / sqrt(n)
