"""The launcher of this machine, and what every launcher shares: READY, commands, directories."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import dbctl
from dbctl.envelope import PROTOCOL_VERSION
from dbctl.errors import LaunchError
from dbctl.launch import local
from dbctl.launch.base import (
    NotReady,
    make_runtime,
    python_command,
    python_environment,
    read_ready,
    start_order,
    thread_variables,
)
from dbctl.launch.local import LocalLauncher
from dbctl.plan import NodeSpec
from dbctl.process import clear_runtime
from tests.cluster.harness import state, wait_until

VERSIONS = f'"version": "{dbctl.__version__}", "protocol": {PROTOCOL_VERSION}'


@pytest.fixture
def launcher(tmp_path: Path) -> Any:
    runtime = make_runtime()
    (tmp_path / "logs").mkdir()
    this = LocalLauncher(runtime=runtime, run="r", logs=tmp_path / "logs", lease_s=5.0)
    yield this
    this.stop(5.0)
    clear_runtime(runtime)


# ---------------------------------------------------------------- the local launcher


@pytest.mark.alone
def test_one_agent_comes_up_and_goes(launcher: LocalLauncher) -> None:
    [agent] = launcher.start()
    assert (agent.name, agent.host) == ("agent-0", "localhost")
    path = Path(agent.endpoint.removeprefix("ipc://"))
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert os.getsid(agent.pid) == agent.pid, "a Ctrl-C of the terminal does not reach it"
    assert launcher.poll() is None
    assert launcher.failure() is None
    begin = time.monotonic()
    launcher.stop(5.0)
    assert time.monotonic() - begin < 1.0
    assert launcher.poll() == 0
    assert not path.parent.exists()
    launcher.stop(5.0)  # twice is fine


def test_stop_before_start_is_fine(launcher: LocalLauncher) -> None:
    launcher.stop(1.0)


def test_two_runs_at_once_share_nothing(launcher: LocalLauncher, tmp_path: Path) -> None:
    """pytorch/pytorch#73320: no fixed port or name anywhere."""
    runtime = make_runtime()
    other = LocalLauncher(runtime=runtime, run="r", logs=tmp_path)
    launcher.start_async()
    other.start_async()
    try:
        [first], [second] = launcher.wait_ready(), other.wait_ready()
        assert first.endpoint != second.endpoint
        assert first.pid != second.pid
    finally:
        other.stop(5.0)
    assert launcher.poll() is None


@pytest.mark.alone
def test_start_async_does_not_wait(launcher: LocalLauncher) -> None:
    begin = time.monotonic()
    launcher.start_async()
    assert time.monotonic() - begin < 0.1
    launcher.wait_ready()


def test_an_agent_that_ends_early_is_told_with_its_last_words(tmp_path: Path) -> None:
    """tensorflow#46169. Here: its directory for sockets is not there."""
    gone = str(tmp_path / "gone")
    launcher = LocalLauncher(runtime=gone, run="r", logs=tmp_path)
    begin = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        launcher.start()
    assert time.monotonic() - begin < 5.0
    error = caught.value
    assert (error.node, error.host, error.exit_code) == ("agent-0", "localhost", 3)
    assert "ended before it was ready" in error.what
    assert "exit status 1" in error.what
    assert "No such file or directory" in error.log_tail
    assert error.log_path == str(tmp_path / "agent-0.log")


def test_only_this_starts_words_are_shown(tmp_path: Path) -> None:
    (tmp_path / "agent-0.log").write_text("an old story\n")
    with pytest.raises(LaunchError) as caught:
        LocalLauncher(runtime=str(tmp_path / "gone"), run="r", logs=tmp_path).start()
    assert caught.value.log_tail
    assert "an old story" not in caught.value.log_tail


