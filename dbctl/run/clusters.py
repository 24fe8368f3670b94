"""Clusters that stay up: which there are, how one begins and ends, what its keepers say.

    $XDG_STATE_HOME/dbctl/clusters/NAME.json      (default ~/.local/state), 0600 in a 0700 directory

Rules of this file: a file is there before any keeper stays and until all of them are gone;
what hosts are given in `env` is in it. Several commands may work at once: a file appears whole or
not at all, and only where there was none; it goes only where it is of the very keepers that are
gone.

Theory of operation. What is known here is only where the keepers are; whether they live, and what
runs, they are asked. A host that does not answer is a row of the answer, and no failure: its
keeper may live. Only a host that says itself that no keeper is there has none.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from dbctl import __version__
from dbctl.envelope import PROTOCOL_VERSION
from dbctl.errors import LaunchError, RunError, UsageError, reason
from dbctl.experiment.read import load_hosts
from dbctl.experiment.specs import Experiment, HostSpec
from dbctl.launch.bootstrap import nobody
from dbctl.launch.ssh_words import NOWHERE, Standing
from dbctl.launch.standing import Keeper, Reply, ask, bring_up, is_gone
from dbctl.progress.text import counted
from dbctl.run.bootstrap import bootstrap as bring_dbctl
from dbctl.run.findings import of_error, refusal
from dbctl.run.signals import Signals

NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
FILE_VERSION = 1
# What of a cluster's hosts a run may set anew; who they are, and how many, is the cluster's.
OWN = re.compile(r"cluster\.(encryption|hosts\.\d+\.(address|slots|threads|labels|workdir|env))\b")


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """One file: the keepers as they were when they were brought up."""

    version: int
    name: str
    dbctl: str
    protocol: int
    launched: str  # ISO 8601 with the offset from UTC
    keepers: tuple[Keeper, ...]

    def standing(self, **table: str) -> Standing:
        """Where a run finds its keepers, and what they tell of it: its name, its directory."""
        who = f"{_user()}@{os.uname().nodename}"
        sockets = {one.host.name: one.socket for one in self.keepers}
        return Standing(sockets=sockets, table={"user": who, **table})

    def overrides(self, given: Sequence[str]) -> list[str]:
        """What puts its hosts into an experiment, then `given`, texts of --set.

        UsageError: one of `given` is about which hosts there are.
        """
        for override in given:
            if re.match(r"\s*cluster\b", override) and not OWN.match(override.strip()):
                raise UsageError(
                    f"--set {override}: --cluster {self.name} says already which hosts there are"
                )
        hosts = msgspec.json.encode([asdict(one.host) for one in self.keepers]).decode()
        return ["cluster.launcher=ssh", f"cluster.hosts={hosts}", *given]


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


def overrides_on(cluster: Cluster | None, given: Sequence[str]) -> Sequence[str]:
    """Texts of --set of a run that is on `cluster`, or on none."""
    return given if cluster is None else cluster.overrides(given)


def standing_on(cluster: Cluster | None, experiment: Experiment, run_dir: Path) -> Standing:
    """Who starts the agents of a run that is on `cluster`, or on none."""
    if cluster is None:
        return NOWHERE
    return cluster.standing(name=experiment.name, run_dir=str(run_dir.absolute()))


def _user() -> str:
    """A container's user may have no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


# ------------------------------------------------------------------------------------ the files


def directory() -> Path:
    """UsageError: this user has no home directory."""
    base = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.local/state")
    if not os.path.isabs(base):
        raise UsageError("no home directory is known, where clusters are kept: set XDG_STATE_HOME")
    return Path(base) / "dbctl" / "clusters"


def known() -> list[str]:
    """The names of all clusters that were launched and not stopped, in order."""
    names = (path.name.removesuffix(".json") for path in directory().glob("*.json"))
    return sorted(name for name in names if re.fullmatch(NAME, name))


def read(name: str) -> Cluster:
    """UsageError: there is none of that name; RunError: its file is damaged."""
    path = _path(name)
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise UsageError(f"there is no cluster {name}; {describe_known()}") from error
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {reason(error)}") from error
    try:
        found = msgspec.json.decode(data, type=Cluster)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RunError(f"{path}: damaged: {error}; remove it once its keepers are gone") from error
    if found.version != FILE_VERSION:
        raise RunError(f"{path}: of another version of dbctl, {found.dbctl}: use that")
    return found


def describe_known() -> str:
    names = known()
    if not names:
        return "none is known here: `dbctl launch-cluster HOSTS.yaml` makes one"
    return f"known here: {', '.join(names)}"


def _path(name: str) -> Path:
    if not re.fullmatch(NAME, name):
        raise UsageError(
            f"{name!r} is no cluster's name: expected up to 64 letters, digits and `_.-`, the "
            "first a letter or digit; give --name"
        )
    return directory() / f"{name}.json"


