"""The command line of dbctl with what only tests may set: roles of their own and a short lease.

python -m tests.cluster.drive '{"factories": {"worker": "slow_start"}, "lease_s": 2}' train ...
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import Any

import dbctl.run.train
from dbctl.cli.main import main
from dbctl.run.records import RunRecords
from dbctl.run.wiring import apart
from tests.cluster.roles import watch_pickle

HELD_UP_AT = 30  # the n-th record of a worker


def hold_up(seconds: float) -> None:
    """A disk that takes so long, once, for a worker's record in the middle of the training."""
    append, n_workers = RunRecords.append, [0]

    def slow(records: RunRecords, event: str, **fields: object) -> None:
        n_workers[0] += event == "worker"
        if n_workers[0] == HELD_UP_AT:
            n_workers[0] += 1
            time.sleep(seconds)
        append(records, event, **fields)

    RunRecords.append = slow  # type: ignore[method-assign]


def drive(argv: list[str]) -> int:
    settings = json.loads(argv[0])
    watch_pickle("controller")
    factories = {
        role: f"tests.cluster.roles:{name}" for role, name in settings["factories"].items()
    }
    more: dict[str, Any] = {} if settings["lease_s"] is None else {"lease_s": settings["lease_s"]}
    if settings["held_up_s"] is not None:
        hold_up(settings["held_up_s"])
    if settings.get("apart"):
        address, encrypted = settings["apart"]
        more["wire"] = lambda plan: apart(plan, address, encrypted=encrypted)
    dbctl.run.train.train = partial(dbctl.run.train.train, factories=factories, **more)
    return main(argv[1:])


if __name__ == "__main__":
    sys.exit(drive(sys.argv[1:]))
