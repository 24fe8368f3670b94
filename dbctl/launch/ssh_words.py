"""What is said to ssh and to a host, and what is made of what they answer: text, nothing more.

Rules of this file: pure; nothing is started, and nothing is read but where this program lies. The
system's ssh with the user's own settings; host keys are never accepted unseen. Nothing of the
user's goes through a shell here; there, one command of quoted words, and all values as JSON on
standard input. A golden file holds every word (`tests/golden/ssh.txt`).
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import dbctl
from dbctl.experiment.specs import HostSpec

SSH_FAILED = 255
NO_PROGRAM = (126, 127)
OPTIONS = (
    "BatchMode=yes",
    "ControlMaster=no",
    "ControlPath=none",
    "ConnectTimeout=10",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    "ExitOnForwardFailure=yes",
)
_NOT_FORWARDED = re.compile(r"channel [0-9]+: open failed")


@dataclass(frozen=True, kw_only=True)
class Errand:
    """One agent to be brought up: `runtime` is its directory there, `forwarded` its socket here."""

    agent: str
    host: HostSpec
    runtime: str
    forwarded: str

    @property
    def socket(self) -> str:
        return f"{self.runtime}/{self.agent}.sock"


def errand(agent: str, host: HostSpec, *, runtime: str, token: str) -> Errand:
    """`runtime` is the controller's own directory; `token` names the one there, unknown before."""
    return Errand(
        agent=agent,
        host=host,
        runtime=f"/tmp/dbctl-{token}-{agent.rpartition('-')[2]}",
        forwarded=f"{runtime}/{agent}.sock",
    )


def ssh_command(one: Errand) -> list[str]:
    """The words of the ssh that brings up the agent."""
    return [
        "ssh",
        "-T",
        *(word for option in OPTIONS for word in ("-o", option)),
        "-L",
        f"{one.forwarded}:{one.socket}",
        "--",
        one.host.destination,
        shlex.join([_python(one.host), "-P", "-m", "dbctl", "agent", "--stdin"]),
    ]


def _python(host: HostSpec) -> str:
    """No shell expands ~ in a quoted word; commands begin in the home directory anyway."""
    return f"./{host.python[2:]}" if host.python.startswith("~/") else host.python


def orders(one: Errand, *, run: str, lease_s: float) -> str:
    """What the agent reads on standard input, one line of JSON."""
    values = {
        "runtime": one.runtime,
        "run": run,
        "name": one.agent,
        "workdir": one.host.workdir,
        "lease": lease_s,
        "env": dict(variable.split("=", 1) for variable in one.host.env),
    }
    return json.dumps(values) + "\n"


def cure(host: HostSpec, source: Path | None = None) -> str:
    """The command that brings this version of dbctl to the host, as one types it here.

    `source`: the checkout that this dbctl runs from; else the wheel that it came from is asked for.
    No name is looked up in an index: whose package that would be is not known here.
    """
    wheel = f"dbctl-{dbctl.__version__}-py3-none-any.whl"
    install = shlex.join([_python(host), "-m", "pip", "install", f"./{wheel}"])
    send = f"{shlex.join(['ssh', '--', host.destination, f'cat > {wheel} && {install}'])} < {wheel}"
    if source is None:
        return send
    build = shlex.join(["python3", "-m", "pip", "wheel", "--no-deps", "-w", ".", str(source)])
    return f"{build} && {send}"


def checkout() -> Path | None:
    """The source tree that this process runs from, if it does."""
    tree = Path(dbctl.__file__).resolve().parent.parent
    return tree if (tree / "pyproject.toml").exists() else None


def diagnose(host: HostSpec, status: int | None, said: str) -> str:
    """What is wrong and what to do, from the exit status and the words; "" where only they tell."""
    python = host.python
    if "No module named dbctl" in said:
        return f"dbctl is not there for {python}: run `{cure(host, checkout())}`"
    if "install the same version" in said:
        return f"run `{cure(host, checkout())}`"
    if "nknown option: -P" in said or "nknown option -P" in said:
        return f"{python} there is older than 3.11: give the host another `python`"
    if status in NO_PROGRAM:
        return f"there is no {python}: install Python 3.11 or later, or give the host its `python`"
    if "HOST IDENTIFICATION HAS CHANGED" in said or "Host key verification failed" in said:
        return "its host key is not the known one: find out why, then mend known_hosts"
    if _NOT_FORWARDED.search(said):
        return "its sshd forwards no sockets: set AllowStreamLocalForwarding to yes there"
    if "Permission denied" in said:
        return f"`ssh {shlex.quote(host.destination)}` must work without a question: give it a key"
    return ""
