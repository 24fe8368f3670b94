"""The command line of dbctl with what only tests may set: roles of their own and a short lease.

python -m tests.cluster.drive '{"factories": {"worker": "slow_start"}, "lease_s": 2}' train ...
"""

from __future__ import annotations

import json
import sys
from functools import partial

import dbctl.run.train
from dbctl.cli.main import main
from tests.cluster.roles import watch_pickle


def drive(argv: list[str]) -> int:
    settings = json.loads(argv[0])
    watch_pickle("controller")
    factories = {
        role: f"tests.cluster.roles:{name}" for role, name in settings["factories"].items()
    }
    more = {} if settings["lease_s"] is None else {"lease_s": settings["lease_s"]}
    dbctl.run.train.train = partial(dbctl.run.train.train, factories=factories, **more)
    return main(argv[1:])


if __name__ == "__main__":
    sys.exit(drive(sys.argv[1:]))
