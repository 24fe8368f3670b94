"""Sandblaster over the in-process network: rungs 6, 7 and 9; paper A, section 4.2."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch_cases import dense_network, network_loss, start_of
from batch_twin import Executor
from batch_twin import run as run_alone
from scipy.optimize import minimize

from dbctl.checkpoint.reader import newest_good
from dbctl.envelope import PROTOCOL_VERSION, Envelope, encode, without_payload
from dbctl.experiment.specs import DigitsSource
from dbctl.launch.inproc import Faults
from dbctl.optim.batch import LineSearchSpec
from dbctl.optim.lbfgs import lbfgs
from dbctl.region import Range
from dbctl.rights import CONTROLLER
from dbctl.roles.base import Done
from dbctl.roles.leader import Phase
from dbctl.roles.sandblaster import Sandblaster
from dbctl.run.methods import state_vectors
from dbctl.rundir import RunDir
from dbctl.wire import Message, Peer
from dbctl.wire_batch import Computed, Work
from tests.inproc_run import LIMIT_S, InprocRun, begin, go_on

ROWS = 400
TEXT = f"""\
version: 1
name: batch
seed: 5
data:
  train: {{source: digits, split: train, scale: 0.0625, rows: {ROWS}}}
network:
  input: [64]
  layers:
    - {{type: dense, units: 12, activation: sigmoid}}
    - {{type: dense, units: 10}}
  loss: softmax
