"""Clusters that stay up: over sshd on loopback, and on three hosts (tests/cluster/netns.py)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dbctl.keeper_start import LOG, PREFIX
from tests.cluster.netns import WORKDIR, Hosts
from tests.cluster.runs import ENDLESS, ROOT, TrainRun, digits, finish_all, kill, state, wait_for
from tests.cluster.sshd import Sshd, agents_left
from tests.cluster.test_ssh_runs import EXPERIMENT, bits, is_ssh
from tests.keepers import Keepers

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(90)]


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with Sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


class Done:
    """One command of the command line, from its start to its end."""

    def __init__(self, *words: str, limit_s: float = 40.0, **env: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "dbctl", *words],
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        self.status, self.out, self.err = done.returncode, done.stdout, done.stderr
        assert "Traceback" not in self.err, self.err

    def ok(self) -> str:
        assert self.status == 0, self.out + self.err
        return self.out

    def json(self) -> dict[str, Any]:
        found = json.loads(self.ok())
        assert isinstance(found, dict)
        return found


def at_once(*commands: tuple[str, ...]) -> list[Done]:
    """Commands that wait for hosts and not for each other."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda words: Done(*words), commands))


class Place:
    """Where the clusters of a test are known, and their hosts' files; nothing stays after it."""

    def __init__(self, sshd: Sshd, tmp_path: Path) -> None:
        self.sshd = sshd
        self.path = tmp_path
        self.file = tmp_path / "three.yaml"
        self._keepers = Keepers(tmp_path)
        self.directories = self._keepers.found
        self.close = self._keepers.close

    def hosts(self, *names: str, **changes: Any) -> list[dict[str, Any]]:
        there = {"python": str(self._keepers.python), "workdir": str(self.path / "there")}
        return [{"name": name, "ssh": "plain", **there, **changes} for name in names]

    def launch(self, *hosts: dict[str, Any], words: tuple[str, ...] = ()) -> Done:
        self.file.write_text(json.dumps({"version": 1, "hosts": list(hosts)}))
        return Done("launch-cluster", str(self.file), *words)

    def state_file(self, name: str = "three") -> Path:
        return Path(os.environ["XDG_STATE_HOME"]) / "dbctl" / "clusters" / f"{name}.json"

    def pids(self, name: str = "three") -> list[int]:
        return [one["pid"] for one in json.loads(self.state_file(name).read_text())["keepers"]]

    def left(self) -> list[str]:
        found = agents_left() + [str(path) for path in (self.path / "there").glob("*")]
        return found + [str(path) for path in self.directories()]


