"""Placement: everything that can be placed is, what belongs together is together, shards apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dbctl.errors import PlanError
from dbctl.experiment.specs import HostSpec
from dbctl.placement import ROLES, place


def host(name: str, slots: int | None = None, *labels: str) -> HostSpec:
    return HostSpec(name=name, slots=slots, labels=labels)  # type: ignore[arg-type]


def names(role: str, n: int) -> list[str]:
    return [f"{role}-{i}" for i in range(n)]


def groups(role: str, n: int, partitions: int) -> list[list[str]]:
    return [[f"{role}-{i}.{p}" for p in range(partitions)] for i in range(n)]


def put(
    hosts: Sequence[HostSpec], shards: int, replicas: int, partitions: int = 1, evaluators: int = 0
) -> dict[str, str]:
    return place(
        hosts,
        shards=names("shard", shards),
        replicas=groups("worker", replicas, partitions),
        evaluators=groups("evaluator", evaluators, partitions),
    )


HOSTS = st.lists(
    st.tuples(
        st.none() | st.integers(1, 5),
        st.lists(st.sampled_from(ROLES), unique=True, max_size=3),
    ),
    min_size=1,
    max_size=4,
).map(lambda rows: [host(f"h{i}", n, *labels) for i, (n, labels) in enumerate(rows)])
SHARDS, REPLICAS = st.integers(1, 4), st.integers(0, 4)
PARTITIONS, EVALUATORS = st.integers(1, 3), st.integers(0, 1)


def can_be_placed(hosts: Sequence[HostSpec], needs: dict[str, int]) -> bool:
    """By trying every way to share out the slots of each host among the roles; slow and obvious."""
    total = sum(needs.values())
    ways = []
    for one in hosts:
        counts = [range(total + 1 if role in (one.labels or ROLES) else 1) for role in ROLES]
        counts = [
            range(min(len(r), needs[role] + 1)) for r, role in zip(counts, ROLES, strict=True)
        ]
        ways.append([way for way in product(*counts) if sum(way) <= (one.slots or total)])
    reached = {(0, 0, 0)}
    for options in ways:
        sums = (tuple(map(sum, zip(a, b, strict=True))) for a in reached for b in options)
        reached = {
            way for way in sums if all(n <= needs[r] for n, r in zip(way, ROLES, strict=True))
        }
    return tuple(needs[role] for role in ROLES) in reached


@given(HOSTS, SHARDS, REPLICAS, PARTITIONS, EVALUATORS)
def test_what_can_be_placed_is_and_within_slots_and_labels(
    hosts: list[HostSpec], shards: int, replicas: int, partitions: int, evaluators: int
) -> None:
    needs = {"shard": shards, "worker": replicas * partitions, "evaluator": evaluators * partitions}
    try:
        found = put(hosts, shards, replicas, partitions, evaluators)
    except PlanError:
        assert not can_be_placed(hosts, needs)
        return
    assert len(found) == sum(needs.values())
    by_name = {one.name: one for one in hosts}
    for node, name in found.items():
        assert node.partition("-")[0] in (by_name[name].labels or ROLES)
    for name, n in Counter(found.values()).items():
        assert n <= (by_name[name].slots or n)


@given(HOSTS, REPLICAS, PARTITIONS)
def test_a_replica_is_on_one_host_where_it_fits(
    hosts: list[HostSpec], replicas: int, partitions: int
) -> None:
    """At each replica's turn: it is apart only if no host had room for all of it."""
    try:
        found = put(hosts, 1, replicas, partitions)
    except PlanError:
        assume(False)
    free = {one.name: one.slots or 99 for one in hosts}
    shard_at = found["shard-0"]
    for r in range(replicas):
        places = [found[f"worker-{r}.{p}"] for p in range(partitions)]
        if len(set(places)) > 1:
            for one in hosts:
                may = "worker" in (one.labels or ROLES)
                kept = one.name == shard_at  # a slot may be left for the only shard
                assert not may or free[one.name] - kept < partitions
        for name in places:
            free[name] -= 1


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 4))
def test_shards_are_spread_evenly_where_there_is_room(
    n_hosts: int, shards: int, replicas: int
) -> None:
    found = put([host(f"h{i}") for i in range(n_hosts)], shards, replicas)
    counts = Counter(found[name] for name in names("shard", shards))
    each = [counts[f"h{i}"] for i in range(n_hosts)]
    assert max(each) - min(each) <= 1
    workers = Counter(found[f"worker-{i}.0"] for i in range(replicas))
    assert max(workers.values()) - min(workers[f"h{i}"] for i in range(n_hosts)) <= 1


@given(HOSTS, SHARDS, REPLICAS, PARTITIONS)
def test_equal_input_gives_equal_places(
    hosts: list[HostSpec], shards: int, replicas: int, partitions: int
) -> None:
    try:
        found = put(hosts, shards, replicas, partitions)
    except PlanError:
        assume(False)
    assert put(hosts, shards, replicas, partitions) == found


def test_three_hosts_two_cut_replicas() -> None:
    found = put([host("a", 4), host("b", 4), host("c", 4)], 3, 2, 2, 1)
    assert {found["worker-0.0"], found["worker-0.1"]} == {"a"}
    assert {found["worker-1.0"], found["worker-1.1"]} == {"b"}
    assert [found[f"shard-{i}"] for i in range(3)] == ["c", "a", "b"]
    assert {found["evaluator-0.0"], found["evaluator-0.1"]} == {"c"}


def test_a_slot_is_left_for_who_can_go_nowhere_else() -> None:
    found = put([host("a", 1), host("b", 2, "worker")], 1, 2)
    assert found == {"worker-0.0": "b", "worker-1.0": "b", "shard-0": "a"}


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (
            [host("a", 2), host("b", 1)],
            "2 for shards + 2 for workers = 4, found 2 on a + 1 on b = 3",
        ),
        ([host("a", 9, "worker")], "expected 2 for shards, found none on the hosts that may run"),
        ([host("a", 1, "shard"), host("b")], None),
        (
            [host("a", 1, "shard"), host("b", 9, "worker")],
            "2 for shards, found 1 on a on the hosts",
        ),
    ],
)
def test_the_arithmetic_is_said(hosts: list[HostSpec], words: str | None) -> None:
    if words is None:
        assert put(hosts, 2, 2)["shard-0"] in "ab"
        return
    with pytest.raises(PlanError) as caught:
        put(hosts, 2, 2)
    assert words in str(caught.value)
