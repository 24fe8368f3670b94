"""A real sshd on loopback, started by a test: its own keys, ports and settings, in a directory.

It listens on several ports, each with its own temper (`PORTS`). The user's ~/.ssh plays no
part: a wrapper named `ssh`, first in PATH, gives the system's ssh a configuration of the test. Nor
does its ~/.bashrc, which bash reads below an sshd; and keys are agreed on in the cheapest way that
ssh has: hundreds of connections wait for that, and dbctl sees nothing of it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.cluster.harness import wait_until

ROOT = Path(__file__).parent.parent.parent
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
PORTS = ("plain", "noisy", "failing", "password", "narrow")
CHEAP = """
KexAlgorithms curve25519-sha256
SetEnv SHLVL=1
"""  # of an sshd's settings; a bash that is not the first reads no ~/.bashrc

NOISE = """#!/bin/sh
# What a login file may print, before the command that was asked for
echo 'Welcome to this machine'; printf 'READY? no\\n\\033[2J' ; echo 'mail: none' >&2
exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"
"""
FAILURE = """#!/bin/sh
echo 'some/bashrc: line 3: conda: command not found' >&2
exit 1
"""


NOTED = "agents"  # beside the wrapper's directory
WRAPPER = """#!/bin/sh
# Notes which directories agents are to make
for word; do
    case "$word" in *:/tmp/dbctl-*) echo "$word" >> {noted} ;; esac
done
exec {ssh} -F {config} "$@"
"""


def agents_left() -> list[str]:
    """Directories of agents that the wrapper in PATH brought up: others may run on this machine."""
    noted = Path(shutil.which("ssh") or "").parent.parent / NOTED
    lines = noted.read_text().splitlines() if noted.exists() else []
    made = {Path(line.rpartition(":")[2]).parent for line in lines}
    return sorted(str(path) for path in made if path.exists())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Sshd:
    """A context manager. Host aliases of its ssh configuration: the names in PORTS, and

    `refused` (a port where nobody listens), `changed` (whose host key is not the known one),
    `unknown` (a host key that nobody has seen) and `lost` (a name that has no address).
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ports = {name: free_port() for name in PORTS}
        self.python = directory / "python"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Sshd:
        if not Path(SSHD).exists() or os.getuid() != 0:
            assert not os.environ.get("CI"), "the gate installs openssh-server"
            pytest.skip("needs sshd, and root to start it")
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        for name in ("host", "user", "other"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self._path(name)]
            subprocess.run(command, check=True, timeout=20)
        shutil.copy(self._path("user.pub"), self._path("authorized"))
        self._script("noise", NOISE)
        self._script("failure", FAILURE)
        self.wrap("python", environment={"PYTHONPATH": str(ROOT)})
        self._write("sshd_config", self._sshd_config())
        self._write("ssh_config", self._ssh_config())
        self._known_hosts()
        (self.directory / "bin").mkdir()
        ssh = shutil.which("ssh")
        config = self._path("ssh_config")
        self._script("bin/ssh", WRAPPER.format(ssh=ssh, config=config, noted=self._path(NOTED)))
        with open(self._path("sshd.log"), "wb") as log:
            words = [SSHD, "-D", "-e", "-f", self._path("sshd_config")]
            self._process = subprocess.Popen(words, stderr=log, stdin=subprocess.DEVNULL)
        wait_until(self._listens)
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10)

    @property
    def path(self) -> str:
        """PATH with the wrapper first."""
        return f"{self.directory / 'bin'}{os.pathsep}{os.environ['PATH']}"

    def wrap(self, name: str, *flags: str, environment: Mapping[str, str]) -> str:
        """A Python of that name, with flags and environment of its own; its path."""
        given = " ".join(f"{key}='{value}'" for key, value in environment.items())
        program = f'#!/bin/sh\n{given} exec {sys.executable} {" ".join(flags)} "$@"\n'
        self._script(name, program)
        return self._path(name)

    def apart(self, name: str, *hidden: Path) -> str:
        """A Python with process numbers of its own, to which directories `hidden` are empty."""
        mounts = "; ".join(f"mount -t tmpfs none {path}" for path in hidden)
        inner = f'{mounts}; exec {self.python} "$@"'
        self._write(f"{name}.sh", inner)
        unshare = "unshare --pid --mount --fork --mount-proc --kill-child"
        self._script(name, f'#!/bin/sh\nexec {unshare} /bin/sh {self._path(name)}.sh "$@"\n')
        return self._path(name)

    def _path(self, name: str) -> str:
        return str(self.directory / name)

    def _write(self, name: str, text: str) -> None:
        Path(self._path(name)).write_text(text)

    def _script(self, name: str, text: str) -> None:
        self._write(name, text)
        os.chmod(self._path(name), 0o755)

    def _listens(self) -> bool:
        assert self._process is not None
        log = Path(self._path("sshd.log")).read_text()
        assert self._process.poll() is None, log
        return log.count("Server listening") >= len(PORTS)

    def _sshd_config(self) -> str:
        listen = "\n".join(f"ListenAddress 127.0.0.1:{port}" for port in self.ports.values())
        return f"""
{listen}
HostKey {self._path("host")}
AuthorizedKeysFile {self._path("authorized")}
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
MaxStartups 2:100:4
{CHEAP}
Match LocalPort {self.ports["noisy"]}
    ForceCommand {self._path("noise")}
Match LocalPort {self.ports["failing"]}
    ForceCommand {self._path("failure")}
Match LocalPort {self.ports["password"]}
    PubkeyAuthentication no
    PasswordAuthentication yes
Match LocalPort {self.ports["narrow"]}
    AllowStreamLocalForwarding no
"""

    def _ssh_config(self) -> str:
        aliases = {
            **self.ports,
            "refused": free_port(),
            "changed": self.ports["plain"],
            "unknown": self.ports["plain"],
        }
        hosts = "\n".join(
            f"Host {name}\n    Port {port}\n    HostKeyAlias {name}"
            for name, port in aliases.items()
        )
        return f"""{hosts}
Host lost
    HostName no.such.host.invalid
Host *
    HostName 127.0.0.1
    User root
    IdentityFile {self._path("user")}
    IdentitiesOnly yes
    UserKnownHostsFile {self._path("known")}
    GlobalKnownHostsFile /dev/null
"""

    def _known_hosts(self) -> None:
        right, wrong = (
            " ".join(Path(self._path(f"{name}.pub")).read_text().split()[:2])
            for name in ("host", "other")
        )
        lines = [f"{name} {right}" for name in PORTS] + [f"changed {wrong}"]
        self._write("known", "\n".join(lines) + "\n")
