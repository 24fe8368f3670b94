"""The agent's children: started, watched, ended, never anybody else's. A whole agent and its nodes
under faults: cluster/test_processes.py.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import cast

import pytest

from dbctl.agent import END_GENTLE_S, END_KILL_S, GENTLE_S, Agent, Children
from dbctl.agent_options import Told, make_directories, told
from dbctl.logs import LogSender
from dbctl.process import read_line
from dbctl.transport.link import Link
from dbctl.wire import Exited, Finish, Message, Peer
from dbctl.wire_logs import LogFiled, LogText
from dbctl.wire_processes import Failed, Kill, Start, Started
from tests.cluster.harness import state, wait_until


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    these = Children(tmp_path)
    yield these
    these.end_all(gently=False)
    wait_until(lambda: these.reap() is not None and not these.running)


def wait_for_exit(children: Children) -> Exited:
    found: list[Exited] = []
    wait_until(lambda: found.extend(children.reap()) or found)
    assert len(found) == 1
    return found[0]


def shell(script: str, node: str = "shard-0", incarnation: int = 1, spec: str = "{}") -> Start:
    return Start(node, incarnation, ("/bin/sh", "-c", script), (), spec)


def wait_for_file(path: Path) -> str:
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"))
    return path.read_text().strip()


# ---------------------------------------------------------------- start


def test_a_node_gets_its_spec_and_environment_byte_for_byte(
    children: Children, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    code = (
        "import json, os, sys\n"
        f"with open({str(out)!r}, 'w') as f:\n"
        "    json.dump([sys.stdin.readline(), dict(os.environ), os.listdir('/proc/self/fd'),\n"
        "               os.getsid(0) == os.getpid()], f)"
    )
    values = {"A": "a b", "B": "it's", "C": '"$HOME"', "D": "x;y", "E": "two\nlines", "F": "é"}
    order = Start("shard-0", 1, (sys.executable, "-c", code), tuple(values.items()), '{"x": "é"}')
    secret_r, secret_w = os.pipe()
    os.set_inheritable(secret_r, True)
    try:
        started = children.start(order)
        assert isinstance(started, Started)
        assert wait_for_exit(children).status == 0
    finally:
        os.close(secret_r)
        os.close(secret_w)
    line, environ, fds, leads_session = json.loads(out.read_text())
    assert line == '{"x": "é"}\n'
    assert environ.items() >= values.items()
    assert environ["PATH"] == os.environ["PATH"]
    assert set(fds) <= {"0", "1", "2", "3", "4"}, "0 to 2, the file, and the listing itself"
    assert leads_session


def test_input_stays_open_as_long_as_the_node_lives(children: Children) -> None:
    children.start(shell("read spec; read more; echo input ended"))
    time.sleep(0.2)
    assert children.reap() == []
    stdin = children.running["shard-0", 1].process.stdin
    assert stdin is not None
    stdin.close()
    assert wait_for_exit(children).log_tail == "input ended"


def test_a_spec_larger_than_a_pipe_does_not_wait_for_a_node_that_does_not_read(
    children: Children, tmp_path: Path
) -> None:
    begin = time.monotonic()
    started = children.start(shell("sleep 60", spec="x" * 900_000))
    assert isinstance(started, Started)
    assert time.monotonic() - begin < 2.0
    out = tmp_path / "size"
    children.start(shell(f"head -n 1 | wc -c > {out}", "shard-1", spec="x" * 900_000))
    assert wait_for_exit(children).status == 0
    assert out.read_text().strip() == "900001"


@pytest.mark.parametrize(
    ("order", "word"),
    [
        (Start("shard-0", 1, ("/no/such/python", "-m", "dbctl"), (), ""), "/no/such/python"),
        (Start("shard-0", 1, ("/etc/passwd",), (), ""), "PermissionError"),
        (Start("shard-0", 1, (), (), ""), "no command"),
        (Start("../../etc/cron", 1, ("/bin/true",), (), ""), "not a node's name"),
        (Start("shard-0", 1, ("/bin/true",), (("A", "\0"),), ""), "null byte"),
        (Start("shard-0", 1, ("/bin/sleep", "60"), (), "x" * (1 << 20)), "expected at most"),
    ],
)
def test_what_cannot_be_started_is_told_and_nothing_runs(
    children: Children, order: Start, word: str
) -> None:
    answer = children.start(order)
    assert isinstance(answer, Exited)
    assert answer.status == 127
    assert word in answer.word
    assert not children.running
    assert children.start(order) == answer, "asked again, told again"


def test_a_repeated_start_starts_nothing(children: Children) -> None:
    order = shell("sleep 60")
    first = children.start(order)
    assert children.start(order) == first
    assert len(children.running) == 1


def test_a_late_start_of_what_is_over_is_answered_by_its_end(children: Children) -> None:
    order = shell("exit 3")
    children.start(order)
    exited = wait_for_exit(children)
    assert children.start(order) == exited
    assert not children.running


def test_a_newer_life_ends_the_older_and_an_older_never_comes_back(children: Children) -> None:
    old, new = shell("sleep 60", incarnation=1), shell("sleep 60", incarnation=2)
    children.start(old)
    assert isinstance(children.start(new), Started)
    assert wait_for_exit(children).incarnation == 1
    assert children.ended["shard-0", 1].status == -signal.SIGKILL
    assert list(children.running) == [("shard-0", 2)]
    assert children.start(shell("sleep 60", incarnation=0)) is None
    assert list(children.running) == [("shard-0", 2)]


def test_nice_is_set(children: Children) -> None:
    order = Start("evaluator-0", 1, ("/bin/sh", "-c", "read x; sleep 60"), (), "", nice=5)
    started = children.start(order)
    assert isinstance(started, Started)
    assert os.getpriority(os.PRIO_PROCESS, started.pid) == 5


# ---------------------------------------------------------------- the end of a node


def test_an_end_is_told_with_status_and_last_lines(children: Children) -> None:
    children.start(shell("echo out; echo err >&2; printf 'a\\033[2Jb\\n'; exit 7"))
    exited = wait_for_exit(children)
    assert exited == Exited("shard-0", 1, 7, "out\nerr\na\\x1b[2Jb")


def test_the_tail_begins_with_this_life(children: Children) -> None:
    children.start(shell("echo first life"))
    wait_for_exit(children)
    children.start(shell("echo second life", incarnation=2))
    assert wait_for_exit(children).log_tail == "second life"
    assert (children.logs / "shard-0.log").read_text() == "first life\nsecond life\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_signal_is_told_as_a_negative_status(children: Children, number: signal.Signals) -> None:
    started = children.start(shell("sleep 60"))
    assert isinstance(started, Started)
    os.kill(started.pid, number)
    assert wait_for_exit(children).status == -number


@pytest.mark.parametrize("how", ["killed", "ends itself", "crashes"])
def test_what_a_node_started_dies_with_it(children: Children, tmp_path: Path, how: str) -> None:
    file = tmp_path / "grandchild"
    then = {"killed": "sleep 60", "ends itself": "exit 0", "crashes": "kill -SEGV $$"}[how]
    children.start(shell(f"sleep 300 & echo $! > {file}; {then}"))
    grandchild = int(wait_for_file(file))
    if how == "killed":
        assert state(grandchild) in ("R", "S")
        children.kill(Kill("shard-0", 1), time.monotonic())
    wait_for_exit(children)
    wait_until(lambda: state(grandchild) in ("", "Z"))


def test_kill_ends_a_stopped_node(children: Children) -> None:
    started = children.start(shell("sleep 60"))
    assert isinstance(started, Started)
    os.kill(started.pid, signal.SIGSTOP)
    wait_until(lambda: state(started.pid) == "T")
    children.kill(Kill("shard-0", 1), time.monotonic())
    assert wait_for_exit(children).status == -signal.SIGKILL


def test_a_gentle_kill_closes_the_input_and_then_is_not_gentle(children: Children) -> None:
    children.start(shell("read spec; read more; echo input ended; while :; do sleep 0.05; done"))
    order = Kill("shard-0", 1, gently=True)
    children.kill(order, now=100.0)
    children.kill(order, now=101.0)  # repeated: it is not put off
    children.kill_due(100.0 + GENTLE_S - 0.1)
    wait_until(lambda: "input ended" in (children.logs / "shard-0.log").read_text())
    assert children.reap() == []
    children.kill_due(100.0 + GENTLE_S)
    assert wait_for_exit(children).status == -signal.SIGKILL


# ---------------------------------------------------------------- nobody else's process


def test_a_dead_node_keeps_its_number_until_its_group_was_killed(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = children.start(shell("exit 0"))
    assert isinstance(started, Started)
    seen = []

    def killpg(pid: int, number: int) -> None:
        seen.append((pid, number, state(pid)))  # Z: dead, not reaped, still ours

    monkeypatch.setattr(os, "killpg", killpg)
    wait_for_exit(children)
    assert seen == [(started.pid, signal.SIGKILL, "Z")]


def test_a_number_that_is_no_longer_ours_is_not_signalled(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ipython/ipyparallel#548: by then the number may be another process's."""
    children.start(shell("exit 0"))
    child = children.running["shard-0", 1]
    exited = wait_for_exit(children)
    monkeypatch.setattr(os, "killpg", lambda pid, number: pytest.fail("signalled a stranger"))
    monkeypatch.setattr(os, "kill", lambda pid, number: pytest.fail("signalled a stranger"))
    for gently in (False, True):
        assert children.kill(Kill("shard-0", 1, gently), time.monotonic()) == exited
    children.kill_due(float("inf"))
    children.end_all(gently=False)
    assert children.kill(Kill("shard-9", 1), time.monotonic()) is None, "never ours at all"
    with pytest.raises(AssertionError):
        child.signal_group(signal.SIGKILL)


