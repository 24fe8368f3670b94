"""Hosts of their own on this machine: network namespaces, a bridge, and a real sshd in each.

Theory of operation. Each host is a network namespace, and in it a table of processes and mounts of
its own: its /tmp, /run and work directory are empty and nobody else's, but for what dbctl needs to
run there (the source, Python, the keys). Two hosts share no memory, no socket and no directory of a
run. The bridge is in a namespace too, and only `ssh` (a wrapper, first in PATH) goes
there: addresses here meet no others of this machine. All ends with the namespaces' first processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.harness import wait_until
from tests.cluster.sshd import CHEAP, ROOT, SSHD

NETWORK = "10.66.0"
WORKDIR = "/tmp/work"
INIT = """set -e
mount -t tmpfs none /run
mkdir -p /run/sshd
{save}
{hide}
{restore}
mkdir -p {workdir}
exec {sshd} -D -e -f {config}
"""
SSHD_CONFIG = f"""{CHEAP}
ListenAddress {{address}}:22
HostKey {{directory}}/host
AuthorizedKeysFile {{directory}}/user.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
"""
SSH_CONFIG = """
Host *
    User root
    IdentityFile {directory}/user
    IdentitiesOnly yes
    HostKeyAlias any
    UserKnownHostsFile {directory}/known
    GlobalKnownHostsFile /dev/null
