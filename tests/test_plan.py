"""The plan: which node does what, with which slice, rows, threads and memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbctl.errors import PlanError
from dbctl.experiment.read import load
from dbctl.experiment.specs import Experiment, PartitionSpec
from dbctl.plan import (
    EVALUATION_BATCH,
    PROCESS_BYTES,
    NodeSpec,
    Plan,
    make_evaluation_plan,
    make_plan,
)
from dbctl.region import Range
from dbctl.run.dry import plan_lines
from dbctl.shards import SHARD_ALIGN, ShardSpan, shard_spans
from dbctl.wire import Position

FILE = Path(__file__).parent.parent / "experiments" / "digits-downpour.yaml"
SMALL = ("replicas=3", "shards=2", "evaluate.every=1 epoch")
LAYERS = "network.layers=[{type: dense, units: 100, activation: tanh}, {type: dense, units: 10}]"
SIZE = 64 * 100 + 100 + 100 * 10 + 10


def experiment(*overrides: str) -> Experiment:
    return load(str(FILE), [LAYERS, *SMALL, *overrides])


def make(*overrides: str, **changes: Any) -> Plan:
    given_ = {"rows": 100, "test_rows": 20, "cores": 8} | changes
    return make_plan(experiment(*overrides), **given_)


def test_every_node_has_its_place() -> None:
    plan = make()
    assert [(n.node, n.role, n.replica) for n in plan.nodes] == [
        ("shard-0", "shard", 0),
        ("shard-1", "shard", 0),
        ("worker-0.0", "worker", 0),
        ("worker-1.0", "worker", 1),
        ("worker-2.0", "worker", 2),
        ("evaluator-0", "evaluator", 0),
    ]
    assert [n.node for n in plan.of_role("worker")] == ["worker-0.0", "worker-1.0", "worker-2.0"]
    assert plan.n_parameters == SIZE


def test_rows_are_shared_out_within_one() -> None:
    assert make().rows == (34, 33, 33)
    assert make(rows=2).rows == (1, 1, 0)


@given(st.integers(1, 5000), st.integers(1, 40))
def test_shards_cover_the_parameters_once_in_balance(n_parameters: int, shards: int) -> None:
    """Paper A, section 4.1: each of N machines applies updates to 1/N of the parameters."""
    spans = shard_spans(n_parameters, shards)
    assert spans[0].start == 0
    assert spans[-1].stop == n_parameters
    assert all(a.stop == b.start for a, b in pairwise(spans))
    assert all(span.start % SHARD_ALIGN == 0 for span in spans)
    assert [span.node for span in spans] == [f"shard-{i}" for i in range(len(spans))]
    sizes = [span.stop - span.start for span in spans]
    assert min(sizes) > 0  # what would hold nothing is left out
    assert len(spans) == min(shards, -(-n_parameters // SHARD_ALIGN))
    assert max(sizes) - min(sizes) <= 2 * SHARD_ALIGN


@given(
    st.integers(1, 5000), st.integers(1, 40), st.lists(st.integers(0, 5000), max_size=6), st.data()
)
def test_a_cut_between_shards_is_where_a_partition_ends_if_one_does_close_by(
    n_parameters: int, shards: int, ends: list[int], data: st.DataObject
) -> None:
    cuts = [0, *sorted(min(end, n_parameters) for end in ends), n_parameters]
    partitions = [Range(*pair) for pair in pairwise(cuts)]
    equal = shard_spans(n_parameters, shards)
    spans = shard_spans(n_parameters, shards, partitions=partitions)
    assert [span.node for span in spans] == [span.node for span in equal]
    assert (spans[0].start, spans[-1].stop) == (0, n_parameters)
    assert all(a.stop == b.start for a, b in pairwise(spans))
    assert all(span.start < span.stop for span in spans)
    near = n_parameters / len(spans) / 8
    for span, other in zip(spans[1:], equal[1:], strict=True):
        inside = (abs(cut - other.start) for cut in cuts if 0 < cut < n_parameters)
        closest = min(inside, default=near + 1)
        assert abs(span.start - other.start) == (closest if closest <= near else 0)


def test_as_many_partitions_as_shards_talk_to_one_each() -> None:
    """fashion-local's are of 532,997 parameters: equal slices of whole cache lines left 5 over."""
    cut = load(str(FILE.with_name("fashion-local.yaml")), ["partition.count=2", "shards=2"])
    plan = make_plan(cut, rows=100, test_rows=100, cores=2)
    for partition in range(2):
        span = plan.cut.span(partition)
        alone = ShardSpan(f"shard-{partition}", span.start, span.stop)
        assert plan.held_by(partition) == (alone,)
    assert make_evaluation_plan(cut, rows=100, evaluators=1).shards == plan.shards


