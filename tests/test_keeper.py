"""The keeper on this machine: real processes and connections, no ssh.

Over ssh, and with whole runs: cluster/test_standing.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dbctl import __version__, keeper_start
from dbctl.envelope import PROTOCOL_VERSION
from dbctl.keeper import SILENT_MAX
from dbctl.keeper_runs import STOPPED
from dbctl.keeper_start import LOG, PREFIX, SOCKET
from tests.cluster.harness import state, wait_gone, wait_until
from tests.one_keeper import (
    IMPATIENT,
    KEEPER_PATIENCE,
    LIMIT_S,
    ROOT,
    RUNS_PATIENCE,
    Standing,
    agent_pid,
    let_go,
    say,
    start,
)


@pytest.fixture
def standing(tmp_path: Path) -> Iterator[Standing]:
    with Standing(tmp_path) as one:
        yield one


# ---------------------------------------------------------------------------------------- beginning


def test_it_says_ready_with_what_its_launcher_needs(standing: Standing) -> None:
    assert standing.ready == {
        "endpoint": f"{standing.directory}/{SOCKET}",
        "version": __version__,
        "protocol": PROTOCOL_VERSION,
        "python": sys.executable,
    }
    assert standing.directory.name.startswith(PREFIX)
    assert standing.directory.stat().st_mode & 0o777 == 0o700
    assert standing.workdir.is_dir()


def test_it_leaves_the_ssh_that_started_it(standing: Standing) -> None:
    """Its own session, none of the pipes: whoever started it sees their ends, and it goes on."""
    assert standing.process.wait(LIMIT_S) == 0
    assert standing.process.stdout is not None
    assert standing.process.stderr is not None
    assert standing.process.stdout.read() == b""
    assert standing.process.stderr.read() == b""
    assert os.getsid(standing.pid) not in (os.getsid(0), standing.pid), "no leader: no terminal"
    targets = {os.readlink(f"/proc/{standing.pid}/fd/{fd}") for fd in range(3)}
    assert targets == {os.devnull, f"{standing.directory}/{LOG}"}
    assert standing.status()["pid"] == standing.pid


def test_without_the_word_to_stay_nothing_is_left(tmp_path: Path) -> None:
    with Standing(tmp_path, stays=False) as one:
        assert one.directory.exists()
        assert let_go(one.process) == 1
        assert not one.directory.exists()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_before_it_stays_leaves_nothing(tmp_path: Path, name: str) -> None:
    with Standing(tmp_path, stays=False) as one:
        assert one.directory.exists()
        one.process.send_signal(signal.Signals[name])
        assert one.process.wait(LIMIT_S) == 1
        assert one.process.stderr is not None
        assert f"ends: GivenUp: {name}" in one.process.stderr.read().decode()
        assert not one.directory.exists()


def test_a_launcher_that_says_no_more_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a word is as silent as none."""
    monkeypatch.setitem(KEEPER_PATIENCE, "STAY_LIMIT_S", 0.5)
    for said in (b"", b"st"):
        with Standing(tmp_path, stays=False) as one:
            say(one.process, said)
            assert one.process.wait(LIMIT_S) == 1
            assert not one.directory.exists()


def test_nobody_reads_that_it_stays(tmp_path: Path) -> None:
    """The ssh was killed between the word and the answer: nobody would know of it."""
    with Standing(tmp_path, stays=False) as one:
        assert one.process.stdout is not None
        one.process.stdout.close()
        say(one.process, b"stay\n")
        wait_until(lambda: not one.directory.exists())