replicas: 2
shards: 2
optimizer: {{type: sandblaster, portion: 30, send_every: 2, l2: 0.001}}
stop: {{steps: 20}}
checkpoint: {{every: off}}
"""
METHODS = ("lbfgs", "gradient_descent", "conjugate_gradient")
Straight = Callable[[str], tuple[list[float], dict[str, bytes]]]


def iterations(run: InprocRun) -> list[dict[str, Any]]:
    return [record.fields for record in run.records if record.event == "iteration"]


def losses(run: InprocRun) -> list[float]:
    return [fields["loss"] for fields in iterations(run)]


def leader(run: InprocRun) -> Sandblaster:
    assert isinstance(run.coordinator, Sandblaster)
    return run.coordinator


def finished(directory: Path, *overrides: str, **more: Any) -> InprocRun:
    _, run = begin(TEXT, directory, overrides=overrides, **more)
    assert run.run() == Done("max_iterations", "steps")
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(finished(tmp_path_factory.mktemp("run") / "run"))


# ------------------------------------------------------------------------- rung 6: the gradient


def test_rung_6_bundles_make_the_full_batch_gradient(tmp_path: Path) -> None:
    """Three replicas, short last portion and bundle, on a network that loses and repeats."""
    faults = Faults(drop=0.05, duplicate=0.1, delay_s=0.01, in_pieces=0.3)
    text = TEXT.replace("steps: 20", "steps: 1")
    run_dir, run = begin(text, tmp_path / "run", overrides=["replicas=3"], faults=faults, seed=1)
    assert run.run().status == "max_iterations"
    checkpoint, _ = newest_good(run_dir.checkpoints)
    whole = Range(0, checkpoint.n_elements)
    parameters, gradient = (checkpoint.read(name, whole) for name in ("parameters", "gradient"))
    source = DigitsSource(split="train", scale=0.0625, rows=ROWS)
    function = network_loss(dense_network(64, 12, 10), source, l2=0.001)
    loss, expected = function(parameters)
    assert losses(run)[-1] == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(gradient, expected, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_losses_do_not_show_how_many_computed(
    shards: int, replicas: int, tmp_path: Path, undisturbed: list[float]
) -> None:
    """With portion and send_every fixed: 20 iterations to 1e-6."""
    run = finished(tmp_path / "run", f"shards={shards}", f"replicas={replicas}")
    assert len(losses(run)) == 21
    np.testing.assert_allclose(losses(run), undisturbed, rtol=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_rung_6_losses_on_a_bad_network_are_the_undisturbed_ones(
    seed: int, tmp_path: Path, undisturbed: list[float]
) -> None:
    faults = Faults(drop=0.1, duplicate=0.2, delay_s=0.05, in_pieces=0.3, step_s=0.05)
    run = finished(tmp_path / "run", "replicas=3", faults=faults, seed=seed)
    np.testing.assert_allclose(losses(run), undisturbed, rtol=1e-6)
    assert all(run.net.happened[kind] > 50 for kind in ("message lost", "message repeated"))


@pytest.mark.parametrize("moment", [0.21, 0.34, 0.47])
def test_a4_2_bundles_of_a_dead_replica_go_to_the_others(
    moment: float, tmp_path: Path, undisturbed: list[float]
) -> None:
    """Paper A, section 4.2 (G7): each bundle counts once, whoever dies."""
    faults = Faults(drop=0.02, duplicate=0.05, step_s=0.02)
    _, run = begin(TEXT, tmp_path / "run", overrides=["replicas=3"], faults=faults, seed=2)
    run.net.at(moment, lambda: run.net.kill("worker-1.0"))
    assert run.run().status == "max_iterations"
    assert run.net.happened["kill"] == 1
    np.testing.assert_allclose(losses(run), undisturbed, rtol=1e-6)
    lost = [record.fields for record in run.records if record.event == "lost"]
    assert lost == [{"node": "worker-1.0", "rows": 0}]  # none is left out


def test_a4_2_a_slow_replica_is_overtaken_by_copies(
    tmp_path: Path, undisturbed: list[float]
) -> None:
    """The first answer counts, a late one never, in the next iteration either."""

    def run_with(backup: bool) -> InprocRun:
        name = tmp_path / f"run-{backup}"
        overrides = ["replicas=3", f"optimizer.backup={str(backup).lower()}", "stop.steps=8"]
        _, run = begin(TEXT, name, overrides=overrides)
        for second in range(200):
            run.net.at(0.3 * second, lambda: run.net.pause("worker-2.0", 0.29))
        assert run.run().status == "max_iterations"
        return run

    with_copies, without = run_with(True), run_with(False)
    for run in (with_copies, without):
        np.testing.assert_allclose(losses(run), undisturbed[:9], rtol=1e-6)
    assert iterations(with_copies)[-1]["backups"] > 0
    assert iterations(without)[-1]["backups"] == 0
    assert with_copies.net.now < 0.5 * without.net.now


def test_a_cut_replica_computes_the_same_losses(tmp_path: Path, undisturbed: list[float]) -> None:
    """Two partitions agree on which orders they drop, with copies and lost messages."""
    faults = Faults(drop=0.05, duplicate=0.1, step_s=0.02)
    run = finished(tmp_path / "run", "partition.count=2", "stop.steps=10", faults=faults)
    np.testing.assert_allclose(losses(run), undisturbed[:11], rtol=1e-4)


# --------------------------------------------------------------------------- rung 7: the method


def test_rung_7_over_shards_as_on_one_machine(undisturbed: list[float]) -> None:
    spec = dense_network(64, 12, 10)
    source = DigitsSource(split="train", scale=0.0625, rows=ROWS)
    executor = Executor(network_loss(spec, source, l2=0.001), start_of(spec, 5))
    trace = run_alone(lbfgs(LineSearchSpec()), executor, iterations=20)
    alone = [iterated.loss for iterated in trace.iterated]
    np.testing.assert_allclose(alone, undisturbed, rtol=1e-4)
    np.testing.assert_allclose(alone[:8], undisturbed[:8], rtol=1e-6)


def test_rung_7_the_optimum_of_a_convex_problem_is_scipys(tmp_path: Path) -> None:
    """Softmax regression with L2 on digits, float32 over shards against SciPy in float64."""
    text = TEXT.replace("    - {type: dense, units: 12, activation: sigmoid}\n", "")
    overrides = ["optimizer.l2=0.01", "optimizer.tolerance=1e-6", "stop.steps=200"]
    run_dir, run = begin(text, tmp_path / "run", overrides=overrides)
    assert run.run().status == "converged"
    source = DigitsSource(split="train", scale=0.0625, rows=ROWS)
    function = network_loss(dense_network(64, 10), source, l2=0.01, dtype="float64")
    found = minimize(
        function, np.zeros(650), jac=True, method="L-BFGS-B", options={"gtol": 1e-9, "ftol": 0}
    )
    checkpoint, _ = newest_good(run_dir.checkpoints)
    parameters = checkpoint.read("parameters", Range(0, 650)).astype(np.float64)
    assert losses(run)[-1] == pytest.approx(found.fun, rel=1e-6)
    assert function(parameters)[0] == pytest.approx(found.fun, rel=1e-6)
    np.testing.assert_allclose(run.coordinator.figures.steps, len(losses(run)) - 1)


@pytest.mark.parametrize("method", METHODS)
def test_every_accepted_step_satisfies_the_strong_wolfe_conditions(
    method: str, tmp_path: Path
) -> None:
    """From the log alone."""
    run = finished(tmp_path / "run", f"optimizer.method={method}")
    c1, c2 = 1e-4, 0.1 if method == "conjugate_gradient" else 0.9
    steps = iterations(run)[1:]
    assert len(steps) == 20
    for step in steps:
        assert step["slope_before"] < 0
        assert not step["approximate"]
        fall = c1 * step["step_length"] * step["slope_before"]
        assert step["loss"] <= step["loss_before"] + fall
        assert abs(step["slope"]) <= c2 * abs(step["slope_before"])
    assert losses(run)[-1] < 0.75 * losses(run)[0]


# ------------------------------------------------------------------- what the coordinator sends


@pytest.mark.parametrize("history", [1, 10, 100])
def test_a4_2_round_trips_do_not_grow_with_the_history(history: int, tmp_path: Path) -> None:
    """At most 4 commands an iteration, evaluations apart."""
    run = finished(tmp_path / "run", f"optimizer.history={history}")
    counts = [fields["commands"] for fields in iterations(run)]
    of_iteration = np.diff(counts)
    assert len(of_iteration) == 20
    assert of_iteration.max() <= 4
    assert np.median(of_iteration) == 2


def test_a4_2_no_message_of_the_coordinator_grows_with_the_model(tmp_path: Path) -> None:
    """Paper A, section 4.2: only names and scalars travel."""

    def bytes_of(units: int) -> tuple[int, int]:
        text = TEXT.replace("units: 12", f"units: {units}").replace("steps: 20", "steps: 5")
        sent: list[int] = []
        _, run = begin(text, tmp_path / f"run-{units}")

        def watch(now: float, sender: Peer, to: str, message: Message) -> None:
            if CONTROLLER in (sender.node, to) and type(message).__name__ not in RUNS_OWN:
                bare = without_payload(message)
                sent.append(len(encode(Envelope(PROTOCOL_VERSION, "run", *sender, to, bare))))

        run.net._watch = watch
        assert run.run().status == "max_iterations"
        return max(sent), len(sent)

    small, large = bytes_of(4), bytes_of(400)
    assert abs(small[0] - large[0]) <= 16
    assert large[1] < 3 * small[1]


# By the second, and the final cut: not of the method.
RUNS_OWN = ("Report", "ShardReport", "CutPart", "Cut", "Return")


# -------------------------------------------------------------------------------- rung 9: resume


def end_of(run_dir: RunDir, run: InprocRun) -> dict[str, bytes]:
    """The vectors that the run's last checkpoint holds."""
    checkpoint, _ = newest_good(run_dir.checkpoints)
    whole = Range(0, checkpoint.n_elements)
    names = state_vectors(run.life.experiment)
    return {name: checkpoint.read(name, whole).tobytes() for name in names}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """The losses and the end of a run that was never stopped: one run a method."""

    @cache
    def run_of(method: str) -> tuple[list[float], dict[str, bytes]]:
        overrides = [f"optimizer.method={method}", "replicas=1"]
        run_dir, run = begin(TEXT, tmp_path_factory.mktemp("run") / "run", overrides=overrides)
        run.run()
        return losses(run), end_of(run_dir, run)

    return run_of


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at", [0, 1, 7, 13])
def test_rung_9_stopped_and_resumed_is_never_stopped(
    method: str, at: int, tmp_path: Path, straight: Straight
) -> None:
    """Bit for bit, with as many shards; the loss too."""
    run_dir, first = begin(
        TEXT, tmp_path / "run", overrides=[f"optimizer.method={method}", "replicas=1"]
    )
    assert first.run(interrupt_at=at) == Done("interrupted", "")
    done = len(losses(first)) - 1
    assert at - (at == 0) <= done < 20  # 0: before anything was evaluated
    second = go_on(run_dir)
    assert second.run() == Done("max_iterations", "steps")
    expected, end = straight(method)
    assert [*losses(first), *losses(second)][-20:] == expected[-20:]
    found = end_of(run_dir, second)
    assert found.keys() == end.keys()
    for name, vector in found.items():
        assert vector == end[name], name