def _write(cluster: Cluster, place: Callable[[Path, Path], object] = os.link) -> None:
    """FileExistsError: there is one of that name; OSError: it cannot be written."""
    path = _path(cluster.name)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{cluster.name}.{secrets.token_hex(4)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(cluster), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        place(temporary, path)  # a link, unlike a rename, takes nobody's place
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """No other command changes or removes a file meanwhile."""
    fd = os.open(directory(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _is_known(cluster: Cluster) -> bool:
    """Whether the file of its name is of its keepers; another may have been launched since."""
    with contextlib.suppress(RunError, UsageError):
        there = read(cluster.name).keepers
        return [one.socket for one in there] == [one.socket for one in cluster.keepers]
    return False


def _renew(cluster: Cluster) -> None:
    """Writes what is known of its keepers by now; UsageError: it was stopped meanwhile."""
    with _alone():
        if not _is_known(cluster):
            raise UsageError(f"cluster {cluster.name} was stopped while it was launched")
        _write(cluster, os.replace)


def _forget(cluster: Cluster) -> None:
    with contextlib.suppress(FileNotFoundError), _alone():
        if _is_known(cluster):
            _path(cluster.name).unlink()


# ----------------------------------------------------------------------------- launch, look, stop


def launch(
    path: str,
    name: str | None,
    *,
    bootstrap: bool = False,
    signals: Signals | None = None,
    tell: Callable[[str], object] = nobody,
) -> Cluster:
    """Keepers on all hosts of a file, or on none. `bootstrap`: dbctl is brought there first.

    ExperimentError, UsageError: the file or the name; LaunchError: all hosts where none came up;
    Interrupted: one of `signals` has come. `tell` is told what takes its time, and of keepers that
    could not be stopped.
    """
    signals = signals if signals is not None else Signals()
    name = name if name is not None else Path(path).stem
    file = _path(name)
    hosts = load_hosts(path)
    if file.exists():
        _make_way(read(name))
    for other, shared in _shared(name, hosts):
        tell(f"warning: {shared} in cluster {other}, too: the runs of both share what is there")
    written: list[Cluster] = []

    def interrupted() -> bool:
        return signals.count > 0

    def keep(keepers: list[Keeper]) -> None:
        signals.check()
        written.append(_begun(name, keepers))

    try:
        if bootstrap:
            hosts = bring_dbctl(hosts, interrupted=interrupted, tell=tell)
        keepers = bring_up(name, hosts, keep=keep, interrupted=interrupted)
        cluster = msgspec.structs.replace(written[0], keepers=tuple(keepers))
        _renew(cluster)
        _check_that_they_stay(cluster)
        signals.check()
    except BaseException as error:
        for one in written:
            _take_back(one, tell)
        signals.check()
        if isinstance(error, ExceptionGroup):
            errors = [of_error(e) for e in error.exceptions if isinstance(e, LaunchError)]
            refused = refusal(errors, len(hosts))
            assert refused is not None
            raise refused from error
        raise
    return cluster


def _begun(name: str, keepers: Sequence[Keeper]) -> Cluster:
    """A new cluster, written down; UsageError: it cannot be."""
    cluster = Cluster(
        version=FILE_VERSION,
        name=name,
        dbctl=__version__,
        protocol=PROTOCOL_VERSION,
        launched=datetime.now().astimezone().isoformat(timespec="seconds"),
        keepers=tuple(keepers),
    )
    try:
        _write(cluster)
    except FileExistsError as error:
        raise UsageError(f"another command has just launched a cluster {name}") from error
    except OSError as error:
        raise UsageError(f"{_path(name)}: cannot be written: {reason(error)}") from error
    return cluster


def _take_back(cluster: Cluster, tell: Callable[[str], object]) -> None:
    """Stops what may stay of it; it is forgotten only where nothing does."""
    if left := [one.host.name for one in stop(cluster) if one.state not in ("stopped", "gone")]:
        do = f"`dbctl stop-cluster {cluster.name}` ends it"
        tell(f"warning: {', '.join(left)}: its agent may live: {do}")


def _shared(name: str, hosts: Sequence[HostSpec]) -> Iterator[tuple[str, str]]:
    """Each other cluster that has hosts which are reached as some of `hosts` are, and which."""
    for other in known():
        with contextlib.suppress(RunError, UsageError):  # damaged, or stopped meanwhile
            there = {one.host.destination for one in read(other).keepers} if other != name else ()
            if found := [host.name for host in hosts if host.destination in there]:
                yield other, f"{', '.join(found)} {'is' if len(found) == 1 else 'are'}"


def _check_that_they_stay(cluster: Cluster) -> None:
    """The ssh that started them has ended; LaunchError where keepers went with it."""
    lost = [one.host.name for one in look(cluster) if one.state == "gone"]
    if lost:
        raise LaunchError(
            "keeper",
            "does not outlive the ssh that started it",
            host=", ".join(lost),
            cure="where systemd ends what a user leaves, `loginctl enable-linger` as that user",
        )


def _make_way(cluster: Cluster) -> None:
    """Forgets a cluster that has no keeper any more; UsageError where one may live."""
    left = [one for one in look(cluster) if one.state != "gone"]
    if left:
        states = ", ".join(f"{one.host.name} is {one.state}" for one in left)
        raise UsageError(
            f"there is a cluster {cluster.name} already ({states}): give --name another, or stop "
            f"that one, `dbctl stop-cluster {cluster.name}`"
        )
    _forget(cluster)


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


def stop(cluster: Cluster, *, force: bool = False) -> list[Seen]:
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
    if force or all(one.state in ("stopped", "gone") for one in found):
        _forget(cluster)
    return found


def _rows(cluster: Cluster) -> list[tuple[HostSpec, str, str]]:
    return [(one.host, one.socket, one.node) for one in cluster.keepers]
