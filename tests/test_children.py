"""children.py: started, watched, ended, never anybody else's."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dbctl.children import GENTLE_S, Children
from dbctl.wire import Exited
from dbctl.wire_processes import Kill, Start, Started
from tests.cluster.harness import state, wait_until
from tests.shell_nodes import children_in, shell


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    with children_in(tmp_path) as these:
        yield these


def wait_for_exit(children: Children) -> Exited:
    found: list[Exited] = []
    wait_until(lambda: found.extend(children.reap()) or found)
    assert len(found) == 1
    return found[0]


def wait_for_file(path: Path) -> str:
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"))
    return path.read_text().strip()


# ---------------------------------------------------------------- start


def test_a_log_that_cannot_be_made_is_not_its_programs_fault(tmp_path: Path) -> None:
    children = Children(tmp_path / "none")
    exited = children.start(shell("exit 0"))
    assert isinstance(exited, Exited)
    log = tmp_path / "none" / "shard-0.log"
    word = f"its log cannot be written: no such file or directory ({log})"
    assert (exited.status, exited.word) == (127, word)
    children.close()


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