@pytest.fixture
def place(sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("PATH", sshd.path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    there = Place(sshd, tmp_path)
    yield there
    try:
        files = Path(os.environ["XDG_STATE_HOME"]).rglob("*.json")
        at_once(*(("stop-cluster", path.name.removesuffix(".json")) for path in files))
        wait_for(lambda: not there.left(), f"nothing left of {there.left()}", 10.0)
    finally:
        there.close()


def gone(*pids: int) -> bool:
    return all(state(pid) in ("", "Z") for pid in pids)


def experiment(**changes: Any) -> dict[str, Any]:
    return EXPERIMENT | changes


# ------------------------------------------------------------------------------ launching, stopping


def test_a_cluster_is_launched_known_and_stopped(place: Place) -> None:
    told = place.launch(*place.hosts("a", "b")).ok()
    pids = place.pids()
    assert re.search(rf"^a +plain +- +{pids[0]} ", told, flags=re.MULTILINE), told
    assert "cluster three stands on 2 hosts: dbctl train FILE.yaml --cluster three" in told
    file = place.state_file()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert len(place.directories()) == 2
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in place.directories())
    assert all(state(pid) for pid in pids)
    found = Done("status", "--json").json()["clusters"]
    assert [one["cluster"] for one in found] == ["three"]
    assert [host["state"] for host in found[0]["hosts"]] == ["up", "up"], found
    stopped = Done("stop-cluster", "three").ok()
    assert re.search(r"^a  stopped$", stopped, flags=re.MULTILINE), stopped
    assert not file.exists()
    wait_for(lambda: gone(*pids), "its keepers to be reaped", 2.0)
    assert place.left() == []
    assert "no clusters; none is known here: `dbctl launch-cluster" in Done("status").ok()


def test_all_or_nothing(place: Place) -> None:
    good, bad = place.hosts("good", "bad")
    done = place.launch(good, bad | {"ssh": "refused"}, bad | {"name": "bare", "python": "/none"})
    assert done.status == 3
    assert "2 of 3 hosts are not ready, and nothing was started" in done.err
    assert "Connection refused" in done.err
    assert "there is no /none" in done.err
    assert not place.state_file().exists()
    assert place.left() == []


def test_a_noisy_login_file_changes_nothing(place: Place) -> None:
    place.launch(*place.hosts("a", ssh="noisy")).ok()
    assert re.search(r"^a  up, 0 runs", Done("status", "three").ok(), re.MULTILINE)
    with TrainRun(place.path, experiment(), "--cluster", "three") as run:
        assert run.finish() == 0, run.story()
    assert re.search(r"^a  stopped$", Done("stop-cluster", "three").ok(), re.MULTILINE)


def test_a_name_in_use_is_refused_until_its_keepers_are_gone(place: Place) -> None:
    place.launch(*place.hosts("a")).ok()
    [pid] = place.pids()
    again = place.launch(*place.hosts("a"))
    assert again.status == 2
    assert "there is a cluster three already (a is up): give --name another" in again.err
    assert place.launch(*place.hosts("a"), words=("--name", "other")).status == 0
    kill(pid)
    status = Done("status", "three", "--json").json()
    assert [host["state"] for host in status["hosts"]] == ["gone"]
    place.launch(*place.hosts("a")).ok()
    assert place.pids() != [pid]
    assert len(place.directories()) == 2, "what the killed one left is gone"


def test_a_host_that_cannot_be_reached_is_a_row_and_is_not_forgotten(place: Place) -> None:
    place.launch(*place.hosts("a", "b")).ok()
    file = place.state_file()
    text = file.read_text()
    data = json.loads(text)
    data["keepers"][1]["host"]["ssh"] = "refused"
    file.write_text(json.dumps(data))
    told = Done("status", "three").ok()
    assert re.search(r"^a  up, 0 runs, for ", told, flags=re.MULTILINE), told
    assert re.search(r"^b  unreachable: .*exit status 255", told, flags=re.MULTILINE), told
    done = Done("stop-cluster", "three")
    assert done.status == 1
    assert "b: its agent may live" in done.err
    assert file.exists()
    data["keepers"][1]["host"]["ssh"] = "plain"
    file.write_text(json.dumps(data))
    assert re.search(r"^a  gone\nb  stopped$", Done("stop-cluster", "three").ok(), re.MULTILINE)
    assert not file.exists()


def test_force_forgets_what_cannot_be_reached(place: Place) -> None:
    place.launch(*place.hosts("a")).ok()
    data = json.loads(place.state_file().read_text())
    [pid] = place.pids()
    data["keepers"][0]["host"]["ssh"] = "refused"
    place.state_file().write_text(json.dumps(data))
    done = Done("stop-cluster", "three", "--force")
    assert done.status == 0
    assert "an agent that lives on a ends after 12 hours without a run" in done.err
    assert not place.state_file().exists()
    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: gone(pid), "the keeper to end")


@pytest.mark.parametrize("words", [("train", "x.yaml"), ("resume", "x"), ("eval", "x")])
def test_an_unknown_cluster_is_told(place: Place, words: tuple[str, ...]) -> None:
    done = Done(*words, "--cluster", "nowhere")
    assert done.status == 2
    assert "there is no cluster nowhere; none is known here" in done.err


# --------------------------------------------------------------------------------------------- runs


def test_train_resume_and_eval_on_a_cluster_have_the_bits_of_local_ones(place: Place) -> None:
    """Rung 8 of the ladder. The run can be gone on with anywhere: it says by itself what it is."""
    place.launch(*place.hosts("a", "b", address="127.0.0.1")).ok()
    on = ("--cluster", "three")
    with (
        TrainRun(place.path, experiment(), name="local") as local,
        TrainRun(place.path, experiment(), *on, name="standing") as standing,
    ):
        finish_all(local, standing)
    here, there = str(local.dir), str(standing.dir)
    first = [bits(run.dir) for run in (local, standing)]
    more = ("--set", "stop.steps=100")
    for done in at_once(("resume", here, *more), ("resume", there, *more, *on)):
        done.ok()
    measured = at_once(("eval", here, "--json"), ("eval", there, "--json", *on))
    found = [
        (before, bits(run.dir), told.json()["loss"], told.json()["accuracy"])
        for before, run, told in zip(first, (local, standing), measured, strict=True)
    ]
    assert found[0] == found[1]
    assert found[1][1][0] == 100
    resolved = (place.path / "standing" / "resolved.yaml").read_text()
    assert "launcher: ssh" in resolved
    assert "name: b" in resolved
    assert [h["runs"] for h in Done("status", "three", "--json").json()["hosts"]] == [[], []]


