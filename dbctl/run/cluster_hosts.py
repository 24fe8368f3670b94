"""The hosts of a cluster that stays up, as their keepers tell of them; and the end of the keepers.

Rules of this file: a host that does not answer is a row of the answer, and no failure: its keeper
may live. Only a host that says itself that no keeper is there has none. All hosts are asked at
once, and no longer than `dbctl.launch.standing` waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from dbctl.errors import LaunchError
from dbctl.experiment.specs import HostSpec
from dbctl.launch.standing import Keeper, Reply, ask, is_gone
from dbctl.progress.text import counted
from dbctl.run import clusters
from dbctl.run.clusters import Cluster


class NodeSaid(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    pid: int
    rss_bytes: int
    seconds: float


class RunSaid(msgspec.Struct, frozen=True, kw_only=True):
    """A run's agent and its nodes; what its controller said of it may be missing."""

    run: str
    agent: str
    pid: int
    seconds: float
    nodes: tuple[NodeSaid, ...]
    name: str = "?"
    run_dir: str = "?"
    user: str = "?"


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """A keeper's answer (dbctl/keeper.py)."""

    state: str
    version: str
    seconds: float
    runs: tuple[RunSaid, ...]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A host of a cluster. `state`: up, stopping, stopped, gone, unreachable; `why`: more of it.

    `said` of one that is up or stopping.
    """

    host: HostSpec
    state: str
    why: str = ""
    said: Said | None = None

    @property
    def is_over(self) -> bool:
        """Whether no keeper is there any more."""
        return self.state in ("stopped", "gone")


def look(cluster: Cluster) -> list[Seen]:
    """Each host as its keeper tells of it, within ten seconds."""
    replies = ask(_rows(cluster), "status")
    return [_seen(one, reply) for one, reply in zip(cluster.keepers, replies, strict=True)]


def _seen(one: Keeper, reply: Reply) -> Seen:
    if isinstance(reply, LaunchError):
        if is_gone(reply):
            # Who ends by itself takes its socket with it.
            killed = "ConnectionRefusedError" in reply.log_tail
            why = "it was killed, and runs that were on it may go on" if killed else ""
            return Seen(host=one.host, state="gone", why=why)
        why = "; ".join([reply.what, *reply.log_tail.splitlines()[-1:]])
        return Seen(host=one.host, state="unreachable", why=why)
    try:
        said = msgspec.convert(reply, Said)
    except msgspec.ValidationError as error:
        return Seen(host=one.host, state="unreachable", why=f"answers in another form: {error}")
    return Seen(host=one.host, state=said.state, said=said)


def end_keepers(cluster: Cluster, *, force: bool = False) -> list[Seen]:
    """Ends the keepers and the runs on them: what became of each (stopped, gone, unreachable).

    The cluster is forgotten once all are gone; with `force`, also where hosts cannot be reached.
    """
    replies = ask(_rows(cluster), "stop")
    found = []
    for one, reply in zip(cluster.keepers, replies, strict=True):
        if isinstance(reply, dict) and reply.get("stopped") is True:
            n_runs = reply.get("runs", 0)
            why = f"{counted(n_runs, 'run')} ended with it" if n_runs else ""
            found.append(Seen(host=one.host, state="stopped", why=why))
        else:
            found.append(_seen(one, reply))
    if force or all(one.is_over for one in found):
        clusters.forget(cluster)
    return found


def _rows(cluster: Cluster) -> list[tuple[HostSpec, str, str]]:
    return [(one.host, one.socket, one.node) for one in cluster.keepers]
