"""`python -m dbctl keeper --stdin`: the standing agent of one cluster on one host.

Rules of this file: neither numpy nor zmq; it runs no node, holds no link and is in nobody's way.
Each run gets an agent of its own (dbctl/agent.py), as if ssh had started it. Every wait has an end,
everything that others may ask for has a bound, and no signal is ignored.

Theory of operation. Like inetd: it listens on a socket in a directory of its own (0700, made by
`mkdtemp`), and whoever connects as the same user sends one line of JSON and two descriptors
(dbctl/caller.py does, at the far end of an ssh). For `run` it starts an agent with the connection
as standard input and the descriptors as standard output and error. So the end of the connection is
the end of that agent's input: its controller is gone, it takes its nodes with it, and the keeper
stays. The keeper ends an agent by shutting the receiving half of its connection, which is the same.

What the caller reads on the connection are the keeper's words, one JSON object a line: `agent`
(accepted), `said` (for the run's log), `ended` (the agent's exit status), `error`, or the answer.

It becomes permanent in two steps. It says READY while it is still a child of the ssh that started
it, and stays only if it is then told so: of hosts where one fails, none keeps anything.
It ends when asked to, by SIGTERM, after its limit without a run, or where somebody has removed its
socket and no run is left; and its directory with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from types import FrameType
from typing import Any

from dbctl import __version__
from dbctl.keeper_start import (
    SOCKET,
    STOPPED,
    leave_parent,
    listen,
    remove,
    say_ready,
    say_stays,
    sweep,
    told,
)
from dbctl.process import (
    RUN_SIGNALS,
    clear_runtime,
    escape_line,
    log,
    one_line,
    read_line,
    signals_held,
)
from dbctl.proctree import Process, children_of
from dbctl.visitors import N_DESCRIPTORS, Answers, Visitor, peer_uid, tell

STAY = b"stay"
STAY_LIMIT_S = 60.0  # twice what its launcher gives all hosts to get ready
SILENT_LIMIT_S = 5.0  # of a connection that has not said what it wants
ANSWER_LIMIT_S = 2.0  # how long who asked may take to read the answer
STOP_LIMIT_S = 5.0  # an agent needs two seconds for its nodes; then it is killed
SILENT_MAX = 16
LOOK_S = 60.0  # how late it is seen that the socket is gone
RUNS_MAX = 64
# Only what an agent makes is ever cleared after it (dbctl/launch/ssh_words.py names it).
RUNTIME = r"/tmp/dbctl-[0-9a-f]{16}-[0-9]+"

_now = time.monotonic


def _log(text: str) -> None:
    """Names of runs are others' words."""
    log("keeper", escape_line(text))


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