def test_two_runs_at_once_are_seen_and_do_not_meet(place: Place) -> None:
    place.launch(*place.hosts("a", "b", address="127.0.0.1", slots=4)).ok()
    on = ("--cluster", "three")
    with (
        TrainRun(place.path, experiment(stop=ENDLESS), *on, name="one") as one,
        TrainRun(place.path, experiment(stop={"steps": 300}), *on, name="two") as two,
    ):
        one.until_train()
        assert two.process.wait(40.0) == 0, two.story()
        seen, text = at_once(("status", "three", "--json"), ("status", "three"))
        hosts = seen.json()["hosts"]
        assert [len(host["runs"]) for host in hosts] == [1, 1]
        run = hosts[0]["runs"][0]
        assert run["run_dir"] == str(one.dir)
        assert run["name"] == "over-ssh"
        nodes = [node for host in hosts for node in host["runs"][0]["nodes"]]
        assert sorted(n["node"] for n in nodes) == ["shard-0", "shard-1", "worker-0.0"]
        assert all(n["rss_bytes"] > 1 << 20 and state(n["pid"]) for n in nodes)
        for row in (r"    over-ssh  agent-0 pid \d+ ", r"        shard-0 +pid \d+ +[\d.]+ MiB "):
            assert re.search(rf"^{row}", text.ok(), re.MULTILINE), text.out
        one.signal(signal.SIGINT)
        assert one.finish() == 130
        two.assert_nothing_left()
    assert [h["runs"] for h in Done("status", "three", "--json").json()["hosts"]] == [[], []]


def test_a_killed_controller_ends_its_nodes_and_not_the_keeper(place: Place) -> None:
    place.launch(*place.hosts("a")).ok()
    [pid] = place.pids()
    with TrainRun(place.path, experiment(stop=ENDLESS), "--cluster", "three") as run:
        run.until_train()
        [host] = Done("status", "three", "--json").json()["hosts"]
        pids = [host["runs"][0]["pid"], *(node["pid"] for node in host["runs"][0]["nodes"])]
        assert len(pids) == 4
        kill(run.pid)
        wait_for(lambda: gone(*pids), "its processes to end", 12.0)
        assert state(pid)
        [host] = Done("status", "three", "--json").json()["hosts"]
        assert (host["state"], host["runs"]) == ("up", [])
        seen = Done("status", str(run.dir)).ok()
        assert "lost" in seen.splitlines()[0]
        assert f"its controller (process {run.pid} on " in seen
        assert ") ended without a word\n" in seen
        advice = f"resume: dbctl resume {run.dir}"
        assert (advice if run.checkpoints() else "nothing was saved: train it anew") in seen
        shutil.rmtree(run.runtime or "", ignore_errors=True)  # the killed one's own
    shutil.rmtree(place.path / "there")  # logs that could not be sent


def test_a_lost_connection_ends_the_run_and_a_lost_keeper_does_not(place: Place) -> None:
    place.launch(*place.hosts("a")).ok()
    [pid] = place.pids()
    with TrainRun(place.path, experiment(stop=ENDLESS), "--cluster", "three", name="cut") as run:
        run.until_train()
        [ssh] = [pid for pid in run.processes().values() if is_ssh(pid)]
        kill(ssh)
        assert run.finish() == 1
        assert "agent-0 on a ended early (killed by SIGKILL)" in run.err
    wait_for(lambda: not Done("status", "--json").json()["clusters"][0]["hosts"][0]["runs"], "rest")
    shutil.rmtree(place.path / "there")  # logs that could not be sent
    steps = {"steps": 2_000}
    with TrainRun(place.path, experiment(stop=steps), "--cluster", "three", name="on") as run:
        run.until_train()
        kill(pid)
        assert run.finish() == 0, run.story()
        assert run.status()["steps"] == 2_000, "it goes on without its keeper"
    Done("stop-cluster", "three").ok()
    [left] = place.directories()  # the killed keeper's
    shutil.rmtree(left)


