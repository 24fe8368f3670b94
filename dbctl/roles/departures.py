"""Nodes that died, until every shard has said that it will hear nothing more of them.

Rules of this file: pure. Theory of operation: a death is told to every shard (Gone), again until
its report lists the node as over. From then on its table says for good which of the node's steps
were applied; what else the replica had been granted goes back to the others, so that N steps are
exactly N, whoever dies.
"""

from __future__ import annotations

from collections.abc import Sequence

from dbctl.roles.cuts import replica_of
from dbctl.wire import BEGINNING, Gone, Peer, Position, ShardReport


class Departures:
    def __init__(self, shards: Sequence[str]) -> None:
        self._shards = set(shards)
        self._waiting: dict[Peer, set[str]] = {}  # the shards that have not confirmed
        self._positions: dict[int, Position] = {}
        self._replicas: dict[int, set[Peer]] = {}  # unsettled ones, with their unconfirmed nodes

    def __bool__(self) -> bool:
        """Some death is not known everywhere yet."""
        return bool(self._waiting)

    def add(self, peer: Peer, replica: int | None = None) -> None:
        """`replica`: whose worker it was; None for an evaluator."""
        self._waiting[peer] = set(self._shards)
        if replica is not None:
            self._replicas.setdefault(replica, set()).add(peer)

    def pending(self) -> list[tuple[str, Gone]]:
        """What must be said (again), and to which shard."""
        return [
            (shard, Gone(*peer)) for peer, left in self._waiting.items() for shard in sorted(left)
        ]

    def confirm(self, shard: str, report: ShardReport) -> dict[int, Position]:
        """Replicas that are settled by this report, and how far the shards have applied them."""
        for row in report.table:
            replica = replica_of(row.worker)
            if replica in self._replicas:
                before = self._positions.get(replica, BEGINNING)
                self._positions[replica] = max(before, row.position)
        lives = {row.worker: row.incarnation for row in report.table}
        for peer in list(self._waiting):
            # A later life of the node is as good a word that this one is over.
            if peer.node not in report.over and lives.get(peer.node, 0) <= peer.incarnation:
                continue
            self._waiting[peer].discard(shard)
            if not self._waiting[peer]:
                del self._waiting[peer]
        settled = {}
        for replica, peers in list(self._replicas.items()):
            if not any(peer in self._waiting for peer in peers):
                del self._replicas[replica]
                settled[replica] = self._positions.get(replica, BEGINNING)
        return settled
