"""agent.py: the loop of an agent and its end. A whole agent and its nodes under faults:
cluster/test_processes.py.
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

from dbctl.agent import END_GENTLE_S, END_KILL_S, Agent
from dbctl.agent_options import Told, make_directories, told
from dbctl.children import Children
from dbctl.logs import LogSender
from dbctl.process import read_line
from dbctl.transport.link import Link
from dbctl.wire import Exited, Finish, Message, Peer
from dbctl.wire_logs import LogFiled, LogText
from dbctl.wire_processes import Failed, Kill, Start, Started
from tests.shell_nodes import children_in, shell


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    with children_in(tmp_path) as these:
        yield these


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


def test_what_became_of_an_order_to_start_is_a_sentence_in_the_log(
    children: Children, link: QueueLink, capfd: pytest.CaptureFixture[str]
) -> None:
    agent = make_agent(link, children)
    agent.handle_signals()
    nowhere = Start("shard-1", 2, ("/no/such/program",), (), "{}")
    for order in (nowhere, shell("", "shard-1", 1), shell("sleep 0.2; exit 3")):
        link.queue.put((CONTROLLER, order))
    assert agent.serve() == "finished"
    [pid] = [message.pid for message in link.sent if isinstance(message, Started)]
    out, err = capfd.readouterr()
    said = out + err
    assert f" shard-0#1 started with pid {pid}\n" in said
    assert " shard-1#2 is over, status 127: cannot start /no/such" in said
    assert " shard-1#1 is not started: a later life of it is known\n" in said
    assert "Started(" not in said
    assert "Exited(" not in said


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
    link.queue.put((CONTROLLER, Finish()))
    assert make_agent(link, children).serve() == "finished", "heard together with the end"
    link.wake()
    assert make_agent(link, children).serve().startswith("standard input ended")


@pytest.mark.quiet
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


@pytest.mark.alone
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