def test_a_killed_caller_ends_the_run_which_does_not_blame_sshd(place: Place) -> None:
    """Its agent is gone before ssh is, and what ssh then says of the socket is no news."""
    place.launch(*place.hosts("a")).ok()
    with TrainRun(place.path, experiment(stop=ENDLESS), "--cluster", "three") as run:
        run.until_train()
        socket_path = json.loads(place.state_file().read_text())["keepers"][0]["socket"]
        kill(the_caller(socket_path))
        assert run.finish() == 1
        assert "agent-0 on a ended early" in run.err
        assert "; its connection was cut there\n" in run.err
        assert "AllowStreamLocalForwarding" not in run.err
    shutil.rmtree(place.path / "there", ignore_errors=True)  # logs that could not be sent


def the_caller(socket_path: str) -> int:
    """The process on the host, not the ssh that started it."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode().split("\0")
            if words[-3:-1] == ["caller", socket_path]:
                return int(path.parent.name)
    raise AssertionError("no caller")


def test_stopping_a_cluster_lets_its_run_save_first(place: Place) -> None:
    place.launch(*place.hosts("a", "b", address="127.0.0.1")).ok()
    with TrainRun(place.path, experiment(stop=ENDLESS), "--cluster", "three") as run:
        run.until_train()
        done = Done("stop-cluster", "three")
        assert "1 run asked to save and end, at most 30 s: over-ssh" in done.err
        assert run.finish(15.0) == 75
        saved = bits(run.dir)[0]
        _, a, b, what = done.ok().splitlines()
        assert (a, b) == ("a  stopped", "b  stopped"), "it had ended before them"
        assert what.endswith(
            f": {run.dir})  stopped; `dbctl resume {run.dir}` goes on from step {saved:,}"
        )
        assert "checkpoint at step" in run.err
        assert "error" not in run.err
        assert "lost" not in run.out
    assert list((place.path / "there").glob("*")) == [], "its logs were sent"
    Done("resume", str(run.dir), "--set", f"stop.steps={saved + 10}").ok()
    assert bits(run.dir)[0] == saved + 10


def test_ctrl_c_while_a_run_saves_leaves_the_cluster_up(place: Place) -> None:
    place.launch(*place.hosts("a")).ok()
    with TrainRun(place.path, experiment(stop=ENDLESS), "--cluster", "three") as run:
        run.until_train()
        run.signal(signal.SIGSTOP)  # less than its lease
        words = [sys.executable, "-m", "dbctl", "stop-cluster", "three"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=env) as asking:
            assert asking.stderr is not None
            assert "asked to save" in asking.stderr.readline()
            asking.send_signal(signal.SIGINT)
            _, err = asking.communicate(timeout=5.0)
        run.signal(signal.SIGCONT)
        assert asking.returncode == 130
        assert err == (
            "dbctl: error: interrupted; `dbctl stop-cluster three` ends what is left of it\n"
        )
        assert run.finish() == 75
    assert Done("status", "three", "--json").json()["hosts"][0]["state"] == "up"
    assert Done("stop-cluster", "three").ok().splitlines()[1:] == ["a  stopped"]


def test_stopping_a_cluster_by_force_ends_its_run_which_says_so_in_one_sentence(
    place: Place,
) -> None:
    """As for a run of another machine, which cannot be asked."""
    place.launch(*place.hosts("a")).ok()
    network = digits(replicas=2, shards=2, stop=ENDLESS)
    with TrainRun(place.path, network, "--cluster", "three") as run:
        run.until_train()
        told = Done("stop-cluster", "three", "--force").ok()
        assert told.splitlines()[1] == "a  stopped: 1 run ended with it"
        assert told.splitlines()[2].endswith(f": {run.dir})  ended with its agents")
        assert run.finish(15.0) == 1
        assert (
            run.err.splitlines()[-1] == "dbctl: error: agent-0 on a ended: its cluster was stopped"
        )
        [last] = run.out.splitlines()
        [left] = (place.path / "there").iterdir()
        assert last.endswith(
            " · agent-0 on a ended: its cluster was stopped · nothing was saved: train it anew"
            f" · logs that could not be sent stay there: a:{left} · {run.dir}"
        ), last
        for noise in ("replica", "channel", "started with pid", "warning"):
            assert noise not in last
            assert noise not in run.err
        assert "the cluster is being stopped: this run ends with it" in run.log("agent-0")
    shutil.rmtree(place.path / "there")  # logs that could not be sent


def test_a_run_on_a_cluster_that_is_gone_is_told_what_to_do(place: Place) -> None:
    place.launch(*place.hosts("a")).ok()
    [pid] = place.pids()
    kill(pid)
    with TrainRun(place.path, experiment(), "--cluster", "three") as run:
        assert run.finish(15.0) == 3
        assert "its standing agent is gone" in run.err
        assert "stop that cluster (`dbctl stop-cluster`) and launch it again" in run.err
    said = Done("stop-cluster", "three").ok()
    assert re.search(r"^a  gone: it was killed, and runs that", said, re.MULTILINE)
    for path in place.directories():  # nobody begins on that host again
        shutil.rmtree(path)


def test_a_dry_run_shows_the_commands_and_starts_nothing(place: Place) -> None:
    place.launch(*place.hosts("a", "b", address="127.0.0.1")).ok()
    file = place.path / "x.yaml"
    file.write_text(json.dumps(experiment()))
    on = ("train", str(file), "--cluster", "three")
    shown, refused, changed = at_once(
        (*on, "--dry-run"),
        (*on, "--set", "cluster.hosts=x.yaml"),
        (*on, "--dry-run", "--json", "--set", "cluster.hosts.0.labels=[worker]",
         "--set", "cluster.encryption=off"),
    )  # fmt: skip
    for one in json.loads(place.state_file().read_text())["keepers"]:
        assert f"-P -m dbctl caller {one['socket']}'" in shown.ok()
    assert refused.status == 2
    assert "--cluster three says already which hosts there are" in refused.err
    nodes = {node["node"]: node["host"] for node in changed.json()["nodes"]}
    assert nodes["shard-0"] == "b"


# ------------------------------------------------------------------------- status and logs of a run


@contextlib.contextmanager
def following(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """`dbctl logs -f`, which a test that fails does not leave behind."""
    words = [sys.executable, "-m", "dbctl", "logs", str(run_dir), "-f"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as followed:
        try:
            yield followed
        finally:
            followed.kill()


def test_a_run_is_shown_while_it_runs_and_after(place: Place) -> None:
    place.launch(*place.hosts("a")).ok()
    stop = {"steps": 20_000}
    with TrainRun(place.path, experiment(stop=stop), "--cluster", "three") as run:
        run.until_train()
        with following(run.dir) as followed:
            wait_for(
                lambda: run.status()["nodes"]["worker-0.0"]["staleness"] is not None, "a report"
            )
            # Each shard reports when it is its time, at first before a push has come.
            wait_for(lambda: run.status()["nodes"]["shard-0"]["bytes_in"], "a report of this shard")
            seen = Done("status", str(run.dir), "--json").json()
            assert seen["state"] == "running"
            worker, shard = seen["nodes"]["worker-0.0"], seen["nodes"]["shard-0"]
            assert (worker["host"], worker["alive"]) == ("a", True)
            assert worker["state"] in ("running", "waiting"), "for its next grant"
            assert worker["examples_per_second"] > 0
            assert worker["bytes_in"] > 0
            assert worker["bytes_out"] > 0
            assert worker["rss_bytes"] > 1 << 20
            assert worker["staleness"] == 0.0, "one replica that waits"
            assert (shard["state"], shard["examples_per_second"]) == ("up", None)
            assert shard["bytes_in"] > 0
            text = Done("status", str(run.dir)).ok()
            assert re.search(r"^worker-0\.0 +a +\w+ +[\d,]+ +[\d,]+ +0\.00 ", text, re.MULTILINE)
            run.signal(signal.SIGTERM)
            assert run.finish() == 75
            out, _ = followed.communicate(timeout=10.0)
            assert followed.returncode == 0
    for node in ("agent-0", "shard-0", "worker-0.0"):
        assert re.search(rf"^{re.escape(node)} +\| ", out, re.MULTILINE), out
    assert out.splitlines()[-1].endswith(" agent-0 ends: finished"), out
    assert Done("status", str(run.dir), "--json", "--watch").json()["state"] == "stopped"
    alone = Done("logs", str(run.dir), "shard-0").ok()
    assert alone == run.log("shard-0")
    wrong = Done("logs", str(run.dir), "shard-7")
    assert wrong.status == 2
    assert "there is no log of shard-7; there are agent-0, shard-0" in wrong.err


# ------------------------------------------------------------------------------------ three hosts


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    directory = tmp_path_factory.mktemp("hosts")
    with Hosts(directory, ("a", "b", "c"), hidden=tmp_path_factory.getbasetemp()) as three:
        yield three


def beside_keepers(hosts: Hosts) -> list[str]:
    """What a run may have left on hosts where a keeper stands: it, its directory, nothing else."""
    found = []
    for name in hosts.space:
        commands = hosts.processes(name).values()
        keepers = [command for command in commands if command.endswith(" dbctl keeper --stdin")]
        assert len(keepers) == 1, (name, commands)
        found += [f"{name}: {command}" for command in commands if command not in keepers]
        found += [f"{name}: {a} {w}" for a, w in hosts.listening(name).items() if "sshd" not in w]
        root = hosts.seen(name)
        there = [*(root / "tmp").glob("dbctl-*"), *(root / "dev/shm").glob("dbctl*")]
        found += [str(path) for path in there if not path.name.startswith(PREFIX)]
        found += [str(path) for path in (root / WORKDIR[1:]).iterdir()]
        secrets = [path for path in (root / "tmp").glob("dbctl-*/*") if path.is_file()]
        assert [path.name for path in secrets] == [LOG], "no key, and nothing else"
    return found


@pytest.mark.timeout(240)
def test_two_trainings_at_once_on_three_hosts(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", hosts.path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    there = {"python": hosts.python, "workdir": WORKDIR, "slots": 3}
    rows = [{"name": name, "ssh": where, **there} for name, where in hosts.address.items()]
    file = tmp_path / "three.yaml"
    file.write_text(json.dumps({"version": 1, "hosts": rows}))
    Done("launch-cluster", str(file)).ok()
    assert beside_keepers(hosts) == []
    cut = digits(shards=3, partition={"count": 2}, threads=1, stop={"epochs": 4})
    on = ("--cluster", "three")
    with (
        TrainRun(tmp_path, cut, *on, name="one") as one,
        TrainRun(tmp_path, cut | {"seed": 8, "stop": ENDLESS}, *on, name="two") as two,
    ):
        wait_for(lambda: two.metrics("worker") and one.metrics("worker"), "both to train")
        seen = Done("status", "three", "--json").json()["hosts"]
        assert [host["state"] for host in seen] == ["up", "up", "up"]
        assert {run["run_dir"] for host in seen for run in host["runs"]} <= {
            str(one.dir),
            str(two.dir),
        }
        assert one.process.wait(80.0) == 0, one.story()
        assert one.status()["test_accuracy"] > 0.8
        mine, logs = at_once(("status", str(two.dir), "--json"), ("logs", str(two.dir)))
        assert {node["host"] for node in mine.json()["nodes"].values()} == {"a", "b", "c"}
        lines = logs.ok().splitlines()
        assert {line.split()[0] for line in lines} >= {"agent-0", "shard-2", "worker-1.1"}
        two.signal(signal.SIGINT)
        assert two.finish() == 130, two.story()
        one.assert_nothing_left()
    wait_for(lambda: beside_keepers(hosts) == [], "nothing of the runs", 5.0)
    with TrainRun(tmp_path, cut | {"stop": ENDLESS}, *on, name="killed") as killed:
        wait_for(lambda: killed.metrics("worker"), "it to train")
        kill(killed.pid)
        keepers = dict.fromkeys(hosts.space, 1)
        wait_for(lambda: {n: len(hosts.processes(n)) for n in hosts.space} == keepers, "rest", 14.0)
        shutil.rmtree(killed.runtime or "", ignore_errors=True)
    for name in hosts.space:  # logs that could not be sent
        for path in (hosts.seen(name) / WORKDIR[1:]).iterdir():
            shutil.rmtree(path)
    with TrainRun(tmp_path, cut | {"stop": ENDLESS}, *on, name="stopped") as stopped:
        wait_for(lambda: stopped.metrics("worker"), "it to train")
        told = Done("stop-cluster", "three", "--force").ok()
        # Where the first one stops, the controller may end the run before the others are asked.
        rows = told.partition("\n")[2]
        form = r"(. {2}stopped(: 1 run ended with it)?\n){3}.* ended with its agents.*\n"
        assert re.fullmatch(form, rows), told
        assert "1 run ended with it" in rows
        assert stopped.finish() == 1
        assert "its cluster was stopped" in stopped.err
    for name in hosts.space:
        for path in (hosts.seen(name) / WORKDIR[1:]).iterdir():
            shutil.rmtree(path)
    wait_for(lambda: hosts.left() == [], f"nothing left of {hosts.left()}", 3.0)
