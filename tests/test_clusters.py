"""run/clusters.py: the file of a cluster, and how its hosts come into an experiment."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from dbctl.errors import RunError, UsageError
from dbctl.experiment.read import load
from dbctl.experiment.specs import SshCluster
from dbctl.run.clusters import directory, known, read
from dbctl.run.launching import launch
from tests.cluster.harness import state
from tests.hosts_here import Place, a_cluster, hosts_here

ROOT = Path(__file__).parent.parent
FILE = str(ROOT / "experiments" / "digits-downpour.yaml")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with hosts_here(tmp_path) as found:
        yield found


# ---------------------------------------------------------------------------------------- the files


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
        assert directory() == tmp_path / ".local" / "state" / "dbctl" / "clusters"
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
    path = directory() / "lab.json"
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


# ----------------------------------------------------------------------- the hosts of an experiment


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
