"""forks.py: a node that was forked cannot be told from one that is a program of its own."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from dbctl.children import Children
from dbctl.forks import PR_SET_CHILD_SUBREAPER, Forked, Forks, Question, forks_here
from dbctl.launch.base import python_command, python_environment
from dbctl.process import EXIT_ORPHANED, TEMPLATE, prctl
from dbctl.proctree import Process, children_of
from dbctl.wire import Exited
from dbctl.wire_processes import Kill, Start, Started
from tests.cluster.harness import state, wait_until
from tests.shell_nodes import shell

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks on Linux only")


@pytest.fixture
def these() -> Iterator[Forks]:
    """As in an agent; afterwards this process is no subreaper any more."""
    before = own_children()
    made = forks_here("agent-0", 20.0)
    assert made is not None
    try:
        yield made
    finally:
        made.close()
        wait_until(lambda: made.reap(set()) is None and own_children() <= before)
        prctl(PR_SET_CHILD_SUBREAPER, 0)


@pytest.fixture
def children(these: Forks, tmp_path: Path) -> Iterator[Children]:
    made = Children(tmp_path, these)
    try:
        yield made
    finally:
        made.end_all(gently=False)
        wait_until(lambda: made.reap() is not None and not made.running)


def node(name: str = "worker-1.0", incarnation: int = 1, **env: str) -> Start:
    variables = {**python_environment(), "OPENBLAS_NUM_THREADS": "1", **env}
    command = python_command("node", name)
    return Start(name, incarnation, command, tuple(variables.items()), "{}")


def answers_of(these: Forks) -> list[tuple[str, Forked | None]]:
    """The next answers, of one look."""
    found: list[tuple[Question, Forked | None]] = []
    wait_until(lambda: found.extend(these.look(time.monotonic())) or found)
    return [(question.order.node, one) for question, one in found]


@contextlib.contextmanager
def forked(these: Forks, order: Start, log: Path) -> Iterator[Forked]:
    """A node that waits for its spec; it is ended with the block."""
    with open(log, "ab") as output:
        these.ask(order, output.fileno())
        [(name, made)] = answers_of(these)
    assert name == order.node
    assert made is not None
    try:
        yield made
    finally:
        assert made.stdin is not None
        made.stdin.close()
        made.wait()


def answered(children: Children) -> Started | Exited:
    found: list[Started | Exited] = []
    wait_until(lambda: found.extend(children.forked(time.monotonic())) or found)
    [answer] = found
    return answer


def patched(directory: Path, code: str) -> str:
    """The PYTHONPATH of a Python that runs `code` before all else."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(code)
    return os.pathsep.join([str(directory), python_environment()["PYTHONPATH"]])


def own_children() -> set[str]:
    """The numbers of this process's children, dead ones that nobody has reaped too."""
    return set(Path("/proc/self/task", str(os.getpid()), "children").read_text().split())


def my_children() -> list[Process]:
    return children_of([os.getpid()])[os.getpid()]


def templates() -> list[int]:
    return [one.pid for one in my_children() if TEMPLATE in one.words]


def words(pid: int) -> list[str]:
    return next(one.words for one in my_children() if one.pid == pid)


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
    assert one.returncode == EXIT_ORPHANED
    assert "worker-1.0 no spec of at most" in log.read_text()


def test_its_start_and_end_are_told_as_of_a_program(children: Children) -> None:
    assert children.start(node()) is None
    assert children.start(node()) is None, "asked again before there is an answer"
    started = answered(children)
    assert isinstance(started, Started)
    assert templates(), "it is a fork"
    assert not children.waiting
    assert not children.forked(time.monotonic())
    found: list[Exited] = []
    wait_until(lambda: found.extend(children.reap()) or found)
    assert (found[0].node, found[0].status) == ("worker-1.0", 1)
    assert "the spec on standard input is not a NodeSpec" in found[0].log_tail


def test_a_signal_to_its_group_ends_it(these: Forks, tmp_path: Path) -> None:
    with forked(these, node(), tmp_path / "log") as one:
        os.killpg(one.pid, signal.SIGKILL)
        assert one.wait() == -signal.SIGKILL


