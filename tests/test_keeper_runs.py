"""keeper_runs.py: agents of a real keeper on this machine, and those that do not end.

Over ssh, and with whole runs: cluster/test_standing.py.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dbctl import __version__
from dbctl.keeper_runs import RUNS_MAX, STOPPED, Run, Runs, node_name
from dbctl.visitors import Visitor
from tests.cluster.harness import state, wait_gone, wait_until
from tests.one_keeper import LIMIT_S, Standing, agent_pid, let_go


@pytest.fixture
def standing(tmp_path: Path) -> Iterator[Standing]:
    with Standing(tmp_path) as one:
        yield one


def test_a_run_gets_an_agent_that_ends_with_its_caller(standing: Standing, tmp_path: Path) -> None:
    with standing.run(tmp_path) as process:
        pid = agent_pid(standing)
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert b"OF_HOST=yes" in environment
        assert let_go(process) == 0
        wait_gone(pid, limit_s=5.0)
    said = (tmp_path / "agent-0.log").read_text()
    assert "agent-0 ends: standard input ended: the controller is gone" in said
    assert standing.status()["runs"] == []
    assert state(standing.pid) in ("S", "R")


def test_a_killed_caller_ends_the_agent(standing: Standing, tmp_path: Path) -> None:
    with standing.run(tmp_path) as process:
        pid = agent_pid(standing)
        process.kill()
        wait_gone(pid, limit_s=5.0)
    assert standing.status()["runs"] == []


def test_two_runs_have_agents_of_their_own(standing: Standing, tmp_path: Path) -> None:
    with standing.run(tmp_path, "agent-0"):
        with standing.run(tmp_path, "agent-1"):
            runs = standing.status()["runs"]
            assert [run["agent"] for run in runs] == ["agent-0", "agent-1"]
            assert len({run["pid"] for run in runs}) == 2
        wait_until(lambda: len(standing.status()["runs"]) == 1)
        assert [run["agent"] for run in standing.status()["runs"]] == ["agent-0"]


def test_the_status_tells_of_runs_and_their_nodes(standing: Standing, tmp_path: Path) -> None:
    with standing.run(tmp_path):
        found = standing.status()
        assert (found["cluster"], found["version"], found["state"]) == ("tests", __version__, "up")
        [run] = found["runs"]
        told = {key: run[key] for key in ("run", "name", "run_dir", "user", "agent", "nodes")}
        assert told == {
            "run": "abc", "name": "digits", "run_dir": "/somewhere", "user": "me",
            "agent": "agent-0", "nodes": [],
        }  # fmt: skip
        assert 0.0 <= run["seconds"] < 20.0


def test_a_killed_agent_is_reaped_and_the_caller_ends_like_it(
    standing: Standing, tmp_path: Path
) -> None:
    with standing.run(tmp_path) as process:
        pid = agent_pid(standing)
        os.kill(pid, signal.SIGKILL)
        assert process.wait(LIMIT_S) == 128 + signal.SIGKILL
        assert state(pid) == "", "reaped"
    assert standing.status()["runs"] == []


def test_a_killed_keeper_leaves_its_runs_alone(standing: Standing, tmp_path: Path) -> None:
    with standing.run(tmp_path) as process:
        pid = agent_pid(standing)
        os.kill(standing.pid, signal.SIGKILL)
        wait_gone(standing.pid, limit_s=5.0)
        time.sleep(0.3)
        assert process.poll() is None
        assert state(pid) in ("S", "R")
    wait_gone(pid, limit_s=5.0)


def test_a_run_without_descriptors_is_refused(standing: Standing) -> None:
    [answer] = standing.ask(b'{"do": "run"}\n')
    assert answer == {"error": "expected 2 descriptors with the request, found 0"}
    assert f"dropped a connection: {answer['error']}" in standing.log


@pytest.mark.parametrize(
    "runtime",
    ["/tmp/dbctl-0123456789abcdef-0/../x", "/tmp/dbctl-keeper-abc", "/tmp/dbctl-", "", None, 7],
)
def test_a_directory_that_is_no_agents_is_refused(standing: Standing, runtime: object) -> None:
    """What a killed agent leaves is cleared: nothing else may be named."""
    request = json.dumps({"do": "run", "runtime": runtime}).encode() + b"\n"
    with standing.connect() as connection:
        socket.send_fds(connection, [request], [1, 2])
        assert "expected `runtime` /tmp/dbctl-" in connection.makefile().read()
    assert standing.status()["runs"] == []


def test_no_more_runs_than_its_bound() -> None:
    runs = Runs()
    runs._runs = [object()] * RUNS_MAX  # type: ignore[list-item]
    left, right = socket.socketpair()
    with left, right:
        fault = runs.start(Visitor(left, 0.0, descriptors=[1, 2]), {})
    assert fault == "64 runs are going on here, the most that there may be"


class Deathless:
    """As a process that waits for a file server, uninterruptibly."""

    pid = 77

    def __init__(self) -> None:
        self.n_kills = 0

    def kill(self) -> None:
        self.n_kills += 1

    def poll(self) -> None:
        return None


def test_an_agent_that_does_not_die_is_left_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = Runs()
    left, right = socket.socketpair()
    agent = Deathless()
    with left, right:
        run = Run(
            process=agent,  # type: ignore[arg-type]
            connection=left,
            agent="agent-\x1b0",
            told={"run": "r"},
            runtime="/tmp/none",
            since=0.0,
        )
        runs._runs = [run]
        runs.end()
        for n_kills in (1, 2):
            assert not runs.reap(runs.due()), "it has not ended"
            assert agent.n_kills == n_kills
        assert len(runs) == 0
        said = [json.loads(line) for line in right.makefile()]
    why = "agent agent-\x1b0, pid 77, does not die: it is left alone"
    assert said == [{"said": STOPPED}, {"error": why}]
    assert "run r: agent agent-\\x1b0, pid 77, does not die" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["python3", "-P", "-m", "dbctl", "node", "worker-1.0"], "worker-1.0"),
        (["/bin/sh", "-c", "true"], "/bin/sh"),
        (["node"], "node"),
        ([], ""),
    ],
)
def test_a_node_is_known_by_its_command(words: list[str], name: str) -> None:
    assert node_name(words) == name
