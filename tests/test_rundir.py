"""A run directory belongs to one run and one controller, and reads the same in every locale."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dbctl import __version__, rundir
from dbctl.errors import RunError, UsageError
from dbctl.metrics import read_metrics
from dbctl.rundir import RunDir, RunInfo, check_new, create, open_

NOON = datetime(2026, 1, 31, 12, 0, 5)


def info(**changes: Any) -> RunInfo:
    mine = RunInfo.of_this_process("r1", control="/tmp/x/control.sock", command=["dbctl", "train"])
    return msgspec.structs.replace(mine, **changes)


def made(path: Path) -> Path:
    """A finished run's directory."""
    with create(path, "x") as run_dir:
        run_dir.write_info(info())
    return path


# ------------------------------------------------------------------------------------ create


def test_the_usual_place_is_name_and_time(tmp_path: Path) -> None:
    with create(None, "digits-downpour", root=tmp_path / "runs", now=NOON) as run_dir:
        assert run_dir.path == tmp_path / "runs" / "digits-downpour" / "2026-01-31_12-00-05"
        assert sorted(os.listdir(run_dir.path)) == [".lock", "checkpoints", "logs"]
        assert run_dir.log_path("worker-1.0") == run_dir.path / "logs" / "worker-1.0.log"


def test_runs_of_one_second_get_directories_of_their_own(tmp_path: Path) -> None:
    paths = []
    for _ in range(12):
        with create(None, "x", root=tmp_path, now=NOON) as run_dir:
            paths.append(run_dir.path.name)
    assert paths[:3] == ["2026-01-31_12-00-05", "2026-01-31_12-00-05_2", "2026-01-31_12-00-05_3"]
    assert len(set(paths)) == 12
    assert paths[-1] == "2026-01-31_12-00-05_12"


@pytest.mark.parametrize(
    ("name", "directory"),
    [
        ('it\'s a "café" $(x) 数', 'it\'s a "café" $(x) 数'),
        ("a/b", "a_b"),
        ("../../etc", "_.._.._etc"),
        (".", "_."),
        ("..", "_.."),
        ("-rf", "_-rf"),
        ("  ", "_"),
        ("tab\tnul\0line\n", "tab_nul_line_"),
        ("lone \ud800", "lone ?"),
        ("数" * 100, "数" * 66),  # 300 bytes of UTF-8, and a directory's name has at most 255
    ],
)
def test_any_name_is_one_directory_inside_runs(tmp_path: Path, name: str, directory: str) -> None:
    with create(None, name, root=tmp_path, now=NOON) as run_dir:
        assert run_dir.path.parent.name == directory
        assert run_dir.path.parent.parent == tmp_path
        run_dir.write_info(info(control=str(run_dir.path / "control.sock")))
    assert open_(run_dir.path).read_info().control.startswith(str(run_dir.path))


def test_a_given_directory_may_be_new_or_empty(tmp_path: Path) -> None:
    made(tmp_path / "deep" / "new é 'q'")
    (tmp_path / "empty").mkdir()
    made(tmp_path / "empty")


def told(work: Callable[..., object], path: Path | None, **where: Path) -> str:
    with pytest.raises(UsageError) as caught:
        work(path, "x", **where)
    return str(caught.value)


def test_what_would_be_refused_is_known_with_nothing_made(tmp_path: Path) -> None:
    made(tmp_path / "run")
    (tmp_path / "file").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    for name in ("", "run", "file", "file/below", "file/far/below", "y" * 300, "\ud800"):
        assert told(check_new, tmp_path / name) == told(create, tmp_path / name)
    root = tmp_path / "file"
    assert told(check_new, None, root=root) == told(create, None, root=root)
    (tmp_path / "x").write_text("a file where the runs of x are")
    assert told(check_new, None, root=tmp_path) == told(create, None, root=tmp_path)
    (tmp_path / "x").unlink()
    check_new(tmp_path / "new" / "deep", "x")
    check_new(None, "x", root=tmp_path / "runs")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_directory_where_another_run_is_starting_is_taken(tmp_path: Path) -> None:
    """It names no file of the other one: what is there changes from one moment to the next."""
    with create(tmp_path / "r", "x") as other:
        said = f"{tmp_path}/r: taken by another run, which is just starting; give another --run-dir"
        assert told(create, tmp_path / "r") == told(check_new, tmp_path / "r") == said
        (other.path / ".experiment.yaml.tmp").write_text("x")
        assert told(create, tmp_path / "r") == said
    assert "not empty, it has '.experiment.yaml.tmp'" in told(create, tmp_path / "r")


