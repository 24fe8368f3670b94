"""A keeper of a test, as ssh would start it on this machine, and what is said to it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dbctl import keeper_start
from dbctl.keeper_start import LOG
from tests.cluster.harness import state, wait_gone, wait_until

ROOT = Path(__file__).parent.parent
LIMIT_S = 20.0


def dbctl(*words: str, **more: Any) -> subprocess.Popen[bytes]:
    return start("-P", "-m", "dbctl", *words, **more)


def start(*words: str, **more: Any) -> subprocess.Popen[bytes]:
    patience = json.dumps([KEEPER_PATIENCE, RUNS_PATIENCE])
    return subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATIENCE": patience},
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
KEEPER_PATIENCE = {"SILENT_LIMIT_S": 1.0, "LOOK_S": 0.3}
RUNS_PATIENCE = {"STOP_LIMIT_S": 1.5}
IMPATIENT = """import json, os, sys
from dbctl import keeper, keeper_runs, keeper_start

def put(module, values):
    missing = values.keys() - vars(module).keys()
    assert not missing, f"{module.__name__} has no {missing}"
    vars(module).update(values)

of_keeper, of_runs = json.loads(os.environ["PATIENCE"])
put(keeper_start, {"PARENT": os.environ["XDG_RUNTIME_DIR"]})
put(keeper, of_keeper)
put(keeper_runs, of_runs)
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


def agent_pid(standing: Standing) -> int:
    [run] = standing.status()["runs"]
    return int(run["pid"])
