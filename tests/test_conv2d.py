"""What is convolution's own: shared filters. What it has in common is in test_filters.py."""

from __future__ import annotations

import numpy as np
from filter_cases import make_case, run

from dbctl.model.layers.conv2d import Conv2dSpec
from dbctl.region import Box


def test_it_is_a_cross_correlation_as_in_torch() -> None:
    """The kernel is not flipped."""
    spec = Conv2dSpec(maps=1, kernel=(1, 2))
    case = make_case(spec, (1, 3, 1), n=1)._replace(
        parameters=[np.array([10.0, 1.0]).reshape(1, 1, 1, 2), np.array([0.5])],
        x=np.array([1.0, 2.0, 3.0]).reshape(1, 3, 1, 1),
    )
    assert run(case, case.whole).y.ravel().tolist() == [12.5, 23.5]


def test_a_shifted_image_gives_shifted_nodes() -> None:
    case = make_case(Conv2dSpec(maps=3, kernel=3, activation="tanh"), (8, 9, 2), n=2)
    moved = case._replace(x=np.roll(case.x, (1, 2), axis=(0, 1)))
    here, there = run(case, case.whole).y, run(moved, case.whole).y
    np.testing.assert_allclose(there[1:, 2:], here[:-1, :-2], rtol=0, atol=1e-12)


def test_all_boxes_with_the_same_maps_have_the_same_tensors() -> None:
    spec, inputs = Conv2dSpec(maps=4, kernel=3), (9, 9, 2)
    whole = Box.whole(spec.output_shape(inputs))
    assert {spec.tensors(inputs, box) for box in whole.split((3, 2, 1))} == {
        spec.tensors(inputs, whole)
    }
