"""`dbctl stop-cluster`: runs of this machine save and end first, then the keepers go.

Rules of this file: nothing is signalled but the controller of that very run, a process of this user
on this machine; every wait has an end; a run whose fate is not known is not said to have ended.

Theory of operation. The keepers tell of the runs on them: number, directory, user. The run.json of
that directory must have the same number, and name a process that lives; that process is held by a
descriptor before its start time is compared, so its number cannot become another's in between.
SIGTERM makes its final checkpoint and ends it with 75, and with it its agents. Of other machines
and users, and of those that take too long, the keepers end the agents, and so the run.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dbctl.checkpoint.reader import checkpoints_by_step
from dbctl.errors import DbctlError
from dbctl.process import escape_line
from dbctl.progress.text import counted
from dbctl.run.cluster_hosts import RunSaid, Seen, end_keepers, look
from dbctl.run.clusters import Cluster
from dbctl.rundir import RunDir, open_

SAVE_LIMIT_S = 30.0  # a final checkpoint and the end of the nodes (G11)
ENDED = "ended"  # with its agents, without a final checkpoint
LATE = "late"  # it was asked, and had not ended in time
UNKNOWN = "unknown"  # none of its keepers could be reached


@dataclass(frozen=True, kw_only=True)
class RunStopped:
    """What became of a run: `state` as in its status.json where it ended by itself, else as above.

    `checkpoint`: the step of its newest one; None: it has none, or its directory is not here.
    """

    run: str
    name: str
    run_dir: str
    user: str
    state: str
    checkpoint: int | None = None

    def line(self) -> str:
        place = f"{self.user}: {self.run_dir}"
        how = {
            ENDED: "ended with its agents",
            LATE: f"had not ended after {SAVE_LIMIT_S:g} s, and was ended with its agents",
            UNKNOWN: "may go on",
        }.get(self.state, self.state)
        if self.checkpoint is not None:
            resume = f"`dbctl resume {shlex.quote(self.run_dir)}`"
            how = f"{how}; {resume} goes on from step {self.checkpoint:,}"
        elif self.state not in (ENDED, UNKNOWN):
            how = f"{how}; nothing was saved"
        return escape_line(f"{self.name} ({place})  {how}")


def stop_all(
    cluster: Cluster, *, force: bool = False, tell: Callable[[str], object]
) -> tuple[list[Seen], list[RunStopped]]:
    """What became of each host, and of each run that was on them.

    `force`: no run is waited for, and the cluster is forgotten in any case. `tell` is told what
    takes its time.
    """
    before = look(cluster)
    runs = {run.run: run for one in before if one.said for run in one.said.runs}
    late: set[str] = set()
    asked: set[str] = set()
    if not force:
        with _controllers(runs.values()) as found:
            asked = set(found)
            late = _end(found, runs, tell=tell)
    hosts = end_keepers(cluster, force=force)
    ended = {
        run.run
        for one, now in zip(before, hosts, strict=True)
        if one.said and now.is_over
        for run in one.said.runs
    }
    fates = []
    for run in runs.values():
        state = LATE if run.run in late else ENDED if run.run in ended else UNKNOWN
        fates.append(_fate(run, state, by_itself=run.run in asked - late))
    return hosts, fates


def objects(runs: Sequence[RunStopped]) -> list[dict[str, object]]:
    """For --json."""
    return [asdict(run) for run in runs]


@contextlib.contextmanager
def _controllers(runs: Iterable[RunSaid]) -> Iterator[dict[str, int]]:
    """By run a descriptor of its controller, of those that are this user's on this machine."""
    with contextlib.ExitStack() as at_end:
        found = {}
        for run in runs:
            if (descriptor := _controller(run)) is not None:
                at_end.callback(os.close, descriptor)
                found[run.run] = descriptor
        yield found


def _controller(run: RunSaid) -> int | None:
    run_dir = _directory(run)
    if run_dir is None:
        return None
    info = run_dir.read_info()
    if info.host != os.uname().nodename or not info.is_alive():
        return None
    try:
        descriptor = os.pidfd_open(info.pid)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        # Only now: what the descriptor holds is the process that has this number at this moment.
        if info.is_alive() and os.stat(f"/proc/{info.pid}").st_uid == os.getuid():
            return descriptor
    os.close(descriptor)
    return None


def _directory(run: RunSaid) -> RunDir | None:
    """Its run directory, where it is here and of that very life of the run."""
    with contextlib.suppress(DbctlError, ValueError):  # its words are a host's
        found = open_(Path(run.run_dir))
        if found.read_info().run == run.run:
            return found
    return None


def _end(
    controllers: Mapping[str, int],
    runs: Mapping[str, RunSaid],
    *,
    tell: Callable[[str], object],
) -> set[str]:
    """Asks them to end, and waits; the runs that have not by then."""
    if not controllers:
        return set()
    poll, left = select.poll(), {}
    for run, descriptor in controllers.items():
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        poll.register(descriptor, select.POLLIN)
        left[descriptor] = run
    names = ", ".join(runs[run].name for run in controllers)
    many = counted(len(controllers), "run")
    tell(f"{many} asked to save and end, at most {SAVE_LIMIT_S:g} s: {names}")
    deadline = time.monotonic() + SAVE_LIMIT_S
    while left and (left_s := deadline - time.monotonic()) > 0.0:
        for descriptor, _ in poll.poll(1000.0 * left_s):
            poll.unregister(descriptor)
            del left[descriptor]
    return set(left.values())


def _fate(run: RunSaid, state: str, *, by_itself: bool) -> RunStopped:
    step = None
    with contextlib.suppress(DbctlError):
        if (run_dir := _directory(run)) is not None:
            step = next(iter(checkpoints_by_step(run_dir.checkpoints)), None)
            if by_itself:
                state = str(run_dir.read_status().get("state", state))
    return RunStopped(
        run=run.run,
        name=run.name,
        run_dir=run.run_dir,
        user=run.user,
        state=state,
        checkpoint=step,
    )
