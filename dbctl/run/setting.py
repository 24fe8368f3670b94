"""What a run is made of before any node starts: experiment, data, plan, run directory, nodes.

Rules of this file: everything that can be wrong with files and figures is found here, before a
process is started or (for a new run) a directory is made.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dbctl.data.prepare import Statistics, statistics
from dbctl.data.sources import Source, check, check_files, open_source
from dbctl.errors import DataError, file_at_fault
from dbctl.experiment.resolve import to_json
from dbctl.experiment.specs import Experiment, SandblasterSpec, SshCluster
from dbctl.launch.base import AgentHandle, start_order
from dbctl.plan import NodePlan, NodeSpec, Plan, make_plan
from dbctl.run.nodes import Node
from dbctl.run.vectors import Vectors
from dbctl.run.wiring import Wiring, ends_of, partners_of, talks_to, wired
from dbctl.rundir import RunDir
from dbctl.shipment import Shipped
from dbctl.wire import BEGINNING, Position

LEASE_S = 10.0
STATISTICS = "standardize.npz"
EVALUATOR_NICE = 5
INCARNATION = 1  # of every node: none is started again yet


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a run goes on from: a checkpoint's directory and figures; the default is the start.

    `initialize` is the directory of another run's checkpoint: only parameters come from it.
    """

    restore: str = ""
    initialize: str = ""
    positions: Mapping[int, Position]
    examples: int = 0
    seconds: float = 0.0
    method: Mapping[str, Any] = field(default_factory=dict)  # a batch method's own (run/methods.py)


def new_run_id() -> str:
    return secrets.token_hex(8)


def open_data(
    experiment: Experiment, *, between: Callable[[], None] = lambda: None
) -> tuple[Source, Source | None]:
    """Both splits, checked against the network. DataError names the file and what is wrong.

    Here and below `between` is called before each block that is read: what it raises ends this.
    """
    splits = (experiment.data.train, experiment.data.test)
    check_files(*(spec for spec in splits if spec is not None))
    train = open_source(experiment.data.train, checked=True)
    check(train, experiment.network, between=between)
    test = None
    if experiment.data.test is not None:
        test = open_source(experiment.data.test, checked=True)
        check(test, experiment.network, between=between)
    return train, test


def keep_statistics(
    experiment: Experiment,
    train: Source,
    run_dir: RunDir,
    *,
    between: Callable[[], None] = lambda: None,
) -> None:
    """`standardize`: mean and deviation of the training rows stay in the run directory.

    RunError: they cannot be written.
    """
    if experiment.data.train.standardize:
        path = run_dir.path / STATISTICS
        found = statistics(train, between=between)
        with file_at_fault(path, "written"):
            found.save(str(path))


def statistics_stand(experiment: Experiment, train: Source, run_dir: RunDir) -> bool:
    """Whether what `keep_statistics` kept is there and whole, if it has to be."""
    if not experiment.data.train.standardize:
        return True
    try:
        kept = Statistics.load(str(run_dir.path / STATISTICS))
    except DataError:
        return False
    return bool(len(kept.mean) == train.features)


