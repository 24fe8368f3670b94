"""The scripts in experiments/: frames of recordings and the vote, figures 3 and 4."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from dbctl.cli.main import COMMANDS
from dbctl.experiment.read import load

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXPERIMENTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


digits = script("speech_digits")


def recordings(path: Path) -> Path:
    """Three recordings of 60, 25 and 10 ms; the second is of the official test set."""
    random = np.random.default_rng(0)
    length = np.array([480, 200, 80])
    audio = random.integers(-3000, 3000, length.sum()).astype(np.int16)
    np.savez(path, audio=audio, length=length, digit=[3, 7, 1], index=[5, 4, 49])
    return path


def test_frames_of_25_ms_every_10_ms_of_40_filters() -> None:
    """Paper A, section 5; one second is 1 + (8000 - 200) / 80 frames, rounded up."""
    assert digits.log_energies(np.zeros(8000, np.int16)).shape == (99, 40)
    assert digits.log_energies(np.zeros(200, np.int16)).shape == (1, 40)
    assert digits.log_energies(np.zeros(201, np.int16)).shape == (2, 40)
    assert digits.log_energies(np.zeros(10, np.int16)).shape == (1, 40)


def test_filters_are_triangles_that_each_see_something() -> None:
    triangles = digits.filters()
    assert triangles.shape == (40, 257)
    assert (triangles >= 0).all()
    assert triangles.max() <= 1
    assert (triangles.sum(axis=1) > 0).all()
    assert (np.diff(triangles.argmax(axis=1)) >= 0).all()


def test_a_tone_is_loudest_in_the_filter_over_it() -> None:
    """1000 Hz, which begins half way: the mean of the recording is taken off."""
    time = np.arange(8000) / 8000
    tone = np.where(time > 0.5, 8000 * np.sin(2 * np.pi * 1000 * time), 0).astype(np.int16)
    loud = digits.log_energies(tone)[-10:].mean(axis=0)
    assert digits.filters()[loud.argmax(), 64] > 0  # bin 64 of 512 is 1000 Hz
    assert np.abs(digits.log_energies(tone).mean(axis=0)).max() < 1e-4


def test_context_is_eleven_frames_and_repeats_the_ends() -> None:
    frames = np.arange(3 * 40, dtype=np.float32).reshape(3, 40)
    rows = digits.with_context(frames).reshape(3, 11, 40)
    np.testing.assert_array_equal(rows[1, 5], frames[1])
    np.testing.assert_array_equal(rows[0, :5], np.tile(frames[0], (5, 1)))
    np.testing.assert_array_equal(rows[0, 6:8], frames[1:])
    np.testing.assert_array_equal(rows[2, 6:], np.tile(frames[2], (5, 1)))


def test_splits_are_by_index_and_every_frame_knows_its_recording(tmp_path: Path) -> None:
    digits.write_frames(recordings(tmp_path / "r.npz"), tmp_path)
    assert np.load(tmp_path / "x-train.npy").shape == (5 + 1, 440)
    assert np.load(tmp_path / "y-train.npy").tolist() == [3] * 5 + [1]
    assert np.load(tmp_path / "recording-train.npy").tolist() == [0] * 5 + [2]
    assert np.load(tmp_path / "y-test.npy").tolist() == [7]
    assert np.load(tmp_path / "x-test.npy").dtype == np.float32


def test_a_vote_adds_the_scores_of_a_recording_s_frames(tmp_path: Path) -> None:
    """Recording 4: two unsure frames against one sure one; rows in any order."""
    np.save(tmp_path / "y-test.npy", np.array([2, 2, 2, 8]))
    np.save(tmp_path / "recording-test.npy", np.array([4, 4, 4, 9]))
    file = tmp_path / "frames.csv"
    file.write_text("row,label,predicted,score\n2,2,5,0.3\n0,2,2,0.9\n1,2,5,0.4\n3,8,1,0.9\n")
    assert digits.vote(file, tmp_path) == 0.5
    file.write_text("row,label,predicted,score\n0,2,2,0.9\n")
    with pytest.raises(SystemExit, match="has 1 rows"):
        digits.vote(file, tmp_path)


def test_figure_3_has_a_row_a_network_and_count(monkeypatch: pytest.MonkeyPatch) -> None:
    figure3 = script("figure3")
    monkeypatch.setattr(figure3, "predict", lambda file, counts: {1: 0.4, 4: 0.1})
    monkeypatch.setattr(figure3, "measure", lambda file, count: 0.5 / count)
    rows = figure3.rows_of([Path("a.yaml")], "1,4", [1, 2])
    found = [(r["kind"], r["partitions"], r["speed_up"]) for r in rows]
    assert found == [
        ("predicted", 1, 1.0), ("predicted", 4, 4.0), ("measured", 1, 1.0), ("measured", 2, 2.0),
    ]  # fmt: skip


def test_the_files_that_figure_3_names_exist() -> None:
    assert all(path.exists() for path in script("figure3").FILES)


def test_figure_3_is_drawn(tmp_path: Path) -> None:
    """In a process of its own: matplotlib keeps its fonts open."""
    pytest.importorskip("matplotlib")
    row = {"network": "a", "kind": "measured", "partitions": 1, "seconds": 1.0, "speed_up": 1.0}
    rows, path = [row, {**row, "partitions": 2, "speed_up": ""}], tmp_path / "f.png"
    code = f"import figure3, pathlib; figure3.draw({rows!r}, pathlib.Path({str(path)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=EXPERIMENTS, check=True)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_figure_3_asks_for_matplotlib_before_it_measures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figure3 = script("figure3")
    monkeypatch.setattr(figure3, "find_spec", lambda name: None)
    monkeypatch.setattr(figure3, "rows_of", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(sys, "argv", ["figure3.py", "--png", "x.png"])
    with pytest.raises(SystemExit):
        figure3.main()
    assert "pip install '.[plot]'" in capsys.readouterr().err


def test_figure_4_trains_all_from_one_warmstart_and_compares_them(tmp_path: Path) -> None:
    figure4 = script("figure4/run")
    made = figure4.commands(
        tmp_path, ["sgd", "sandblaster"], settings=["seed=1"], plot=Path("f.svg")
    )
    assert [words[0] for words in made] == ["train", "train", "train", "compare"]
    assert {words[0] for words in made} <= set(COMMANDS)
    assert made[0][1:] == [
        str(EXPERIMENTS / "figure4" / "warmstart.yaml"), "--run-dir", f"{tmp_path}/warmstart",
        "--quiet", "--set", "seed=1",
    ]  # fmt: skip
    assert made[1][5:7] == ["--set", f"initialize_from={tmp_path}/warmstart"]
    assert made[3] == ["compare", f"{tmp_path}/sgd", f"{tmp_path}/sandblaster", "--plot", "f.svg"]


def test_the_files_of_figure_4_differ_only_in_method_and_counts() -> None:
    """Paper A, section 5: the same network and data, from one common warmstart."""
    figure4 = script("figure4/run")
    files = sorted((EXPERIMENTS / "figure4").glob("*.yaml"))
    assert {path.stem for path in files} == {*figure4.METHODS, "warmstart"}
    first, *others = [load(str(path)) for path in files]
    runs = (EXPERIMENTS / "figure4" / "../../runs/figure4/warmstart").absolute()
    for path, one in zip(files, [first, *others], strict=True):
        assert one.name == path.stem
        assert (one.network, one.data, one.seed) == (first.network, first.data, first.seed)
        assert one.threads == first.threads
        if path.stem != "warmstart":
            assert one.initialize_from == str(runs)
            assert one.stop == first.stop
            assert one.replicas == (1 if path.stem == "sgd" else 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "sgd"], "--only takes two or more of sgd, downpour-fixed"),
        (["--only", "sgd,lbfgs"], "--only takes two or more of"),
        (["--out", str(EXPERIMENTS)], "is not empty: give another --out"),
        (["--plot", "x.png"], "pip install '.[plot]'"),
    ],
)
def test_figure_4_refuses_before_it_trains(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    figure4 = script("figure4/run")
    monkeypatch.setattr(figure4, "find_spec", lambda name: None)
    monkeypatch.setattr(figure4, "commands", lambda *_, **__: pytest.fail("trained"))
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    with pytest.raises(SystemExit):
        figure4.main()
    assert message in " ".join(capsys.readouterr().err.split())


def test_figure_4_ends_with_the_first_command_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure4 = script("figure4/run")
    ran: list[str] = []

    def run(words: list[str], *, check: bool) -> subprocess.CompletedProcess[bytes]:
        ran.append(words[3])
        return subprocess.CompletedProcess(words, 3 * (len(ran) == 2))

    monkeypatch.setattr(figure4.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path / "new")])
    assert figure4.main() == 3
    assert ran == ["train", "train"]