@pytest.mark.parametrize("moment", [0.02, 0.9, 1.7, 2.5, 3.3, 4.1, 4.9, 5.7, 6.5])
def test_rung_9_whenever_the_signal_comes(
    moment: float, tmp_path: Path, undisturbed: list[float]
) -> None:
    """In an evaluation, a command or a cut; on with other counts of shards and replicas."""
    faults = Faults(drop=0.02, step_s=0.01, delay_s=0.004)
    run_dir, first = begin(
        TEXT, tmp_path / "run", overrides=["checkpoint.every=3 steps"], faults=faults
    )
    net, lead = first.net, first.coordinator
    net.at(moment, lambda: net.perform(CONTROLLER, lead.interrupt(net.now, "interrupted")))
    assert first.run().status == "interrupted"
    second = go_on(run_dir, ["shards=3", "replicas=3"], faults=faults)
    assert second.run() == Done("max_iterations", "steps")
    assert 0 < len(losses(first)) < 20 or moment == 0.02
    both = {f["iteration"]: f["loss"] for run in (first, second) for f in iterations(run)}
    np.testing.assert_allclose([both[n] for n in sorted(both)], undisturbed, rtol=1e-6)
    assert sorted(both) == list(range(21))


def test_checkpoints_on_the_way_are_of_one_iteration(
    tmp_path: Path, undisturbed: list[float]
) -> None:
    """Cuts at the end of an iteration, while replicas are slow and the next one goes on."""
    run_dir, run = begin(
        TEXT, tmp_path / "run", overrides=["checkpoint.every=3 steps"], faults=Faults(step_s=0.05)
    )
    assert run.run().status == "max_iterations"
    assert run.saved == [3, 6, 9, 12, 15, 18, 20]
    source = DigitsSource(split="train", scale=0.0625, rows=ROWS)
    function = network_loss(dense_network(64, 12, 10), source, l2=0.001)
    for step in (3, 12, 18):
        from dbctl.checkpoint.reader import open_checkpoint

        checkpoint = open_checkpoint(run_dir.checkpoints / f"step-{step:09d}", verify=True)
        parameters = checkpoint.read("parameters", Range(0, checkpoint.n_elements))
        assert function(parameters)[0] == pytest.approx(undisturbed[step], rel=1e-6)
        assert checkpoint.manifest.step == step


