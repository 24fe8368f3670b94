"""The keeper and its caller on this machine: real processes and connections, no ssh.

Over ssh, and with whole runs: cluster/test_standing.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dbctl import __version__, keeper, keeper_start
from dbctl.caller import ANSWER, GONE, NO_KEEPER, Call
from dbctl.envelope import PROTOCOL_VERSION
from dbctl.keeper import RUNS_MAX, SILENT_MAX, node_name
from dbctl.keeper_start import LOG, PREFIX, SOCKET, STOPPED
from dbctl.proctree import children_of
from dbctl.visitors import N_DESCRIPTORS, Answers, Visitor
from tests.cluster.harness import state, wait_gone, wait_until

ROOT = Path(__file__).parent.parent
LIMIT_S = 20.0


def dbctl(*words: str, **more: Any) -> subprocess.Popen[bytes]:
    return start("-P", "-m", "dbctl", *words, **more)


def start(*words: str, **more: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATIENCE": json.dumps(PATIENCE)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        **more,
    )


def line_of(process: subprocess.Popen[bytes], word: str) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word.encode()):
            found = json.loads(line.removeprefix(word.encode()))
            assert isinstance(found, dict)
            return found
    raise AssertionError(f"no {word}, exit status {process.wait(LIMIT_S)}")


def say(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()


def let_go(process: subprocess.Popen[bytes]) -> int:
    """Its standard input ends; its exit status."""
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    return process.wait(LIMIT_S)


# What the keeper's waits are here, so that nobody waits for them: its own are seconds.
PATIENCE = {"SILENT_LIMIT_S": 1.0, "STOP_LIMIT_S": 1.5, "LOOK_S": 0.3}
IMPATIENT = """import json, os, sys
from dbctl import keeper, keeper_start
keeper_start.PARENT = os.environ["XDG_RUNTIME_DIR"]
vars(keeper).update(json.loads(os.environ["PATIENCE"]))
sys.exit(keeper.main(["--stdin"]))
"""


class Standing:
    """A keeper as ssh would start it; a context manager that leaves nothing of it."""

    def __init__(self, tmp_path: Path, *, stays: bool = True, **options: Any) -> None:
        self.workdir = tmp_path / "work"
        self.process = start("-P", "-c", IMPATIENT, stderr=subprocess.PIPE)
        values = {"cluster": "tests", "workdir": str(self.workdir), "env": {"OF_HOST": "yes"}}
        say(self.process, json.dumps(values | options).encode() + b"\n")
        self.ready = line_of(self.process, "READY ")
        self.path = self.ready["endpoint"]
        self.directory = Path(self.path).parent
        self.pid = 0
        if stays:
            say(self.process, b"stay\n")
            self.pid = line_of(self.process, "STAYS ")["pid"]

    def __enter__(self) -> Standing:
        return self

    def __exit__(self, *error: object) -> None:
        if self.pid and state(self.pid) not in ("", "Z"):
            os.kill(self.pid, signal.SIGKILL)
            wait_gone(self.pid, limit_s=5.0)
        let_go(self.process)
        keeper_start.remove(str(self.directory))

    @property
    def log(self) -> str:
        return (self.directory / LOG).read_text()

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(self.path)  # without a limit: with one it does not wait for its turn
        connection.settimeout(LIMIT_S)
        return connection

    def ask(self, data: bytes) -> list[dict[str, Any]]:
        """What it answers to the end."""
        with self.connect() as connection:
            connection.sendall(data)
            return [json.loads(line) for line in connection.makefile()]

    def status(self) -> dict[str, Any]:
        [found] = self.ask(b'{"do": "status"}\n')
        return found

    @contextlib.contextmanager
    def run(self, tmp_path: Path, name: str = "agent-0") -> Iterator[subprocess.Popen[bytes]]:
        """A run's agent through the caller; READY was said."""
        runtime = f"/tmp/dbctl-{secrets.token_hex(8)}-0"
        orders = {
            "do": "run", "runtime": runtime, "run": "abc", "name": name, "lease": 10.0,
            "workdir": str(self.workdir), "env": {},
            "table": {"name": "digits", "run_dir": "/somewhere", "user": "me"},
        }  # fmt: skip
        with open(tmp_path / f"{name}.log", "wb") as log:
            process = dbctl("caller", self.path, stderr=log)
        try:
            say(process, json.dumps(orders).encode() + b"\n")
            ready = line_of(process, "READY ")
            assert ready["endpoint"] == f"ipc://{runtime}/{name}.sock"
            yield process
        finally:
            let_go(process)
        wait_until(lambda: not Path(runtime).exists())


@pytest.fixture
def standing(tmp_path: Path) -> Iterator[Standing]:
    with Standing(tmp_path) as one:
        yield one


