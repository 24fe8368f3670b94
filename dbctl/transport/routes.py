"""Where each node is reached, and which of its lives counts.

Rules of this file: no sending. A node is reached, in this order: by the connection made to it; by
the way its messages come; through the keeper (the host's agent), which relays by name. Of two ways
that both speak for one life the first counts, as soon as it speaks: who has stolen a key may be
told something while the node itself is silent for long, but never what that asks for.
A message of a lower incarnation than the newest seen of its node is old, whatever it says.
"""

from __future__ import annotations

from dbctl.transport.lease import MAX_NODES
from dbctl.transport.outlet import Outlet
from dbctl.transport.sockets import Socket
from dbctl.wire import Peer

SILENT_S = 10.0  # then another way may speak for it: its connection may be broken unseen


class Routes:
    """`connections`: the DEALERs by the node they lead to; `keeper` is the name of one, or None."""

    def __init__(self, keeper: str | None) -> None:
        self.keeper = keeper
        self.connections: dict[str, Outlet] = {}
        self._newest: dict[str, int] = {}
        self._heard: dict[str, Outlet] = {}
        self._heard_at: dict[str, float] = {}  # by that way
        self._first: dict[str, Outlet] = {}  # the way that was silent, where another counts
        self._callers: dict[tuple[Socket, bytes], Outlet] = {}

    def outlets(self) -> list[Outlet]:
        return [*self.connections.values(), *self._callers.values()]

    def find(self, node: str) -> Outlet | None:
        found = self.connections.get(node) or self._heard.get(node)
        return found or (self.connections.get(self.keeper) if self.keeper else None)

    def admit(self, peer: Peer) -> bool:
        """False: that life is over (or there are more nodes than any run has)."""
        newest = self._newest.get(peer.node)
        if newest is None and len(self._newest) >= MAX_NODES:
            return False
        if newest is not None and peer.incarnation < newest:
            return False
        self._newest[peer.node] = peer.incarnation
        return True

    def superseded(self, peer: Peer) -> Peer | None:
        """The life of that node that `peer`, if newer, puts an end to."""
        newest = self._newest.get(peer.node, peer.incarnation)
        return Peer(peer.node, newest) if newest < peer.incarnation else None

    def caller(self, socket: Socket, route: bytes) -> Outlet:
        """The way back to whoever sent under routing id `route`."""
        outlet = self._callers.get((socket, route))
        if outlet is None:
            outlet = self._callers[socket, route] = Outlet(socket, route=route)
        return outlet

    def hear(self, node: str, outlet: Outlet, now: float) -> None:
        """A message of `node` came by `outlet`: the way to answer it, if no other speaks for it."""
        before, first = self._heard.get(node), self._first.get(node)
        if outlet is first:
            del self._first[node]
        elif before is not None and before is not outlet:
            if now - self._heard_at[node] < SILENT_S:
                self._prune(outlet)
                return
            self._first.setdefault(node, before)
        self._heard[node], self._heard_at[node] = outlet, now
        self._prune(before)

    def end(self, peer: Peer) -> Outlet | None:
        """That life is over: nothing more is taken of it. The connection to it, to be closed."""
        newest = self._newest.get(peer.node, 0)
        if newest > peer.incarnation:
            return None
        self._newest[peer.node] = peer.incarnation + 1
        self._prune(self._heard.pop(peer.node, None))
        self._prune(self._first.pop(peer.node, None))
        outlet = self.connections.get(peer.node)
        if outlet is None or outlet.incarnation is None or outlet.incarnation > peer.incarnation:
            return None
        return self.connections.pop(peer.node)

    def lose(self, outlet: Outlet) -> None:
        """Nobody is there any more: forget every node that was reached by it."""
        for ways in (self._heard, self._first):
            for node in [node for node, other in ways.items() if other is outlet]:
                del ways[node]
        self._prune(outlet)

    def _prune(self, outlet: Outlet | None) -> None:
        if outlet is None or outlet.route is None:
            return
        if outlet in self._heard.values() or outlet in self._first.values():
            return
        self._callers.pop((outlet.socket, outlet.route), None)