def test_a_directory_that_holds_a_run_or_anything_else_is_refused(tmp_path: Path) -> None:
    before = sorted(os.listdir(made(tmp_path / "run")))
    with pytest.raises(UsageError, match="it saved nothing: once it has ended remove the dir"):
        create(tmp_path / "run", "x")
    (tmp_path / "run" / "checkpoints" / "step-1").mkdir()
    with pytest.raises(UsageError, match="holds a run already; go on with `dbctl resume`") as e:
        create(tmp_path / "run", "x")
    assert e.value.exit_code == 2
    assert sorted(os.listdir(tmp_path / "run")) == before
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match=r"not empty, it has 'thesis\.tex'"):
        create(tmp_path / "home", "x")
    assert os.listdir(tmp_path / "home") == ["thesis.tex"]
    with pytest.raises(UsageError, match="not a directory"):
        create(tmp_path / "home" / "thesis.tex", "x")
    with pytest.raises(UsageError, match="cannot make a run directory: not a directory"):
        create(tmp_path / "home" / "thesis.tex" / "below", "x")
    with pytest.raises(UsageError, match="cannot make a run directory: file name too long"):
        create(tmp_path / ("x" * 300), "x")


def failing(run_dir: RunDir, *, with_info: bool = False) -> None:
    """What its `with` ends by; DIRECTORY/run.json is written, or a few other files."""
    with run_dir:
        if with_info:
            run_dir.write_info(info())
        else:
            run_dir.write_experiment(b"x")
            (run_dir.path / "standardize.npz").write_bytes(b"x")
            (run_dir.path / ".resolved.yaml.tmp").write_bytes(b"x")
        raise RunError("the disk is full")


def test_what_never_became_a_run_does_not_stand_in_the_way_of_the_next_try(tmp_path: Path) -> None:
    """A full disk, or Ctrl-C, before run.json is written."""
    with pytest.raises(RunError):
        failing(create(tmp_path / "r", "x"))
    assert os.listdir(tmp_path / "r") == [".lock"]
    with pytest.raises(RunError):
        failing(create(tmp_path / "r", "x"), with_info=True)
    before = sorted(os.listdir(tmp_path / "r"))
    assert "run.json" in before
    with pytest.raises(RunError):
        failing(open_(tmp_path / "r"), with_info=True)
    assert sorted(os.listdir(tmp_path / "r")) == before


def test_what_somebody_else_put_there_meanwhile_stays(tmp_path: Path) -> None:
    run_dir = create(tmp_path / "r", "x")
    (tmp_path / "r" / "notes.txt").write_text("mine")
    (tmp_path / "r" / "mine").mkdir()
    (tmp_path / "r" / "logs" / "mine.log").write_text("mine")
    with pytest.raises(RunError):
        failing(run_dir)
    assert sorted(os.listdir(tmp_path / "r")) == [".lock", "logs", "mine", "notes.txt"]
    assert os.listdir(tmp_path / "r" / "logs") == ["mine.log"]


def test_a_directory_that_goes_away_hides_no_error(tmp_path: Path) -> None:
    run_dir = create(tmp_path / "r", "x")
    shutil.rmtree(run_dir.path)
    with pytest.raises(RunError, match=r"experiment\.yaml: cannot be written"):
        failing(run_dir)
    assert run_dir._lock_fd == -1