"""


def call(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


class Hosts:
    """A context manager. `names` of hosts; `hidden` is a directory that none of them sees.

    `directory` is for keys and settings, which all of them see.
    """

    def __init__(self, directory: Path, names: tuple[str, ...], *, hidden: Path) -> None:
        self.directory = directory
        self.hidden = hidden
        self.address = {name: f"{NETWORK}.{i + 1}" for i, name in enumerate(names)}
        tag = secrets.token_hex(3)
        self.space = {name: f"dbctl-{tag}-{name}" for name in names}
        self.switch = f"dbctl-{tag}-switch"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Hosts:
        if not possible():
            assert not os.environ.get("CI"), "the gate installs openssh-server and iproute2"
            pytest.skip("needs root, sshd, and `ip netns`")
        try:
            self._files()
            self._network()
            for name in self.space:
                self._begin(name)
            wait_until(lambda: all(self._listens(name) for name in self.space))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes.values():
            process.kill()  # and with it all in its table of processes (--kill-child)
            process.wait(10)
        for space in [*self.space.values(), self.switch]:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    @property
    def path(self) -> str:
        """PATH with the wrapper first."""
        return f"{self.directory / 'bin'}{os.pathsep}{os.environ['PATH']}"

    @property
    def python(self) -> str:
        return str(self.directory / "python")

    def limit(self, rate: str) -> None:
        """All links, both ways, to `rate` as tc says it; nothing waits longer than 0.4 s."""
        bucket = ["root", "tbf", "rate", rate, "burst", "32kbit", "latency", "400ms"]
        for name, space in self.space.items():
            for where, device in ((space, "eth0"), (self.switch, f"to-{name}")):
                call("tc", "-n", where, "qdisc", "add", "dev", device, *bucket)

    def part(self, names: tuple[str, ...], *, apart: bool) -> None:
        """Whether these reach only the controller, and not each other."""
        for name in names:
            words = ["ip", "netns", "exec", self.switch, "bridge", "link", "set"]
            call(*words, "dev", f"to-{name}", "isolated", "on" if apart else "off")

    def sent_bytes(self, name: str) -> tuple[int, int]:
        """What has come to the host and gone from it, by its network card."""
        words = ["ip", "-n", self.space[name], "-s", "-j", "link", "show", "eth0"]
        counts = json.loads(call(*words))[0]["stats64"]
        return counts["rx"]["bytes"], counts["tx"]["bytes"]

    # -------------------------------------------------------------------------- what there is

    def listening(self, name: str) -> dict[str, str]:
        """Of each socket that listens on the host (`ss -ltnp`): its address, and whose it is."""
        rows = call("ip", "netns", "exec", self.space[name], "ss", "-Hltnp").splitlines()
        return {row.split()[3]: row.split()[5] for row in rows}

    def processes(self, name: str) -> dict[int, str]:
        """What runs there besides sshd itself: the command by process number."""
        found = {}
        for pid in map(int, call("ip", "netns", "pids", self.space[name]).split()):
            command = _command(pid)
            if command and not command.startswith((f"{SSHD} ", "unshare ", "sshd: ")):
                found[pid] = command
        return found

    def inside(self, name: str) -> list[str]:
        """What makes a command run as on the host: its network, processes and files."""
        return ["nsenter", f"--target={self._server(name)}", "--all", "--wd=/", "--"]

    def left(self, *, but: tuple[str, ...] = ()) -> list[str]:
        """Whatever a run may have left on its hosts, `but` what ends with one of these."""
        found = []
        for name in self.space:
            found += [f"{name}: {command}" for command in self.processes(name).values()]
            listening = self.listening(name)
            found += [f"{name}: {a} {who}" for a, who in listening.items() if "sshd" not in who]
            there = self.seen(name)
            found += [str(path) for path in (there / "tmp").glob("dbctl-*")]
            found += [str(path) for path in there.joinpath(*Path(WORKDIR).parts[1:]).iterdir()]
        return [what for what in found if not what.endswith(but)]

    def seen(self, name: str) -> Path:
        """The root directory as the host sees it."""
        return Path(f"/proc/{self._server(name)}/root")

    def _server(self, name: str) -> int:
        [server] = [
            pid
            for pid in map(int, call("ip", "netns", "pids", self.space[name]).split())
            if _command(pid).startswith((f"{SSHD} -D", f"sshd: {SSHD} -D"))
        ]
        return server

    def end(self, test: pytest.Item, *, but: tuple[str, ...] = ()) -> None:
        """Fails a test that passed and left something; the next one finds nothing either way."""
        try:
            # What a failed test leaves is its failure's doing (tests/conftest.py).
            left = [] if getattr(test, "failed_call", False) else self.left(but=but)
        finally:
            self.clear()
        assert left == [], f"left on hosts: {left}"

    def clear(self) -> None:
        """Takes what a test left, which would be the next one's failure too."""
        for name in self.space:
            for pid in self.processes(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_until(lambda name=name: not self.processes(name))
            there = self.seen(name)
            work = there.joinpath(*Path(WORKDIR).parts[1:])
            for path in [*(there / "tmp").glob("dbctl-*"), *work.iterdir()]:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    # -------------------------------------------------------------------------- how it is made

    def _files(self) -> None:
        for name in ("host", "user"):
            key = str(self.directory / name)
            call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
        key = " ".join((self.directory / "host.pub").read_text().split()[:2])
        (self.directory / "known").write_text(f"any {key}\n")
        (self.directory / "ssh_config").write_text(SSH_CONFIG.format(directory=self.directory))
        (self.directory / "bin").mkdir()
        ssh = f"{shutil.which('ssh')} -F {self.directory}/ssh_config"
        self._script("bin/ssh", f'exec ip netns exec {self.switch} {ssh} "$@"')
        self._script("python", f'PYTHONPATH={ROOT} exec {sys.executable} "$@"')

    def _script(self, name: str, text: str) -> None:
        path = self.directory / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def _network(self) -> None:
        call("ip", "netns", "add", self.switch)
        call("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        call("ip", "-n", self.switch, "addr", "add", f"{NETWORK}.254/24", "dev", "bridge")
        call("ip", "-n", self.switch, "link", "set", "bridge", "up")
        for name, space in self.space.items():
            call("ip", "netns", "add", space)
            pair = ["type", "veth", "peer", "name", "eth0", "netns", space]
            call("ip", "-n", self.switch, "link", "add", f"to-{name}", *pair)
            call("ip", "-n", self.switch, "link", "set", f"to-{name}", "master", "bridge", "up")
            call("ip", "-n", space, "addr", "add", f"{self.address[name]}/24", "dev", "eth0")
            call("ip", "-n", space, "link", "set", "lo", "up")
            call("ip", "-n", space, "link", "set", "eth0", "up")

    def _begin(self, name: str) -> None:
        config = self.directory / f"{name}.sshd"
        config.write_text(SSHD_CONFIG.format(address=self.address[name], directory=self.directory))
        script = self.directory / f"{name}.sh"
        script.write_text(self._init(config))
        unshare = "unshare --pid --mount --ipc --fork --mount-proc --kill-child /bin/sh"
        words = ["ip", "netns", "exec", self.space[name], *unshare.split(), str(script)]
        with open(self.directory / f"{name}.log", "wb") as log:
            self._processes[name] = subprocess.Popen(words, stderr=log, stdin=subprocess.DEVNULL)

    def _init(self, config: Path) -> str:
        """What the host's first process does: hides all, but for what is kept."""
        hidden = dict.fromkeys([Path("/tmp"), self.hidden])
        needed = dict.fromkeys([self.directory, ROOT, Path(sys.prefix), Path(sys.base_prefix)])
        kept = [path for path in needed if any(path.is_relative_to(hide) for hide in hidden)]
        return INIT.format(
            save="\n".join(
                f"mkdir -p /run/kept/{i}; mount --bind {path} /run/kept/{i}"
                for i, path in enumerate(kept)
            ),
            hide="\n".join(f"mkdir -p {path}; mount -t tmpfs none {path}" for path in hidden),
            restore="\n".join(
                f"mkdir -p {path}; mount --move /run/kept/{i} {path}" for i, path in enumerate(kept)
            ),
            workdir=WORKDIR,
            sshd=SSHD,
            config=config,
        )

    def _listens(self, name: str) -> bool:
        log = (self.directory / f"{name}.log").read_text()
        assert self._processes[name].poll() is None, log
        return "Server listening" in log


def possible() -> bool:
    """Whether this machine makes such hosts."""
    if os.getuid() != 0 or not Path(SSHD).exists() or not shutil.which("ip"):
        return False
    name = f"dbctl-{secrets.token_hex(3)}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made.returncode == 0


def _command(pid: int) -> str:
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return data.decode().replace("\0", " ").strip()
