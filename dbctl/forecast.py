"""How long a mini-batch of a cut replica will take, from measured speeds, as in paper A, figure 3.

Rules of this file: pure, no numpy; speeds come from outside (run/speeds.py), counts from
model/costs.py. Each partition is taken to have a core (with `threads`, so many) of its own, on a
host whose other cores compute as well.

Theory of operation. A mini-batch is, layer by layer, what its slowest partition computes and sends:

    layer     max over partitions of (overhead + operations / rate) x company, of more than one
              + max over partitions of (bytes / link rate + messages x time of a message)
              + rounds x latency
    servers   looking at the gradient, of layers that do not bound it (model/kernels/bounds.py)
              + (copying what was fetched + a push and a fetch there and back) / n_fetch
              + the update / n_push, each of all the parameters that one host's processes have;
              nothing is copied where it is read where it lies (roles/local.py)

What is done once to each parameter is bound by memory, which the processes of a host share: it does
not get faster by being cut among them (measured: docs/experiments.md). All of it is waited for:
nothing is taken to hide behind something else, as a replica computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dbctl.errors import PlanError
from dbctl.experiment.specs import Experiment, HostSpec, SandblasterSpec, SshCluster
from dbctl.model.costs import ITEM_BYTES, LayerCosts, costs_of, imbalance
from dbctl.model.cut import NetworkCut, cut_fault, cut_network
from dbctl.placement import place
from dbctl.shards import READERS_IN_PLACE, shard_spans, spans_within

MAX_COLUMNS = 8  # partitions whose figures are listed one by one


@dataclass(frozen=True, kw_only=True)
class LayerSpeed:
    """A layer takes `overhead_s` a mini-batch, and its operations at `flops_per_s`."""

    overhead_s: float
    flops_per_s: float

    def times(self, factor: float) -> LayerSpeed:
        """Of a layer that takes `factor` times as long, whatever its size."""
        return LayerSpeed(
            overhead_s=factor * self.overhead_s, flops_per_s=self.flops_per_s / factor
        )


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Of this machine, for one network at one batch size and count of threads.

    `company`: how many times as long computing takes while another core computes as well and the
    slower one is waited for. `loss_s`: of the loss on all outputs. `batch_s`: of fetching a
    mini-batch's rows. `latency_s`: of two partitions that send to each other and wait;
    `server_latency_s`: of a push and a fetch, there and back. `message_s`: of each further message
    between partitions. `link_bytes_per_s`: into shared memory and out of it. Of one parameter:
    `check_s`, of its gradient at a worker; `copy_s`, of what was fetched; `shard_s`, of its update.
    """

    layers: tuple[LayerSpeed, ...]
    company: float
    loss_s: float
    batch_s: float
    latency_s: float
    server_latency_s: float
    message_s: float
    link_bytes_per_s: float
    check_s: float
    copy_s: float
    shard_s: float


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Seconds of one mini-batch; `speed_up` is against one partition."""

    partitions: int
    compute_s: float
    exchange_s: float
    servers_s: float
    speed_up: float
    numbers_sent: int
    imbalance: float

    @property
    def seconds(self) -> float:
        return self.compute_s + self.exchange_s + self.servers_s


@dataclass(frozen=True, kw_only=True)
class Table:
    """One count of partitions: its costs and its forecast."""

    cut: NetworkCut
    costs: tuple[LayerCosts, ...]
    forecast: Forecast


def cuts_of(experiment: Experiment, counts: Sequence[int]) -> list[NetworkCut]:
    """One cut for each count. PlanError: the network cannot be cut into so many."""
    for count in counts:
        fault = cut_fault(experiment.network, count=count, grid=None)
        if fault is not None:
            raise PlanError(f"--partitions {count}: {fault[1]}")
    return [cut_network(experiment.network, count=count) for count in counts]


def tables(experiment: Experiment, cuts: Sequence[NetworkCut], speeds: Speeds) -> list[Table]:
    """One table for each cut."""
    found = []
    alone = cut_network(experiment.network)
    alone_s = sum(_times(experiment, alone, costs_of(alone), speeds=speeds))
    for cut in cuts:
        costs = costs_of(cut)
        compute_s, exchange_s, servers_s = _times(experiment, cut, costs, speeds=speeds)
        forecast = Forecast(
            partitions=cut.count,
            compute_s=compute_s,
            exchange_s=exchange_s,
            servers_s=servers_s,
            speed_up=alone_s / (compute_s + exchange_s + servers_s),
            numbers_sent=sum(layer.total("states") + layer.total("sums") for layer in costs),
            imbalance=imbalance(costs),
        )
        found.append(Table(cut=cut, costs=costs, forecast=forecast))
    return found


def _times(
    experiment: Experiment, cut: NetworkCut, costs: Sequence[LayerCosts], *, speeds: Speeds
) -> tuple[float, float, float]:
    """Seconds of computing, of exchanging, and for the servers."""
    n = experiment.optimizer.batch_size
    outputs = [len(box) for box in cut.owned[-1]]
    compute_s = speeds.batch_s + speeds.loss_s * max(outputs) / sum(outputs)
    for layer, speed in zip(costs, speeds.layers, strict=False):  # the loss has none
        flops = layer.extremes("flops")[1] * n
        compute_s += speed.overhead_s + flops / speed.flops_per_s
    exchange_s = sum(_exchange_s(layer, speeds, n=n) for layer in costs)
    if cut.count > 1:
        compute_s *= speeds.company
        # The agreement that ends each pass.
        exchange_s += speeds.latency_s + (cut.count - 2) * speeds.message_s
    return compute_s, exchange_s, _servers_s(experiment, cut, speeds)


def _exchange_s(layer: LayerCosts, speeds: Speeds, *, n: int) -> float:
    """A round's first message costs a latency, each further one its own time on both sides."""
    slowest = 0.0
    for share in layer.shares:
        n_bytes = share.bytes_sent * n + share.shared * ITEM_BYTES
        further = max(0, share.messages - layer.rounds)
        seconds = n_bytes / speeds.link_bytes_per_s + further * speeds.message_s
        slowest = max(slowest, seconds)
    return slowest + layer.rounds * speeds.latency_s


