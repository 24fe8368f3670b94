"""Slow, obvious twins of what dbctl computes fast, and checks that several tests share.

Rules of this file: plain numpy and Python, one section a part of dbctl; nothing clever. What a twin
computes it computes by the definition, not by a copy of dbctl's code.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbctl.data.dataset import Dataset
from dbctl.data.order import epoch_order, subset
from dbctl.data.sources import open_source
from dbctl.experiment.specs import Experiment
from dbctl.model.initial import initial_values
from dbctl.model.network import NetworkSpec, tensors
from dbctl.model.passes import Network
from dbctl.region import Range

Array = NDArray[Any]


# ---------------------------------------------------------------- networks (design: ladder, rung 2)


def check_gradient(
    loss: Callable[[Array], float], gradient: Array, at: Array, *, seed: int = 0
) -> None:
    """The gradient of `loss` at `at` against central differences along random directions.

    Everything in float64. A step of 1e-5 in a direction of length 1 leaves an error of about 1e-10
    of the loss; a wrong sign, factor or missing term shows at once.
    """
    assert gradient.dtype == at.dtype == np.float64
    rng = np.random.default_rng(seed)
    for _ in range(4):
        direction = rng.standard_normal(at.shape)
        direction /= np.linalg.norm(direction)
        difference = (loss(at + 1e-5 * direction) - loss(at - 1e-5 * direction)) / 2e-5
        expected = float(np.vdot(gradient, direction))
        scale = float(np.linalg.norm(gradient)) / sqrt(gradient.size)
        assert abs(difference - expected) < 1e-6 * scale + 1e-9, (difference, expected)


def dense_network(
    spec: NetworkSpec, parameters: Array, x: Array, targets: Array
) -> tuple[float, Array, Array]:
    """A dense network the slow way, rows first: loss sum, flat gradient of the mean, outputs.

    `x` is (rows, features), `targets` labels (rows,) or floats (rows, outputs). Equal to
    dbctl.model.passes.Network to rounding, not bit for bit: a loop that is to agree bit for bit
    calls that Network itself.
    """
    values, weights, start = [x], [], 0
    for layer in spec.layers:
        size = layer.units * values[-1].shape[1]
        weights.append(parameters[start : start + size].reshape(layer.units, -1))
        z = values[-1] @ weights[-1].T + parameters[start + size : start + size + layer.units]
        values.append(_ACTIVATE[layer.activation](z))
        start += size + layer.units
    z = values[-1]
    t = np.eye(z.shape[1])[targets] if targets.ndim == 1 else targets
    prediction, loss = {
        "softmax": lambda: (np.exp(z) / np.exp(z).sum(1, keepdims=True), -t * z),
        "logistic": lambda: (1 / (1 + np.exp(-z)), np.log(1 + np.exp(z)) - t * z),
        "squared": lambda: (z, 0.5 * (z - t) ** 2),
    }[spec.loss]()
    total = loss.sum() + (np.log(np.exp(z).sum(1)).sum() if spec.loss == "softmax" else 0)
    delta, gradients = (prediction - t) / len(x), []
    for layer, weight, y, below in zip(
        spec.layers[::-1], weights[::-1], values[:0:-1], values[-2::-1], strict=True
    ):
        delta = delta * _SLOPE[layer.activation](y)
        gradients.append(np.concatenate([(delta.T @ below).ravel(), delta.sum(0)]))
        delta = delta @ weight
    return float(total), np.concatenate(gradients[::-1]), z


_ACTIVATE = {
    "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
    "tanh": np.tanh,
    "relu": lambda z: np.where(z > 0, z, 0),
    "linear": lambda z: z,
}
_SLOPE = {  # of the function, by its value
    "sigmoid": lambda y: y * (1 - y),
    "tanh": lambda y: 1 - y * y,
    "relu": lambda y: np.where(y > 0, 1, 0),
    "linear": np.ones_like,
}


# ---------------------------------------------------------------- update rules, element by element


def rule_loop(
    spec: Any, start: Array, gradients: list[Array], *, decay: float = 0.0
) -> tuple[Array, list[Array]]:
    """(parameters, state vectors) after all gradients at `spec.rate`, by scalars of start's dtype.

    The formulas of dbctl/optim/updates.py without its arrays, blocks or in-place operations.
    """
    scalar = start.dtype.type
    states = {"sgd": 0, "momentum": 1, "adagrad": 1, "adam": 2}[spec.type]
    w, state = list(start), [[scalar(0)] * len(start) for _ in range(states)]
    for n, gradient in enumerate(gradients):
        for i in range(len(w)):
            g = gradient[i] + scalar(decay) * w[i]
            old = [vector[i] for vector in state]
            new, change = _rule_step(spec, g, old, n=n)
            for vector, value in zip(state, new, strict=True):
                vector[i] = value
            w[i] = w[i] - change
    return np.array(w), [np.array(vector) for vector in state]


def _rule_step(spec: Any, g: Any, state: list[Any], *, n: int) -> tuple[list[Any], Any]:
    """(new state, what is subtracted from the parameter) for one element."""
    scalar = type(g)
    rate = scalar(spec.rate)
    if spec.type == "sgd":
        return [], rate * g
    if spec.type == "momentum":
        velocity = scalar(spec.momentum) * state[0] + g
        return [velocity], rate * velocity
    if spec.type == "adagrad":
        total = state[0] + g * g
        return [total], rate * (g / np.sqrt(total)) if total > 0 else scalar(0)
    first = scalar(spec.beta1) * state[0] + scalar(1 - spec.beta1) * g
    second = scalar(spec.beta2) * state[1] + (scalar(1 - spec.beta2) * g) * g
    correction = (1 - spec.beta2 ** (n + 1)) ** 0.5
    step = scalar(spec.rate * correction / (1 - spec.beta1 ** (n + 1)))
    epsilon = scalar(spec.epsilon * correction)
    return [first, second], step * (first / (np.sqrt(second) + epsilon))


# ------------------------------------------------------------------------------ data (dbctl/data)


def serial_words(seed: int, name: str, start: int, count: int) -> list[int]:
    """Words `start` on of the stream of a seed and a name, drawn one at a time from its first."""
    key = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=16).digest()
    bits = np.random.Philox(key=int.from_bytes(key, "little"))
    return [int(bits.random_raw()) for _ in range(start + count)][start:]


def serial_permutation(n: int, seed: int, name: str) -> list[int]:
    """The indices 0 to n - 1, ordered by a random word each."""
    words = serial_words(seed, name, 0, n)
    return sorted(range(n), key=lambda i: words[i])


def serial_normals(words: list[int]) -> list[float]:
    """Box and Muller 1958, one pair of words a normal."""
    normals = []
    for a, b in zip(words[0::2], words[1::2], strict=True):
        u = 1 - (a >> 11) / 2**53
        v = (b >> 11) / 2**53
        normals.append(math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v))
    return normals


def serial_mean_and_deviation(column: list[float]) -> tuple[float, float]:
    """Mean and deviation of numbers as they are defined, in exact sums; a deviation of 0 is 1."""
    mean = math.fsum(column) / len(column)
    squares = math.fsum((value - mean) ** 2 for value in column)
    return mean, math.sqrt(squares / len(column)) or 1.0


# ------------------------------------------------------------- serial SGD (rung 5 of the ladder)


def serial_sgd(
    experiment: Experiment, steps: int, *, begin: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Thirty lines of serial SGD: no role, no message, no shard. The flat parameters after it.

    `begin`: the parameters before it, instead of the seed's.
    """
    spec, optimizer = experiment.network, experiment.optimizer
    source = open_source(experiment.data.train)
    rows = subset(source.rows, experiment.seed, replica=0, replicas=1)
    data = Dataset(source, experiment.data.train, rows=rows)
    n_parameters = tensors(spec)[-1].range.stop
    parameters = initial_values(spec, experiment.seed, Range(0, n_parameters))
    parameters = parameters if begin is None else begin
    gradient = np.zeros_like(parameters)
    network = Network(spec, batch_size=optimizer.batch_size)
    done, epoch = 0, 0
    while done < steps:
        order = epoch_order(len(rows), experiment.seed, replica=0, epoch=epoch)
        for first in range(0, len(order), optimizer.batch_size):
            at = order[first : first + optimizer.batch_size]
            x = data.batch(at, np.empty((data.features, len(at)), np.float32))
            network.gradient(parameters, x, data.targets(at), out=gradient)
            rate = np.float32(optimizer.rule.rate)
            parameters = parameters - rate * gradient
            done += 1
            if done == steps:
                break
        epoch += 1
    return parameters


