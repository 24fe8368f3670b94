"""What is said to ssh and to a host, against a golden file; what is made of what it answers.

Real connections: cluster/test_ssh_runs.py. To write the golden file anew, when what is said was
meant to change: `python -m tests.test_ssh > tests/golden/ssh.txt`.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import to_builtins

import dbctl
from dbctl.agent_options import LET_GO
from dbctl.caller import ANSWER
from dbctl.envelope import PROTOCOL_VERSION
from dbctl.errors import LaunchError
from dbctl.examine import Examination, Question
from dbctl.experiment.specs import HostSpec
from dbctl.launch import ssh, ssh_words
from dbctl.launch.base import AgentHandle
from dbctl.launch.ssh import SshLauncher
from dbctl.launch.ssh_words import (
    NOTHING,
    OPTIONS,
    Asked,
    Errand,
    checkout,
    diagnose,
    errand,
    how_to_bring,
    install_command,
    orders,
    others,
    ssh_command,
)
from dbctl.launch.standing import Keeper, ask, bring_up

GOLDEN = Path(__file__).parent / "golden" / "ssh.txt"
HOSTS = (
    HostSpec(name="left"),
    HostSpec(
        name="right",
        ssh="ssh://me@right.example:2222",
        python="~/my venv/bin/python3",
        workdir="/data/it's here",
        env=("A=b c", 'QUOTED=\'"$HOME"'),
    ),
    HostSpec(name="six", ssh="root@fe80::1", python="python3; reboot"),
)


# What they are asked about themselves, and where those that come first were found to listen.
ASKED = Asked(
    questions={
        "agent-0": {"address": "10.0.0.1", "files": ["/data/it's x.npy"]},
        "agent-1": {"address": "10.0.0.2"},
    }
)
PORTS = {"agent-0": ("10.0.0.1", 40001), "agent-1": ("10.0.0.2", 40002)}


def errands() -> list[Errand]:
    return [
        errand(f"agent-{i}", host, runtime="/run/user/1/dbctl-abcdefgh", token="0123456789abcdef")
        for i, host in enumerate(HOSTS)
    ]


def said() -> str:
    """Everything that is said for HOSTS: the words of each ssh, then its standard input."""
    parts = []
    for one in errands():
        words = "\n".join(ssh_command(one))
        told = orders(one, ASKED, run="r7", lease_s=10.0)
        second = others(PORTS, one.agent)
        parts.append(f"== {one.host.name}\n{words}\n<<< {told}<<< {second}")
    return "\n".join(parts)


def test_what_is_said_is_what_the_golden_file_holds() -> None:
    assert said() == GOLDEN.read_text(encoding="utf-8")


def test_every_option_that_keeps_a_promise_is_there() -> None:
    """docs/reliability.md: no question, no shared connection, no forward that failed unseen."""
    words = ssh_command(errands()[0])
    assert words[0] == "ssh"
    assert words[1] == "-T"
    for option in OPTIONS:
        assert words[words.index(option) - 1] == "-o"
    assert not any("StrictHostKeyChecking" in word for word in words)
    assert words[-3] == "--"


def test_there_is_one_command_of_plain_words_there() -> None:
    """A shell takes it apart into exactly these; values of the user are not among them."""
    right, six = (shlex.split(ssh_command(one)[-1]) for one in errands()[1:])
    assert right == ["./my venv/bin/python3", "-P", "-m", "dbctl", "agent", "--stdin"]
    assert six[0] == "python3; reboot", "a name with odd characters, and no second command"
    told = json.loads(orders(errands()[1], NOTHING, run="r7", lease_s=3.0))
    assert told["env"] == {"A": "b c", "QUOTED": '\'"$HOME"'}
    assert told["workdir"] == "/data/it's here"
    assert orders(errands()[1], NOTHING, run="r7", lease_s=3.0).count("\n") == 1


def test_agents_of_one_machine_do_not_meet() -> None:
    one, two, three = errands()
    assert len({one.runtime, two.runtime, three.runtime}) == 3
    assert len({one.forwarded, two.forwarded, three.forwarded}) == 3
    assert len(one.socket.encode()) < 60


BRING = how_to_bring(HOSTS[0], checkout())
LEFT = "ssh: connect to host left port 22: "
UNKNOWN = "No ED25519 host key is known for left and you have requested strict checking.\n"
CHANGED = "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\n"
NO_KEY = "Host key verification failed."


@pytest.mark.parametrize(
    ("status", "words", "about", "advice"),
    [
        (1, "/usr/bin/python3: No module named dbctl", "dbctl", BRING),
        (1, "ModuleNotFoundError: No module named 'zmq'", "dbctl", BRING),
        (1, "is dbctl 0.0.1: install the same version on every host", "dbctl", BRING),
        (2, "unknown option -P\nusage: python3", "python", "give the host another `python`"),
        (2, "Unknown option: -P", "python", "give the host another `python`"),
        (127, "bash: line 1: python3: command not found", "python", "install Python 3.11"),
        (126, "permission denied", "python", "install Python 3.11"),
        (255, f"{CHANGED}{NO_KEY}", "host key", "find out why, then mend known_hosts"),
        (255, f"{UNKNOWN}{NO_KEY}", "host key", "run `ssh left` once and compare the fingerprint"),
        (255, NO_KEY, "host key", "run `ssh left` once and compare the fingerprint"),
        (255, "me@left: Permission denied (publickey).", "ssh", "`ssh left` must work without a"),
        (None, "channel 2: open failed: connect failed: x", "ssh", "AllowStreamLocalForw"),
        (0, "channel 2: open failed: connect failed: x", "ssh", "AllowStreamLocalForw"),
        (255, "channel 2: open failed: connect failed: x", "ssh", "AllowStreamLocalForw"),
        (137, "channel 2: open failed: connect failed: x", "agent", "-m dbctl --version'` work"),
        (255, "ssh: Could not resolve hostname left", "name", "a HostName in ~/.ssh/config"),
        (255, f"{LEFT}Connection refused", "port", "or give its port: `ssh: ssh://USER@HOST"),
        (255, f"{LEFT}Connection timed out", "network", "no firewall is between: `ssh left` must"),
        (255, f"{LEFT}No route to host", "network", "no firewall is between: `ssh left` must"),
        (255, "Bad configuration option: x", "ssh", "make `ssh left` work"),
        (1, "cat: x: Connection refused", "agent", "make `ssh -- left 'python3"),
        (1, "bashrc: line 3", "agent", "make `ssh -- left 'python3 -P -m dbctl --version'` work"),
        (255, f"agent-0 ends: {LET_GO}\nchannel 2: open failed: connect failed", "agent", ""),
        (None, "", "agent", ""),
    ],
)
def test_the_cure_is_said(status: int | None, words: str, about: str, advice: str) -> None:
    found = diagnose(HOSTS[0], status, words)
    assert found.about == about
    assert advice in found.cure
    assert bool(found.cure) == bool(advice)


def test_a_key_that_nobody_has_seen_is_no_attack() -> None:
    """The last line of ssh is the same for both."""
    new, changed = (diagnose(HOSTS[0], 255, f"{said}{NO_KEY}").fault for said in ("", CHANGED))
    assert new == "its host key is not known here yet"
    assert changed == "its host key is not the known one"


def test_only_a_command_that_can_be_run_is_told() -> None:
    """Where dbctl was installed there is neither a source tree nor a wheel."""
    assert how_to_bring(HOSTS[0], None) == "let --bootstrap bring it"
    told = how_to_bring(HOSTS[0], Path("/src"))
    command = install_command(HOSTS[0], Path("/src"))
    assert told == f"let --bootstrap bring it, or run `{command}`"
    assert command.startswith("python3 -m pip wheel --no-deps -w . /src && ssh -- left ")


def test_the_command_that_brings_dbctl_runs_as_it_is_typed(tmp_path: Path) -> None:
    """Through two shells, the one here and the one there, with a host whose Python has a space."""
    host = HostSpec(name="h", python="~/my venv/bin/python")
    there = tmp_path / "home"
    (there / "my venv" / "bin").mkdir(parents=True)
    programs = {
        tmp_path / "python3": 'echo wheel of "$@" > "$0.whl"; mv "$0.whl" dbctl-*.whl',
        tmp_path / "ssh": f'[ "$1 $2" = "-- h" ] && cd {there} && exec sh -c "$3"',
        there / "my venv" / "bin" / "python": 'echo "$@" > installed; cat "$4" >> installed',
    }
    for path, script in programs.items():
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    wheel = f"dbctl-{dbctl.__version__}-py3-none-any.whl"
    (tmp_path / wheel).touch()
    command = install_command(host, Path("/src/my dbctl"))
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path, env=env, check=True, timeout=20)
    assert (there / "installed").read_text() == (
        f"-m pip install ./{wheel}\nwheel of -m pip wheel --no-deps -w . /src/my dbctl\n"
    )


# ------------------------------------------------------- the launcher, over programs named `ssh`


class Fake:
    """A program named `ssh` that is first in PATH."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")
        self.launchers: list[SshLauncher] = []

    def says(self, script: str) -> None:
        path = self.directory / "ssh"
        path.write_text(f"#!/bin/sh\ncd {self.directory}\n{script}\n")
        path.chmod(stat.S_IRWXU)

    def launcher(self, n: int = 1, **more: object) -> SshLauncher:
        logs = self.directory / "logs"
        logs.mkdir(exist_ok=True)
        made = SshLauncher(
            hosts=[(f"agent-{i}", HostSpec(name=f"h{i}")) for i in range(n)],
            runtime=str(self.directory),
            run="r",
            logs=logs,
            token="t",
            **more,  # type: ignore[arg-type]
        )
        self.launchers.append(made)
        return made


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    these = Fake(tmp_path, monkeypatch)
    yield these
    for launcher in these.launchers:
        launcher.stop(2.0)


