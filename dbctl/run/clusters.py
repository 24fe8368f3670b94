"""Which clusters stay up: one file each, and what a run on one is told of it.

    $XDG_STATE_HOME/dbctl/clusters/NAME.json      (default ~/.local/state), 0600 in a 0700 directory

Rules of this file: a file is there before any keeper stays and until all of them are gone;
what hosts are given in `env` is in it. Several commands may work at once: a file appears whole or
not at all, and only where there was none; it goes only where it is of the very keepers that are
gone.

Theory of operation. What is known here is only where the keepers are; whether they live, and what
runs, they are asked (`dbctl.run.cluster_hosts`).
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import msgspec

from dbctl import __version__
from dbctl.envelope import PROTOCOL_VERSION
from dbctl.errors import RunError, UsageError, reason
from dbctl.experiment.specs import Experiment
from dbctl.launch.ssh_words import NOWHERE, Standing
from dbctl.launch.standing import Keeper

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
    path = path_of(name)
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


def path_of(name: str) -> Path:
    """Where its file is, if there is one. UsageError: that is no name."""
    if not re.fullmatch(NAME, name):
        raise UsageError(
            f"{name!r} is no cluster's name: expected up to 64 letters, digits and `_.-`, the "
            "first a letter or digit; give --name"
        )
    return directory() / f"{name}.json"


def _write(cluster: Cluster, place: Callable[[Path, Path], object] = os.link) -> None:
    """FileExistsError: there is one of that name; OSError: it cannot be written."""
    path = path_of(cluster.name)
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


def begin(name: str, keepers: Sequence[Keeper]) -> Cluster:
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
        raise UsageError(f"{path_of(name)}: cannot be written: {reason(error)}") from error
    return cluster


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


def renew(cluster: Cluster) -> None:
    """Writes what is known of its keepers by now; UsageError: it was stopped meanwhile."""
    with _alone():
        if not _is_known(cluster):
            raise UsageError(f"cluster {cluster.name} was stopped while it was launched")
        _write(cluster, os.replace)


def forget(cluster: Cluster) -> None:
    with contextlib.suppress(FileNotFoundError), _alone():
        if _is_known(cluster):
            path_of(cluster.name).unlink()
