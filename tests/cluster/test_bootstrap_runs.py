"""`--bootstrap` on a real sshd: hosts whose Python has nothing, and pip as on any host."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.runs import TrainRun
from tests.cluster.sshd import ROOT, Sshd
from tests.cluster.test_ssh_runs import EXPERIMENT, bits, dbctl

# pip fetches numpy and more, from wherever it is set up to.
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with Sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has neither dbctl nor what that needs."""
    directory = tmp_path_factory.mktemp("bare") / "venv"
    words = [sys.executable, "-m", "venv", "--without-pip", str(directory)]
    subprocess.run(words, check=True, timeout=60)
    return str(directory / "bin" / "python")


@pytest.fixture(autouse=True)
def with_wrapper(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", sshd.path)


def hosts(bare: str, workdir: Path) -> list[dict[str, Any]]:
    """Two entries of one machine: one makes the environment, the other waits for it."""
    there = {"ssh": "plain", "address": "127.0.0.1", "python": bare, "workdir": str(workdir)}
    return [
        {"name": "one", "labels": ["shard"], **there},
        {"name": "two", "labels": ["worker", "evaluator"], **there},
    ]


def test_a_run_on_hosts_that_had_nothing(sshd: Sshd, bare: str, tmp_path: Path) -> None:
    """Trained, resumed and measured; the bits are those of a run without hosts."""
    workdir = tmp_path / "my work"
    cluster = {"launcher": "ssh", "hosts": hosts(bare, workdir)}
    with TrainRun(tmp_path, EXPERIMENT, name="local") as run:
        assert run.finish() == 0, run.story()
    with TrainRun(tmp_path, EXPERIMENT | {"cluster": cluster}, name="refused") as run:
        assert run.finish() == 3, run.story()
        assert "let --bootstrap bring it, or run" in run.err
    begin = time.monotonic()
    with TrainRun(tmp_path, EXPERIMENT | {"cluster": cluster}, "--bootstrap", name="ssh") as run:
        assert run.finish(240.0) == 0, run.story()
        assert "still bringing dbctl to one, two" in run.err
        assert re.search(r"^two: dbctl \S+ (is installed, for|was there already:) ", run.err, re.M)
    first_s = time.monotonic() - begin
    assert bits(tmp_path / "ssh") == bits(tmp_path / "local")
    python = f"{workdir}/venv/bin/python"
    words = [python, "-I", "-c", "import dbctl; print(dbctl.__file__)"]
    where = subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout
    assert where.startswith(f"{workdir}/venv/lib/")
    resolved = yaml.safe_load((tmp_path / "ssh" / "resolved.yaml").read_text())
    assert {host["python"] for host in resolved["cluster"]["hosts"]} == {python}
    # What the run remembers is enough: no --bootstrap.
    dbctl("resume", str(tmp_path / "ssh"), "--set", "stop.steps=80")
    assert json.loads(dbctl("eval", str(tmp_path / "ssh"), "--bootstrap", "--json"))["step"] == 80
    before = (workdir / "venv").stat().st_mtime_ns
    begin = time.monotonic()
    file = tmp_path / "hosts.yaml"
    file.write_text(json.dumps({"version": 1, "hosts": hosts(bare, workdir)}))
    assert "all 2 hosts are ready" in dbctl("doctor", str(file), "--bootstrap")
    again_s = time.monotonic() - begin
    print(f"the first time {first_s:.1f} s with the run, then {again_s:.1f} s with the doctor")
    assert again_s < 10.0
    assert (workdir / "venv").stat().st_mtime_ns == before
    left = {path.name for path in workdir.iterdir()}
    assert left == {"venv", "venv.lock", "venv.sha256"}


def test_pip_that_reaches_nothing_is_told(sshd: Sshd, bare: str, tmp_path: Path) -> None:
    env = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"}
    offline = tmp_path / "offline"
    given = " ".join(f"{key}={value}" for key, value in env.items())
    offline.write_text(f'#!/bin/sh\n{given} exec {bare} "$@"\n')
    offline.chmod(0o755)
    file = tmp_path / "hosts.yaml"
    one = hosts(str(offline), tmp_path / "work")[0]
    file.write_text(json.dumps({"version": 1, "hosts": [one]}))
    done = subprocess.run(
        [sys.executable, "-m", "dbctl", "doctor", str(file), "--bootstrap"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert re.search(r"^  one  bootstrap  pip could not install dbctl$", done.stdout, re.MULTILINE)
    assert "do: pip there must reach its index of packages" in done.stdout
    assert "| ERROR: No matching distribution found for" in done.stdout
    assert not (tmp_path / "work" / "venv.sha256").exists()
