"""Three hosts for real (tests/cluster/netns.py): no memory, no files and no address in common."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cluster.netns import WORKDIR, Hosts
from tests.cluster.runs import TrainRun, digits, finish_all, wait_for
from tests.cluster.test_ssh_runs import bits, dbctl

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(90)]

START_LIMIT_S = 20.0  # of a start whose aim is 6 s, on a machine that has other things to do
BLOCKING: dict[str, Any] = {
    "type": "downpour",
    "batch_size": 32,
    "overlap": False,
    "rule": {"type": "adagrad", "rate": 0.05},
}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    directory = tmp_path_factory.mktemp("hosts")
    with Hosts(directory, ("a", "b", "c"), hidden=tmp_path_factory.getbasetemp()) as three:
        yield three


@pytest.fixture(autouse=True)
def with_wrapper(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    monkeypatch.setenv("PATH", hosts.path)
    yield
    hosts.end(request.node)


def cluster(hosts: Hosts, **places: Any) -> dict[str, Any]:
    """`places`: slots, or slots and labels, of each host that takes part."""
    members = []
    for name, place in places.items():
        slots, *labels = place if isinstance(place, tuple) else (place,)
        there = {"python": hosts.python, "workdir": WORKDIR, "labels": labels}
        members.append({"name": name, "ssh": hosts.address[name], "slots": slots, **there})
    return {"launcher": "ssh", "hosts": members}


def first_step_after(run: TrainRun) -> float:
    begin = time.monotonic()
    wait_for(lambda: any(r["step"] for r in run.metrics("worker")), "a first step")
    return time.monotonic() - begin


def assert_only_own_addresses(hosts: Hosts) -> None:
    """`ss -ltnp`: nothing listens on all addresses, and what is not sshd has a port of its own."""
    n_ports = 0
    for name in hosts.space:
        for address, who in hosts.listening(name).items():
            own = address.rpartition(":")[0].replace("[::ffff:", "").rstrip("]")
            assert own == hosts.address[name], (name, address, who)
            n_ports += "sshd" not in who
    assert n_ports > 0, "they speak to each other over tcp"


def test_three_shards_and_two_cut_replicas_learn_as_well_as_here(
    hosts: Hosts, tmp_path: Path
) -> None:
    experiment = digits(shards=3, partition={"count": 2}, threads=1, stop={"epochs": 6})
    accuracy = {}
    for name, changes in (("local", {}), ("spread", {"cluster": cluster(hosts, a=3, b=3, c=3)})):
        with TrainRun(tmp_path, experiment | changes, name=name) as run:
            if changes:
                took_s = first_step_after(run)
                print(f"first step after {took_s:.1f} s")
                assert_only_own_addresses(hosts)
                assert took_s < START_LIMIT_S
            assert run.finish() == 0, run.story()
            accuracy[name] = run.status()["test_accuracy"]
    assert hosts.left() == []
    assert accuracy["spread"] > accuracy["local"] - 0.03, accuracy


def test_a_replica_over_hosts_is_trained_resumed_and_measured_with_the_same_bits(
    hosts: Hosts, tmp_path: Path
) -> None:
    """Rung 8 of the ladder; no host sees the run directory, its checkpoint or its statistics."""
    experiment = digits(
        replicas=1,
        shards=3,
        partition={"count": 2},
        threads=1,
        optimizer=BLOCKING,
        stop={"steps": 60},
        evaluate="off",
    )
    experiment["data"] = {
        split: {"source": "digits", "split": split, "standardize": True}
        for split in ("train", "test")
    }
    three = cluster(hosts, a=(1, "worker"), b=2, c=(2, "shard"))
    two = json.dumps(cluster(hosts, a=4, c=(3, "shard", "evaluator")))
    with (
        TrainRun(tmp_path, experiment, name="local") as local,
        TrainRun(tmp_path, experiment | {"cluster": three}, name="spread") as spread,
    ):
        finish_all(local, spread)

    def go_on(run: TrainRun, *later: str) -> tuple[Any, ...]:
        first = bits(run.dir)
        dbctl("resume", str(run.dir), "--set", "stop.steps=100", *later)
        second = bits(run.dir)
        assert (first[0], second[0]) == (60, 100)
        measured = json.loads(dbctl("eval", str(run.dir), "--json"))
        return first, second, measured["loss"], measured["confusion"]

    with ThreadPoolExecutor() as pool:
        here = pool.submit(go_on, local)
        there = pool.submit(go_on, spread, "--set", f"cluster={two}")
        assert there.result() == here.result()
    assert hosts.left() == []


def test_nothing_is_left_on_any_host_when_the_controller_is_killed(
    hosts: Hosts, tmp_path: Path
) -> None:
    """G11: all ends with ssh's pipe, wherever it is."""
    experiment = digits(shards=2, threads=1, stop={"seconds": 60}, evaluate="off")
    places = cluster(hosts, a=2, b=1, c=(1, "shard"))
    with TrainRun(tmp_path, experiment | {"cluster": places}) as run:
        first_step_after(run)
        assert all(hosts.processes(name) for name in hosts.space)
        os.kill(run.pid, signal.SIGKILL)
        wait_for(lambda: not any(map(hosts.processes, hosts.space)), "all to end", 12.0)
        assert all("sshd" in who for n in hosts.space for who in hosts.listening(n).values())
        shutil.rmtree(run.runtime or "", ignore_errors=True)  # the killed one's own
    for name in hosts.space:  # logs that could not be sent stay, and say why
        for path in (hosts.seen(name) / WORKDIR[1:]).iterdir():
            assert "standard input ended" in "".join(p.read_text() for p in path.iterdir())
            shutil.rmtree(path)
    assert hosts.left() == []