# --------------------------------------- pooling, contrast normalisation, dropout: loops by node


def _windows(
    shape: tuple[int, ...], sizes: tuple[int, int], strides: tuple[int, int]
) -> Iterator[tuple[int, int, tuple[slice, slice]]]:
    """(row, column of the output, slices of its window) for every whole window inside `shape`."""
    for i, top in enumerate(range(0, shape[0] - sizes[0] + 1, strides[0])):
        for j, left in enumerate(range(0, shape[1] - sizes[1] + 1, strides[1])):
            yield i, j, (slice(top, top + sizes[0]), slice(left, left + sizes[1]))


def pooled(x: Array, kind: str, sizes: tuple[int, int], *, strides: tuple[int, int]) -> Array:
    """x (rows, columns, maps, n) pooled, window by window."""
    found: dict[tuple[int, int], Array] = {}
    for i, j, window in _windows(x.shape, sizes, strides):
        values = x[window].reshape(-1, *x.shape[2:])
        found[i, j] = {
            "max": lambda v: v.max(axis=0),
            "mean": lambda v: v.sum(axis=0) / len(v),
            "l2": lambda v: np.sqrt((v * v).sum(axis=0)),
        }[kind](values)
    rows, columns = (1 + max(index) for index in zip(*found, strict=True))
    return np.array([[found[i, j] for j in range(columns)] for i in range(rows)])