def test_a_disk_that_is_full_at_once_leaves_an_empty_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = Path.mkdir

    def full(path: Path, *words: Any, **named: Any) -> None:
        if path.name == "checkpoints":
            raise OSError(errno.ENOSPC, "no space left on device", str(path))
        mkdir(path, *words, **named)

    monkeypatch.setattr(Path, "mkdir", full)
    assert "no space left on device" in told(create, tmp_path / "r")
    assert os.listdir(tmp_path / "r") == [".lock"]


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid():
        pytest.skip("mounting needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=True)
    try:
        made(disk / "run")
        (disk / "empty").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_disk_that_cannot_be_written_is_one_clear_error(read_only: Path) -> None:
    with pytest.raises(UsageError, match="cannot make a run directory: read-only file system"):
        create(read_only / "new", "x")
    with pytest.raises(UsageError, match="cannot make a run directory: read-only file system"):
        create(None, "x", root=read_only / "runs")
    for path, root in (
        (read_only / "new/deep", None),
        (read_only / "empty", None),
        (None, read_only),
    ):
        where = {} if root is None else {"root": root}
        assert told(check_new, path, **where) == told(create, path, **where)
    run_dir = open_(read_only / "run")  # enough for `dbctl eval`
    assert run_dir.read_info().run == "r1"
    with pytest.raises(UsageError, match="cannot be written: read-only file system"):
        run_dir.lock()
    with pytest.raises(RunError, match=r"status\.json: cannot be written: read-only file"):
        run_dir.write_status({})


def test_no_permission_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """root may do anything, so the system's answer is given for it."""

    def refuse(path: Any, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    run = made(tmp_path / "run")
    with monkeypatch.context() as here:
        here.setattr(os, "access", lambda *_: False)
        with pytest.raises(UsageError, match="cannot make a run directory: permission denied"):
            check_new(tmp_path / "new", "x")
    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(UsageError, match="cannot make a run directory: permission denied"):
        create(tmp_path / "new", "x")
    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(UsageError, match="cannot be opened: permission denied"):
        open_(run)


# -------------------------------------------------------------------------------------- open


def test_only_a_run_directory_can_be_opened(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"not a run directory, it has no run\.json; expected"):
        open_(tmp_path)
    with pytest.raises(UsageError, match="no such directory"):
        open_(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="cannot be opened: not a directory"):
        open_(tmp_path / "file")


def test_files_come_back_as_they_were(tmp_path: Path) -> None:
    given = "\ufeffname: é\r\n# 'quoted'\n".encode()
    with create(tmp_path / "run", "x") as run_dir:
        run_dir.write_experiment(given)
        run_dir.write_resolved("name: é\n")
        run_dir.write_info(info())
    again = open_(tmp_path / "run")
    assert again.experiment.read_bytes() == given
    assert again.read_resolved() == "name: é\n"
    assert again.read_info() == info(started=again.read_info().started)
    assert again.read_info().dbctl == __version__
    assert datetime.fromisoformat(again.read_info().started).tzinfo is not None


def test_damaged_files_are_named(tmp_path: Path) -> None:
    run_dir = open_(made(tmp_path / "run"))
    (run_dir.path / "run.json").write_text('{"run": 3}')
    with pytest.raises(RunError, match=r"run\.json: damaged: .*`str`, got `int`"):
        run_dir.read_info()
    with pytest.raises(RunError, match=r"resolved\.yaml: cannot be read: no such file"):
        run_dir.read_resolved()
    run_dir.resolved.write_bytes(b"\xff")
    with pytest.raises(RunError, match=r"resolved\.yaml: not UTF-8"):
        run_dir.read_resolved()


def test_bytes_of_the_command_line_that_are_no_text_are_escaped(tmp_path: Path) -> None:
    command = ["dbctl", os.fsdecode(b"caf\xe9.yaml"), "é"]
    with create(tmp_path / "run", "x") as run_dir:
        run_dir.write_info(RunInfo.of_this_process("r", control="", command=command))
    assert open_(tmp_path / "run").read_info().command == ("dbctl", "caf\\xe9.yaml", "é")


@pytest.mark.parametrize("locale", ["C", "POSIX", "C.UTF-8"])
def test_text_is_utf_8_whatever_the_locale(tmp_path: Path, locale: str) -> None:
    script = (
        "import sys; from pathlib import Path; from dbctl.rundir import *\n"
        "from dbctl.metrics import Metrics\n"
        "r = create(None, 'caf\\u00e9', root=Path(sys.argv[1]))\n"
        "r.write_resolved('name: caf\\u00e9'); r.write_status({'name': 'caf\\u00e9'})\n"
        "m = Metrics(r.metrics); m.append({'name': 'caf\\u00e9'})\n"
        "r.write_info(RunInfo.of_this_process('caf\\u00e9', control='', command=sys.argv))\n"
    )
    environment = {**os.environ, "LANG": locale, "LC_ALL": locale}
    root = tmp_path / "é"
    subprocess.run([sys.executable, "-c", script, str(root)], env=environment, check=True)
    run_dir = open_(next((root / "café").iterdir()))
    assert run_dir.read_resolved() == "name: café"
    assert run_dir.read_status() == {"name": "café"}
    assert list(read_metrics(run_dir.metrics)) == [{"name": "café"}]
    assert run_dir.read_info().command[1] == str(root)


# -------------------------------------------------------------------------------------- lock


def test_two_controllers_cannot_have_one_run(tmp_path: Path) -> None:
    with create(tmp_path / "run", "x") as first:
        other = rundir.RunDir(tmp_path / "run")
        with pytest.raises(UsageError, match="going on, just being started by another process"):
            other.lock()
        first.write_info(info())
        with pytest.raises(UsageError, match=f"going on, process {os.getpid()} on .*; stop it"):
            open_(tmp_path / "run").lock()
        first.lock()  # one's own is no hindrance
    with open_(tmp_path / "run") as second:
        second.lock()
    with open_(tmp_path / "run") as third:
        third.lock()


def test_of_two_that_are_given_one_empty_directory_one_is_refused(tmp_path: Path) -> None:
    with create(tmp_path, "x"):
        with pytest.raises(UsageError, match="taken by another run"):
            create(tmp_path, "x")
        (tmp_path / "logs").rmdir()  # as if the other had come no further than its lock
        (tmp_path / "checkpoints").rmdir()
        with pytest.raises(UsageError, match="going on"):
            create(tmp_path, "x")
    made(tmp_path)


def test_a_killed_controller_frees_its_run_and_is_not_taken_for_alive(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from dbctl.rundir import *\n"
        "r = create(Path(sys.argv[1]), 'x')\n"
        "r.write_info(RunInfo.of_this_process('r', control='', command=sys.argv))\n"
        "print('ready', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        run_dir = open_(tmp_path / "run")
        assert run_dir.read_info().is_alive()
        with pytest.raises(UsageError, match=f"process {process.pid} on"):
            run_dir.lock()
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not run_dir.read_info().is_alive()  # a zombie does not run
        run_dir.lock()
        run_dir.close()
    assert not run_dir.read_info().is_alive()


def test_another_process_or_boot_with_the_same_pid_is_not_the_controller() -> None:
    assert info().is_alive()
    assert not info(pid_start=info().pid_start + 1).is_alive()
    assert not info(boot="another").is_alive()
    assert not info(pid=2**22 + 1).is_alive()


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(RunError, match="cannot be locked: no locks available"):
        create(tmp_path / "run", "x")


# ------------------------------------------------------------------------------------ status


def test_status_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with create(tmp_path / "run", "x") as run_dir:
        assert run_dir.read_status() == {}
        run_dir.write_status({"step": 1, "loss": float("nan")})
        assert run_dir.read_status() == {"step": 1, "loss": None}

        def replace(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(RunError, match=r"status\.json: cannot be written: no space left"):
            run_dir.write_status({"step": 2})
        assert run_dir.read_status() == {"step": 1, "loss": None}
        assert sorted(os.listdir(run_dir.path)) == [".lock", "checkpoints", "logs", "status.json"]