READY = (
    f'echo \'READY {{"endpoint": "ipc:///x", "python": "/p", "version": "{dbctl.__version__}", '
    f'"protocol": {PROTOCOL_VERSION}}}\''
)


@pytest.mark.quiet
def test_all_come_up_at_once(fake: Fake) -> None:
    fake.says(f"sleep 0.5; {READY}; cat >/dev/null")
    launcher = fake.launcher(6)
    begin = time.monotonic()
    agents = launcher.start()
    assert time.monotonic() - begin < 2.0, "half a second each, all at the same time"
    assert [agent.name for agent in agents] == [f"agent-{i}" for i in range(6)]
    assert {agent.python for agent in agents} == {"/p"}
    assert all(agent.keeps_logs for agent in agents)
    assert not launcher.all_ended()
    begin = time.monotonic()
    launcher.stop(5.0)
    assert time.monotonic() - begin < 2.0, "their input ended"
    assert launcher.all_ended()


def test_who_is_turned_away_tries_again(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_words, "RETRY_FIRST_S", 0.02)
    fake.says(
        "echo x >> tries; [ $(wc -l < tries) -ge 4 ] || {\n"
        "echo 'kex_exchange_identification: Connection closed by remote host' >&2; exit 255; }\n"
        f"{READY}; cat >/dev/null"
    )
    assert len(fake.launcher().start()) == 1
    assert (fake.directory / "tries").read_text() == "x\n" * 4


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("echo 'ssh: connect to host h0 port 22: Connection refused' >&2; exit 255", 255),
        ("echo hello; echo 'kex_exchange_identification: x' >&2; exit 255", 255),
        ("exit 3", 3),
    ],
)
def test_what_trying_again_cannot_mend_is_tried_once(fake: Fake, script: str, status: int) -> None:
    fake.says(f"echo x >> tries; {script}")
    with pytest.raises(LaunchError) as caught:
        fake.launcher().start()
    assert f"exit status {status}" in str(caught.value)
    assert (fake.directory / "tries").read_text() == "x\n"


