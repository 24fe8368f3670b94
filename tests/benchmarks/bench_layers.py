"""Layers of filters, forward and backward, one thread: dbctl beside every form that PyTorch has.

    python tests/benchmarks/bench_layers.py [--rounds 15] [--case conv-28]

Each peer runs in a process of its own, and they take turns: a round is a few passes of each. A pass
is forward, relu, pooling where the case has it, and backward: the gradients by the weights, and by
the input but in a first layer. PyTorch has its input as it likes it (NCHW, or channels last, or
batch last). Printed: the median time of each, and the median over rounds of its time divided by
ours. PyTorch has no locally connected layer; the forms are

    multiply      windows by `unfold`, times the weights, summed: the usual one. 8 GB at stride 1
    einsum        the same windows, `einsum`
    im2col        `nn.functional.unfold`, `einsum`
    bmm           `nn.functional.unfold`, batched matrix product with the positions outermost
    strided-bmm   windows as a strided view of a batch-last input, batched matrix product
    groups        `nn.functional.unfold`, a convolution with as many groups as positions
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
TUNING = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
RELU = {"activation": "relu"}


class Case(NamedTuple):
    kind: str
    maps: tuple[int, int]  # below and of the layer
    side: int  # rows and columns below
    kernel: int
    batch: int
    stride: int = 1
    padding: str = "valid"
    pool: int = 0
    first: bool = False  # no gradient by the input


CASES = {
    "conv-28": Case("conv2d", (1, 16), 28, 5, 100, padding="same", pool=2, first=True),
    "conv-28-valid": Case("conv2d", (1, 16), 28, 5, 100, pool=2, first=True),
    "conv-100": Case("conv2d", (3, 16), 100, 5, 32, pool=2, first=True),
    "conv-14": Case("conv2d", (16, 32), 14, 5, 100, padding="same", pool=2),
    "conv-14-valid": Case("conv2d", (16, 32), 14, 5, 100, pool=2),
    "local-100": Case("local2d", (3, 8), 100, 10, 32, first=True),
    "local-100-dx": Case("local2d", (3, 8), 100, 10, 32),
    "local-stride-5": Case("local2d", (8, 16), 100, 10, 32, stride=5),
    "local-stride-2": Case("local2d", (1, 8), 100, 10, 32, stride=2, first=True),
}
PEERS = {
    "conv2d": ("dbctl", "nchw", "channels-last"),
    "local2d": ("dbctl", "multiply", "einsum", "im2col", "bmm", "strided-bmm", "groups"),
}


# ---------------------------------------------------------------------------------------- dbctl


def dbctl_pass(case: Case) -> Callable[[], None]:
    import numpy as np

    from dbctl.model.layers.pool import PoolSpec
    from dbctl.model.network import LAYER_SPECS
    from dbctl.model.passes import KERNELS
    from dbctl.region import Box

    keys: dict[str, Any] = {"kernel": case.kernel, "stride": case.stride, "padding": case.padding}
    specs = [LAYER_SPECS[case.kind](maps=case.maps[1], **keys, **RELU)]
    if case.pool:
        specs.append(PoolSpec(kind="max", size=case.pool))
    rng = np.random.default_rng(0)

    def numbers(*shape: int) -> Any:
        return rng.standard_normal(shape, dtype=np.float32) / 10

    shapes = [(case.side, case.side, case.maps[0])]
    layers = []
    for spec in specs:
        shapes.append(spec.output_shape(shapes[-1]))
        kernel = KERNELS[spec.type]
        whole = Box.whole(shapes[-1])
        layers.append(kernel(spec, shapes[-2], whole, batch_size=case.batch, dtype="float32"))
    nodes = [numbers(*shape, case.batch) for shape in shapes]
    deltas = [np.zeros_like(node) for node in nodes]
    parameters = [[numbers(*t.shape) for t in layer.tensors] for layer in layers]
    gradients = [[np.zeros_like(p) for p in of_layer] for of_layer in parameters]
    dy = numbers(*shapes[-1], case.batch)

    def run() -> None:
        for i, layer in enumerate(layers):
            seen = layer.input_box.slices()
            layer.forward(parameters[i], nodes[i][seen], nodes[i + 1])
        np.copyto(deltas[-1], dy)
        for i in reversed(range(len(layers))):
            seen = layers[i].input_box.slices()
            layers[i].backward(
                parameters[i],
                nodes[i][seen],
                nodes[i + 1],
                delta=deltas[i + 1],
                gradients=gradients[i],
                dx=None if i == 0 and case.first else deltas[i][seen],
            )

    return run


# ---------------------------------------------------------------------------------------- torch


def torch_pass(case: Case, form: str) -> Callable[[], None]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    below, maps = case.maps
    side = -(-case.side // case.stride)
    if case.padding == "valid":
        side = (case.side - case.kernel) // case.stride + 1
    shape = (case.batch, below, case.side, case.side)
    x = torch.randn(shape) / 10
    if form == "channels-last":
        x = x.contiguous(memory_format=torch.channels_last)
    if form == "strided-bmm":
        x = x.permute(2, 3, 1, 0).contiguous()
    x.requires_grad_(not case.first)
    if case.kind == "conv2d":
        weight = torch.randn(maps, below, case.kernel, case.kernel) / 10
        if form == "channels-last":
            weight = weight.contiguous(memory_format=torch.channels_last)
        bias = torch.zeros(maps)
    else:
        inputs = below * case.kernel**2
        # As it suits each form: positions outermost, or maps outermost.
        weight = torch.randn(side * side, maps, inputs) / 10
        if form == "multiply":
            weight = torch.randn(1, maps, below, side, side, case.kernel**2) / 10
        if form == "einsum":
            weight = torch.randn(side, side, maps, below, case.kernel, case.kernel) / 10
        bias = torch.zeros(torch_forward(case, form, x, weight).shape[1:])
    weight.requires_grad_()
    bias.requires_grad_()

    def forward() -> Any:
        if case.kind == "conv2d":
            padding = case.kernel // 2 if case.padding == "same" else 0
            y = torch.nn.functional.conv2d(x, weight, bias, stride=case.stride, padding=padding)
        else:
            y = torch_forward(case, form, x, weight) + bias
        y = torch.relu(y)
        return torch.nn.functional.max_pool2d(y, case.pool) if case.pool else y

    dy = torch.randn_like(forward()) / 10

    def run() -> None:
        forward().backward(dy)
        x.grad = weight.grad = bias.grad = None

    return run


def torch_forward(case: Case, form: str, x: Any, weight: Any) -> Any:
    """A locally connected layer before its bias, in whatever order the form has."""
    import torch

    k, s = case.kernel, case.stride
    if form in ("multiply", "einsum"):
        windows = x.unfold(2, k, s).unfold(3, k, s)
        if form == "einsum":
            return torch.einsum("bcrqij,rqmcij->bmrq", windows, weight)
        return (windows.flatten(4).unsqueeze(1) * weight).sum([2, -1])
    if form == "strided-bmm":
        side = (case.side - k) // s + 1
        row, column, item, _ = x.stride()
        strides = (s * row, s * column, row, column, item, 1)
        size = (side, side, k, k, x.shape[2], x.shape[3])
        windows = x.as_strided(size, strides).reshape(side * side, -1, x.shape[3])
        return torch.bmm(weight, windows)
    windows = torch.nn.functional.unfold(x, k, stride=s)
    if form == "im2col":
        return torch.einsum("bkl,lmk->bml", windows, weight)
    if form == "bmm":
        return torch.bmm(weight, windows.permute(2, 1, 0)).permute(2, 0, 1)
    positions, maps, inputs = weight.shape
    rows = windows.transpose(1, 2).reshape(len(x), positions * inputs, 1)
    filters = weight.reshape(positions * maps, inputs, 1)
    return torch.nn.functional.conv1d(rows, filters, groups=positions)


# ------------------------------------------------------------------------------------- processes


def serve(peer: str, case: Case) -> None:
    """Answers each line with the seconds that so many passes took."""
    run = dbctl_pass(case) if peer == "dbctl" else torch_pass(case, peer)
    for line in sys.stdin:
        passes = int(line)
        run()  # warm the caches that the other peers have just used
        begin = time.perf_counter()
        for _ in range(passes):
            run()
        print((time.perf_counter() - begin) / passes, flush=True)


def compare(name: str, *, rounds: int) -> None:
    """Prints a line for each peer of a case."""
    env = {k: v for k, v in os.environ.items() if k not in TUNING}
    env |= ONE_THREAD | {"PYTHONPATH": str(Path(__file__).parents[2])}
    peers = {}
    for peer in PEERS[CASES[name].kind]:
        command = [sys.executable, __file__, "--case", name, "--peer", peer]
        peers[peer] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def ask(peer: str, passes: int) -> float:
        process = peers[peer]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{passes}\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    passes = {peer: max(1, min(10, int(0.2 / ask(peer, 1)))) for peer in peers}
    found = [{peer: ask(peer, passes[peer]) for peer in peers} for _ in range(rounds)]
    for peer, process in peers.items():
        process.communicate()
        ratio = median(r[peer] / r["dbctl"] for r in found)
        print(f"{name:>15} {peer:>14} {median(r[peer] for r in found) * 1e3:>9.2f} {ratio:>8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--peer")
    options = parser.parse_args()
    if options.peer:
        serve(options.peer, CASES[options.case])
        return
    print(f"{'case':>15} {'peer':>14} {'ms':>9} {'of ours':>8}")
    for name in [options.case] if options.case else CASES:
        compare(name, rounds=options.rounds)


if __name__ == "__main__":
    main()
