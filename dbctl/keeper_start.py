"""How a keeper begins, where it lives, and what goes when it ends.

Rules of this file: what can go wrong does so before anybody was told that all is well, and leaves
nothing. Whose directory it is nobody else chooses: `mkdtemp` makes it, and only what a keeper makes
in it is ever removed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dbctl import __version__
from dbctl.envelope import PROTOCOL_VERSION
from dbctl.options_line import read_options

PARENT = "/tmp"  # short: an address of a socket holds 107 bytes
PREFIX = "dbctl-keeper-"
SOCKET = "control.sock"
LOG = "keeper.log"
IDLE_LIMIT_S = 12 * 3600.0
BEGIN_LIMIT_S = 60.0  # from its directory to its socket
BACKLOG = 128


def told() -> argparse.Namespace:
    """The options, and the work directory is there. ValueError, OSError: it cannot begin."""
    options = read_options(_told)
    options.workdir.mkdir(parents=True, exist_ok=True)
    return options


def _told(values: dict[str, Any]) -> argparse.Namespace:
    return argparse.Namespace(
        cluster=str(values["cluster"]),
        idle=float(values.get("idle", IDLE_LIMIT_S)),
        workdir=Path(values["workdir"]).expanduser(),
    )


def listen() -> tuple[socket.socket, str]:
    """A listening socket, and its new private directory in PARENT.

    It gets its name when it listens: a socket of that name which refuses is a dead keeper's.
    """
    directory = tempfile.mkdtemp(prefix=PREFIX, dir=PARENT)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"{directory}/new.sock")
        listener.listen(BACKLOG)
        os.rename(f"{directory}/new.sock", f"{directory}/{SOCKET}")
    except BaseException:  # a signal too
        listener.close()
        remove(directory)
        raise
    listener.setblocking(False)
    return listener, directory


def remove(directory: str) -> None:
    """A keeper's directory, unless something else is in it."""
    for name in ("new.sock", SOCKET, LOG):
        with contextlib.suppress(OSError):
            os.unlink(f"{directory}/{name}")
    with contextlib.suppress(OSError):
        os.rmdir(directory)


def sweep() -> None:
    """Removes what this user's killed keepers left: directories whose socket nobody listens on, or
    without one for longer than a beginning takes.
    """
    for directory in Path(PARENT).glob(f"{PREFIX}*"):
        try:
            found = directory.stat(follow_symlinks=False)
            if found.st_uid != os.getuid():
                continue
            begins = time.time() - found.st_mtime < BEGIN_LIMIT_S
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(1.0)
                probe.connect(str(directory / SOCKET))
        except ConnectionRefusedError:
            remove(str(directory))
        except FileNotFoundError:
            if not begins:
                remove(str(directory))
        except OSError:
            continue


def leave_parent() -> None:
    """Leaves the ssh that started it: a session of its own, no terminal. It returns in who stays.

    The others end here: what was made, and what a signal does to it, is not theirs any more.
    """
    if os.fork():
        os.wait()
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)


def say_stays(directory: str) -> None:
    """The last word to who started it, whose pipes are let go. BrokenPipeError: nobody heard it."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    log_file = os.open(f"{directory}/{LOG}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    stays = {"pid": os.getpid(), "node": os.uname().nodename}
    sys.stdout.write(f"STAYS {json.dumps(stays)}\n")
    sys.stdout.flush()
    for old, new in ((nowhere, 0), (nowhere, 1), (log_file, 2)):
        os.dup2(old, new)
    os.close(nowhere)
    os.close(log_file)


def say_ready(directory: str) -> None:
    """The one line that its launcher waits for."""
    ready = {
        "endpoint": f"{directory}/{SOCKET}",
        "version": __version__,
        "protocol": PROTOCOL_VERSION,
        "python": sys.executable,
    }
    # What a login file printed before may have no end of line.
    sys.stdout.write(f"\nREADY {json.dumps(ready)}\n")
    sys.stdout.flush()
