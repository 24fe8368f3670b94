"""The command line: what it promises about imports, exit statuses, streams and text."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest

from dbctl import __version__
from dbctl.cli import check
from dbctl.cli.main import COMMANDS, main
from dbctl.errors import DataError, DbctlError, ExperimentError, LaunchError, Problem, RunError
from dbctl.progress.display import Display
from dbctl.progress.text import Summary

GOOD = """\
version: 1
name: größe
data: {train: {source: digits, split: train}}
network: {input: [64], layers: [{type: dense, units: 10}], loss: softmax}
optimizer: {type: sgd, batch_size: 8, rule: {type: sgd, rate: 1e-1}}
stop: {steps: 5}
"""


@pytest.fixture
def good(tmp_path: Path) -> str:
    file = tmp_path / "good.yaml"
    file.write_text(GOOD, encoding="utf-8")
    return str(file)


def dbctl(*args: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "dbctl", *args],
        capture_output=True,
        env={**os.environ, **env},
        timeout=30,
        check=False,
    )


# ----------------------------------------------------------------------------- the frozen listing

FROZEN = {
    "train": [
        *("file", "--set", "--run-dir", "--dry-run", "--partitions", "--bootstrap", "--cluster"),
        *("--json", "--quiet"),
    ],
    "resume": ["run_dir", "--set", "--bootstrap", "--cluster", "--json", "--quiet"],
    "eval": [
        *("run_dir", "--split", "--step", "--workers", "--predictions", "--bootstrap"),
        *("--cluster", "--json"),
    ],
    "doctor": ["file", "--bootstrap", "--json"],
    "status": ["what", "--json", "--watch"],
    "logs": ["run_dir", "node", "--follow"],
    "launch-cluster": ["hosts", "--name", "--bootstrap", "--json"],
    "stop-cluster": ["name", "--force", "--json"],
    "compare": ["run_dirs", "--accuracy", "--split", "--plot", "--json"],
    "validate": ["file", "--set"],
    "schema": [],
}


def test_the_commands_are_those_that_are_promised() -> None:
    assert list(COMMANDS) == list(FROZEN)
    for name, where in COMMANDS.items():
        command = getattr(import_module(where.module), where.function)
        names = [
            next((o for o in one.opts if o.startswith("--")), one.name) for one in command.params
        ]
        assert names == FROZEN[name]


def test_help_lines_end_like_sentences() -> None:
    assert all(command.help.endswith(".") for command in COMMANDS.values())


# ----------------------------------------------------------------------------- imports


def modules_after(*args: str) -> set[str]:
    code = (
        "import sys, json; sys.argv = ['dbctl', *sys.argv[1:]]\n"
        "from dbctl.__main__ import main\n"
        "status = main()\n"
        "print(json.dumps([status, sorted(sys.modules)]), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, check=True)
    status, modules = json.loads(done.stderr.splitlines()[-1])
    assert status == 0
    return set(modules)


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_imports_nothing_heavy(option: str) -> None:
    """design.md, section 6: `dbctl --help` imports neither numpy nor zmq."""
    modules = modules_after(option)
    assert "click" in modules
    heavy = {"numpy", "zmq", "yaml", "msgspec", "tqdm", "numba", "dbctl.cli.check"}
    assert not modules & heavy


@pytest.mark.alone
def test_help_is_quick() -> None:
    """At most 150 ms beyond nothing else running; the best of several, for a busy machine."""
    best = 9.0
    for _ in range(10):
        start = time.perf_counter()
        assert dbctl("--help").returncode == 0
        best = min(best, time.perf_counter() - start)
        if best < 0.15:
            return
    pytest.fail(f"dbctl --help took {best:.3f} s at best")


@pytest.mark.parametrize(
    ("word", "module"), [("node", "dbctl.node.main"), ("agent", "dbctl.agent")]
)
def test_a_node_is_told_apart_before_click_is_imported(word: str, module: str) -> None:
    code = (
        "import sys, types\n"
        f"stub = types.ModuleType({module!r})\n"
        "stub.main = lambda argv: print(argv, 'click' in sys.modules) or 3\n"
        f"sys.modules[{module!r}] = stub\n"
        f"sys.argv = ['dbctl', {word!r}, 'shard-0']\n"
        "from dbctl.__main__ import main\n"
        "sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "['shard-0'] False\n"), done.stderr


# ----------------------------------------------------------------------------- validate, schema


def test_validate_a_good_file(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", good]) == 0
    out, err = capsys.readouterr()
    unseen = "its data are looked at by `dbctl train --dry-run`"
    assert out == f"{good}: ok: größe: sgd, 1 layer, 1 replica, 1 shard; {unseen}\n"
    assert err == ""


def test_validate_takes_overrides(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", good, "--set", "shards=3", "--set", "name=on"]) == 0
    assert ": ok: on: sgd, 1 layer, 1 replica, 3 shards" in capsys.readouterr().out


def test_validate_prints_every_problem(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(good).write_text(GOOD.replace("stop:", "replcas: 2\nstpo:"), encoding="utf-8")
    assert main(["validate", good, "--set", "seed=x"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert all(line.startswith("dbctl: error: ") for line in lines)
    assert f"{good}:6:1: replcas: unknown key; did you mean `replicas`?" in err
    assert f"{good}:7:1: stpo: unknown key; did you mean `stop`?" in err
    assert "--set seed=x: seed: expected a whole number" in err
    assert len(lines) == 3


def test_validate_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "/no/such.yaml"]) == 2
    assert capsys.readouterr().err == (
        "dbctl: error: /no/such.yaml: cannot be read: No such file or directory\n"
    )


def test_schema_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["additionalProperties"] is False


# ----------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["trian"], "no such command 'trian'"),
        ([], "missing command; try `dbctl --help`"),
        (["--nope"], "no such option"),
        (["validate"], "missing argument 'FILE'; try `dbctl validate --help`"),
        (["schema", "x"], "got unexpected extra argument"),
    ],
)
def test_usage_errors(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dbctl: error: ")
    assert said in err


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException | int) -> None:
    """Make `dbctl schema` raise `error`, or return it."""

    @click.command()
    def command() -> Any:
        if isinstance(error, int):
            return error
        raise error

    monkeypatch.setattr(check, "schema", command)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (RunError("it broke"), 1, "dbctl: error: it broke\n"),
        (DataError("a.npy", "damaged"), 2, "dbctl: error: a.npy: damaged\n"),
        (
            LaunchError("shard-0", "ended", log_tail="one\x1b[2J\ntwo", log_path="/l"),
            3,
            "dbctl: error: shard-0 ended\n    one\\x1b[2J\n    two\n  its log: /l\n",
        ),
        (DbctlError(), 1, "dbctl: error: DbctlError\n"),
        (OSError(28, "No space left", "/x"), 1, "dbctl: error: /x: No space left\n"),
        (
            FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/w']"),
            1,
            "dbctl: error: no temporary file can be made in any of ['/tmp', '/w']: no right to "
            "write there, or no space or no inodes left on the device; set TMPDIR\n",
        ),
        (KeyboardInterrupt(), 130, None),
        (click.Abort(), 130, None),
        (75, 75, ""),
        (0, 0, ""),
    ],
)
def test_each_error_has_its_exit_status(
    error: BaseException | int,
    status: int,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    raising(monkeypatch, error)
    assert main(["schema"]) == status
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert said is None or err == said


def test_what_tempfile_finds_wrong_reads_so_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(FileNotFoundError) as caught:
        tempfile.gettempdir()
    raising(monkeypatch, caught.value)
    assert main(["schema"]) == 1
    said = f"no temporary file can be made in any of ['{tmp_path}/none']: "
    assert said in capsys.readouterr().err


def test_a_programming_error_is_not_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, AssertionError("a bug"))
    with pytest.raises(AssertionError, match="a bug"):
        main(["schema"])


def test_many_problems_are_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Problem("x.yaml", line, 1, "k", "bad") for line in range(1, 62)]
    raising(monkeypatch, ExperimentError(found))
    assert main(["schema"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 51
    assert lines[-1] == "dbctl: error: and 11 more problems"


def test_text_from_files_steers_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a\x1b[31m\nb.yaml"
    file.write_text(GOOD.replace("größe", '"\\e[2J\\u202e/"'), encoding="utf-8")
    assert main(["validate", str(file)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err[:-1].isprintable()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dbctl {__version__}\n"


@pytest.mark.parametrize("locale", [{"LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii", "LANG": "C"}])
def test_utf8_always(locale: dict[str, str], good: str) -> None:
    """cases: `LANG=C`, non-ASCII name and path."""
    file = Path(good).with_name("größe.yaml")
    file.write_text(GOOD, encoding="utf-8")
    done = dbctl("validate", str(file), **locale)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode("utf-8").startswith(f"{file}: ok: größe: ")


def test_a_path_that_is_not_utf8() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dbctl", "validate", b"/no/\xff.yaml"],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        b"dbctl: error: /no/\\udcff.yaml: cannot be read: No such file or directory\n"
    )


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_streams(closed: tuple[int, ...], good: str) -> None:
    """`>&-`: the command ends as it would, and no other file takes the stream's number."""
    words = " ".join(f"{number}>&-" for number in closed).replace("0>&-", "<&-")
    shell = f'"$0" -m dbctl "$@" {words}'
    for file, status in ((good, 0), ("missing.yaml", 2)):
        done = subprocess.run(
            ["/bin/sh", "-c", shell, sys.executable, "train", "--dry-run", file],
            capture_output=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == status, done.stderr
        assert b"Traceback" not in done.stderr
        assert bool(done.stdout) == (status == 0 and 1 not in closed)


LOST = "dbctl: error: standard output: No space left on device; the run went on without it\n"


@pytest.mark.parametrize(
    ("out", "ended", "status", "said"),
    [
        ("/dev/null", 0, 0, ""),
        ("/dev/full", 0, 1, LOST),
        ("/dev/full", 75, 75, LOST),
        ("/dev/full", 1, 1, LOST),
    ],
)
@pytest.mark.parametrize("command", ["train", "resume"])
def test_a_run_whose_lines_could_not_be_written(
    command: str,
    out: str,
    ended: int,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It goes on to its end; then its status says so, as that of each other command does."""

    def run(*_: Any, display: Display, **__: Any) -> int:
        display.finished(Summary(run_dir="r", status="", steps=1, epochs=1, examples=1, seconds=1))
        display.close()
        return ended

    monkeypatch.setattr(f"dbctl.run.{command}.{command}", run)
    with open(out, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert main([command, "x"]) == status
    assert capsys.readouterr().err == said


EARLY = """
import os, signal, sys
from dbctl import __main__
class Finder:
    def find_spec(self, name, *_):
        if name == "dbctl.errors":  # in the middle of the imports, below an exec of text
            exec(f"os.kill(os.getpid(), {sys.argv[1]})", {"os": os})
sys.meta_path.insert(0, Finder())
sys.exit(__main__.main())
"""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGHUP, 75)]
)
def test_a_signal_while_it_imports(number: int, status: int, tmp_path: Path) -> None:
    """With `python -m`, under which a KeyboardInterrupt that passed an exec ends by the signal."""
    (tmp_path / "early.py").write_text(EARLY)
    done = subprocess.run(
        [sys.executable, "-m", "early", str(int(number))],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        timeout=30,
        check=False,
    )
    assert (done.returncode, b"Traceback" in done.stderr) == (status, False), done.stderr
