"""What `--bootstrap` makes and says: the wheel, the program that is sent, and what comes of it.

On a real sshd, with what pip really does: cluster/test_bootstrap_runs.py.
"""

from __future__ import annotations

import ast
import base64
import csv
import fcntl
import hashlib
import io
import json
import os
import re
import shlex
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import dbctl
from dbctl.cli.main import main
from dbctl.errors import LaunchError
from dbctl.experiment.specs import HostSpec
from dbctl.launch import bootstrap as words
from dbctl.launch import installer, ssh_talk, ssh_words, wheel
from dbctl.launch.bootstrap import bring
from dbctl.launch.ssh_words import OPTIONS, bootstrap_command
from dbctl.launch.wheel import make_wheel
from dbctl.plan import Plan
from dbctl.run.bootstrap import bootstrap, bootstrapped
from dbctl.run.signals import Signals
from dbctl.run.train import prepare

ROOT = Path(__file__).parent.parent
FILE = str(ROOT / "experiments" / "digits-downpour.yaml")

# -------------------------------------------------------------------------------------- the wheel


def test_the_wheel_is_this_very_package() -> None:
    made = make_wheel()
    assert made.name == f"dbctl-{dbctl.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(io.BytesIO(made.data)) as archive:
        names = set(archive.namelist())
        for path in (ROOT / "dbctl").rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert archive.read(str(path.relative_to(ROOT))) == path.read_bytes()
        assert not any("__pycache__" in name or name.startswith("tests") for name in names)
        info = f"dbctl-{dbctl.__version__}.dist-info"
        rows = list(csv.reader(io.StringIO(archive.read(f"{info}/RECORD").decode())))
        assert {row[0] for row in rows} == names
        for name, digest, size in rows:
            if not name.endswith("RECORD"):
                data = archive.read(name)
                there = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
                assert (digest, size) == (f"sha256={there.decode()}", str(len(data)))
        metadata = archive.read(f"{info}/METADATA").decode()
    assert "Requires-Dist: numpy>=2.0\n" in metadata
    assert "Requires-Python: >=3.11\n" in metadata
    assert "pytest" not in metadata, "what extras need is not sent"


def test_equal_files_make_equal_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_wheel()
    monkeypatch.setattr(time, "time", lambda: 2e9)
    assert make_wheel().digest == first.digest == hashlib.sha256(first.data).hexdigest()


def test_an_installed_dbctl_knows_its_needs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Installed:
        requires = ("numpy>=2.0", "numba>=0.61; extra == 'fast'", "x; python_version < '4'")
        metadata = {"Requires-Python": ">=3.12"}  # noqa: RUF012

    monkeypatch.setattr(wheel, "checkout", lambda: None)
    monkeypatch.setattr(wheel, "distribution", lambda name: Installed())
    with zipfile.ZipFile(io.BytesIO(make_wheel().data)) as archive:
        metadata = archive.read(f"dbctl-{dbctl.__version__}.dist-info/METADATA").decode()
    assert "Requires-Python: >=3.12\nRequires-Dist: numpy>=2.0\nRequires-Dist: x;" in metadata
    assert "numba" not in metadata


def test_a_dbctl_that_was_copied_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pip and without its source tree: nothing says what it needs."""

    def missing(name: str) -> object:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(wheel, "checkout", lambda: None)
    monkeypatch.setattr(wheel, "distribution", missing)
    with pytest.raises(LaunchError) as caught:
        bring([HostSpec(name="a")])
    assert str(caught.value) == (
        f"dbctl in {ROOT / 'dbctl'} is neither in a source tree nor installed: its needs are not "
        "known; install dbctl here with pip, or run it from its source tree"
    )


@pytest.mark.parametrize("damage", ["unreadable", "no toml", "no project"])
def test_a_dbctl_that_is_damaged_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str
) -> None:
    (tmp_path / "pyproject.toml").write_text("[project" if damage == "no toml" else "")
    if damage == "unreadable":
        (tmp_path / "pyproject.toml").unlink()
    monkeypatch.setattr(wheel, "checkout", lambda: tmp_path)
    with pytest.raises(LaunchError, match=r"cannot be packed for other hosts: .*; install dbctl"):
        make_wheel()


# ------------------------------------------------------------------------------------- the program

PIP = """#!/bin/sh
# Stands for a Python, its `venv` and its `pip`: says what it was asked for.
echo "$@" >> {log}; echo "$PIP_INDEX_URL" >> {home}/index
case "$*" in
  *"import dbctl"*) [ -e {home}/broken ] && exit 1 ; exit 0 ;;
  *"-m venv"*) for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python" ;;
  *"-m pip"*) [ ! -e {home}/offline ] || {{ echo 'no index' >&2; exit 1; }} ;;
