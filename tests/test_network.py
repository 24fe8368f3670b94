"""Shapes and the flat layout of parameters."""

from __future__ import annotations

import subprocess
import sys

from dbctl.model.layers.dense import DenseSpec
from dbctl.model.network import NetworkSpec, n_parameters, node_shapes, tensors
from dbctl.region import Range


def test_the_speech_network_of_paper_a_section_5_has_41_777_152_parameters() -> None:
    hidden = [DenseSpec(units=2560, activation="sigmoid")] * 4
    spec = NetworkSpec(input=(440,), layers=(*hidden, DenseSpec(units=8192)), loss="softmax")
    assert n_parameters(spec) == 41_777_152


def test_weight_then_bias_layer_by_layer_cover_the_vector_once() -> None:
    spec = NetworkSpec(
        input=(8, 8, 1), layers=(DenseSpec(units=16), DenseSpec(units=10)), loss="softmax"
    )
    assert node_shapes(spec) == ((8, 8, 1), (16,), (10,))
    assert [(t.name, t.kind, t.shape, t.range) for t in tensors(spec)] == [
        ("layers.0.weight", "weight", (16, 64), Range(0, 1024)),
        ("layers.0.bias", "bias", (16,), Range(1024, 1040)),
        ("layers.1.weight", "weight", (10, 16), Range(1040, 1200)),
        ("layers.1.bias", "bias", (10,), Range(1200, 1210)),
    ]
    assert n_parameters(spec) == 1210


def test_specs_and_layout_import_no_numpy() -> None:
    """`dbctl --help` and validation stay light."""
    code = (
        "import sys, dbctl.model.network, dbctl.model.layers.dense\n"
        "assert not {'numpy', 'zmq', 'click'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
