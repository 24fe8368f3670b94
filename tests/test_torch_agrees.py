"""PyTorch's autograd as an independent reference (ladder, rung 2). The one module that loads it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dbctl.model.initial import initial_values
from dbctl.model.layers.dense import DenseSpec
from dbctl.model.network import NetworkSpec, n_parameters, tensors
from dbctl.model.passes import Network
from dbctl.region import Range

ROWS = 64
FUNCTIONS = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "linear": lambda z: z,
}


def torch_loss(name: str, z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    one_hot = torch.nn.functional.one_hot(labels, z.shape[1]).to(z.dtype)
    if name == "softmax":
        return torch.nn.functional.cross_entropy(z, labels)
    if name == "logistic":
        bce = torch.nn.functional.binary_cross_entropy_with_logits
        return bce(z, one_hot, reduction="sum") / len(z)
    return 0.5 * torch.nn.functional.mse_loss(z, one_hot, reduction="sum") / len(z)


@pytest.mark.parametrize("loss", ["softmax", "logistic", "squared"])
@pytest.mark.parametrize("activation", list(FUNCTIONS))
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
        z = FUNCTIONS[layer.activation](torch.nn.functional.linear(z, weight, bias))
    mean = torch_loss(loss, z, torch.tensor(labels))
    mean.backward()
    assert total / ROWS == pytest.approx(mean.item(), rel=1e-5)
    for tensor, their in zip(tensors(spec), theirs, strict=True):
        expected = their.grad.numpy()
        mine = gradient[tensor.range.slice()].reshape(tensor.shape)
        tolerance = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(mine, expected, rtol=0, atol=tolerance, err_msg=tensor.name)
