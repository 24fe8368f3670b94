"""Hosts in an experiment, and in a file of their own: strict, each fault at its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from dbctl.errors import ExperimentError
from dbctl.experiment.read import load, load_hosts, parse
from dbctl.experiment.resolve import from_json, to_json, to_yaml
from dbctl.experiment.schema import schema
from dbctl.experiment.specs import Experiment, HostSpec, SshCluster
from tests.test_experiment import fits

BASE = """version: 1
name: n
data:
  train: {source: digits, split: train}
network: {input: [64], layers: [{type: dense, units: 10}], loss: softmax}
optimizer: {type: sgd, batch_size: 8, rule: {type: sgd, rate: 0.1}}
stop: {steps: 3}
"""
HOSTS = """version: 1
hosts:
  - {name: left, ssh: me@left.example, slots: 8, env: [A=b, "B=c=d"]}
  - {name: right, address: "fe80::1", python: ~/venv/bin/python, labels: [worker, shard]}
"""


def cluster(text: str, *overrides: str, directory: str = ".") -> SshCluster:
    found = parse(BASE + text, file="e.yaml", overrides=overrides, directory=directory).cluster
    assert isinstance(found, SshCluster)
    return found


def one_host(text: str) -> HostSpec:
    return cluster(f"cluster: {{launcher: ssh, hosts: [{text}]}}\n").members[0]


def faults(text: str, *overrides: str, directory: str = ".") -> list[str]:
    with pytest.raises(ExperimentError) as caught:
        parse(BASE + text, file="e.yaml", overrides=overrides, directory=directory)
    return [str(one) for one in caught.value.problems]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "hosts.yaml").write_text(HOSTS)
    return str(tmp_path)


def test_a_list_and_a_file_are_the_same(folder: str) -> None:
    text = HOSTS.partition("hosts:\n")[2].replace("  -", "    -")
    here = cluster(f"cluster:\n  launcher: ssh\n  hosts:\n{text}")
    there = cluster("cluster: {launcher: ssh, hosts: hosts.yaml}\n", directory=folder)
    assert here == there
    left, right = here.members
    assert left.env == ("A=b", "B=c=d")
    assert (left.destination, left.reached_at, left.slots) == ("me@left.example", "left.example", 8)
    assert (right.destination, right.reached_at) == ("right", "fe80::1")
    assert right.labels == ("worker", "shard")
    assert here.encryption == "on"


def test_all_goes_through_json_and_yaml(folder: str, tmp_path: Path) -> None:
    text = BASE + "cluster: {launcher: ssh, hosts: hosts.yaml, encryption: off}\n"
    whole = parse(text, directory=folder)
    assert from_json(to_json(whole)) == whole
    (tmp_path / "resolved.yaml").write_text(to_yaml(whole))
    (tmp_path / "hosts.yaml").unlink()
    again: Experiment = load(str(tmp_path / "resolved.yaml"))
    assert again == whole, "what was resolved needs the file no more"


def test_set_changes_a_host_of_the_file_or_names_another(folder: str, tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("version: 1\nhosts: [{name: far}]\n")
    text = "cluster: {launcher: ssh, hosts: hosts.yaml}\n"
    changed = cluster(text, "cluster.hosts.1.slots=3", directory=folder)
    assert [host.slots for host in changed.members] == [8, 3]
    other = cluster(text, "cluster.hosts=other.yaml", "cluster.hosts.0.slots=2", directory=folder)
    assert other.members == (HostSpec(name="far", slots=2),)
    new = cluster("", "cluster={launcher: ssh, hosts: other.yaml}", directory=folder)
    assert [host.name for host in new.members] == ["far"]


def test_faults_of_both_files_come_at_once_at_their_places(folder: str, tmp_path: Path) -> None:
    bad = HOSTS.replace("slots: 8", "slots: 0").replace("[worker, shard]", "[workers]")
    path = tmp_path / "hosts.yaml"
    path.write_text(bad + "color: red\n")
    text = "cluster: {launcher: ssh, hosts: hosts.yaml, encrypt: on}\nreplicas: 0\n"
    found = faults(text, directory=folder)
    assert [line.partition(": expected")[0] for line in found if "expected" in line] == [
        f"{path}:3:47: hosts.0.slots",
        f"{path}:4:75: hosts.1.labels.0",
        "e.yaml:9:11: replicas",
    ]
    assert any(line.startswith(f"{path}:5:1: color: unknown key") for line in found)
    assert any("cluster.encrypt: unknown key; did you mean `encryption`?" in line for line in found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "e.yaml:8:33: cluster.hosts: {path}: cannot be read: No such file"),
        ("", "{path}:1:1: expected a mapping with `version: 1` and `hosts`, found nothing"),
        ("[a]", "{path}:1:1: expected a mapping with `version: 1` and `hosts`, found a list"),
        ("hosts: [{name: a}]", "{path}:1:1: version: is required and missing"),
        ("version: 2\nhosts: [{name: a}]", "{path}:1:10: version: expected `1`, found `2`"),
        ("version: true\nhosts: [{name: a}]", "{path}:1:10: version: expected `1`, found `true`"),
        ("version: 1.0\nhosts: [{name: a}]", "{path}:1:10: version: expected `1`, found `1.0`"),
        ("version: 1\n\udcff", "{path}:2:1: expected UTF-8 text, found byte 0xff"),
        ("version: 1", "{path}:1:1: hosts: is required and missing"),
        ("version: 1\nhosts: other.yaml", "{path}:2:8: hosts: expected a list of hosts"),
        ("version: 1\nhosts: []", "{path}:2:8: hosts: expected a list of at least one"),
        ("version: 1\nhosts: [{name: a]", "{path}:2:17: not YAML"),
    ],
)
def test_a_bad_file_is_told(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "hosts.yaml"
    if text is not None:
        path.write_text(text, "utf-8", "surrogateescape")
    found = faults("cluster: {launcher: ssh, hosts: hosts.yaml}\n", directory=str(tmp_path))
    assert len(found) == 1
    assert found[0].startswith(words.format(path=path)), found


def test_the_name_of_a_file_is_a_path(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", folder)
    assert cluster("cluster: {launcher: ssh, hosts: ~/hosts.yaml}\n", directory="/").members
    [said] = faults("", 'cluster={launcher: ssh, hosts: "a\\0b"}')
    assert "or the name of a hosts file, found the text" in said


@pytest.mark.parametrize("text", [None, "version: 1\nhosts: [{name: a]", HOSTS + "color: red\n"])
@pytest.mark.parametrize(
    "other",
    [
        "cluster.hosts=good.yaml",
        "cluster.hosts=[{name: b}]",
        "cluster={launcher: ssh, hosts: good.yaml}",
    ],
)
def test_a_file_that_set_takes_the_place_of_is_not_needed(
    folder: str, tmp_path: Path, text: str | None, other: str
) -> None:
    (tmp_path / "good.yaml").write_text(HOSTS)
    if text is not None:
        (tmp_path / "bad.yaml").write_text(text)
    named = "cluster: {launcher: ssh, hosts: bad.yaml}\n"
    assert cluster(named, other, "seed=3", "cluster.hosts.0.slots=2", directory=folder).members
    before = faults(named, "seed=3", "cluster.hosts.0.threads=1", directory=folder)
    after = faults(named, other, "cluster.hosts=bad.yaml", directory=folder)
    for said in (before, after):
        assert sum("bad.yaml:" in one for one in said) == 1, said


@pytest.mark.parametrize(
    "ssh",
    [
        "a",
        "me@a.example",
        "ssh://me@a:2222",
        "ssh://[::1]:22",
        "fe80::1",
        "a-b.c_d",
        "u.v+w@10.0.0.1",
    ],
)
def test_what_ssh_takes_is_taken(ssh: str) -> None:
    assert one_host(f"{{name: x, ssh: '{ssh}'}}").destination == ssh


@pytest.mark.parametrize(
    ("ssh", "address"),
    [
        ("me@a.example", "a.example"),
        ("ssh://me@a:2222", "a"),
        ("ssh://[::1]:22", "::1"),
        ("::1", "::1"),
    ],
)
def test_others_connect_to_the_host_that_ssh_does(ssh: str, address: str) -> None:
    assert one_host(f"{{name: x, ssh: '{ssh}'}}").reached_at == address


@pytest.mark.parametrize(
    "ssh",
    [
        "-oProxyCommand=x", "me@-a", "-l@a", "a b", "a;b", "$(x)", "`x`", "a|b", "a'b", "a\\nb",
        "ssh://-oA", "ssh://a:b", "ssh://a/x", "%h", "a&b", "é", "@a", "a@", "ssh://",
    ],
)  # fmt: skip
def test_hostile_destinations_are_refused(ssh: str) -> None:
    quoted = f'"{ssh}"'
    found = faults(f"cluster: {{launcher: ssh, hosts: [{{name: x, ssh: {quoted}}}]}}\n")
    assert len(found) == 1
    assert "cluster.hosts.0.ssh: expected what ssh calls a destination" in found[0]


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("{name: -a}", "name: expected up to 63 letters"),
        ("{name: a/../b}", "name: expected up to 63 letters"),
        ('{name: "a\\e[2J"}', "name: expected up to 63 letters"),
        ("{name: a, address: 0.0.0.0}", "address: expected an address of that host"),
        ('{name: a, address: "::"}', "address: expected an address of that host"),
        ("{name: a, address: 10.0.0}", "address: expected an IPv4 address"),
        ("{name: a, address: 'a:80'}", "address: expected an IPv4 address"),
        ("{name: a, address: '*'}", "address: expected an IPv4 address"),
        ("{name: a, python: -c}", "python: expected a path, found a dash"),
        ('{name: a, python: "a\\nb"}', "python: expected a path, found a control character"),
        ("{name: a, workdir: ~root/x}", "workdir: expected a path; of a home directory only ~/"),
        ("{name: a, env: [A]}", "env: expected each to be NAME=VALUE"),
        ("{name: a, env: ['A B=c']}", "env: expected each to be NAME=VALUE"),
        ("{name: a, env: ['A=" + "x" * 9000 + "']}", "env: expected at most 8,192 characters"),
        ("{name: a, slots: 0}", "slots: expected a whole number of at least 1"),
        ("{name: a, threads: yes}", "threads: expected a whole number"),
        ("{ssh: a}", "name: is required and missing"),
        ("{name: a}, {name: a}", "1.name: expected another name, hosts.0 is called `a` too"),
    ],
)
def test_each_key_has_its_limits(host: str, words: str) -> None:
    found = faults(f"cluster: {{launcher: ssh, hosts: [{host}]}}\n")
    assert len(found) == 1
    assert words in found[0]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("cluster.hosts.0.slots=0", "cluster.hosts.0.slots"),
        ("cluster.hosts=[{name: a, slots: 0}]", "cluster.hosts.0.slots"),
    ],
)
def test_what_set_changes_is_called_as_set_calls_it(folder: str, override: str, key: str) -> None:
    [said] = faults("cluster: {launcher: ssh, hosts: hosts.yaml}\n", override, directory=folder)
    assert f"{key}: expected a whole number of at least 1, found `0`" in said


@pytest.mark.parametrize(
    ("host", "write"),
    [
        ("nc3-a", "{name: nc3-a}"),
        ("me@nc3-a", '{name: NAME, ssh: "me@nc3-a"}'),
        ("'ssh://me@[::1]:22'", '{name: NAME, ssh: "ssh://me@[::1]:22"}'),
    ],
)
def test_a_host_that_is_no_mapping_is_told_how_to_be_one(host: str, write: str) -> None:
    [said] = faults(f"cluster: {{launcher: ssh, hosts: [{host}]}}\n")
    assert "cluster.hosts.0: expected a mapping, found the text" in said
    assert said.endswith(f"; write `{write}`")
    assert one_host(write).destination in host
    assert "; write" not in faults("cluster: {launcher: ssh, hosts: ['a b']}\n")[0]


@pytest.mark.parametrize("ssh", ["root@127.0.0.1:22922", "host.org:22", "u@[::1]:22"])
def test_a_port_after_the_host_is_told_where_it_belongs(ssh: str) -> None:
    [said] = faults(f"cluster: {{launcher: ssh, hosts: [{{name: x, ssh: '{ssh}'}}]}}\n")
    assert said.endswith(f"ssh://USER@HOST:PORT; write `ssh://{ssh}`")
    assert one_host(f"{{name: x, ssh: 'ssh://{ssh}'}}").destination == f"ssh://{ssh}"
    assert (
        "; write" not in faults("cluster: {launcher: ssh, hosts: [{name: x, ssh: 'a b:22'}]}\n")[0]
    )


def test_hosts_are_required_and_only_with_ssh() -> None:
    assert "cluster.hosts: is required and missing" in faults("cluster: {launcher: ssh}\n")[0]
    found = faults("cluster: {launcher: local, hosts: [{name: a}]}\n")
    assert "hosts: is a key of launcher ssh, not of launcher local" in found[0]


@pytest.mark.parametrize(
    ("hosts", "good"),
    [
        ("hosts.yaml", True),
        ([{"name": "a", "slots": 2, "labels": ["shard"], "env": ["A=b"]}], True),
        ([], False),
        ([{"name": "a", "slots": 0}], False),
        ([{"name": "a", "labels": ["gpu"]}], False),
        ([{"name": "a", "color": "red"}], False),
        ([{"ssh": "a"}], False),
        (None, False),
    ],
)
def test_an_editor_takes_what_the_reader_takes(hosts: object, good: bool, folder: str) -> None:
    whole = yaml.safe_load(BASE) | {"cluster": {"launcher": "ssh", "hosts": hosts}}
    assert fits(whole, schema()) == good
    if good:
        parse(json.dumps(whole), directory=folder)
    else:
        with pytest.raises(ExperimentError):
            parse(json.dumps(whole), directory=folder)


# --------------------------------------------------------------------------- a hosts file by itself


def test_a_hosts_file_by_itself_is_read_like_one_that_an_experiment_names(folder: str) -> None:
    path = str(Path(folder) / "hosts.yaml")
    named = cluster("cluster: {launcher: ssh, hosts: hosts.yaml}\n", directory=folder)
    assert load_hosts(path) == named.members


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("version: 1\nhosts: []\n", ["2:8: hosts: expected "]),
        (
            "version: 1\nhosts: [{name: a, slots: 0}, {name: a}]\n",
            ["2:26: hosts.0.slots", "2:37: hosts.1.name"],
        ),
        ("version: 1\nhosts: [{name: a, slts: 1}]\n", ["2:19: hosts.0.slts: unknown key; did you"]),
        (
            "version: 1\nhosts: [{name: a, qqqq: 1}]\n",
            ["2:19: hosts.0.qqqq: unknown key; `hosts.0` takes"],
        ),
        ("hosts: [{name: -a}]\nmore: 1\n", ["version: is required", "1:16: ", "2:1: more"]),
        ("", ["found nothing: the file is empty"]),
        (None, ["hosts.yaml: cannot be read: No such file"]),
    ],
)
def test_all_faults_of_a_hosts_file_come_at_once(
    tmp_path: Path, text: str | None, places: list[str]
) -> None:
    path = tmp_path / "hosts.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ExperimentError) as caught:
        load_hosts(str(path))
    for place in places:
        assert place in str(caught.value)
    assert len(caught.value.problems) == len(places)
