"""PyTorch's autograd as an independent reference (ladder, rung 2). The one module that loads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from dbctl.model.initial import initial_values
from dbctl.model.kernels.pool import Pool
from dbctl.model.layers.conv2d import Conv2dSpec
from dbctl.model.layers.dense import DenseSpec
from dbctl.model.layers.filters import FilterSpec
from dbctl.model.layers.local2d import Local2dSpec
from dbctl.model.layers.pool import PoolSpec
from dbctl.model.network import NetworkSpec, n_parameters, tensors
from dbctl.model.passes import Network
from dbctl.region import Box, Range

if TYPE_CHECKING:
    import torch

ROWS = 64
ACTIVATIONS = ["sigmoid", "tanh", "relu", "linear"]


@pytest.fixture(autouse=True, scope="module")
def loaded() -> None:
    """It takes seconds: not in each worker of pytest-xdist, which only looks what is here."""
    global torch
    import torch


def torch_activation(name: str, z: torch.Tensor) -> torch.Tensor:
    return z if name == "linear" else getattr(torch, name)(z)


def torch_loss(name: str, z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    one_hot = torch.nn.functional.one_hot(labels, z.shape[1]).to(z.dtype)
    if name == "softmax":
        return torch.nn.functional.cross_entropy(z, labels)
    if name == "logistic":
        bce = torch.nn.functional.binary_cross_entropy_with_logits
        return bce(z, one_hot, reduction="sum") / len(z)
    return 0.5 * torch.nn.functional.mse_loss(z, one_hot, reduction="sum") / len(z)


@pytest.mark.parametrize("loss", ["softmax", "logistic", "squared"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_loss_and_gradient_of_784_512_256_10_agree(activation: str, loss: str) -> None:
    """Each tensor's gradient within 1e-5 of its largest entry, in float32."""
    spec = NetworkSpec(
        input=(784,),
        layers=(
            DenseSpec(units=512, activation=activation),
            DenseSpec(units=256, activation=activation),
            DenseSpec(units=10),
        ),
        loss=loss,
    )
    rng = np.random.default_rng(0)
    x = rng.random((ROWS, 784), dtype=np.float32)
    labels = rng.integers(0, 10, ROWS)
    parameters = initial_values(spec, 5, Range(0, n_parameters(spec)))
    gradient = np.empty_like(parameters)
    network = Network(spec, batch_size=ROWS)
    total = network.gradient(parameters, np.ascontiguousarray(x.T), labels, out=gradient)

    theirs = [
        torch.tensor(parameters[t.range.slice()].reshape(t.shape), requires_grad=True)
        for t in tensors(spec)
    ]
    z = torch.tensor(x)
    for layer, weight, bias in zip(spec.layers, theirs[::2], theirs[1::2], strict=True):
        z = torch_activation(layer.activation, torch.nn.functional.linear(z, weight, bias))
    mean = torch_loss(loss, z, torch.tensor(labels))
    mean.backward()
    assert total / ROWS == pytest.approx(mean.item(), rel=1e-5)
    for tensor, their in zip(tensors(spec), theirs, strict=True):
        expected = their.grad.numpy()
        mine = gradient[tensor.range.slice()].reshape(tensor.shape)
        tolerance = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(mine, expected, rtol=0, atol=tolerance, err_msg=tensor.name)


def torch_pool(spec: PoolSpec, x: torch.Tensor) -> torch.Tensor:
    """`x` is (n, maps, rows, columns)."""
    if spec.kind == "max":
        return torch.nn.functional.max_pool2d(x, spec.sizes, spec.strides)
    if spec.kind == "mean":
        return torch.nn.functional.avg_pool2d(x, spec.sizes, spec.strides)
    return torch.nn.functional.lp_pool2d(x, 2, spec.sizes, spec.strides)