# -------------------------------------------------------------------------------- honest ends


def test_a_run_converges_and_says_so(tmp_path: Path) -> None:
    _, run = begin(TEXT, tmp_path / "run", overrides=["optimizer.tolerance=0.2"])
    done = run.run()
    assert done.status == "converged"
    assert iterations(run)[-1]["gradient_norm"] <= 0.2
    assert leader(run).figures.steps < 20
    assert run.end(done).notes == (f"converged: {done.reason}",)
    assert "gradient norm" in done.reason


def test_passes_end_a_run_too(tmp_path: Path) -> None:
    _, run = begin(TEXT.replace("steps: 20", "epochs: 6"), tmp_path / "run")
    assert run.run() == Done("max_iterations", "epochs")
    assert "stop.epochs (6) was reached" in run.end(Done("max_iterations", "epochs")).notes
    assert 6 <= leader(run).figures.epochs < 9


def test_a_line_search_that_fails_keeps_the_best_point(tmp_path: Path) -> None:
    """Without L2 a huge start saturates softmax: one trial is not enough to get out of it."""
    overrides = ["optimizer.line_search={max_trials: 1}", "optimizer.method=gradient_descent"]
    text = TEXT.replace("units: 12, activation: sigmoid", "units: 12, init: 30.0")
    run_dir, run = begin(text, tmp_path / "run", overrides=overrides)
    done = run.run()
    assert done.status == "line_search_failed"
    assert done.reason
    best = min(losses(run))
    checkpoint, _ = newest_good(run_dir.checkpoints)
    assert checkpoint.manifest.extra["finished"] is False
    assert losses(run)[-1] == best
    again = go_on(run_dir)
    assert again.run() == done, "a resume would end alike"
    for life in (run, again):
        *_, note = life.end(done).notes
        assert note.startswith("a resume would end alike: a new run with another method")
        assert note.endswith(f" initialize_from: {run_dir.path}")


