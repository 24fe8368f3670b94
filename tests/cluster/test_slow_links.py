"""Hosts whose links carry 100 Mbit/s (netns.py): what is sent is what is needed, and no lease ends.

The network has 1.9 million parameters, 7.5 MB: a push takes 0.6 s, and so does a fetch.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.netns import WORKDIR, Hosts
from tests.cluster.runs import ENDLESS, TrainRun, digits, wait_for
from tests.cluster.test_ssh_runs import dbctl

pytestmark = [pytest.mark.quiet, pytest.mark.cluster, pytest.mark.timeout(90)]

RATE = "100mbit"
LINE_BYTES = 12.5e6  # a second
PAYLOAD_BYTES = 4 * (784 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 10 + 10)
LEASE_S = 4.0  # of ten: a beat that waited behind a checkpoint would show


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    directory = tmp_path_factory.mktemp("hosts")
    with Hosts(directory, ("a", "b", "c", "d"), hidden=tmp_path_factory.getbasetemp()) as four:
        four.limit(RATE)
        yield four


@pytest.fixture(autouse=True)
def with_wrapper(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    monkeypatch.setenv("PATH", hosts.path)
    yield
    hosts.end(request.node)


def experiment(
    hosts: Hosts, *, every: int, on: tuple[str, str] = ("a", "b"), **changes: Any
) -> dict[str, Any]:
    """784-1024-1024-10, batches of 100; the worker is on the first host, the shard on the other."""
    members = [
        {
            "name": name,
            "ssh": hosts.address[name],
            "slots": 1,
            "labels": [label],
            "python": hosts.python,
            "workdir": WORKDIR,
        }
        for name, label in zip(on, ("worker", "shard"), strict=True)
    ]
    layers = [{"type": "dense", "units": units} for units in (1024, 1024, 10)]
    return {
        "version": 1,
        "name": "slow-links",
        "seed": 3,
        "data": {
            "train": {"source": "synthetic", "rows": 4_000, "features": 784, "classes": 10},
        },
        "network": {"input": [784], "layers": layers, "loss": "softmax"},
        "replicas": 1,
        "shards": 1,
        "threads": 1,
        "optimizer": {
            "type": "downpour",
            "batch_size": 100,
            "n_fetch": every,
            "n_push": every,
            "rule": {"type": "sgd", "rate": 0.01},
        },
        "stop": {"seconds": 6},
        "evaluate": "off",
        "checkpoint": {"every": "off"},
        "cluster": {"launcher": "ssh", "hosts": members},
        **changes,
    }


def examples_per_second(run: TrainRun) -> float:
    """From the first record with a step to the last one that tells of another."""
    seen = [(r["time"], r["examples"]) for r in run.metrics("worker") if r["step"]]
    last = next(i for i, (_, examples) in enumerate(seen) if examples == seen[-1][1])
    (start_s, before), (end_s, after) = seen[0], seen[last]
    return float((after - before) / (end_s - start_s))


def test_fetching_and_pushing_each_tenth_step_is_four_times_as_fast(
    hosts: Hosts, tmp_path: Path
) -> None:
    """With n = 1 the line is full, of what is needed: pushes were sent up to four times once.

    Both at once, each over lines of its own: what they wait for is the line.
    """
    rates = {}
    with ExitStack() as both:
        runs = []
        for every, on in ((1, ("a", "b")), (10, ("c", "d"))):
            before = hosts.sent_bytes(on[1])
            given = experiment(hosts, every=every, on=on)
            run = both.enter_context(TrainRun(tmp_path, given, name=f"each-{every}"))
            runs.append((every, on[1], before, run))
        for every, shards_host, before, run in runs:
            assert run.process.wait(40.0) == 0, run.story()
            rates[every] = examples_per_second(run)
            last = run.metrics("worker")[-1]
            after = hosts.sent_bytes(shards_host)
            came, went = (b - a for a, b in zip(before, after, strict=True))
            # And one checkpoint.
            assert came < 1.15 * last["bytes_pushed"] + PAYLOAD_BYTES
            assert went < 1.15 * (last["bytes_fetched"] + PAYLOAD_BYTES) + PAYLOAD_BYTES
            waits = [int(share) for share in re.findall(r"fetch wait (\d+) %", run.err)]
            assert waits, run.err
            assert max(waits) > 50, "the bar shows what it waits for"
        for *_, run in runs:
            run.assert_nothing_left()
    print(f"examples a second: {rates[1]:.0f}, {rates[10]:.0f}; {rates[10] / rates[1]:.1f} times")
    assert rates[1] > 0.6 * 100 * LINE_BYTES / PAYLOAD_BYTES
    assert rates[10] > 4 * rates[1]


def test_no_lease_runs_out_while_checkpoints_stream(hosts: Hosts, tmp_path: Path) -> None:
    """Pushes, answers and 7.5 MB a checkpoint share the line with the beats; then it is resumed."""
    given = experiment(hosts, every=1, stop={"seconds": 8}, checkpoint={"every": "1 s", "keep": 9})
    with TrainRun(tmp_path, given, lease_s=LEASE_S) as run:
        assert run.finish() == 0, run.story()
        checkpoints = run.checkpoints()
        assert len(checkpoints) >= 2, "one was made while the line was full"
        assert len({r["step"] for r in run.metrics("worker")}) > 3, run.story()
        assert "warning" not in run.err
        assert not run.metrics("death")
    steps = checkpoints[-1]
    began = time.monotonic()
    dbctl("resume", str(run.dir), "--set", f"stop={{steps: {steps + 3}}}")
    print(f"resumed and ended after {time.monotonic() - began:.1f} s")
    assert run.checkpoints()[-1] == steps + 3
    assert hosts.left() == []


def test_hosts_that_do_not_reach_each_other_for_a_while_go_on_afterwards(
    hosts: Hosts, tmp_path: Path
) -> None:
    """The controller reaches both: no lease ends, nobody is given up, nothing is done meanwhile."""
    places = experiment(hosts, every=1)["cluster"]
    given = digits(
        replicas=1,
        shards=1,
        threads=1,
        stop=ENDLESS,
        evaluate="off",
        cluster=places,
    )
    with TrainRun(tmp_path, given) as run:
        wait_for(lambda: run.step("worker-0.0"), "a first step")
        hosts.part(("a", "b"), apart=True)
        time.sleep(1.0)  # what was on its way has come
        before = run.step("worker-0.0")
        time.sleep(2.0)
        assert run.step("worker-0.0") == before, "they are apart"
        hosts.part(("a", "b"), apart=False)
        wait_for(lambda: run.step("worker-0.0") > before + 10, "it to go on", 6.0)
        run.signal(signal.SIGTERM)
        assert run.finish() == 75, run.story()
        assert not run.metrics("death")
    assert hosts.left() == []