def test_a_limit_that_has_another_name_by_now_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tests' own shorter ones: it would be as long as ever, and nobody would see."""
    monkeypatch.setitem(RUNS_PATIENCE, "NO_SUCH_LIMIT_S", 0.5)
    process = start("-P", "-c", IMPATIENT, stderr=subprocess.PIPE)
    _, err = process.communicate(b"", LIMIT_S)
    assert "dbctl.keeper_runs has no {'NO_SUCH_LIMIT_S'}" in err.decode()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (b"", "no options"),
        (b"{}\n", "options of another form"),
        (b"nonsense\n", "JSONDecodeError"),
        (b'{"cluster": "a", "env": {}, "workdir": "/proc/none"}\n', "FileNotFoundError"),
    ],
)
def test_what_it_cannot_begin_with_is_told(options: bytes, word: str) -> None:
    process = start("-P", "-c", IMPATIENT, stderr=subprocess.PIPE)
    _, err = process.communicate(options, LIMIT_S)
    assert process.returncode == 1
    assert f"cannot begin: {word}" in err.decode() or word in err.decode()
    assert "Traceback" not in err.decode()
    assert not list(Path(os.environ["XDG_RUNTIME_DIR"]).iterdir())


def test_it_loads_neither_numpy_nor_zmq_nor_click() -> None:
    code = (
        "import sys, dbctl.__main__, dbctl.keeper, dbctl.caller\n"
        "print([m for m in ('numpy', 'zmq', 'click', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout == b"[]\n"


@pytest.fixture
def short_path() -> Iterator[Path]:
    """For names of sockets, for which `tmp_path` may be too long."""
    with tempfile.TemporaryDirectory(prefix="k-", dir="/tmp") as path:
        yield Path(path)


def test_what_a_killed_one_left_goes_at_the_next_beginning(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert keeper_start.PARENT == "/tmp"
    monkeypatch.setattr(keeper_start, "PARENT", str(short_path))
    for name, listens in ((f"{PREFIX}dead", False), (f"{PREFIX}live", True)):
        (short_path / name).mkdir()
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(short_path / name / SOCKET))
            if listens:
                one.listen(1)
                keeper_start.sweep()
        (short_path / name / LOG).touch()
    (short_path / f"{PREFIX}young").mkdir()  # it does not listen yet
    (short_path / f"{PREFIX}dead-before").mkdir()  # and this one never will
    (short_path / f"{PREFIX}dead-before" / "new.sock").touch()
    long_ago_s = time.time() - 61.0
    os.utime(short_path / f"{PREFIX}dead-before", (long_ago_s, long_ago_s))
    (short_path / "other").mkdir()
    assert (short_path / f"{PREFIX}live").exists()
    assert sorted(path.name for path in short_path.iterdir() if "dead" not in path.name) == [
        f"{PREFIX}live", f"{PREFIX}young", "other",
    ]  # fmt: skip
    keeper_start.sweep()
    assert sorted(path.name for path in short_path.iterdir()) == [f"{PREFIX}young", "other"]


# ------------------------------------------------------------------------------------------ its end


@pytest.mark.parametrize("how", ["stop", "SIGTERM", "SIGINT", "SIGHUP"])
def test_it_ends_and_its_runs_with_it(standing: Standing, tmp_path: Path, how: str) -> None:
    with standing.run(tmp_path) as process:
        pid = agent_pid(standing)
        if how == "stop":
            assert standing.ask(b'{"do": "stop"}\n') == [{"stopped": True, "runs": 1}]
            assert state(pid) == ""
            assert not standing.directory.exists()
        else:
            os.kill(standing.pid, signal.Signals[how])
        assert process.wait(LIMIT_S) == 0
    wait_gone(standing.pid, pid, limit_s=5.0)
    assert not standing.directory.exists()
    assert STOPPED in (tmp_path / "agent-0.log").read_text()


def test_while_it_stops_it_takes_no_run_and_what_does_not_end_is_killed(
    standing: Standing, tmp_path: Path
) -> None:
    with standing.run(tmp_path):
        os.kill(agent_pid(standing), signal.SIGSTOP)
        begin = time.monotonic()
        with standing.connect() as waiting:
            waiting.sendall(b'{"do": "stop"}\n')
            wait_until(lambda: standing.status()["state"] == "stopping")
            assert standing.ask(b'{"do": "run"}\n') == [{"error": "the cluster is being stopped"}]
            assert json.loads(waiting.makefile().read()) == {"stopped": True, "runs": 1}
        took_s = time.monotonic() - begin
        assert RUNS_PATIENCE["STOP_LIMIT_S"] <= took_s < RUNS_PATIENCE["STOP_LIMIT_S"] + 3.0


def test_it_ends_after_its_limit_without_a_run(tmp_path: Path) -> None:
    """The limit counts from the end of the last run."""
    with Standing(tmp_path, idle=1.5) as standing:
        with standing.run(tmp_path):
            time.sleep(1.7)
            assert state(standing.pid) in ("S", "R")
            begin = time.monotonic()
        wait_gone(standing.pid, limit_s=5.0)
        assert time.monotonic() - begin > 1.5
        assert not standing.directory.exists()


def test_it_ends_where_nobody_can_come_any_more(standing: Standing, tmp_path: Path) -> None:
    """Somebody has cleaned up /tmp; a run that is going on is not disturbed."""
    with standing.run(tmp_path) as process:
        os.unlink(standing.path)
        time.sleep(0.6)
        assert process.poll() is None
        assert "gone" not in standing.log
    wait_gone(standing.pid, limit_s=5.0)


# --------------------------------------------------------------------------------- strange visitors


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"hello\n", "JSONDecodeError"),
        (b"[1]\n", "a request that is no JSON object"),
        (b'{"do": "dance"}\n', "expected to do run, status or stop, found 'dance'"),
        (b"{}\n", "found None"),
        (b"[" * 60_000 + b"\n", "RecursionError"),
        (b"\xff\xfe\n", "UnicodeDecodeError"),
        (b"x" * 70_000, "a request of more than 65536 bytes"),
    ],
    ids=["words", "list", "other", "empty", "deep", "bytes", "long"],
)
def test_a_malformed_request_is_refused_at_once(standing: Standing, data: bytes, word: str) -> None:
    with standing.connect() as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)
        wait_until(lambda: "dropped a connection" in standing.log, 3.0)
        assert word in standing.log
    assert standing.status()["runs"] == []


