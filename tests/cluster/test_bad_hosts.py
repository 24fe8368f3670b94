"""Hosts that cannot do their part: each is told with its cure, soon, and nothing starts anywhere.

A real sshd on loopback, and whole runs by the command line. Beside the bad host there is always a
good one, on which nothing may start and nothing may be left.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dbctl
from dbctl.errors import ExperimentError
from dbctl.examine import REQUIRED
from dbctl.experiment.read import load
from tests.cluster.netns import WORKDIR, Hosts
from tests.cluster.runs import TrainRun, digits
from tests.cluster.sshd import ROOT, Sshd
from tests.cluster.test_ssh_runs import EXPERIMENT, leftovers

pytestmark = pytest.mark.cluster

LIMIT_S = 20.0  # of a start that is refused; it takes a second or two, on a machine at rest


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with Sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture
def path(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", sshd.path)


def pair(sshd: Sshd, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """A good host, and one with `changes`; both have a part of the run."""
    one = {
        "ssh": "plain",
        "python": str(sshd.python),
        "workdir": str(tmp_path / "there"),
        "address": "127.0.0.1",
    }
    good = {"name": "good", **one, "labels": ["shard"]}
    bad = {"name": "bad", **one, "labels": ["worker"], **changes}
    return EXPERIMENT | {"cluster": {"launcher": "ssh", "hosts": [good, bad]}}


def refused(tmp_path: Path, experiment: dict[str, Any]) -> str:
    """What a run says that is refused; it must have started nothing, and left nothing."""
    begin = time.monotonic()
    with TrainRun(tmp_path, experiment) as run:
        assert run.finish() == 3, run.story()
        assert time.monotonic() - begin < LIMIT_S
        logs = {path.name for path in run.dir.joinpath("logs").iterdir()}
        assert logs <= {"agent-0.log", "agent-1.log"}, "no node was started"
        assert "start " not in run.log("agent-0")
        assert re.search(r"of 2 hosts \w+ not ready, and nothing was started", run.err), run.err
        assert "Traceback (most" not in run.err
        assert "\033" not in run.err
    assert leftovers(tmp_path) == []
    return run.err


def only_row(said: str) -> str:
    """The one row of the table: about and what is wrong."""
    rows = re.findall(r"^  (good|bad) +(.*)$", said, flags=re.MULTILINE)
    assert [host for host, _ in rows] == ["bad"], said
    return str(rows[0][1])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("changes", "row", "words"),
    [
        ({"ssh": "refused"}, "port  ended", ["Connection refused", "start sshd there"]),
        ({"ssh": "lost"}, "name  ended", ["ssh knows no address", "a HostName in ~/.ssh/config"]),
        ({"ssh": "nobody@plain"}, "ssh  ended", ["Permission denied", "without a question"]),
        ({"ssh": "password"}, "ssh  ended", ["Permission denied", "without a question"]),
        ({"ssh": "changed"}, "host key  ended", ["not the known one", "mend known_hosts"]),
        ({"ssh": "unknown"}, "host key  ended", ["not known here yet", "run `ssh unknown` once"]),
        ({"ssh": "failing"}, "agent  ended", ["exit status 1", "conda: command not found"]),
        ({"python": "/no/such/python3"}, "python  ended", ["there is no /no/such/python3"]),
        ({"workdir": "/proc/none"}, "workdir  cannot write in /proc/none", ["another `workdir`"]),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_a_bad_host_is_told(
    sshd: Sshd, tmp_path: Path, changes: dict[str, Any], row: str, words: list[str]
) -> None:
    said = refused(tmp_path, pair(sshd, tmp_path, **changes))
    assert only_row(said).startswith(row), said
    for word in words:
        assert word in said, said


def without(sshd: Sshd, directory: Path, *left_out: str) -> str:
    """A Python that has what dbctl needs, but for the distributions `left_out`."""
    directory.mkdir()
    for name in set(REQUIRED) - set(left_out):
        for file in distribution(name).files or []:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (directory / top).exists():
                (directory / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    paths = {"PYTHONPATH": f"{ROOT}:{directory}"}
    return sshd.wrap(f"python-{directory.name}", "-S", environment=paths)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("left_out", "words"),
    [
        (None, "dbctl is not there for"),
        ("numpy", "numpy, which dbctl needs, is not there"),
        ("pyzmq", "zmq, which dbctl needs, is not there"),
    ],
)
def test_a_host_without_dbctl_or_what_it_needs(
    sshd: Sshd, tmp_path: Path, left_out: str | None, words: str
) -> None:
    if left_out is None:
        python = sshd.wrap("bare", "-S", environment={})
    else:
        python = without(sshd, tmp_path / f"no-{left_out}", left_out)
    said = refused(tmp_path, pair(sshd, tmp_path, python=python))
    row = only_row(said)
    assert row.startswith("dbctl  ")
    assert words in row
    assert f"{python} -m pip install ./dbctl-" in said
    assert "do: let --bootstrap bring it, or run `python3 -m pip wheel" in said


@pytest.mark.usefixtures("path")
def test_a_host_with_another_version(sshd: Sshd, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "dbctl", tmp_path / "old" / "dbctl")
    (tmp_path / "old" / "dbctl" / "__init__.py").write_text('__version__ = "0.0.1"\n')
    old = sshd.wrap("old-python", environment={"PYTHONPATH": str(tmp_path / "old")})
    said = refused(tmp_path, pair(sshd, tmp_path, python=old))
    row = rf"dbctl  is dbctl 0\.0\.1 with protocol \d+, expected {dbctl.__version__} with"
    assert re.match(row, only_row(said)), said
    assert f"{old} -m pip install ./dbctl-" in said


@pytest.mark.usefixtures("path")
def test_a_full_disk(sshd: Sshd, tmp_path: Path) -> None:
    """A file system of its own, of 64 KiB, with 60 of them taken."""
    work = tmp_path / "full"
    work.mkdir()
    mounts = f"mount -t tmpfs -o size=64k none {work}; head -c 60000 /dev/zero > {work}/taken"
    (sshd.directory / "full.sh").write_text(f'{mounts}; exec {sshd.python} "$@"')
    inner = sshd.directory / "full"
    inner.write_text(f'#!/bin/sh\nexec unshare --mount /bin/sh {sshd.directory}/full.sh "$@"\n')
    inner.chmod(0o755)
    said = refused(tmp_path, pair(sshd, tmp_path, python=str(inner), workdir=str(work)))
    assert only_row(said) == f"workdir  cannot write in {work}: no space left on device"
    assert "make room there" in said


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("fault", ["missing", "cut", "flipped"])
def test_data_that_is_not_there_as_it_is_here(sshd: Sshd, tmp_path: Path, fault: str) -> None:
    (tmp_path / "data").mkdir()
    rng = np.random.default_rng(3)
    np.save(tmp_path / "data" / "x.npy", rng.random((60, 64), dtype=np.float32))
    np.save(tmp_path / "data" / "y.npy", np.arange(60) % 10)
    there = tmp_path / "data-there"
    shutil.copytree(tmp_path / "data", there)
    name = there / "x.npy"
    if fault == "missing":
        name.unlink()
    elif fault == "cut":
        name.write_bytes(name.read_bytes()[:-1])
    else:
        name.write_bytes(name.read_bytes()[:-1] + b"\1")
    script = f'mount --bind {there} {tmp_path}/data; exec {sshd.python} "$@"'
    (sshd.directory / "other.sh").write_text(script)
    python = sshd.directory / "other"
    python.write_text(f'#!/bin/sh\nexec unshare --mount /bin/sh {sshd.directory}/other.sh "$@"\n')
    python.chmod(0o755)
    experiment = pair(sshd, tmp_path, python=str(python))
    source = {"source": "npy", "x": str(tmp_path / "data/x.npy"), "y": str(tmp_path / "data/y.npy")}
    said = refused(tmp_path, experiment | {"data": {"train": source}})
    words = {"missing": "no such file", "cut": "bytes there,", "flipped": "other bytes than here"}
    assert re.match(rf"data  {tmp_path}/data/x.npy: .*{words[fault]}", only_row(said)), said
    assert f"cat > {tmp_path}/data/x.npy" in said
    assert "say `ship: true`" in said


@pytest.mark.usefixtures("path")
def test_a_noisy_login_file_changes_nothing(sshd: Sshd, tmp_path: Path) -> None:
    experiment = pair(sshd, tmp_path, ssh="noisy") | {"stop": {"steps": 5}}
    with TrainRun(tmp_path, experiment) as run:
        assert run.finish() == 0, run.story()
        assert "mail: none" in run.log("agent-1")
    assert leftovers(tmp_path) == []


# --------------------------------------------------------------------------------- hostile names

HOSTILE = ("-oProxyCommand=touch MARKER", "a\nb", "a; touch MARKER", "$(touch MARKER)", "a b",
           "`touch MARKER`", "..", "../..", "a'b", 'a"b', "a|touch MARKER", "")  # fmt: skip


@pytest.mark.parametrize("key", ["name", "ssh", "address"])
@pytest.mark.parametrize("value", HOSTILE)
def test_a_hostile_name_is_refused_in_the_file(tmp_path: Path, key: str, value: str) -> None:
    host = {"name": "h", "ssh": "h", key: value.replace("MARKER", str(tmp_path / "marker"))}
    file = tmp_path / "e.yaml"
    file.write_text(json.dumps(EXPERIMENT | {"cluster": {"launcher": "ssh", "hosts": [host]}}))
    with pytest.raises(ExperimentError, match=rf"cluster\.hosts\.0\.{key}: expected"):
        load(str(file))
    assert not (tmp_path / "marker").exists()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    "python",
    [
        "python3; touch MARKER",
        "$(touch MARKER)",
        "`touch MARKER`",
        "x && touch MARKER",
        "../../x y",
    ],
)
@pytest.mark.parametrize("command", ["train", "bootstrap"])
def test_a_hostile_python_is_one_word_there(
    sshd: Sshd, tmp_path: Path, python: str, command: str
) -> None:
    marker = tmp_path / "marker"
    experiment = pair(sshd, tmp_path, python=python.replace("MARKER", str(marker)))
    if command == "train":
        assert only_row(refused(tmp_path, experiment)).startswith("python  ended")
    else:
        file = tmp_path / "hosts.yaml"
        bad = experiment["cluster"]["hosts"][1]
        file.write_text(json.dumps({"version": 1, "hosts": [bad]}))
        done = doctor(file, "--bootstrap")
        assert done.returncode == 1
        assert "there is no" in done.stdout
    assert not marker.exists()
    assert not (tmp_path / "there" / "venv").exists()


@pytest.mark.usefixtures("path")
def test_hostile_values_are_values(sshd: Sshd, tmp_path: Path) -> None:
    """A work directory and an environment that a shell would carry out; the run goes well."""
    marker = tmp_path / "marker"
    workdir = f"{tmp_path}/there/-x; touch {marker.name}; $(touch {marker.name})' \" é"
    env = [f"A=$(touch {marker})", "B='; touch x; '", "C=two\nlines"]
    experiment = pair(sshd, tmp_path, workdir=workdir, env=env) | {"stop": {"steps": 5}}
    with TrainRun(tmp_path, experiment) as run:
        assert run.finish() == 0, run.story()
    assert [path.name for path in (tmp_path / "there").iterdir()] == [Path(workdir).name]
    assert not list(Path(workdir).iterdir())
    assert not list(tmp_path.rglob("marker"))
    assert not (Path.home() / "marker").exists()


# ------------------------------------------------------------------------------------ the doctor


def doctor(file: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dbctl", "doctor", str(file), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.usefixtures("path")
def test_the_doctor_tells_of_all_at_once(sshd: Sshd, tmp_path: Path) -> None:
    changes: dict[str, dict[str, str]] = {
        "good": {},
        "better": {},
        "away": {"ssh": "refused"},
        "stranger": {"ssh": "nobody@plain"},
        "changed": {"ssh": "changed"},
        "failing": {"ssh": "failing"},
        "snakeless": {"python": "/no/such"},
        "bare": {"python": sshd.wrap("bare-too", "-S", environment={})},
        "full": {"workdir": "/proc/none"},
    }
    first = pair(sshd, tmp_path)["cluster"]["hosts"][0]
    hosts = [first | {"name": name, **change} for name, change in changes.items()]
    file = tmp_path / "hosts.yaml"
    file.write_text(json.dumps({"version": 1, "hosts": hosts}))
    begin = time.monotonic()
    done = doctor(file, "--json")
    assert time.monotonic() - begin < LIMIT_S
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    wrong = {one["host"]: one["about"] for one in report["findings"] if one["fatal"]}
    assert wrong == {
        "away": "port",
        "stranger": "ssh",
        "changed": "host key",
        "failing": "agent",
        "snakeless": "python",
        "bare": "dbctl",
        "full": "workdir",
    }
    assert all(one["cure"] for one in report["findings"] if one["fatal"])
    answers = {host["name"]: host for host in report["hosts"]}
    assert answers["good"]["reached"] == {"better": "", "full": ""}
    assert answers["full"]["facts"]["packages"]["numpy"] == np.__version__
    assert "facts" not in answers["bare"]
    assert leftovers(tmp_path) == []


# ------------------------------------------------------------- hosts with networks of their own


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    directory = tmp_path_factory.mktemp("hosts")
    with Hosts(directory, ("a", "b"), hidden=tmp_path_factory.getbasetemp()) as two:
        yield two


def in_space(space: str, *words: str) -> None:
    subprocess.run(["ip", "-n", space, *words], check=True, timeout=10)


def test_hosts_that_do_not_reach_each_other(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ssh reaches both; what one sends to the other does not arrive."""
    monkeypatch.setenv("PATH", hosts.path)
    places = [("a", "worker"), ("b", "shard")]
    members = [
        {"name": name, "ssh": hosts.address[name], "labels": [label], "slots": 2,
         "python": hosts.python, "workdir": WORKDIR}
        for name, label in places
    ]  # fmt: skip
    experiment = digits(threads=1, evaluate="off", cluster={"launcher": "ssh", "hosts": members})
    in_space(hosts.space["a"], "route", "add", "unreachable", f"{hosts.address['b']}/32")
    try:
        said = refused(tmp_path, experiment)
    finally:
        in_space(hosts.space["a"], "route", "del", "unreachable", f"{hosts.address['b']}/32")
    assert f"does not reach b at {hosts.address['b']}: no route to host" in said
    assert said.count("does not reach") == 1, "nobody has to come to the worker's host"
    assert "let TCP through between them" in said
    assert hosts.left() == []


def test_an_address_where_nobody_is_takes_ten_seconds(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """192.0.2.1, behind a router that drops everything: ConnectTimeout ends it."""
    monkeypatch.setenv("PATH", hosts.path)
    in_space(hosts.switch, "route", "add", "192.0.2.1/32", "via", hosts.address["a"])
    file = tmp_path / "hosts.yaml"
    there = {"python": hosts.python, "workdir": WORKDIR}
    file.write_text(json.dumps({"version": 1, "hosts": [{"name": "192.0.2.1", **there}]}))
    begin = time.monotonic()
    try:
        done = doctor(file)
    finally:
        in_space(hosts.switch, "route", "del", "192.0.2.1/32")
    took_s = time.monotonic() - begin
    assert done.returncode == 1
    assert re.search(r"^  192\.0\.2\.1  network  .*does not answer$", done.stdout, re.MULTILINE)
    assert "Connection timed out" in done.stdout
    assert 9.0 < took_s < 15.0
