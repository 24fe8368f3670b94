"""run/stopping.py: which process may be signalled, and what is said of each run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dbctl.experiment.specs import HostSpec
from dbctl.run import stopping
from dbctl.run.cluster_hosts import RunSaid, Said, Seen
from dbctl.run.clusters import Cluster
from dbctl.run.stopping import ENDED, LATE, UNKNOWN, RunStopped, stop_all
from dbctl.rundir import RunDir, RunInfo, create

ROOT = Path(__file__).parent.parent
CLUSTER = Cluster(version=1, name="lab", dbctl="0.1.0", protocol=2, launched="then", keepers=())
# It has its run directory, and ends by SIGTERM with a checkpoint, or does not heed it.
CONTROLLER = """
import pathlib, signal, sys
from dbctl.checkpoint.layout import step_name
from dbctl.rundir import RunInfo, create
run_dir = create(pathlib.Path(sys.argv[1]), "x")
def end(number, frame):
    (run_dir.checkpoints / step_name(12)).mkdir()
    run_dir.write_status({"state": "stopped"})
    sys.exit(75)
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[2] == "deaf" else end)
run_dir.write_info(RunInfo.of_this_process(sys.argv[3], control="/c", command=["dbctl"]))
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[RunDir]:
    with create(tmp_path / "run", "x") as found:
        found.write_info(RunInfo.of_this_process("7f", control="/c", command=["dbctl"]))
        yield found


def said(path: Path | str, run: str = "7f", **changes: Any) -> RunSaid:
    known: dict[str, Any] = {
        "run": run, "agent": "agent-0", "pid": 1, "seconds": 1.0, "nodes": (), "name": "digits",
        "run_dir": str(path), "user": "me@here",
    }  # fmt: skip
    return RunSaid(**(known | changes))


def seen(*runs: RunSaid, host: str = "a", state: str = "up") -> Seen:
    told = Said(state=state, version="0.1.0", seconds=1.0, runs=runs)
    return Seen(host=HostSpec(name=host), state=state, said=told)


def is_found(run: RunSaid) -> bool:
    with stopping._controllers([run]) as found:
        return run.run in found


# ------------------------------------------------------------------- which process is signalled


def test_the_controller_of_a_run_of_this_user_on_this_machine_is_found(run_dir: RunDir) -> None:
    run = said(run_dir.path)
    with stopping._controllers([run]) as found:
        assert list(found) == ["7f"]
        assert f"Pid:\t{os.getpid()}\n" in Path(f"/proc/self/fdinfo/{found['7f']}").read_text()


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "8f"},  # another life of it, or another run: the keeper's words are only words
        {"host": "elsewhere"},
        {"boot": "another"},
        {"pid_start": 1},
        {"pid": 1 << 30},
        {"pid": 0},
        {"pid": -1},
    ],
)
def test_no_other_process_is_ever_signalled(run_dir: RunDir, changes: dict[str, Any]) -> None:
    run_dir.write_info(replace(run_dir.read_info(), **changes))
    assert not is_found(said(run_dir.path))