def test_threads_are_the_cores_shared_out_or_what_was_said() -> None:
    def threads(plan: Plan) -> list[int]:
        return [node.threads for node in plan.nodes]

    assert threads(make(cores=8)) == [1, 1, 2, 2, 2, 1]
    assert threads(make(cores=2)) == [1] * 6
    assert threads(make("threads=3", cores=2)) == [1, 1, 3, 3, 3, 1]
    assert threads(make("threads=3", threads=4)) == [1, 1, 4, 4, 4, 1]


def test_bytes_a_step_follow_n_fetch_and_n_push() -> None:
    assert make("optimizer.n_fetch=2", "optimizer.n_push=4").bytes_a_step() == (
        4 * SIZE // 2,
        4 * SIZE // 4,
    )


def test_memory_counts_buffers_state_and_rows() -> None:
    shard, _, worker, _, _, evaluator = make().nodes
    half = make().shards[0].stop
    # Three buffers of parameters, and Adagrad's sums twice: the copy that a cut hands out.
    assert shard.memory_bytes == PROCESS_BYTES + half * 4 * (3 + 2)
    more = make(rows=200).of_role("worker")[0]
    assert more.memory_bytes - worker.memory_bytes == (67 - 34) * 64 * 4
    # A mini-batch: its inputs, and the states of 110 nodes with the gradients by them.
    full = make(rows=3000).of_role("worker")[0]
    short = make("optimizer.batch_size=8", rows=3000).of_role("worker")[0]
    assert full.memory_bytes - short.memory_bytes == (32 - 8) * (64 + 2 * 110) * 4
    assert evaluator.memory_bytes == PROCESS_BYTES + 4 * (SIZE + 20 * 64 + 20 * (64 + 110))
    many = make(test_rows=9000).of_role("evaluator")[0]
    passes = EVALUATION_BATCH * (64 + 110)
    assert many.memory_bytes == PROCESS_BYTES + 4 * (SIZE + 9000 * 64 + passes)


def test_nothing_is_measured_without_a_test_split_or_with_evaluate_off() -> None:
    assert make("evaluate.every=off").of_role("evaluator") == []


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(PlanError, match="no rows"):
        make(rows=0)
    with pytest.raises(PlanError, match=r"partition\.count: expected at most 100, .* found 101"):
        make_plan(
            replace(experiment(), partition=PartitionSpec(count=101)), rows=9, test_rows=9, cores=1
        )


HOSTS = "cluster={launcher: ssh, hosts: [{name: a, slots: 3, threads: 4}, {name: b}, {name: c}]}"


def test_nodes_carry_their_hosts_and_the_threads_of_those() -> None:
    plan = make(HOSTS, "threads=2", "partition.count=2")
    assert plan.hosts == ("a", "b", "c")
    assert [plan.agent_of(host) for host in plan.hosts] == ["agent-0", "agent-1", "agent-2"]
    for replica in range(3):
        assert len({node.host for node in plan.replica_of(replica)}) == 1
    assert len({node.host for node in plan.of_role("shard")}) == 2
    for node in plan.nodes:
        wanted = {"a": 4}.get(node.host, 2) if node.role == "worker" else 1
        assert node.threads == wanted
    assert make().hosts == ("localhost",)


def test_a_host_that_runs_nothing_has_no_agent_and_keeps_its_number() -> None:
    idle = HOSTS.replace("{name: b}", "{name: b, labels: [evaluator]}")
    plan = make(idle, "evaluate=off")
    assert plan.hosts == ("a", "c")
    assert [plan.agent_of(host) for host in plan.hosts] == ["agent-0", "agent-2"]


def test_an_evaluation_is_placed_too() -> None:
    plan = make_evaluation_plan(experiment(HOSTS), rows=100, evaluators=3)
    assert set(plan.hosts) == {"a", "b", "c"}


