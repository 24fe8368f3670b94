"""Processes that stop without dying (docs/reliability.md, G6, G11, G15, G16).

Shorter than the lease: nothing happens. Longer: a node is killed and its death told as any other;
without a controller or an agent everything ends by its own clock.
"""

from __future__ import annotations

import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cluster.runs import ENDLESS, TrainRun, digits, go_on, state, stop, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(60)]

LEASE_S = 2.0
GROWTH_BYTES = 16 << 20
SAVES = {"every": "0.2 s"}


def rss(pid: int) -> int:
    """Resident bytes that are the process's own: shared memory is counted where it was made."""
    text = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(text.split("RssAnon:")[1].split()[0])


@pytest.mark.alone
def test_a_worker_and_the_evaluator_stopped_for_longer_than_the_lease(tmp_path: Path) -> None:
    """Killed and left out, each at its lease; the run goes on and ends."""
    experiment = digits(replicas=3, stop={"seconds": 6})
    with TrainRun(tmp_path, experiment, lease_s=LEASE_S) as run:
        run.reach("train")
        wait_for(lambda: run.metrics("evaluation"), "an evaluator that has begun")
        begin = time.monotonic()
        for name in ("worker-1.0", "evaluator-0"):
            stop(run.processes()[name])
        wait_for(lambda: len(run.metrics("death")) == 2, "two deaths")
        assert LEASE_S - 0.5 < time.monotonic() - begin < LEASE_S + 2.0
        step = run.step("worker-0.0")
        wait_for(lambda: run.step("worker-0.0") > step, "the others to go on")
        assert run.finish() == 0
        assert {d["node"]: d["status"] for d in run.metrics("death")} == {
            "worker-1.0": -signal.SIGKILL,
            "evaluator-0": -signal.SIGKILL,
        }
        for name in ("worker-1.0", "evaluator-0"):
            assert f"{name} was killed by SIGKILL: nothing was heard of it for 2 s" in run.err
        assert "replica 1 was lost" in run.out


def test_a_worker_stopped_for_less_than_the_lease(tmp_path: Path) -> None:
    with TrainRun(tmp_path, digits(stop={"steps": 2000})) as run:
        run.reach("train")
        worker = run.processes()["worker-1.0"]
        stop(worker)
        time.sleep(1.0)
        before = run.step("worker-1.0")
        go_on(worker)
        wait_for(lambda: run.step("worker-1.0") > before, "the worker to go on")
        assert run.finish() == 0
        assert not run.metrics("death")
        assert run.metrics("finished")[-1]["steps"] == 2000


@pytest.mark.alone
def test_a_stopped_shard_makes_nobody_grow(tmp_path: Path) -> None:
    """flux-core#252: replicas wait for a slot; then all go on as if nothing had been."""
    with TrainRun(tmp_path, digits(stop=ENDLESS)) as run:
        run.reach("train")
        before = {name: (pid, rss(pid)) for name, pid in run.processes().items()}
        shard = before["shard-0"][0]
        stop(shard)
        time.sleep(1.0)
        steps = {name: run.step(name) for name in ("worker-0.0", "worker-1.0")}
        time.sleep(2.0)
        assert state(shard) == "T"
        for name, step in steps.items():
            assert run.step(name) == step, f"{name} should wait for the shard"
        grown = {name: rss(pid) - then for name, (pid, then) in before.items()}
        assert max(grown.values()) < GROWTH_BYTES, grown
        go_on(shard)
        for name, step in steps.items():
            wait_for(lambda n=name, s=step: run.step(n) > s + 20, f"{name} to go on")
        run.signal(signal.SIGINT)
        assert run.finish(5.0) == 130
        assert not run.metrics("death")
        assert run.step_to_resume() > sum(steps.values())


def test_a_shard_stopped_for_longer_than_the_lease(tmp_path: Path) -> None:
    with TrainRun(tmp_path, digits(stop=ENDLESS, checkpoint=SAVES), lease_s=LEASE_S) as run:
        run.reach("train")
        wait_for(run.checkpoints, "a checkpoint")
        stop(run.processes()["shard-1"])
        assert run.finish(LEASE_S + 3.0) == 1
        assert "shard-1 on localhost was killed by SIGKILL: nothing was heard of it" in run.err
        assert run.step_to_resume() > 0


def test_a_stopped_agent(tmp_path: Path) -> None:
    """Its nodes end by their lease; the controller does not wait for ever."""
    with TrainRun(tmp_path, digits(stop=ENDLESS, checkpoint=SAVES), lease_s=LEASE_S) as run:
        run.reach("train")
        wait_for(run.checkpoints, "a checkpoint")
        stop(run.processes()["agent"])
        assert run.finish(3 * LEASE_S + 5.0) == 1
        assert "agent-0" in run.err
        assert run.step_to_resume() > 0


def test_a_controller_that_waits_for_its_disk_was_not_asleep(tmp_path: Path) -> None:
    """Longer than the lease: the link thread kept every lease, so nobody is dead or declared so."""
    experiment = digits(replicas=3, stop={"steps": 3000})
    with TrainRun(tmp_path, experiment, lease_s=LEASE_S, held_up_s=2.5 * LEASE_S) as run:
        assert run.finish() == 0
        times = [r["time"] for r in run.metrics("worker")]
        gaps = [late - early for early, late in pairwise(times)]
        assert max(gaps) > 2 * LEASE_S, "it was held up"
        assert not run.metrics("death")
        assert run.metrics("finished")[-1]["steps"] == 3000


@pytest.mark.alone
def test_a_controller_that_was_asleep(tmp_path: Path) -> None:
    """Ctrl-Z, a closed laptop: the nodes end by the lease; awake again it says so and ends."""
    with TrainRun(tmp_path, digits(stop=ENDLESS, checkpoint=SAVES), lease_s=LEASE_S) as run:
        run.reach("train")
        wait_for(run.checkpoints, "a checkpoint")
        begin = time.monotonic()
        stop(run.pid)
        wait_for(lambda: set(run.processes()) == {"controller"}, "the end of all", LEASE_S + 2.0)
        # Theirs began with the last word they heard: they may be gone a little earlier.
        time.sleep(max(0.0, begin + LEASE_S + 0.5 - time.monotonic()))
        go_on(run.pid)
        assert run.finish(2.5) == 1, "nobody is left to be waited for"
        assert "this process was stopped for " in run.err
        assert run.step_to_resume() > 0
