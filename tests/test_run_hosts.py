"""`--dry-run` for hosts: placement, addresses and the exact commands, and nothing started."""

from __future__ import annotations

import json
import re
import shlex
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from dbctl.errors import LaunchError, PlanError
from dbctl.experiment.specs import HostSpec
from dbctl.launch.local import LocalLauncher
from dbctl.launch.ssh_words import errand, ssh_command
from dbctl.plan import Plan
from dbctl.run import hosts
from dbctl.run.dry import dry_run
from dbctl.run.hosts import _look_up, addresses, launcher_of, wire
from dbctl.run.preflight import Preflight
from dbctl.run.train import prepare, train
from dbctl.run.wiring import UNENCRYPTED
from tests.inproc_run import SilentDisplay

FILE = str(Path(__file__).parent.parent / "experiments" / "digits-downpour.yaml")
TWO = "cluster={launcher: ssh, hosts: [{name: a, ssh: me@a.org, slots: 3}, {name: b, slots: 4}]}"
ONE = "cluster={launcher: ssh, hosts: [{name: a, ssh: me@a.org}]}"


def planned(overrides: Sequence[str]) -> Plan:
    return prepare(FILE, overrides, run_dir=None, warn=pytest.fail).plan


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def popen(*words: object, **more: object) -> None:
        pytest.fail(f"started {words}")

    monkeypatch.setattr("subprocess.Popen", popen)
    monkeypatch.setattr(hosts, "name_of", lambda host: host.reached_at)


def lines(*overrides: str, as_json: bool = False) -> list[str]:
    found = dry_run(FILE, overrides, partitions=None, as_json=as_json, warn=pytest.fail)
    return list(found)


def test_the_commands_are_those_of_the_launcher() -> None:
    text = lines(TWO)
    hosts = (HostSpec(name="a", ssh="me@a.org", slots=3), HostSpec(name="b", slots=4))
    for number, (host, address) in enumerate(zip(hosts, ("a.org", "b"), strict=True)):
        agent = f"agent-{number}"
        at = next(i for i, line in enumerate(text) if line.startswith(f"{host.name}: {agent}, "))
        assert text[at].endswith(f"slots, others connect to {address}")
        one = errand(agent, host, runtime="RUNTIME", token="TOKEN")
        assert shlex.split(text[at + 1]) == ssh_command(one)
    assert text[-1] == "between hosts: tcp, encrypted, with a key of its own for each process"
    open_to_all = TWO.replace("launcher: ssh", "launcher: ssh, encryption: off")
    assert lines(open_to_all)[-1] == f"between hosts: tcp, {UNENCRYPTED}"


def test_what_is_sent_is_told(tmp_path: Path) -> None:
    rows = "\n".join(",".join(["1"] * 64 + [str(i % 10)]) for i in range(30))
    (tmp_path / "d.csv").write_text(rows)
    source = f"{{source: csv, path: {tmp_path}/d.csv, label: 64, scale: 0.0625, ship: true}}"
    data = [f"data.train={source}", "replicas=2", "evaluate.every=1 epoch"]
    text = lines(TWO, *data)
    said = sorted(line.strip() for line in text if "is sent" in line)
    start = "is sent what it does not have of: data.train, "
    assert said == [f"{start}15 rows of replica {r}" for r in (0, 1)]
    plan = json.loads(lines(TWO, *data, f"data.test={source}", as_json=True)[0])
    sets = [name for host in plan["hosts"] for name in host["is_sent"]]
    assert "data.test, all rows" in sets
    assert not any("is sent" in line for line in lines(TWO))


def test_json_holds_the_same() -> None:
    (line,) = lines(TWO, as_json=True)
    plan = json.loads(line)
    assert [(host["name"], host["agent"]) for host in plan["hosts"]] == [
        ("a", "agent-0"),
        ("b", "agent-1"),
    ]
    assert {node["host"] for node in plan["nodes"]} == {"a", "b"}
    assert plan["hosts"][0]["command"][-2] == "me@a.org"
    (local,) = lines(as_json=True)
    assert json.loads(local)["hosts"] == []


def test_one_host_is_no_trouble() -> None:
    text = lines(ONE)
    assert not any(line.startswith("between hosts:") for line in text)
    assert any(line.startswith("a: agent-0, ") for line in text)


def test_a_host_without_an_address_is_told_before_a_directory_is_made(tmp_path: Path) -> None:
    nowhere = TWO.replace("name: b,", "name: b, address: no.such.host.invalid,")
    with pytest.raises(PlanError, match=r"host b: no address of no\.such\.host\.invalid is known"):
        train(FILE, [nowhere], run_dir=str(tmp_path / "run"), display=SilentDisplay())
    assert list(tmp_path.iterdir()) == []


def test_no_ssh_here_is_told_before_a_directory_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for cluster in (ONE, TWO):
        with pytest.raises(LaunchError, match="ssh could not be started: it is not found in PATH"):
            train(FILE, [cluster], run_dir=str(tmp_path / "run"), display=SilentDisplay())
    assert list(tmp_path.iterdir()) == []