def pooled_back(
    x: Array, dy: Array, kind: str, *, sizes: tuple[int, int], strides: tuple[int, int]
) -> Array:
    """The gradient by x, one number of dy after another."""
    dx, y = np.zeros_like(x), pooled(x, kind, sizes, strides=strides)
    for i, j, window in _windows(x.shape, sizes, strides):
        for m, b in np.ndindex(x.shape[2:]):
            values = x[window][:, :, m, b]
            if kind == "max":
                share = np.zeros(values.size)
                share[int(np.argmax(values.ravel()))] = 1  # of equal ones the first
                share = share.reshape(values.shape)
            elif kind == "mean":
                share = np.ones(values.shape) / values.size
            else:
                share = values / y[i, j, m, b] if y[i, j, m, b] else np.zeros(values.shape)
            dx[window][:, :, m, b] += share * dy[i, j, m, b]
    return dx


def contrast_normalised(x: Array, window: int, floor: float) -> Array:
    """Jarrett et al. 2009: v = x - sum w x, y = v / max(floor, sqrt(sum w v^2)), by positions."""
    v = np.empty_like(x)
    for j, k in np.ndindex(x.shape[:2]):
        v[j, k] = x[j, k] - _window_mean(x, j, k, window=window)
    y = np.empty_like(x)
    for j, k in np.ndindex(x.shape[:2]):
        y[j, k] = v[j, k] / np.maximum(floor, np.sqrt(_window_mean(v * v, j, k, window=window)))
    return y


def _window_mean(x: Array, j: int, k: int, *, window: int) -> Array:
    """The mean (n,) over the window about (j, k) within the image and all maps, by Gaussian."""
    radius, total, weights = window // 2, np.zeros(x.shape[-1]), 0.0
    for p in range(max(0, j - radius), min(x.shape[0], j + radius + 1)):
        for q in range(max(0, k - radius), min(x.shape[1], k + radius + 1)):
            weight = math.exp(-((p - j) ** 2 + (q - k) ** 2) / (2 * (window / 4) ** 2))
            for m in range(x.shape[2]):
                total += weight * x[p, q, m]
                weights += weight
    return total / weights


