"""G12 in whole runs: strangers of other hosts, other users of the same host, and eavesdroppers.

Three hosts (netns.py): two of a run, and one that has no part in it. What the strangers do is in
stranger.py; that it had no effect is seen in the run's end, its memory, its logs, and their ears.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from zmq.utils import z85

from dbctl.checkpoint.reader import open_checkpoint
from dbctl.region import Range
from tests.cluster.netns import WORKDIR, Hosts
from tests.cluster.runs import ENDLESS, TrainRun, digits, kill, wait_for
from tests.cluster.sshd import ROOT
from tests.cluster.test_hosts_netns import BLOCKING, assert_only_own_addresses, first_step_after
from tests.cluster.test_ssh_runs import bits, dbctl

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(90)]

MIB = 1 << 20
NOBODY = 65534
PACE_S = 0.01  # of a step, beside what it takes: strangers take their time, not the steps' count
WITHOUT_A_KEY = ("silent", "noise", "oversize", "endless", "no_key", "wrong_key")
WITH_A_KEY = ("own_key", "wrong_server_key")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    directory = tmp_path_factory.mktemp("hosts")
    with Hosts(directory, ("a", "b", "x"), hidden=tmp_path_factory.getbasetemp()) as three:
        yield three


@pytest.fixture(autouse=True)
def with_wrapper(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    monkeypatch.setenv("PATH", hosts.path)
    yield
    hosts.end(request.node)


def cluster(hosts: Hosts, encryption: str = "on") -> dict[str, Any]:
    """One of two partitions is on a, the other on b, with the shards."""
    there = {"python": hosts.python, "workdir": WORKDIR, "env": [f"DBCTL_TEST_SECONDS={PACE_S}"]}
    members = [
        {"name": "a", "ssh": hosts.address["a"], "slots": 1, "labels": ["worker"], **there},
        {"name": "b", "ssh": hosts.address["b"], "slots": 3, **there},
    ]
    return {"launcher": "ssh", "hosts": members, "encryption": encryption}


def nodes_of(hosts: Hosts) -> dict[str, int]:
    """The process of each node, as this machine numbers it."""
    found = {}
    for host in ("a", "b"):
        for pid, command in hosts.processes(host).items():
            if match := re.search(r" -m dbctl node ([a-z]+-[0-9.]+)$", command):
                found[match[1]] = pid
    return found


def endpoints(hosts: Hosts) -> dict[str, str]:
    """Where each node listens that others see."""
    names = {pid: name for name, pid in nodes_of(hosts).items()}
    found = {}
    for host in ("a", "b"):
        for address, who in hosts.listening(host).items():
            pid = int(re.search(r"pid=(\d+)", who)[1])  # type: ignore[index]
            if pid in names:
                found[names[pid]] = f"tcp://{address.replace('[::ffff:', '').replace(']', '')}"
    return found


class Strangers:
    """They run on `host`, with what a stranger may know: names, addresses, public keys."""

    def __init__(self, hosts: Hosts, host: str, *attacks: str, **target: Any) -> None:
        words = [*hosts.inside(host), sys.executable, "-m", "tests.cluster.stranger", *attacks]
        self.attacks = attacks
        self.n = len(attacks) * len(target["nodes"])
        self._process = subprocess.Popen(
            words,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # what enters a host forks: it is killed as a group
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(target) + "\n")
        self._process.stdin.flush()

    def __enter__(self) -> Strangers:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    @property
    def busy(self) -> bool:
        return self._process.poll() is None

    def assert_nothing_gained(self) -> None:
        out, err = self._process.communicate(timeout=30)
        assert self._process.returncode == 0, err
        found = [json.loads(line) for line in out.splitlines()]
        assert len(found) == self.n
        assert all(n > 0 for _, n, _ in found), "each of them has come"
        assert [(attack, heard) for attack, _, heard in found if heard] == []


def places_of(secrets: list[str], hosts: Hosts, run: TrainRun) -> list[str]:
    """Where on this machine and its hosts one of them stands that should stand nowhere."""
    wanted = [secret.encode() for secret in secrets] + [z85.decode(s.encode()) for s in secrets]
    assert len(set(wanted)) == 2 * len(secrets) > 0
    files = [path for pid in os.listdir("/proc") if pid.isdigit() for path in texts_of(pid)]
    runtime = run.runtime
    assert runtime is not None
    directories = [run.dir, runtime]
    for name in ("a", "b"):
        directories += (hosts.seen(name) / "tmp").glob("dbctl-*")
        directories.append(hosts.seen(name) / WORKDIR[1:])
    here = [path for directory in directories for path in directory.rglob("*")]
    files += [run.out_path, run.err_path, *(path for path in here if path.is_file())]
    assert any(path.name == "worker-0.0.log" for path in files)
    return [str(path) for path in files if any(text in data_of(path) for text in wanted)]


def texts_of(pid: str) -> list[Path]:
    return [Path(f"/proc/{pid}/{name}") for name in ("cmdline", "environ")]


def data_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.quiet
def test_strangers_read_nothing_write_nothing_and_stop_nobody(hosts: Hosts, tmp_path: Path) -> None:
    """Blocking, one replica: the bits at the end are those of a run that nobody disturbed.

    It lasts as long as they come, and is then resumed to its end.
    """
    experiment = digits(
        replicas=1,
        shards=2,
        partition={"count": 2},
        threads=1,
        optimizer=BLOCKING,
        stop=ENDLESS,
        evaluate="off",
    )
    keys, slow = tmp_path / "keys", {"worker": "slow_gradient"}
    disturbed = experiment | {"cluster": cluster(hosts)}
    with TrainRun(tmp_path, disturbed, keys=keys, factories=slow) as run:
        first_step_after(run)
        assert_only_own_addresses(hosts)
        nodes, told = nodes_of(hosts), json.loads(keys.read_text())
        before = {name: rss_bytes(pid) for name, pid in nodes.items()}
        target = {
            "run": json.loads((run.dir / "run.json").read_text())["run"],
            "nodes": endpoints(hosts),
            "server_keys": {name: tcp["public"] for name, tcp in told.items()},
        }
        # shard-0 has nothing of the partition that is on another host, and listens to nobody there.
        assert set(target["nodes"]) == {"shard-1", "worker-0.0", "worker-0.1"}
        worker = told["worker-0.1"]
        own = {"owner": "worker-0.1", "own": worker["public"], "secret": worker["secret"]}
        most = dict(before)
        with (
            Strangers(hosts, "x", *WITHOUT_A_KEY, *WITH_A_KEY, **target, **own) as far,
            Strangers(hosts, "b", *WITHOUT_A_KEY, "local_user", **target, uid=NOBODY) as near,
        ):
            assert places_of([tcp["secret"] for tcp in told.values()], hosts, run) == []
            while far.busy or near.busy:
                assert run.process.poll() is None, run.story()
                most = {n: max(most[n], rss_bytes(pid)) for n, pid in nodes.items()}
                time.sleep(0.05)
            far.assert_nothing_gained()
            near.assert_nothing_gained()
        assert nodes_of(hosts) == nodes, "nobody has died"
        run.signal(signal.SIGTERM)
        assert run.finish() == 75, run.story()
    grown = {name: (most[name] - before[name]) // MIB for name in nodes}
    print(f"grown by {grown} MiB")
    assert max(grown.values()) < 64
    assert hosts.left() == []
    for name in target["nodes"]:
        assert_told(run.log(name), knows_owner=name != "worker-0.1")
    steps = bits(run.dir)[0] + 20
    dbctl("resume", str(run.dir), "--set", f"stop.steps={steps}")
    experiment["stop"] = {"steps": steps}
    with TrainRun(tmp_path, experiment, name="undisturbed") as undisturbed:
        assert undisturbed.finish() == 0, undisturbed.story()
    assert bits(run.dir) == bits(undisturbed.dir)


def assert_told(log: str, *, knows_owner: bool) -> None:
    """Each kind of stranger is told of, with its address; all of them in a few lines."""
    x, b = "10.66.0.3", "10.66.0.2"
    liar = (
        "worker-0.1#1 says that it is controller#1",
        "worker-0.1#1 may not send Finish",
        "worker-0.1#1 sent to controller",
    )
    for words in (
        f"refused a connection from {x}: more than 16 connections begin at once",
        f"refused a connection from {b}: more than 16 connections begin at once",
        f"{x} came with a key of nobody in this run",
        f"{b} came with a key of nobody in this run",
        "it comes without encryption, or with another kind",
        "it does not have this node's key",
        "what it says is not ZMTP",
        *(liar if knows_owner else ()),
    ):
        assert words in log, f"{words}\n{log}"
    assert log.count("\n") < 100, log


def test_the_key_of_a_life_that_is_over_opens_nothing(hosts: Hosts, tmp_path: Path) -> None:
    """G6: it was good for the shards until that replica died."""
    there = {"python": hosts.python, "workdir": WORKDIR}
    places = [
        {"name": "a", "ssh": hosts.address["a"], "slots": 2, "labels": ["worker"], **there},
        {"name": "b", "ssh": hosts.address["b"], "slots": 2, "labels": ["shard"], **there},
    ]
    experiment = digits(
        shards=2,
        threads=1,
        stop=ENDLESS,
        evaluate="off",
        cluster={"launcher": "ssh", "hosts": places},
    )
    keys = tmp_path / "keys"
    with TrainRun(tmp_path, experiment, keys=keys) as run:
        run.until_train(1)
        wait_for(lambda: {r["node"] for r in run.metrics("worker")} >= {"worker-1.0"}, "worker-1.0")
        nodes, told = endpoints(hosts), json.loads(keys.read_text())
        assert set(nodes) == {"shard-0", "shard-1"}
        kill(nodes_of(hosts)["worker-1.0"])
        wait_for(lambda: run.metrics("death"), "its death to be told", 5.0)
        target = {
            "run": json.loads((run.dir / "run.json").read_text())["run"],
            "nodes": nodes,
            "server_keys": {name: tcp["public"] for name, tcp in told.items()},
            "owner": "worker-1.0",
            "own": told["worker-1.0"]["public"],
            "secret": told["worker-1.0"]["secret"],
        }
        with Strangers(hosts, "x", "own_key", **target) as late:
            late.assert_nothing_gained()
        run.signal(signal.SIGTERM)
        assert run.finish() == 75, run.story()
    for name in nodes:
        assert "10.66.0.3 came with the old key of worker-1.0#1" in run.log(name), run.log(name)
    assert hosts.left() == []


# ---------------------------------------------------------------- eavesdroppers


class Capture:
    """tcpdump on a host: every byte that comes and goes."""

    def __init__(self, hosts: Hosts, host: str, path: Path) -> None:
        self._path = path
        words = ["ip", "netns", "exec", hosts.space[host], "tcpdump", "-i", "eth0", "-U", "-Z"]
        words += ["root", "-B", "65536", "-s", "0", "-w", str(path), "tcp"]
        self._process = subprocess.Popen(words, stderr=subprocess.PIPE)

    def __enter__(self) -> Capture:
        wait_for(lambda: self._path.exists() and self._path.stat().st_size > 0, "tcpdump")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        assert b"0 packets dropped by kernel" in self._process.communicate(timeout=10)[1]

    @property
    def seen(self) -> bytes:
        return self._path.read_bytes()


def runs_of_parameters(run_dir: Path) -> set[bytes]:
    """Four parameters in a row, none of them 0, of every checkpoint of the run."""
    found: set[bytes] = set()
    for path in (run_dir / "checkpoints").glob("step-*"):
        checkpoint = open_checkpoint(path, verify=True)
        values = checkpoint.read("parameters", Range(0, checkpoint.n_elements)).astype("<f4")
        four = np.lib.stride_tricks.sliding_window_view(values, 4)
        found |= {row.tobytes() for row in four[np.all(four != 0, axis=1)]}
    return found


def count_in(data: bytes, runs: set[bytes]) -> int:
    """How many places of `data` hold one of the runs, at any offset."""
    begins = np.zeros(1 << 20, bool)  # by the first number's upper 20 bits
    begins[[int.from_bytes(run[:4], "little") >> 12 for run in runs]] = True
    n = 0
    for offset in range(4):
        words = np.frombuffer(data, "<u4", count=(len(data) - offset) // 4, offset=offset)
        for i in np.flatnonzero(begins[words >> 12]):
            at = offset + 4 * int(i)
            n += data[at : at + 16] in runs
    return n


@pytest.mark.parametrize("encryption", ["on", "off"])
def test_a_capture_of_a_run_holds_no_parameters(
    hosts: Hosts, tmp_path: Path, encryption: str
) -> None:
    """The same eavesdropper finds them where encryption is off, and no key is in either."""
    experiment = digits(
        replicas=1,
        shards=1,
        threads=1,
        optimizer=BLOCKING,
        stop={"steps": 150},
        evaluate="off",
        checkpoint={"every": "10 steps", "keep": 10},
        cluster=cluster(hosts, encryption),
    )
    experiment["cluster"]["hosts"][1]["labels"] = ["shard"]
    keys = tmp_path / "keys"
    with (
        Capture(hosts, "b", tmp_path / "capture") as capture,
        TrainRun(tmp_path, experiment, keys=keys) as run,
    ):
        assert run.finish() == 0, run.story()
        assert len(run.checkpoints()) >= 2, "some were made on the way"
        assert ("encryption is off" in run.err) == (encryption == "off")
    seen, runs = capture.seen, runs_of_parameters(run.dir)
    size = 4 * (64 * 256 + 256 + 256 * 10 + 10)
    assert len(seen) > 2 * 150 * size, "every push and answer was captured"
    assert len(runs) > 10_000
    n_found = count_in(seen, runs)
    print(f"{len(seen):,} bytes, {n_found:,} places hold parameters")
    assert (n_found > 1_000) == (encryption == "off")
    assert n_found == 0 or encryption == "off"
    for secret in [tcp["secret"] for tcp in json.loads(keys.read_text()).values()]:
        assert (secret == "") == (encryption == "off")
        assert not secret or (secret.encode() not in seen and z85.decode(secret) not in seen)
    assert (b"worker-0.0" in seen) == (encryption == "off"), "nor who says what to whom"
