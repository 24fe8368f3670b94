"""What an agent says before it takes orders: READY, and whom its host reaches.

Rules of this file: whoever started the agent reads its standard output, so nothing else is said
there; each wait has an end, and the end of standard input ends it too.

Theory of operation. READY carries what the host found when it looked at itself (dbctl/examine.py).
With several hosts a line follows on standard input: the addresses and ports at which the others
listen; the answer is the line REACHED. An agent takes orders once its last line is said, and its
socket is there before. Its port stays until the first order: then all others have tried it.
An agent that is only asked, or that has no work directory, stays until its input ends.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import time

from msgspec import convert, to_builtins

from dbctl import __version__
from dbctl.agent_options import Told
from dbctl.envelope import PROTOCOL_VERSION
from dbctl.examine import Examination, Question, reach
from dbctl.options_line import OPTIONS_BYTES_MAX
from dbctl.process import log, memory_domain, read_line

PATIENCE_S = 60.0  # with a controller that says no more: it waits 30 s for the slowest host


class Greeting:
    """`told` is None for an agent of this machine: nothing is asked."""

    def __init__(self, options: argparse.Namespace, told: Told | None) -> None:
        """Looks. ValueError: a question of another form."""
        self._name = options.name
        self._endpoint = f"ipc://{options.runtime}/{options.name}.sock"
        self._reach = told is not None and told.reach
        self._reached: dict[str, str] = {}
        self._only = told is not None and told.only
        self._examination = None
        if told is not None:
            self._examination = Examination(convert(told.question, Question))

    @property
    def may_start(self) -> bool:
        """Whether orders are to be taken."""
        looked = self._examination
        return not self._only and (looked is None or not looked.facts.workdir_fault)

    def hold_alone(self) -> None:
        """Answers all that is asked and stays until standard input ends."""
        if self.begin():
            self.end()
            deadline = time.monotonic() + PATIENCE_S
            while time.monotonic() < deadline and _is_there() and os.read(0, 65536):
                pass
        self.close()

    def begin(self) -> bool:
        """All but the last line, and the wait for what it answers; False: nobody is there."""
        if not self._reach:
            return True
        self._say_ready()
        line = read_line(0, OPTIONS_BYTES_MAX) if _is_there() else None
        if line is None:
            return False
        others = {name: (address, port) for name, address, port in json.loads(line)["reach"]}
        self._reached = reach(others)
        return True

    def end(self) -> None:
        """The last line. BrokenPipeError: nobody reads it."""
        if self._reach:
            _say("REACHED", self._reached)
        else:
            self._say_ready()
        os.dup2(2, 1)  # nothing else is ever said there: its reader sees the end
        log(self._name, f"ready, pid {os.getpid()}")

    def close(self) -> None:
        """The port: nobody comes to it any more."""
        if self._examination is not None:
            self._examination.close()

    def _say_ready(self) -> None:
        ready = {
            "name": self._name,
            "pid": os.getpid(),
            "endpoint": self._endpoint,
            "version": __version__,
            "protocol": PROTOCOL_VERSION,
            "python": sys.executable,
            "memory": memory_domain(),
        }
        if self._examination is not None:
            ready["facts"] = to_builtins(self._examination.facts)
        _say("READY", ready)


def _say(word: str, values: object) -> None:
    # What a login file printed before may have no end of line.
    sys.stdout.write(f"\n{word} {json.dumps(values)}\n")
    sys.stdout.flush()


def _is_there() -> bool:
    """Whether standard input brings something in time; its end is something."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    return bool(poll.poll(1000.0 * PATIENCE_S))
