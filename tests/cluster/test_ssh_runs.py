"""Runs on a host that ssh reaches: a real sshd on loopback, the system's ssh, the command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dbctl.checkpoint.reader import newest_good
from dbctl.experiment.specs import HostSpec
from dbctl.launch.base import make_runtime
from dbctl.launch.ssh import SshLauncher
from dbctl.process import TEMPLATE
from dbctl.region import Range
from tests.cluster.runs import LIMIT_S, TrainRun, finish_all, wait_for
from tests.cluster.sshd import ROOT, Sshd, agents_left

pytestmark = pytest.mark.cluster

EXPERIMENT: dict[str, Any] = {
    "version": 1,
    "name": "over-ssh",
    "seed": 5,
    "data": {
        "train": {"source": "digits", "split": "train", "scale": 0.0625},
        "test": {"source": "digits", "split": "test", "scale": 0.0625},
    },
    "network": {
        "input": [8, 8, 1],
        "layers": [
            {"type": "dense", "units": 24, "activation": "tanh"},
            {"type": "dense", "units": 10},
        ],
        "loss": "softmax",
    },
    "shards": 2,
    "optimizer": {
        "type": "downpour",
        "batch_size": 32,
        "overlap": False,
        "rule": {"type": "adagrad", "rate": 0.05},
    },
    "stop": {"steps": 60},
    "evaluate": "off",
    "threads": 1,
}


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with Sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture(autouse=True)
def with_wrapper(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", sshd.path)


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> TrainRun:
    """EXPERIMENT as it is, without hosts: what it comes to is always the same."""
    with TrainRun(tmp_path_factory.mktemp("near"), EXPERIMENT) as run:
        assert run.process.wait(LIMIT_S) == 0, run.story()
    return run


def host(sshd: Sshd, tmp_path: Path, ssh: str = "plain", **more: Any) -> dict[str, Any]:
    there = {"python": str(sshd.python), "workdir": str(tmp_path / "there")}
    return {"name": "here", "ssh": ssh, **there, **more}


def on(host: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return EXPERIMENT | {"cluster": {"launcher": "ssh", "hosts": [host]}} | changes


def dbctl(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dbctl", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def bits(run_dir: Path) -> tuple[int, bytes]:
    checkpoint, warnings = newest_good(run_dir / "checkpoints")
    assert not warnings
    step = checkpoint.manifest.step
    return step, checkpoint.read("parameters", Range(0, checkpoint.n_elements)).tobytes()


def leftovers(tmp_path: Path) -> list[str]:
    """What a run may have left on its host."""
    return agents_left() + [str(path) for path in (tmp_path / "there").glob("*")]


# --------------------------------------------------------------------------------------- whole runs


def test_train_resume_and_eval_reach_the_same_bits_as_local_ones(
    sshd: Sshd, tmp_path: Path
) -> None:
    """Rung 8 of the ladder: in-process = local processes = ssh."""
    experiments = {"local": EXPERIMENT, "ssh": on(host(sshd, tmp_path))}
    with ExitStack() as both:
        runs = {
            name: both.enter_context(TrainRun(tmp_path, experiment, name=name))
            for name, experiment in experiments.items()
        }
        finish_all(*runs.values())

    def go_on(run: TrainRun) -> tuple[Any, ...]:
        first = bits(run.dir)
        dbctl("resume", str(run.dir), "--set", "stop.steps=100")
        second = bits(run.dir)
        measured = json.loads(dbctl("eval", str(run.dir), "--json"))
        return first, second, measured["loss"], measured["accuracy"]

    with ThreadPoolExecutor() as pool:
        results = dict(zip(runs, pool.map(go_on, runs.values()), strict=True))
    for run in runs.values():
        logs = run.dir / "logs"
        assert (logs / "worker-0.0.log").read_text().count("finished") == 2, "of both lives"
        assert (logs / "shard-1.log").read_text().count("incarnation 1 of run") == 2
    assert [first[0] for first, *_ in results.values()] == [60, 60]
    assert results["ssh"] == results["local"]
    assert leftovers(tmp_path) == []


def test_a_host_that_shares_neither_memory_nor_files(
    sshd: Sshd, tmp_path: Path, near: TrainRun
) -> None:
    """Its own table of processes, and nothing of ours where the run and its work directory are."""
    for name in ("there", "far"):
        (tmp_path / name).mkdir()
    python = sshd.apart("apart", tmp_path / "there", tmp_path / "far")
    with TrainRun(tmp_path, on(host(sshd, tmp_path, python=python)), name="far") as far:
        assert far.finish() == 0, far.story()
    for run in (near, far):
        for node in ("shard-0", "shard-1", "worker-0.0"):
            assert run.log(node).rstrip().endswith("finished"), "its last line came too"
    assert bits(near.dir) == bits(far.dir)
    assert not list((tmp_path / "there").iterdir()), "it was written elsewhere"


def test_a_checkpoint_far_larger_than_what_is_on_its_way(sshd: Sshd, tmp_path: Path) -> None:
    """18 MiB with Adagrad's sums; agents pass on at most 4 MiB at once (G15)."""
    network = json.loads(json.dumps(EXPERIMENT["network"]))
    network["layers"][0]["units"] = 32_000
    wide = EXPERIMENT | {"network": network, "stop": {"steps": 3}}
    (tmp_path / "there").mkdir()
    there = host(sshd, tmp_path, python=sshd.apart("wide", tmp_path / "there"))
    far = {"cluster": {"launcher": "ssh", "hosts": [there]}}
    with (
        TrainRun(tmp_path, wide, name="near") as one,
        TrainRun(tmp_path, wide | far, name="far") as other,
    ):
        finish_all(one, other)
        assert not any("dropped" in run.log("agent-0") for run in (one, other))
    found = bits(tmp_path / "far")
    assert found == bits(tmp_path / "near")
    assert len(found[1]) > 9 << 20


