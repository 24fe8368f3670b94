"""run/launching.py: keepers on all hosts or on none, whatever cuts the launch off.

Over a real sshd, and with runs: cluster/test_standing.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dbctl.cli.main import main
from dbctl.errors import ExperimentError, LaunchError, UsageError
from dbctl.keeper_start import LOG
from dbctl.run import launching
from dbctl.run.cluster_hosts import end_keepers, look
from dbctl.run.clusters import directory, known, read
from dbctl.run.launching import launch
from tests.cluster.harness import wait_until
from tests.hosts_here import Place, a_cluster, hosts_here


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with hosts_here(tmp_path) as found:
        yield found


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
    bring_up = launching.bring_up

    def slowly(name: str, hosts: Any, **more: Any) -> Any:
        a_cluster("other")
        return bring_up(name, hosts, **more)

    monkeypatch.setattr(launching, "bring_up", slowly)
    with pytest.raises(UsageError, match="another command has just launched a cluster lab"):
        launch(place.hosts("a"), None)
    assert place.keepers() == []
    assert read("lab").keepers[0].host.name == "other"
    (directory() / "lab.json").unlink()


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
        # Both stay: one that was not yet told so goes with its ssh.
        stays = [True, True]
        wait_until(lambda: ["of cluster lab" in log_of(one) for one in place.keepers()] == stays)
        for _ in range(2):
            process.send_signal(signal.Signals[name])
            time.sleep(0.2)
        _, err = process.communicate(timeout=20.0)
    assert process.returncode == status
    if name == "SIGKILL":
        assert {one.state for one in look(read("lab"))} == {"up"}
        end_keepers(read("lab"))
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
    assert [one.state for one in end_keepers(read("lab"))] == ["gone", "stopped"]
    assert known() == []


def test_dbctl_is_brought_before_keepers_come_up(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run, and are asked, with the Python that was made."""

    def bring(hosts: Any, *, interrupted: Any, tell: Any) -> Any:
        tell("bringing dbctl")
        return tuple(replace(host, python=place.python) for host in hosts)

    monkeypatch.setattr(launching, "bring_dbctl", bring)
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
    (directory() / "bad.json").write_text("{")
    told: list[str] = []
    launch(place.hosts("a", "b", "c"), "more", tell=told.append)
    assert told == ["warning: a, b are in cluster lab, too: the runs of both share what is there"]
    told.clear()
    with pytest.raises(UsageError, match="there is a cluster more already"):
        launch(place.hosts("a"), "more", tell=told.append)
    assert told == []
    for name in ("lab", "bad"):
        (directory() / f"{name}.json").unlink()


def test_a_bad_file_starts_nothing(place: Place) -> None:
    place.file.write_text("version: 1\nhosts: [{name: -a}]\n")
    with pytest.raises(ExperimentError):
        launch(str(place.file), None)
    assert place.keepers() == []
