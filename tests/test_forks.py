"""forks.py: a node that was forked cannot be told from one that is a program of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dbctl import forks
from dbctl.children import Children
from dbctl.forks import PID, PR_SET_CHILD_SUBREAPER, Forked, Forks, forks_here
from dbctl.launch.base import python_command, python_environment
from dbctl.process import EXIT_ORPHANED, TEMPLATE
from dbctl.proctree import children_of
from dbctl.wire import Exited
from dbctl.wire_processes import Start, Started
from tests.cluster.harness import state, wait_until
from tests.shell_nodes import shell

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks on Linux only")


@pytest.fixture
def these() -> Iterator[Forks]:
    """As in an agent; afterwards this process is no subreaper any more."""
    made = forks_here("agent-0")
    assert made is not None
    try:
        yield made
    finally:
        made.close()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.fixture
def children(these: Forks, tmp_path: Path) -> Iterator[Children]:
    made = Children(tmp_path, these)
    try:
        yield made
    finally:
        made.end_all(gently=False)
        wait_until(lambda: made.reap() is not None and not made.running)


def node(name: str = "worker-1.0", **env: str) -> Start:
    variables = {**python_environment(), "OPENBLAS_NUM_THREADS": "1", **env}
    return Start(name, 1, python_command("node", name), tuple(variables.items()), "{}")


@contextlib.contextmanager
def forked(these: Forks, order: Start, log: Path) -> Iterator[Forked]:
    """A node that waits for its spec; it is ended with the block."""
    with open(log, "ab") as output:
        made = these.start(order, output.fileno())
    assert made is not None
    try:
        yield made
    finally:
        assert made.stdin is not None
        made.stdin.close()
        made.wait()


def templates() -> list[int]:
    return [one.pid for one in children_of([os.getpid()])[os.getpid()] if TEMPLATE in one.words]


def words(pid: int) -> list[str]:
    return next(one.words for one in children_of([os.getpid()])[os.getpid()] if one.pid == pid)


# ---------------------------------------------------------------- one node


def test_it_is_this_processs_child_with_its_own_name_session_log_and_input(
    these: Forks, tmp_path: Path
) -> None:
    log = tmp_path / "worker-1.0.log"
    with forked(these, node(DBCTL_TEST="é"), log) as one:
        assert words(one.pid) == list(python_command("node", "worker-1.0"))
        assert os.getsid(one.pid) == os.getpgid(one.pid) == one.pid
        environ = Path(f"/proc/{one.pid}/environ").read_bytes().split(b"\0")
        assert "DBCTL_TEST=é".encode() in environ
        files = {fd: os.readlink(f"/proc/{one.pid}/fd/{fd}") for fd in "012"}
        assert files["0"].startswith("pipe:")
        assert files["1"] == files["2"] == str(log)
        assert sorted(os.listdir(f"/proc/{one.pid}/fd")) == ["0", "1", "2"]
        assert len(os.listdir(f"/proc/{one.pid}/task")) == 1
    assert one.returncode == EXIT_ORPHANED
    assert "worker-1.0 no spec of at most" in log.read_text()


def test_its_end_is_told_as_of_a_program(children: Children) -> None:
    started = children.start(node())
    assert isinstance(started, Started)
    assert templates(), "it is a fork"
    found: list[Exited] = []
    wait_until(lambda: found.extend(children.reap()) or found)
    assert (found[0].node, found[0].status) == ("worker-1.0", 1)
    assert "the spec on standard input is not a NodeSpec" in found[0].log_tail


def test_a_signal_to_its_group_ends_it(these: Forks, tmp_path: Path) -> None:
    with forked(these, node(), tmp_path / "log") as one:
        os.killpg(one.pid, signal.SIGKILL)
        assert one.wait() == -signal.SIGKILL


# ---------------------------------------------------------------- templates


def test_one_template_a_command_and_environment(these: Forks, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with forked(these, node("shard-0"), log), forked(these, node("worker-0.0"), log):
        assert len(templates()) == 1
        with forked(these, node("worker-1.0", OPENBLAS_NUM_THREADS="2"), log):
            assert len(templates()) == 2


def test_a_template_that_has_ended_is_followed_by_another(these: Forks, tmp_path: Path) -> None:
    with forked(these, node("shard-0"), tmp_path / "log"):
        [first] = templates()
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: state(first) == "Z")
        with forked(these, node("shard-1"), tmp_path / "log") as one:
            assert words(one.pid)[-1] == "shard-1"
        [second] = templates()
        assert second != first
        os.kill(second, signal.SIGKILL)
        wait_until(lambda: state(second) == "Z")
        these.reap(set())
        assert state(second) == "", "reaped"


@pytest.mark.parametrize("trouble", ["stopped", "broken"])
def test_where_a_template_is_of_no_use_nodes_are_programs(
    these: Forks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    trouble: str,
) -> None:
    order = node(**({"PYTHONPATH": str(tmp_path)} if trouble == "broken" else {}))
    if trouble == "broken":
        (tmp_path / "dbctl").mkdir()
        (tmp_path / "dbctl" / "__init__.py").write_text("")
    else:
        monkeypatch.setattr(forks, "ANSWER_S", 0.3)
        begin = forks._begin

        def stopped(order: Start) -> forks.Template:
            made = begin(order)
            made.process.send_signal(signal.SIGSTOP)
            return made

        monkeypatch.setattr(forks, "_begin", stopped)
    with open(tmp_path / "log", "ab") as output:
        assert these.start(order, output.fileno()) is None
        assert these.start(order, output.fileno()) is None
    assert not templates()
    assert capfd.readouterr().err.count("agent-0 nodes are not forked from here on") == 1


def test_it_ends_when_nothing_is_asked_and_when_nobody_can(tmp_path: Path) -> None:
    code = (
        "from dbctl.node import template\n"
        "template.IMPORTED = ()\n"
        "template.TEMPLATE_IDLE_S = float(__import__('sys').argv[1])\n"
        "print(template.wait_for_name())"
    )
    env = {**os.environ, **python_environment()}
    for idle_s, is_closed in ((0.1, False), (60, True)):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            command = [sys.executable, "-c", code, str(idle_s)]
            made = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.PIPE, env=env, text=True
            )
            theirs.close()
            if is_closed:
                ours.close()
            assert made.communicate(timeout=20)[0] == "None\n"
            assert made.returncode == 0


def test_no_process_left_is_an_error_and_not_another_try(these: Forks, tmp_path: Path) -> None:
    """What a template says when fork fails."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    idle = subprocess.Popen(["sleep", "60"])
    template = forks.Template(idle, ours)
    with theirs, open(tmp_path / "log", "ab") as output:
        theirs.send(PID.pack(-11))
        with pytest.raises(BlockingIOError):
            template.ask(node(), (output.fileno(), output.fileno()))
        template.end()


