"""`dbctl train --dry-run` refuses what `dbctl train` refuses, in the same words.

But for hosts without an address and rows that cannot be standardized, which it does not look for.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dbctl import examine
from dbctl.cli.main import main
from dbctl.run import room
from dbctl.rundir import RunInfo, create

FILE = str(Path(__file__).parent.parent / "experiments" / "digits-downpour.yaml")


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def popen(*words: object, **more: object) -> None:
        pytest.fail(f"started {words}")

    monkeypatch.setattr("subprocess.Popen", popen)
    monkeypatch.chdir(tmp_path)


def refused_alike(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit status and words of the run and of the dry run, which are the same."""
    said = []
    for more in ([], ["--dry-run"], ["--dry-run", "--json"]):
        status = main(["train", FILE, *words, *more])
        out, err = capsys.readouterr()
        assert out == ""
        said.append((status, err))
    assert said[1:] == said[:1] * 2
    assert said[0][0] != 0
    return said[0]


def test_too_little_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "meminfo").write_text(f"MemAvailable: {45 << 10} kB\n")
    monkeypatch.setattr(examine, "MEMINFO", tmp_path / "meminfo")
    status, said = refused_alike(capsys)
    assert status == 3
    assert "has too little memory for this run" in said


def test_too_few_open_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(room, "raise_descriptor_limit", lambda: 64)
    status, said = refused_alike(capsys, "--set", "replicas=20")
    assert status == 3
    assert "shard-0 needs about 87, and the hard limit is 64" in said


def test_a_run_directory_that_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with create(tmp_path / "run", "x") as run_dir:
        run_dir.write_info(RunInfo.of_this_process("r", control="/x", command=["dbctl"]))
        status, said = refused_alike(capsys, "--run-dir", str(tmp_path / "run"))
        assert status == 2
        assert "holds a run already" in said
    (tmp_path / "file").write_text("x")
    status, said = refused_alike(capsys, "--run-dir", str(tmp_path / "file"))
    assert status == 2
    assert "not a directory; give --run-dir a new or an empty one" in said


def test_a_file_and_data_that_are_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused_alike(capsys, "--set", "replicas=none")[0] == 2
    source = "data.train={source: npz, path: /no/x.npz, x: x, y: y}"
    status, said = refused_alike(capsys, "--set", source)
    assert status == 2
    assert "/no/x.npz" in said


def test_the_warnings_of_a_run_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    words = ["train", FILE, "--dry-run", "--set", "data.train.rows=4", "--set", "replicas=12"]
    assert main([*words, "--run-dir", str(tmp_path / "new" / "run")]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "warning: replicas 4 to 11 have no rows: data.train has 4; they train nothing",
        "warning: 12 processes of 1 thread on 2 cores: they share them",
    ]
    assert out.splitlines()[-1] == "replicas 4 to 11 have no rows"
    assert not (tmp_path / "new").exists()
