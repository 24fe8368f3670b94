"""dbctl/run/wiring.py: who is told which keys and addresses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dbctl.experiment.read import load
from dbctl.plan import Plan, make_plan
from dbctl.run.wiring import Ends, Wiring, apart, ends_of, wired

ROOT = Path(__file__).parent.parent


def plan(*more: str) -> Plan:
    settings = ["replicas=2", "shards=2", "partition.count=2", *more]
    experiment = load(str(ROOT / "experiments/digits-downpour.yaml"), settings)
    return make_plan(experiment, rows=100, test_rows=10, cores=2)


def test_on_one_host_nothing_is_told() -> None:
    wiring = wired(plan(), {})
    assert wiring.encryption is None
    for ends in ends_of(plan(), wiring, incarnation=1).values():
        assert ends == Ends(tcp=None, far=(), apart=())


def test_a_host_that_shares_no_memory_sends_the_controller_all() -> None:
    wiring = replace(wired(plan(), {}), far=frozenset({"localhost"}))
    for ends in ends_of(plan(), wiring, incarnation=1).values():
        assert ends == Ends(tcp=None, far=("controller",), apart=())


def test_encryption_is_on_unless_it_is_written() -> None:
    for written, encryption in (("on", "on"), ("off", "off")):
        hosts = "hosts: [{name: a, slots: 3}, {name: b}]"
        cluster = f"cluster={{launcher: ssh, encryption: {written}, {hosts}}}"
        placed = plan(cluster)
        wiring = wired(placed, {"a": "10.0.0.1", "b": "10.0.0.2"})
        assert wiring.encryption == encryption
        assert wiring.host_of == {node.node: node.host for node in placed.nodes}


def told(ends: Ends) -> dict[str, str]:
    assert ends.tcp is not None
    return {node: key for node, _, key in ends.tcp.keys}


def test_apart_everybody_knows_the_keys_of_those_it_talks_to_and_no_others() -> None:
    ends = ends_of(plan(), apart(plan(), "10.0.0.1"), incarnation=3)
    public = {name: end.tcp.public for name, end in ends.items() if end.tcp}
    secrets = {end.tcp.secret for end in ends.values() if end.tcp}
    assert len(secrets) == len(set(public.values())) == len(plan().nodes)
    for name, end in ends.items():
        assert end.tcp is not None
        assert end.tcp.encrypted
        assert {incarnation for _, incarnation, _ in end.tcp.keys} == {3}
        assert told(end) == {other: public[other] for other in end.apart}
        assert all(name in ends[other].apart for other in end.apart), "either way"
        assert end.far == ("controller",)
    assert "worker-1.1" in told(ends["worker-1.0"])
    assert "worker-0.1" not in told(ends["worker-1.0"])
    assert "shard-1" not in told(ends["shard-0"])


def test_keys_are_new_each_time_and_none_without_encryption() -> None:
    first, second = (ends_of(plan(), apart(plan(), "::1"), incarnation=1) for _ in range(2))
    assert first["shard-0"].tcp != second["shard-0"].tcp
    off = ends_of(plan(), apart(plan(), "::1", encrypted=False), incarnation=1)
    assert off["shard-0"].tcp is not None
    assert not off["shard-0"].tcp.encrypted
    assert set(told(off["shard-0"]).values()) == {""}


def test_two_hosts_listen_only_where_somebody_of_the_other_comes() -> None:
    hosts = {node.node: "a" for node in plan().nodes} | {"shard-1": "b"}
    wiring = Wiring(host_of=hosts, address_of={"a": "10.0.0.1", "b": "10.0.0.2"})
    ends = ends_of(plan(), wiring, incarnation=1)
    assert ends["shard-0"].tcp is None
    assert ends["shard-1"].tcp is not None
    assert ends["shard-1"].tcp.address == "10.0.0.2"
    talking = [end for name, end in ends.items() if end.apart and name != "shard-1"]
    assert talking
    for end in talking:
        assert end.tcp is not None
        assert (end.tcp.address, end.apart, end.far) == ("", ("shard-1",), ())
