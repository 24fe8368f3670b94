"""run/clusters.py and launch/standing.py over a program named `ssh` that runs the command here.

Over a real sshd, and with runs: cluster/test_standing.py.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dbctl.caller import NO_KEEPER
from dbctl.cli.main import main
from dbctl.errors import ExperimentError, LaunchError, RunError, UsageError
from dbctl.experiment.read import load
from dbctl.experiment.specs import HostSpec, SshCluster
from dbctl.keeper_start import LOG, STOPPED
from dbctl.launch import standing
from dbctl.launch.base import ReadyLine
from dbctl.launch.ssh import _Attempt
from dbctl.launch.ssh_talk import Talk
from dbctl.launch.ssh_words import (
    NOTHING,
    NOWHERE,
    OPTIONS,
    Standing,
    dbctl_command,
    diagnose,
    errand,
    orders,
    ssh_command,
)
from dbctl.run import clusters
from dbctl.run.clusters import Cluster, known, launch, look, read, stop
from tests.cluster.harness import state, wait_until
from tests.keepers import Keepers

ROOT = Path(__file__).parent.parent
FILE = str(ROOT / "experiments" / "digits-downpour.yaml")
SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
[ -e "$DIRECTORY/$2" ] && . "$DIRECTORY/$2"
exec sh -c "$3"
"""


class Place:
    """Hosts `a`, `b`, ... that are all this machine; `spoil` gives one a fault."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path / "lab.yaml"
        self._keepers = Keepers(path)
        self.python = str(self._keepers.python)
        self.keepers = self._keepers.found
        self.close = self._keepers.close

    def spoil(self, host: str, script: str) -> None:
        (self.path / "hosts" / host).write_text(script)

    def mend(self, host: str) -> None:
        (self.path / "hosts" / host).unlink()

    def hosts(self, *names: str) -> str:
        there = {"python": self.python, "workdir": str(self.path / "work")}
        rows = [{"name": name, **there} for name in names]
        self.file.write_text(json.dumps({"version": 1, "hosts": rows}))
        return str(self.file)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name in ("bin", "hosts"):
        (tmp_path / name).mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("DIRECTORY", str(tmp_path / "hosts"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    this = Place(tmp_path)
    yield this
    assert clusters.directory().is_relative_to(tmp_path), "not those of whoever runs the tests"
    for name in known():
        cluster = read(name)
        if any(Path(one.socket).exists() for one in cluster.keepers):
            stop(cluster, force=True)
    wait_until(lambda: not this.keepers(), 5.0)
    this.close()


def a_cluster(*names: str, **changes: Any) -> Cluster:
    """One that nobody launched."""
    keepers = [
        {
            "host": {"name": name, "slots": 4, "env": ["A=it's #1"]},
            "socket": f"/tmp/dbctl-keeper-{name}/control.sock",
            "pid": 1,
            "python": "/p",
        }
        for name in names
    ]
    values = {
        "version": 1, "name": "lab", "dbctl": "0.1.0", "protocol": 2, "launched": "now",
        "keepers": keepers, **changes,
    }  # fmt: skip
    path = clusters.directory() / "lab.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))
    return read("lab")


# ------------------------------------------------------------------------------ the words


def test_what_is_said_for_a_run_on_a_cluster_differs_in_who_starts_the_agent() -> None:
    host = a_host()
    socket = "/tmp/dbctl-keeper-x/control.sock"
    plain, on = (
        errand("agent-0", host, runtime="/run/x", token="t", keeper=keeper)
        for keeper in ("", socket)
    )
    words, others = ssh_command(on), ssh_command(plain)
    assert words[:-1] == others[:-1]
    assert words[-1] == f"python3 -P -m dbctl caller {socket}"
    table = {"name": "it's", "run_dir": "/r", "user": "me@here"}
    said = [
        json.loads(orders(one, NOTHING, run="r", lease_s=5.0, table=table)) for one in (plain, on)
    ]
    assert said[1] == said[0] | {"do": "run", "table": table}


def a_host() -> HostSpec:
    return HostSpec(name="a", env=("A=b",), workdir="/w")


def test_a_keeper_is_started_and_asked_by_the_same_ssh() -> None:
    words = dbctl_command(a_host(), "keeper", "--stdin")
    assert words[:2] == ["ssh", "-T"]
    assert [word for word in words if "=" in word] == list(OPTIONS)
    assert words[-3:] == ["--", "a", "python3 -P -m dbctl keeper --stdin"]
    assert json.loads(standing.options("lab", a_host())) == {
        "cluster": "lab",
        "workdir": "/w",
        "env": {"A": "b"},
    }


def test_a_run_finds_the_keeper_of_each_host() -> None:
    found = Standing(sockets={"a": "/s"})
    assert found.keeper(a_host()) == "/s"
    assert NOWHERE.keeper(a_host()) == ""


def test_an_ended_cluster_is_told_whatever_came_beside_it(tmp_path: Path) -> None:
    """The controller's link tries the forwarded socket again once the agent is gone."""
    said = f"12:00:00 keeper {STOPPED}\nchannel 2: open failed: connect failed: open failed"
    assert diagnose(a_host(), 0, said).fault == "its cluster was stopped"
    talk = Talk(
        "agent-0",
        a_host(),
        ["true"],
        text="",
        make_said=ReadyLine,
        log_path=tmp_path / "agent-0.log",
    )
    talk.log_path.write_text("10:00:00.000 agent-0 ends\n" * 40 + said)
    error = talk.failed("ended early", 0)
    assert str(error) == "agent-0 on a ended: its cluster was stopped"
    assert error.about == "cluster"
    gone = f"caller {NO_KEEPER}: FileNotFoundError\nchannel 2: open failed: connect failed"
    assert diagnose(a_host(), 69, gone).fault == "its standing agent is gone"


