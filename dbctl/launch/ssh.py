"""The launcher of hosts that ssh reaches: one agent on each, its socket forwarded to here.

Rules of this file: what is said to ssh and to the host is pure text in `dbctl.launch.ssh_words`,
how it is said is in `dbctl.launch.ssh_talk`. Every wait has an end.

Theory of operation. All are started at once and waited for in one loop. The agent makes the private
directory that the forwarded socket leads to, listens, and says READY; only then is the socket here
connected, by the controller's link. Its standard error comes through ssh into logs/AGENT.log, with
what ssh itself says.

The agent ends with its standard input: when `stop` closes it, when this process ends, when ssh or
the way there is lost. No node is started before all agents are ready.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dbctl.errors import LaunchError
from dbctl.experiment.specs import HostSpec
from dbctl.launch.base import AgentHandle, Answer, ReadyLine
from dbctl.launch.ssh_talk import READY_LIMIT_S, Talk, end_all, hear
from dbctl.launch.ssh_words import (
    NOTHING,
    NOWHERE,
    Asked,
    Errand,
    Standing,
    errand,
    orders,
    others,
    ssh_command,
)
from dbctl.process import memory_domain, one_line

if TYPE_CHECKING:
    from dbctl.examine import Facts

T = TypeVar("T")

REACH_LIMIT_S = 10.0  # of an answer that the host bounds to four seconds
# What ssh expands in a path, or takes for the end of one, does not stand in ours.
PLAIN_PATH = re.compile(r"/[A-Za-z0-9/_.,+=@-]*")


class _Attempt:
    """One agent on its way up: `fields` of its READY line, and `reached` of the second one."""

    def __init__(self, one: Errand, text: str, log_path: Path) -> None:
        self.one = one
        self.talk = Talk(
            one.agent,
            one.host,
            ssh_command(one),
            text=text,
            make_said=ReadyLine,
            log_path=log_path,
            socket=one.forwarded,
            of_cluster=bool(one.keeper),
        )
        self.fields: dict[str, Any] = {}
        self.facts: Facts | None = None
        self.reached: dict[str, str] = {}
        self.heard_s = 0.0

    def take_ready(self) -> bool:
        """Whether it is ready, and what it says of its host, if it does, can be that."""
        from dbctl.examine import Facts

        if self.talk.error is None:
            assert self.talk.heard is not None
            self.fields, self.heard_s = self.talk.heard, self.talk.heard_s
            if "facts" in self.fields:
                self.facts = self._converted(self.fields["facts"], Facts)
        return self.talk.error is None

    def take_reached(self) -> None:
        if self.talk.error is None:
            self.reached = self._converted(self.talk.heard, dict[str, str]) or {}

    def _converted(self, said: object, form: type[T]) -> T | None:
        """None, and an error of the talk: it is of another form."""
        import msgspec

        try:
            return msgspec.convert(said, form)
        except msgspec.ValidationError as error:
            what = f"said of its host what is none: {one_line(error)}"
            self.talk.error = self.talk.failed(what)
            return None

    def ask(self, ports: Mapping[str, tuple[str, int]]) -> None:
        """Which of the others, who listen at `ports`, it reaches."""
        self.talk.ask(others(ports, self.one.agent), "REACHED")

    def answer(self) -> Answer | None:
        """What it said of its host."""
        if self.facts is None:
            return None
        return Answer(
            facts=self.facts,
            reached=self.reached,
            asked_s=self.talk.asked_s,
            heard_s=self.heard_s,
        )


class SshLauncher:
    """One agent on each host of `hosts`, given as (agent's name, host).

    `runtime`: the controller's private directory, where the forwarded sockets appear; `logs`: for
    AGENT.log; `token`: 16 random characters for the directories there; `asked`: what the agents are
    to say of their hosts; `standing`: the keepers that start them, where the hosts are a cluster's.
    `interrupted`, asked while they come up, gives up when it says so.
    """

    def __init__(
        self,
        *,
        hosts: Sequence[tuple[str, HostSpec]],
        runtime: str,
        run: str,
        logs: str | Path,
        token: str,
        lease_s: float = 10.0,
        asked: Asked = NOTHING,
        standing: Standing = NOWHERE,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._asked = asked
        self._interrupted = interrupted
        self._runtime = runtime
        self._attempts = []
        for name, host in hosts:
            one = errand(name, host, runtime=runtime, token=token, keeper=standing.keeper(host))
            text = orders(one, asked, run=run, lease_s=lease_s, table=standing.table)
            self._attempts.append(_Attempt(one, text, Path(logs) / f"{name}.log"))
        self._talks = [attempt.talk for attempt in self._attempts]
        self._deadline = 0.0

    def start_async(self) -> None:
        if not PLAIN_PATH.fullmatch(self._runtime):
            what = f"cannot have its socket forwarded to {self._runtime}: ssh takes some of its"
            raise LaunchError("ssh", f"{what} characters for others; set XDG_RUNTIME_DIR or TMPDIR")
        self._deadline = time.monotonic() + READY_LIMIT_S
        for talk in self._talks:
            talk.start()

    def wait_ready(self) -> list[AgentHandle]:
        found = self.wait_all()
        errors = [one for one in found if isinstance(one, LaunchError)]
        if errors:
            self.stop(1.0)
            raise self._all_of(errors)
        return [one for one in found if isinstance(one, AgentHandle)]

    def wait_all(self) -> list[AgentHandle | LaunchError]:
        hear(self._talks, self._deadline, interrupted=self._interrupted)
        ready = [attempt for attempt in self._attempts if attempt.take_ready()]
        if self._asked.reach:
            for attempt in ready:
                attempt.ask(self._ports(ready))
            deadline = time.monotonic() + REACH_LIMIT_S
            hear([one.talk for one in ready], deadline, interrupted=self._interrupted)
            for attempt in ready:
                attempt.take_reached()
        return [attempt.talk.error or self._handle(attempt) for attempt in self._attempts]

    def _ports(self, ready: list[_Attempt]) -> dict[str, tuple[str, int]]:
        """Where each listens that could."""
        found = {}
        for attempt in ready:
            name = attempt.one.agent
            address = self._asked.of(name).get("address")
            if address and attempt.facts is not None and attempt.facts.port:
                found[name] = (str(address), attempt.facts.port)
        return found

    def _all_of(self, errors: list[LaunchError]) -> LaunchError:
        if len(errors) == 1:
            return errors[0]
        text = "\n".join(str(error) for error in errors)
        return LaunchError(
            f"{len(errors)} of {len(self._attempts)} agents", f"did not start\n{text}"
        )

    def _handle(self, attempt: _Attempt) -> AgentHandle:
        fields, one, talk = attempt.fields, attempt.one, attempt.talk
        assert talk.process is not None
        talk.hear_no_more()
        return AgentHandle(
            one.agent,
            one.host.name,
            f"ipc://{one.forwarded}",
            talk.process.pid,
            inside=f"ipc://{one.socket}",
            runtime=one.runtime,
            python=str(fields.get("python", "")),
            keeps_logs=True,
            shares_memory=fields.get("memory") == memory_domain() != "",
            answer=attempt.answer(),
        )

    def start(self) -> list[AgentHandle]:
        self.start_async()
        return self.wait_ready()

    def failure(self) -> LaunchError | None:
        for talk in self._talks:
            if (status := talk.status()) is not None:
                return talk.failed("ended early", status)
        return None

    def all_ended(self) -> bool:
        return all(talk.process is None or talk.status() is not None for talk in self._talks)

    def stop(self, timeout_s: float) -> None:
        end_all(self._talks, timeout_s)
