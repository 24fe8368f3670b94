"""Keepers on the hosts of a cluster: brought up on all or on none, asked, and ended.

Rules of this file: all hosts at once, over ssh, each with its own outcome; every wait has an end.
How a keeper works is in `dbctl.keeper`; runs reach it by `dbctl.launch.ssh`.

Theory of operation. A keeper says READY and stays only when told so, which happens once all are
ready: until then each ends with its ssh, so a failure anywhere leaves nothing. Where they are is
written down before that word: whoever does not answer to it leaves others, which are stopped.
Questions go through `dbctl.caller`, and only it can tell a keeper that is gone from a host that
cannot be reached.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import Struct

from dbctl.caller import ANSWER, NO_KEEPER
from dbctl.errors import LaunchError
from dbctl.experiment.specs import HostSpec
from dbctl.keeper import STAY
from dbctl.launch.base import ReadyLine, SaidLine
from dbctl.launch.ssh_talk import READY_LIMIT_S, Talk, end_all, hear
from dbctl.launch.ssh_words import dbctl_command

STAYS_LIMIT_S = 10.0
ASK_LIMIT_S = 10.0
STOP_LIMIT_S = 25.0  # a keeper gives its agents five seconds, and as many again
END_LIMIT_S = 2.0
ANSWER_BYTES_MAX = 4 << 20  # 64 runs, each with hundreds of nodes


@dataclass(frozen=True, kw_only=True)
class Keeper:
    """One that stays on `host`: its control socket, process number and Python there.

    `node`: what that machine calls itself; "": it was not asked (dbctl 0.1.0).
    """

    host: HostSpec
    socket: str
    pid: int
    python: str
    node: str = ""


class Stays(Struct, frozen=True, kw_only=True):
    """What a keeper answers to STAY."""

    pid: int = 0
    node: str = ""


class Stopped(Struct, frozen=True, kw_only=True):
    """What a keeper answers to `stop`: `runs` that it ended."""

    stopped: bool = False
    runs: int = 0


def options(cluster: str, host: HostSpec, *, idle_s: float | None = None) -> str:
    """What a keeper reads on standard input, one line of JSON."""
    values: dict[str, object] = {
        "cluster": cluster,
        "workdir": host.workdir,
        "env": dict(variable.split("=", 1) for variable in host.env),
    }
    if idle_s is not None:
        values["idle"] = idle_s
    return json.dumps(values) + "\n"


def bring_up(
    cluster: str,
    hosts: Sequence[HostSpec],
    *,
    keep: Callable[[list[Keeper]], object],
    interrupted: Callable[[], bool] = lambda: False,
    idle_s: float | None = None,
) -> list[Keeper]:
    """One keeper on each host; else an ExceptionGroup has the LaunchErrors of all.

    `keep` is told where they are, once all are ready and before any stays. Where it was not, or
    raised, none stays; after a later failure, or once `interrupted`, some may: they are to be
    stopped.
    """
    with tempfile.TemporaryDirectory(prefix="dbctl-launch-") as logs:
        talks = [
            Talk(
                "keeper",
                host,
                dbctl_command(host, "keeper", "--stdin"),
                text=options(cluster, host, idle_s=idle_s),
                make_said=ReadyLine,
                log_path=Path(logs) / f"{host.name}.log",
            )
            for host in hosts
        ]
        try:
            for talk in talks:
                talk.start()
            hear(talks, time.monotonic() + READY_LIMIT_S, interrupted=interrupted)
            _check(talks)
            ready = [_ready(talk) for talk in talks]
            keep(ready)
            for talk in talks:
                talk.ask(f"{STAY.decode()}\n", "STAYS", form=Stays)
            hear(talks, time.monotonic() + STAYS_LIMIT_S, interrupted=interrupted)
            _check(talks)
        finally:
            end_all(talks, END_LIMIT_S)
        return [
            replace(
                keeper,
                pid=int((talk.heard or {}).get("pid", 0)),
                node=str((talk.heard or {}).get("node", "")),
            )
            for talk, keeper in zip(talks, ready, strict=True)
        ]


def _ready(talk: Talk) -> Keeper:
    """Before it stays: its process is not yet the one that will."""
    fields = talk.heard or {}
    return Keeper(
        host=talk.host,
        socket=str(fields["endpoint"]),
        pid=0,
        python=str(fields.get("python", "")),
    )


def _check(talks: Sequence[Talk]) -> None:
    errors = [_without_log(talk.error) for talk in talks if talk.error is not None]
    if errors:
        raise ExceptionGroup("no keepers", errors)


def _without_log(error: LaunchError) -> LaunchError:
    """The log's tail stays in it; the file goes."""
    error.log_path = ""
    return error


Reply = dict[str, Any] | LaunchError


def ask(rows: Sequence[tuple[HostSpec, str, str]], what: str) -> list[Reply]:
    """The answer of each keeper, given by host, socket and node, to `status` or `stop`.

    Who does not answer has the error in its place; `is_gone` says whether that means its end.
    """
    if not rows:
        return []
    form = Stopped if what == "stop" else None
    with tempfile.TemporaryDirectory(prefix="dbctl-ask-") as logs:
        talks = [
            Talk(
                "keeper",
                host,
                dbctl_command(host, "caller", socket, *([node] if node else [])),
                text=json.dumps({"do": what}) + "\n",
                make_said=lambda: SaidLine(ANSWER.strip(), form=form, limit=ANSWER_BYTES_MAX),
                log_path=Path(logs) / f"{number}.log",
                of_cluster=True,
            )
            for number, (host, socket, node) in enumerate(rows)
        ]
        limit_s = STOP_LIMIT_S if what == "stop" else ASK_LIMIT_S
        try:
            for talk in talks:
                talk.start()
            hear(talks, time.monotonic() + limit_s)
        finally:
            # An answer is the last that is said; who gives none is not waited for any more.
            end_all(talks, END_LIMIT_S if all(talk.heard for talk in talks) else 0.0)
        return [_reply(talk) for talk in talks]


def _reply(talk: Talk) -> Reply:
    if talk.error is not None:
        return _without_log(talk.error)
    assert talk.heard is not None, "whoever is late has an error"
    return talk.heard


def is_gone(reply: Reply) -> bool:
    """Whether the host itself says that no keeper is there."""
    return isinstance(reply, LaunchError) and NO_KEEPER in reply.log_tail