@pytest.mark.parametrize(
    "said", ["No module named dbctl", "No module named 'zmq'", "install the same version"]
)
def test_to_a_cluster_that_stands_dbctl_is_not_brought(said: str) -> None:
    cures = [
        diagnose(a_host(), 1, said, of_cluster=of_cluster).cure for of_cluster in (True, False)
    ]
    assert cures[0] == (
        "stop that cluster (`dbctl stop-cluster`) and launch it again with --bootstrap"
    )
    assert cures[1].startswith("let --bootstrap bring it")


def test_a_run_on_a_cluster_knows_that_it_is_on_one(tmp_path: Path) -> None:
    for keeper, word in (("/s", "launch it again with --bootstrap"), ("", "let --bootstrap")):
        one = errand("agent-0", a_host(), runtime="/run/x", token="t", keeper=keeper)
        agent = _Attempt(one, "", tmp_path / "agent-0.log")
        error = agent.talk.failed("install the same version on every host")
        assert word in error.cure


# --------------------------------------------------------------------------------- the files


def test_a_launched_cluster_is_a_private_file_without_secrets(place: Place) -> None:
    cluster = launch(place.hosts("a", "b"), None)
    path = place.path / "state" / "dbctl" / "clusters" / "lab.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [p.name for p in path.parent.iterdir()] == ["lab.json"], "no temporary file"
    data = json.loads(path.read_text())
    assert set(data) == {"version", "name", "dbctl", "protocol", "launched", "keepers"}
    assert [one["host"]["name"] for one in data["keepers"]] == ["a", "b"]
    assert read("lab") == cluster
    assert known() == ["lab"]
    assert len(place.keepers()) == 2
    for one in cluster.keepers:
        assert Path(one.socket).is_socket()
        assert state(one.pid) in ("S", "R")


def test_clusters_are_looked_for_where_the_system_keeps_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_STATE_HOME", value)
        assert clusters.directory() == tmp_path / ".local" / "state" / "dbctl" / "clusters"
    assert known() == []


def test_a_user_without_a_name_or_a_home(place: Place) -> None:
    """As in a container that was given any number for its user."""

    def nobody(*words: object) -> str:
        raise KeyError("getpwuid(): uid not found")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("getpass.getuser", nobody)
        found = a_cluster("a").standing(name="n")
        assert found.table == {"user": f"{os.getuid()}@{os.uname().nodename}", "name": "n"}
        patch.delenv("XDG_STATE_HOME")
        patch.setattr("os.path.expanduser", lambda path: path)
        with pytest.raises(UsageError, match="no home directory is known"):
            known()