# ---------------------------------------------------------------- the loop


class QueueLink:
    """A link of one process: orders are put in, answers are kept."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[Peer, Message] | None] = SimpleQueue()
        self.sent: list[Message] = []
        self.closed_by_parent = False
        self.lease = True

    def receive(self, timeout_s: float) -> list[tuple[Peer, Message]]:
        try:
            item = self.queue.get(timeout=timeout_s)
        except Empty:
            return []
        return [] if item is None else [item]

    def wake(self) -> None:
        self.queue.put(None)

    def send(self, to: str, message: Message) -> None:
        assert to == "controller"
        self.sent.append(message)
        if isinstance(message, Exited):  # the script's last act
            self.queue.put((CONTROLLER, Finish()))

    def lease_in_force(self, now: float) -> bool:
        return self.lease


CONTROLLER = Peer("controller", 1)


@pytest.fixture
def link() -> Iterator[QueueLink]:
    numbers = (signal.SIGCHLD,)
    handlers = [(number, signal.getsignal(number)) for number in numbers]
    yield QueueLink()
    for number, handler in handlers:
        signal.signal(number, handler)


def make_agent(link: QueueLink, children: Children) -> Agent:
    return Agent(cast(Link, link), children, name="agent-0")


def test_a_death_wakes_the_loop(
    children: Children, link: QueueLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the look four times a second: that one is put off here for longer than a test lasts."""
    monkeypatch.setattr("dbctl.agent.LOOK_S", 100.0)
    agent = make_agent(link, children)
    agent.handle_signals()
    link.queue.put((CONTROLLER, shell("sleep 0.2; exit 3")))
    begin = time.monotonic()
    assert agent.serve() == "finished"
    assert time.monotonic() - begin < 5.0
    assert [type(message) for message in link.sent] == [Started, Exited]
    assert children.ended["shard-0", 1].status == 3


