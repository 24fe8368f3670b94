"""The nodes of a run as the controller sees them: started, ready, beating, dead.

Rules of this file: no decision about training, and no link: it says what is to be sent. It starts
nodes through agents, introduces them to each other, and notices deaths. Theory of operation: an
order (Start) is repeated until its effect is reported. A node says Ready until it is spoken to;
when all that are needed are ready each gets the addresses of those it talks to. A node without a
beat for a lease is killed by its agent, and its death is then told like any other; an agent that
does not even do that is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from dbctl.errors import LaunchError
from dbctl.keys import KeyRow
from dbctl.process import EXIT_ORPHANED, how_ended, tail
from dbctl.wire import Exited, Finish, Message
from dbctl.wire_processes import Beat, Kill, Peers, Ready, Start, Started

REPEAT_S = 1.0
START_LIMIT_S = 60.0
END_S = 2.0  # of an agent whose own lease ran out, since nothing reaches it: its words say why
ORPHANED_S = 4.0  # an agent has ended that long after the first of its nodes
Sends = list[tuple[str, Message]]


@dataclass(slots=True)
class Node:
    order: Start
    agent: str
    talks_to: Sequence[str]
    host: str = "localhost"
    partners: Sequence[str] = ()  # the other partitions of its replica
    public: str = ""  # its key; "" without encryption
    apart: Sequence[str] = ()  # nodes of other hosts that it talks to, or that talk to it
    needed: bool = True  # the run begins when all that are needed are ready
    ordered_at: float | None = None
    first_ordered_at: float = 0.0
    endpoint: str = ""
    tcp_endpoint: str = ""
    pid: int = 0
    beat_at: float = 0.0
    has_beaten: bool = False
    started: bool = False
    rss_bytes: int = 0
    exited: Exited | None = None
    killed_at: float | None = None  # when its silence made us order its end; said again since
    kill_at: float = 0.0
    ended_with: str = ""  # the partner whose death ended it

    @property
    def alive(self) -> bool:
        return self.exited is None


class Nodes:
    def __init__(self, nodes: Mapping[str, Node], *, lease_s: float) -> None:
        self.nodes = dict(nodes)
        self._lease_s = lease_s
        self._heard_at: dict[str, float] = {}  # what became of an order, from each agent

    def start(self, now: float) -> Sends:
        """Orders for all that are needed; the rest follow when those are ready."""
        return [o for node in self.nodes.values() if node.needed for o in self._order(now, node)]

    def _order(self, now: float, node: Node) -> Sends:
        if node.ordered_at is None:
            node.first_ordered_at = now
            node.beat_at = now
        node.ordered_at = now
        return [(node.agent, node.order)]

    @property
    def ready(self) -> bool:
        return all(node.endpoint for node in self.nodes.values() if node.needed)

    def receive(self, now: float, name: str, message: Message) -> Sends:
        """Ready, Beat, Exited of a node, or that it is Started; what to send in answer."""
        node = self.nodes.get(name)
        if node is None:
            return []
        node.started = True  # whoever says something of it
        match message:
            case Started():
                self._heard_at[node.agent] = now
            case Ready(endpoint, pid, tcp_endpoint):
                node.endpoint, node.pid, node.beat_at = endpoint, pid, now
                node.tcp_endpoint = tcp_endpoint
                node.has_beaten = True
                return self._introduce_late(name) if self.ready else []
            case Beat():
                node.beat_at, node.has_beaten = now, True
                node.rss_bytes = message.rss_bytes
            case Exited():
                node.exited = message
                self._heard_at[node.agent] = now
                if node.killed_at is not None and not message.word:
                    word = f"nothing was heard of it for {self._lease_s:g} s"
                    if node.ended_with:
                        word = f"its replica ended with {node.ended_with}"
                    node.exited = replace(message, word=word)
                return self._end_partners(now, name) + self._shut_out(name)
        return []

    def _end_partners(self, now: float, name: str) -> Sends:
        """One dead partition ends its whole replica, and only that (reliability.md, G4)."""
        sends: Sends = []
        for other in self.nodes[name].partners:
            partner = self.nodes[other]
            if partner.alive and partner.killed_at is None:
                partner.killed_at, partner.ended_with = now, name
                partner.kill_at = now + REPEAT_S
                sends.append((partner.agent, Kill(other, partner.order.incarnation)))
        return sends

    def _shut_out(self, name: str) -> Sends:
        """Nodes of other hosts that let it in: its key is in their list no more."""
        if not self.ready:
            return []
        told = (n for n, other in self.nodes.items() if name in other.apart and other.alive)
        return [send for n in told if self.nodes[n].endpoint for send in self._introduce(n)]

    def begin(self, now: float) -> Sends:
        """All needed are ready: introduces them, and starts the others."""
        sends: Sends = []
        for name, node in self.nodes.items():
            sends += self._introduce(name) if node.endpoint else self._order(now, node)
        return sends

    def _introduce_late(self, name: str) -> Sends:
        """To whom it talks to, and to those who talk to it and did not know where it is."""
        told = (n for n, other in self.nodes.items() if name in other.talks_to and other.endpoint)
        return [send for node in (name, *told) for send in self._introduce(node)]

    def _introduce(self, name: str) -> Sends:
        node = self.nodes[name]
        others = [(n, self.nodes[n]) for n in node.talks_to]
        known = tuple(
            (n, other.order.incarnation, other.tcp_endpoint if n in node.apart else other.endpoint)
            for n, other in others
            if other.endpoint
        )
        return [(name, Peers(known, self._keys(node)))]

    def _keys(self, node: Node) -> tuple[KeyRow, ...]:
        """Of every life of another host that talks to this node: what is over is not in it."""
        others = ((n, self.nodes[n]) for n in node.apart)
        return tuple((n, o.order.incarnation, o.public) for n, o in others if o.alive)

    def step(self, now: float) -> Sends:
        """Orders again what has not answered; kills what has not beaten for a lease."""
        sends: Sends = []
        for name, node in self.nodes.items():
            if not node.alive or node.ordered_at is None:
                continue
            if not node.endpoint and now - node.ordered_at >= REPEAT_S:
                sends += self._order(now, node)
            # Thirty-two interpreters that load on two cores beat late for the first time.
            limit_s = self._lease_s if node.has_beaten else max(self._lease_s, START_LIMIT_S)
            silent = now - node.beat_at > limit_s or bool(node.ended_with)
            if silent and now >= node.kill_at:
                node.killed_at = now if node.killed_at is None else node.killed_at
                node.kill_at = now + REPEAT_S
                sends.append((node.agent, Kill(name, node.order.incarnation)))
        return sends

    def excuse(self, now: float) -> None:
        """Nobody has read for a while what nodes and agents say: their silence counts from now."""
        for node in self.nodes.values():
            node.beat_at = self._heard_at[node.agent] = now
            if node.killed_at is not None:
                node.killed_at = now

    def check_start(self, now: float, log_path: Callable[[str], str]) -> None:
        """LaunchError names the node that ended before it was ready, or that is late."""
        for name, node in self.nodes.items():
            if node.needed and node.exited is not None:
                raise died(name, node.exited, host=node.host, log_path=log_path(name))
            if node.needed and not node.endpoint and node.ordered_at is not None:
                waited = now - node.first_ordered_at
                if waited > START_LIMIT_S and now - node.beat_at > self._lease_s:
                    what = f"was not ready after {waited:.0f} s"
                    path = log_path(name)
                    raise LaunchError(
                        name, what, host=node.host, log_path=path, log_tail=tail(path)
                    )

    def unanswered(self, now: float) -> LaunchError | None:
        """The agent that has not started, or not ended, a node for a lease: stopped, or cut off.

        To one that has started nothing no way may lead: it is waited for until it has said so.
        """
        for name, node in self.nodes.items():
            if not node.alive or node.ordered_at is None:
                continue
            what, since, limit_s = "end", node.killed_at, self._lease_s
            # An order is said again until its node is ready, and answered each time.
            if not node.started or (since is None and not node.endpoint):
                what, since = "start", max(node.first_ordered_at, self._heard_at.get(node.agent, 0))
                limit_s += END_S
            if since is not None and now - since > limit_s:
                what = f"does not answer: it was told to {what} {name} {now - since:.0f} s ago"
                return LaunchError(node.agent, what, host=node.host)
        return None

    def heard_of(self, name: str) -> bool:
        """Whether there is a way to `name`: a node is known by what came of it, others always."""
        node = self.nodes.get(name)
        return node is None or node.has_beaten

    def finish(self) -> Sends:
        """To all that live; of whom nothing was heard yet, its agent ends."""
        return [
            (name, Finish())
            if node.has_beaten
            else (node.agent, Kill(name, node.order.incarnation))
            for name, node in self.nodes.items()
            if node.alive and node.ordered_at is not None
        ]

    def kill(self) -> Sends:
        return [
            (node.agent, Kill(name, node.order.incarnation))
            for name, node in self.nodes.items()
            if node.alive and node.ordered_at is not None
        ]

    def all_ended(self) -> bool:
        return all(n.ordered_at is None or not n.alive for n in self.nodes.values())


def died(node: str, exited: Exited, *, host: str, log_path: str = "") -> LaunchError:
    """A node's death as an error: how it ended, its own last word, the tail of its log."""
    what = describe_end(exited)
    return LaunchError(node, what, host=host, log_path=log_path, log_tail=tail_beside(exited))


def tail_beside(exited: Exited) -> str:
    """The log's tail; "" where it ends with the node's own word, which is told anyway."""
    told = bool(exited.word) and exited.log_tail.rstrip().endswith(f"failed: {exited.word}")
    return "" if told else exited.log_tail


def why_orphaned(
    node: Node, exited: Exited, failure: Callable[[], LaunchError | None]
) -> LaunchError | None:
    """Of a node that ended because its agent does: why that is, if it is known in a moment.

    None of one whose end was ordered: its partner's death, or its silence, is the reason.
    """
    orphan = exited.status == EXIT_ORPHANED and node.killed_at is None
    deadline = time.monotonic() + ORPHANED_S
    while orphan and time.monotonic() < deadline:
        if (error := failure()) is not None:
            return error
        time.sleep(0.02)
    return None


def describe_end(exited: Exited) -> str:
    how = how_ended(exited.status)
    return f"{how}: {exited.word}" if exited.word else how