def test_an_address_that_is_not_the_hosts_own_is_told(hosts: Hosts, tmp_path: Path) -> None:
    places = cluster(hosts, a=(2, "worker"), b=(2, "shard"))
    places["hosts"][1]["address"] = "10.66.0.99"
    experiment = digits(threads=1, evaluate="off", cluster=places)
    with TrainRun(tmp_path, experiment) as run:
        assert run.finish() == 3, run.story()
        assert "1 of 2 hosts is not ready, and nothing was started" in run.err
        assert re.search(r"  b  address  cannot listen on its address: cannot assign", run.err)
        assert "do: give it the `address` that is its own" in run.err
        assert "Traceback" not in run.err
    assert hosts.left() == []


def leave(hosts: Hosts) -> subprocess.Popen[bytes]:
    """One of each kind: a process, a directory, files, a name that leads nowhere."""
    process = subprocess.Popen([*hosts.inside("b"), "sleep", "60"])
    wait_for(lambda: "sleep 60" in hosts.processes("b").values(), "the process")
    work = hosts.seen("a") / WORKDIR[1:]
    (work / "run" / "logs").mkdir(parents=True)
    (work / "note").touch()
    (work / "link").symlink_to("nowhere")
    (hosts.seen("c") / "tmp" / "dbctl-note").touch()
    return process


@pytest.mark.parametrize("failed", [False, True])
def test_what_a_test_leaves_on_hosts_fails_it_if_it_passed_and_is_gone(
    hosts: Hosts, failed: bool
) -> None:
    test: Any = SimpleNamespace(failed_call=failed)
    with leave(hosts) as process:
        try:
            hosts.end(test, but=("/note",))
        except AssertionError as error:
            told = str(error)
            assert not failed, told
            for what in ("b: sleep 60", "/tmp/work/run'", "/tmp/work/link'", "/tmp/dbctl-note'"):
                assert what in told
            assert "/tmp/work/note" not in told
        else:
            assert failed, "it passed, and left much"
        assert process.wait(10) == -signal.SIGKILL
    assert hosts.left() == []
