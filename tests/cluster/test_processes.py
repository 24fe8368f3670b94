"""An agent and its nodes under faults: what docs/reliability.md promises of processes.

G3, G4: a death is seen at once and touches nobody else. G6: what lost its lease does nothing more.
G11: whatever happens to whom, nothing is left within lease + 2 s.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dbctl.children import GENTLE_S
from dbctl.launch.base import make_runtime, python_command, python_environment, start_order
from dbctl.process import EXIT_FENCED, EXIT_ORPHANED
from dbctl.wire import Ack, Cut, Evaluate, Exited, Finish, Grant, Halt, Return
from dbctl.wire_processes import Failed, Kill
from tests.cluster.harness import Cluster, state, wait_gone, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(60)]

SHORT_LEASE_S = 1.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as these:
        yield these


@pytest.fixture
def short(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster with a lease of one second."""
    with Cluster(tmp_path, lease_s=SHORT_LEASE_S) as these:
        yield these


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: state(pid) == "T", 5.0)


def log_of(cluster: Cluster, node: str) -> str:
    return (cluster.logs / f"{node}.log").read_text()


# ---------------------------------------------------------------- a life without faults


def test_two_nodes_count_talk_and_finish(cluster: Cluster) -> None:
    for node in ("worker-0.0", "worker-1.0"):
        cluster.start(node)
    for node in ("worker-0.0", "worker-1.0"):
        cluster.join(node)
        cluster.link.send(node, Grant(1, 500))
        cluster.wait(Ack, node, where=lambda ack: ack.seq == 500)
        cluster.link.send(node, Halt(push=False))
        cluster.link.send(node, Cut(7))
        cluster.wait(Return, node, where=lambda answer: answer.returned == 7)
        cluster.link.send(node, Finish())
        exited = cluster.wait(Exited, node)
        assert (exited.status, exited.word) == (0, "")
        assert "finished" in exited.log_tail
    cluster.link.send("agent-0", Finish())
    wait_until(lambda: cluster.launcher.poll() is not None, 3.0)
    assert cluster.launcher.poll() == 0
    assert not Path(cluster.runtime).exists()


