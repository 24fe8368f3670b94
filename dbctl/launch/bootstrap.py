"""`--bootstrap`: the dbctl of here, brought over ssh to hosts that have none or another one.

Rules of this file: the same ssh, settings and patience with busy servers as the launcher's
(dbctl/launch/ssh.py); the host's own Python runs a program that is sent as text
(dbctl/launch/installer.py), and the user's values go over standard input. All hosts at once; every
wait has an end; nothing is done where nothing is to be done, and broken off it can be repeated.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import IO

from dbctl.errors import LaunchError
from dbctl.experiment.specs import HostSpec
from dbctl.launch.base import NotReady, SaidLine, ending
from dbctl.launch.ssh_words import (
    SSH_FAILED,
    again_after_s,
    bootstrap_command,
    closed_early,
    diagnose,
)
from dbctl.launch.wheel import Wheel, make_wheel
from dbctl.process import escape_line, signals_held, tail

LIMIT_S = 900.0  # pip may have to fetch numpy over a slow line
FIRST_WORD_S = 30.0  # within which a server must have taken us
LONG_S = 2.0
LOOK_S = 0.05


class _Visit:
    """One host: `python` once dbctl is there, `error` once it will not be."""

    def __init__(self, host: HostSpec, wheel: Wheel, directory: Path) -> None:
        self.host = host
        self._wheel = wheel
        self._log = directory / f"{host.name}.log"
        self._out = directory / f"{host.name}.out"
        self.process: subprocess.Popen[bytes] | None = None
        self.n_tries = 0
        self.begin_at = 0.0
        self.python = ""
        self.error: LaunchError | None = None

    @property
    def waits(self) -> bool:
        return not self.python and self.error is None

    def begin(self) -> None:
        self.n_tries += 1
        values = {
            "workdir": self.host.workdir,
            "name": self._wheel.name,
            "digest": self._wheel.digest,
        }
        with ExitStack() as stack, signals_held():
            # ssh reads it by itself: nobody here has to write while others are waited for.
            told: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            told.write(json.dumps(values).encode() + b"\n" + self._wheel.data)
            told.seek(0)
            out = stack.enter_context(open(self._out, "wb"))
            log = stack.enter_context(open(self._log, "wb"))
            try:
                self.process = subprocess.Popen(
                    bootstrap_command(self.host),
                    stdin=told,
                    stdout=out,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                self.error = self.failed(f"ssh could not be started: {error.strerror}")

    def look(self, now: float, deadline: float) -> None:
        """Whether it has ended, and how; on an early close a later try is set."""
        if self.process is None:
            if now >= self.begin_at:
                self.begin()
            return
        status = self.process.poll()
        if status is None:
            return
        self.process = None
        data = self._out.read_bytes()
        if status == SSH_FAILED and not data and closed_early(tail(self._log)):
            self.begin_at = now + again_after_s(self.n_tries)
            if self.begin_at < deadline:
                return
        said = SaidLine("BOOTSTRAP")
        try:
            answer = said.feed(data) or said.feed(b"")
        except NotReady as error:
            self.error = self.failed(str(error), status)
            return
        assert answer is not None
        if isinstance(answer.get("python"), str):
            self.python = str(answer["python"])
        else:
            fault, cure = (escape_line(str(answer.get(key))) for key in ("fault", "cure"))
            self.error = self.failed(fault, cure=cure)

    def failed(self, what: str, status: int | None = None, cure: str = "") -> LaunchError:
        said = tail(self._log)
        about = "bootstrap"
        if not cure:
            found = diagnose(self.host, status, f"{what}\n{said}")
            about, cure = (found.about, found.cure) if found.fault else (about, found.cure)
            what = "; ".join(filter(None, (what, found.fault)))
        if status is not None:
            what += f" ({'ssh ' if status == SSH_FAILED else ''}{ending(status)})"
        name = self.host.name
        return LaunchError("bootstrap", what, about=about, cure=cure, host=name, log_tail=said)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def nobody(text: str) -> None:
    """Is told what takes its time, and tells nobody."""


def bring(
    hosts: Sequence[HostSpec],
    *,
    interrupted: Callable[[], bool] = lambda: False,
    tell: Callable[[str], object] = nobody,
) -> list[HostSpec | LaunchError]:
    """Each host with the `python` that has dbctl, or why there is none; in the given order.

    `interrupted`, asked meanwhile, gives up when it says so; `tell` is told where it takes long.
    """
    wheel = make_wheel()
    with tempfile.TemporaryDirectory(prefix="dbctl-bootstrap-") as directory:
        visits = [_Visit(host, wheel, Path(directory)) for host in hosts]
        begin = time.monotonic()
        told_at = begin + LONG_S
        try:
            while any(visit.waits for visit in visits):
                now = time.monotonic()
                for visit in visits:
                    if visit.waits:
                        visit.look(now, begin + FIRST_WORD_S)
                if now >= begin + LIMIT_S or interrupted():
                    break
                if now >= told_at:
                    names = ", ".join(visit.host.name for visit in visits if visit.waits)
                    tell(f"bringing dbctl to {names}: the first time that takes a minute")
                    told_at = inf
                time.sleep(LOOK_S)
            return [_outcome(visit) for visit in visits]
        finally:
            for visit in visits:
                visit.end()


def _outcome(visit: _Visit) -> HostSpec | LaunchError:
    if visit.python:
        return replace(visit.host, python=visit.python)
    return visit.error or visit.failed("was not done in time")