def test_one_that_dies_before_its_number_is_told_is_dead_and_not_a_strangers(
    children: Children,
) -> None:
    path = patched(
        children.logs / "site",
        "import os, time\n"
        "waitpid = os.waitpid\n"
        "os.waitpid = lambda pid, flags: (waitpid(pid, flags), time.sleep(0.5))[0]\n",
    )
    children.start(node("shard-0", PYTHONPATH=path))
    children.forked(time.monotonic())
    ours = python_command("node", "shard-0")
    wait_until(lambda: list(ours) in [one.words for one in my_children()])
    [pid] = [one.pid for one in my_children() if one.words == list(ours)]
    os.kill(pid, signal.SIGKILL)
    found: list[Started | Exited] = []

    def told() -> bool:
        found.extend([*children.reap(), *children.forked(time.monotonic())])
        return len(found) == 2

    wait_until(told)
    assert found[0] == Started("shard-0", 1, pid)
    assert isinstance(found[1], Exited)
    assert found[1].status == -signal.SIGKILL


def test_a_stopped_one_that_has_no_spec_yet_dies_with_its_agent(tmp_path: Path) -> None:
    """It would not see the end of its input."""
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from dbctl.forks import forks_here\n"
        "from tests.test_forks import forked, node\n"
        "with forked(forks_here('agent-0', 20.0), node(), Path(sys.argv[1], 'log')) as one:\n"
        "    print(one.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    root = str(Path(__file__).resolve().parent.parent)
    agent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
    )
    with agent:
        assert agent.stdout is not None
        pid = int(agent.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        agent.kill()
        agent.wait()
        try:
            wait_until(lambda: state(pid) in ("", "Z"))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


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
    these: Forks, tmp_path: Path, capfd: pytest.CaptureFixture[str], trouble: str
) -> None:
    order = node(**({"PYTHONPATH": str(tmp_path)} if trouble == "broken" else {}))
    with open(tmp_path / "log", "ab") as output:
        if trouble == "broken":
            (tmp_path / "dbctl").mkdir()
            (tmp_path / "dbctl" / "__init__.py").write_text("")
        else:
            these._answer_s = 0.3
        for name in ("worker-1.0", "worker-2.0"):
            command = (*order.argv[:-1], name)
            these.ask(replace(order, node=name, argv=command), output.fileno())
        if trouble == "stopped":
            [pid] = templates()
            os.kill(pid, signal.SIGSTOP)
        assert answers_of(these) == [("worker-1.0", None), ("worker-2.0", None)]
    assert not these.takes(order)
    assert not templates()
    assert capfd.readouterr().err.count("agent-0 nodes are not forked from here on") == 1


@pytest.mark.parametrize(
    ("fails", "programs"),
    [
        ("os.fork = lambda: fail() if os.getpid() == top and count() == 2 else fork()", [1]),
        ("os.fork = lambda: fail() if os.getpid() != top else fork()", [0, 1, 2]),
        ("os.setsid = lambda: os._exit(9)", [0, 1, 2]),
    ],
    ids=["the fork of a fork", "the fork of a node", "the node itself"],
)
def test_where_a_fork_fails_that_node_is_a_program(
    children: Children,
    these: Forks,
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
    programs: list[int],
) -> None:
    path = patched(
        children.logs / "site",
        "import os\n"
        "n, fork, top = [0], os.fork, os.getpid()\n"
        "def count():\n    n[0] += 1\n    return n[0]\n"
        "def fail():\n    raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
        f"{fails}\n",
    )
    seen: list[Forked | None] = []
    look = these.look

    def looked(now: float) -> list[tuple[Question, Forked | None]]:
        found = look(now)
        seen.extend(one for _, one in found)
        return found

    monkeypatch.setattr(these, "look", looked)
    for name in ("shard-0", "shard-1", "shard-2"):
        assert children.start(node(name, PYTHONPATH=path)) is None
        assert isinstance(answered(children), Started)
    assert [i for i, one in enumerate(seen) if one is None] == programs
    assert these.takes(node(PYTHONPATH=path)), "the template is asked on"