def test_a_node_is_what_the_agent_was_told(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "told"
    spec = cluster.spec("evaluator-0", "shows_environment", file=str(file))
    order = start_order(spec, nice=5, env=(("GREETING", "it's $HOME;\n é"),))
    cluster.link.send("agent-0", order)
    cluster.join("evaluator-0")
    told = json.loads(file.read_text())
    assert told["environ"]["GREETING"] == "it's $HOME;\n é"
    assert told["environ"]["OPENBLAS_NUM_THREADS"] == "1"
    assert told["nice"] == min(19, os.nice(0) + 5)
    assert told["session"] == told["pid"]
    assert not {"click", "yaml"} & set(told["modules"])
    assert "" not in told["path"], "the user's directory is not imported from"
    assert os.getcwd() in told["path"], "this dbctl, wherever it is"


def test_32_nodes_start_and_end(cluster: Cluster) -> None:
    """pytorch/pytorch#63247."""
    nodes = [f"worker-{i}.0" for i in range(32)]
    pids = [cluster.start(node) for node in nodes]
    for node in nodes:
        cluster.join(node)
    assert all(state(pid) in "RS" for pid in pids)
    for node in nodes:
        cluster.link.send(node, Finish())
    for node in nodes:
        assert cluster.wait(Exited, node).status == 0
    assert set(os.listdir(cluster.runtime)) <= {"agent-0.sock"}


def test_a_long_step_is_no_death(short: Cluster) -> None:
    """dask/dask#6324: one gradient that takes three times the lease."""
    short.start("worker-0.0")
    short.join("worker-0.0")
    begin = time.monotonic()
    short.link.send("worker-0.0", Evaluate(3))
    assert short.wait(Ack, "worker-0.0").seq == -1
    assert time.monotonic() - begin >= 3 * SHORT_LEASE_S
    short.link.send("worker-0.0", Cut(2))
    short.wait(Return, "worker-0.0", where=lambda answer: answer.returned == 2)


def test_a_slow_start_is_no_death(short: Cluster) -> None:
    short.start("worker-0.0", "builds_slowly", build_s=2.5)
    short.join("worker-0.0")


# ---------------------------------------------------------------- the end of one node


@pytest.mark.alone
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_node_is_told_at_once_and_the_other_goes_on(
    cluster: Cluster, number: signal.Signals
) -> None:
    pid = cluster.start("worker-0.0")
    cluster.start("worker-1.0")
    cluster.join("worker-0.0")
    cluster.join("worker-1.0")
    begin = time.monotonic()
    os.kill(pid, number)
    exited = cluster.wait(Exited, "worker-0.0", limit_s=5.0)
    assert time.monotonic() - begin < 0.5
    assert exited.status == -number
    assert "incarnation 1 of run" in exited.log_tail
    if number == signal.SIGSEGV:
        assert "Segmentation fault" in exited.log_tail, "faulthandler's word"
    assert state(pid) == "", "reaped"
    cluster.link.send("worker-1.0", Cut(5))
    cluster.wait(Return, "worker-1.0", where=lambda answer: answer.returned == 5)


def test_sigint_of_a_terminal_is_the_controllers_to_answer(cluster: Cluster) -> None:
    pid = cluster.start("worker-0.0")
    cluster.join("worker-0.0")
    os.kill(pid, signal.SIGINT)
    cluster.link.send("worker-0.0", Cut(5))
    cluster.wait(Return, "worker-0.0", where=lambda answer: answer.returned == 5)


@pytest.mark.parametrize(
    ("factory", "status", "word", "line"),
    [
        ("fails_to_build", 1, "ValueError: no such table\\x1b[31m second line", "Traceback"),
        ("no_such_factory", 1, "AttributeError", "no_such_factory"),
        ("dies_silently", 7, "", "last words"),
    ],
)
def test_a_node_that_fails_at_its_start(
    cluster: Cluster, factory: str, status: int, word: str, line: str
) -> None:
    """angel#18: the exit status, the last lines of its log, its own word, at once."""
    begin = time.monotonic()
    cluster.start("worker-0.0", factory)
    exited = cluster.wait(Exited, "worker-0.0")
    assert time.monotonic() - begin < 5.0
    assert exited.status == status
    assert line in exited.log_tail
    assert "\x1b" not in exited.log_tail
    assert exited.word.startswith(word)
    assert bool(exited.word) == bool(word)


@pytest.mark.parametrize(
    ("factory", "word"),
    [
        ("fails_in_step", "ArithmeticError: step went wrong"),
        ("records", "AssertionError: a node's role may only send, found Record"),
    ],
)
def test_a_role_that_raises_ends_its_node_with_its_word(
    cluster: Cluster, factory: str, word: str
) -> None:
    cluster.start("worker-0.0", factory)
    cluster.join("worker-0.0")
    cluster.link.send("worker-0.0", Grant(1, 5))
    assert cluster.wait(Failed, "worker-0.0").what == word
    exited = cluster.wait(Exited, "worker-0.0")
    assert (exited.status, exited.word) == (1, word)


def test_no_python_there(cluster: Cluster) -> None:
    order = start_order(cluster.spec("worker-0.0", "echo"))
    cluster.link.send(
        "agent-0", type(order)(order.node, 1, ("/no/python3", "-m", "dbctl"), (), order.spec)
    )
    exited = cluster.wait(Exited, "worker-0.0")
    assert exited.status == 127
    assert "/no/python3" in exited.word


@pytest.mark.alone
def test_kill_takes_grandchildren_too(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "grandchild"
    pid = cluster.start("worker-0.0", "with_grandchild", file=str(file))
    cluster.join("worker-0.0")
    grandchild = int(file.read_text())
    assert state(grandchild) == "S"
    cluster.link.send("agent-0", Kill("worker-0.0", 1))
    assert cluster.wait(Exited, "worker-0.0").status == -signal.SIGKILL
    wait_gone(pid, grandchild, limit_s=1.0)


def test_a_node_comes_back_in_a_next_life(cluster: Cluster) -> None:
    os.kill(cluster.start("worker-0.0"), signal.SIGKILL)
    cluster.wait(Exited, "worker-0.0")
    cluster.start("worker-0.0", incarnation=2)
    cluster.join("worker-0.0", 2)


# ---------------------------------------------------------------- stopped, cut off


def test_a_stopped_node_that_wakes_after_its_lease_does_nothing_more(short: Cluster) -> None:
    pid = short.start("worker-0.0")
    short.join("worker-0.0")
    stop(pid)
    short.link.send("worker-0.0", Cut(9))  # what it must not answer any more
    time.sleep(SHORT_LEASE_S + 0.5)
    assert state(pid) == "T"
    os.kill(pid, signal.SIGCONT)
    exited = short.wait(Exited, "worker-0.0", limit_s=3.0)
    assert exited.status == EXIT_FENCED
    assert "the lease ran out" in exited.log_tail
    assert not any(isinstance(m, Return) and m.returned == 9 for _, _, m in short.heard)


def test_a_stopped_node_can_be_killed(cluster: Cluster) -> None:
    pid = cluster.start("worker-0.0")
    cluster.join("worker-0.0")
    stop(pid)
    cluster.link.send("agent-0", Kill("worker-0.0", 1, gently=True))
    exited = cluster.wait(Exited, "worker-0.0", limit_s=5.0)
    assert exited.status == -signal.SIGKILL
    assert state(pid) == ""


@pytest.mark.parametrize("step_s", [0, 30])
def test_a_gentle_kill_within_its_bounds(cluster: Cluster, step_s: int) -> None:
    """A node ends by the end of its input, in the middle of a long step too."""
    cluster.start("worker-0.0")
    cluster.join("worker-0.0")
    if step_s:
        cluster.link.send("worker-0.0", Evaluate(step_s))
        time.sleep(0.2)
    begin = time.monotonic()
    cluster.link.send("agent-0", Kill("worker-0.0", 1, gently=True))
    exited = cluster.wait(Exited, "worker-0.0", limit_s=GENTLE_S + 1.0)
    if not step_s:
        assert time.monotonic() - begin < GENTLE_S - 0.5
        assert exited.status == EXIT_ORPHANED
        assert "standard input ended" in exited.log_tail


@pytest.mark.quiet
def test_without_a_controller_everything_ends_by_the_lease(short: Cluster) -> None:
    pids = [short.start(node) for node in ("worker-0.0", "worker-1.0")]
    short.join("worker-0.0")
    short.join("worker-1.0")
    time.sleep(2 * SHORT_LEASE_S)
    assert all(state(pid) in "RS" for pid in pids), "alive as long as beats are answered"
    stop(pids[1])
    short.link.answer_beats = False
    took_s = wait_gone(short.agent_pid, *pids, limit_s=SHORT_LEASE_S + 2.0)
    assert took_s > 0.3, "the lease, and nothing else, ended them"
    assert "ends: the lease ran out" in log_of(short, "agent-0")
    assert not Path(short.runtime).exists()


@pytest.mark.quiet
def test_nodes_of_a_stopped_agent_end_by_their_lease(short: Cluster) -> None:
    pids = [short.start(node) for node in ("worker-0.0", "worker-1.0")]
    short.join("worker-0.0")
    short.join("worker-1.0")
    short.link.send("worker-1.0", Evaluate(30))  # a step that no check interrupts
    time.sleep(0.2)
    stop(short.agent_pid)
    wait_gone(*pids, limit_s=SHORT_LEASE_S + 2.0)
    assert state(short.agent_pid) == "T", "it was not the agent"
    assert "the lease ran out" in log_of(short, "worker-0.0")
    assert "in the middle of a step" in log_of(short, "worker-1.0")
    os.kill(short.agent_pid, signal.SIGCONT)
    wait_gone(short.agent_pid, limit_s=2.0)


# ---------------------------------------------------------------- the agent, the controller


@pytest.mark.parametrize("stopped", [False, True])
def test_nodes_do_not_outlive_a_killed_agent(cluster: Cluster, stopped: bool) -> None:
    pids = [cluster.start(node) for node in ("worker-0.0", "worker-1.0")]
    cluster.join("worker-0.0")
    cluster.join("worker-1.0")
    cluster.link.send("worker-0.0", Evaluate(30))
    time.sleep(0.2)
    if stopped:
        stop(pids[1])
    os.kill(cluster.agent_pid, signal.SIGKILL)
    wait_gone(*pids, limit_s=3.0)
    wait_until(lambda: cluster.launcher.poll() is not None, 2.0)
    assert "killed by SIGKILL" in str(cluster.launcher.failure())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_agent_and_nodes_leave_signals_to_the_controller(
    cluster: Cluster, number: signal.Signals
) -> None:
    pid = cluster.start("worker-0.0")
    os.kill(pid, number)  # before its first line, as likely as not
    cluster.join("worker-0.0")
    for one in (cluster.agent_pid, pid):
        os.kill(one, number)
    cluster.start("worker-1.0")
    cluster.join("worker-1.0")
    assert all(state(one) in "RS" for one in (cluster.agent_pid, pid))


def test_the_end_of_an_agents_input_takes_all_with_it(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "grandchild"
    pids = [cluster.start("worker-0.0", "with_grandchild", file=str(file))]
    pids.append(cluster.start("worker-1.0"))
    cluster.join("worker-0.0")
    cluster.join("worker-1.0")
    stop(pids[1])  # the end of its input is not enough for this one
    process = cluster.launcher._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    wait_gone(cluster.agent_pid, *pids, int(file.read_text()), limit_s=2.5)
    assert "ends: standard input ended" in log_of(cluster, "agent-0")
    assert not Path(cluster.runtime).exists()


@pytest.mark.parametrize("stopped", ["nobody", "node", "agent"])
def test_nothing_outlives_a_killed_controller(tmp_path: Path, stopped: str) -> None:
    """mxnet#2671. A stopped agent wakes for it, a stopped node is killed by it."""
    runtime = make_runtime()
    controller = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.harness", runtime, str(tmp_path), "10", "2"],
        stdout=subprocess.PIPE,
    )
    assert controller.stdout is not None
    with controller.stdout:
        told = json.loads(controller.stdout.readline())
    pids = [told["agent"], *told["nodes"]]
    assert all(state(pid) in ("R", "S") for pid in pids)
    if stopped != "nobody":
        stop(pids[0] if stopped == "agent" else pids[1])
    controller.kill()
    assert controller.wait() == -signal.SIGKILL
    wait_gone(*pids, limit_s=3.0)
    assert "ends: standard input ended" in (tmp_path / "agent-0.log").read_text()
    wait_until(lambda: not Path(runtime).exists(), 1.0)


def test_a_node_ends_with_its_input_where_the_kernel_does_not_help(cluster: Cluster) -> None:
    """The second of two nets: here the parent, this test, lives on."""
    cluster.start("worker-1.0")
    node = subprocess.Popen(
        python_command("node", "worker-0.0"),
        env={**os.environ, **python_environment()},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert node.stdin is not None
    assert node.stderr is not None
    try:
        node.stdin.write(start_order(cluster.spec("worker-0.0", "echo")).spec.encode() + b"\n")
        node.stdin.flush()
        cluster.join("worker-0.0")
        node.stdin.close()
        assert node.wait(3.0) == EXIT_ORPHANED
        assert b"the agent is gone" in node.stderr.read()
    finally:
        node.kill()
        node.wait()
        node.stderr.close()


def test_an_agent_whose_ready_line_nobody_reads_ends(tmp_path: Path) -> None:
    runtime = make_runtime()
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    words = ("--runtime", runtime, "--run", "r", "--name", "agent-0", "--logs", str(tmp_path))
    done = subprocess.run(
        python_command("agent", *words),
        env={**os.environ, **python_environment()},
        stdin=subprocess.PIPE,
        stdout=write_fd,
        stderr=subprocess.PIPE,
        timeout=10,
    )
    os.close(write_fd)
    assert b"nobody reads" in done.stderr
    assert not Path(runtime).exists()