def agent_pid(standing: Standing) -> int:
    [run] = standing.status()["runs"]
    return int(run["pid"])


# ------------------------------------------------------------------------------------- beginning


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
    monkeypatch.setitem(PATIENCE, "STAY_LIMIT_S", 0.5)
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
        "print([m for m in ('numpy', 'zmq', 'click', 'pydantic', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout == b"[]\n"


def test_what_a_killed_one_left_goes_at_the_next_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert keeper_start.PARENT == "/tmp"
    monkeypatch.setattr(keeper_start, "PARENT", str(tmp_path))
    for name, listens in ((f"{PREFIX}dead", False), (f"{PREFIX}live", True)):
        (tmp_path / name).mkdir()
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(tmp_path / name / SOCKET))
            if listens:
                one.listen(1)
                keeper_start.sweep()
        (tmp_path / name / LOG).touch()
    (tmp_path / f"{PREFIX}young").mkdir()  # it does not listen yet
    (tmp_path / f"{PREFIX}dead-before").mkdir()  # and this one never will
    (tmp_path / f"{PREFIX}dead-before" / "new.sock").touch()
    long_ago_s = time.time() - 61.0
    os.utime(tmp_path / f"{PREFIX}dead-before", (long_ago_s, long_ago_s))
    (tmp_path / "other").mkdir()
    assert (tmp_path / f"{PREFIX}live").exists()
    assert sorted(path.name for path in tmp_path.iterdir() if "dead" not in path.name) == [
        f"{PREFIX}live", f"{PREFIX}young", "other",
    ]  # fmt: skip
    keeper_start.sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{PREFIX}young", "other"]


# ------------------------------------------------------------------------------------------ runs


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


# ----------------------------------------------------------------------------------------- its end


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
        assert PATIENCE["STOP_LIMIT_S"] <= took_s < PATIENCE["STOP_LIMIT_S"] + 3.0


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


# ------------------------------------------------------------------------------- strange visitors


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
    assert PATIENCE["SILENT_LIMIT_S"] <= time.monotonic() - begin < PATIENCE["SILENT_LIMIT_S"] + 2.0
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


def test_descriptors_that_come_one_after_the_other_are_bounded_too() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    left, right = socket.socketpair()
    with left, right:
        visitor = Visitor(left, 0.0)
        for _ in range(N_DESCRIPTORS):
            socket.send_fds(right, [b"x"], [0])
            assert visitor.read() is None
        socket.send_fds(right, [b"x"], [0])
        with pytest.raises(ValueError, match="expected 2 descriptors with the request, found 3"):
            visitor.read()
        assert visitor.descriptors == []
    assert sorted(os.listdir("/proc/self/fd")) == before


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


def test_no_more_runs_than_its_bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = a_keeper(tmp_path, monkeypatch)
    one._runs = [object()] * RUNS_MAX  # type: ignore[list-item]
    left, right = socket.socketpair()
    with left, right:
        fault = one._fault(Visitor(left, 0.0, descriptors=[1, 2]), {})
    assert fault == "64 runs are going on here, the most that there may be"
    one._selector.close()
    one._listener.close()


def a_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> keeper.Keeper:
    """One in this process, whose loop nobody turns."""
    monkeypatch.setattr(keeper_start, "PARENT", str(tmp_path))
    listener, directory = keeper_start.listen()
    return keeper.Keeper(listener, directory, cluster="a", idle_s=1.0)


def test_who_does_not_read_an_answer_holds_nobody_up() -> None:
    """It takes what a connection holds; the rest goes as it is read, or not at all."""
    with selectors.DefaultSelector() as selector:
        answers = Answers(selector, 2)
        pairs = [socket.socketpair() for _ in range(3)]
        answer = {"runs": "x" * 2_000_000}
        begin = time.monotonic()
        for number, (there, _) in enumerate(pairs):
            answers.give(Visitor(there, 0.0), answer, until=10.0 + number)
        assert time.monotonic() - begin < 1.0
        assert [there.fileno() < 0 for there, _ in pairs] == [True, False, False], "at most two"
        assert answers.due() == 11.0
        read, here = bytearray(), pairs[2][1]
        here.settimeout(LIMIT_S)
        while not read.endswith(b"\n"):
            read += here.recv(1 << 20)
            for key, _ in selector.select(0.0):
                key.data()
        assert json.loads(read) == answer
        assert pairs[2][0].fileno() < 0, "it has all"
        answers.drop(10.9)
        assert pairs[1][0].fileno() >= 0
        answers.drop(11.0)
        assert pairs[1][0].fileno() < 0
        assert not selector.get_map()
        for _, here in pairs:
            here.close()


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
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = a_keeper(tmp_path, monkeypatch)
    left, right = socket.socketpair()
    agent = Deathless()
    with left, right:
        run = keeper.Run(
            process=agent,  # type: ignore[arg-type]
            connection=left,
            agent="agent-\x1b0",
            told={"run": "r"},
            runtime="/tmp/none",
            since=0.0,
        )
        one._runs = [run]
        run.end()
        for n_kills in (1, 2):
            one._reap(run.kill_at)
            assert agent.n_kills == n_kills
        assert one._runs == []
        said = [json.loads(line) for line in right.makefile()]
    why = "agent agent-\x1b0, pid 77, does not die: it is left alone"
    assert said == [{"said": STOPPED}, {"error": why}]
    assert "run r: agent agent-\\x1b0, pid 77, does not die" in capsys.readouterr().err
    one._selector.close()
    one._listener.close()


