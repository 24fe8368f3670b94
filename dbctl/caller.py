"""`python -m dbctl caller SOCKET [NODE]`: what an ssh runs on a host to speak to the keeper there.

Rules of this file: light, since every run and every question waits for it; it decides nothing.

Theory of operation. It reads one line of JSON and passes it on to the keeper that listens on
SOCKET, with its own standard output and error. Where that starts an agent for a run, the agent
writes to those two by itself, and what comes on standard input is passed on to it: to the
controller, at the other end of the ssh, it is as if ssh had started the agent. The same line is the
agent's options. When standard input ends, or this process does, the agent's input ends. Any other
answer of the keeper is printed behind the word ANSWER.

That no keeper listens there it says only where it knows: another user may not look into the
keeper's directory, and another machine, which a name may mean by now, never had it. So where there
is none, NODE (`uname -n`, as the keeper said it) must be this machine's.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
from typing import Any

from dbctl.options_line import OPTIONS_BYTES_MAX
from dbctl.process import escape_line, leave_signals, log, one_line, read_line

GONE = 69  # no keeper there
ANSWER = "ANSWER "
NO_KEEPER = "no keeper listens there"


class Call:
    """One conversation. `status` is what this process ends with, once it is known."""

    def __init__(self, connection: socket.socket, request: bytes) -> None:
        self._connection = connection
        self._request = request
        self._data = b""
        self._poll = select.poll()
        self.status: int | None = None

    def hold(self) -> int:
        """Sends the request and stays until the keeper has no more to say."""
        n_sent = socket.send_fds(self._connection, [self._request], [1, 2])
        if n_sent < len(self._request):  # nothing is an error too, once it has been answered
            self._connection.sendall(self._request[n_sent:])
        self._poll.register(self._connection, select.POLLIN)
        while self.status is None:
            for fd, _ in self._poll.poll():
                if fd == 0:
                    self._pass_on()
                else:
                    self._hear()
        return self.status

    def _hear(self) -> None:
        try:
            chunk = self._connection.recv(65536)
        except OSError:
            chunk = b""
        self._data += chunk
        *lines, self._data = self._data.split(b"\n")
        for line in lines:
            self._take(line)
        if not chunk and self.status is None:
            log("caller", "the keeper has ended")
            self.status = GONE

    def _take(self, line: bytes) -> None:
        words: dict[str, Any] = json.loads(line)
        if "agent" in words:
            self._accepted()
        elif "said" in words:
            log("keeper", str(words["said"]))
        elif "error" in words:
            log("keeper", f"refused: {words['error']}")
            self.status = 1
        elif "ended" in words:
            status = int(words["ended"])
            self.status = status if status >= 0 else 128 - status
        else:
            sys.stdout.write(f"\n{ANSWER}{line.decode()}\n")
            sys.stdout.flush()
            self.status = 0

    def _accepted(self) -> None:
        leave_signals()  # from here on it is a part of a run
        os.dup2(2, 1)  # the agent's alone: its reader sees the end
        self._send(self._request)
        self._poll.register(0, select.POLLIN)

    def _pass_on(self) -> None:
        data = os.read(0, 65536)
        if data:
            self._send(data)
            return
        self._poll.unregister(0)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended: the keeper is about to say so
            self._connection.sendall(data)


def main(argv: list[str]) -> int:
    """0, the exit status of the run's agent, or 69 where there is no keeper."""
    if len(argv) not in (1, 2):
        log("caller", "expected the path of a keeper's socket, and its host's own name")
        return 1
    request = read_line(0, OPTIONS_BYTES_MAX)
    if request is None:
        log("caller", f"no request of at most {OPTIONS_BYTES_MAX} bytes on standard input")
        return 1
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(argv[0])
        except (FileNotFoundError, ConnectionRefusedError) as error:
            here = os.uname().nodename
            if argv[1:] not in ([], [here]):
                log("caller", escape_line(f"the keeper is on {argv[1]}, and this is {here}"))
                return 1
            log("caller", f"{NO_KEEPER}: {one_line(error)}")
            return GONE
        except OSError as error:
            log("caller", f"the keeper cannot be reached: {one_line(error)}")
            return 1
        try:
            return Call(connection, request + b"\n").hold()
        except OSError as error:
            log("caller", one_line(error))
            return 1
