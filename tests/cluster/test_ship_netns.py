"""`ship: true` on hosts that share no file with this machine (tests/cluster/netns.py)."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.netns import WORKDIR, Hosts, call
from tests.cluster.runs import TrainRun, finish_all, wait_for
from tests.cluster.test_hosts_netns import BLOCKING, cluster
from tests.cluster.test_ship_runs import large, prepared, shipped, write_digits
from tests.cluster.test_ssh_runs import EXPERIMENT, bits

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(90)]

DATA = (f"{WORKDIR}/data",)  # stays on a host, for the next run


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    directory = tmp_path_factory.mktemp("hosts")
    with Hosts(directory, ("a", "b"), hidden=tmp_path_factory.getbasetemp()) as two:
        yield two


@pytest.fixture(autouse=True)
def with_wrapper(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    monkeypatch.setenv("PATH", hosts.path)
    yield
    hosts.end(request.node, but=DATA)


def data_of(hosts: Hosts, name: str) -> Path:
    return hosts.seen(name) / WORKDIR[1:] / "data"


def kept(hosts: Hosts, name: str) -> list[int]:
    return sorted(path.stat().st_size for path in data_of(hosts, name).glob("*"))


def assert_only_data_is_left(hosts: Hosts) -> None:
    assert hosts.left(but=DATA) == []


def test_each_host_has_its_own_replicas_rows_only(hosts: Hosts, tmp_path: Path) -> None:
    """One replica of two partitions a host, the evaluator on b: three sets of rows, each once."""
    data = write_digits(tmp_path / "data")
    experiment = EXPERIMENT | {
        "data": prepared(data, ship=True, scale=0.0625),
        "replicas": 2,
        "partition": {"count": 2},
        "evaluate": {"every": "30 steps"},
        "cluster": cluster(hosts, a=(3, "worker", "shard"), b=7),
    }
    for name in ("first", "second"):
        with TrainRun(tmp_path, experiment, name=name) as run:
            assert run.finish() == 0, run.story()
        assert run.status()["test_accuracy"] is not None
        assert_only_data_is_left(hosts)
    pixels = {name: sum(n for n in kept(hosts, name) if n > 5000) for name in hosts.space}
    n_train, n_test = 1438, 359
    assert sum(pixels.values()) == 64 * (n_train + n_test) + 3 * 128, pixels
    assert len(kept(hosts, "a")) + len(kept(hosts, "b")) == 6
    sent = shipped(tmp_path / "first")
    assert sum(sent.values()) == sum(kept(hosts, "a")) + sum(kept(hosts, "b"))
    assert shipped(tmp_path / "second") == {}


def test_a_blocking_replica_over_hosts_has_the_bits_of_the_file_by_path(
    hosts: Hosts, tmp_path: Path
) -> None:
    """Rung 8 of the ladder; each partition's host is sent all rows of the replica."""
    data = write_digits(tmp_path / "data")
    spread = {
        "data": prepared(data, ship=True, standardize=True),
        "cluster": cluster(hosts, a=(1, "worker"), b=3),
    }
    whole = EXPERIMENT | {"partition": {"count": 2}, "optimizer": BLOCKING}
    here = {"data": prepared(data, standardize=True)}
    with (
        TrainRun(tmp_path, whole | here, name="local") as one,
        TrainRun(tmp_path, whole | spread, name="spread") as other,
    ):
        finish_all(one, other)
    assert bits(other.dir) == bits(one.dir)
    assert kept(hosts, "a") == kept(hosts, "b")
    assert_only_data_is_left(hosts)


@pytest.mark.quiet
def test_no_lease_runs_out_behind_data_on_a_slow_line(hosts: Hosts, tmp_path: Path) -> None:
    """8 Mbit/s to each host, a lease of 2 s, 8 MB: it takes as long as the line needs."""
    there = cluster(hosts, a=2, b=2)
    experiment: dict[str, Any] = large(tmp_path / "data", there, shards=2)
    experiment["data"]["train"]["rows"] = 10_000
    link = ["dev", "to-a"], ["dev", "to-b"]
    for dev in link:
        words = ["root", "tbf", "rate", "8mbit", "burst", "32kb", "latency", "2s"]
        call("tc", "-n", hosts.switch, "qdisc", "add", *dev, *words)
    try:
        with TrainRun(tmp_path, experiment, lease_s=2.0) as run:
            assert run.finish(60.0) == 0, run.story()
        seconds = wait_for(lambda: run.metrics("shipped"), "what was sent")
        assert sum(row["sent_bytes"] for row in seconds) == 2 * (5000 * 784 + 128 + 5000 + 128)
    finally:
        for dev in link:
            subprocess.run(["tc", "-n", hosts.switch, "qdisc", "del", *dev, "root"], check=True)
