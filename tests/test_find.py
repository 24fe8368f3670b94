"""What `dbctl resume` and `dbctl eval` say when they are given no run directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dbctl.cli.main import main
from dbctl.errors import UsageError
from dbctl.run.find import find


def make(path: Path, *, age_s: float = 0.0) -> Path:
    path.mkdir(parents=True)
    (path / "run.json").write_text("{}")
    os.utime(path / "run.json", (1e9 - age_s, 1e9 - age_s))
    return path


def test_a_run_directory_is_found(tmp_path: Path) -> None:
    assert find(str(make(tmp_path / "r"))).path == tmp_path / "r"


@pytest.mark.parametrize("command", ["resume", "eval"])
def test_an_experiment_file_is_no_run_directory(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("version: 1\n")
    assert main([command, str(file)]) == 2
    err = capsys.readouterr().err
    assert "is a file, expected the directory of a run, like runs/NAME/TIMESTAMP" in err


@pytest.mark.parametrize("given", ["runs", "runs/digits"])
def test_the_newest_run_of_an_experiment_is_named(given: str, tmp_path: Path) -> None:
    make(tmp_path / "runs/digits/2026-01-02", age_s=9)
    newest = make(tmp_path / "runs/digits/2026-01-01")
    with pytest.raises(UsageError, match=f"not a run directory; the newest run in it is {newest}"):
        find(str(tmp_path / given))


def test_without_any_run_nothing_is_guessed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"it has no run\.json"):
        find(str(tmp_path))
    with pytest.raises(UsageError, match="no such directory"):
        find(str(tmp_path / "none"))