@pytest.mark.parametrize("encryption", ["on", "off"])
def test_two_hosts_run_one_run(sshd: Sshd, tmp_path: Path, near: TrainRun, encryption: str) -> None:
    """Both are this machine; what goes from one to the other goes over tcp all the same."""
    places = [("one", ["shard"]), ("two", ["worker"])]
    hosts = [
        host(sshd, tmp_path, address="127.0.0.1", labels=labels) | {"name": name}
        for name, labels in places
    ]
    cluster = {"launcher": "ssh", "encryption": encryption, "hosts": hosts}
    with TrainRun(tmp_path, EXPERIMENT | {"cluster": cluster}, name="two") as run:
        assert run.finish() == 0, run.story()
    logs = tmp_path / "two" / "logs"
    for i in range(2):
        assert " started with pid " in (logs / f"agent-{i}.log").read_text(), (
            "each has a part of it"
        )
    assert bits(tmp_path / "two") == bits(near.dir)
    assert leftovers(tmp_path) == []
    assert json.loads((tmp_path / "two" / "run.json").read_text())["encryption"] == encryption
    told = "warning: encryption is off" in (tmp_path / "two.err").read_text()
    assert told == (encryption == "off")


def test_nothing_is_left_when_the_controller_is_killed(sshd: Sshd, tmp_path: Path) -> None:
    """G11: ssh goes with the controller's pipe, the agent with its standard input."""
    with TrainRun(tmp_path, on(host(sshd, tmp_path), stop={"seconds": 60})) as run:
        run.until_train()
        nodes = agents_nodes(sshd)
        assert sum(TEMPLATE not in command_line(pid) for pid in nodes) == 4
        assert len(agents_left()) == 1, "it is known where it would be left"
        os.kill(run.pid, 9)
        wait_for(lambda: not any(alive(pid) for pid in nodes), "all nodes to end", 12.0)
        wait_for(lambda: not agents_left(), "its directory")
        shutil.rmtree(run.runtime or "", ignore_errors=True)  # the killed one's own


