"""`--bootstrap`: the dbctl of here, brought over ssh to hosts that have none or another one.

Rules of this file: the host's own Python runs a program that is sent as text
(dbctl/launch/installer.py), and the user's values go over standard input, the wheel behind them.
All hosts at once; every wait has an end; nothing is done where nothing is to be done, and broken
off it can be repeated.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import dbctl
from dbctl.errors import LaunchError
from dbctl.experiment.specs import HostSpec
from dbctl.launch.base import SaidLine
from dbctl.launch.ssh_talk import Talk, end_all, hear
from dbctl.launch.ssh_words import bootstrap_command
from dbctl.process import escape_line

if TYPE_CHECKING:
    from dbctl.launch.wheel import Wheel

LIMIT_S = 900.0  # pip may have to fetch numpy over a slow line
LONG_S = 2.0
END_LIMIT_S = 1.0


def nobody(text: str) -> None:
    """Is told what takes its time, and tells nobody."""


def bring(
    hosts: Sequence[HostSpec],
    *,
    interrupted: Callable[[], bool] = lambda: False,
    tell: Callable[[str], object] = nobody,
) -> list[HostSpec | LaunchError]:
    """Each host with the `python` that has dbctl, or why there is none; in the given order.

    `interrupted`, asked meanwhile, gives up when it says so; `tell` is told of each host when it
    begins and when it ends, and where it takes long.
    """
    from dbctl.launch.wheel import make_wheel  # only a bootstrap packs, and needs what it brings

    wheel = make_wheel()
    with tempfile.TemporaryDirectory(prefix="dbctl-bootstrap-") as directory:
        talks = [_talk(host, wheel, Path(directory)) for host in hosts]
        course = _Course(talks, tell)

        def gives_up() -> bool:
            course.look()
            return interrupted()

        try:
            for talk in talks:
                tell(f"{talk.host.name}: bringing dbctl {dbctl.__version__}")
                talk.start()
            hear(talks, time.monotonic() + LIMIT_S, interrupted=gives_up)
            course.look()
        finally:
            end_all(talks, END_LIMIT_S if not any(talk.waits for talk in talks) else 0.0)
        return [_outcome(talk) for talk in talks]


class _Course:
    """Tells of hosts whose turn has come to its end since it looked last, in seconds from now."""

    def __init__(self, talks: Sequence[Talk], tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._going = list(talks)
        self._begin = time.monotonic()
        self._is_long = False

    def look(self) -> None:
        took_s = time.monotonic() - self._begin
        ended = [talk for talk in self._going if not talk.waits]
        self._going = [talk for talk in self._going if talk.waits]
        for talk in ended:
            self._tell(f"{talk.host.name}: {_end(talk)} ({took_s:.1f} s)")
        if self._going and not self._is_long and took_s >= LONG_S:
            self._is_long = True
            names = ", ".join(talk.host.name for talk in self._going)
            self._tell(f"still bringing dbctl to {names}: the first time that takes a minute")


def _end(talk: Talk) -> str:
    """What was done."""
    answer = talk.heard or {}
    if not isinstance(answer.get("python"), str):
        return "dbctl was not brought"
    did = "was there already:" if answer.get("made") is False else "is installed, for"
    return f"dbctl {dbctl.__version__} {did} {escape_line(answer['python'])}"


def _talk(host: HostSpec, wheel: Wheel, directory: Path) -> Talk:
    values = {
        "workdir": host.workdir,
        "env": dict(variable.split("=", 1) for variable in host.env),
        "name": wheel.name,
        "digest": wheel.digest,
    }
    given = directory / f"{host.name}.in"
    given.write_bytes(json.dumps(values).encode() + b"\n" + wheel.data)
    return Talk(
        "bootstrap",
        host,
        bootstrap_command(host),
        text=given,
        make_said=lambda: SaidLine("BOOTSTRAP"),
        log_path=directory / f"{host.name}.log",
    )


def _outcome(talk: Talk) -> HostSpec | LaunchError:
    answer = talk.heard or {}
    if isinstance(answer.get("python"), str):
        return replace(talk.host, python=str(answer["python"]))
    error = talk.error
    if error is None:
        fault, cure = (escape_line(str(answer.get(key, ""))) for key in ("fault", "cure"))
        error = talk.failed(fault)
        error.about, error.what, error.cure = "bootstrap", fault, cure
    elif error.about == "agent":
        error.about = "bootstrap"
    error.log_path = ""  # it goes; its last words are in the error
    return error