def test_waiting_has_an_end(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "READY_LIMIT_S", 0.5)
    fake.says("echo booting; exec sleep 60")
    begin = time.monotonic()
    with pytest.raises(LaunchError, match="did not say READY in time; it said: booting"):
        fake.launcher(2).start()
    assert time.monotonic() - begin < 3.0
    monkeypatch.setattr(ssh_words, "RETRY_FIRST_S", 0.02)
    fake.says("echo 'kex_exchange_identification: x' >&2; exit 255")
    with pytest.raises(LaunchError, match="kex_exchange"):
        fake.launcher().start()
    assert time.monotonic() - begin < 5.0


@pytest.mark.quiet
def test_hosts_that_are_slow_to_end_hold_up_no_other(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their output ended, their ssh stays: a second each would be past the limit of all."""
    monkeypatch.setattr(ssh, "READY_LIMIT_S", 2.5)
    host = "for last; do host=$before; before=$last; done"
    fake.says(
        f"{host}; [ $host = h5 ] || {{ exec >&-; exec sleep 60; }}\n"
        f"sleep 0.5; {READY}; cat >/dev/null"
    )
    launcher = fake.launcher(6)
    begin = time.monotonic()
    launcher.start_async()
    *bad, good = launcher.wait_all()
    assert time.monotonic() - begin < 2.4, "a second for all of them, at the same time"
    assert isinstance(good, AgentHandle), good
    assert [str(one).splitlines()[0] for one in bad] == [
        f"agent-{i} on h{i} ended before it was ready" for i in range(5)
    ]
    launcher.stop(0.5)


def test_what_an_ssh_started_is_killed_with_it(fake: Fake) -> None:
    """A ProxyCommand, whose connection would stay."""
    fake.says(f"sleep 60 & echo $! > helper; {READY}; wait")
    launcher = fake.launcher()
    launcher.start()
    command = Path("/proc", (fake.directory / "helper").read_text().strip(), "cmdline")
    assert command.read_bytes()
    launcher.stop(0.1)
    deadline = time.monotonic() + 5.0
    while command.exists() and command.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not (command.exists() and command.read_bytes()), "it lives on"


def test_what_has_come_in_time_is_heard(fake: Fake) -> None:
    """Also where nobody looked before the deadline: the loop was busy with other hosts."""
    fake.says(f"{READY}; cat >/dev/null")
    launcher = fake.launcher()
    launcher.start_async()
    time.sleep(0.5)
    launcher._deadline = time.monotonic()
    assert [agent.python for agent in launcher.wait_ready()] == ["/p"]
    fake.says("exit 3")
    launcher = fake.launcher()
    launcher.start_async()
    time.sleep(0.5)
    launcher._deadline = time.monotonic()
    with pytest.raises(LaunchError, match="exit status 3"):
        launcher.wait_ready()


def test_a_signal_ends_the_waiting(fake: Fake) -> None:
    fake.says("exec sleep 60")
    begin = time.monotonic()
    with pytest.raises(LaunchError):
        fake.launcher(interrupted=lambda: time.monotonic() - begin > 0.3).start()
    assert time.monotonic() - begin < 2.5


def test_a_directory_that_ssh_would_read_otherwise_is_refused(fake: Fake) -> None:
    launcher = SshLauncher(
        hosts=[("agent-0", HOSTS[0])], runtime="/tmp/a:b", run="r", logs=fake.directory, token="t"
    )
    with pytest.raises(LaunchError, match="set XDG_RUNTIME_DIR or TMPDIR"):
        launcher.start()


def test_an_early_end_is_told(fake: Fake) -> None:
    fake.says(f"{READY}; sleep 0.2; echo 'Timeout, server h0 not responding.' >&2; exit 255")
    launcher = fake.launcher()
    launcher.start()
    assert launcher.failure() is None
    while (error := launcher.failure()) is None:
        time.sleep(0.02)
    assert str(error).startswith("agent-0 on h0 ended early (ssh exit status 255)")
    assert "Timeout, server h0 not responding." in str(error)


# --------------------------------------------------------------------- values of another form


def ready(**fields: object) -> str:
    """A script that says READY with these fields besides those that are wanted."""
    wanted = {"endpoint": "ipc:///x", "version": dbctl.__version__, "protocol": PROTOCOL_VERSION}
    return f"echo {shlex.quote('READY ' + json.dumps(wanted | fields))}"


def facts(**other: object) -> dict[str, object]:
    with Examination(Question(workdir="/tmp")) as looked:
        return {**to_builtins(looked.facts), **other}


@pytest.mark.parametrize(
    ("script", "what"),
    [
        (ready(pid="x"), "said a READY line that is none (ValidationError: Expected `int`"),
        (ready(facts=[]), "said a READY line that is none (ValidationError: Expected `object`"),
        (ready(facts={}), "said of its host what is none: "),
        (ready(facts=facts(clock=float("nan"))), "said of its host what is none: "),
        (ready(facts=facts(clock=float("inf"))), "said of its host what is none: "),
        (ready(facts=facts(port="x")), "said of its host what is none: "),
        (ready(facts=facts(port=65536)), "said of its host what is none: "),
        (f"printf 'READY '; printf '%030000d' 0 | tr 0 '['; {ready()}", "said a READY line that"),
    ],
)
def test_a_host_that_says_what_cannot_be_is_not_ready(fake: Fake, script: str, what: str) -> None:
    """Nor is a word of it used: hosts are asked whom they reach."""
    host = "for last; do host=$before; before=$last; done"
    good = (
        f"{ready(facts=facts(port=1))}; read orders; read line; echo 'REACHED {{}}'; cat >/dev/null"
    )
    fake.says(f"{host}; if [ $host = h1 ]; then {good}; else {script}; cat >/dev/null; fi")
    questions = {f"agent-{i}": {"address": "127.0.0.1"} for i in range(2)}
    launcher = fake.launcher(2, asked=Asked(questions=questions))
    launcher.start_async()
    bad, other = launcher.wait_all()
    assert str(bad).startswith(f"agent-0 on h0 {what}")
    assert isinstance(other, AgentHandle)
    assert other.answer is not None


def test_whom_it_reaches_can_be_told_wrong_too(fake: Fake) -> None:
    """And a port that nobody asked for is of no interest."""
    said_there = """read orders; read line; echo 'REACHED {"a": 1}'; cat >/dev/null"""
    fake.says(f"{ready(facts=facts(port=1))}; {said_there}")
    launcher = fake.launcher(2, asked=Asked(questions={"agent-0": {"address": "127.0.0.1"}}))
    launcher.start_async()
    said = [str(one) for one in launcher.wait_all()]
    assert [one.partition(":")[0] for one in said] == [
        f"agent-{i} on h{i} said of its host what is none" for i in range(2)
    ]


@pytest.mark.parametrize("field", ["pid", "node"])
def test_a_keeper_that_says_what_cannot_be_is_told_and_is_known(fake: Fake, field: str) -> None:
    """It may have stayed: whoever launches it stops those that `keep` was told of."""
    kept: list[Keeper] = []
    said_there = f"""read orders; read line; echo 'STAYS {{"{field}": []}}'; cat >/dev/null"""
    fake.says(f'case "$*" in *keeper*) {ready()}; {said_there} ;; *) echo x >> stopped ;; esac')
    with pytest.raises(ExceptionGroup) as caught:
        bring_up("c", [HostSpec(name="a")], keep=kept.extend)
    assert "said a STAYS line that is none" in str(caught.value.exceptions[0])
    assert [keeper.host.name for keeper in kept] == ["a"]


def test_an_answer_to_stop_is_what_it_can_be(fake: Fake) -> None:
    for said, is_answer in (('"x"', False), ("3", True)):
        answer = f'{ANSWER.strip()} {{"stopped": true, "runs": {said}}}'
        fake.says(f"cat >/dev/null & echo '{answer}'")
        (found,) = ask([(HostSpec(name="a"), "/s", "")], "stop")
        assert isinstance(found, dict) == is_answer, found


if __name__ == "__main__":
    print(said(), end="")
