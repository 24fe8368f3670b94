"""From an experiment and hosts to a plan: which node runs where, with what. Pure.

Rules of this file: no I/O. `NodeSpec` is all that a node is told (JSON on its standard input).
"""

from __future__ import annotations

import msgspec

from dbctl.wire import BEGINNING, Position


class ShardSpan(msgspec.Struct, frozen=True, array_like=True):
    """Shard `node` holds elements `start` to `stop` of the flat parameter vector."""

    node: str
    start: int
    stop: int


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one node is told at its start.

    `runtime` is the private 0700 directory for sockets, `agent` the endpoint of its host's agent.
    `experiment` is the resolved experiment as JSON. `restore` is a checkpoint directory or "".
    """

    run: str
    node: str  # shard-0 | worker-1.0 | evaluator-0
    role: str  # shard | worker | evaluator
    incarnation: int
    runtime: str
    agent: str
    lease_s: float
    threads: int
    experiment: str
    shards: tuple[ShardSpan, ...]
    replica: int = 0
    partition: int = 0
    restore: str = ""
    statistics: str = ""  # standardize: the run directory's file of means and deviations
    position: Position = BEGINNING
    split: str = "test"
    factory: str = ""  # tests: module:function that builds the role instead of dbctl's own
