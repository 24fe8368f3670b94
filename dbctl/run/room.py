"""Whether a host has room for a run: memory, files, processes, asked before anything is started.

Rules of this file: an error only where the run cannot fit, by figures that are rather too low
(pages of libraries and of mapped files are shared, so they do not count for each process); a
warning above 80 % of what there is. Theory of operation: the plan says what each process holds,
/proc/meminfo what is free (the kernel's own estimate, caches included), and the hard limit how many
files a process may have open: sockets, shared memory, the pipes of the agent. The soft limit is
raised to it. Processes count by their threads where the system bounds those, and by the cores that
are to bring them up. Other hosts say what they have when they are examined
(dbctl/run/findings.py).
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dbctl.data.sources import Source
from dbctl.errors import LaunchError
from dbctl.examine import MEMINFO, available_bytes, threads_allowed
from dbctl.experiment.specs import Experiment, SandblasterSpec, SshCluster
from dbctl.model.network import n_parameters
from dbctl.plan import ITEM_BYTES, LOCALHOST, PROCESS_BYTES, Plan, method_vectors
from dbctl.process import raise_descriptor_limit
from dbctl.region import Range
from dbctl.shards import SHARD_ALIGN

OWN_BYTES = 9 << 20  # of a process, and shared with no other fork of its template; measured
WARN_SHARE = 0.8
# Threads of workers a core. A worker waits now and then, for its shards and for other partitions,
# so some more of them than cores keep the cores busy; more than that only take turns.
MANY_THREADS = 2
# Processes a core. Two cores bring 400 up in 20 s, so these in 51 s: a start has 60 (run/nodes.py).
MOST_A_CORE = 512
THREADS_A_PROCESS = 5  # the loop's, the link's, its watcher's and two of ZeroMQ's

# Descriptors, measured: what every process has, and what each further peer takes.
NODE_FILES = 24
SHARD_FILES_A_READER = 3
READER_FILES_A_SHARD = 2
PARTNER_FILES = 8
PARTNER_FILES_A_LAYER = 4
AGENT_FILES = 16
AGENT_FILES_A_NODE = 2


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a plan takes of one host: memory by role, processes, and the process with most files."""

    memory: Mapping[str, int]
    n_processes: int
    most_files: tuple[str, int]


def room_on(plan: Plan, host: str, *, train: Source | None, test: Source | None) -> Room:
    """`train`: what the workers read, `test`: what the evaluators read; None: there is none."""
    return Room(
        memory=memory_bytes(plan, train, test, host=host),
        n_processes=sum(node.host == host for node in plan.nodes) + 1,  # and the agent
        most_files=files_needed(plan, host=host),
    )