def test_a_visitor_that_leaves_is_forgotten(standing: Standing) -> None:
    standing.connect().close()
    wait_until(lambda: "it left before its request was whole" in standing.log)


def test_a_request_in_parts_is_put_together(standing: Standing) -> None:
    with standing.connect() as connection:
        for part in (b'{"do": ', b'"status"}', b"\n"):
            connection.sendall(part)
            time.sleep(0.05)
        assert json.loads(connection.makefile().read())["cluster"] == "tests"


def test_silent_visitors_are_dropped_and_keep_nobody_out(standing: Standing) -> None:
    begin = time.monotonic()
    silent = [standing.connect() for _ in range(SILENT_MAX + 4)]
    assert standing.status()["state"] == "up"
    assert silent[0].recv(100) == b'{"error": "16 connections say nothing"}\n'
    assert b"silent for 1 s" in silent[-1].recv(100)
    limit_s = KEEPER_PATIENCE["SILENT_LIMIT_S"]
    assert limit_s <= time.monotonic() - begin < limit_s + 2.0
    n_open = len(os.listdir(f"/proc/{standing.pid}/fd"))
    assert n_open < 10
    for one in silent:
        one.close()


def test_many_descriptors_are_no_way_to_exhaust_it(standing: Standing) -> None:
    before = len(os.listdir(f"/proc/{standing.pid}/fd"))
    for _ in range(20):
        with standing.connect() as connection:
            socket.send_fds(connection, [b'{"do": "run"}\n'], [0] * 100)
            assert "expected 2 descriptors" in connection.makefile().read()
    wait_until(lambda: len(os.listdir(f"/proc/{standing.pid}/fd")) <= before, 2.0)


def test_another_user_is_turned_away(standing: Standing) -> None:
    """As the kernel says who it is; the directory keeps others out already."""
    if os.getuid() != 0:
        pytest.skip("needs root, to be somebody else")
    for directory in (standing.directory, standing.directory.parent):
        os.chmod(directory, 0o755)
    os.chmod(standing.path, 0o777)
    pid = os.fork()
    if pid == 0:
        try:
            os.setresuid(65534, 65534, 65534)
            standing.ask(b'{"do": "stop"}\n')
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    wait_until(lambda: "turned away a process of user 65534" in standing.log)
    assert standing.status()["state"] == "up"
