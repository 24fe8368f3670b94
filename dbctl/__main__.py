"""Where every process of dbctl starts: `dbctl ...`, `python -m dbctl node ...`, `... agent`.

Rules of this file: a node, an agent, a keeper and its caller are told apart before click is
imported, and nothing heavy is imported here: what BLAS may use of a machine is set by the node
before numpy loads. A command that is told to end while it still imports has the exit statuses of
one that runs: 130, 75.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C. Of its own type: after a plain one that passed an `exec` of text (namedtuple has one)
    `python -m` ends by the signal, although it was caught and another status given.
    """


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted


def _stop(number: int, frame: FrameType | None) -> None:
    sys.stderr.write("dbctl: stopped\n")
    sys.exit(75)


def _heed_signals() -> None:
    """Until a run has handlers of its own (dbctl/run/signals.py); what is ignored stays ignored."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt if number == signal.SIGINT else _stop)


def main() -> int:
    """Run what the command line says; the exit status of the process."""
    argv = sys.argv[1:]
    if argv[:1] == ["node"]:
        from dbctl.node.main import main as node

        return node(argv[1:]) or 0
    if argv[:1] == ["agent"]:
        from dbctl.agent import main as agent

        return agent(argv[1:]) or 0
    if argv[:1] == ["keeper"]:
        from dbctl.keeper import main as keeper

        return keeper(argv[1:]) or 0
    if argv[:1] == ["caller"]:
        from dbctl.caller import main as caller

        return caller(argv[1:]) or 0
    try:
        _heed_signals()
        from dbctl.cli.main import main as command_line
    except KeyboardInterrupt:  # later ones are answered there
        return 130
    try:
        return command_line(argv)
    finally:
        # The status stands; the interpreter's own end would hand signals back to the system.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
