"""The name that ssh connects to: what the user's own settings make of a destination.

Rules of this file: `ssh -G` opens no connection, and it has an end, as a `Match exec` of those
settings may not. Whatever goes wrong, the name in the destination is the answer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

from dbctl.experiment.specs import HostSpec

ASK_S = 5.0


def name_command(host: HostSpec) -> list[str]:
    """The words of an ssh that only says what its settings are."""
    return ["ssh", "-G", "--", host.destination]


def name_of(host: HostSpec) -> str:
    """A HostName of ~/.ssh/config, say; `host.reached_at` where ssh says nothing else."""
    said = b""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = _answer(name_command(host))
    for line in said.decode("utf-8", "replace").splitlines():
        key, _, value = line.partition(" ")
        if key == "hostname" and value.strip():
            return value.strip()
    return host.reached_at


def _answer(words: list[str]) -> bytes:
    """Standard output; TimeoutExpired, and all that it started is ended."""
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as ssh:
        try:
            return ssh.communicate(timeout=ASK_S)[0]
        except subprocess.TimeoutExpired:
            os.killpg(ssh.pid, signal.SIGKILL)
            raise
