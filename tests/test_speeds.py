"""Measured speeds: sane, quick, and nothing left behind; a dry run that prints them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from dbctl.cli.main import main
from dbctl.data.sources import open_source
from dbctl.errors import ExperimentError, LaunchError, PlanError
from dbctl.experiment.read import parse
from dbctl.experiment.resolve import to_json
from dbctl.launch.base import python_environment
from dbctl.model.network import LAYER_SPECS
from dbctl.optim.rules import RULE_SPECS
from dbctl.region import Box
from dbctl.run import company, link_speeds, partner, samples
from dbctl.run import speeds as module
from dbctl.run.dry import dry_run
from dbctl.run.link_speeds import Serving, measure_links
from dbctl.run.speeds import measure

EXPERIMENT = """
version: 1
name: small
data:
  train: {source: synthetic, rows: 64, features: 192, classes: 5, seed: 1}
network:
  input: [8, 8, 3]
  layers:
    - {type: local2d, maps: 4, kernel: 3}
    - {type: pool, kind: l2, size: 2}
    - {type: lcn, window: 3}
    - {type: dense, units: 64, activation: sigmoid}
    - {type: dense, units: 64, activation: sigmoid}
    - {type: dense, units: 5}
  loss: softmax
optimizer: {type: sgd, batch_size: 16, rule: {type: sgd, rate: 0.01}}
stop: {steps: 1}
threads: 1
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(EXPERIMENT)
    return str(path)


@pytest.mark.alone
def test_speeds_are_positive_and_taken_within_two_seconds() -> None:
    experiment = parse(EXPERIMENT, file="small.yaml")
    began = time.thread_time()
    found = measure(experiment, open_source(experiment.data.train), threads=1)
    assert time.thread_time() - began < 2.0
    assert len(found.layers) == 6
    assert 1.0 <= found.company < 20.0
    assert all(0 <= s.overhead_s < 0.1 for s in found.layers)
    # From the slowest Python loop to the fastest machine.
    assert all(1e5 < s.flops_per_s < 1e14 for s in found.layers)
    assert all(0 < seconds < 0.1 for seconds in (found.loss_s, found.batch_s, found.check_s))
    assert 0 < found.copy_s < 0.1
    assert 0 <= found.shard_s < 0.1  # 5,000 parameters may be lost in what waking up takes
    assert 1e-6 < found.latency_s < 0.1
    assert 1e-5 < found.server_latency_s < 0.1
    assert 0 <= found.message_s < 0.1
    assert 1e7 < found.link_bytes_per_s < 1e13


def test_nothing_is_measured_with_more_threads_than_a_partition_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else what is done alone has all cores, and in company half of them: twice as long."""
    counts: list[int] = []

    def noting(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            counts.extend(library["num_threads"] for library in threadpool_info())
            return real(*arguments, **more)

        return call

    experiment = parse(EXPERIMENT, file="small.yaml")
    for name in ("measure_company", "measure_links", "_layer_speed", "_batch_s"):
        monkeypatch.setattr(module, name, noting(getattr(module, name)))
    with threadpool_limits(limits=2):
        measure(experiment, open_source(experiment.data.train), threads=1)
        assert set(counts) == {1}
        assert {library["num_threads"] for library in threadpool_info()} == {2}


@pytest.mark.alone
@pytest.mark.parametrize("rule", ["sgd", "momentum", "adagrad", "adam"])
def test_a_parameter_costs_a_worker_and_a_shard_time(rule: str) -> None:
    """Between 1 and 1,000 GB/s of what each reads and writes."""
    found = measure_links(Serving(rule=rule, size=1 << 20, touched=1 << 16))
    assert 1e-12 < found.check_s < 1e-8
    assert 1e-11 < found.copy_s < 1e-8
    assert 1e-11 < found.shard_s < 5e-8
    assert 1e-6 < found.server_latency_s < 0.1


def test_between_two_runs_as_much_else_is_used_as_in_a_mini_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a layer left in the caches a mini-batch ago is not there in a run either."""
    experiment = parse(EXPERIMENT, file="small.yaml")
    nodes = 192 + 6 * 6 * 4 + 2 * (3 * 3 * 4) + 64 + 64 + 5
    parameters = 6 * 6 * 4 * (27 + 1) + 64 * 37 + 64 * 65 + 5 * 65
    assert module._touched(experiment) == 2 * (parameters + 16 * nodes)
    clock = module._Clock(100)
    seen: list[float] = []
    clock.seconds(lambda: seen.append(float(clock._elsewhere.sum())))
    assert seen == [100.0 * (i + 1) for i in range(len(seen))]
    assert len(seen) > 2
    monkeypatch.setattr(module, "MAX_ELSEWHERE", 50)
    assert len(module._Clock(100)._elsewhere) == 50


