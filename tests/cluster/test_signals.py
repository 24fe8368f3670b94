"""Signals at every phase of a run of real processes (docs/reliability.md, G11; fairseq#487).

Ctrl-C: a final checkpoint and exit status 130; SIGTERM and SIGHUP: the same and 75; a second one
ends at once; SIGKILL of the controller takes everything with it. Nothing is left, ever.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.runs import ENDLESS, TrainRun, digits, kill, state, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(60)]

FINAL_S = 5.0  # digits, from the first Ctrl-C to the end of everything
SECOND_S = 2.0
LEASE_S = 2.0
ORPHANED_S = 4.0  # the end of standard input tells it: no lease has to run out
PHASES = ("spawn", "join", "train", "checkpoint", "finish")
# A checkpoint large enough to be met half written: 5 million parameters and their Adagrad sums.
WIDE = [{"type": "dense", "units": 66_000, "activation": "relu"}, {"type": "dense", "units": 10}]


def run_for(phase: str, tmp_path: Path) -> TrainRun:
    """A run in which the phase lasts long enough to be met."""
    experiment = digits(stop=ENDLESS, checkpoint={"every": "0.2 s"})
    more: dict[str, Any] = {}
    if phase == "join":
        more = {"factories": {"worker": "slow_start"}}
    if phase == "checkpoint":
        network = {**experiment["network"], "layers": WIDE}
        experiment.update(network=network, evaluate="off", warmstart=None)
        experiment["optimizer"].update(batch_size=4, warmstart=None)
        experiment["checkpoint"] = {"every": "1 step"}
    if phase == "finish":
        experiment["stop"] = {"steps": 100}
        experiment["evaluate"] = {"every": "1000 epochs"}
        more = {"factories": {"evaluator": "slow_measure"}}
    experiment.pop("warmstart", None)
    return TrainRun(tmp_path, experiment, **more)


@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c(tmp_path: Path, phase: str) -> None:
    """As a terminal sends it: to the whole group, in which no node is."""
    with run_for(phase, tmp_path) as run:
        run.reach(phase)
        run.signal(signal.SIGINT, to_all=True)
        if phase == "checkpoint":
            run.signal(signal.SIGCONT)
        assert run.finish(FINAL_S) == 130
        assert "Traceback" not in run.err
        if phase in ("train", "checkpoint", "finish"):
            assert run.step_to_resume() > 0
            assert run.out.startswith("interrupted: ")
            assert run.metrics("finished")[-1]["status"] == "interrupted"
            assert run.status()["state"] == "interrupted"
        else:
            assert "nothing was saved" in run.out
            assert run.checkpoints() == []


@pytest.mark.parametrize(
    ("phase", "number"),
    [("join", signal.SIGTERM), ("train", signal.SIGTERM), ("train", signal.SIGHUP)],
)
def test_a_polite_end(tmp_path: Path, phase: str, number: signal.Signals) -> None:
    """A batch system's SIGTERM, a dropped ssh: 75, to be tried again."""
    with run_for(phase, tmp_path) as run:
        run.reach(phase)
        run.signal(number)
        assert run.finish(FINAL_S) == 75
        if phase == "train":
            assert run.step_to_resume() > 0
            assert run.out.startswith("stopped: ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("phase", ["spawn", "join", "train", "finish"])
def test_a_signal_to_every_process(tmp_path: Path, phase: str, number: signal.Signals) -> None:
    """As systemd sends it to a control group: nodes and agent first, the controller last."""
    with run_for(phase, tmp_path) as run:
        run.reach(phase)
        found = run.processes()
        for pid in sorted(found.values(), key=lambda pid: pid == run.pid):
            os.kill(pid, number)
        time.sleep(0.05)
        assert run.finish(FINAL_S) == 75
        assert not run.metrics("death")
        assert "error" not in run.err
        if phase in ("train", "finish"):
            assert run.step_to_resume() > 0
            assert run.status()["state"] == "stopped"


@pytest.mark.parametrize(
    ("node", "number"),
    [("shard-1", signal.SIGSTOP), ("agent", signal.SIGSTOP), ("shard-1", signal.SIGKILL)],
)
def test_who_cannot_save_was_still_interrupted(
    tmp_path: Path, node: str, number: signal.Signals
) -> None:
    """The signal decides the exit status; why there is no final checkpoint is said."""
    experiment = digits(stop=ENDLESS, checkpoint={"every": "0.2 s"})
    with TrainRun(tmp_path, experiment, lease_s=LEASE_S) as run:
        run.reach("train")
        wait_for(run.checkpoints, "a checkpoint")
        pid = run.processes()[node]
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: state(pid) == "T", "a stopped process")
        run.signal(signal.SIGINT)
        wait_for(lambda: "stopping: " in run.err, "the answer to it")
        os.kill(pid, number)
        assert run.finish(3 * LEASE_S + 5.0) == 130
        assert run.out.startswith("interrupted: ")
        assert "the final checkpoint was not taken: " in run.out
        assert f"no final checkpoint: {node}" in run.err
        assert "error" not in run.err
        assert run.step_to_resume() > 0
        assert run.status()["state"] == "interrupted"


