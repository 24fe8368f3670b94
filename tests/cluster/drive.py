"""The command line of dbctl with what only tests may set: roles of their own and a short lease.

python -m tests.cluster.drive '{"factories": {"worker": "slow_start"}, "lease_s": 2}' train ...
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from typing import Any

import msgspec

import dbctl.run.setting
import dbctl.run.train
from dbctl.cli.main import main
from dbctl.run.records import RunRecords
from dbctl.run.wiring import Ends, apart
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


def keep_keys(path: str) -> None:
    """Writes what each node is told about TCP, its secret too, where only this user can read it."""
    ends_of = dbctl.run.setting.ends_of

    def kept(*args: Any, **more: Any) -> dict[str, Ends]:
        ends = ends_of(*args, **more)
        told = {name: end.tcp for name, end in ends.items() if end.tcp is not None}
        with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(told))
        return ends

    dbctl.run.setting.ends_of = kept


def drive(argv: list[str]) -> int:
    settings = json.loads(argv[0])
    watch_pickle("controller")
    factories = {
        role: f"tests.cluster.roles:{name}" for role, name in settings["factories"].items()
    }
    more: dict[str, Any] = {} if settings["lease_s"] is None else {"lease_s": settings["lease_s"]}
    if settings["held_up_s"] is not None:
        hold_up(settings["held_up_s"])
    if settings.get("keys"):
        keep_keys(settings["keys"])
    if settings.get("apart"):
        address, encrypted = settings["apart"]
        more["wire"] = lambda plan: apart(plan, address, encrypted=encrypted)
    dbctl.run.train.train = partial(dbctl.run.train.train, factories=factories, **more)
    return main(argv[1:])


if __name__ == "__main__":
    sys.exit(drive(sys.argv[1:]))