def check_processes(experiment: Experiment) -> None:
    """LaunchError where the mere processes are too many here: asked before there is a plan of them.

    A plan takes time and memory for each process; this takes none.
    """
    if isinstance(experiment.cluster, SshCluster):
        return
    grid = experiment.partition.grid
    partitions = grid[0] * grid[1] if grid is not None else experiment.partition.count
    measures = experiment.data.test is not None and experiment.evaluate.every is not None
    shards = min(experiment.shards, -(-n_parameters(experiment.network) // SHARD_ALIGN))
    n = (experiment.replicas + measures) * partitions + shards
    files = AGENT_FILES + AGENT_FILES_A_NODE * n
    _check(Room(memory={}, n_processes=n + 1, most_files=("agent-0", files)))


def check_room(plan: Plan, train: Source | None, test: Source | None) -> list[str]:
    """Warnings; LaunchError where the plan cannot fit. The limit of open files is raised by it."""
    warnings = list(_idle(plan))
    if plan.hosts != (LOCALHOST,):
        return warnings  # what other hosts have is not known here
    warnings += _check(room_on(plan, LOCALHOST, train=train, test=test))
    return [*warnings, *_crowded(plan, cores=len(os.sched_getaffinity(0)))]


def _check(room: Room) -> list[str]:
    """Of this host."""
    if fault := files_fault(room, raise_descriptor_limit()):
        raise LaunchError(LOCALHOST, fault)
    available = available_bytes()
    said = "" if available is None else memory_fault(room, available)
    if available is not None and said and is_too_large(room, available):
        raise LaunchError(LOCALHOST, f"has too little memory for this run: {said}")
    if fault := threads_fault(room, *threads_allowed()):
        raise LaunchError(LOCALHOST, fault)
    if fault := cores_fault(room, len(os.sched_getaffinity(0))):
        raise LaunchError(LOCALHOST, fault)
    return [f"memory may not suffice: {said}"] if said else []


def without_rows(plan: Plan) -> str:
    """`replicas 1797 to 1999 have no rows`; "" where all have some. They are the last ones."""
    first, last = sum(n > 0 for n in plan.rows), len(plan.rows) - 1
    if first >= last:
        return f"replica {last} has no rows" if first == last else ""
    return f"replicas {first} to {last} have no rows"


def _idle(plan: Plan) -> Iterator[str]:
    """Replicas that will train nothing: each row is of one replica."""
    if said := without_rows(plan):
        yield f"{said}: data.train has {sum(plan.rows):,}; they train nothing"


def _crowded(plan: Plan, *, cores: int) -> Iterator[str]:
    """Workers with more than MANY_THREADS threads a core: slower, and no fault."""
    workers = plan.of_role("worker")
    if sum(node.threads for node in workers) > MANY_THREADS * cores:
        threads = workers[0].threads
        each = f"{threads} thread{'s' if threads > 1 else ''}"
        on = f"{cores} core{'s' if cores > 1 else ''}"
        yield f"{len(workers):,} processes of {each} on {on}: they share them"


# ---------------------------------------------------------------------------------- memory


def memory_bytes(
    plan: Plan, train: Source | None, test: Source | None, *, host: str = LOCALHOST
) -> dict[str, int]:
    """What the host's processes of each role need together, besides OWN_BYTES for each of them."""
    needed: dict[str, int] = {}
    for node in plan.nodes:
        if node.host != host:
            continue
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


def needed_bytes(room: Room) -> int:
    return sum(room.memory.values()) + room.n_processes * OWN_BYTES


def is_too_large(room: Room, available: int) -> bool:
    """Whether `available` bytes of memory cannot hold it; else `memory_fault` is a warning."""
    return needed_bytes(room) > available


def memory_fault(room: Room, available: int) -> str:
    """The arithmetic and what to do, where more than WARN_SHARE of the memory is needed; or ""."""
    total = needed_bytes(room)
    if total <= WARN_SHARE * available:
        return ""
    parts = [f"{_gib(held)} for the {role}s" for role, held in room.memory.items()]
    parts.append(f"{room.n_processes:,} processes x {OWN_BYTES >> 20} MiB")
    said = f"it needs {' + '.join(parts)} = {_gib(total)}; {_gib(available)} are available"
    do = "take fewer replicas, a smaller network or batch, or a larger host"
    return f"{said} ({MEMINFO}); {do}"


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 30):.2f} GiB"


# -------------------------------------------------------------------------------- open files


def files_needed(plan: Plan, *, host: str = LOCALHOST) -> tuple[str, int]:
    """The process of a host that has the most files open, and about how many."""
    here = {node.node for node in plan.nodes if node.host == host}
    agent = plan.agent_of(host)
    found = {agent: AGENT_FILES + AGENT_FILES_A_NODE * len(here)}
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
        for shard in plan.shards:
            held = Range(shard.start, shard.stop)
            slices = sum(bool(span.intersection(held)) for span in plan.cut.spans)
            of_shard[shard.node] += slices * method_vectors(optimizer)
    found |= of_shard
    here.add(agent)
    most = max((name for name in found if name in here), key=lambda name: found[name])
    return most, found[most]


def files_fault(room: Room, limit: int) -> str:
    """What is wrong with a hard limit of open files (RLIM_INFINITY: none), or ""."""
    name, needed = room.most_files
    if limit == resource.RLIM_INFINITY or needed <= limit:
        return ""
    return (
        f"allows too few open files for this run: {name} needs about {needed:,}, and the hard "
        f"limit is {limit:,} (`ulimit -Hn`); raise it, or take fewer replicas or shards"
    )


# --------------------------------------------------------------------------------- processes


def threads_fault(room: Room, allowed: int, said: str) -> str:
    """What is wrong where the system allows so many threads, in words `said`; or ""."""
    needed = room.n_processes * THREADS_A_PROCESS
    if needed <= allowed:
        return ""
    each = f"{room.n_processes:,} processes x {THREADS_A_PROCESS}"
    return (
        f"allows too few threads for this run: it needs {each} = {needed:,}, and {said}; "
        "raise it, or take fewer replicas, partitions or shards"
    )


def cores_fault(room: Room, cores: int) -> str:
    """What is wrong with more processes than come up in time on so many cores; or ""."""
    most = MOST_A_CORE * cores
    if room.n_processes <= most:
        return ""
    on = f"{cores} core{'s' if cores > 1 else ''}"
    return (
        f"has too few cores for this run: it needs {room.n_processes:,} processes, and at most "
        f"{MOST_A_CORE} x {on} = {most:,} come up in time; take fewer replicas, partitions or "
        "shards, or a larger host"
    )
