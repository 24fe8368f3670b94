"""What each node of a run is told: slices, partners, and whom it connects to."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dbctl.data.files import open_file
from dbctl.data.sources import DIGITS_PATH
from dbctl.errors import DataError
from dbctl.experiment.read import load, parse
from dbctl.experiment.specs import (
    DataSpec,
    Experiment,
    IdxSource,
    PartitionSpec,
    SandblasterSpec,
)
from dbctl.launch.base import AgentHandle
from dbctl.node import build as build_module
from dbctl.node.build import build
from dbctl.plan import NodeSpec, Plan, make_evaluation_plan, make_plan
from dbctl.region import Range
from dbctl.roles.base import PlainBuffer
from dbctl.run.methods import coordinator_start, state_vectors
from dbctl.run.nodes import Node
from dbctl.run.setting import (
    Origin,
    beginnings,
    busy_beside,
    evaluator_groups,
    make_nodes,
    network_digest,
    open_data,
    resolve_threads,
)
from dbctl.run.wiring import Wiring, wired
from dbctl.wire import Position

FILE = Path(__file__).parent.parent / "experiments" / "digits-downpour.yaml"


def experiment(*, count: int = 1, **changes: Any) -> Experiment:
    whole = load(str(FILE), ["evaluate.every=1 epoch", "threads=1"])
    return replace(whole, partition=PartitionSpec(count=count), **changes)


def make(*, count: int = 1, replicas: int = 2, shards: int = 4) -> Plan:
    given = experiment(count=count, replicas=replicas, shards=shards)
    return make_plan(given, rows=100, test_rows=20, cores=2)


def nodes_of(plan: Plan, tmp_path: Path, **changes: Any) -> dict[str, Node]:
    origin = Origin(positions=beginnings(plan.experiment.replicas))
    fields: dict[str, Any] = {"run": "r", "run_dir": tmp_path, "origin": origin}
    return make_nodes(plan, agents_of(plan), **(fields | changes))


def agents_of(plan: Plan) -> list[AgentHandle]:
    return [
        AgentHandle(
            plan.agent_of(host),
            host,
            "ipc:///here",
            0,
            inside=f"ipc:///{host}/a",
            runtime=f"/{host}",
        )
        for host in plan.hosts
    ]


def spec_of(node: Node) -> NodeSpec:
    return msgspec.json.decode(node.order.spec, type=NodeSpec)


# -------------------------------------------------------------------------- who talks to whom


def test_whole_replicas_talk_to_every_shard_and_to_nobody_else(tmp_path: Path) -> None:
    plan = make()
    shards = tuple(span.node for span in plan.shards)
    for name, node in nodes_of(plan, tmp_path).items():
        assert tuple(node.talks_to) == (() if name.startswith("shard-") else shards)
        assert spec_of(node).partners == ()
        assert spec_of(node).shards == plan.shards


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("shards", [1, 2, 4, 7])
def test_a_partition_connects_only_to_shards_that_hold_its_ranges_and_to_its_partners(
    count: int, shards: int, tmp_path: Path
) -> None:
    """Paper A, section 4.1: it need communicate only with the shards that hold its parameters."""
    plan = make(count=count, shards=shards)
    spans = {s.node: Range(s.start, s.stop) for s in plan.shards}
    for name, node in nodes_of(plan, tmp_path).items():
        spec = spec_of(node)
        if spec.role == "shard":
            assert node.talks_to == ()
            assert spec.shards == plan.shards
            continue
        mine = plan.cut.span(spec.partition)
        holding = {shard for shard, span in spans.items() if span.intersection(mine)}
        stem = name.rsplit(".", 1)[0]
        partners = {f"{stem}.{p}" for p in range(count) if p != spec.partition}
        assert set(node.talks_to) == holding | partners
        assert len(node.talks_to) == len(holding) + len(partners)
        assert dict(spec.partners) == {
            p: f"{stem}.{p}" for p in range(count) if p != spec.partition
        }
    if shards >= count:
        assert any(len(plan.held_by(p)) < len(plan.shards) for p in range(count))


@pytest.mark.parametrize("shards", [1, 3, 5])
def test_partitions_hold_every_parameter_once(shards: int) -> None:
    plan = make(count=3, shards=shards)
    held = sorted((s.start, s.stop) for p in range(3) for s in plan.held_by(p))
    assert held[0][0] == 0
    assert [stop for _, stop in held[:-1]] == [start for start, _ in held[1:]]
    assert held[-1][1] == plan.n_parameters
    for partition in range(3):
        spans = plan.held_by(partition)
        assert (spans[0].start, spans[-1].stop) == (
            plan.cut.span(partition).start,
            plan.cut.span(partition).stop,
        )


# ------------------------------------------------------------------------------- what is told


def test_what_a_node_is_told_is_its_own(tmp_path: Path) -> None:
    plan = make(count=2)
    positions = {0: Position(5, 0, 5), 1: Position(9, 1, 2)}
    origin = Origin(restore="/c/step-14", positions=positions)
    nodes = nodes_of(plan, tmp_path, origin=origin, factories={"worker": "a:b"})
    assert [name for name, node in nodes.items() if not node.needed] == [
        "evaluator-0.0",
        "evaluator-0.1",
    ]
    spec = spec_of(nodes["worker-1.1"])
    assert (spec.replica, spec.partition, spec.incarnation) == (1, 1, 1)
    assert (spec.position, spec.restore) == (positions[1], "/c/step-14")
    assert (spec.factory, spec_of(nodes["shard-0"]).factory) == ("a:b", "")
    assert spec.statistics == ""
    (tmp_path / "standardize.npz").touch()
    told = spec_of(nodes_of(plan, tmp_path)["worker-0.0"])
    assert told.statistics == str(tmp_path / "standardize.npz")
    nice = {name: node.order.nice for name, node in nodes.items()}
    assert {name for name, value in nice.items() if value} == {"evaluator-0.0", "evaluator-0.1"}


def test_evaluators_are_needed_where_nobody_trains(tmp_path: Path) -> None:
    plan = make_evaluation_plan(experiment(count=2), rows=21, evaluators=2)
    nodes = nodes_of(plan, tmp_path, origin=Origin(restore="/c", positions={}))
    assert all(node.needed for node in nodes.values())
    assert evaluator_groups(plan) == [
        ["evaluator-0.0", "evaluator-0.1"],
        ["evaluator-1.0", "evaluator-1.1"],
    ]


def test_the_coordinator_is_told_of_replicas_with_all_their_partitions() -> None:
    plan = make(count=2)
    positions = {0: Position(5, 0, 5), 1: Position(9, 1, 2)}
    optimizer = plan.experiment.optimizer
    assert not isinstance(optimizer, SandblasterSpec)
    origin = Origin(positions=positions, examples=7, seconds=1.5)
    start = coordinator_start(plan, origin, optimizer)
    assert start.workers == {
        0: ["worker-0.0", "worker-0.1"],
        1: ["worker-1.0", "worker-1.1"],
    }
    assert start.evaluators == [["evaluator-0.0", "evaluator-0.1"]]
    assert {n: part.begin for n, part in start.parts.items()} == positions
    assert [part.rows for part in start.parts.values()] == [50, 50]
    assert (start.examples, start.seconds) == (7, 1.5)
    assert start.shards == [span.node for span in plan.shards]


# ------------------------------------------------------------------------------- several hosts

THREE = (
    "cluster={launcher: ssh, hosts: [{name: a, slots: 2}, {name: idle, labels: [evaluator]},"
    " {name: b, slots: 9, threads: 3}]}"
)


def spread() -> Plan:
    given = load(str(FILE), [THREE, "evaluate.every=off", "threads=1"])
    return make_plan(replace(given, shards=2), rows=100, test_rows=0, cores=2)


def wiring_of(plan: Plan) -> Wiring:
    return wired(plan, {"a": "10.0.0.1", "b": "10.0.0.2"})


def test_each_node_is_told_of_its_own_hosts_agent_and_directory(tmp_path: Path) -> None:
    plan = spread()
    assert plan.hosts == ("a", "b"), "a host without a node has no agent"
    agents = {"a": "agent-0", "b": "agent-2"}
    nodes = nodes_of(plan, tmp_path, wiring=wiring_of(plan))
    assert {node.host for node in nodes.values()} == {"a", "b"}
    for place in plan.nodes:
        node = nodes[place.node]
        spec = spec_of(node)
        assert (node.host, node.agent) == (place.host, agents[place.host])
        assert (spec.agent, spec.runtime) == (f"ipc:///{place.host}/a", f"/{place.host}")
        assert spec.threads == (3 if place.role == "worker" and place.host == "b" else 1)


def test_a_nodes_program_and_memory_are_those_of_its_host(tmp_path: Path) -> None:
    plan = spread()
    near, far = agents_of(plan)
    far = replace(far, python="/there/python3", shares_memory=False)
    origin = Origin(positions=beginnings(plan.experiment.replicas))
    nodes = make_nodes(
        plan, [near, far], run="r", run_dir=tmp_path, origin=origin, wiring=wiring_of(plan)
    )
    for node in nodes.values():
        on_far = node.host == "b"
        assert (node.order.argv[0] == "/there/python3") == on_far
        assert spec_of(node).far == (("controller",) if on_far else ())


def test_nodes_of_two_hosts_are_told_keys_and_those_of_one_are_not(tmp_path: Path) -> None:
    plan = spread()
    hosts = {node.node: node.host for node in plan.nodes}
    nodes = nodes_of(plan, tmp_path, wiring=wiring_of(plan))
    n_rows = 0
    for name, node in nodes.items():
        tcp = spec_of(node).tcp
        assert node.public == (tcp.public if tcp is not None else "")
        rows = [] if tcp is None else [other for other, _, _ in tcp.keys]
        assert all(hosts[other] != hosts[name] for other in rows)
        n_rows += len(rows)
    assert n_rows > 0
    assert all(spec_of(node).tcp is None for node in nodes_of(make(), tmp_path).values())


# -------------------------------------------------------------------------------- small things


BLOCKING, GOES_ON = "optimizer.overlap=false", "optimizer.overlap=true"
ALONE = ("replicas=1", "optimizer.warmstart=null")


@pytest.mark.parametrize(
    ("overrides", "busy"),
    [
        (("replicas=3", "shards=1"), 3),
        (("replicas=3", "shards=1", BLOCKING), 3),  # of the others, who do not wait for this push
        ((*ALONE, "shards=1", GOES_ON), 1),  # it goes on with the next step
        ((*ALONE, "shards=1", BLOCKING), 0),
        ((*ALONE, "shards=1", "threads=2", "partition={count: 2}", GOES_ON), 4),
        ((*ALONE, "shards=1", "threads=2", "partition={count: 2}", BLOCKING), 0),
        ((*ALONE, "shards=1", BLOCKING, "optimizer.n_fetch=2"), 1),
    ],
)
def test_a_shard_is_told_how_many_threads_compute_beside_it(
    overrides: tuple[str, ...], busy: int, tmp_path: Path
) -> None:
    given = load(str(FILE), ["evaluate.every=1 epoch", "threads=1", *overrides])
    plan = make_plan(given, rows=100, test_rows=20, cores=2)
    assert spec_of(nodes_of(plan, tmp_path)["shard-0"]).busy == busy


def test_a_shard_updates_with_the_cores_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    spec = spec_of(nodes_of(make(), tmp_path)["shard-0"])
    assert spec.shards_here == 4
    for busy, shards, threads in ((0, 1, 4), (1, 1, 3), (5, 1, 1), (0, 2, 2), (1, 2, 1)):
        told = msgspec.structs.replace(spec, busy=busy, shards_here=shards)
        shard = build(told, PlainBuffer)
        assert shard.slices[0]._team._threads == threads


@pytest.mark.parametrize("overrides", [(GOES_ON,), (BLOCKING,), (BLOCKING, "optimizer.n_fetch=2")])
def test_a_worker_compiles_what_it_moves_parameters_with(
    overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each step begins with a fetch of its own last push, nothing: numba is 100 MB."""
    compiled: list[int] = []
    monkeypatch.setattr(build_module, "prepare", lambda n, dtype: compiled.append(n))
    plan = make_plan(load(str(FILE), [*overrides]), rows=100, test_rows=20, cores=2)
    build(spec_of(nodes_of(plan, tmp_path)["worker-0.0"]), PlainBuffer)
    assert compiled == ([] if overrides == (BLOCKING,) else [plan.n_parameters])