def resolve_threads(experiment: Experiment) -> Experiment:
    """The count of BLAS threads of a worker becomes a number: other counts give other bits."""
    if experiment.threads is not None:
        return experiment
    given = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0))
    threads = int(given) if given.isdigit() and int(given) > 0 else None
    if isinstance(experiment.cluster, SshCluster):  # what a host has is not known yet
        return replace(experiment, threads=threads or 1)
    grid = experiment.partition.grid
    partitions = grid[0] * grid[1] if grid is not None else experiment.partition.count
    processes = experiment.replicas * partitions
    return replace(experiment, threads=threads or max(1, cores // processes))


def plan_of(
    experiment: Experiment,
    train: Source,
    test: Source | None,
    *,
    between: Callable[[], None] = lambda: None,
) -> Plan:
    return make_plan(
        experiment,
        rows=train.rows,
        test_rows=test.rows if test is not None else 0,
        cores=len(os.sched_getaffinity(0)),
        between=between,
    )


def busy_beside(plan: Plan, shard: NodePlan) -> int:
    """Threads that workers on a shard's host compute with while it updates.

    An only replica that fetches what it has pushed before it goes on waits meanwhile.
    """
    optimizer = plan.experiment.optimizer
    waits = not isinstance(optimizer, SandblasterSpec) and optimizer.client.blocking
    if waits and plan.experiment.replicas == 1:
        return 0
    return sum(node.threads for node in plan.of_role("worker") if node.host == shard.host)


def describe(plan: Plan) -> dict[str, object]:
    """What a life of a run is made of, for its first record."""
    optimizer = plan.experiment.optimizer
    rule = getattr(optimizer, "rule", None)
    return {
        "name": plan.experiment.name,
        "optimizer": optimizer.type,
        "method": rule.type if rule is not None else getattr(optimizer, "method", None),
        "replicas": plan.experiment.replicas,
        "partitions": plan.cut.count,
        "shards": len(plan.shards),
    }


def network_digest(experiment: Experiment) -> str:
    """Of the network's own part of the resolved experiment: what a checkpoint must be of."""
    import msgspec

    network = msgspec.json.decode(to_json(experiment))["network"]
    return hashlib.sha256(msgspec.json.encode(network)).hexdigest()[:16]


def beginnings(replicas: int) -> dict[int, Position]:
    return dict.fromkeys(range(replicas), BEGINNING)


def evaluator_groups(plan: Plan) -> list[list[str]]:
    """The nodes of each evaluator in the order of their partitions."""
    groups: dict[int, list[str]] = {}
    for node in plan.of_role("evaluator"):
        groups.setdefault(node.replica, []).append(node.node)
    return list(groups.values())


def vectors_of(origin: Origin, run_dir: Path) -> Vectors:
    """What this life's nodes may read of files that their hosts have not."""
    statistics = run_dir / STATISTICS
    return Vectors(
        checkpoint=origin.restore or origin.initialize,
        statistics=str(statistics) if statistics.exists() else "",
    )


def make_nodes(
    plan: Plan,
    agents: Sequence[AgentHandle],
    *,
    run: str,
    run_dir: Path,
    origin: Origin,
    split: str = "test",
    lease_s: float = LEASE_S,
    factories: Mapping[str, str] | None = None,
    wiring: Wiring | None = None,
    shipped: Mapping[str, Shipped] | None = None,
) -> dict[str, Node]:
    """An order for each node of the plan, to the agent of its host.

    `wiring`: where hosts reach each other; a plan of one host needs none. `shipped`: what nodes are
    told of rows that are sent. `factories`: role -> module:function, for tests.
    """
    wiring = wiring or wired(plan, {})
    far = wiring.far.union(agent.host for agent in agents if not agent.shares_memory)
    ends = ends_of(plan, replace(wiring, far=far), incarnation=INCARNATION)
    by_host = {agent.host: agent for agent in agents}
    experiment = to_json(plan.experiment)
    statistics_path = run_dir / STATISTICS
    apart = any(agent.keeps_logs for agent in agents)
    sent = vectors_of(origin, run_dir).sent if apart else None
    nodes = {}
    for node in plan.nodes:
        agent = by_host[node.host]
        spec = NodeSpec(
            run=run,
            node=node.node,
            role=node.role,
            incarnation=INCARNATION,
            runtime=agent.runtime,
            agent=agent.inside,
            lease_s=lease_s,
            threads=node.threads,
            experiment=experiment,
            shards=plan.shards if node.role == "shard" else plan.held_by(node.partition),
            replica=node.replica,
            partition=node.partition,
            partners=partners_of(plan, node),
            restore=origin.restore,
            initialize=origin.initialize,
            statistics=str(statistics_path) if statistics_path.exists() else "",
            position=origin.positions.get(node.replica, BEGINNING),
            split=split,
            training=bool(plan.of_role("worker")),
            starts=plan.starts_in(node.node) if node.role == "shard" else (),
            busy=busy_beside(plan, node) if node.role == "shard" else 0,
            shards_here=sum(shard.host == node.host for shard in plan.of_role("shard")) or 1,
            tcp=ends[node.node].tcp,
            far=ends[node.node].far,
            sent=sent if agent.keeps_logs else None,
            shipped=(shipped or {}).get(node.node),
            factory=(factories or {}).get(node.role, ""),
        )
        nice = EVALUATOR_NICE if node.role == "evaluator" else 0
        nodes[node.node] = Node(
            order=start_order(spec, nice=nice, python=agent.python),
            agent=agent.name,
            host=node.host,
            talks_to=talks_to(plan, node),
            partners=[name for _, name in partners_of(plan, node)],
            apart=ends[node.node].apart,
            public=spec.tcp.public if spec.tcp is not None else "",
            needed=node.role != "evaluator" or not plan.of_role("worker"),
        )
    return nodes