def test_a_question_that_cannot_be_asked_is_answered(
    children: Children, these: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pipe can be made for the first: what waits behind it is told of too."""
    names = ["shard-0", "shard-1"]
    for name in names:
        assert children.start(node(name)) is None
    with monkeypatch.context() as no_descriptor:
        no_descriptor.setattr("dbctl.forks.os.pipe", fail_with(errno.EMFILE))
        found = children.forked(time.monotonic())
    assert [answer.node for answer in found] == names
    assert not children.waiting


def test_what_a_template_that_ends_was_asked_is_answered(children: Children) -> None:
    """Though it is seen that it has ended before its answer is looked for."""
    for name in ("shard-0", "shard-1"):
        assert children.start(node(name)) is None
    children.forked(time.monotonic())
    [pid] = templates()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: state(pid) == "Z")
    children.reap()
    found: list[Started | Exited] = []
    wait_until(lambda: found.extend(children.forked(time.monotonic())) or not children.waiting)
    assert [answer.node for answer in found] == ["shard-0", "shard-1"]


def fail_with(number: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_one_that_is_killed_between_fork_and_answer_leaves_no_second_node(
    children: Children, these: Forks
) -> None:
    """The orphan finds the end of its input; a new template makes the node."""
    path = patched(
        children.logs / "site",
        "import os, signal\n"
        "n, waitpid = [0], os.waitpid\n"
        "def die(pid, flags):\n"
        "    n[0] += 1\n"
        "    found = waitpid(pid, flags)\n"
        "    if n[0] == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return found\n"
        "os.waitpid = die\n",
    )
    children.start(node("shard-0", PYTHONPATH=path))
    answered(children)
    [first] = templates()
    children.start(node("shard-1", PYTHONPATH=path))
    answer = answered(children)
    assert isinstance(answer, Started)
    [second] = templates()
    assert second != first
    text = (children.logs / "shard-1.log").read_text
    wait_until(lambda: "not a NodeSpec" in text())
    assert text().count("shard-1 no spec") == 1, "the orphan's word"
    assert text().count("not a NodeSpec") == 1, "one process read the spec"


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


# ---------------------------------------------------------------- what is not wanted any more


@pytest.mark.parametrize("how", ["killed", "gently", "a later life", "all"])
def test_what_is_ended_while_it_is_forked_never_begins(
    children: Children, these: Forks, how: str
) -> None:
    assert children.start(node("shard-0")) is None
    children.forked(time.monotonic())  # the question is on its way
    if how == "all":
        children.end_all(gently=True)
    elif how == "a later life":
        assert children.start(node("shard-0", 2)) is None
    else:
        told = children.kill(Kill("shard-0", 1, gently=how == "gently"), time.monotonic())
        assert told == Exited("shard-0", 1, -signal.SIGKILL, "", "")
    assert children.ended["shard-0", 1].status == -signal.SIGKILL
    assert children.start(node("shard-0")) == children.ended["shard-0", 1]
    assert children.start(node("shard-3")) is None
    names = [answered(children).node]
    if how == "a later life":
        names.append(answered(children).node)
    assert names == ["shard-0", "shard-3"][-len(names) :]
    wait_until(lambda: "no spec of at most" in (children.logs / "shard-0.log").read_text())


def test_what_is_ended_before_it_is_asked_for_is_never_asked_for(
    children: Children, these: Forks
) -> None:
    """Its log is closed by then, and that number may be another file's."""
    for name in ("shard-0", "shard-1", "shard-2"):
        assert children.start(node(name)) is None
    children.forked(time.monotonic())
    children.kill(Kill("shard-1", 1), time.monotonic())
    assert [answered(children).node for _ in range(2)] == ["shard-0", "shard-2"]
    assert these.takes(node()), "no template has failed"
    assert len(templates()) == 1
    assert (children.logs / "shard-1.log").read_text() == ""


def test_a_later_life_makes_an_earlier_start_nothing(children: Children) -> None:
    assert children.start(node("shard-0", 2)) is None
    assert children.start(node("shard-0", 1)) is None
    assert list(children.waiting) == [("shard-0", 2)]


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
        assert not these.takes(other)
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