esac
"""


class There:
    """A host's home, whose Python is a program that only notes what it is asked for."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.log = home / "asked"
        self.workdir = home / "it's work"
        self.python = home / "python"
        self.python.write_text(PIP.format(log=self.log, home=home))
        self.python.chmod(0o755)

    def given(self, data: bytes = b"wheel", digest: str = "") -> bytes:
        """What the program reads."""
        values = {
            "workdir": str(self.workdir),
            "env": {"PIP_INDEX_URL": "https://index.example"},
            "name": "dbctl-1-py3-none-any.whl",
            "digest": digest or hashlib.sha256(data).hexdigest(),
        }
        return json.dumps(values).encode() + b"\n" + data

    def command(self, limit_s: float = 20.0) -> list[str]:
        program = Path(installer.__file__).read_text()
        code = f"import sys; sys.executable = {str(self.python)!r}\n"
        assert "LIMIT_S = 840.0" in program
        program = program.replace("LIMIT_S = 840.0", f"LIMIT_S = {limit_s}")
        start = program.index("import fcntl")
        return [sys.executable, "-I", "-c", program[:start] + code + program[start:]]

    def install(
        self, data: bytes = b"wheel", digest: str = "", *, limit_s: float = 20.0
    ) -> tuple[dict[str, object], str]:
        """The program's answer, and what was asked of Python meanwhile."""
        self.log.write_text("")
        done = subprocess.run(
            self.command(limit_s),
            input=self.given(data, digest),
            capture_output=True,
            timeout=20,
            check=False,
        )
        word, _, answer = done.stdout.decode().strip().rpartition("\n")[2].partition(" ")
        assert word == "BOOTSTRAP", done.stderr
        found = json.loads(answer)
        assert ("fault" in found) == bool(done.returncode)
        return found, self.log.read_text()


@pytest.fixture
def there(tmp_path: Path) -> There:
    return There(tmp_path)


def test_it_is_made_once(there: There) -> None:
    answer, asked = there.install()
    python = there.workdir / "venv" / "bin" / "python"
    assert answer == {"python": str(python), "made": True}
    assert [line.split()[:3] for line in asked.splitlines()] == [
        ["-I", "-m", "venv"],
        ["-I", "-m", "pip"],
    ]
    assert "--force-reinstall" not in asked
    assert there.install() == (
        {"python": str(python), "made": False},
        "-I -c import dbctl\n",
    )
    left = {path.name for path in there.workdir.iterdir()}
    assert left == {"venv", "venv.lock", "venv.sha256"}, "the wheel is not kept"
    assert set((there.home / "index").read_text().split()) == {"https://index.example"}


def test_another_wheel_of_the_same_version_replaces_it(there: There) -> None:
    there.install()
    answer, asked = there.install(b"another")
    assert answer["made"]
    assert "venv" not in asked.split("pip")[0].split("-m")[1:], "the environment stays"
    assert asked.count("-m pip install") == 2
    assert "--force-reinstall --no-deps" in asked
    assert not there.install(b"another")[0]["made"]


def test_what_was_broken_off_is_made_anew(there: There) -> None:
    there.install()
    (there.home / "offline").touch()
    answer, _ = there.install(b"another")
    assert answer["fault"] == "pip could not install dbctl"
    assert not (there.workdir / "venv.sha256").exists()
    (there.home / "offline").unlink()
    answer, asked = there.install(b"another")
    assert answer["made"]
    assert "-m venv --clear" in asked


def test_an_environment_whose_python_is_gone_is_made_anew(there: There) -> None:
    there.install()
    (there.workdir / "venv" / "bin" / "python").unlink()
    answer, asked = there.install()
    assert answer["made"]
    assert "-m venv --clear" in asked


