"""Which role may say what to which: a table, asked for every message that arrives. Pure.

Rules of this file: names only; who a peer *is* was found out before (transport/curve.py). What the
table does not have is refused, also between nodes of one host, where it costs nothing.

A replica may fetch and push its own ranges, talk with its own partitions, report and beat; no more.
The controller may say everything: it comes through the agents only, never over TCP.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dbctl import wire, wire_batch, wire_files, wire_logs, wire_ship
from dbctl.wire import Message, Peer
from dbctl.wire_processes import Beat, Failed, Ready, Started

CONTROLLER = "controller"  # the node that the coordinator is in

Kinds = frozenset[type[Message]]

_OF_EVERY_NODE: Kinds = frozenset({Ready, Beat, Failed, wire_files.ReadVector})
_AMONG_PARTITIONS: Kinds = frozenset({wire.Boxes, wire.Need})
_OF_A_SHARD: Kinds = frozenset({wire.Welcome, wire.Params})

RIGHTS: dict[tuple[str, str], Kinds] = {
    # (who says it, who hears it)
    ("worker", "shard"): frozenset({wire.Hello, wire.Fetch, wire.Push, wire.Return}),
    ("evaluator", "shard"): frozenset({wire.Hello, wire.Fetch, wire.Return}),
    ("shard", "worker"): _OF_A_SHARD | {wire.Ack},
    ("shard", "evaluator"): _OF_A_SHARD,
    ("worker", "worker"): _AMONG_PARTITIONS,
    ("evaluator", "evaluator"): _AMONG_PARTITIONS,
    ("worker", CONTROLLER): _OF_EVERY_NODE
    | {wire.Report, wire_batch.Computed, wire_ship.ReadShipment},
    ("shard", CONTROLLER): _OF_EVERY_NODE
    | {wire.ShardReport, wire.CutPart, wire_files.PartData, wire_batch.Executed},
    ("evaluator", CONTROLLER): _OF_EVERY_NODE
    | {wire.Evaluated, wire.Predictions, wire_ship.ReadShipment},
    ("agent", CONTROLLER): frozenset({Started, wire.Exited, Beat, Failed, wire_logs.LogText}),
    **{(role, "agent"): frozenset({Failed}) for role in ("worker", "shard", "evaluator")},
}
_NOTHING: Kinds = frozenset()


def role_of(node: str) -> str:
    """worker-1.0 is a worker, controller the controller."""
    return node.partition("-")[0]


def partition_of(node: str) -> int:
    """Of worker-1.2 and evaluator-0.2 it is 2, of evaluator-0 it is 0; -1: it has none."""
    number = node.partition(".")[2] or "0"
    return int(number) if number.isascii() and number.isdigit() and len(number) < 10 else -1


class Rights:
    """What others may say to node `me`.

    `partners`: the other partitions of its replica. `starts`: of a shard, by partition, where the
    partition's slice begins in the flat vector (None: it has none here).
    """

    def __init__(
        self, me: str, *, partners: Collection[str] = (), starts: Sequence[int | None] = ()
    ) -> None:
        self._me = role_of(me)
        self._partners = frozenset(partners)
        self._starts = tuple(starts)

    def may(self, peer: Peer, message: Message) -> bool:
        if peer.node == CONTROLLER:
            return True
        kind = type(message)
        if kind not in RIGHTS.get((role_of(peer.node), self._me), _NOTHING):
            return False
        if kind in _AMONG_PARTITIONS:
            return peer.node in self._partners
        if self._starts and isinstance(message, wire.Fetch | wire.Push):
            partition = partition_of(peer.node)
            known = 0 <= partition < len(self._starts)
            return known and self._starts[partition] == message.start
        return True