def test_a_nodes_own_word_goes_with_its_end(children: Children, link: QueueLink) -> None:
    agent = make_agent(link, children)
    agent.handle_signals()
    link.queue.put((CONTROLLER, shell("sleep 0.3; exit 1")))
    link.queue.put((Peer("shard-0", 1), Failed("disk on fire")))
    link.queue.put((Peer("shard-0", 2), Failed("of a life that is not this one")))
    link.queue.put((Peer("worker-0.0", 1), Kill("shard-0", 1)))  # not its to order
    assert agent.serve() == "finished"
    exited = children.ended["shard-0", 1]
    assert (exited.status, exited.word) == (1, "disk on fire")


def test_without_a_lease_no_order_is_carried_out(children: Children, link: QueueLink) -> None:
    class Stopped(QueueLink):
        def receive(self, timeout_s: float) -> list[tuple[Peer, Message]]:
            self.lease = False  # SIGSTOP for an hour, then SIGCONT
            return super().receive(timeout_s)

    stopped = Stopped()
    stopped.queue.put((CONTROLLER, shell("sleep 60")))
    assert make_agent(stopped, children).serve().startswith("the lease ran out")
    assert not children.running
    assert stopped.queue.empty(), "the order had come"


def test_finish_and_the_parents_end_end_the_loop(children: Children, link: QueueLink) -> None:
    link.queue.put((CONTROLLER, Finish()))
    assert make_agent(link, children).serve() == "finished"
    link.closed_by_parent = True
    link.wake()
    assert make_agent(link, children).serve().startswith("standard input ended")


def test_the_end_takes_those_that_do_not_heed_their_input(
    children: Children, link: QueueLink
) -> None:
    children.start(shell("while :; do sleep 0.05; done"))
    link.send = lambda to, message: link.sent.append(message)  # type: ignore[method-assign]
    begin = time.monotonic()
    make_agent(link, children).end()
    assert END_GENTLE_S <= time.monotonic() - begin < END_GENTLE_S + END_KILL_S + 0.5
    assert children.ended["shard-0", 1].status == -signal.SIGKILL
    assert not children.running