class Keeper:
    """The loop. `listener` listens in `directory`; `serve` returns why it is over."""

    def __init__(
        self, listener: socket.socket, directory: str, *, cluster: str, idle_s: float
    ) -> None:
        self._listener = listener
        self._directory = directory
        self._cluster = cluster
        self._idle_s = idle_s
        self._began = self._idle_since = _now()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._visitors: list[Visitor] = []
        self._runs: list[Run] = []
        self._answers = Answers(self._selector, SILENT_MAX)
        self._waiting: list[Visitor] = []  # for the end, which they asked for
        self._over = ""
        self._n_ended = 0  # runs that ended because it does

    # ------------------------------------------------------------------------------- signals

    def handle_signals(self) -> None:
        """From here on a signal, the death of a child too, wakes `serve`."""
        woken, self._waker = socket.socketpair()
        for end in (woken, self._waker):
            end.setblocking(False)
        self._woken = woken
        self._selector.register(woken, selectors.EVENT_READ, self._wake)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in RUN_SIGNALS:
            signal.signal(number, lambda number, frame: self.stop(signal.Signals(number).name))

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def stop(self, why: str) -> None:
        if not self._over:
            self._over, self._n_ended = why, len(self._runs)

    # ---------------------------------------------------------------------------------- loop

    def serve(self) -> str:
        while True:
            for key, _ in self._selector.select(max(0.0, self._due() - _now())):
                key.data()
            now = _now()
            self._reap(now)
            self._answers.drop(now)
            for visitor in [v for v in self._visitors if v.until <= now]:
                self._drop(visitor, f"silent for {SILENT_LIMIT_S:g} s")
            if not self._runs and now - self._idle_since >= self._idle_s:
                self.stop(f"no run for {self._idle_s:g} s")
            if not self._runs and not os.path.exists(f"{self._directory}/{SOCKET}"):
                self.stop("its socket is gone, and nobody can come any more")
            if self._over:
                for run in self._runs:
                    run.end()
                if not self._runs:
                    return self._over

    def _due(self) -> float:
        idle_at = inf if self._runs else self._idle_since + self._idle_s
        times = [v.until for v in self._visitors] + [run.kill_at for run in self._runs]
        return min([idle_at, _now() + LOOK_S, self._answers.due(), *times])

    def close(self) -> None:
        """Nothing of it is left, and those who asked for the end are told; for the end."""
        remove(self._directory)
        for visitor in self._waiting:
            tell(visitor.connection, stopped=True, runs=self._n_ended)
        for visitor in self._waiting + self._visitors:
            visitor.close()
        self._answers.drop()
        signal.set_wakeup_fd(-1)
        self._selector.close()
        for one in (self._listener, self._woken, self._waker):
            one.close()

    # ------------------------------------------------------------------------------ visitors

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            _log(f"cannot accept: {one_line(error)}")
            time.sleep(0.05)  # out of descriptors: it would be ready again at once
            return
        if (uid := peer_uid(connection)) != os.getuid():
            _log(f"turned away a process of user {uid}")
            connection.close()
            return
        if len(self._visitors) >= SILENT_MAX:
            self._drop(self._visitors[0], f"{SILENT_MAX} connections say nothing")
        visitor = Visitor(connection, _now() + SILENT_LIMIT_S)
        self._visitors.append(visitor)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(visitor))

    def _drop(self, visitor: Visitor, why: str) -> None:
        _log(f"dropped a connection: {why}")
        self._forget(visitor)
        tell(visitor.connection, error=why)
        visitor.close()

    def _forget(self, visitor: Visitor) -> None:
        self._visitors.remove(visitor)
        self._selector.unregister(visitor.connection)

    def _hear(self, visitor: Visitor) -> None:
        if visitor not in self._visitors:  # dropped in this very turn
            return
        try:
            request = visitor.read()
        except (OSError, ValueError, RecursionError) as error:
            self._drop(visitor, one_line(error))
            return
        if request is None:
            return
        match request.get("do"):
            case "run":
                self._run(visitor, request)
            case "status":
                self._forget(visitor)
                self._answers.give(visitor, self.status(), until=_now() + ANSWER_LIMIT_S)
            case "stop":
                self._forget(visitor)
                self._waiting.append(visitor)
                self.stop("asked to")
            case other:
                self._drop(visitor, f"expected to do run, status or stop, found {other!r}"[:200])

    def status(self) -> dict[str, Any]:
        now, children = _now(), children_of([run.process.pid for run in self._runs])
        return {
            "cluster": self._cluster,
            "pid": os.getpid(),
            "version": __version__,
            "seconds": round(now - self._began, 1),
            "state": "stopping" if self._over else "up",
            "runs": [run.row(now, children[run.process.pid]) for run in self._runs],
        }

    # ---------------------------------------------------------------------------------- runs

    def _run(self, visitor: Visitor, request: dict[str, Any]) -> None:
        fault = self._fault(visitor, request)
        if fault:
            self._drop(visitor, fault)
            return
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
            self._drop(visitor, f"cannot start an agent: {one_line(error)}")
            return
        self._forget(visitor)
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
        _log(f"run {run.told['run']}: agent {run.agent}, pid {process.pid}")
        tell(run.connection, agent=process.pid)

    def _fault(self, visitor: Visitor, request: dict[str, Any]) -> str:
        """Why no run can be started for it, or ""."""
        if self._over:
            return "the cluster is being stopped"
        if len(self._runs) >= RUNS_MAX:
            return f"{RUNS_MAX} runs are going on here, the most that there may be"
        if len(visitor.descriptors) != N_DESCRIPTORS:
            n = len(visitor.descriptors)
            return f"expected {N_DESCRIPTORS} descriptors with the request, found {n}"
        if not re.fullmatch(RUNTIME, str(request.get("runtime"))):
            return "expected `runtime` /tmp/dbctl-, 16 hexadecimal digits, - and a number"
        return ""

    def _reap(self, now: float) -> None:
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
            self._idle_since = now
            _log(f"run {run.told['run']}: agent {run.agent} ended, status {status}")
            if status:
                clear_runtime(run.runtime)  # a killed one could not
            if run.kill_at != inf:
                tell(run.connection, said=STOPPED)  # the last word: an agent may have many
            tell(run.connection, ended=status)
            run.connection.close()

    def _give_up(self, run: Run) -> None:
        """Even SIGKILL waits for what an agent waits for in the kernel: a file server, say."""
        self._runs.remove(run)
        why = f"agent {run.agent}, pid {run.process.pid}, does not die: it is left alone"
        _log(f"run {run.told['run']}: {why}")
        tell(run.connection, said=STOPPED)
        tell(run.connection, error=why)
        run.connection.close()


class GivenUp(Exception):
    """A signal came before there was a loop."""


def _give_up(number: int, frame: FrameType | None) -> None:
    for again in RUN_SIGNALS:  # it ends already
        signal.signal(again, signal.SIG_IGN)
    raise GivenUp(signal.Signals(number).name)


def main(argv: list[str]) -> int:
    """A keeper from its options to its end; 1 where it does not begin."""
    if argv != ["--stdin"]:
        _log(f"expected --stdin, found {' '.join(argv)!r}")
        return 1
    for number in RUN_SIGNALS:
        signal.signal(number, _give_up)
    try:
        options = told()
        sweep()
        listener, directory = listen()
    except (OSError, ValueError, GivenUp) as error:
        _log(f"cannot begin: {one_line(error)}")
        return 1
    try:
        say_ready(directory)
        if read_line(0, 100, limit_s=STAY_LIMIT_S) != STAY:
            _log("ends: nobody told it to stay")
            remove(directory)
            return 1
        with signals_held():  # until there is a loop that they can end
            leave_parent()
            keeper = Keeper(listener, directory, cluster=options.cluster, idle_s=options.idle)
            keeper.handle_signals()
    except (OSError, GivenUp) as error:
        _log(f"ends: {one_line(error)}")
        remove(directory)
        return 1
    try:
        say_stays(directory)
        _log(f"of cluster {options.cluster}, pid {os.getpid()}")
        _log(f"ends: {keeper.serve()}")
    except BrokenPipeError:
        _log("ends: nobody heard that it stays")
    # Not after an exception: its log, with the traceback, stays until the next keeper sweeps it.
    keeper.close()
    return 0