FAMILIES = {
    "dense": "{type: dense, units: 5}",
    "conv2d": "{type: conv2d, maps: 2, kernel: 3}",
    "local2d": "{type: local2d, maps: 2, kernel: 3}",
    "pool": "{type: pool, kind: max, size: 2}",
    "lcn": "{type: lcn, window: 3}",
    "dropout": "{type: dropout, rate: 0.5}",
}


@pytest.mark.parametrize("family", LAYER_SPECS)
def test_a_layer_of_each_family_is_timed(family: str) -> None:
    """Alone, where no network has drawn a dropout's mask for it, and in a pass."""
    start, end = EXPERIMENT.index("    - {"), EXPERIMENT.index("    - {type: dense, units: 5}")
    text = EXPERIMENT[:start] + f"    - {FAMILIES[family]}\n" + EXPERIMENT[end:]
    experiment = parse(text, file="small.yaml")
    found = measure(experiment, open_source(experiment.data.train), threads=1)
    assert len(found.layers) == 2
    assert np.isfinite(found.layers[0].flops_per_s)


def test_a_large_layer_is_measured_on_a_box_of_it() -> None:
    """Of 80 M weights no more than the limit is ever in memory."""
    experiment = parse(EXPERIMENT.replace("units: 5}", "units: 300000}"), file="small.yaml")
    spec, shape = experiment.network.layers[-1], (64,)
    assert samples.largest_box(spec, shape, n_batch=16).shape == (37500,)
    assert samples.of_rows(Box((0, 0), (1, 7)), 8).shape == (1, 7)
    # Of a network with such a layer no pass is made, but that box.
    sample = samples.typical(experiment.network, n_batch=16)
    assert sample.flops == 3 * 16 * spec.flops(shape, Box.whole((37500,)))


def test_a_second_layer_like_the_first_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed: list[object] = []

    def time_box(spec: object, shape: object, box: object, **kw: object) -> tuple[int, float]:
        timed.append((spec, shape))
        return 1000, 1e-3 * len(timed)

    monkeypatch.setattr(module, "_time_box", time_box)
    text = EXPERIMENT.replace("input: [8, 8, 3]", "input: [64]").replace("192", "64")
    lines = [
        line for line in text.splitlines() if not any(w in line for w in ("2d", "pool", "lcn"))
    ]
    experiment = parse("\n".join(lines), file="small.yaml")
    found = measure(experiment, open_source(experiment.data.train), threads=1)
    # The first layer has no gradient by its inputs; two boxes each.
    assert len(timed) == 6
    assert found.layers[0] != found.layers[1]


def test_a_line_through_two_boxes_gives_overhead_and_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 ms whatever the size, then 1 GFLOP/s."""
    spec = parse(EXPERIMENT, file="small.yaml").network.layers[3]

    def time_box(spec: object, shape: object, box: Box, **kw: object) -> tuple[int, float]:
        return len(box) * 1000, 2e-3 + len(box) * 1000 / 1e9

    monkeypatch.setattr(module, "_time_box", time_box)
    found = module._layer_speed(spec, (64,), n_batch=16, first=False, clock=module._Clock(0))
    assert found.overhead_s == pytest.approx(2e-3)
    assert found.flops_per_s == pytest.approx(1e9)


def test_layers_are_scaled_by_a_pass_of_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A millisecond a layer and the loss; the whole takes half as long again as its parts."""
    network = parse(EXPERIMENT, file="small.yaml").network
    layers = [module.LayerSpeed(overhead_s=1e-3, flops_per_s=1e30)] * 6
    clock = module._Clock(0)
    passes: list[object] = []

    def seconds(run: Callable[[], object], *, budget_s: float) -> float:
        passes.append(run())
        return 1.5 * 7e-3

    monkeypatch.setattr(clock, "seconds", seconds)

    def scale(layers: list[module.LayerSpeed]) -> float:
        return module._scale(network, layers, loss_s=1e-3, n_batch=16, clock=clock)

    assert scale(layers) == pytest.approx(1.5)
    assert isinstance(passes[0], float)
    assert np.isfinite(passes[0])
    assert layers[0].times(1.5) == module.LayerSpeed(overhead_s=1.5e-3, flops_per_s=1e30 / 1.5)
    slow = [module.LayerSpeed(overhead_s=0.1, flops_per_s=1e30)] * 6
    assert scale(slow) == 1.0
    monkeypatch.setattr(samples, "MAX_WEIGHTS", 100)
    assert scale(layers) == 1.0
    assert len(passes) == 1


