"""A node before it knows which one it is: it imports, and forks one at each request.

Rules of this file: no link, no lock, nothing random and nothing computed before the fork. The only
threads are those that numpy's library made when it was loaded, which end and begin again by its own
handler of forks. What is asked and why the fork forks is in dbctl/forks.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time

from dbctl.process import EXIT_ORPHANED, FORKED, TEMPLATE, TEMPLATE_IDLE_S, end_with_parent

IMPORTED = ("dbctl.node.loop", "dbctl.node.build")
ORPHANED_S = 0.0002  # how late a node sees that the fork between has ended
_STAT_ARG_START = 48 - 3  # of the fields after the program's name (proc_pid_stat(5))


def wait_for_name() -> str | None:
    """Returns in each new node, with its name; None where nothing more is asked for.

    Standard input is the socket of requests before and the node's own after, as the two outputs.
    """
    agent = os.getppid()
    for module in IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a node would write to, and so copy, what all share
    line = socket.socket(fileno=0)
    while select.select([line], [], [], TEMPLATE_IDLE_S)[0]:
        name, files, _, _ = socket.recv_fds(line, len(TEMPLATE), 2)
        if not name:
            break
        ours, theirs = os.pipe()
        number = _fork_away() if len(files) == 2 else -1
        if number == 0:
            os.close(ours)
            line.detach()
            _end_with(agent)
            _become(name, files)
            os.write(theirs, FORKED.pack(os.getpid()))
            os.close(theirs)
            return name.decode()
        for file in (theirs, *files):
            os.close(file)
        word = os.read(ours, FORKED.size) or FORKED.pack(0)
        os.close(ours)
        if number > 0:
            os.waitpid(number, 0)
        line.send(word)  # by now the node leads its session, and is the agent's child
    return None


def _fork_away() -> int:
    """Forks a grandchild: here the number of the fork between, which ends; in the new node 0.

    -1: there is no room for another process.
    """
    try:
        middle = os.fork()
    except OSError:
        return -1
    if middle != 0:
        return middle
    between = os.getpid()
    with contextlib.suppress(OSError):
        if os.fork() == 0:
            while os.getppid() == between:
                time.sleep(ORPHANED_S)
            return 0
    os._exit(0)


def _end_with(agent: int) -> None:
    """No fork inherits this wish, and it is of whoever is the parent at the time."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() != agent:
        os._exit(EXIT_ORPHANED)


def _become(name: bytes, files: list[int]) -> None:
    os.setsid()
    spec, log = files
    os.dup2(spec, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(spec)
    os.close(log)
    sys.argv[-1] = name.decode()
    with contextlib.suppress(OSError, ValueError):
        _retitle(name)


def _retitle(name: bytes) -> None:
    """Puts the name where the kernel reads this process's command line."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = map(int, fields[_STAT_ARG_START : _STAT_ARG_START + 2])
    at = ctypes.string_at(start, end - start).rindex(TEMPLATE.encode())
    ctypes.memmove(start + at, name.ljust(len(TEMPLATE), b"\0"), len(TEMPLATE))