def test_a_wheel_that_did_not_come_whole_is_refused(there: There) -> None:
    answer, asked = there.install(b"whee", digest=hashlib.sha256(b"wheel").hexdigest())
    assert (answer["fault"], answer["cure"], asked) == (
        "the wheel did not come whole",
        "try again",
        "",
    )


def test_who_comes_meanwhile_waits_and_finds_it_done(there: There) -> None:
    slow = there.python.read_text().replace("mkdir -p", "sleep 0.5; mkdir -p")
    there.python.write_text(slow)
    import threading

    answers: list[dict[str, object]] = []
    threads = [
        threading.Thread(target=lambda: answers.append(there.install()[0])) for _ in range(2)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sorted(bool(answer["made"]) for answer in answers) == [False, True]


def test_a_work_directory_that_cannot_be_made_is_told(there: There) -> None:
    there.workdir = Path("/proc/none")
    answer, asked = there.install()
    assert str(answer["fault"]).startswith("cannot write in /proc/none: ")
    assert (answer["cure"], asked) == ("give it another `workdir`", "")


@pytest.mark.parametrize(
    ("inodes", "fault", "cure"),
    [
        (4, "cannot make a virtual environment", "install its package python3-venv"),
        (8, "pip could not install dbctl", "pip there must reach its index of packages"),
    ],
)
def test_a_disk_with_few_inodes_is_told(there: There, inodes: int, fault: str, cure: str) -> None:
    """And not only that a package is missing there, or an index: bytes there are enough."""
    if os.geteuid():
        pytest.skip("mounting needs root")
    there.workdir.mkdir()
    (there.home / "offline").touch()  # pip's own words are not known here
    options = f"size=900m,nr_inodes={inodes}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", there.workdir], check=True)
    try:
        answer, _ = there.install()
    finally:
        subprocess.run(["umount", "--lazy", there.workdir], check=True)
    left = re.escape(f"inodes are left in {there.workdir}")
    said = str(answer["fault"])
    assert re.fullmatch(rf"{fault}: no more than \d{{3}} MiB and [01] {left}", said)
    assert answer["cure"] == f"make room there, or give it another `workdir`; else {cure}"


def test_a_lock_that_nobody_lets_go_of_is_told(there: There) -> None:
    there.workdir.mkdir()
    with open(there.workdir / "venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer, asked = there.install(limit_s=0.5)
    assert f"has locked {there.workdir}/venv.lock, was not done within 0 s" in str(answer["fault"])
    assert (answer["cure"], asked) == (
        "end the process that `fuser` shows to have it open there",
        "",
    )


def lives(pid: str) -> bool:
    try:
        return bool(Path("/proc", pid, "cmdline").read_bytes())
    except FileNotFoundError:
        return False


def ends(pid: str) -> bool:
    deadline = time.monotonic() + 5.0
    while lives(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not lives(pid)


def test_a_pip_that_hangs_is_killed_with_what_it_started(there: There) -> None:
    hangs = f"sleep 60 & echo $! > {there.home}/child; wait; mkdir -p"
    there.python.write_text(there.python.read_text().replace("mkdir -p", hangs))
    answer, _ = there.install(limit_s=0.5)
    assert str(answer["fault"]).endswith(" -I -m venv --clear ...` was not done within 0 s")
    assert ends((there.home / "child").read_text().strip())
    assert there.install(limit_s=0.5)[0]["fault"] == answer["fault"], "the lock is free again"


@pytest.mark.parametrize("how", ["closed", "signal"])
def test_what_runs_there_ends_with_its_ssh(there: There, how: str) -> None:
    """Its standard output has no reader any more; pip says nothing and would not see it."""
    hangs = f"sleep 60 & echo $! > {there.home}/new; mv {there.home}/new {there.home}/child; wait"
    there.python.write_text(there.python.read_text().replace("mkdir -p", f"{hangs}; mkdir -p"))
    with subprocess.Popen(
        there.command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(there.given())
        process.stdin.close()
        deadline = time.monotonic() + 10.0
        while not (there.home / "child").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        child = (there.home / "child").read_text().strip()
        assert lives(child)
        if how == "closed":
            process.stdout.close()
        else:
            process.terminate()
        assert ends(child)
        assert process.wait(5.0) == 1


def test_an_old_python_can_read_it_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(installer.__file__).read_text()
    tree = ast.parse(source, feature_version=(3, 6))
    assert "__future__" not in {
        one.module for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)
    }, "3.6 knows no `annotations` there"
    annotations = [one.annotation for one in ast.walk(tree) if isinstance(one, ast.arg)]
    for one in filter(None, annotations):  # they are evaluated: no `str | bool`, no `list[str]`
        assert isinstance(one, ast.Name | ast.Constant), ast.unparse(one)
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"{}\n")))
    said = io.StringIO()
    monkeypatch.setattr(sys, "stdout", said)
    assert installer.main() == 1
    assert "its Python is 3.9.2" in said.getvalue()