@pytest.mark.parametrize("seconds", [{8: 2e-3, 64: 1e-3}, {8: 1e-5, 64: 1e-3}])
def test_figures_that_make_no_line_give_the_rate_of_the_large_box(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]
) -> None:
    """Slower with less, or an overhead below zero: noise never becomes a negative time."""
    spec = parse(EXPERIMENT, file="small.yaml").network.layers[3]

    def time_box(spec: object, shape: object, box: Box, **kw: object) -> tuple[int, float]:
        return len(box) * 1000, seconds[len(box)]

    monkeypatch.setattr(module, "_time_box", time_box)
    found = module._layer_speed(spec, (64,), n_batch=16, first=False, clock=module._Clock(0))
    assert found == module.LayerSpeed(overhead_s=0.0, flops_per_s=64000 / 1e-3)


# ----------------------------------------------------------------------------------- the dry run


def test_a_dry_run_prints_plan_costs_and_times(file: str) -> None:
    told: list[str] = []
    text = list(
        dry_run(file, [], partitions="1,2", as_json=False, warn=pytest.fail, tell=told.append)
    )
    assert text[0].startswith("parameters")
    assert any(line.startswith("2 partitions: each partition") for line in text)
    assert [line.split()[0] for line in text[-4:-1]] == ["partitions", "1", "2"]
    assert text[-3].split()[-1] == "1.00"
    assert text[-1].startswith(f"this machine has {len(os.sched_getaffinity(0))} core")
    assert [line.partition(":")[0] for line in told] == ["measuring this machine"]


