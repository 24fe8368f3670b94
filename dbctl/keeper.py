"""`python -m dbctl keeper --stdin`: the standing agent of one cluster on one host.

Rules of this file: neither numpy nor zmq; it runs no node, holds no link and is in nobody's way.
Every wait has an end, everything that others may ask for has a bound, and no signal is ignored.

Theory of operation. Like inetd: it listens on a socket in a directory of its own (0700, made by
`mkdtemp`), and whoever connects as the same user sends one line of JSON and two descriptors
(dbctl/caller.py does, at the far end of an ssh). For `run` an agent is started that ends with the
connection (dbctl/keeper_runs.py), and the keeper stays; `status` and `stop` are answered by one
line of JSON.

It becomes permanent in two steps. It says READY while it is still a child of the ssh that started
it, and stays only if it is then told so: of hosts where one fails, none keeps anything.
It ends when asked to, by SIGTERM, after its limit without a run, or where somebody has removed its
socket and no run is left; and its directory with it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from math import inf
from types import FrameType
from typing import Any

from dbctl import __version__
from dbctl.keeper_runs import Runs
from dbctl.keeper_start import (
    SOCKET,
    leave_parent,
    listen,
    remove,
    say_ready,
    say_stays,
    sweep,
    told,
)
from dbctl.process import RUN_SIGNALS, one_line, read_line, signals_held
from dbctl.visitors import Answers, Visitor, note, peer_uid, tell

STAY = b"stay"
STAY_LIMIT_S = 60.0  # twice what its launcher gives all hosts to get ready
SILENT_LIMIT_S = 5.0  # of a connection that has not said what it wants
ANSWER_LIMIT_S = 2.0  # how long who asked may take to read the answer
SILENT_MAX = 16
LOOK_S = 60.0  # how late it is seen that the socket is gone

_now = time.monotonic


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
        self._runs = Runs()
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
            if self._runs.reap(now):
                self._idle_since = now
            self._answers.drop(now)
            for visitor in [v for v in self._visitors if v.until <= now]:
                self._drop(visitor, f"silent for {SILENT_LIMIT_S:g} s")
            if not self._runs and now - self._idle_since >= self._idle_s:
                self.stop(f"no run for {self._idle_s:g} s")
            if not self._runs and not os.path.exists(f"{self._directory}/{SOCKET}"):
                self.stop("its socket is gone, and nobody can come any more")
            if self._over:
                self._runs.end()
                if not self._runs:
                    return self._over

    def _due(self) -> float:
        idle_at = inf if self._runs else self._idle_since + self._idle_s
        silent = [visitor.until for visitor in self._visitors]
        return min([idle_at, _now() + LOOK_S, self._answers.due(), self._runs.due(), *silent])

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
            note(f"cannot accept: {one_line(error)}")
            time.sleep(0.05)  # out of descriptors: it would be ready again at once
            return
        if (uid := peer_uid(connection)) != os.getuid():
            note(f"turned away a process of user {uid}")
            connection.close()
            return
        if len(self._visitors) >= SILENT_MAX:
            self._drop(self._visitors[0], f"{SILENT_MAX} connections say nothing")
        visitor = Visitor(connection, _now() + SILENT_LIMIT_S)
        self._visitors.append(visitor)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(visitor))

    def _drop(self, visitor: Visitor, why: str) -> None:
        note(f"dropped a connection: {why}")
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
                stopping = "the cluster is being stopped" if self._over else ""
                if fault := stopping or self._runs.start(visitor, request):
                    self._drop(visitor, fault)
                else:
                    self._forget(visitor)
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
        now = _now()
        return {
            "cluster": self._cluster,
            "pid": os.getpid(),
            "version": __version__,
            "seconds": round(now - self._began, 1),
            "state": "stopping" if self._over else "up",
            "runs": self._runs.rows(now),
        }


class GivenUp(Exception):
    """A signal came before there was a loop."""


def _give_up(number: int, frame: FrameType | None) -> None:
    for again in RUN_SIGNALS:  # it ends already
        signal.signal(again, signal.SIG_IGN)
    raise GivenUp(signal.Signals(number).name)


def main(argv: list[str]) -> int:
    """A keeper from its options to its end; 1 where it does not begin."""
    if argv != ["--stdin"]:
        note(f"expected --stdin, found {' '.join(argv)!r}")
        return 1
    for number in RUN_SIGNALS:
        signal.signal(number, _give_up)
    try:
        options = told()
        sweep()
        listener, directory = listen()
    except (OSError, ValueError, GivenUp) as error:
        note(f"cannot begin: {one_line(error)}")
        return 1
    try:
        say_ready(directory)
        if read_line(0, 100, limit_s=STAY_LIMIT_S) != STAY:
            note("ends: nobody told it to stay")
            remove(directory)
            return 1
        with signals_held():  # until there is a loop that they can end
            leave_parent()
            keeper = Keeper(listener, directory, cluster=options.cluster, idle_s=options.idle)
            keeper.handle_signals()
    except (OSError, GivenUp) as error:
        note(f"ends: {one_line(error)}")
        remove(directory)
        return 1
    try:
        say_stays(directory)
        note(f"of cluster {options.cluster}, pid {os.getpid()}")
        note(f"ends: {keeper.serve()}")
    except BrokenPipeError:
        note("ends: nobody heard that it stays")
    # Not after an exception: its log, with the traceback, stays until the next keeper sweeps it.
    keeper.close()
    return 0