# ------------------------------------------------------------------------------- what is said


def test_the_command_is_one_word_after_the_other() -> None:
    host = HostSpec(name="h", ssh="me@h", python="~/my venv/bin/python", workdir="$(x)")
    command = bootstrap_command(host)
    assert command[:2] == ["ssh", "-T"]
    assert [word for word in command if word in OPTIONS] == list(OPTIONS)
    assert command[-3:-1] == ["--", "me@h"]
    python, isolated, flag, program = shlex.split(command[-1])
    assert (python, isolated, flag) == ("./my venv/bin/python", "-I", "-c")
    assert program == Path(installer.__file__).read_text()
    assert "$(x)" not in command[-1]
    assert len(command[-1]) < 100_000, "what the system takes as one word"


class Fake:
    """A program named `ssh` that is first in PATH."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")

    def says(self, script: str) -> None:
        path = self.directory / "ssh"
        path.write_text(f"#!/bin/sh\ncd {self.directory}\n{script}\n")
        path.chmod(stat.S_IRWXU)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(tmp_path, monkeypatch)


HOSTS = [HostSpec(name="a", workdir="/w", env=("A=b=c",)), HostSpec(name="b")]
MADE = (
    """echo 'Welcome'; printf 'no newline'; printf '\\nBOOTSTRAP {"python": "/v/bin/python"}\\n'"""
)


def test_hosts_come_back_with_their_python(fake: Fake) -> None:
    fake.says(f"cat > given.$$; {MADE}")
    found = bring(HOSTS)
    assert [one.python for one in found if isinstance(one, HostSpec)] == ["/v/bin/python"] * 2
    given = sorted(path.read_bytes() for path in fake.directory.glob("given.*"))
    line, _, data = given[0].partition(b"\n")
    assert (json.loads(line)["workdir"], json.loads(line)["env"]) == ("/w", {"A": "b=c"})
    assert data == make_wheel().data
    assert json.loads(line)["digest"] == make_wheel().digest


def test_all_that_failed_are_told_in_one_table(fake: Fake) -> None:
    fake.says("echo 'pip: no route' >&2; " + MADE.replace('"python"', '"cure": "mend", "fault"'))
    with pytest.raises(LaunchError) as caught:
        bootstrap(HOSTS)
    said = str(caught.value).splitlines()
    assert said[0] == "2 of 2 hosts are not ready, and nothing was started"
    assert said[1] == "  a  bootstrap  /v/bin/python"
    assert said[2].strip() == "do: mend"
    assert said[3].strip() == "| pip: no route"
    fake.says("exit 127")
    with pytest.raises(LaunchError, match="there is no python3"):
        bootstrap(HOSTS)


def test_a_busy_server_is_tried_again(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_words, "RETRY_FIRST_S", 0.02)
    fake.says(
        "echo x >> tries; [ $(wc -l < tries) -ge 3 ] || {\n"
        f"echo 'kex_exchange_identification: x' >&2; exit 255; }}\n{MADE}"
    )
    assert isinstance(bring(HOSTS[:1])[0], HostSpec)
    assert (fake.directory / "tries").read_text() == "x\n" * 3


def test_a_server_that_is_never_free_is_given_up(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_words, "RETRY_FIRST_S", 0.02)
    monkeypatch.setattr(ssh_talk, "AGAIN_LIMIT_S", 0.3)
    fake.says("echo 'kex_exchange_identification: Connection closed' >&2; exit 255")
    begin = time.monotonic()
    (found,) = bring(HOSTS[:1])
    assert time.monotonic() - begin < 3.0
    assert isinstance(found, LaunchError)
    assert "kex_exchange_identification" in found.log_tail


def test_waiting_has_an_end_and_is_told(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "LIMIT_S", 0.6)
    monkeypatch.setattr(words, "LONG_S", 0.2)
    fake.says("exec sleep 60")
    told: list[str] = []
    begin = time.monotonic()
    found = bring(HOSTS, tell=told.append)
    assert time.monotonic() - begin < 3.0
    faults = [one.what for one in found if isinstance(one, LaunchError)]
    assert faults == ["did not say BOOTSTRAP in time"] * 2
    assert told[2] == "still bringing dbctl to a, b: the first time that takes a minute"
    assert [re.sub(r"[0-9]+\.[0-9] s", "N s", one) for one in (*told[:2], *told[3:])] == [
        f"a: bringing dbctl {dbctl.__version__}",
        f"b: bringing dbctl {dbctl.__version__}",
        "a: dbctl was not brought (N s)",
        "b: dbctl was not brought (N s)",
    ]


def test_each_host_is_told_of_when_it_is_done(fake: Fake) -> None:
    """And what was done there; not only when the slowest is."""
    answers = {
        "a": '{"python": "/v/p\\u001b", "made": true}',
        "b": '{"python": "/w/p", "made": false}',
    }
    for name, answer in answers.items():
        (fake.directory / name).write_text(f"BOOTSTRAP {answer}\n")
    fake.says("for last; do host=$before; before=$last; done; [ $host = b ] || sleep 1; cat $host")
    told: list[tuple[float, str]] = []
    begin = time.monotonic()
    bring(HOSTS, tell=lambda text: told.append((time.monotonic() - begin, text)))
    (_, first), (_, second), (early_s, early), (late_s, late) = told
    assert (first[:2], second[:2]) == ("a:", "b:")
    version = dbctl.__version__
    assert re.fullmatch(rf"b: dbctl {version} was there already: /w/p \([01]\.\d s\)", early)
    assert re.fullmatch(rf"a: dbctl {version} is installed, for /v/p\\x1b \([1-9]\.\d s\)", late)
    assert late_s - early_s > 0.3


def test_the_doctor_passes_on_what_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def brings(hosts: object, *, tell: Callable[[str], object], **more: object) -> list[object]:
        tell("a: bringing dbctl")
        return [LaunchError("bootstrap", "odd", host="a")]

    monkeypatch.setattr("dbctl.run.doctor.bring", brings)
    (tmp_path / "hosts.yaml").write_text("version: 1\nhosts: [{name: a}]\n")
    assert main(["doctor", str(tmp_path / "hosts.yaml"), "--bootstrap", "--json"]) == 1
    out, err = capsys.readouterr()
    assert err == "a: bringing dbctl\n"
    assert json.loads(out)["findings"][0]["what"] == "odd"


def planned(overrides: Sequence[str]) -> Plan:
    return prepare(FILE, overrides, run_dir=None, warn=pytest.fail).plan


def test_a_signal_ends_it(fake: Fake) -> None:
    fake.says("exec sleep 60")
    plan = planned(["cluster={launcher: ssh, hosts: [{name: a}]}"])
    signals = Signals()
    signals.count = 1
    begin = time.monotonic()
    assert bootstrapped(plan, signals) is None
    assert time.monotonic() - begin < 2.0


def test_only_the_python_of_the_plans_hosts_changes(fake: Fake) -> None:
    fake.says(f"cat >/dev/null; {MADE}")
    hosts = "hosts: [{name: a, slots: 9}, {name: idle, slots: 1, labels: [evaluator]}]"
    plan = planned([f"cluster={{launcher: ssh, {hosts}}}", "evaluate=off"])
    assert plan.hosts == ("a",)
    after = bootstrapped(plan, Signals())
    assert after is not None
    pythons = {one.name: one.python for one in after.experiment.cluster.members}  # type: ignore[union-attr]
    assert pythons == {"a": "/v/bin/python", "idle": "python3"}
    assert after.nodes == plan.nodes
    local = planned([])
    assert bootstrapped(local, Signals()) is local
