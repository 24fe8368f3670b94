"""What is locally connected layers' own: untied filters. What they share is in test_filters.py."""

from __future__ import annotations

from math import prod

import numpy as np
from filter_cases import make_case, run

from dbctl.model.layers.conv2d import Conv2dSpec
from dbctl.model.layers.local2d import Local2dSpec
from dbctl.model.network import NetworkSpec, n_parameters
from dbctl.region import Box


def test_with_the_same_filters_everywhere_it_is_a_convolution() -> None:
    keys = {"maps": 3, "kernel": (2, 3), "stride": (1, 2), "padding": "same"}
    conv = make_case(Conv2dSpec(**keys), (6, 7, 2), n=3)
    weight, bias = conv.parameters
    inputs = (*conv.whole.shape[:2], 1)
    tied = [np.tile(weight.transpose(0, 2, 3, 1), (*inputs, 1, 1, 1)), np.tile(bias, inputs)]
    tied = [array.reshape(*conv.whole.shape, *array.shape[3:]) for array in tied]
    local = conv._replace(spec=Local2dSpec(**keys), parameters=tied)
    shared, untied = run(conv, conv.whole), run(local, local.whole)
    np.testing.assert_allclose(untied.y, shared.y, rtol=0, atol=1e-12)
    np.testing.assert_allclose(untied.dx, shared.dx, rtol=0, atol=1e-12)
    summed = untied.gradients[0].sum(axis=(0, 1)).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(summed, shared.gradients[0], rtol=0, atol=1e-11)


def test_the_first_stage_of_the_vision_network_of_paper_a_section_5() -> None:
    """100 x 100 images, untied 10 x 10 filters, 8 maps: 2,401 parameters a position of 300 x 8."""
    spec = Local2dSpec(maps=8, kernel=10)
    assert spec.output_shape((100, 100, 3)) == (91, 91, 8)
    network = NetworkSpec(input=(100, 100, 3), layers=(spec,), loss="squared")
    assert n_parameters(network) == 91 * 91 * 8 * (300 + 1)


def test_parameters_of_boxes_that_cover_it_are_each_in_one_of_them() -> None:
    """Paper A, section 3: a partition holds the parameters of its own nodes only."""
    spec, inputs = Local2dSpec(maps=3, kernel=3, stride=2), (11, 12, 2)
    whole = Box.whole(spec.output_shape(inputs))
    held = [sum(prod(t.shape) for t in spec.tensors(inputs, b)) for b in whole.split((2, 3, 2))]
    assert sum(held) == sum(prod(t.shape) for t in spec.tensors(inputs, whole))
