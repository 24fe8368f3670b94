"""launch/standing.py, launch/ssh_words.py: what is said to hosts of a cluster that stays up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dbctl.caller import NO_KEEPER
from dbctl.experiment.specs import HostSpec
from dbctl.keeper_runs import STOPPED
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