def test_a_loss_that_is_not_finite_at_the_start_ends_the_run(tmp_path: Path) -> None:
    text = TEXT.replace("units: 12, activation: sigmoid", "units: 12, init: 3e38")
    _, run = begin(text, tmp_path / "run")
    done = run.run()
    assert done.status == "line_search_failed"
    assert "finite" in done.reason
    assert "worker-" in done.reason
    assert "portion " in done.reason
    assert losses(run) == []


def test_without_replicas_a_run_fails_and_is_saved(tmp_path: Path) -> None:
    run_dir, run = begin(TEXT, tmp_path / "run", faults=Faults(step_s=0.02))
    run.net.at(0.3, lambda: [run.net.kill(f"worker-{n}.0") for n in (0, 1)])
    done = run.run()
    assert done.status == "failed"
    assert "min_replicas" in done.reason
    resumed = go_on(run_dir)
    assert resumed.run().status == "max_iterations"


def test_a_sample_of_rows_each_iteration(tmp_path: Path) -> None:
    """`batch`: alike for any count of replicas, another one each iteration, and resumable."""
    overrides = ["optimizer.batch=150", "stop.steps=8"]
    one = finished(tmp_path / "one", *overrides, "replicas=1", "shards=1")
    three = finished(tmp_path / "three", *overrides, "replicas=3")
    np.testing.assert_allclose(losses(one), losses(three), rtol=1e-6)
    before = [fields["loss_before"] for fields in iterations(one)[2:]]
    assert not np.isclose(before, losses(one)[1:-1], rtol=1e-4).any()
    run_dir, first = begin(TEXT, tmp_path / "cut", overrides=[*overrides, "replicas=1"])
    first.run(interrupt_at=4)
    second = go_on(run_dir)
    second.run()
    both = {f["iteration"]: f["loss"] for run in (first, second) for f in iterations(run)}
    np.testing.assert_allclose([both[n] for n in range(9)], losses(one), rtol=1e-6)


def test_a_late_answer_of_an_earlier_evaluation_changes_nothing(tmp_path: Path) -> None:
    _, run = begin(TEXT, tmp_path / "run", overrides=["stop.steps=6"])
    lead = leader(run)
    assert run.net.run(until=lambda: lead.figures.steps >= 3, limit_s=LIMIT_S)
    for evaluation in (1, 2, 3):
        late = Computed(1, evaluation, 0, (1e9, 1e9))
        run.net.perform(CONTROLLER, lead.receive(run.net.now, Peer("worker-0.0", 1), late))
    assert run.run().status == "max_iterations"
    assert max(losses(run)) < 10


