"""What is said to ssh and to a host, and what is made of what they answer: text, nothing more.

Rules of this file: pure; nothing is started, and nothing is read but where this program lies. The
system's ssh with the user's own settings; host keys are never accepted unseen. Nothing of the
user's goes through a shell here; there, one command of quoted words, and all values as JSON on
standard input. A golden file holds every word (`tests/golden/ssh.txt`).
"""

from __future__ import annotations

import json
import random
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import dbctl
from dbctl.agent_options import LET_GO
from dbctl.caller import NO_KEEPER
from dbctl.experiment.specs import HostSpec
from dbctl.keeper_runs import STOPPED

SSH_FAILED = 255
NO_PROGRAM = (126, 127)
CLUSTER_STOPPED = "its cluster was stopped"
# What a host is told to be at fault at that ssh did not get as far as.
NOT_REACHED = ("name", "network", "port", "host key", "ssh")
# Of this machine, not of a host: (what is wrong with ssh, what to do).
NO_SSH = (
    "could not be started: it is not found in PATH here",
    "install OpenSSH's client, or put the directory that it is in into PATH",
)
RETRY_FIRST_S = 0.25
RETRY_MOST_S = 4.0
OPTIONS = (
    "BatchMode=yes",
    "ControlMaster=no",
    "ControlPath=none",
    "ConnectTimeout=10",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    "ExitOnForwardFailure=yes",
)
# What ssh says where the server closed the connection before it named itself.
_CLOSED_EARLY = re.compile(r"kex_exchange_identification|Exceeded MaxStartups")
_NO_MODULE = re.compile(r"No module named '?([a-z_]+)")
_NO_WAY = re.compile(r"(Connection|Operation) timed out|No route to host|Network is unreachable")
_NOT_FORWARDED = re.compile(r"channel [0-9]+: open failed")


@dataclass(frozen=True, kw_only=True)
class Errand:
    """One agent to be brought up: `runtime` is its directory there, `forwarded` its socket here.

    `keeper` is the control socket of the standing agent that starts it there; "": ssh does.
    """

    agent: str
    host: HostSpec
    runtime: str
    forwarded: str
    keeper: str = ""

    @property
    def socket(self) -> str:
        return f"{self.runtime}/{self.agent}.sock"


def errand(agent: str, host: HostSpec, *, runtime: str, token: str, keeper: str = "") -> Errand:
    """`runtime` is the controller's own directory; `token` names the one there, unknown before."""
    return Errand(
        agent=agent,
        host=host,
        runtime=f"/tmp/dbctl-{token}-{agent.rpartition('-')[2]}",
        forwarded=f"{runtime}/{agent}.sock",
        keeper=keeper,
    )


def ssh_command(one: Errand) -> list[str]:
    """The words of the ssh that brings up the agent."""
    part = ["caller", one.keeper] if one.keeper else ["agent", "--stdin"]
    return dbctl_command(one.host, *part, forward=f"{one.forwarded}:{one.socket}")


def dbctl_command(host: HostSpec, *part: str, forward: str = "") -> list[str]:
    """The words of an ssh that runs one of dbctl's own processes on a host."""
    more = ["-L", forward] if forward else []
    return _ssh(host, more, [_python(host), "-P", "-m", "dbctl", *part])


def bootstrap_command(host: HostSpec) -> list[str]:
    """The words of the ssh that brings dbctl to a host: a program that is text, and nobody's."""
    program = Path(__file__).with_name("installer.py").read_text(encoding="utf-8")
    return _ssh(host, [], [_python(host), "-I", "-c", program])


def _ssh(host: HostSpec, more: list[str], command: list[str]) -> list[str]:
    """One command there, of quoted words."""
    options = [word for option in OPTIONS for word in ("-o", option)]
    return ["ssh", "-T", *options, *more, "--", host.destination, shlex.join(command)]


def _python(host: HostSpec) -> str:
    """No shell expands ~ in a quoted word; commands begin in the home directory anyway."""
    return f"./{host.python[2:]}" if host.python.startswith("~/") else host.python


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What agents are asked about their hosts: `questions` by agent (dbctl/examine.py).

    `only`: they are asked, and start nothing.
    """

    questions: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    only: bool = False

    def of(self, agent: str) -> Mapping[str, object]:
        return self.questions.get(agent, {})

    @property
    def reach(self) -> bool:
        """Whether each is to say which of the others it reaches."""
        return any(question.get("address") for question in self.questions.values())


NOTHING = Asked()


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The cluster that a run is on: the control sockets of its keepers, by host.

    `table`: what they tell of the run when they are asked (`dbctl status`).
    """

    sockets: Mapping[str, str] = field(default_factory=dict)
    table: Mapping[str, str] = field(default_factory=dict)

    def keeper(self, host: HostSpec) -> str:
        return self.sockets[host.name] if self.sockets else ""


NOWHERE = Standing()


def orders(
    one: Errand, asked: Asked, *, run: str, lease_s: float, table: Mapping[str, str] | None = None
) -> str:
    """What the agent, or the keeper before it, reads on standard input: one line of JSON."""
    values = {
        "runtime": one.runtime,
        "run": run,
        "name": one.agent,
        "workdir": one.host.workdir,
        "lease": lease_s,
        "env": dict(variable.split("=", 1) for variable in one.host.env),
        "examine": asked.of(one.agent),
        "reach": asked.reach,
        "only": asked.only,
    }
    if one.keeper:
        values |= {"do": "run", "table": dict(table or {})}
    return json.dumps(values) + "\n"


