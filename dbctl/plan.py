"""From an experiment and its rows to a plan: which node does what, where, with how much. Pure.

Rules of this file: no I/O, no numpy. `NodeSpec` is all that a node is told (JSON on its standard
input).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import msgspec

from dbctl.bundles import Batch
from dbctl.errors import PlanError
from dbctl.experiment.specs import (
    DownpourSpec,
    Experiment,
    HostSpec,
    SandblasterSpec,
    SshCluster,
)
from dbctl.keys import Tcp
from dbctl.model.costs import nodes_kept
from dbctl.model.cut import NetworkCut, cut_network
from dbctl.model.network import tensors
from dbctl.model.tensor import Tensor
from dbctl.placement import place
from dbctl.region import Range
from dbctl.shards import N_PARAMETER_BUFFERS, ShardSpan, shard_spans, spans_within
from dbctl.shipment import Shipped
from dbctl.wire import BEGINNING, Position

LOCALHOST = "localhost"
ITEM_BYTES = 4
PROCESS_BYTES = 60 << 20  # what Python with numpy and pyzmq takes before any of ours
STATE_VECTORS = {"sgd": 0, "momentum": 1, "adagrad": 1, "adam": 2}
EVALUATION_BATCH = 500  # rows of a pass that measures
METHOD_VECTORS = 3  # of a batch method besides those it keeps: direction, trial, its gradient


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """What a node asks the controller for: the checkpoint's vectors, and its count of updates."""

    vectors: tuple[str, ...] = ()
    updates: int = 0


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one node is told at its start.

    `runtime` is the private 0700 directory for sockets, `agent` the endpoint of its host's agent.
    `experiment` is the resolved experiment as JSON. `restore` is a checkpoint directory or "";
    `initialize` too, of another run, from which only the parameters are taken.
    """

    run: str
    node: str  # shard-0 | worker-1.0 | evaluator-0
    role: str  # shard | worker | evaluator
    incarnation: int
    runtime: str
    agent: str
    lease_s: float
    threads: int
    experiment: str
    shards: tuple[ShardSpan, ...]
    replica: int = 0
    partition: int = 0
    partners: tuple[tuple[int, str], ...] = ()  # the other partitions' nodes
    restore: str = ""
    initialize: str = ""
    statistics: str = ""  # standardize: the run directory's file of means and deviations
    position: Position = BEGINNING
    split: str = "test"
    training: bool = True  # False: `dbctl eval`
    starts: tuple[int | None, ...] = ()  # of a shard: where each partition's slice begins
    busy: int = 0  # of a shard: threads that workers on its host compute with while it updates
    shards_here: int = 1  # of a shard: how many its host has
    tcp: Tcp | None = None  # None: all that it talks to are on its own host
    far: tuple[str, ...] = ()  # reached through the agents, and maps no memory of this host
    sent: Sent | None = None  # None: the run's files are read where they are
    shipped: Shipped | None = None  # None: the data's files are read where they are
    factory: str = ""  # tests: module:function that builds the role instead of dbctl's own


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """One node: its role and count of threads, what it holds in bytes, why it is there."""

    node: str
    role: str
    host: str
    threads: int
    memory_bytes: int
    what: str
    replica: int = 0
    partition: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    experiment: Experiment
    cut: NetworkCut
    tensors: tuple[Tensor, ...]
    shards: tuple[ShardSpan, ...]
    nodes: tuple[NodePlan, ...]
    rows: tuple[int, ...]  # of each replica

    @property
    def n_parameters(self) -> int:
        return self.tensors[-1].range.stop

    @property
    def hosts(self) -> tuple[str, ...]:
        """Those that run a node, in the order of the file: each has one agent."""
        used = {node.host for node in self.nodes}
        return tuple(name for name in host_names(self.experiment) if name in used)

    def agent_of(self, host: str) -> str:
        """The name of that host's agent: numbered as the file numbers the hosts."""
        return f"agent-{host_names(self.experiment).index(host)}"

    def of_role(self, role: str) -> list[NodePlan]:
        return [node for node in self.nodes if node.role == role]

    def replica_of(self, number: int) -> list[NodePlan]:
        """The workers of a replica in the order of their partitions."""
        return self.group_of("worker", number)

    def group_of(self, role: str, number: int) -> list[NodePlan]:
        """The partitions of a replica or of an evaluator, in their order."""
        return self._groups.get((role, number), [])

    @cached_property
    def _groups(self) -> dict[tuple[str, int], list[NodePlan]]:
        found: dict[tuple[str, int], list[NodePlan]] = {}
        for node in self.nodes:
            found.setdefault((node.role, node.replica), []).append(node)
        return found

    def held_by(self, partition: int) -> tuple[ShardSpan, ...]:
        """What a partition shares with each shard: one range where they meet."""
        return self._held[partition]

    @cached_property
    def _held(self) -> tuple[tuple[ShardSpan, ...], ...]:
        """Found once a partition: each has a node in every replica."""
        return tuple(spans_within(self.shards, span) for span in self.cut.spans)

    def starts_in(self, shard: str) -> tuple[int | None, ...]:
        """Where each partition's slice begins in a shard; None where they do not meet."""
        found = (
            [span.start for span in self.held_by(partition) if span.node == shard]
            for partition in range(self.cut.count)
        )
        return tuple(starts[0] if starts else None for starts in found)

    def bytes_a_step(self) -> tuple[int, int]:
        """Bytes that one replica fetches and pushes for one step, on average.

        A step of a batch method is one evaluation of the batch.
        """
        optimizer = self.experiment.optimizer
        if isinstance(optimizer, SandblasterSpec):
            batch = Batch(optimizer.batch or self.rows[0], optimizer.portion, optimizer.send_every)
            size = self.n_parameters * ITEM_BYTES
            return size, size * batch.n_bundles // len(self.rows)
        n_fetch = optimizer.n_fetch if isinstance(optimizer, DownpourSpec) else 1
        n_push = optimizer.n_push if isinstance(optimizer, DownpourSpec) else 1
        size = self.n_parameters * ITEM_BYTES
        return size // n_fetch, size // n_push


