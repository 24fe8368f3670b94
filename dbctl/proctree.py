"""The processes of this host as /proc shows them: whose children run, since when, how large.

Rules of this file: reading only; a process that ends meanwhile is left out, and where there is no
/proc nothing is known.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
ENDED = (b"Z", b"X")  # states of what is not reaped yet


class Process(NamedTuple):
    """`words`: its command; `age_s`: seconds since its start; `rss_bytes`: resident memory."""

    pid: int
    words: list[str]
    age_s: float
    rss_bytes: int


def children_of(parents: Collection[int]) -> dict[int, list[Process]]:
    """The living children of each process; dead ones that are not reaped are none."""
    found: dict[int, list[Process]] = {parent: [] for parent in parents}
    try:
        up_s = float((PROC / "uptime").read_bytes().split()[0])
        numbers = sorted(int(name) for name in os.listdir(PROC) if name.isdigit())
    except (OSError, ValueError):
        return found
    for pid in numbers:
        with contextlib.suppress(OSError):
            fields = _fields(pid)
            parent = int(fields[1])
            if parent not in found or fields[0] in ENDED:
                continue
            command = (PROC / str(pid) / "cmdline").read_bytes().decode("utf-8", "replace")
            age_s = up_s - int(fields[19]) / os.sysconf("SC_CLK_TCK")
            rss_bytes = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
            words = command.rstrip("\0").split("\0")  # a forked node's has more of them at its end
            found[parent].append(Process(pid, words, age_s, rss_bytes))
    return found


def start_of(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None where it has ended."""
    with contextlib.suppress(OSError):
        fields = _fields(pid)
        return None if fields[0] in ENDED else int(fields[19])
    return None


def _fields(pid: int) -> list[bytes]:
    """Of /proc/PID/stat (proc(5)), from the state on. OSError: there is no such process."""
    # The second field is the command's name in parentheses, which may hold anything.
    return (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