def others(ports: Mapping[str, tuple[str, int]], agent: str) -> str:
    """The second line, where hosts are to reach each other: (address, port) of the others."""
    rows = [(name, *where) for name, where in ports.items() if name != agent]
    return json.dumps({"reach": rows}) + "\n"


def how_to_bring(host: HostSpec, source: Path | None) -> str:
    """What to do about a host without this version of dbctl.

    `source`: the checkout that this dbctl runs from. Where it was installed there is no wheel at
    hand, and no name is looked up in an index: whose package that would be is not known here.
    """
    do = "let --bootstrap bring it"
    return do if source is None else f"{do}, or run `{install_command(host, source)}`"


def install_command(host: HostSpec, source: Path) -> str:
    """The command that brings the dbctl of a checkout to the host, as one types it here."""
    wheel = f"dbctl-{dbctl.__version__}-py3-none-any.whl"
    install = shlex.join([_python(host), "-m", "pip", "install", f"./{wheel}"])
    send = f"{shlex.join(['ssh', '--', host.destination, f'cat > {wheel} && {install}'])} < {wheel}"
    build = shlex.join(["python3", "-m", "pip", "wheel", "--no-deps", "-w", ".", str(source)])
    return f"{build} && {send}"


def checkout() -> Path | None:
    """The source tree that this process runs from, if it does."""
    tree = Path(dbctl.__file__).resolve().parent.parent
    return tree if (tree / "pyproject.toml").exists() else None


def closed_early(said: str) -> bool:
    """Whether a server took no more beginners: ssh is to be tried again."""
    return bool(_CLOSED_EARLY.search(said)) and "Connection refused" not in said


def again_after_s(n_tries: int) -> float:
    """Seconds until the next try, longer each time and nobody's equal."""
    pause_s = min(RETRY_MOST_S, RETRY_FIRST_S * 2.0 ** (n_tries - 1))
    return pause_s * random.uniform(0.5, 1.5)


class Diagnosis(NamedTuple):
    """What of a host is at fault; what is wrong and what to do, "" where only its words tell."""

    about: str
    fault: str
    cure: str


def diagnose(
    host: HostSpec, status: int | None, said: str, *, of_cluster: bool = False
) -> Diagnosis:
    """From the exit status and the words; a cure of "" where only they tell.

    `of_cluster`: a keeper was to be spoken to; dbctl is brought there only when it is launched.
    """
    python = host.python
    anew = "stop that cluster (`dbctl stop-cluster`) and launch it again"
    bring = f"{anew} with --bootstrap" if of_cluster else how_to_bring(host, checkout())
    if STOPPED in said:
        return Diagnosis("cluster", CLUSTER_STOPPED, "")
    if NO_KEEPER in said:
        return Diagnosis("cluster", "its standing agent is gone", anew)
    if "No module named dbctl" in said:
        return Diagnosis("dbctl", f"dbctl is not there for {python}", bring)
    if missing := _NO_MODULE.search(said):
        return Diagnosis("dbctl", f"{missing[1]}, which dbctl needs, is not there", bring)
    if "install the same version" in said:
        return Diagnosis("dbctl", "", bring)
    if "nknown option: -P" in said or "nknown option -P" in said:
        fault = f"{python} there is older than 3.11"
        return Diagnosis("python", fault, "give the host another `python`")
    if status in NO_PROGRAM:
        do = "install Python 3.11 or later, or give the host its `python`"
        return Diagnosis("python", f"there is no {python}", do)
    if LET_GO in said:  # the controller lives: it asks for the reason
        return Diagnosis("agent", "its connection was cut there", "")
    # An agent that nobody could reach ends well, of its lease. One that ends otherwise takes the
    # forwarded channels along: then they are not the cause.
    if status == SSH_FAILED or (status in (None, 0) and _NOT_FORWARDED.search(said)):
        return _of_ssh(host, said)
    if status is not None:
        look = shlex.join([_python(host), "-P", "-m", "dbctl", "--version"])
        do = f"make `{shlex.join(['ssh', '--', host.destination, look])}` work"
        return Diagnosis("agent", "", do)
    return Diagnosis("agent", "", "")


def _of_ssh(host: HostSpec, said: str) -> Diagnosis:
    """Where ssh itself did not come through."""
    log_in = f"`ssh {shlex.quote(host.destination)}`"
    if "HOST IDENTIFICATION HAS CHANGED" in said or "REVOKED HOST KEY" in said:
        do = "find out why, then mend known_hosts"
        return Diagnosis("host key", "its host key is not the known one", do)
    if "Host key verification failed" in said:
        do = f"run {log_in} once and compare the fingerprint that it shows with the host's own"
        return Diagnosis("host key", "its host key is not known here yet", do)
    if _NOT_FORWARDED.search(said):
        do = "set AllowStreamLocalForwarding to yes there"
        return Diagnosis("ssh", "its sshd forwards no sockets", do)
    if "Permission denied" in said:
        do = f"{log_in} must work without a question: give it a key"
        return Diagnosis("ssh", "it does not let this user in", do)
    if "Could not resolve hostname" in said:
        do = "mend `ssh` of the host, or give that name a HostName in ~/.ssh/config"
        return Diagnosis("name", "ssh knows no address of that name", do)
    if "Connection refused" in said:
        do = "start sshd there, or give its port: `ssh: ssh://USER@HOST:PORT`"
        return Diagnosis("port", "no sshd listens at that port", do)
    if _NO_WAY.search(said):
        do = f"see that it is up and that no firewall is between: {log_in} must work"
        return Diagnosis("network", "it does not answer", do)
    return Diagnosis("ssh", "", f"make {log_in} work, or mend `ssh` of the host")
