"""The runs on a keeper: an agent each, started for who calls, told to end, killed, reaped.

Rules of this file: it signals only processes that it started; what a request may cost is bounded;
only what an agent makes is ever cleared after it. Names of runs are others' words.

Theory of operation. The agent gets the connection as its standard input and the caller's two
descriptors as its outputs (dbctl/agent.py), as if ssh had started it. So the end of the connection
is the end of that input, from either side: its controller is gone, or `end` has shut the receiving
half here. What the caller reads on the connection are words about the agent: `agent` (accepted),
`said` (for the run's log), `ended` (the exit status), `error`.
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from dbctl.process import TEMPLATE, clear_runtime, one_line, signals_held
from dbctl.proctree import Process, children_of
from dbctl.visitors import N_DESCRIPTORS, Visitor, note, tell

STOP_LIMIT_S = 5.0  # an agent needs two seconds for its nodes; then it is killed
RUNS_MAX = 64
STOPPED = "the cluster is being stopped: this run ends with it"  # in the log of the run's agent
RUNTIME = r"/tmp/dbctl-[0-9a-f]{16}-[0-9]+"  # dbctl/launch/ssh_words.py names it

_now = time.monotonic


@dataclass(kw_only=True)
class Run:
    """One run's agent. `told` is what its controller says of the run, for the table."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    agent: str
    told: dict[str, str]
    runtime: str
    since: float
    kill_at: float = inf
    killed: bool = False

    def end(self) -> None:
        """As if its controller were gone; SIGKILL follows where that is not enough."""
        if self.kill_at == inf:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RD)
            self.kill_at = _now() + STOP_LIMIT_S

    def row(self, now: float, children: Sequence[Process]) -> dict[str, Any]:
        """For the table; `children` are the agent's."""
        nodes = [
            {"node": node_name(one.words), "pid": one.pid, "rss_bytes": one.rss_bytes,
             "seconds": round(one.age_s, 1)}
            for one in children
            if node_name(one.words) != TEMPLATE
        ]  # fmt: skip
        return {
            **self.told,
            "agent": self.agent,
            "pid": self.process.pid,
            "seconds": round(now - self.since, 1),
            "nodes": sorted(nodes, key=lambda row: str(row["node"])),
        }


def node_name(words: list[str]) -> str:
    """`python -P -m dbctl node NAME`: the name; else the program."""
    if "node" in words[:-1]:
        return words[words.index("node") + 1]
    return words[0] if words else ""


class Runs:
    """All of one keeper; its length is how many there are."""

    def __init__(self) -> None:
        self._runs: list[Run] = []

    def __len__(self) -> int:
        return len(self._runs)

    def start(self, visitor: Visitor, request: dict[str, Any]) -> str:
        """Why no run was started, the visitor being as before; or "", its connection is the run's.

        `request`: the options of the run's agent, which it is told again by the caller.
        """
        if fault := self._fault(visitor, request):
            return fault
        table = request.get("table")
        told = {str(k): str(v) for k, v in table.items()} if isinstance(table, dict) else {}
        output, errors = visitor.descriptors
        try:
            # Until the agent has said what it does with them: its death would be told as a failure.
            with signals_held():
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "dbctl", "agent", "--stdin"],
                    stdin=visitor.connection.fileno(),
                    stdout=output,
                    stderr=errors,
                    start_new_session=True,
                )
        except OSError as error:
            return f"cannot start an agent: {one_line(error)}"
        visitor.close_descriptors()
        run = Run(
            process=process,
            connection=visitor.connection,
            agent=str(request.get("name", "")),
            told={"run": str(request.get("run", "")), **told},
            runtime=str(request["runtime"]),
            since=_now(),
        )
        self._runs.append(run)
        note(f"run {run.told['run']}: agent {run.agent}, pid {process.pid}")
        tell(run.connection, agent=process.pid)
        return ""

    def _fault(self, visitor: Visitor, request: dict[str, Any]) -> str:
        if len(self._runs) >= RUNS_MAX:
            return f"{RUNS_MAX} runs are going on here, the most that there may be"
        if len(visitor.descriptors) != N_DESCRIPTORS:
            n = len(visitor.descriptors)
            return f"expected {N_DESCRIPTORS} descriptors with the request, found {n}"
        if not re.fullmatch(RUNTIME, str(request.get("runtime"))):
            return "expected `runtime` /tmp/dbctl-, 16 hexadecimal digits, - and a number"
        return ""

    def rows(self, now: float) -> list[dict[str, Any]]:
        """For the table: each run, with its nodes."""
        children = children_of([run.process.pid for run in self._runs])
        return [run.row(now, children[run.process.pid]) for run in self._runs]

    def end(self) -> None:
        """Of all: soon `reap` finds them ended."""
        for run in self._runs:
            run.end()

    def due(self) -> float:
        """When `reap` has to be called whatever happens."""
        return min((run.kill_at for run in self._runs), default=inf)

    def reap(self, now: float) -> bool:
        """Forgets those that have ended, and kills those that are late; whether one has ended."""
        ended = False
        for run in list(self._runs):
            status = run.process.poll()
            if status is None and run.kill_at <= now:
                if run.killed:
                    self._give_up(run)
                run.process.kill()
                run.killed, run.kill_at = True, now + STOP_LIMIT_S
            if status is None:
                continue
            self._runs.remove(run)
            ended = True
            note(f"run {run.told['run']}: agent {run.agent} ended, status {status}")
            if status:
                clear_runtime(run.runtime)  # a killed one could not
            if run.kill_at != inf:
                tell(run.connection, said=STOPPED)  # the last word: an agent may have many
            tell(run.connection, ended=status)
            run.connection.close()
        return ended

    def _give_up(self, run: Run) -> None:
        """Even SIGKILL waits for what an agent waits for in the kernel: a file server, say."""
        self._runs.remove(run)
        why = f"agent {run.agent}, pid {run.process.pid}, does not die: it is left alone"
        note(f"run {run.told['run']}: {why}")
        tell(run.connection, said=STOPPED)
        tell(run.connection, error=why)
        run.connection.close()
