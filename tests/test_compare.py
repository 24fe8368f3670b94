"""`dbctl compare`: what it refuses, what it reads of a run directory, what it draws."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dbctl.cli.main import main
from dbctl.errors import UsageError
from dbctl.metrics import Metrics
from dbctl.progress import curves
from dbctl.progress.curves import MAX_POINTS, check, thinned
from dbctl.progress.history import Mark, Point
from dbctl.run.compare import compare
from dbctl.rundir import RunInfo, create

START = {"event": "start", "time": 0.0, "optimizer": "sgd", "method": "sgd", "shards": 1}
START |= {"replicas": 1, "partitions": 1}


def records(name: str, accuracies: Iterable[float], **more: Any) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [{**START, "name": name}]
    for n, accuracy in enumerate(accuracies, 1):
        node = {"node": "worker-0.0", "replica": 0, "examples": 100 * n, "loss": 1 / n}
        made.append({"event": "worker", "time": float(n), **node})
        made.append({"event": "evaluation", "time": float(n), "accuracy": accuracy})
    return made


def finished(time: float) -> dict[str, Any]:
    return {"event": "finished", "time": time, "status": "done", "steps": 7, "examples": 200}


def run(path: Path, lines: Iterable[Mapping[str, Any]], *, pid: int | None = None) -> str:
    """A run directory with these records; `pid`: its controller, by default one that has ended."""
    with create(path, "x") as run_dir:
        info = RunInfo.of_this_process("run", control="", command=[])
        if pid is None:
            ended = {"pid": 1 << 22, "pid_start": 0}
            info = RunInfo(**{**{f: getattr(info, f) for f in info.__struct_fields__}, **ended})
        run_dir.write_info(info)
        with Metrics(run_dir.metrics) as metrics:
            for line in lines:
                metrics.append(line)
    return str(path)


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    """One that gets to 0.9 after two seconds, one that stays at 0.6."""
    quick = run(tmp_path / "1", [*records("quick", [0.7, 0.9]), finished(2.0)])
    slow = run(tmp_path / "2", [*records("slow", [0.5, 0.6]), finished(2.0)])
    return [quick, slow]


def found(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["compare", *words, "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    (line,) = said.out.splitlines()
    return dict(json.loads(line))


# -------------------------------------------------------------------------------- the command line


def test_the_table(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *two]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "to an accuracy of 60.00 % of the test rows, the greatest that all" in said.out
    assert [line.split()[:2] for line in said.out.splitlines()[-2:]] == [
        ["quick", "1.0"],
        ["slow", "2.0"],
    ]


def test_an_end_of_its_own_is_done_in_the_table_and_as_it_was_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = ("max_iterations", "converged")
    runs = [
        run(tmp_path / end, [*records(end[:3], [0.7]), finished(1.0) | {"status": end}])
        for end in ends
    ]
    assert [one["status"] for one in found(capsys, *runs)["runs"]] == list(ends)
    assert main(["compare", *runs]) == 0
    out = capsys.readouterr().out
    assert "              done  " in out
    assert "  done (converged)  " in out
    assert ends[0] not in out.replace(str(tmp_path), "")


def test_a_given_accuracy(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    reached = [one["reached"] for one in found(capsys, *two, "--accuracy", "0.9")["runs"]]
    assert reached == [
        {"seconds": 2.0, "replica_seconds": 2.0, "examples": 200, "bytes": 0}, None,
    ]  # fmt: skip
    assert found(capsys, *two, "--accuracy", "1", "--split", "test")["accuracy"] == 1


@pytest.mark.parametrize("accuracy", ["0", "-0.5", "1.01", "85", "nan", "inf"])
def test_an_accuracy_that_is_none(
    accuracy: str, two: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *two, "--accuracy", accuracy]) == 2
    assert "expected a share above 0 and at most 1, such as 0.85" in capsys.readouterr().err


def test_words_that_are_none(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        ([], "missing argument 'RUN_DIR...'"),
        (two[:1], "expected two or more run directories, found 1"),
        ([*two, "--accuracy", "most"], "'most' is not a valid float"),
        ([*two, "--split", "train"], "'train' is not"),
        ([two[0], two[1], f"{two[0]}/../1"], f"/../1: is given twice (the first time as {two[0]}"),
        ([two[0], "/no/such"], "/no/such: no such directory, expected that of a run"),
        ([two[0], str(Path(two[0]).parent)], "not a run directory; the newest run in it is"),
        ([two[0], f"{two[1]}/metrics.jsonl"], "is a file, expected the directory of a run"),
    ):
        assert main(["compare", *words]) == 2, words
        assert message in capsys.readouterr().err


# ------------------------------------------------------------------------------------ what is read


def test_runs_that_have_not_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    going_on = run(tmp_path / "a", records("a", [0.5]), pid=1)
    killed = run(tmp_path / "b", records("b", [0.5]))
    statuses = [one["status"] for one in found(capsys, going_on, killed)["runs"]]
    assert statuses == ["running", "unfinished"]


def test_a_cut_line_a_damaged_one_and_no_records(
    two: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = Path(two[0]) / "metrics.jsonl"
    text = metrics.read_bytes()
    metrics.write_bytes(text.replace(b"\n", b"\n[1]\n\xff\n", 1)[:-9])  # without `finished`
    empty = run(tmp_path / "empty", [])
    (Path(empty) / "run.json").write_bytes(b"{")
    (Path(empty) / "metrics.jsonl").unlink()
    first, _, last = found(capsys, *two, empty)["runs"]
    assert (first["status"], first["best_accuracy"], first["seconds"]) == ("unfinished", 0.9, 2.0)
    assert (last["label"], last["status"], last["steps"]) == (empty, "unfinished", 0)


def test_runs_of_one_name_are_called_by_their_directories(tmp_path: Path) -> None:
    paths = [run(tmp_path / n, records(name, [0.5])) for n, name in ("1a", "2a", "3b")]
    assert [entry.label for entry in compare(paths).entries] == [*paths[:2], "b"]


# ---------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.pdf", "--plot .*a.pdf: expected a name that ends in .png or .svg"),
        ("png", "expected a name that ends in"),
        ("no/a.svg", "there is no directory .*/no$"),
    ],
)
def test_files_that_cannot_be_drawn(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        check(tmp_path / name)


def test_without_matplotlib_it_says_how_to_get_it(
    two: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(curves, "find_spec", lambda name: None)
    assert main(["compare", *two]) == 0
    assert main(["compare", *two, "--plot", f"{two[0]}/a.png"]) == 2
    assert "pip install matplotlib, or pip install '.[plot]' in a clone" in capsys.readouterr().err
    assert not Path(two[0], "a.png").exists()


def plot(*words: str) -> None:
    """In a process of its own: matplotlib keeps its fonts open."""
    command = [sys.executable, "-W", "error", "-m", "dbctl", "compare", *words]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert b"dbctl" not in done.stderr


def test_it_is_drawn(two: list[str], tmp_path: Path) -> None:
    """The same numbers, the same bytes; a run without a curve and odd names are no fault."""
    pytest.importorskip("matplotlib")
    odd = run(tmp_path / "odd", records("_größe $x^{ 数", [0.3]))
    empty = run(tmp_path / "empty", [])
    svg = tmp_path / "a.svg"
    plot(*two, odd, empty, "--plot", str(svg))
    text = svg.read_text(encoding="utf-8")
    for label in ("quick", "slow", "_größe $x^{ 数", "replica-seconds", "training loss"):
        assert f"{label}<" in text
    plot(*two, odd, empty, "--plot", str(svg))
    assert svg.read_text(encoding="utf-8") == text
    plot(*two, "--plot", str(tmp_path / "A.PNG"))
    assert (tmp_path / "A.PNG").read_bytes().startswith(b"\x89PNG")


def test_a_long_curve_is_thinned_and_keeps_its_end() -> None:
    points = [Point(Mark(float(n)), 1.0) for n in range(3 * MAX_POINTS + 2)]
    kept = thinned(points)
    assert len(kept) <= MAX_POINTS + 1
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert thinned(points[:5]) == points[:5]
    assert thinned([]) == []