def test_nor_one_whose_number_is_anothers_by_now(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends, and its number is given away, just before the process is held."""
    answers = iter([True, False])
    monkeypatch.setattr(RunInfo, "is_alive", lambda self: next(answers))
    assert not is_found(said(run_dir.path))


def test_nor_another_users(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may signal everybody."""
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert not is_found(said(run_dir.path))


def test_nor_where_the_run_directory_is_not_here(run_dir: RunDir, tmp_path: Path) -> None:
    assert not is_found(said("?"))
    assert not is_found(said("/no/such\0"))
    assert not is_found(said(tmp_path))
    (run_dir.path / "run.json").write_text("{")
    assert not is_found(said(run_dir.path))


# -------------------------------------------------------------------------------- stopping all


@pytest.fixture
def controllers(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Two: `good` ends when it is asked to, `deaf` does not."""
    found = {}
    for name in ("good", "deaf"):
        found[name] = subprocess.Popen(
            [sys.executable, "-c", CONTROLLER, str(tmp_path / name), name, name],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
    for process in found.values():
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    yield found
    for process in found.values():
        process.kill()
        process.communicate()


class Answers:
    """In the place of the keepers: `now` are their answers to `end_keepers`."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, before: list[Seen], now: list[Seen]
    ) -> None:
        self.alive: list[str] = []
        self.controllers: dict[str, subprocess.Popen[str]] = {}
        self._now = now
        monkeypatch.setattr(stopping, "look", lambda cluster: before)
        monkeypatch.setattr(stopping, "end_keepers", self._end)
        monkeypatch.setattr(stopping, "SAVE_LIMIT_S", 1.0)

    def _end(self, cluster: Cluster, *, force: bool) -> list[Seen]:
        self.alive = [n for n, one in self.controllers.items() if one.poll() is None]
        return self._now


def test_runs_are_asked_and_waited_for_before_the_keepers_go(
    controllers: dict[str, subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [said(tmp_path / name, name) for name in controllers]
    other, lost = said("/elsewhere", "o", user="you@there"), said("/elsewhere", "l")
    before = [seen(*runs, other), seen(*runs, host="b"), seen(lost, host="c")]
    now = [
        Seen(host=one.host, state=state)
        for one, state in zip(before, ("stopped", "gone", "unreachable"), strict=True)
    ]
    answers = Answers(monkeypatch, before, now)
    answers.controllers = controllers
    told: list[str] = []
    begin = time.monotonic()
    hosts, fates = stop_all(CLUSTER, tell=told.append)
    assert 1.0 <= time.monotonic() - begin < 5.0
    assert hosts == now
    assert told == ["2 runs asked to save and end, at most 1 s: digits, digits"]
    assert answers.alive == ["deaf"]
    assert controllers["good"].returncode == 75
    assert [(run.run, run.state, run.checkpoint) for run in fates] == [
        ("good", "stopped", 12), ("deaf", LATE, None), ("o", ENDED, None), ("l", UNKNOWN, None),
    ]  # fmt: skip
    assert json.loads(json.dumps(stopping.objects(fates)))[0] == {
        "run": "good", "name": "digits", "run_dir": str(tmp_path / "good"), "user": "me@here",
        "state": "stopped", "checkpoint": 12,
    }  # fmt: skip


def test_by_force_nobody_is_asked(
    controllers: dict[str, subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [seen(said(tmp_path / "good", "good"))]
    answers = Answers(monkeypatch, before, [Seen(host=before[0].host, state="stopped")])
    answers.controllers = controllers
    _, [fate] = stop_all(CLUSTER, force=True, tell=lambda text: pytest.fail(text))
    assert answers.alive == ["good", "deaf"]
    assert fate.state == ENDED
    assert controllers["good"].poll() is None
    controllers["good"].send_signal(signal.SIGTERM)
    assert controllers["good"].wait(5.0) == 75, "it would have heard"


# ------------------------------------------------------------------------------- what is said


@pytest.mark.parametrize(
    ("state", "checkpoint", "words"),
    [
        ("stopped", 1200, "stopped; `dbctl resume '/r\\x1b'` goes on from step 1,200"),
        ("stopped", None, "stopped; nothing was saved"),
        (LATE, None, "had not ended after 30 s, and was ended with its agents; nothing was saved"),
        (ENDED, None, "ended with its agents"),
        (ENDED, 3, "ended with its agents; `dbctl resume '/r\\x1b'` goes on from step 3"),
        (UNKNOWN, None, "may go on"),
    ],
)
def test_what_is_said_of_a_run(state: str, checkpoint: int | None, words: str) -> None:
    run = RunStopped(
        run="7f", name="digits", run_dir="/r\033", user="me@here", state=state,
        checkpoint=checkpoint,
    )  # fmt: skip
    assert run.line() == f"digits (me@here: /r\\x1b)  {words}"
