"""How fast this machine is at what a replica does: layers, rows, company and links.

Rules of this file: a few seconds for any network, and little memory: of a large layer only a
box is computed. What is computed alone is timed by the thread's processor time, in which other
programs show less than in wall time; the mean of a few runs, as a run of many steps takes it.

Theory of operation: a layer is timed, forward and backward, on a box of its nodes that is as large
as the limits allow and on an eighth of that; a line through both gives what a call costs whatever
its size, and its operations a second. Where the whole network is small enough for it, its pass is
timed as well, and every layer is scaled by what that took over the sum of them: what layers leave
each other in the caches no single one shows. What company costs is measured by company.py, how fast
processes talk by link_speeds.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbctl.data.dataset import Dataset
from dbctl.data.sources import Source
from dbctl.experiment.specs import Experiment, SandblasterSpec
from dbctl.forecast import LayerSpeed, Speeds
from dbctl.model.costs import costs_of
from dbctl.model.cut import cut_network
from dbctl.model.losses import LOSSES, loss_gradient
from dbctl.model.network import LayerSpec, NetworkSpec, node_shapes, tensors
from dbctl.region import Box
from dbctl.run.company import measure_company
from dbctl.run.link_speeds import Serving, measure_links
from dbctl.run.samples import MAX_WEIGHTS, has_pass, largest_box, nothing, of_box, of_pass, of_rows

Array = NDArray[Any]

BUDGET_S = 0.06  # of one box of one layer
PASS_BUDGET_S = 0.4
MAX_RUNS = 40
MAX_PASS_S = 0.1  # of a whole network
SAMPLE_ROWS = 1024
MAX_ELSEWHERE = 16 << 20  # elements; larger than caches are


def measure(experiment: Experiment, train: Source, *, threads: int) -> Speeds:
    """The speeds for an experiment's network, batch size and rule, with `threads` BLAS threads."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(limits=threads):
        return _measure(experiment, train, threads=threads)


def _measure(experiment: Experiment, train: Source, *, threads: int) -> Speeds:
    optimizer, network = experiment.optimizer, experiment.network
    n_batch, shapes = optimizer.batch_size, node_shapes(network)
    clock = _Clock(_touched(experiment))
    known: dict[tuple[LayerSpec, tuple[int, ...], bool], LayerSpeed] = {}
    layers = []
    for index, (spec, shape) in enumerate(zip(network.layers, shapes, strict=False)):
        key = (spec, shape, index == 0)
        if key not in known:
            known[key] = _layer_speed(spec, shape, n_batch=n_batch, first=index == 0, clock=clock)
        layers.append(known[key])
    loss_s = _loss_s(network.loss, prod(shapes[-1]), n_batch=n_batch, clock=clock)
    scale = _scale(network, layers, loss_s=loss_s, n_batch=n_batch, clock=clock)
    batch_s = _batch_s(experiment, train, clock)
    del clock  # its memory is another process's turn to use
    links = measure_links(_serving(experiment))
    return Speeds(
        company=measure_company(experiment, threads=threads),
        layers=tuple(layer.times(scale) for layer in layers),
        loss_s=scale * loss_s,
        batch_s=batch_s,
        latency_s=links.latency_s,
        server_latency_s=links.server_latency_s,
        message_s=links.message_s,
        link_bytes_per_s=links.bytes_per_s,
        check_s=links.check_s,
        copy_s=links.copy_s,
        shard_s=links.shard_s,
    )


def _touched(experiment: Experiment) -> int:
    """How many numbers a mini-batch reads and writes between two uses of the same one."""
    network, n = experiment.network, experiment.optimizer.batch_size
    nodes = sum(map(prod, node_shapes(network)))
    return 2 * (tensors(network)[-1].range.stop + n * nodes)  # values, and gradients by them


class _Clock:
    """Times what is done once a mini-batch, in which `touched` numbers are used."""

    def __init__(self, touched: int) -> None:
        self._elsewhere = np.zeros(min(touched, MAX_ELSEWHERE), np.float32)

    def seconds(
        self,
        run: Callable[[], object],
        prepare: Callable[[], object] = nothing,
        *,
        budget_s: float = BUDGET_S,
    ) -> float:
        """The mean run, after one that touches all memory; `prepare` is not timed.

        Before each as much else is used as in a mini-batch: what a layer left in the caches a
        mini-batch ago is not there.
        """
        times: list[float] = []
        until = time.perf_counter() + budget_s
        for count in range(MAX_RUNS + 1):
            prepare()
            np.add(self._elsewhere, 1, out=self._elsewhere)
            began = time.thread_time()
            run()
            if count:
                times.append(time.thread_time() - began)
            if count >= 2 and time.perf_counter() > until:
                break
        return float(np.mean(times))


