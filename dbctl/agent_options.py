"""What an agent is told at its start: on its command line here, on standard input on another host.

Rules of this file: whatever is wrong is an error before the agent listens anywhere; directories are
made here and only here.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbctl.options_line import read_options

LET_GO = "standard input ended: the controller is gone"  # why an agent ended, in its log


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dbctl agent", allow_abbrev=False)
    parser.add_argument("--runtime", required=True, help="private directory for sockets")
    parser.add_argument("--run", required=True, help="the run's identifier")
    parser.add_argument("--name", required=True, help="this agent's name: agent-0")
    parser.add_argument("--logs", required=True, help="directory for logs/NODE.log")
    parser.add_argument("--lease", type=float, default=10.0, metavar="SECONDS")
    return parser.parse_args(argv)


@dataclass(frozen=True, kw_only=True)
class Told:
    """What an agent of another host is told: its options, and what it is to look at.

    `question`: JSON of dbctl/examine.py. `reach`: a line with the ports of other hosts follows the
    READY line. `only`: it is asked, and starts nothing.
    """

    options: argparse.Namespace
    question: dict[str, object]
    reach: bool
    only: bool


def told() -> Told:
    """As a line on standard input. ValueError: no such line; nothing is made yet."""
    return read_options(_told)


def _told(values: dict[str, Any]) -> Told:
    logs = Path(values["workdir"]).expanduser() / values["run"]
    return Told(
        options=argparse.Namespace(
            runtime=values["runtime"],
            run=values["run"],
            name=values["name"],
            logs=str(logs),
            lease=values["lease"],
        ),
        question={"workdir": values["workdir"], **values.get("examine", {})},
        reach=bool(values.get("reach")),
        only=bool(values.get("only")),
    )


def make_directories(options: argparse.Namespace) -> None:
    """Those that the options name. Who makes the private one is the agent: nobody else's is ever
    taken. OSError: one cannot be made.
    """
    Path(options.logs).mkdir(parents=True, exist_ok=True)
    os.mkdir(options.runtime, 0o700)