def test_a_lost_connection_ends_the_run_and_says_so(sshd: Sshd, tmp_path: Path) -> None:
    with TrainRun(tmp_path, on(host(sshd, tmp_path), stop={"seconds": 60})) as run:
        run.until_train()
        nodes = agents_nodes(sshd)
        [ssh] = [pid for name, pid in run.processes().items() if is_ssh(pid)]
        os.kill(ssh, 9)
        assert run.finish() == 1
        assert "agent-0 on here ended early (killed by SIGKILL)" in run.err
        wait_for(lambda: not any(alive(pid) for pid in nodes), "all nodes to end", 12.0)


def test_ctrl_c_leaves_a_checkpoint(sshd: Sshd, tmp_path: Path) -> None:
    with TrainRun(tmp_path, on(host(sshd, tmp_path), stop={"seconds": 60})) as run:
        run.until_train()
        run.signal(2, to_all=True)
        assert run.finish(20.0) == 130
        assert run.step_to_resume() > 0
    assert leftovers(tmp_path) == []


def test_ctrl_c_ends_the_waiting_for_a_host(tmp_path: Path) -> None:
    """An ssh that neither fails nor says anything: a jump host that is asleep."""
    silent = tmp_path / "bin"
    silent.mkdir()
    (silent / "ssh").write_text("#!/bin/sh\nexec sleep 60\n")
    (silent / "ssh").chmod(0o755)
    path = f"{silent}{os.pathsep}{os.environ['PATH']}"
    with TrainRun(tmp_path, on({"name": "here"}), env={"PATH": path}) as run:
        wait_for(lambda: len(run.processes()) > 1, "the ssh")
        run.signal(2)
        assert run.finish(5.0) == 130
        assert "Traceback" not in run.err


def agents_nodes(sshd: Sshd) -> list[int]:
    """What this very sshd started: it gives its processes none of our environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            words = command_line(int(entry.name))
            if words[3:5] in (["dbctl", "node"], ["dbctl", "agent"]) and "--stdin" not in words[6:]:
                found.append(int(entry.name))
    return [pid for pid in found if connected_to(pid) in sshd.ports.values()]


def command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


def connected_to(pid: int) -> int:
    """The port of the sshd that started it; 0: none did."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode()
    except OSError:
        return 0
    found = re.search(r"(?:^|\0)SSH_CONNECTION=[^\0]* ([0-9]+)(?:\0|$)", text)
    return int(found[1]) if found else 0


def alive(pid: int) -> bool:
    return bool(command_line(pid))


def is_ssh(pid: int) -> bool:
    return command_line(pid)[:1] == [shutil.which("ssh", path="/usr/bin:/bin")]


# ------------------------------------------------------------------------------ particular servers


def test_more_hosts_than_the_server_takes_beginners_come_up(sshd: Sshd, tmp_path: Path) -> None:
    """MaxStartups 2:100:4: of many at once most are closed before a word."""
    runtime = make_runtime()
    launcher = SshLauncher(
        hosts=[(f"agent-{i}", HostSpec(**host(sshd, tmp_path))) for i in range(8)],
        runtime=runtime,
        run="r",
        logs=tmp_path,
        token="fedcba9876543210",
    )
    try:
        agents = launcher.start()
        assert len(agents) == 8
        assert len({agent.endpoint for agent in agents}) == 8
        assert launcher.failure() is None
        said = "".join(path.read_text() for path in tmp_path.glob("agent-*.log"))
        assert "kex_exchange_identification" in said, "some were turned away"
    finally:
        launcher.stop(3.0)
        os.rmdir(runtime)


def test_a_server_that_forwards_no_sockets_is_told_within_the_lease(
    sshd: Sshd, tmp_path: Path
) -> None:
    experiment = on(host(sshd, tmp_path, ssh="narrow"))
    with TrainRun(tmp_path, experiment, lease_s=2.0) as run:
        assert run.finish(15.0) == 3
        assert "its sshd forwards no sockets; set AllowStreamLocalForwarding" in run.err
