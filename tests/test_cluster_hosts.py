"""run/cluster_hosts.py: what is said of each host of a cluster, and when it is forgotten.

Over a real sshd, and with runs: cluster/test_standing.py.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dbctl.errors import LaunchError, UsageError
from dbctl.launch import standing
from dbctl.run import cluster_hosts, launching
from dbctl.run.cluster_hosts import end_keepers, look
from dbctl.run.clusters import known, read
from dbctl.run.launching import launch
from tests.hosts_here import Place, hosts_here


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with hosts_here(tmp_path) as found:
        yield found


# -------------------------------------------------------------------------------------- other users

OTHER = """import array, os, sys
import dbctl.__main__, dbctl.caller, dbctl.keeper  # what another user may not read
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
sys.argv = ["dbctl", *sys.argv[4:]]
sys.exit(dbctl.__main__.main())
"""


def test_two_users_of_a_host_have_keepers_of_their_own(place: Place) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to be somebody else")
    (place.path / "other.py").write_text(OTHER)
    other = place.path / "other"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} {place.path}/other.py "$@"\n')
    other.chmod(0o755)
    mine = {"name": "mine", "python": place.python, "workdir": str(place.path)}
    theirs = {"name": "theirs", "python": str(other), "workdir": "/tmp"}
    place.file.write_text(json.dumps({"version": 1, "hosts": [mine, theirs]}))
    cluster = launch(str(place.file), None)
    found = look(cluster)
    assert [one.state for one in found] == ["up", "up"], found
    directories = [Path(one.socket).parent.stat() for one in cluster.keepers]
    assert [one.st_uid for one in directories] == [0, 65534]
    assert [stat.S_IMODE(one.st_mode) for one in directories] == [0o700, 0o700]
    crossed = zip(cluster.keepers, reversed(cluster.keepers), strict=True)
    replies = standing.ask([(one.host, other.socket, one.node) for one, other in crossed], "stop")
    assert all(isinstance(reply, LaunchError) for reply in replies)
    found = look(cluster)
    assert [one.state for one in found] == ["up", "up"], found


# -------------------------------------------------------------------------------- looking, stopping


def test_each_host_has_its_state(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "ASK_LIMIT_S", 2.0)
    cluster = launch(place.hosts("a", "b", "c", "d", "e"), None)
    place.spoil("b", "echo 'ssh: connect to host b port 22: Connection refused' >&2; exit 255")
    place.spoil("c", 'echo \'ANSWER {"state": "up"}\'')
    place.spoil("d", "exec sleep 60")
    os.kill(cluster.keepers[4].pid, signal.SIGKILL)
    begin = time.monotonic()
    found = {one.host.name: one for one in look(cluster)}
    assert time.monotonic() - begin < 4.0
    assert [one.state for one in found.values()] == [
        "up", "unreachable", "unreachable", "unreachable", "gone",
    ]  # fmt: skip
    said = found["a"].said
    assert said is not None
    assert said.runs == ()
    assert "Connection refused" in found["b"].why
    assert "answers in another form: Object missing required field" in found["c"].why
    assert "did not say ANSWER in time" in found["d"].why
    for name in "bcd":
        place.mend(name)
    stopped = {one.host.name: one.state for one in end_keepers(cluster)}
    assert stopped == dict.fromkeys("abcd", "stopped") | {"e": "gone"}
    assert found["e"].why == "it was killed, and runs that were on it may go on"
    assert known() == []
    for path in place.keepers():  # of the killed one
        shutil.rmtree(path)


@pytest.mark.parametrize("how", ["another user", "another machine"])
def test_a_host_that_means_somebody_else_by_now_is_not_gone(
    place: Place, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """~/.ssh/config has another User, or HostName: nobody there knows whether the keeper lives."""
    cluster = launch(place.hosts("a"), None)
    [keeper] = cluster.keepers
    assert keeper.node == os.uname().nodename
    if how == "another machine":
        monkeypatch.setattr(cluster_hosts, "ask", lambda rows, what: standing.ask(
            [(host, "/tmp/none.sock", "elsewhere") for host, _, _ in rows], what
        ))  # fmt: skip
    else:
        if os.getuid() != 0:
            pytest.skip("needs root, to be somebody else")
        (place.path / "other.py").write_text(OTHER)
        words = f'exec {sys.executable} {place.path}/other.py "$@"'
        place.spoil("a", f"set -- -P -m dbctl caller {keeper.socket} {keeper.node}; {words}")
    [found] = end_keepers(cluster)
    assert found.state == "unreachable"
    word = "on elsewhere, and this is" if how == "another machine" else "PermissionError"
    assert word in found.why
    assert known() == ["lab"]
    monkeypatch.setattr(cluster_hosts, "ask", standing.ask)
    (place.path / "hosts" / "a").unlink(missing_ok=True)
    assert [one.state for one in end_keepers(cluster)] == ["stopped"]


def test_a_cluster_that_was_launched_anew_meanwhile_is_not_forgotten(place: Place) -> None:
    old = launch(place.hosts("a"), None)
    assert [one.state for one in end_keepers(old)] == ["stopped"]
    new = launch(place.hosts("a"), None)
    assert [one.state for one in end_keepers(old)] == ["gone"]
    launching._make_way(old)
    assert read("lab") == new
    end_keepers(old, force=True)
    assert read("lab") == new
    assert [one.state for one in end_keepers(new)] == ["stopped"]
    assert known() == []


def test_a_cluster_is_not_forgotten_while_a_keeper_may_live(place: Place) -> None:
    cluster = launch(place.hosts("a", "b"), None)
    place.spoil("b", "exit 255")
    assert [one.state for one in end_keepers(cluster)] == ["stopped", "unreachable"]
    assert known() == ["lab"]
    with pytest.raises(UsageError, match=r"\(b is unreachable\): give --name another"):
        launch(place.hosts("a", "b"), None)
    place.mend("b")
    assert [one.state for one in end_keepers(cluster)] == ["gone", "stopped"]
    assert known() == []


def test_the_words_of_a_host_reach_a_shell_there_as_one(place: Place) -> None:
    """A work directory that a shell would take apart."""
    path = place.path / "it's; touch here"
    text = json.dumps({"name": "a", "python": place.python, "workdir": str(path)})
    place.file.write_text(f'{{"version": 1, "hosts": [{text}]}}')
    launch(str(place.file), None)
    assert path.is_dir()
    assert shlex.quote(str(path)) != str(path)