@pytest.mark.parametrize("library", ["yaml", "numpy", "zmq"])
def test_ctrl_c_while_libraries_load(tmp_path: Path, library: str) -> None:
    """Before there is anything to stop: 130, no traceback on the screen, nothing left."""
    with TrainRun(tmp_path, digits(stop=ENDLESS)) as run:
        maps = Path(f"/proc/{run.pid}/maps")
        wait_for(lambda: f"/{library}/" in maps.read_text(), f"{library} in memory")
        run.signal(signal.SIGINT, to_all=True)
        assert run.finish(FINAL_S) == 130
        assert "Traceback" not in run.err


@pytest.mark.quiet
def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    """The first waits for a gradient that takes 20 s; the second does not."""
    experiment = digits(stop=ENDLESS)
    experiment["optimizer"].pop("warmstart")
    factories = {"worker": "slow_gradient"}
    with TrainRun(tmp_path, experiment, factories=factories) as run:
        # What was fetched is being computed on: before that a halt needs nobody to wait.
        wait_for(lambda: any(r["bytes_out"] for r in run.metrics("shard")), "a first fetch")
        run.signal(signal.SIGINT)
        time.sleep(1.0)
        assert run.process.poll() is None, "the first waits for the step in hand"
        assert "worker-0.0" in run.processes()
        run.signal(signal.SIGINT)
        assert run.finish(SECOND_S) == 130
        assert "nothing was saved" in run.out


def test_nohup_is_respected(tmp_path: Path) -> None:
    with TrainRun(tmp_path, digits(stop=ENDLESS), ignored=signal.SIGHUP) as run:
        run.reach("train")
        run.signal(signal.SIGHUP)
        step = run.step("worker-0.0")
        wait_for(lambda: run.step("worker-0.0") > step + 20, "training to go on")
        run.signal(signal.SIGTERM)
        assert run.finish(FINAL_S) == 75


@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_controller_takes_everything_with_it(tmp_path: Path, phase: str) -> None:
    """mxnet#2671. And what it had saved is whole."""
    with run_for(phase, tmp_path) as run:
        run.reach(phase)
        before = run.processes()
        assert {"controller", "agent"} <= set(before)
        run.process.kill()
        run.rest(ORPHANED_S)
        assert run.process.returncode == -signal.SIGKILL
        assert all(state(pid) in ("", "Z") for pid in before.values())
        if phase == "checkpoint":
            assert run.checkpoints()


@pytest.mark.parametrize(("phase", "status"), [("join", 3), ("train", 1)])
def test_a_killed_agent(tmp_path: Path, phase: str, status: int) -> None:
    """Nobody starts or ends nodes any more: the run ends, and says what happened to whom."""
    with run_for(phase, tmp_path) as run:
        run.reach(phase)
        if phase == "train":
            wait_for(run.checkpoints, "a checkpoint")
        kill(run.processes()["agent"])
        run.rest(ORPHANED_S)
        assert run.process.returncode == status
        assert "agent-0" in run.err
        assert "SIGKILL" in run.err
        assert "logs/agent-0.log" in run.err
        if phase == "train":
            assert run.step_to_resume() > 0
            assert run.metrics("finished")[-1]["status"] == "failed"