def test_too_few_slots_are_said_with_the_sum() -> None:
    few = "cluster={launcher: ssh, hosts: [{name: a, slots: 3}, {name: b, slots: 2}]}"
    said = r"2 for shards \+ 3 for workers \+ 1 for evaluators = 6, found 3 on a \+ 2 on b = 5"
    with pytest.raises(PlanError, match=said):
        make(few)


def test_the_text_of_the_plan() -> None:
    lines = list(plan_lines(make()))
    assert lines[0] == "parameters  7,510 in 4 tensors"
    sizes = "a step      fetches 29.3 KiB and pushes 29.3 KiB a replica"
    assert lines[1] == f"{sizes}, which waits for both"
    between = "cluster={launcher: ssh, hosts: [{name: a}, {name: b}]}"
    assert list(plan_lines(make(between)))[1] == f"{sizes}, which computes meanwhile"
    assert lines[2] == "rows        34, 33, 33 (one figure a replica)"
    assert lines[3] == ""
    assert [line.split()[0] for line in lines[4:]] == ["node", *(n.node for n in make().nodes)]
    assert lines[5].startswith("shard-0       localhost         1")
    assert lines[5].endswith("parameters [0, 3760)")
    assert lines[-1].endswith("measures 20 rows every 1 epoch")


def test_replicas_without_rows_are_one_line() -> None:
    lines = list(plan_lines(make("replicas=40", rows=30)))
    assert lines[2] == f"rows        {', '.join(['1'] * 30)} (one figure a replica)"
    assert sum(line.startswith("worker-29.0 ") for line in lines) == 1
    assert lines[-1] == "replicas 30 to 39 have no rows"
    assert not any("worker-30.0" in line for line in lines)
    assert list(plan_lines(make("replicas=31", rows=30)))[-1] == "replica 30 has no rows"


def test_many_replicas_do_not_keep_a_signal_waiting() -> None:
    """`between` is asked for each replica while nodes are made, and again while they are placed."""

    class Interrupted(Exception):
        pass

    for last in (7, 20 + 7):
        left = iter(range(1, last))

        def between(left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise Interrupted

        with pytest.raises(Interrupted):
            make("cluster={launcher: ssh, hosts: [{name: a}]}", "replicas=20", between=between)


def test_groups_are_found_in_time_that_grows_with_the_replicas() -> None:
    plan = make("replicas=20000", "evaluate=off", rows=20000)
    began = time.thread_time()
    found = [node.node for replica in range(20000) for node in plan.replica_of(replica)]
    assert time.thread_time() - began < 5.0
    assert found[::9999] == ["worker-0.0", "worker-9999.0", "worker-19998.0"]


def test_a_worker_that_waits_for_each_push_has_one_slot() -> None:
    """It computes into memory that it has used before, and holds a vector less."""
    of_two, of_one, asked = (
        make(*said).of_role("worker")[0].memory_bytes
        for said in (
            ("optimizer.overlap=true",),
            ("optimizer.overlap=false",),
            ("optimizer.overlap=false", "optimizer.slots=9"),
        )
    )
    plan = make()
    assert of_two - of_one == plan.n_parameters * 4
    assert asked == of_one
    assert (
        make("optimizer.overlap=false", "optimizer.n_fetch=2").of_role("worker")[0].memory_bytes
        == of_two
    )


def test_the_columns_are_as_wide_as_the_names() -> None:
    cut = replace(experiment(), partition=PartitionSpec(count=12))
    lines = list(plan_lines(make_plan(cut, rows=99, test_rows=20, cores=2)))
    assert any(line.startswith("evaluator-0.11  localhost  ") for line in lines)
    assert len({line.index("localhost") for line in lines[5:]}) == 1


def test_a_node_spec_goes_through_json() -> None:
    spec = NodeSpec(
        run="r",
        node="worker-1.0",
        role="worker",
        incarnation=2,
        runtime="/x",
        agent="ipc:///x/a",
        lease_s=10.0,
        threads=1,
        experiment="{}",
        shards=(ShardSpan("shard-0", 0, 5),),
        position=Position(3, 1, 0),
    )
    assert msgspec.json.decode(msgspec.json.encode(spec), type=NodeSpec) == spec