def host_names(experiment: Experiment) -> tuple[str, ...]:
    """Of all hosts of the experiment, also of those that run nothing."""
    cluster = experiment.cluster
    if isinstance(cluster, SshCluster):
        return tuple(host.name for host in cluster.members)
    return (LOCALHOST,)


def placed(
    experiment: Experiment,
    nodes: Sequence[NodePlan],
    between: Callable[[], None] = lambda: None,
) -> tuple[NodePlan, ...]:
    """The nodes with their hosts, and with the threads that their hosts say."""
    cluster = experiment.cluster
    if not isinstance(cluster, SshCluster):
        return tuple(nodes)
    hosts: Mapping[str, HostSpec] = {host.name: host for host in cluster.members}

    def groups(role: str) -> list[list[str]]:
        found: dict[int, list[str]] = {}
        for node in nodes:
            if node.role == role:
                found.setdefault(node.replica, []).append(node.node)
        return list(found.values())

    where = place(
        cluster.members,
        shards=[node.node for node in nodes if node.role == "shard"],
        replicas=groups("worker"),
        evaluators=groups("evaluator"),
        between=between,
    )
    return tuple(
        replace(
            node,
            host=where[node.node],
            threads=(node.role == "worker" and hosts[where[node.node]].threads) or node.threads,
        )
        for node in nodes
    )