def dropped(label: str, *, nodes: int, rows: int, batch_size: int, rate: float) -> Array:
    """The factors (nodes, rows) of dropout, one word of the stream after another."""
    key = hashlib.blake2b(label.encode(), digest_size=16).digest()
    bits = np.random.Philox(key=int.from_bytes(key, "little"))
    factors = np.zeros((nodes, rows))
    for node in range(nodes):
        halves: list[int] = []
        while len(halves) < batch_size:
            word = int(bits.random_raw())
            halves += [word % 2**32, word // 2**32]
        for row in range(rows):
            if halves[row] >= rate * 2**32:
                factors[node, row] = 1 / (1 - rate)
    return factors


# --------------------------------------------- filters (conv2d, local2d): one number at a time


def filter_zeros(inputs: int, kernel: int, stride: int) -> int:
    """How many zeros padding `same` puts before `inputs` nodes: TensorFlow's rule."""
    overhang = inputs % stride or stride
    return max(0, kernel - overhang) // 2


def filtered(spec: Any, parameters: list[Array], x: Array) -> Array:
    """x (rows, columns, channels, n) through a layer of filters, one product after another."""
    y = np.zeros((*spec.output_shape(x.shape[:3]), x.shape[-1]))
    for r, q, m in np.ndindex(y.shape[:3]):
        y[r, q, m] += parameters[1][(r, q, m) if spec.type == "local2d" else m]
    for node, weight, seen in _filter_edges(spec, x.shape):
        y[node] += parameters[0][weight] * x[seen]
    return _ACTIVATE[spec.activation](y)


def filtered_back(
    spec: Any, parameters: list[Array], x: Array, *, dy: Array
) -> tuple[list[Array], Array]:
    """(gradients by weight and bias, gradient by x), one edge after another."""
    delta = dy * _SLOPE[spec.activation](filtered(spec, parameters, x))
    d_weight, dx = np.zeros_like(parameters[0]), np.zeros_like(x)
    for node, weight, seen in _filter_edges(spec, x.shape):
        d_weight[weight] += float(np.dot(delta[node], x[seen]))
        dx[seen] += parameters[0][weight] * delta[node]
    d_bias = delta.sum(axis=-1)
    return [d_weight, d_bias if spec.type == "local2d" else d_bias.sum(axis=(0, 1))], dx


def _filter_edges(
    spec: Any, shape: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """(output node, index of the weight, input node) of every edge."""
    before = [0, 0]
    if spec.padding == "same":
        sides = zip(shape[:2], spec.kernels, spec.strides, strict=True)
        before = [filter_zeros(*side) for side in sides]
    for r, q, m in np.ndindex(spec.output_shape(shape[:3])):
        for i, j, c in np.ndindex(*spec.kernels, shape[2]):
            row = r * spec.strides[0] + i - before[0]
            column = q * spec.strides[1] + j - before[1]
            if 0 <= row < shape[0] and 0 <= column < shape[1]:
                weight = (r, q, m, i, j, c) if spec.type == "local2d" else (m, c, i, j)
                yield (r, q, m), weight, (row, column, c)


# ------------------------------------ vectors of batch methods (dbctl/optim/vectors.py), by element


def combined(terms: list[tuple[float, Array]], n: int, dtype: str) -> Array:
    """c1 v1 + c2 v2 + ..., one element and one rounded operation at a time."""
    scalar = np.dtype(dtype).type
    out = np.zeros(n, dtype)
    for i in range(n):
        products = [scalar(scalar(c) * v[i]) for c, v in terms]
        total = products[0] if products else scalar(0)
        for product in products[1:]:
            total = scalar(total + product)
        out[i] = total
    return out


def mean_gradient_of(
    sums: Array, point: Array, *, examples: int, decays: list[tuple[Range, float]]
) -> tuple[Array, float]:
    """sums / examples + decay * point, rounded to the point's dtype; and the L2 penalty."""
    out, penalties = np.zeros_like(point), []
    for elements, decay in decays:
        for i in range(elements.start, elements.stop):
            w = float(point[i])
            out[i] = float(sums[i]) / examples + decay * w
            penalties.append(decay / 2 * w * w)
    return out, math.fsum(penalties)