@pytest.mark.parametrize("name", ["", "a/b", "..", "-x", "a b", "x" * 65, "a\n"])
def test_what_is_no_name_is_refused(place: Place, name: str) -> None:
    with pytest.raises(UsageError, match="no cluster's name"):
        launch(place.hosts("a"), name)
    with pytest.raises(UsageError, match="no cluster's name"):
        read(name)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "damaged"), ('{"version": 1}', "damaged: Object missing"), (None, "another version")],
)
def test_a_file_that_cannot_be_used_is_told(place: Place, text: str | None, words: str) -> None:
    a_cluster("a", version=1)
    path = clusters.directory() / "lab.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 9', 1))
    if text is not None:
        path.write_text(text)
    with pytest.raises(RunError, match=words):
        read("lab")
    path.unlink()


def test_an_unknown_cluster_names_the_known_ones(place: Place) -> None:
    a_cluster("a")
    with pytest.raises(UsageError, match="there is no cluster lob; known here: lab"):
        read("lob")


# ------------------------------------------------------------------- the hosts of an experiment


def test_the_hosts_take_the_place_of_the_experiments_own(place: Place) -> None:
    cluster = a_cluster("a", "b")
    for text, encryption in (
        ("cluster={launcher: local}", "on"),
        (
            "cluster={launcher: ssh, hosts: [{name: x}, {name: y}, {name: z}], encryption: off}",
            "off",
        ),
    ):
        given = [text, *cluster.overrides(())]
        found = load(FILE, given).cluster
        assert isinstance(found, SshCluster)
        assert found.members == tuple(one.host for one in cluster.keepers)
        assert found.encryption == encryption
    assert isinstance(load(FILE, cluster.overrides(())).cluster, SshCluster)


@pytest.mark.parametrize(
    "given",
    ["cluster.hosts.1.slots=2", "cluster.hosts.0.labels=[worker]", " cluster.encryption = off"],
)
def test_how_hosts_are_used_can_be_set_anew(place: Place, given: str) -> None:
    cluster = a_cluster("a", "b")
    assert load(FILE, cluster.overrides([given])).cluster != load(FILE, cluster.overrides(()))


@pytest.mark.parametrize(
    "given",
    [
        "cluster={launcher: local}",
        "cluster.launcher=local",
        "cluster.hosts=[]",
        "cluster.hosts.0.name=c",
        "cluster.hosts.0.ssh=elsewhere",
        "cluster.hosts.0.python=python3",
        " cluster.hosts.0={name: d}",
    ],
)
def test_which_hosts_there_are_cannot_be_set_anew(place: Place, given: str) -> None:
    with pytest.raises(UsageError, match="--cluster lab says already which hosts there are"):
        a_cluster("a").overrides([given])


def test_other_keys_are_nobodys_business(place: Place) -> None:
    assert a_cluster("a").overrides(["seed=3", "name=cluster"])[-2:] == ["seed=3", "name=cluster"]


# --------------------------------------------------------------------------------- all or nothing


def test_one_bad_host_and_none_has_a_keeper(place: Place) -> None:
    place.spoil("b", "echo 'b: Permission denied (publickey).' >&2; exit 255")
    place.spoil("c", "exit 127")
    with pytest.raises(LaunchError) as caught:
        launch(place.hosts("a", "b", "c"), None)
    assert "2 of 3 hosts are not ready, and nothing was started" in str(caught.value)
    assert "it does not let this user in" in str(caught.value)
    assert "there is no" in str(caught.value)
    assert known() == []
    assert place.keepers() == []


def test_a_host_that_is_lost_before_the_last_word_ends_the_others(place: Place) -> None:
    """It hears its options and nothing more; by then the others have been told to stay."""
    place.spoil("b", 'read line; printf "%s\\n" "$line" | sh -c "$3"; exit 0')
    with pytest.raises(LaunchError) as caught:
        launch(place.hosts("a", "b"), None)
    assert "nobody told it to stay" in str(caught.value)
    assert place.keepers() == []


def test_a_host_that_ends_what_a_user_leaves_is_told(place: Place) -> None:
    """As systemd's KillUserProcesses does when the session is over."""
    place.spoil(
        "b",
        'sh -c "$3" | tee "$DIRECTORY/said"\n'
        """pid=$(sed -n 's/^STAYS {"pid": \\([0-9]*\\),.*/\\1/p' "$DIRECTORY/said")\n"""
        '[ -z "$pid" ] || kill -9 $pid; exit 0\n',
    )
    with pytest.raises(LaunchError) as caught:
        launch(place.hosts("a", "b"), None)
    assert "keeper on b does not outlive the ssh that started it" in str(caught.value)
    assert "`loginctl enable-linger`" in str(caught.value)
    assert known() == []
    [left] = place.keepers()  # the killed one's
    shutil.rmtree(left)