def test_only_what_is_on_a_shards_own_host_counts(tmp_path: Path) -> None:
    hosts = "[{name: a, labels: [shard]}, {name: b, labels: [worker, evaluator]}]"
    given = load(str(FILE), ["threads=1", "shards=1", f"cluster={{launcher: ssh, hosts: {hosts}}}"])
    plan = make_plan(given, rows=100, test_rows=20, cores=2)
    assert busy_beside(plan, plan.of_role("shard")[0]) == 0
    assert spec_of(nodes_of(plan, tmp_path, wiring=wiring_of(plan))["shard-0"]).shards_here == 1


@pytest.mark.parametrize(
    ("partition", "replicas", "threads"),
    [
        (PartitionSpec(), 2, 4),
        (PartitionSpec(count=2), 2, 2),
        (PartitionSpec(grid=(2, 2)), 1, 2),
        (PartitionSpec(count=16), 1, 1),
    ],
)
def test_cores_are_shared_out_among_all_partitions(
    partition: PartitionSpec, replicas: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    given = replace(experiment(replicas=replicas), partition=partition, threads=None)
    assert resolve_threads(given).threads == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert resolve_threads(given).threads == 3
    assert resolve_threads(replace(given, threads=5)).threads == 5


def test_all_missing_files_of_both_splits_are_named_at_once() -> None:
    names = [
        f"/none/{split}-{part}" for split in ("train", "test") for part in ("images", "labels")
    ]
    train, test = (IdxSource(images=i, labels=n) for i, n in (names[:2], names[2:]))
    with pytest.raises(DataError) as raised:
        open_data(experiment(data=DataSpec(train=train, test=test)))
    assert all(f"{name}: no such file" in str(raised.value) for name in names)


def test_files_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr(
        "dbctl.data.sources.open_file",
        lambda path, key: looked.append(path) or open_file(path, key),  # type: ignore[func-returns-value]
    )
    open_data(experiment())
    assert looked == [DIGITS_PATH]


def test_the_digest_is_of_the_network_and_not_of_how_it_is_run() -> None:
    whole = experiment()
    same = (experiment(count=2), replace(whole, seed=9), replace(whole, shards=1, replicas=1))
    assert {network_digest(each) for each in same} == {network_digest(whole)}
    text = FILE.read_text(encoding="utf-8")
    units = parse(text, overrides=["network.layers.0.units=33"])
    assert network_digest(units) != network_digest(whole)


def test_a_checkpoint_has_the_parameters_and_the_rules_state() -> None:
    assert state_vectors(experiment()) == ["parameters", "sum_of_squares"]