@pytest.mark.parametrize(("words", "n_lines"), [([], 1), (["--quiet"], 0), (["--json"], 0)])
def test_what_takes_its_time_is_told_before_it_begins(
    file: str,
    words: list[str],
    n_lines: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told: list[str] = []

    def measure(*_: object, **__: object) -> None:
        told.extend(capsys.readouterr().err.splitlines())
        raise MemoryError

    monkeypatch.setattr(module, "measure", measure)
    assert main(["train", file, "--dry-run", "--partitions", "1", *words]) == 2
    assert [line.partition(":")[0] for line in told] == ["measuring this machine"] * n_lines


def test_with_json_it_is_one_object(file: str) -> None:
    (line,) = dry_run(file, [], partitions="1,4", as_json=True, warn=pytest.fail)
    found = json.loads(line)
    assert found["event"] == "plan"
    assert [table["count"] for table in found["forecast"]["partitions"]] == [1, 4]
    assert found["forecast"]["threads"] == 1
    assert found["forecast"]["cores"] == len(os.sched_getaffinity(0))
    (plain,) = dry_run(file, [], partitions=None, as_json=True, warn=pytest.fail)
    assert "forecast" not in json.loads(plain)
    assert [node["node"] for node in json.loads(plain)["nodes"]] == ["shard-0", "worker-0.0"]


@pytest.mark.parametrize("counts", ["x", "1,100"])
def test_a_bad_count_is_an_error_before_anything_is_measured(
    file: str, counts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object, **__: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(module, "measure", measured)
    with pytest.raises((PlanError, ExperimentError)):
        list(dry_run(file, [], partitions=counts, as_json=False, warn=pytest.fail))


def test_the_other_process_that_does_not_come_up_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/true")
    with pytest.raises(
        LaunchError, match=r"measures link speeds ended with exit status 0 before it was ready"
    ):
        measure_links(Serving(rule="sgd", size=1, touched=1))
    experiment = parse(EXPERIMENT, file="small.yaml")
    with pytest.raises(
        LaunchError, match=r"measures company ended with exit status 0 before it was ready"
    ):
        company.measure_company(experiment, threads=1)


@pytest.mark.parametrize("rule", sorted(RULE_SPECS))
def test_another_process_that_ends_is_told_at_once(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And every rule that an experiment may have is served until then."""
    give = link_speeds._Asking.give

    def last(self: link_speeds._Asking, phase: str, number: int, *, size: int = 1) -> None:
        give(self, phase, number, size=size)
        if phase == link_speeds.SWAP:
            os.kill(started[0].pid, signal.SIGKILL)

    started = []
    real = link_speeds.partner

    @contextlib.contextmanager
    def partner_of(*words: Any) -> Iterator[Any]:
        with real(*words) as other:
            started.append(other)
            yield other

    monkeypatch.setattr(link_speeds, "partner", partner_of)
    monkeypatch.setattr(link_speeds._Asking, "give", last)
    began = time.monotonic()
    with pytest.raises(LaunchError, match="measures link speeds was killed by SIGKILL: try again"):
        measure_links(Serving(rule=rule, size=1, touched=1))
    assert time.monotonic() - began < 15.0


@pytest.mark.parametrize("other", ["company", "link_speeds"])
def test_a_first_process_that_was_killed_leaves_neither_words_nor_a_directory(
    other: str, tmp_path: Path
) -> None:
    """The second one is about to say that it is ready."""
    words = {"company": [], "link_speeds": [str(tmp_path / "runtime"), "sgd", "10"]}[other]
    (tmp_path / "runtime").mkdir(mode=0o700)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", f"dbctl.run.{other}", *words],
        env=os.environ | python_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin
    assert process.stdout
    process.stdout.close()
    if other == "company":
        process.stdin.write(to_json(parse(EXPERIMENT, file="small.yaml")).encode() + b"\n")
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, b"")
    assert (tmp_path / "runtime").exists() == (other == "company")


def test_a_batch_that_does_not_fit_into_memory_is_one_sentence(file: str) -> None:
    settings = ["optimizer.batch_size=1000000000000"]
    with pytest.raises(PlanError, match=r"1,000,000,000,000 rows does not fit into memory here"):
        list(dry_run(file, settings, partitions="1", as_json=False, warn=pytest.fail))


# ----------------------------------------------------------------------------------- company


def test_company_is_the_mean_of_rounds_over_the_work_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 ms alone; the other one is through after 15 ms three times of four, else after 35."""
    now, rounds = [0.0], [0]

    def take(seconds: float) -> None:
        now[0] += seconds

    def wait() -> None:
        rounds[0] += 1
        take(0.005 if rounds[0] % 4 else 0.025)

    monkeypatch.setattr(company.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(company, "ROUNDS", range(8, 9))
    sample = samples.Sample(0, lambda: take(0.01), lambda: take(1.0))
    assert company._ratio(sample, lambda: None, wait) == pytest.approx(2.0)
    # Whoever is faster in company is as fast as alone.
    turn = iter(range(100))
    sample = samples.Sample(0, lambda: take(0.01 - 0.005 * (next(turn) % 2)), lambda: None)
    assert company._ratio(sample, lambda: None, lambda: None) == 1.0


def test_company_of_a_real_process_takes_at_least_as_long() -> None:
    experiment = parse(EXPERIMENT, file="small.yaml")
    assert 1.0 <= company.measure_company(experiment, threads=1) < 20.0


def test_another_process_that_stands_still_or_ends_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment = parse(EXPERIMENT, file="small.yaml")
    monkeypatch.setattr(company, "LIMIT_S", 0.1)
    with partner.partner("dbctl.run.company", line=to_json(experiment)) as other:
        with pytest.raises(
            LaunchError, match=r"measures company did not answer in 0\.1 s: try again"
        ):
            company._done(other)
        other.kill()
        other.wait()
        with pytest.raises(LaunchError, match="measures company has ended"):
            company._done(other)
        with pytest.raises(LaunchError, match="measures company has ended"):
            company._started(other)
