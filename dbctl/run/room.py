"""Whether this host has room for a run: memory and open files, asked before anything is started.

Rules of this file: an error only where the run cannot fit, by figures that are rather too low
(pages of libraries and of mapped files are shared, so they do not count for each process); a
warning above 80 % of what there is. Theory of operation: the plan says what each process holds,
/proc/meminfo what is free (the kernel's own estimate, caches included), and the hard limit how many
files a process may have open: sockets, shared memory, the pipes of the agent. The soft limit is
raised to it.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from dbctl.data.sources import Source
from dbctl.errors import LaunchError
from dbctl.experiment.specs import SandblasterSpec
from dbctl.plan import ITEM_BYTES, LOCALHOST, PROCESS_BYTES, Plan, method_vectors
from dbctl.process import raise_descriptor_limit
from dbctl.region import Range

MEMINFO = Path("/proc/meminfo")
HOST = "localhost"
OWN_BYTES = 24 << 20  # of a process, and shared with no other; measured
WARN_SHARE = 0.8

# Descriptors, measured: what every process has, and what each further peer takes.
NODE_FILES = 24
SHARD_FILES_A_READER = 3
READER_FILES_A_SHARD = 2
PARTNER_FILES = 8
PARTNER_FILES_A_LAYER = 4
AGENT_FILES = 16
AGENT_FILES_A_NODE = 2


def check_room(plan: Plan, train: Source | None, test: Source | None) -> list[str]:
    """Warnings; LaunchError where the plan cannot fit. The limit of open files is raised by it.

    `train`: what the workers read, `test`: what the evaluators read; None where there is none.
    """
    if plan.hosts != (LOCALHOST,):
        return []  # what other hosts have is not known here
    _check_files(plan)
    return list(_check_memory(plan, train, test))


# ---------------------------------------------------------------------------------- memory


def memory_bytes(plan: Plan, train: Source | None, test: Source | None) -> dict[str, int]:
    """What the processes of each role need together, besides OWN_BYTES for each of them."""
    needed: dict[str, int] = {}
    for node in plan.nodes:
        held = node.memory_bytes - PROCESS_BYTES
        if node.role == "worker" and train is not None:
            held -= plan.rows[node.replica] * _saved_bytes(train)
        if node.role == "evaluator" and test is not None:
            held -= test.rows * _saved_bytes(test)
        needed[node.role] = needed.get(node.role, 0) + max(0, held)
    return needed


def _saved_bytes(source: Source) -> int:
    """By how much less than the plan says a row takes: mapped, or kept as it is stored."""
    item = 0 if source.x.mapped else min(ITEM_BYTES, source.x.dtype.itemsize)
    return source.features * (ITEM_BYTES - item)


def available_bytes() -> int | None:
    """None where the system does not say."""
    try:
        for line in MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return None


def _check_memory(plan: Plan, train: Source | None, test: Source | None) -> Iterator[str]:
    available = available_bytes()
    if available is None:
        return
    needed = memory_bytes(plan, train, test)
    n_processes = len(plan.nodes) + 1  # and the agent
    total = sum(needed.values()) + n_processes * OWN_BYTES
    if total <= WARN_SHARE * available:
        return
    parts = [f"{_gib(held)} for the {role}s" for role, held in needed.items()]
    parts.append(f"{n_processes} processes x {OWN_BYTES >> 20} MiB")
    said = f"it needs {' + '.join(parts)} = {_gib(total)}; {_gib(available)} are available"
    do = "take fewer replicas, a smaller network or batch, or a larger host"
    if total > available:
        raise LaunchError(HOST, f"has too little memory for this run: {said} ({MEMINFO}); {do}")
    yield f"memory may not suffice: {said}; where it does not, {do}"


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 30):.2f} GiB"


# -------------------------------------------------------------------------------- open files


def files_needed(plan: Plan) -> tuple[str, int]:
    """The process that has the most files open, and about how many."""
    found = {"agent-0": AGENT_FILES + AGENT_FILES_A_NODE * len(plan.nodes)}
    readers = [node for node in plan.nodes if node.role != "shard"]
    of_shard = dict.fromkeys((node.node for node in plan.of_role("shard")), NODE_FILES)
    a_partner = PARTNER_FILES + PARTNER_FILES_A_LAYER * len(plan.experiment.network.layers)
    for node in readers:
        shards = plan.held_by(node.partition)
        found[node.node] = NODE_FILES + READER_FILES_A_SHARD * len(shards)
        found[node.node] += (plan.cut.count - 1) * a_partner
        for span in shards:
            of_shard[span.node] += SHARD_FILES_A_READER
    optimizer = plan.experiment.optimizer
    if isinstance(optimizer, SandblasterSpec):
        for span in plan.shards:
            held = Range(span.start, span.stop)
            slices = sum(bool(plan.cut.span(p).intersection(held)) for p in range(plan.cut.count))
            of_shard[span.node] += slices * method_vectors(optimizer)
    found |= of_shard
    most = max(found, key=lambda name: found[name])
    return most, found[most]


def _check_files(plan: Plan) -> None:
    limit = raise_descriptor_limit()
    name, needed = files_needed(plan)
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise LaunchError(
            HOST,
            f"allows too few open files for this run: {name} needs about {needed:,}, and the hard "
            f"limit is {limit:,} (`ulimit -Hn`); raise it, or take fewer replicas or shards",
        )
