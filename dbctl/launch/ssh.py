"""The launcher of hosts that ssh reaches: one agent on each, its socket forwarded to here.

Rules of this file: what is said to ssh and to the host is pure text in `dbctl.launch.ssh_words`.
Every wait has an end.

Theory of operation. All are started at once and waited for in one loop. The agent makes the private
directory that the forwarded socket leads to, listens, and says READY; only then is the socket here
connected, by the controller's link. Its standard error comes through ssh into logs/AGENT.log, with
what ssh itself says. Exit status 255 may be ssh's or the command's: the report has both their
words. A server that takes no more beginners (MaxStartups) closes the connection before the first
word; that is tried again with growing pauses. A refused port is not: nobody is there.

The agent ends with its standard input: when `stop` closes it, when this process ends, when ssh or
the way there is lost. No node is started before all agents are ready.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dbctl.errors import LaunchError
from dbctl.experiment.specs import HostSpec
from dbctl.launch.base import AgentHandle, Answer, NotReady, ReadyLine, SaidLine, ending
from dbctl.launch.ssh_words import (
    NOTHING,
    SSH_FAILED,
    Asked,
    Errand,
    again_after_s,
    closed_early,
    diagnose,
    errand,
    orders,
    others,
    ssh_command,
)
from dbctl.process import memory_domain, one_line, signals_held, tail

READY_LIMIT_S = 30.0
REACH_LIMIT_S = 10.0  # of an answer that the host bounds to four seconds
LOOK_S = 0.25
# What ssh expands in a path, or takes for the end of one, does not stand in ours.
PLAIN_PATH = re.compile(r"/[A-Za-z0-9/_.,+=@-]*")


class _Attempt:
    """One agent on its way up: `fields` once it is ready, `reached` once it has tried the ways to
    the others (`reach`: it is to), `error` once it never will be.
    """

    def __init__(self, one: Errand, log_path: Path, *, reach: bool) -> None:
        self.one = one
        self.log_path = log_path
        self.process: subprocess.Popen[bytes] | None = None
        self.said: SaidLine = ReadyLine()
        self.log_start = 0
        self.n_tries = 0
        self.begin_at = 0.0
        self.asked_s = self.heard_s = 0.0
        self.fields: dict[str, Any] | None = None
        self.reached: dict[str, Any] | None = None if reach else {}
        self.error: LaunchError | None = None

    @property
    def is_ready(self) -> bool:
        return self.fields is not None and self.error is None

    @property
    def waits(self) -> bool:
        return self.error is None and (self.fields is None or self.reached is None)

    def start(self, text: str) -> None:
        self.n_tries += 1
        self.asked_s = time.time()
        self.said = ReadyLine()
        Path(self.one.forwarded).unlink(missing_ok=True)  # ssh leaves it, and does not take it over
        try:
            with open(self.log_path, "ab") as log, signals_held():
                self.log_start = log.tell()
                self.process = subprocess.Popen(
                    ssh_command(self.one),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                    bufsize=0,
                )
        except OSError as error:
            self.error = self.failed(f"ssh could not be started: {one_line(error)}")
            return
        self.tell(text)

    def tell(self, text: str) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        # Far less than a pipe holds; where nobody reads, the end of the process says why.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(text.encode())

    def ask(self, ports: Mapping[str, tuple[str, int]]) -> None:
        """Which of the others, who listen at `ports`, it reaches."""
        self.said = SaidLine("REACHED")
        self.tell(others(ports, self.one.agent))

    def fd(self) -> int:
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def read(self, now: float, deadline: float) -> None:
        """Takes what its output has; on an early close a later try is set."""
        try:
            fields = self.said.feed(os.read(self.fd(), 65536))
        except NotReady as error:
            assert self.process is not None
            self.let_go()
            try:
                status: int | None = self.process.wait(1.0)
            except subprocess.TimeoutExpired:
                status = None
            early = status == SSH_FAILED and not self.said.data
            if early and closed_early(tail(self.log_path, self.log_start)):
                self.begin_at = now + again_after_s(self.n_tries)
                if self.begin_at < deadline:
                    self.end(0.0)
                    return
            self.error = self.failed(str(error), status)
            return
        if fields is not None and self.fields is None:
            self.fields, self.heard_s = fields, time.time()
        elif fields is not None:
            self.reached = fields

    def failed(self, what: str, status: int | None = None) -> LaunchError:
        said = tail(self.log_path, self.log_start)
        parts = [what]
        if status is not None:
            whose = "ssh " if status == SSH_FAILED else ""
            parts[0] += f" ({whose}{ending(status)})"
        found = diagnose(self.one.host, status, f"{what}\n{said}")
        if found.fault:
            parts.append(found.fault)
        return LaunchError(
            self.one.agent,
            "; ".join(parts),
            about=found.about,
            cure=found.cure,
            host=self.one.host.name,
            log_path=str(self.log_path),
            log_tail=said,
        )

    def answer(self) -> Answer | None:
        """What it said of its host. NotReady: that is of another form."""
        import msgspec

        from dbctl.examine import Facts

        assert self.fields is not None
        if "facts" not in self.fields:
            return None
        try:
            facts = msgspec.convert(self.fields["facts"], Facts)
            reached = msgspec.convert(self.reached or {}, dict[str, str])
        except msgspec.ValidationError as error:
            raise NotReady(f"said of its host what is none: {one_line(error)}") from error
        return Answer(facts=facts, reached=reached, asked_s=self.asked_s, heard_s=self.heard_s)

    def let_go(self) -> None:
        """Its standard input ends, and with it the agent."""
        if self.process is not None:
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    pipe.close()

    def end(self, timeout_s: float) -> None:
        """Waits for ssh, which waits for the agent; else kills ssh: the agent's input has ended."""
        self.let_go()
        if self.process is not None:
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process = None
        Path(self.one.forwarded).unlink(missing_ok=True)