def test_another_command_was_faster(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    bring_up = clusters.bring_up

    def slowly(name: str, hosts: Any, **more: Any) -> Any:
        a_cluster("other")
        return bring_up(name, hosts, **more)

    monkeypatch.setattr(clusters, "bring_up", slowly)
    with pytest.raises(UsageError, match="another command has just launched a cluster lab"):
        launch(place.hosts("a"), None)
    assert place.keepers() == []
    assert read("lab").keepers[0].host.name == "other"
    (clusters.directory() / "lab.json").unlink()


def test_state_that_cannot_be_written_leaves_no_keeper(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place.path / "state").write_text("a file")
    with pytest.raises(UsageError, match="cannot be written"):
        launch(place.hosts("a"), None)
    assert place.keepers() == []


def test_ctrl_c_while_hosts_come_up_leaves_nothing(place: Place) -> None:
    place.spoil("b", "exec sleep 60")
    words = [sys.executable, "-m", "dbctl", "launch-cluster", place.hosts("a", "b")]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: place.keepers())
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10.0)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert known() == []
    wait_until(lambda: not place.keepers(), 5.0)


@pytest.mark.parametrize(
    ("name", "status"), [("SIGTERM", 75), ("SIGHUP", 75), ("SIGINT", 130), ("SIGKILL", -9)]
)
def test_a_signal_after_hosts_were_told_to_stay_leaves_no_unknown_keeper(
    place: Place, name: str, status: int
) -> None:
    """The second signal does not cut off the end of what the first has ended."""
    place.spoil("b", 'case "$3" in *--stdin*) sh -c "$3" | grep --line-buffered -v STAYS;'
                     ' cat;; *) sh -c "$3";; esac; exit')  # fmt: skip
    words = [sys.executable, "-m", "dbctl", "launch-cluster", place.hosts("a", "b")]
    env = {**os.environ, "TMPDIR": str(place.path)}  # what a killed one leaves goes with the test
    with subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True) as process:
        wait_until(known)
        assert read("lab").keepers[0].pid == 0, "it is written before any stays"
        wait_until(lambda: "of cluster lab" in " ".join(map(log_of, place.keepers())))
        for _ in range(2):
            process.send_signal(signal.Signals[name])
            time.sleep(0.2)
        _, err = process.communicate(timeout=20.0)
    assert process.returncode == status
    if name == "SIGKILL":
        assert {one.state for one in look(read("lab"))} == {"up"}
        stop(read("lab"))
    else:
        assert err.count("before the cluster was up") == 1, err
        assert err.count("\n") == 1, err
    assert known() == []
    assert place.keepers() == []


def log_of(directory: Path) -> str:
    path = directory / LOG
    return path.read_text() if path.exists() else ""


def test_what_could_not_be_taken_back_is_not_forgotten(place: Place) -> None:
    """The way to the host is lost after it was told to stay."""
    place.spoil("b", 'case "$3" in *--stdin*) sh -c "$3" | grep --line-buffered -v STAYS; exit 0;;'
                     " *) exit 255;; esac")  # fmt: skip
    told: list[str] = []
    with pytest.raises(LaunchError):
        launch(place.hosts("a", "b"), None, tell=told.append)
    assert told == ["warning: b: its agent may live: `dbctl stop-cluster lab` ends it"]
    place.mend("b")
    assert [one.state for one in stop(read("lab"))] == ["gone", "stopped"]
    assert known() == []