@pytest.mark.parametrize("kind", ["max", "mean", "l2"])
@pytest.mark.parametrize(("size", "stride"), [(2, None), (3, 2), ((2, 3), (3, 1))])
def test_pooling_and_its_gradient_agree(kind: str, size, stride) -> None:
    """With ties in max, which torch gives to the first by rows too."""
    spec = PoolSpec(kind=kind, size=size, stride=stride)
    rng = np.random.default_rng(0)
    x = rng.integers(1, 6, (9, 8, 4, 5)).astype(np.float32)
    shape = spec.output_shape(x.shape[:3])
    layer = Pool(spec, x.shape[:3], Box.whole(shape), batch_size=5, dtype="float32")
    dy = rng.standard_normal((*shape, 5)).astype(np.float32)
    seen, dx = layer.input_box.slices(), np.zeros_like(x)
    out = np.empty_like(dy)
    layer.forward([], x[seen], out)

    theirs = torch.tensor(x.transpose(3, 2, 0, 1).copy(), requires_grad=True)
    y = torch_pool(spec, theirs)
    y.backward(torch.tensor(dy.transpose(3, 2, 0, 1).copy()))
    np.testing.assert_allclose(out.transpose(3, 2, 0, 1), y.detach().numpy(), rtol=1e-6)
    layer.backward([], x[seen], out, delta=dy, gradients=[], dx=dx[seen])
    np.testing.assert_allclose(dx.transpose(3, 2, 0, 1), theirs.grad.numpy(), rtol=1e-5, atol=1e-6)


def torch_filters(
    spec: FilterSpec, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """`x` is (n, maps, rows, columns). torch has no untied filters: windows times weights."""
    if spec.padding == "same":  # as torch's own, which warns of even kernels
        down, across = ((k - 1) // 2 for k in spec.kernels)
        around = (across, spec.kernels[1] - 1 - across, down, spec.kernels[0] - 1 - down)
        x = torch.nn.functional.pad(x, around)
    if spec.type == "conv2d":
        z = torch.nn.functional.conv2d(x, weight, bias, spec.strides)
    else:
        windows = x.unfold(2, spec.kernels[0], spec.strides[0])
        windows = windows.unfold(3, spec.kernels[1], spec.strides[1])
        z = torch.einsum("ncrqij,rqmijc->nmrq", windows, weight) + bias.permute(2, 0, 1)
    return torch_activation(spec.activation, z)


@pytest.mark.parametrize("family", [Conv2dSpec, Local2dSpec], ids=lambda family: family.type)
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [(5, 1, "valid"), (5, 1, "same"), ((4, 3), 1, "same"), (4, (3, 2), "valid"), (2, 3, "valid")],
)
def test_networks_of_filters_agree(family: type[FilterSpec], kernel, stride, padding) -> None:
    """Each tensor's gradient within 1e-5 of its largest entry, in float32; nodes flatten alike."""
    keys = {"kernel": kernel, "stride": stride, "padding": padding, "type": family.type}
    layers = (
        family(maps=6, activation="tanh", **keys),
        family(maps=5, activation="sigmoid", **(keys | {"stride": 1, "kernel": 3})),
        DenseSpec(units=10),
    )
    spec = NetworkSpec(input=(18, 16, 3), layers=layers, loss="softmax")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((18, 16, 3, 20), dtype=np.float32)
    labels = rng.integers(0, 10, 20)
    parameters = initial_values(spec, 5, Range(0, n_parameters(spec)))
    gradient = np.empty_like(parameters)
    network = Network(spec, batch_size=20)
    total = network.gradient(parameters, x.reshape(-1, 20), labels, out=gradient)

    theirs = [
        torch.tensor(parameters[t.range.slice()].reshape(t.shape), requires_grad=True)
        for t in tensors(spec)
    ]
    z = torch.tensor(x.transpose(3, 2, 0, 1).copy())
    for index, layer in enumerate(layers[:2]):
        z = torch_filters(layer, z, *theirs[2 * index : 2 * index + 2])
    z = torch.nn.functional.linear(z.permute(0, 2, 3, 1).flatten(1), *theirs[-2:])
    mean = torch_loss("softmax", z, torch.tensor(labels))
    mean.backward()
    assert total / 20 == pytest.approx(mean.item(), rel=1e-5)
    for tensor, their in zip(tensors(spec), theirs, strict=True):
        expected = their.grad.numpy()
        mine = gradient[tensor.range.slice()].reshape(tensor.shape)
        tolerance = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(mine, expected, rtol=0, atol=tolerance, err_msg=tensor.name)