def make_plan(
    experiment: Experiment,
    *,
    rows: int,
    test_rows: int,
    cores: int,
    threads: int | None = None,
    between: Callable[[], None] = lambda: None,
) -> Plan:
    """The plan of a run. `rows`, `test_rows`: of the data; `cores`: of this host, if it runs here.

    `threads` of a worker: the experiment's, the user's OMP_NUM_THREADS, or the cores shared out.
    `between` is called for each replica: what it raises ends this.
    PlanError says what does not fit, with the arithmetic.
    """
    if rows < 1:
        raise PlanError("data.train has no rows: nothing can be trained")
    replicas = experiment.replicas
    layout = tensors(experiment.network)
    n_parameters = layout[-1].range.stop
    share = _rows_of_replicas(experiment, rows)
    cut = cut_network(
        experiment.network, count=experiment.partition.count, grid=experiment.partition.grid
    )
    spans = shard_spans(n_parameters, experiment.shards, partitions=cut.spans)
    per_worker = threads or experiment.threads or max(1, cores // (replicas * cut.count))
    return Plan(
        experiment=experiment,
        cut=cut,
        tensors=layout,
        shards=spans,
        nodes=placed(
            experiment,
            [
                *_shard_nodes(experiment, spans),
                *_worker_nodes(experiment, cut, share, threads=per_worker, between=between),
                *_training_evaluator(experiment, cut, test_rows),
            ],
            between,
        ),
        rows=share,
    )


def _rows_of_replicas(experiment: Experiment, rows: int) -> tuple[int, ...]:
    """How many rows each replica may compute: its own share, or any (batch methods)."""
    optimizer, replicas = experiment.optimizer, experiment.replicas
    if not isinstance(optimizer, SandblasterSpec):
        return tuple(len(range(r, rows, replicas)) for r in range(replicas))
    if optimizer.batch is not None and optimizer.batch > rows:
        raise PlanError(f"optimizer.batch is {optimizer.batch:,}, but data.train has {rows:,} rows")
    return (rows,) * replicas


def make_evaluation_plan(experiment: Experiment, *, rows: int, evaluators: int) -> Plan:
    """The plan of `dbctl eval`: shards, and evaluators that share `rows`; nobody trains."""
    layout = tensors(experiment.network)
    cut = cut_network(
        experiment.network, count=experiment.partition.count, grid=experiment.partition.grid
    )
    spans = shard_spans(layout[-1].range.stop, experiment.shards, partitions=cut.spans)
    measuring = (
        node
        for part in range(evaluators)
        for node in _evaluator_nodes(
            experiment, cut, rows, number=part, what=f"{len(range(part, rows, evaluators)):,} rows"
        )
    )
    return Plan(
        experiment=experiment,
        cut=cut,
        tensors=layout,
        shards=spans,
        nodes=placed(experiment, [*_shard_nodes(experiment, spans), *measuring]),
        rows=(),
    )


def _shard_nodes(experiment: Experiment, spans: Sequence[ShardSpan]) -> Iterator[NodePlan]:
    optimizer = experiment.optimizer
    if isinstance(optimizer, SandblasterSpec):
        vectors = method_vectors(optimizer) + 2  # and the sums, in float64
    else:
        vectors = N_PARAMETER_BUFFERS + 2 * STATE_VECTORS[optimizer.rule.type]
    for span in spans:
        size = (span.stop - span.start) * ITEM_BYTES
        yield NodePlan(
            node=span.node,
            role="shard",
            host=LOCALHOST,
            threads=1,
            memory_bytes=PROCESS_BYTES + size * vectors,
            what=f"parameters {Range(span.start, span.stop)}",
        )


def method_vectors(optimizer: SandblasterSpec) -> int:
    """The most vectors of a batch method that a slice of a shard has at once.

    What is being written to disk is not written to meanwhile: the kept ones count twice.
    """
    kept = 2 + (2 * optimizer.history if optimizer.method == "lbfgs" else 0)
    return 2 * kept + METHOD_VECTORS


def _worker_nodes(
    experiment: Experiment,
    cut: NetworkCut,
    share: Sequence[int],
    *,
    threads: int,
    between: Callable[[], None],
) -> Iterator[NodePlan]:
    optimizer = experiment.optimizer
    if isinstance(optimizer, SandblasterSpec):
        slots, summed = 2, optimizer.send_every
    else:
        slots, summed = optimizer.client.slots_used, optimizer.client.n_push
    vectors = 1 + slots + (summed > 1)
    features = prod(experiment.network.input)
    parts = [
        (len(cut.span(partition)) * vectors, features + 2 * nodes_kept(cut, partition))
        for partition in range(cut.count)
    ]
    for replica, rows in enumerate(share):
        between()
        for partition, (lasting, of_row) in enumerate(parts):
            held = lasting + min(optimizer.batch_size, rows) * of_row + rows * features
            of = f", partition {partition} of {cut.count}" if cut.count > 1 else ""
            yield NodePlan(
                node=f"worker-{replica}.{partition}",
                role="worker",
                host=LOCALHOST,
                threads=threads,
                memory_bytes=PROCESS_BYTES + held * ITEM_BYTES,
                what=f"replica {replica}, {rows:,} rows{of}",
                replica=replica,
                partition=partition,
            )


def _training_evaluator(
    experiment: Experiment, cut: NetworkCut, test_rows: int
) -> Iterator[NodePlan]:
    if experiment.data.test is None or experiment.evaluate.every is None:
        return
    what = f"{test_rows:,} rows every {experiment.evaluate.every}"
    yield from _evaluator_nodes(experiment, cut, test_rows, number=0, what=what)


def _evaluator_nodes(
    experiment: Experiment, cut: NetworkCut, rows: int, *, number: int, what: str
) -> Iterator[NodePlan]:
    """An evaluator is cut like the replicas: evaluator-0, or evaluator-0.0, evaluator-0.1, ..."""
    features = prod(experiment.network.input)
    for partition in range(cut.count):
        held = len(cut.span(partition)) + rows * features
        held += min(EVALUATION_BATCH, rows) * (features + nodes_kept(cut, partition))
        yield NodePlan(
            node=f"evaluator-{number}" + (f".{partition}" if cut.count > 1 else ""),
            role="evaluator",
            host=LOCALHOST,
            threads=1,
            memory_bytes=PROCESS_BYTES + held * ITEM_BYTES,
            what=f"measures {what}",
            replica=number,
            partition=partition,
        )


def describe_bytes(n_bytes: int) -> str:
    """For people: `45.2 MiB`."""
    amount, unit = float(n_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:.1f} {unit}" if unit != "B" else f"{n_bytes} B"
