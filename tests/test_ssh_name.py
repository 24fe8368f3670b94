"""What the user's ssh makes of a destination: the real `ssh -G`, and programs that stand for it."""

from __future__ import annotations

import os
import shutil
import stat
import time
from pathlib import Path

import pytest

from dbctl.experiment.specs import HostSpec
from dbctl.launch import ssh_name
from dbctl.launch.ssh_name import name_of

CONFIG = """Host nc3-a
    HostName 10.1.2.3
Host short
    HostName %h.example.org
"""


def ssh_is(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = directory / "ssh"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh")
def test_the_settings_of_ssh_say_where_a_host_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text(CONFIG)
    ssh_is(tmp_path, monkeypatch, f'exec {shutil.which("ssh")} -F {tmp_path}/config "$@"')
    names = {
        "nc3-a": "10.1.2.3",
        "me@nc3-a": "10.1.2.3",
        "ssh://me@nc3-a:2222": "10.1.2.3",
        "short": "short.example.org",
        "plain.org": "plain.org",
        "ssh://plain.org:22": "plain.org",
    }
    assert {ssh: name_of(HostSpec(name="h", ssh=ssh)) for ssh in names} == names
    assert name_of(HostSpec(name="nc3-a")) == "10.1.2.3"


@pytest.mark.parametrize(
    "script", ["exit 255", "echo 'hostname '", "printf 'host x\\377'", "exec false"]
)
def test_an_ssh_that_says_nothing_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    ssh_is(tmp_path, monkeypatch, script)
    assert name_of(HostSpec(name="h", ssh="me@a.org")) == "a.org"


def test_without_ssh_the_name_is_that_of_the_destination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert name_of(HostSpec(name="h")) == "h"


def test_settings_that_never_end_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_name, "ASK_S", 0.3)
    ssh_is(tmp_path, monkeypatch, "echo $$ > pid; echo hostname x; exec sleep 60")
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    assert name_of(HostSpec(name="h")) == "h"
    assert time.monotonic() - began < 3.0
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists(), "it was ended"