def _servers_s(experiment: Experiment, cut: NetworkCut, speeds: Speeds) -> float:
    """Of a replica that is alone and waits for its shards at every fetch."""
    held, served = _fullest(experiment, [len(span) for span in cut.spans])
    optimizer = experiment.optimizer
    n_fetch = n_push = 1
    if not isinstance(optimizer, SandblasterSpec):
        n_fetch, n_push = optimizer.client.n_fetch, optimizer.client.n_push
    looked_at = sum(len(p.range) for p in cut.pieces if cut.spec.layers[p.layer].type != "dense")
    copied = 0 if _reads_in_place(experiment, cut) else held
    return (
        held * looked_at / cut.spans[-1].stop * speeds.check_s
        + (copied * speeds.copy_s + speeds.server_latency_s) / n_fetch
        + served * speeds.shard_s / n_push
    )


def _reads_in_place(experiment: Experiment, cut: NetworkCut) -> bool:
    """Parameters are read where their shard has them, by all partitions."""
    optimizer = experiment.optimizer
    if isinstance(optimizer, SandblasterSpec) or experiment.replicas > READERS_IN_PLACE:
        return False
    if not optimizer.client.blocking:
        return False
    shards = shard_spans(cut.spans[-1].stop, experiment.shards, partitions=cut.spans)
    return all(len(spans_within(shards, span)) <= 1 for span in cut.spans)


