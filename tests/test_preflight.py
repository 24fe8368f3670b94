"""What is made of what hosts said: every fault in one table with its cure, and nothing started."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dbctl.cli.main import main
from dbctl.data.sources import DIGITS_PATH
from dbctl.errors import ExperimentError, LaunchError
from dbctl.examine import Facts, FileFacts
from dbctl.experiment.specs import HostSpec
from dbctl.launch.base import AgentHandle, Answer
from dbctl.plan import Plan
from dbctl.run import doctor
from dbctl.run.findings import Finding, Here, Needs, clock_offset, of_answer, refusal, send, table
from dbctl.run.preflight import Preflight, asked_of, files_there, needs_of
from dbctl.run.room import Room
from dbctl.run.train import prepare

FILE = str(Path(__file__).parent.parent / "experiments" / "digits-downpour.yaml")
HOST = HostSpec(name="left", ssh="me@left", address="10.0.0.1")
GOOD = Facts(
    python="3.11.9",
    packages={"numpy": "2.1.0", "pyzmq": "27.0"},
    curve=True,
    cores=4,
    memory=8 << 30,
    open_files=4096,
    memfd=True,
    workdir="/work",
    workdir_fault="",
    free=100 << 30,
    threads={},
    clock=1000.0,
)
ROOM = Room(memory={"shard": 1 << 30, "worker": 1 << 30}, n_processes=3, most_files=("shard-0", 80))
OURS = FileFacts(path="/d/x.npy", size=10, digest="aa")


def answer(facts: Facts = GOOD, **reached: str) -> Answer:
    return Answer(facts=facts, reached=reached, asked_s=999.5, heard_s=1000.5)


def found(given: Answer, needs: Needs = Needs(), files: Sequence[FileFacts] = ()) -> list[Finding]:  # noqa: B008
    here = Here(packages={"numpy": "2.1.0"}, files={one.path: one for one in files})
    return list(of_answer(HOST, given, needs, here=here, names={"agent-1": HostSpec(name="b")}))


def test_a_good_host_has_nothing_to_be_told() -> None:
    needs = Needs(files=(OURS.path,), room=ROOM, threads=4, encrypted=True)
    assert found(answer(replace(GOOD, files=(OURS,)), **{"agent-1": ""}), needs, [OURS]) == []


@pytest.mark.parametrize(
    ("changes", "about", "words", "cure", "fatal"),
    [
        ({"packages": {"numpy": "", "pyzmq": "1"}}, "dbctl", "numpy, which", "--bootstrap", True),
        ({"packages": {"numpy": "2.0.9"}}, "numpy", "numpy 2.0.9 there, 2.1.0", "last bits", False),
        ({"curve": False}, "pyzmq", "without CURVE", "its wheel", True),
        ({"memfd": False}, "memory", "no memfd", "", False),
        ({"workdir_fault": "No space left"}, "workdir", "write in /work: no space", "room", True),
        ({"free": 5 << 20}, "disk", "5 MiB are free in /work", "logs", False),
        ({"memory": 2 << 30}, "memory", "has too little for this run: it needs 1.00 GiB for the "
         "shards", "fewer replicas", True),
        ({"memory": 5 << 29}, "memory", "may not suffice", "fewer replicas", False),
        ({"open_files": 79}, "open files", "shard-0 needs about 80", "raise it", True),
        ({"cores": 2}, "threads", "3 threads of workers for 2 cores", "`slots`", False),
        ({"clock": 1003.0}, "clock", "+2.5 s", "logs", False),
        ({"clock": 900.0}, "clock", "-99.5 s", "logs", False),
        ({"address_fault": "Cannot assign"}, "address", "its address: cannot", "its own", True),
    ],
)  # fmt: skip
def test_each_fault_is_told_with_its_cure(
    changes: dict[str, Any], about: str, words: str, cure: str, fatal: bool
) -> None:
    needs = Needs(room=ROOM, threads=3, encrypted=True)
    (one,) = found(answer(replace(GOOD, **changes)), needs)
    assert (one.host, one.about, one.fatal) == ("left", about, fatal)
    assert words in one.what
    assert cure in one.cure


def test_more_processes_than_its_cores_bring_up_are_a_fault() -> None:
    needs = Needs(room=Room(memory={}, n_processes=2049, most_files=("shard-0", 80)))
    (one,) = found(answer(replace(GOOD, memory=64 << 30)), needs)
    assert (one.host, one.about, one.fatal) == ("left", "cores", True)
    assert "it needs 2,049 processes, and at most 512 x 4 cores = 2,048 come up" in one.what
    assert "larger host" in one.cure


@pytest.mark.parametrize(
    ("theirs", "words", "fatal"),
    [
        (FileFacts(path=OURS.path, fault="no such file"), "/d/x.npy: no such file", True),
        (FileFacts(path=OURS.path, size=9, digest="aa"), "9 bytes there, 10 here", True),
        (FileFacts(path=OURS.path, size=10, digest="ab"), "other bytes than here", True),
        (FileFacts(path=OURS.path, size=10, late=True), "too slow to be compared", False),
    ],
)
def test_data_that_is_not_that_of_here(theirs: FileFacts, words: str, fatal: bool) -> None:
    needs = Needs(files=(OURS.path,))
    (one,) = found(answer(replace(GOOD, files=(theirs,))), needs, [OURS])
    assert words in one.what
    assert one.fatal == fatal
    assert ("ship: true" in one.cure) == fatal


def test_a_way_that_is_closed_names_both_ends() -> None:
    (one,) = found(answer(**{"agent-1": "No answer within 4 s", "agent-9": "who?"}))
    assert one.what == "does not reach b at b: no answer within 4 s"
    assert "let TCP through" in one.cure


def test_a_way_that_nobody_goes_may_be_closed() -> None:
    """Workers need not reach each other: only shards and, where replicas are cut, partners."""
    closed = answer(**{"agent-1": "No answer within 4 s"})
    assert found(closed, Needs(reaches=frozenset())) == []
    assert len(found(closed, Needs(reaches=frozenset({"b"})))) == 1


def test_the_clock_is_judged_by_what_is_sure() -> None:
    """A host that took ten seconds to answer may have said its time at any of them."""
    slow = Answer(facts=GOOD, reached={}, asked_s=990.0, heard_s=1010.0)
    assert clock_offset(slow) == 0.0


def test_the_command_for_a_file_runs_as_it_is_typed(tmp_path: Path) -> None:
    """Through two shells, with a name that neither may take apart."""
    path = tmp_path / "it's $(touch marker)" / "x.npy"
    path.parent.mkdir()
    path.write_text("bytes")
    there = tmp_path / "there"
    there.mkdir()
    script = f'#!/bin/sh\n[ "$1 $2" = "-- me@left" ] && cd {there} && exec sh -c "$3"\n'
    (tmp_path / "ssh").write_text(script)
    (tmp_path / "ssh").chmod(0o755)
    target = str(path).replace(str(tmp_path), str(there))
    words = send(HOST, str(path)).replace(shlex.quote(str(path)), "SOURCE")
    assert words.endswith("< SOURCE")
    command = send(HOST, target).replace(f"< {shlex.quote(target)}", f"< {shlex.quote(str(path))}")
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["/bin/sh", "-c", command], env=env, cwd=tmp_path, check=True, timeout=10)
    assert Path(target).read_text() == "bytes"
    assert not list(tmp_path.rglob("marker"))


# ------------------------------------------------------------------------------------ the table


def test_one_table_tells_of_all() -> None:
    rows = [
        Finding(host="a", about="ssh", what="no", cure="do it", said="1\n2\n3\n4\n5\n6", log="/l"),
        Finding(host="longer", about="host key", what="odd \x1b[2J"),
        Finding(host="longer", about="data", what="gone"),
        Finding(host="c", about="disk", what="small", fatal=False),
    ]
    error = refusal(rows, 4)
    assert error is not None
    assert error.exit_code == 3
    assert str(error).splitlines() == [
        "2 of 4 hosts are not ready, and nothing was started",
        "  a       ssh       no",
        "                    do: do it",
        *(f"                    | {n}" for n in (2, 3, 4, 5, 6)),
        "                    its log: /l",
        "  longer  host key  odd \\x1b[2J",
        "  longer  data      gone",
    ]
    assert refusal(rows[3:], 4) is None
    assert str(refusal(rows[1:2], 1)).startswith("longer is not ready, and nothing")
    assert table([]) == []


def test_what_many_hosts_have_is_one_row() -> None:
    rows = [Finding(host=name, about="address", what="odd", cure="mend") for name in "abc"]
    rows.insert(1, Finding(host="b", about="data", what="odd", cure="mend"))
    assert table(rows) == [
        "  a  address  odd",
        "              also: b, c",
        "              do: mend",
        "  b  data     odd",
        "              do: mend",
    ]
    words = [Finding(host=name, about="ssh", what="odd", said=f"I am {name}") for name in "ab"]
    assert len(table(words)) == 4, "what they say themselves is not lost"


class Two:
    """A launcher of two hosts, whose answers are given."""

    def __init__(self, *outcomes: AgentHandle | LaunchError) -> None:
        self.outcomes = list(outcomes)
        self.said: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *words: self.said.append(name)

    def wait_all(self) -> list[AgentHandle | LaunchError]:
        return self.outcomes


MEMBERS = [("agent-0", HOST), ("agent-1", HostSpec(name="b"))]


def handle(name: str, facts: Facts = GOOD) -> AgentHandle:
    return AgentHandle(name, name, "", 1, answer=answer(facts))


def test_one_bad_host_lets_all_go() -> None:
    bad = LaunchError("agent-1", "ended", host="b", about="ssh", cure="mend it")
    launcher = Two(handle("agent-0", replace(GOOD, workdir_fault="Read-only file system")), bad)
    warnings: list[str] = []
    preflight = Preflight(launcher, MEMBERS, {}, warn=warnings.append)  # type: ignore[arg-type]
    with pytest.raises(LaunchError) as caught:
        preflight.start()
    assert "2 of 2 hosts are not ready" in str(caught.value)
    assert "left  workdir  cannot write in /work: read-only" in str(caught.value)
    assert "b     ssh      ended" in str(caught.value)
    assert "do: mend it" in str(caught.value)
    assert launcher.said == ["start_async", "stop"]
    assert warnings == []


def test_what_can_be_lived_with_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dbctl.run.preflight.packages", lambda: {"numpy": "2.1.0"})
    launcher = Two(handle("agent-0", replace(GOOD, free=3 << 20)), handle("agent-1"))
    warnings: list[str] = []
    preflight = Preflight(launcher, MEMBERS, {}, warn=warnings.append)  # type: ignore[arg-type]
    assert [agent.name for agent in preflight.start()] == ["agent-0", "agent-1"]
    assert warnings == [
        "host left: disk: 3 MiB are free in /work; logs and data that are sent lie there"
    ]
    assert launcher.said == ["start_async"]


# -------------------------------------------------------------------------- what a plan asks for

TWO = (
    "cluster={launcher: ssh, hosts: [{name: a, slots: 3, labels: [worker], address: 10.0.0.1}, "
    "{name: b, slots: 4, labels: [shard, evaluator], address: 10.0.0.2}]}"
)


def planned(overrides: Sequence[str]) -> Plan:
    return prepare(FILE, overrides, run_dir=None, warn=pytest.fail).plan


def plan(tmp_path: Path, ship: bool = False) -> Plan:
    for name in ("train", "test"):
        rows = "\n".join(",".join(["1"] * 64 + [str(i % 10)]) for i in range(30))
        (tmp_path / f"{name}.csv").write_text(rows)
    source = f"source: csv, label: 64, ship: {str(ship).lower()}"
    data = [f"data.{n}={{{source}, path: {tmp_path}/{n}.csv}}" for n in ("train", "test")]
    return planned([TWO, *data, "evaluate.every=1 epoch"])


def test_hosts_need_the_files_that_their_processes_read(tmp_path: Path) -> None:
    train, test = (str(tmp_path / f"{name}.csv") for name in ("train", "test"))
    wanted = needs_of(plan(tmp_path), None, None, encrypted=True)
    assert {name: needs.files for name, needs in wanted.items()} == {"a": (train,), "b": (test,)}
    asked = asked_of([("agent-0", HOST), ("agent-1", HostSpec(name="b"))], wanted, {})
    assert asked.of("agent-1")["files"] == (test,)
    assert not asked.reach
    other = needs_of(plan(tmp_path), None, None, encrypted=True, split="train")
    assert other["b"].files == (train,)
    sent = needs_of(plan(tmp_path, ship=True), None, None, encrypted=True)
    assert {needs.files for needs in sent.values()} == {()}, "they are sent their rows"
    assert (wanted["a"].reaches, wanted["b"].reaches) == ({"b"}, set()), "shards only answer"
    assert (wanted["a"].listens, wanted["b"].listens) == (False, True)
    assert wanted["a"].room is not None
    assert {*wanted["a"].room.memory} == {"worker"}
    assert {*wanted["b"].room.memory} == {"shard", "evaluator"}  # type: ignore[union-attr]


def test_digits_come_with_dbctl_and_this_machine_is_not_asked() -> None:
    here = planned([])
    assert files_there(here.experiment.data.train) == []
    assert Path(DIGITS_PATH).exists()
    assert needs_of(here, None, None, encrypted=True) == {}


def test_several_hosts_are_to_reach_each_other() -> None:
    asked = asked_of(MEMBERS, {}, {"left": "10.0.0.1", "b": "10.0.0.2"}, only=True)
    assert asked.reach
    assert asked.only
    assert asked.of("agent-1") == {"address": "10.0.0.2", "files": ()}
    one_way = asked_of(MEMBERS, {"left": Needs(listens=False)}, {"left": "10.0.0.1", "b": "::2"})
    assert [one_way.of(agent)["address"] for agent, _ in MEMBERS] == ["", "::2"]
    assert one_way.reach
    assert not asked_of(MEMBERS[:1], {}, {}).reach


@pytest.mark.parametrize("command", ["doctor", "launch-cluster"])
def test_no_ssh_here_is_one_fault_of_all_hosts(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    hosts = [{"name": name, "address": "127.0.0.1"} for name in "ab"]
    (tmp_path / "hosts.yaml").write_text(json.dumps({"version": 1, "hosts": hosts}))
    status = main([command, str(tmp_path / "hosts.yaml")])
    out, err = capsys.readouterr()
    said = (out if command == "doctor" else err).splitlines()
    assert status == (1 if command == "doctor" else 3)
    assert [line.strip() for line in said[-3:]] == [
        "a  ssh  ssh could not be started: it is not found in PATH here",
        "also: b",
        "do: install OpenSSH's client, or put the directory that it is in into PATH",
    ]


# ----------------------------------------------------------------------------------- the doctor


def test_this_machine_is_well(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "localhost is ready" in out
    assert main(["doctor", FILE, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["event"], report["ready"]) == ("doctor", True)
    assert report["hosts"][0]["facts"]["python"]


def test_a_directory_that_cannot_be_written_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dbctl.examine.probe", lambda path: "Read-only file system")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "not ready:\n  localhost  workdir  cannot write in .: read-only" in out
    assert "to be known:\n  localhost  ssh  there is no ssh here" in out
    assert "is ready" not in out


def test_a_hosts_file_is_told_from_an_experiment(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text("version: 1\nhosts: [{name: a}]\n")
    assert doctor.is_hosts_file(str(hosts))
    assert not doctor.is_hosts_file(FILE)
    hosts.write_text("version: 1\nhosts: [{nome: a}]\n")
    with pytest.raises(ExperimentError, match="did you mean `name`"):
        doctor.doctor(str(hosts))


def test_addresses_come_last_and_not_of_hosts_that_ssh_did_not_get_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A table of many bad hosts begins with what is to be mended first."""
    asked = [(f"agent-{i}", HostSpec(name=name)) for i, name in enumerate("abcd")]
    outcomes = [
        LaunchError("agent-0", "ended", host="a", about="port"),
        LaunchError("agent-1", "ended", host="b", about="python"),
        handle("agent-2", replace(GOOD, workdir_fault="Read-only file system")),
        handle("agent-3"),
    ]
    monkeypatch.setattr(doctor, "SshLauncher", lambda **more: Two(*outcomes))
    looked_up: tuple[dict[str, str], dict[str, str]] = ({"d": "::2"}, dict.fromkeys("abc", "odd"))
    monkeypatch.setattr(doctor, "find_addresses", lambda hosts: looked_up)
    monkeypatch.setattr("dbctl.run.preflight.packages", lambda: {"numpy": "2.1.0"})
    report = doctor.examine(asked, {})
    assert [(one.host, one.about) for one in report.findings] == [
        ("a", "port"),
        ("b", "python"),
        ("c", "workdir"),
        ("b", "address"),
        ("c", "address"),
    ]


def test_a_report_of_hosts() -> None:
    away = Finding(host="b", about="ssh", what="refused", cure="start it")
    given = answer(replace(GOOD, threads={"OMP_NUM_THREADS": "8"}), b="No route to host")
    report = doctor.Report(answers={"left": given, "b": None}, findings=[away])
    head, left, other, _, title, row, do = doctor.lines(report)
    assert head.split() == ["host", "python", "dbctl", "numpy", "cores", "OMP", "memory", "disk",
                            "open", "files", "clock", "reaches"]  # fmt: skip
    assert left.split()[:6] == ["left", "3.11.9", doctor.dbctl.__version__, "2.1.0", "4", "8"]
    assert left.endswith("as here  0 of 1")
    assert set(other.split()[1:]) == {"-"}
    assert (title, row.split(), do.strip()) == (
        "not ready:",
        ["b", "ssh", "refused"],
        "do: start it",
    )
    assert doctor.as_object(report)["ready"] is False