def test_a_python_that_is_not_there(
    launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_command", ("/no/python", "-m", "dbctl", "agent"))
    with pytest.raises(LaunchError, match="/no/python"):
        launcher.start()


def test_an_unwritable_log_directory_is_one_error(tmp_path: Path) -> None:
    """In the system's words, not in Python's."""
    with pytest.raises(LaunchError) as caught:
        LocalLauncher(runtime=str(tmp_path), run="r", logs=tmp_path / "none").start()
    log = tmp_path / "none" / "agent-0.log"
    assert caught.value.what == f"could not be started: no such file or directory ({log})"


@pytest.mark.parametrize("ignores", ["", "trap '' TERM HUP INT; "])
def test_an_agent_that_never_speaks_is_ended_in_bounded_time(
    launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch, ignores: str
) -> None:
    script = f"{ignores}echo booting; while :; do sleep 0.05; done"
    monkeypatch.setattr(launcher, "_command", ("/bin/sh", "-c", script))
    monkeypatch.setattr(local, "READY_LIMIT_S", 0.3)
    begin = time.monotonic()
    with pytest.raises(LaunchError, match=r"READY in time; it said: booting \(killed by SIGKILL"):
        launcher.start()
    assert time.monotonic() - begin < 4.0
    assert launcher.poll() == -signal.SIGKILL


def test_a_stopped_agent_is_ended_too(launcher: LocalLauncher) -> None:
    [agent] = launcher.start()
    os.kill(agent.pid, signal.SIGSTOP)
    wait_until(lambda: state(agent.pid) == "T", 5.0)
    launcher.stop(3.0)
    assert launcher.poll() == 0, "it was woken, and ended by itself"


# ---------------------------------------------------------------- READY


def said(script: str, limit_s: float = 5.0) -> dict[str, object]:
    process = subprocess.Popen(
        ["/bin/sh", "-c", script], stdout=subprocess.PIPE, stdin=subprocess.PIPE, bufsize=0
    )
    try:
        return read_ready(process, time.monotonic() + limit_s)
    finally:
        process.kill()
        process.communicate()


def test_what_a_login_shell_prints_before_ready_is_skipped() -> None:
    script = f"""printf 'Welcome!\\n\\033[2J'; echo
        printf 'READY {{"endpoint": "ipc:'; sleep 0.05; echo '//x", {VERSIONS}}}'; read x"""
    assert said(script)["endpoint"] == "ipc://x"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo password:; read x", r"did not say READY in time; it said: password:"),
        ("exit 0", r"ended before it was ready$"),
        ("printf '\\033[31mno'", r"ended before it was ready; it said: \\x1b\[31mno"),
        ("echo READY maybe", r"a READY line that is none; it said: maybe"),
        ("echo READY '[]'", r"a READY line that is none"),
        ("echo READY '{\"endpoint\": 7}'", r"a READY line that is none"),
        ("yes no | head -c 300000; read x", r"none of them READY"),
    ],
)
def test_what_is_not_ready_is_said_in_bounded_time(script: str, words: str) -> None:
    begin = time.monotonic()
    with pytest.raises(NotReady, match=words):
        said(script, limit_s=0.5)
    assert time.monotonic() - begin < 2.0


def test_another_version_is_named() -> None:
    """G17: a mismatch stops the run before training."""
    line = '{"endpoint": "ipc:///x", "version": "0.0.1", "protocol": 99}'
    with pytest.raises(NotReady, match=r"is dbctl 0\.0\.1 with protocol 99, expected"):
        said(f"echo READY '{line}'")


# ---------------------------------------------------------------- commands


def test_a_command_is_this_python_and_this_dbctl(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('imported from the user')")
    done = subprocess.run(
        python_command("node"),
        cwd=tmp_path,
        env={**os.environ, **python_environment()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert "expected one argument, the node's name" in done.stderr
    assert python_command("agent", "--run", "a b")[-3:] == ("agent", "--run", "a b")
    assert python_command("agent")[0] == sys.executable


def test_the_users_path_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"/a{os.pathsep}{os.pathsep}/b")
    root = str(Path(dbctl.__file__).parent.parent)
    assert python_environment()["PYTHONPATH"].split(os.pathsep) == [root, "/a", "/b"]


def test_a_start_order_holds_all_a_node_is_told() -> None:
    import msgspec

    spec = NodeSpec(
        run="r", node="worker-1.0", role="worker", incarnation=3, runtime="/x", lease_s=10.0,
        agent="ipc:///x/agent-0.sock", threads=2, experiment='{"name": "é"}', shards=(),
    )  # fmt: skip
    order = start_order(spec, nice=5, env=(("OMP_NUM_THREADS", "7"), ("A", "b")))
    assert (order.node, order.incarnation, order.nice) == ("worker-1.0", 3, 5)
    assert order.argv[-2:] == ("node", "worker-1.0")
    assert msgspec.json.decode(order.spec, type=NodeSpec) == spec
    assert "\n" not in order.spec, "one line"
    env = dict(order.env)
    assert env["OPENBLAS_NUM_THREADS"] == "2"
    assert env["OMP_NUM_THREADS"] == "7", "what the user set wins"
    assert dict(thread_variables(3))["MKL_NUM_THREADS"] == "3"


# ---------------------------------------------------------------- the private directory


def test_the_private_directory_is_private_and_short(tmp_path: Path) -> None:
    runtime = make_runtime()
    try:
        assert stat.S_IMODE(os.stat(runtime).st_mode) == 0o700
        assert len(f"{runtime}/worker-9999.9999.9999.sock".encode()) < 107
        assert Path(runtime).parent == Path(os.environ["XDG_RUNTIME_DIR"])
    finally:
        os.rmdir(runtime)


def test_a_long_or_missing_directory_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("é" * 60)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    monkeypatch.setattr("tempfile.tempdir", str(long))
    runtime = make_runtime()
    try:
        assert Path(runtime).parent == Path("/tmp")
    finally:
        os.rmdir(runtime)


def test_a_relative_directory_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", ".")
    runtime = make_runtime()
    try:
        assert os.path.isabs(runtime)
    finally:
        os.rmdir(runtime)