def test_dbctl_is_brought_before_keepers_come_up(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run, and are asked, with the Python that was made."""

    def bring(hosts: Any, *, interrupted: Any, tell: Any) -> Any:
        tell("bringing dbctl")
        return tuple(replace(host, python=place.python) for host in hosts)

    monkeypatch.setattr(clusters, "bring_dbctl", bring)
    text = place.hosts("a")
    place.file.write_text(place.file.read_text().replace(place.python, "/no/python"))
    with pytest.raises(LaunchError, match="there is no /no/python"):
        launch(text, None)
    told: list[str] = []
    launch(text, None, bootstrap=True, tell=told.append)
    assert told == ["bringing dbctl"]
    assert read("lab").keepers[0].host.python == place.python
    assert [one.state for one in look(read("lab"))] == ["up"]


@pytest.mark.parametrize("words", [["train", "x.yaml"], ["resume", "x"], ["eval", "x"]])
def test_nothing_is_brought_to_a_cluster_that_stands(
    place: Place, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    a_cluster("a")
    assert main([*words, "--cluster", "lab", "--bootstrap"]) == 2
    assert "--bootstrap is for launch-cluster" in capsys.readouterr().err


def test_hosts_of_another_cluster_are_told(place: Place) -> None:
    """Nothing is wrong with that, but two who do not know of each other wonder."""
    a_cluster("a", "b", "x")
    (clusters.directory() / "bad.json").write_text("{")
    told: list[str] = []
    launch(place.hosts("a", "b", "c"), "more", tell=told.append)
    assert told == ["warning: a, b are in cluster lab, too: the runs of both share what is there"]
    told.clear()
    with pytest.raises(UsageError, match="there is a cluster more already"):
        launch(place.hosts("a"), "more", tell=told.append)
    assert told == []
    for name in ("lab", "bad"):
        (clusters.directory() / f"{name}.json").unlink()


def test_a_bad_file_starts_nothing(place: Place) -> None:
    place.file.write_text("version: 1\nhosts: [{name: -a}]\n")
    with pytest.raises(ExperimentError):
        launch(str(place.file), None)
    assert place.keepers() == []


# ------------------------------------------------------------------------------------- other users

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
    stopped = {one.host.name: one.state for one in stop(cluster)}
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
        monkeypatch.setattr(clusters, "ask", lambda rows, what: standing.ask(
            [(host, "/tmp/none.sock", "elsewhere") for host, _, _ in rows], what
        ))  # fmt: skip
    else:
        if os.getuid() != 0:
            pytest.skip("needs root, to be somebody else")
        (place.path / "other.py").write_text(OTHER)
        words = f'exec {sys.executable} {place.path}/other.py "$@"'
        place.spoil("a", f"set -- -P -m dbctl caller {keeper.socket} {keeper.node}; {words}")
    [found] = stop(cluster)
    assert found.state == "unreachable"
    word = "on elsewhere, and this is" if how == "another machine" else "PermissionError"
    assert word in found.why
    assert known() == ["lab"]
    monkeypatch.setattr(clusters, "ask", standing.ask)
    (place.path / "hosts" / "a").unlink(missing_ok=True)
    assert [one.state for one in stop(cluster)] == ["stopped"]


def test_a_cluster_that_was_launched_anew_meanwhile_is_not_forgotten(place: Place) -> None:
    old = launch(place.hosts("a"), None)
    assert [one.state for one in stop(old)] == ["stopped"]
    new = launch(place.hosts("a"), None)
    assert [one.state for one in stop(old)] == ["gone"]
    clusters._make_way(old)
    assert read("lab") == new
    stop(old, force=True)
    assert read("lab") == new
    assert [one.state for one in stop(new)] == ["stopped"]
    assert known() == []


def test_a_cluster_is_not_forgotten_while_a_keeper_may_live(place: Place) -> None:
    cluster = launch(place.hosts("a", "b"), None)
    place.spoil("b", "exit 255")
    assert [one.state for one in stop(cluster)] == ["stopped", "unreachable"]
    assert known() == ["lab"]
    with pytest.raises(UsageError, match=r"\(b is unreachable\): give --name another"):
        launch(place.hosts("a", "b"), None)
    place.mend("b")
    assert [one.state for one in stop(cluster)] == ["gone", "stopped"]
    assert known() == []


def test_the_words_of_a_host_reach_a_shell_there_as_one(place: Place) -> None:
    """A work directory that a shell would take apart."""
    path = place.path / "it's; touch here"
    text = json.dumps({"name": "a", "python": place.python, "workdir": str(path)})
    place.file.write_text(f'{{"version": 1, "hosts": [{text}]}}')
    launch(str(place.file), None)
    assert path.is_dir()
    assert shlex.quote(str(path)) != str(path)