def test_one_lost_answer_stops_nobody(tmp_path: Path, undisturbed: list[float]) -> None:
    """Bundles are done faster than an answer is said again."""
    overrides = [
        "replicas=1",
        "optimizer={type: sandblaster, portion: 10, send_every: 1, l2: 0.001}",
    ]
    _, run = begin(TEXT, tmp_path / "run", overrides=[*overrides, "stop.steps=2"])
    lead, lost = leader(run), []
    heard = lead.receive

    def deaf(now: float, sender: Peer, message: Message) -> Any:
        if isinstance(message, Computed) and not lost:
            lost.append(message)
            return []
        return heard(now, sender, message)

    lead.receive = deaf  # type: ignore[method-assign]
    assert run.run().status == "max_iterations"
    assert len(lost) == 1
    assert run.net.now < 60


def test_checkpoints_by_the_clock_wait_for_the_end_of_an_iteration(tmp_path: Path) -> None:
    _, run = begin(
        TEXT, tmp_path / "run", overrides=["checkpoint.every=0.2 s"], faults=Faults(step_s=0.02)
    )
    assert run.run().status == "max_iterations"
    assert len(run.saved) > 5
    assert run.saved[-1] == 20


def test_workers_are_told_to_rest_until_they_say_that_they_do(tmp_path: Path) -> None:
    """A halt that is lost is said again while the end is measured, and no longer than needed."""
    _, run = begin(TEXT, tmp_path / "run", overrides=["replicas=2", "stop.steps=2"])
    lead, told = leader(run), []

    def watch(now: float, sender: Peer, to: str, message: Message) -> None:
        if isinstance(message, Work) and message.halt:
            told.append(to)

    run.net._watch = watch
    assert run.run().status == "max_iterations"
    assert set(told) == {"worker-0.0", "worker-1.0"}
    lead._phase = Phase.MEASURING  # as if the disk were slow
    again = [effect.to for effect in lead._say_again(0.0)]
    rested = {f["node"] for r in run.records if (f := r.fields).get("state") == "halted"}
    assert set(again) == {"worker-0.0", "worker-1.0"} - rested


def test_a_signal_is_not_undone_by_a_measurement(tmp_path: Path) -> None:
    """test_accuracy is reached while the last command is carried out."""
    text = TEXT.replace(
        "network:", "  test: {source: digits, split: test, scale: 0.0625}\nnetwork:", 1
    )
    overrides = ["stop={test_accuracy: 0.01, steps: 20}", "evaluate.every=1 steps"]
    _, run = begin(text, tmp_path / "run", overrides=overrides)
    lead = leader(run)
    assert run.net.run(until=lambda: lead._evaluations.busy, limit_s=LIMIT_S)
    run.net.perform(CONTROLLER, lead.interrupt(run.net.now, "interrupted"))
    assert run.run().status == "interrupted"


def test_the_final_evaluation_is_of_the_final_parameters(tmp_path: Path) -> None:
    """One that was under way at the end may be of an earlier point."""
    text = TEXT.replace(
        "network:", "  test: {source: digits, split: test, scale: 0.0625}\nnetwork:", 1
    )
    for seed in range(4):
        run_dir, run = begin(
            text,
            tmp_path / f"run-{seed}",
            overrides=["evaluate.every=0.01 s", "stop.steps=6"],
            faults=Faults(step_s=0.02),
            seed=seed,
        )
        assert run.run().status == "max_iterations"
        checkpoint, _ = newest_good(run_dir.checkpoints)
        parameters = checkpoint.read("parameters", Range(0, checkpoint.n_elements))
        source = DigitsSource(split="test", scale=0.0625)
        loss, _ = network_loss(dense_network(64, 12, 10), source)(parameters)
        assert run.coordinator.figures.test_loss == pytest.approx(loss, rel=1e-5)


def test_a_stop_that_is_reached_already_is_not_passed(tmp_path: Path) -> None:
    run_dir, first = begin(TEXT, tmp_path / "run")
    assert first.run(interrupt_at=6).status == "interrupted"
    done = leader(first).figures.steps
    second = go_on(run_dir, [f"stop.steps={done}"])
    assert second.run() == Done("max_iterations", "steps")
    assert leader(second).figures.steps == done
    assert losses(second) == []
