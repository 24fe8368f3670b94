"""Which host each process of a run goes to. Pure.

Rules of this file: names and counts only, no memory, no network; equal input gives equal places.

Theory of operation. Whether all can be placed at all is a transportation problem with three kinds
of process: there is a way exactly if for every set of roles the hosts that may run any of them
have as many slots as those roles have processes (Hall's theorem). So the greedy choice below asks,
before it takes a slot, whether the rest could still be placed; it never runs into a corner, and
what it refuses has a set of roles as its reason, with the arithmetic.

What is preferred, in order: the partitions of a replica on one host (they exchange boxes in every
pass), where none takes them all on as few as can be; then shards on different hosts, so that each
has its own network for what all replicas fetch and push; then equal shares of the slots. Ours: the
paper leaves placement to its cluster's scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from dbctl.errors import PlanError
from dbctl.experiment.specs import HostSpec

ROLES = ("shard", "worker", "evaluator")
SETS = tuple(frozenset(some) for n in range(1, len(ROLES) + 1) for some in combinations(ROLES, n))
Groups = Sequence[Sequence[str]]


@dataclass
class _Seat:
    """One host: `free` of its `slots`, and how many shards have some of the others."""

    name: str
    slots: int
    free: int
    roles: frozenset[str]
    n_shards: int = 0

    def share(self, more: int) -> float:
        return (self.slots - self.free + more) / self.slots


def place(
    hosts: Sequence[HostSpec],
    *,
    shards: Sequence[str],
    replicas: Groups,
    evaluators: Groups,
    between: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """The host's name for each node. `replicas`, `evaluators`: the nodes of each, by partition.

    `between` is called for each replica and shard: what it raises ends this.
    PlanError: there are too few slots, with the sum.
    """
    needs = {
        "shard": len(shards),
        "worker": sum(map(len, replicas)),
        "evaluator": sum(map(len, evaluators)),
    }
    total = sum(needs.values())
    sizes = [min(host.slots or total, total) for host in hosts]  # without a bound: room for all
    seats = [
        _Seat(name=host.name, slots=size, free=size, roles=frozenset(host.labels or ROLES))
        for host, size in zip(hosts, sizes, strict=True)
    ]
    if lacking := _lacking(seats, needs):
        raise PlanError(_arithmetic(hosts, seats, needs, lacking=lacking))
    found: dict[str, str] = {}
    for role, groups in (("worker", replicas), ("shard", [[s] for s in shards])):
        for group in groups:
            between()
            found |= _place_group(seats, needs, role, group=group)
    for group in evaluators:
        found |= _place_group(seats, needs, "evaluator", group=group)
    return found


def _place_group(
    seats: list[_Seat], needs: dict[str, int], role: str, *, group: Sequence[str]
) -> dict[str, str]:
    """Where each of the group goes; `seats` and `needs` are what is left after it."""
    found: dict[str, str] = {}
    left = list(group)
    while left:
        seat, n = _best(seats, needs, role, size=len(left))
        for node in left[:n]:
            found[node] = seat.name
        seat.free -= n
        seat.n_shards += n if role == "shard" else 0
        needs[role] -= n
        left = left[n:]
    return found


def _best(
    seats: list[_Seat], needs: Mapping[str, int], role: str, *, size: int
) -> tuple[_Seat, int]:
    """The host for as many of `size` nodes as can go together, and how many that is."""
    open_to = [(seat, _room(seats, needs, role, seat=seat)) for seat in seats]
    most = min(size, max(room for _, room in open_to))
    assert most > 0, "the whole could be placed, so the rest can"
    fitting = [seat for seat, room in open_to if room >= most]
    shards = [seat.n_shards if role == "shard" else 0 for seat in fitting]
    best = min(range(len(fitting)), key=lambda i: (shards[i], fitting[i].share(most), i))
    return fitting[best], most


def _room(seats: list[_Seat], needs: Mapping[str, int], role: str, *, seat: _Seat) -> int:
    """How many nodes of `role` this host takes with the rest still to be placed elsewhere."""
    if role not in seat.roles:
        return 0
    room = min(seat.free, needs[role])
    for roles in SETS:
        # Slots that a node of `role` takes here are lost to those roles, if it is none of them.
        if role not in roles and seat.roles & roles:
            spare = _capacity(seats, roles) - sum(needs[r] for r in roles)
            room = min(room, spare)
    return room


def _lacking(seats: list[_Seat], needs: Mapping[str, int]) -> frozenset[str]:
    """The smallest set of roles with more processes than slots; empty if there is none."""
    for roles in SETS:
        if sum(needs[r] for r in roles) > _capacity(seats, roles):
            return roles
    return frozenset()


def _capacity(seats: list[_Seat], roles: frozenset[str]) -> int:
    return sum(seat.free for seat in seats if seat.roles & roles)


def _arithmetic(
    hosts: Sequence[HostSpec],
    seats: Sequence[_Seat],
    needs: Mapping[str, int],
    *,
    lacking: frozenset[str],
) -> str:
    roles = [role for role in ROLES if role in lacking]
    wanted = " + ".join(f"{needs[role]} for {role}s" for role in roles)
    total = sum(needs[role] for role in roles)
    # Each has a bound, else nothing would be lacking.
    may = [host for host, seat in zip(hosts, seats, strict=True) if seat.roles & lacking]
    have = " + ".join(f"{host.slots} on {host.name}" for host in may) or "none"
    n_slots = sum(host.slots or 0 for host in may)
    given = f"{have} = {n_slots}" if len(may) > 1 else have
    needed = f"{wanted} = {total}" if len(roles) > 1 else wanted
    return (
        f"too few slots: expected {needed}, found {given} on the hosts that may run them; give "
        "a host more slots or labels, or take fewer replicas, partitions or shards"
    )