# ---------------------------------------------------------------- what is not forked


def test_other_commands_are_programs(these: Forks, children: Children, tmp_path: Path) -> None:
    order = node()
    others = [
        shell("sleep 60"),
        Start(order.node, 1, (*order.argv[:-1], "worker-0.0"), order.env, "{}"),
        Start(order.node, 1, (order.argv[0], *order.argv[2:]), order.env, "{}"),
        node("worker-" + "9" * len(TEMPLATE)),
    ]
    for other in others:
        assert these.start(other, 1) is None
    assert not templates()
    assert isinstance(children.start(shell("exit 3")), Started)


def test_a_program_that_is_not_there_is_told_as_ever(children: Children) -> None:
    order = Start("shard-0", 1, ("/no/such/python", "-P", "-m", "dbctl", "node", "shard-0"), (), "")
    answer = children.start(order)
    assert isinstance(answer, Exited)
    assert answer.status == 127
    assert "/no/such/python" in answer.word


def test_what_a_dead_node_leaves_is_reaped(children: Children, tmp_path: Path) -> None:
    """It becomes this process's child, who has never heard of it."""
    out = tmp_path / "pid"
    children.start(shell(f"sleep 0.3 & echo $! > {out}; exec sleep 0.1"))
    wait_until(lambda: out.exists() and out.read_text().endswith("\n"))
    pid = int(out.read_text())
    found: list[Exited] = []
    wait_until(lambda: found.extend(children.reap()) or found)
    deadline = time.monotonic() + 5
    while state(pid) and time.monotonic() < deadline:
        children.reap()
        time.sleep(0.02)
    assert state(pid) == ""