KNOWN = {
    "a.org": ["10.0.0.1", "10.0.0.9"],
    "b": ["127.0.1.1", "10.0.0.2"],
    "c": ["127.0.1.1"],
    "d": ["::1"],
}


def look_up(name: str) -> list[str]:
    if name not in KNOWN:
        raise OSError(-2, "Name or service not known")
    return KNOWN[name]


def found(*hosts: HostSpec) -> dict[str, str]:
    return addresses(hosts, look_up)


A, B = HostSpec(name="a", ssh="me@a.org"), HostSpec(name="b")
C, D = HostSpec(name="c"), HostSpec(name="d")


def test_names_are_looked_up_here_and_addresses_are_not() -> None:
    given = HostSpec(name="g", ssh="c", address="FE80::2")
    assert found(A, B, given) == {"a": "10.0.0.1", "b": "10.0.0.2", "g": "fe80::2"}


def test_loopback_is_no_address_for_others_unless_all_are_this_machine() -> None:
    assert found(C, D) == {"c": "127.0.1.1", "d": "::1"}
    with pytest.raises(PlanError) as caught:
        found(A, C, HostSpec(name="e"))
    assert str(caught.value) == (
        "host e: no address of e is known here (name or service not known); "
        "host c: others would connect to 127.0.1.1, and reach themselves: "
        "give each its `address`, where the other hosts reach it"
    )
    with pytest.raises(PlanError, match=r"^hosts c, k: others would connect to 127\.0\.1\.1, and"):
        found(A, C, HostSpec(name="k", ssh="c"))


@pytest.mark.parametrize("name", ["a..b", "a" * 64 + ".org"])
def test_what_can_be_no_name_is_told(name: str) -> None:
    with pytest.raises(
        PlanError, match=f"host h: no address of {name} is known here \\(it can be no name"
    ):
        addresses([A, HostSpec(name="h", ssh=f"me@{name}")], look_up_or_system)


def test_a_name_that_only_ssh_knows_is_asked_of_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    """An `address`, and what is one already, is taken as it stands."""
    settings = {"a": "far.org", "b": "10.0.0.7", "n": "no.such"}
    monkeypatch.setitem(KNOWN, "far.org", ["10.0.0.3"])
    asked = []

    def name_of(host: HostSpec) -> str:
        asked.append(host.name)
        return settings[host.name]

    monkeypatch.setattr(hosts, "name_of", name_of)
    given = HostSpec(name="g", ssh="me@b", address="a.org")
    six = HostSpec(name="s", ssh="ssh://me@[fe80::1]:22")
    assert found(A, B, given, six) == {
        "a": "10.0.0.3",
        "b": "10.0.0.7",
        "g": "10.0.0.1",
        "s": "fe80::1",
    }
    assert sorted(asked) == ["a", "b"]
    with pytest.raises(PlanError, match=r"host n: no address of no\.such is known here \(name or"):
        found(A, HostSpec(name="n"))


def test_the_systems_own_words_are_told_without_their_number() -> None:
    with pytest.raises(PlanError) as caught:
        addresses([A, HostSpec(name="h", ssh="no.such.host.invalid")], look_up_or_system)
    assert re.search(r"no\.such\.host\.invalid is known here \([a-z ]+\)", str(caught.value))


def look_up_or_system(name: str) -> list[str]:
    return KNOWN.get(name) or _look_up(name)


def test_who_answers_late_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's own tries may take minutes, and no signal ends them."""
    monkeypatch.setattr(hosts, "LOOK_UP_S", 0.1)
    late = threading.Event()

    def slow(name: str) -> list[str]:
        if name == "b":
            late.wait(5.0)
        return look_up(name)

    began = time.monotonic()
    try:
        said = "host b: nobody said within 0.1 s what the address of b is: give each its `address`"
        with pytest.raises(PlanError, match=said):
            addresses((A, B), slow)
    finally:
        late.set()
    assert time.monotonic() - began < 2.0


def test_what_is_alone_needs_no_address() -> None:
    wiring = wire(planned([ONE.replace("a.org", "no.such.host.invalid")]))
    assert wiring.address_of == {}


def test_the_cluster_chooses_the_launcher(tmp_path: Path) -> None:
    def launcher(*overrides: str) -> object:
        plan = planned(overrides)
        wiring = wire(plan)
        return launcher_of(
            plan,
            run="r",
            runtime="/x",
            logs=tmp_path,
            lease_s=1.0,
            interrupted=lambda: False,
            needs={},
            wiring=wiring,
            warn=pytest.fail,
        )

    assert isinstance(launcher(), LocalLauncher)
    assert isinstance(launcher(ONE), Preflight)


def test_workers_of_hosts_have_one_thread_unless_more_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    assert {n.threads for n in planned([ONE]).of_role("worker")} == {1}
    assert {n.threads for n in planned([ONE, "threads=3"]).of_role("worker")} == {3}
