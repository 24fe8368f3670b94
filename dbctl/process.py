"""What every process of a run does whatever its part: its log, its input, its parent's end.

Rules of this file: no import that costs time (every process loads it before everything else); a log
line goes to standard error, which whoever started the process sends to logs/NODE.log. Text
that comes from a file, a peer or another host is escaped before a person sees it: a control
character in a log must not move the cursor of the terminal that shows it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import stat
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# What a node ends with; the agent reports it to the controller.
EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_FENCED = 4  # its lease ran out
EXIT_ORPHANED = 5  # its agent is gone

# The spec on a node's standard input: what a pipe may be made to hold, so that writing never waits.
SPEC_BYTES_MAX = 1 << 20

# The name of a node that only forks others (dbctl/forks.py): as long as the longest name that is
# forked, since a node writes its own over it, for `ps`.
TEMPLATE = "template".ljust(64, ".")
TEMPLATE_IDLE_S = 5.0  # it ends when it was not asked for so long
FORKED = struct.Struct("i")  # its answer: the new node's number, 0 where it could not fork

# Who starts a process, or asks it, says at once what it wants.
LINE_LIMIT_S = 60.0

PR_SET_PDEATHSIG = 1

TAIL_LINES = 20
TAIL_BYTES = 4096

# Wall time is for people only and may jump: take it once, go on with the monotonic clock.
_WALL_S = time.time() - time.monotonic()


def log(node: str, text: str) -> None:
    """One event of `node`, with the local time to a millisecond; never raises for a full disk."""
    now_s = _WALL_S + time.monotonic()
    stamp = time.strftime("%H:%M:%S", time.localtime(now_s))
    try:
        sys.stderr.write(f"{stamp}.{int(now_s * 1000) % 1000:03d} {node} {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError):  # the disk is full or the reader went: the run matters more
        pass


def escape(text: str) -> str:
    """`text` with every character that is neither printable nor a newline as its escape."""
    return "\n".join(map(escape_line, text.expandtabs(4).split("\n")))


def escape_line(text: str) -> str:
    """`text` in one line: every character that is not printable as its escape."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text
    )


def one_line(error: BaseException, limit: int = 500) -> str:
    """An exception as one escaped line of at most `limit` characters."""
    text = " ".join(f"{error}".split())
    name = type(error).__name__
    return escape(f"{name}: {text}" if text else name)[:limit]


def tail(path: str | Path, start: int = 0) -> str:
    """The last lines (20, 4 KiB) of the log `path` from byte `start` on, escaped; "" if none."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            first = max(start, size - TAIL_BYTES)
            file.seek(first)
            # Bounded: what another process appends meanwhile is not read.
            data = file.read(TAIL_BYTES)
    except OSError:
        return ""
    text = data.decode("utf-8", "backslashreplace").replace("\r\n", "\n")  # ssh ends lines so
    if first > start and "\n" in text:
        text = text.split("\n", 1)[1]  # the first line is likely cut
    # Escapes are longer than what they stand for: keep the limit after escaping too.
    lines = escape(text).rstrip("\n").split("\n")[-TAIL_LINES:]
    return "\n".join(lines)[-TAIL_BYTES:]


def beat_s(lease_s: float) -> float:
    """Seconds between two beats: one, or less under a short lease.

    A node's lease is as old as two beats, its own and the agent's: a few may be lost.
    """
    return min(1.0, lease_s / 6.0)


def read_line(fd: int, limit: int, *, limit_s: float = LINE_LIMIT_S) -> bytes | None:
    """One line of at most `limit` bytes, without its newline; None where the input ends before it,
    or where it is not whole after `limit_s`.

    Unbuffered: what follows the line stays in the pipe, whose end is watched for later.
    """
    data = bytearray()
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    deadline = time.monotonic() + limit_s
    while not data.endswith(b"\n"):
        if not poll.poll(1000.0 * max(0.0, deadline - time.monotonic())):
            return None
        chunk = os.read(fd, 65536)
        if not chunk or len(data) + len(chunk) > limit:
            return None
        data += chunk
    return bytes(data[:-1])


def how_ended(status: int) -> str:
    """In words, of a child: an exit status, or minus a signal."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def boot_id() -> str:
    """Of this start of the kernel; "" where it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def memory_domain() -> str:
    """Equal in two processes that can open each other's memory by process number; "": nobody can.

    Same start of the same kernel, same table of processes, same user.
    """
    boot = boot_id()
    with contextlib.suppress(OSError):
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}" if boot else ""
    return ""


def end_with_parent(signal_number: int) -> None:
    """Asks Linux for `signal_number` when the thread that started this process ends."""
    if sys.platform.startswith("linux"):
        prctl(PR_SET_PDEATHSIG, int(signal_number))


def prctl(option: int, value: int) -> int:
    """Linux's; 0 where it has done so."""
    import ctypes

    status: int = ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    return status


def raise_descriptor_limit() -> int:
    """Lets this process, and what it starts, open as many files as the hard limit allows.

    Returns the limit that holds now (RLIM_INFINITY: none).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS allows less than its hard limit says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


# What asks a run to end. Whoever sends one to every process of a run means the run: it is the
# controller's to answer, with a final checkpoint that needs all the others.
RUN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def leave_signals() -> None:
    """Leaves RUN_SIGNALS to the controller: here, and in whatever is started from here."""
    for number in RUN_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, RUN_SIGNALS)  # as the launcher left them


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """RUN_SIGNALS wait meanwhile; in what is started, until it calls `leave_signals`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, RUN_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def clear_runtime(runtime: str | Path) -> None:
    """Removes sockets and pipes in a private directory, and it if nothing else is in it."""
    try:
        with os.scandir(runtime) as entries:
            found = list(entries)
        for entry in found:
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
                os.unlink(entry.path)
        os.rmdir(runtime)
    except OSError:
        pass  # gone already, or somebody's files are in it: not ours to remove
