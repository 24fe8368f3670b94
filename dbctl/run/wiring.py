"""Which nodes share a host, and what those that do not are told of each other: keys, addresses.

Rules of this file: nothing is opened here; a key pair is made for each life of a node that talks to
another host, and a secret goes into that node's `Tcp` only (dbctl/keys.py).

Theory of operation. Nodes of one host meet on ipc:// and share memory; others meet on tcp://, where
the one that is talked to listens on its host's own address. Everybody is told the public keys of
those it talks to, either way, and of nobody else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dbctl.experiment.specs import SshCluster
from dbctl.keys import Tcp
from dbctl.plan import NodePlan, Plan
from dbctl.rights import CONTROLLER
from dbctl.transport.curve import make_keys

UNENCRYPTED = (
    "encryption is off: whoever reaches the hosts of this run can read and change its parameters"
)


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """`host_of`: node to host; `address_of`: host to the IP address that others connect to.

    `far`: hosts whose memory the controller cannot map. `encrypted` is about what goes between
    hosts; where there is one only, `address_of` is empty.
    """

    host_of: Mapping[str, str]
    address_of: Mapping[str, str]
    far: frozenset[str] = frozenset()
    encrypted: bool = True

    def shares_host(self, one: str, other: str) -> bool:
        return self.host_of[one] == self.host_of[other]

    @property
    def encryption(self) -> str | None:
        """`on`, `off`, or None: nothing goes between hosts."""
        return ("on" if self.encrypted else "off") if self.address_of else None


def wired(plan: Plan, addresses: Mapping[str, str]) -> Wiring:
    """As the plan places the nodes; `addresses` of its hosts, empty if it has one only."""
    cluster = plan.experiment.cluster
    return Wiring(
        host_of={node.node: node.host for node in plan.nodes},
        address_of=addresses,
        encrypted=not isinstance(cluster, SshCluster) or cluster.encryption == "on",
    )


def apart(plan: Plan, address: str, *, encrypted: bool = True) -> Wiring:
    """Every node as on a host of its own, all of which have `address`: what hosts see, on one."""
    names = [node.node for node in plan.nodes]
    return Wiring(
        host_of={name: name for name in names},
        address_of=dict.fromkeys(names, address),
        far=frozenset(names),
        encrypted=encrypted,
    )


@dataclass(frozen=True, kw_only=True)
class Ends:
    """What one node is told (`tcp`, `far`: NodeSpec), and whom of other hosts it meets."""

    tcp: Tcp | None
    far: tuple[str, ...]
    apart: tuple[str, ...]


def ends_of(plan: Plan, wiring: Wiring, *, incarnation: int) -> dict[str, Ends]:
    """For each node of the plan. Secrets are made anew in each call."""
    talks = {node.node: talks_to(plan, node) for node in plan.nodes}
    out = {
        name: [other for other in others if not wiring.shares_host(name, other)]
        for name, others in talks.items()
    }
    into: dict[str, list[str]] = {name: [] for name in out}
    for other, met in out.items():
        for name in met:
            into[name].append(other)
    apart = {name: tuple(dict.fromkeys((*out[name], *into[name]))) for name in out}
    keys = {name: make_keys() for name, others in apart.items() if others and wiring.encrypted}
    ends = {}
    for name, others in apart.items():
        host = wiring.host_of[name]
        public, secret = keys.get(name, ("", ""))
        tcp = Tcp(
            address=wiring.address_of[host] if into[name] else "",
            public=public,
            secret=secret,
            keys=tuple((other, incarnation, keys.get(other, ("", ""))[0]) for other in others),
        )
        ends[name] = Ends(
            tcp=tcp if others else None,
            far=(CONTROLLER,) if host in wiring.far else (),
            apart=others,
        )
    return ends


def partners_of(plan: Plan, node: NodePlan) -> tuple[tuple[int, str], ...]:
    """The other partitions of the same replica or evaluator."""
    return tuple(
        (other.partition, other.node)
        for other in plan.group_of(node.role, node.replica)
        if other.partition != node.partition
    )


def talks_to(plan: Plan, node: NodePlan) -> Sequence[str]:
    """Only the shards that hold its ranges, and its replica's other partitions.

    A shard answers on the way it was asked.
    """
    if node.role == "shard":
        return ()
    shards = [span.node for span in plan.held_by(node.partition)]
    return (*shards, *(name for _, name in partners_of(plan, node)))