def _fullest(experiment: Experiment, spans: Sequence[int]) -> tuple[int, int]:
    """The most parameters of partitions, and of shards, that one host has.

    Where hosts have too few slots for so many, slots are no bound.
    """
    cluster = experiment.cluster
    if not isinstance(cluster, SshCluster):
        return sum(spans), sum(spans)
    workers = {f"worker-0.{p}": n for p, n in enumerate(spans)}
    each = -(-sum(spans) // experiment.shards)
    shards = {f"shard-{k}": each for k in range(experiment.shards)}
    try:
        places = _places(cluster.members, shards=list(shards), workers=list(workers))
    except PlanError:
        hosts = [replace(host, slots=None) for host in cluster.members]
        places = _places(hosts, shards=list(shards), workers=list(workers))

    def most(of_nodes: dict[str, int]) -> int:
        here: Counter[str] = Counter()
        for node, n in of_nodes.items():
            here[places[node]] += n
        return max(here.values())

    return most(workers), most(shards)


def _places(
    hosts: Sequence[HostSpec], *, shards: Sequence[str], workers: Sequence[str]
) -> dict[str, str]:
    return place(hosts, shards=shards, replicas=[workers], evaluators=[])


def parse_counts(text: str) -> list[int]:
    """`1,2,4`: counts of partitions. PlanError: something else."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise PlanError(f"--partitions is {text!r}: expected counts from 1 up, like 1,2,4,8")
    return [int(word) for word in words]


# ---------------------------------------------------------------------------------- as text


def lines(found: Sequence[Table], *, batch_size: int, cores: int) -> Iterator[str]:
    """The tables, layer by layer, and the times of all counts beside each other.

    `cores`: of this machine.
    """
    for table in found:
        yield from _layer_lines(table)
        yield ""
    yield f"one mini-batch of {batch_size} rows, predicted from the speed of this machine (ms);"
    yield "each partition and each shard is taken to have a core of its own, on a host whose other"
    yield "cores compute as well and whose memory is not faster for more of them"
    head = ("partitions", "compute", "exchange", "servers", "in all", "speed-up")
    yield "".join(f"{word:>11}" for word in head)
    for table in found:
        f = table.forecast
        times = (f.compute_s, f.exchange_s, f.servers_s, f.seconds)
        columns = "".join(f"{1e3 * seconds:>11.2f}" for seconds in times)
        yield f"{f.partitions:>11}{columns}{f.speed_up:>11.2f}"
    yield f"this machine has {cores} core{'s' if cores > 1 else ''}"


def _layer_lines(table: Table) -> Iterator[str]:
    count = table.cut.count
    head = f"{count} partition{'s' if count > 1 else ''}"
    listed = "each partition" if count <= MAX_COLUMNS else "least to greatest"
    yield f"{head}: {listed}; operations and bytes sent are of one example of training"
    for index, layer in enumerate(table.costs):
        way = f", by {table.cut.ways[index]}" if index < len(table.cut.ways) and count > 1 else ""
        yield f"  {layer.name}{way}"
        for figure, word in (
            ("nodes", "nodes"),
            ("parameters", "parameters"),
            ("flops", "operations"),
            ("bytes_sent", "bytes sent"),
        ):
            if layer.total(figure):
                yield f"    {word:<12}{_figures(layer, figure)}"
        if layer.total("shared"):
            yield f"    {'shared':<12}{_figures(layer, 'shared')} numbers a mini-batch"
    f = table.forecast
    yield f"  imbalance {f.imbalance:.2f}, {f.numbers_sent * ITEM_BYTES:,} bytes an example in all"


def _figures(layer: LayerCosts, figure: str) -> str:
    if len(layer.shares) <= MAX_COLUMNS:
        return " ".join(f"{getattr(share, figure):>13,}" for share in layer.shares)
    least, greatest = layer.extremes(figure)
    return f"{least:>13,} to {greatest:,}"


def as_object(found: Sequence[Table], *, batch_size: int, speeds: Speeds) -> dict[str, object]:
    """The same for `--json`: plain values."""
    return {
        "batch_size": batch_size,
        "speeds": {
            "layers": [
                {"overhead_s": s.overhead_s, "flops_per_s": s.flops_per_s} for s in speeds.layers
            ],
            **{
                name: getattr(speeds, name)
                for name in (
                    *("company", "loss_s", "batch_s", "latency_s", "server_latency_s"),
                    *("message_s", "link_bytes_per_s", "check_s", "copy_s", "shard_s"),
                )
            },
        },
        "partitions": [_table_object(table) for table in found],
    }


def _table_object(table: Table) -> dict[str, object]:
    f = table.forecast
    names = ("nodes", "parameters", "flops", "states", "sums", "shared", "bytes_sent")
    return {
        "count": f.partitions,
        "layers": [
            {"name": layer.name}
            | {name: [getattr(share, name) for share in layer.shares] for name in names}
            for layer in table.costs
        ],
        "imbalance": f.imbalance,
        "bytes_sent": f.numbers_sent * ITEM_BYTES,
        "compute_s": f.compute_s,
        "exchange_s": f.exchange_s,
        "servers_s": f.servers_s,
        "seconds": f.seconds,
        "speed_up": f.speed_up,
    }