# ------------------------------------------------------------------------------------- the caller


def call(path: str, data: bytes) -> tuple[int, str, str]:
    process = dbctl("caller", path, stderr=subprocess.PIPE)
    out, err = process.communicate(data, LIMIT_S)
    return process.returncode, out.decode(), err.decode()


def test_the_caller_prints_an_answer(standing: Standing) -> None:
    status, out, _ = call(standing.path, b'{"do": "status"}\n')
    assert status == 0
    [line] = [line for line in out.splitlines() if line.startswith(ANSWER)]
    assert json.loads(line.removeprefix(ANSWER))["cluster"] == "tests"
    status, out, _ = call(standing.path, b'{"do": "stop"}\n')
    assert f'{ANSWER}{{"stopped": true, "runs": 0}}' in out
    wait_gone(standing.pid, limit_s=5.0)


def test_an_answer_that_comes_at_once_is_heard(
    standing: Standing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper has closed already when the caller goes on from its request."""
    send = socket.send_fds

    def send_slowly(*words: Any) -> int:
        n_sent = send(*words)
        time.sleep(0.2)
        return n_sent

    monkeypatch.setattr(socket, "send_fds", send_slowly)
    with standing.connect() as connection:
        assert Call(connection, b'{"do": "status"}\n').hold() == 0


def test_the_caller_says_that_nobody_is_there(tmp_path: Path) -> None:
    status, _, err = call(str(tmp_path / "none.sock"), b'{"do": "status"}\n')
    assert status == GONE
    assert f"{NO_KEEPER}: FileNotFoundError" in err


def test_only_where_it_knows_the_caller_says_that_nobody_is_there(tmp_path: Path) -> None:
    path = str(tmp_path / "none.sock")
    here = os.uname().nodename
    for node, status, word in ((here, GONE, NO_KEEPER), ("b", 1, f"is on b, and this is {here}")):
        process = dbctl("caller", path, node, stderr=subprocess.PIPE)
        _, err = process.communicate(b'{"do": "status"}\n', LIMIT_S)
        assert (process.returncode, word in err.decode()) == (status, True), err
    (tmp_path / "file").touch()
    status, _, told = call(str(tmp_path / "file" / "none.sock"), b'{"do": "status"}\n')
    assert status == 1
    assert "cannot be reached: NotADirectoryError" in told
    assert NO_KEEPER not in told


def test_the_caller_says_what_was_refused(standing: Standing) -> None:
    status, out, err = call(standing.path, b'{"do": "dance"}\n')
    assert (status, out) == (1, "")
    assert "refused: expected to do run, status or stop, found 'dance'" in err


def test_the_caller_needs_a_request(standing: Standing) -> None:
    status, _, err = call(standing.path, b"")
    assert status == 1
    assert "no request of at most" in err


def test_what_is_said_later_reaches_the_agent_whole(standing: Standing, tmp_path: Path) -> None:
    """Its standard input stays one: an agent that reads on gets every byte, in order."""
    with standing.run(tmp_path) as process:
        say(process, b"x" * 300_000)
        assert process.poll() is None
        assert agent_pid(standing)
        assert let_go(process) == 0


# --------------------------------------------------------------------------------- the process tree


def test_living_children_with_their_words_and_sizes() -> None:
    with subprocess.Popen(["sleep", "30"]) as child:
        wait_until(lambda: _words(child.pid) == ["sleep", "30"])
        [found] = [one for one in children_of([os.getpid()])[os.getpid()] if one.pid == child.pid]
        assert found.rss_bytes > 4096
        assert 0.0 <= found.age_s < 20.0
        child.kill()
        wait_until(lambda: state(child.pid) == "Z")
        assert child.pid not in [one.pid for one in children_of([os.getpid()])[os.getpid()]]
    assert children_of([2**30]) == {2**30: []}


def _words(pid: int) -> list[str]:
    return next((o.words for o in children_of([os.getpid()])[os.getpid()] if o.pid == pid), [])


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