class SshLauncher:
    """One agent on each host of `hosts`, given as (agent's name, host).

    `runtime`: the controller's private directory, where the forwarded sockets appear; `logs`: for
    AGENT.log; `token`: 16 random characters for the directories there; `asked`: what the agents are
    to say of their hosts. `interrupted`, asked while they come up, gives up when it says so.
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
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._run = run
        self._lease_s = lease_s
        self._asked = asked
        self._interrupted = interrupted
        self._runtime = runtime
        self._attempts = [
            _Attempt(
                errand(name, host, runtime=runtime, token=token),
                Path(logs) / f"{name}.log",
                reach=asked.reach,
            )
            for name, host in hosts
        ]
        self._deadline = 0.0

    def start_async(self) -> None:
        if not PLAIN_PATH.fullmatch(self._runtime):
            what = f"cannot have its socket forwarded to {self._runtime}: ssh takes some of its"
            raise LaunchError("ssh", f"{what} characters for others; set XDG_RUNTIME_DIR or TMPDIR")
        self._deadline = time.monotonic() + READY_LIMIT_S
        for attempt in self._attempts:
            self._begin(attempt)

    def _begin(self, attempt: _Attempt) -> None:
        one = attempt.one
        attempt.start(orders(one, self._asked, run=self._run, lease_s=self._lease_s))

    def wait_ready(self) -> list[AgentHandle]:
        found = self.wait_all()
        errors = [one for one in found if isinstance(one, LaunchError)]
        if errors:
            self.stop(1.0)
            raise self._all_of(errors)
        return [one for one in found if isinstance(one, AgentHandle)]

    def wait_all(self) -> list[AgentHandle | LaunchError]:
        self._wait_while(lambda one: one.error is None and one.fields is None, self._deadline)
        ready = [attempt for attempt in self._attempts if attempt.is_ready]
        if self._asked.reach:
            for attempt in ready:
                attempt.ask(self._ports(ready))
            self._wait_while(lambda one: one.waits, time.monotonic() + REACH_LIMIT_S)
        return [self._outcome(attempt) for attempt in self._attempts]

    def _wait_while(self, waits: Callable[[_Attempt], bool], deadline: float) -> None:
        while left := [attempt for attempt in self._attempts if waits(attempt)]:
            now = time.monotonic()
            if now >= deadline or self._interrupted():
                break
            self._turn(left, now)
        for attempt in left:
            attempt.error = attempt.failed(str(attempt.said.late()))

    def _ports(self, ready: list[_Attempt]) -> dict[str, tuple[str, int]]:
        """Where each listens that could."""
        found = {}
        for attempt in ready:
            assert attempt.fields is not None
            name = attempt.one.agent
            port = attempt.fields.get("facts", {}).get("port", 0)
            if port:
                found[name] = (str(self._asked.of(name)["address"]), int(port))
        return found

    def _outcome(self, attempt: _Attempt) -> AgentHandle | LaunchError:
        try:
            return attempt.error or self._handle(attempt)
        except NotReady as error:
            return attempt.failed(str(error))

    def _turn(self, waiting: list[_Attempt], now: float) -> None:
        """Begins what is due again, and reads what has come, for at most LOOK_S."""
        poll = select.poll()
        reading = {}
        for attempt in waiting:
            if attempt.process is None and now >= attempt.begin_at:
                self._begin(attempt)
            if attempt.process is not None:
                poll.register(attempt.fd(), select.POLLIN)
                reading[attempt.fd()] = attempt
        for fd, _ in poll.poll(1000.0 * LOOK_S):
            reading[fd].read(now, self._deadline)

    def _all_of(self, errors: list[LaunchError]) -> LaunchError:
        if len(errors) == 1:
            return errors[0]
        text = "\n".join(str(error) for error in errors)
        return LaunchError(
            f"{len(errors)} of {len(self._attempts)} agents", f"did not start\n{text}"
        )

    def _handle(self, attempt: _Attempt) -> AgentHandle:
        fields, one = attempt.fields, attempt.one
        assert fields is not None
        assert attempt.process is not None
        assert attempt.process.stdout is not None
        attempt.process.stdout.close()
        return AgentHandle(
            one.agent,
            one.host.name,
            f"ipc://{one.forwarded}",
            attempt.process.pid,
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
        for attempt in self._attempts:
            status = None if attempt.process is None else attempt.process.poll()
            if status is not None:
                return attempt.failed("ended early", status)
        return None

    def all_ended(self) -> bool:
        processes = [attempt.process for attempt in self._attempts]
        return all(process is None or process.poll() is not None for process in processes)

    def stop(self, timeout_s: float) -> None:
        """First all are let go, then each is waited for."""
        for attempt in self._attempts:
            attempt.let_go()
        deadline = time.monotonic() + timeout_s
        for attempt in self._attempts:
            attempt.end(max(0.0, deadline - time.monotonic()))