def test_the_end_of_nothing_is_at_once(children: Children, link: QueueLink) -> None:
    begin = time.monotonic()
    make_agent(link, children).end()
    assert time.monotonic() - begin < 0.1


def test_the_agent_imports_no_numpy() -> None:
    code = "import sys, dbctl.agent; print(sorted({'numpy', 'click', 'yaml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=20, check=True)
    assert done.stdout == b"[]\n"


# ---------------------------------------------------------------- an agent of another host


def told_on_stdin(text: bytes, monkeypatch: pytest.MonkeyPatch, home: Path) -> Told:
    """What `told` makes of standard input `text`."""
    monkeypatch.setenv("HOME", str(home))
    (home.parent / f"{home.name}.in").write_bytes(text)
    read = os.open(home.parent / f"{home.name}.in", os.O_RDONLY)
    monkeypatch.setattr("dbctl.options_line.read_line", lambda fd, limit: read_line(read, limit))
    try:
        return told()
    finally:
        os.close(read)


def orders(home: Path, **changes: object) -> bytes:
    values: dict[str, object] = {
        "runtime": str(home / "sockets"), "run": "r7", "name": "agent-3", "workdir": "~/work/é",
        "lease": 4.0, "env": {"A_VALUE": "b c"},
    }  # fmt: skip
    return json.dumps(values | changes).encode() + b"\n"


def test_options_come_over_standard_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("A_VALUE", "")  # and so it is taken away again
    this = told_on_stdin(orders(tmp_path), monkeypatch, tmp_path)
    options = this.options
    assert (this.question, this.reach, this.only) == ({"workdir": "~/work/é"}, False, False)
    make_directories(options)
    assert (options.name, options.run, options.lease) == ("agent-3", "r7", 4.0)
    assert options.logs == str(tmp_path / "work" / "é" / "r7")
    assert Path(options.logs).is_dir()
    assert stat.S_IMODE(os.stat(tmp_path / "sockets").st_mode) == 0o700
    assert os.environ["A_VALUE"] == "b c"


def test_a_directory_of_somebody_else_is_never_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sockets").mkdir(mode=0o777)
    this = told_on_stdin(orders(tmp_path), monkeypatch, tmp_path)
    with pytest.raises(FileExistsError):
        make_directories(this.options)


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"{}\n", b"nonsense\n", b"[1]\n", b'{"env": 3}\n', b"x" * 70_000 + b"\n"]
)
def test_options_that_are_none_are_refused(
    text: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r".+"):
        told_on_stdin(text, monkeypatch, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_logs_are_sent_piece_by_piece_and_to_their_end(
    children: Children, link: QueueLink, tmp_path: Path
) -> None:
    agent = make_agent(link, children)
    agent.logs = LogSender(tmp_path)
    text = "".join(f"line {i}\n" for i in range(10_000))
    (tmp_path / "long.txt").write_text(text)
    got = []

    def send(to: str, message: Message) -> None:
        if isinstance(message, LogText):
            assert message.start == sum(map(len, got)), "one after the other"
            got.append(message.text)
            upto = message.start + len(message.text)
            link.queue.put((CONTROLLER, LogFiled(message.node, upto)))
        elif isinstance(message, Exited):
            link.queue.put((CONTROLLER, Finish()))

    link.send = send  # type: ignore[method-assign]
    link.queue.put((CONTROLLER, shell(f"cat {tmp_path / 'long.txt'}")))
    assert agent.serve() == "finished"
    agent.end_logs()
    assert b"".join(got).decode() == text
    assert not (tmp_path / "shard-0.log").exists(), "what was filed leaves no copy"


def test_an_answer_that_comes_with_finish_is_heard(children: Children, tmp_path: Path) -> None:
    """Else the piece counts as under way, and the rest of the logs is waited for in vain."""

    class Together(QueueLink):
        def receive(self, timeout_s: float) -> list[tuple[Peer, Message]]:
            return [(CONTROLLER, Finish()), (CONTROLLER, LogFiled("a", 3)), (CONTROLLER, START)]

    agent = make_agent(Together(), children)
    agent.logs = LogSender(tmp_path)
    (tmp_path / "a.log").write_bytes(b"xyz")
    assert agent.logs.due(["a"], 0.0) is not None
    assert agent.serve() == "finished"
    assert not agent.logs.waits
    assert not children.running, "an order after Finish is none"


START = shell("sleep 60")
