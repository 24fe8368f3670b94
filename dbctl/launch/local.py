"""The launcher of a run on this machine: one agent, a child of the controller.

Theory of operation. The agent runs in a session of its own, so that a Ctrl-C in the terminal goes
to the controller only, and holds the reading end of a pipe as its standard input: when the
controller is gone, however it went, the agent sees the end and takes its nodes with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from dbctl.errors import LaunchError, reason
from dbctl.launch.base import (
    AgentHandle,
    NotReady,
    ending,
    python_command,
    python_environment,
    read_ready,
)
from dbctl.plan import LOCALHOST
from dbctl.process import signals_held, tail

READY_LIMIT_S = 10.0


class LocalLauncher:
    """One agent on this machine. `runtime`: private directory for sockets; `logs`: for NODE.log."""

    def __init__(
        self,
        *,
        runtime: str,
        run: str,
        logs: str | Path,
        lease_s: float = 10.0,
        name: str = "agent-0",
    ) -> None:
        self.name = name
        self._runtime = runtime
        self.log_path = Path(logs) / f"{name}.log"
        self._log_start = 0
        self._command = python_command(
            "agent", "--runtime", runtime, "--run", run, "--name", name,
            "--logs", str(logs), "--lease", f"{lease_s:g}",
        )  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = 0.0

    def start_async(self) -> None:
        assert self._process is None, "a launcher starts once"
        try:
            # Until the agent has said what it does with them: its death would be told as a failure.
            with open(self.log_path, "ab") as log, signals_held():
                self._log_start = log.tell()
                self._process = subprocess.Popen(
                    self._command,
                    env={**os.environ, **python_environment()},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                    bufsize=0,
                )
        except OSError as error:
            raise self._error(f"could not be started: {reason(error)}") from error
        self._deadline = time.monotonic() + READY_LIMIT_S

    def wait_ready(self) -> list[AgentHandle]:
        process = self._process
        assert process is not None, "start_async comes first"
        try:
            fields = read_ready(process, self._deadline)
        except NotReady as error:
            self.stop(1.0)
            raise self._error(f"{error} ({ending(process.returncode)})") from error
        assert process.stdout is not None
        process.stdout.close()
        endpoint = str(fields["endpoint"])
        return [
            AgentHandle(
                self.name, LOCALHOST, endpoint, process.pid, inside=endpoint, runtime=self._runtime
            )
        ]

    def start(self) -> list[AgentHandle]:
        self.start_async()
        return self.wait_ready()

    def poll(self) -> int | None:
        """The agent's exit status (negative = signal) once it has ended, else None."""
        return None if self._process is None else self._process.poll()

    def failure(self) -> LaunchError | None:
        """What to raise once the agent has ended and nobody had asked it to, else None."""
        status = self.poll()
        return None if status is None else self._error(f"ended early ({ending(status)})")

    def all_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def stop(self, timeout_s: float) -> None:
        process = self._process
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        # The end of its input already tells it; the agent itself needs up to 2 s for its nodes.
        for number in (signal.SIGCONT, signal.SIGKILL):
            if process.poll() is None:
                process.send_signal(number)
            try:
                process.wait(timeout_s)
                return
            except subprocess.TimeoutExpired:
                continue

    def _error(self, what: str) -> LaunchError:
        return LaunchError(
            self.name,
            what,
            host=LOCALHOST,
            log_path=str(self.log_path),
            log_tail=tail(self.log_path, self._log_start),
        )