# ---------------------------------------------------------------------------------- layers


def _layer_speed(
    spec: LayerSpec, shape: tuple[int, ...], *, n_batch: int, first: bool, clock: _Clock
) -> LayerSpeed:
    large = largest_box(spec, shape, n_batch=n_batch)
    small = of_rows(large, 8)
    (flops, seconds), (few, short_s) = (
        _time_box(spec, shape, box, n_batch=n_batch, first=first, clock=clock)
        for box in (large, small)
    )
    slope = (seconds - short_s) / (flops - few) if flops > few else 0.0
    overhead_s = seconds - slope * flops
    if slope <= 0 or overhead_s <= 0:  # too small for a line, or without an overhead
        return LayerSpeed(overhead_s=0.0, flops_per_s=flops / seconds)
    return LayerSpeed(overhead_s=overhead_s, flops_per_s=1 / slope)


def _scale(
    network: NetworkSpec,
    layers: Sequence[LayerSpeed],
    *,
    loss_s: float,
    n_batch: int,
    clock: _Clock,
) -> float:
    """Seconds of a pass of the whole network over those of its parts; 1: it is too large for one.

    The first layer has no gradient by its inputs, as when it was timed alone.
    """
    costs = costs_of(cut_network(network))
    flops = [layer.total("flops") * n_batch for layer in costs[: len(layers)]]
    parts_s = loss_s + sum(
        speed.overhead_s + n / speed.flops_per_s for speed, n in zip(layers, flops, strict=True)
    )
    if parts_s > MAX_PASS_S or not has_pass(network):
        return 1.0
    run = of_pass(network, n_batch=n_batch)
    return clock.seconds(run, budget_s=PASS_BUDGET_S) / parts_s


def _time_box(
    spec: LayerSpec, shape: tuple[int, ...], box: Box, *, n_batch: int, first: bool, clock: _Clock
) -> tuple[int, float]:
    """Operations and seconds of a forward and backward pass of a mini-batch."""
    sample = of_box(spec, shape, box, n_batch=n_batch, first=first)
    return sample.flops, clock.seconds(sample.run, sample.prepare)


def _loss_s(name: str, n_outputs: int, *, n_batch: int, clock: _Clock) -> float:
    loss = LOSSES[name](n_outputs, batch_size=n_batch, dtype="float32")
    random = np.random.default_rng(0)
    kept = random.standard_normal((n_outputs, n_batch), np.float32)
    labels, z = random.integers(n_outputs, size=n_batch), np.zeros_like(kept)
    return clock.seconds(lambda: loss_gradient(loss, z, labels), lambda: np.copyto(z, kept))


def _batch_s(experiment: Experiment, train: Source, clock: _Clock) -> float:
    """Of a mini-batch's rows; standardizing takes no other time than scaling."""
    spec = replace(experiment.data.train, standardize=False, scale=experiment.data.train.scale or 1)
    rows = np.arange(min(train.rows, SAMPLE_ROWS), dtype=np.int64)
    dataset = Dataset(train, spec, rows=rows)
    n = min(experiment.optimizer.batch_size, len(rows))
    random, out = np.random.default_rng(0), np.zeros((train.features, n), np.float32)
    return clock.seconds(lambda: dataset.batch(random.choice(len(rows), n, replace=False), out))


# --------------------------------------------------------------------------------- servers


def _serving(experiment: Experiment) -> Serving:
    optimizer = experiment.optimizer
    # What a shard does with a bundle is about what plain SGD does with a push.
    rule = "sgd" if isinstance(optimizer, SandblasterSpec) else optimizer.rule.type
    n_parameters = tensors(experiment.network)[-1].range.stop
    return Serving(
        rule=rule,
        size=min(n_parameters, MAX_WEIGHTS),
        touched=min(_touched(experiment), MAX_ELSEWHERE),
    )
