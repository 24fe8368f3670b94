"""What a run can live with, and its file may not have meant: a line each.

Rules of this file: pure. What no run can live with is an error, of the file in
dbctl/experiment/checks.py; what depends on this machine is in dbctl/run/room.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dbctl.experiment.specs import Experiment
from dbctl.shards import SHARD_ALIGN

if TYPE_CHECKING:
    from dbctl.plan import Plan


def unlike_splits(experiment: Experiment) -> Iterator[str]:
    """Test rows that are scaled otherwise than those trained on; `standardize` is never unlike."""
    train, test = experiment.data.train, experiment.data.test
    if test is not None and train.scale != test.scale:
        yield (
            f"data.train.scale is {_shown(train.scale)} and data.test.scale {_shown(test.scale)}: "
            "give both the same, unless what is stored differs so"
        )


def _shown(scale: float | None) -> str:
    return "not given" if scale is None else f"{scale:g}"


def fewer_shards(plan: Plan) -> Iterator[str]:
    """A network that has too few parameters for the shards that are asked for."""
    asked, made = plan.experiment.shards, len(plan.shards)
    if made < asked:
        most = f"at most one for each {SHARD_ALIGN} of the network's {plan.n_parameters:,}"
        yield f"{made:,} of {asked:,} shards are started: {most} parameters"
