"""run/methods.py and optim/methods.py: who leads a run, and what it saves, by its optimizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dbctl.bundles import Batch
from dbctl.experiment.read import parse
from dbctl.experiment.specs import Experiment, SandblasterSpec
from dbctl.optim.methods import saved_names
from dbctl.plan import PlanError, make_plan
from dbctl.roles.coordinator import Coordinator
from dbctl.roles.sandblaster import Sandblaster
from dbctl.run.dry import text
from dbctl.run.methods import METHOD, described, extra_of, leader_of, state_vectors
from dbctl.run.room import files_needed
from dbctl.run.setting import Origin, beginnings
from dbctl.wire import Position

TEXT = """\
version: 1
name: methods
data:
  train: {source: synthetic, rows: 100, features: 4, classes: 3}
network:
  input: [4]
  layers: [{type: dense, units: 3}]
  loss: softmax
replicas: 3
optimizer: {type: sandblaster, portion: 8, send_every: 3}
stop: {steps: 5}
"""
DOWNPOUR = "optimizer={type: downpour, batch_size: 8, rule: {type: adam}}"


def experiment(*overrides: str) -> Experiment:
    return parse(TEXT, overrides=list(overrides))


def leader(*overrides: str, **origin: Any) -> Any:
    chosen = experiment(*overrides)
    plan = make_plan(chosen, rows=100, test_rows=0, cores=2)
    more = {"positions": beginnings(chosen.replicas), **origin}
    return leader_of(plan, Origin(**more))


def test_each_optimizer_has_its_leader() -> None:
    assert isinstance(leader(), Sandblaster)
    assert isinstance(leader(DOWNPOUR), Coordinator)


def test_a_batch_is_all_rows_or_a_sample() -> None:
    assert leader()._start.batch == Batch(100, 8, 3)
    assert not leader()._start.sampled
    sampled = leader("optimizer.batch=40")._start
    assert sampled.batch == Batch(40, 8, 3)
    assert sampled.sampled


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "100 rows (all): 13 portions of 8 in 5 bundles of 3; backup copies"),
        (
            ("optimizer.batch=40", "optimizer.backup=false"),
            "40 rows (a sample of each iteration): 5 portions of 8 in 2 bundles of 3;"
            " no backup copies",
        ),
    ],
)
def test_a_dry_run_says_what_an_evaluation_is(overrides: tuple[str, ...], said: str) -> None:
    plan = make_plan(experiment(*overrides), rows=100, test_rows=0, cores=2)
    first, second, *_ = text(plan)
    assert first == "method      lbfgs with history 10"
    assert second == f"evaluation  {said}"


def test_a_sample_of_more_rows_than_there_are_cannot_be_planned() -> None:
    with pytest.raises(PlanError, match=r"optimizer\.batch is 101, but data.train has 100 rows"):
        leader("optimizer.batch=101")


def test_every_replica_may_compute_every_row() -> None:
    plan = make_plan(experiment(), rows=100, test_rows=0, cores=2)
    assert plan.rows == (100, 100, 100)
    assert make_plan(experiment(DOWNPOUR), rows=100, test_rows=0, cores=2).rows == (34, 33, 33)


@pytest.mark.parametrize(
    ("optimizer", "names", "word"),
    [
        ("optimizer.history=1", ["parameters", "gradient", "s0", "y0"], "lbfgs with history 1"),
        ("optimizer.method=gradient_descent", ["parameters", "gradient"], "gradient_descent"),
        (
            "optimizer.method=conjugate_gradient",
            ["parameters", "gradient", "last_direction"],
            "conjugate_gradient",
        ),
        (DOWNPOUR, ["parameters", "first_moment", "second_moment"], "adam"),
    ],
)
def test_what_a_checkpoint_holds(optimizer: str, names: list[str], word: str) -> None:
    chosen = experiment(optimizer)
    assert state_vectors(chosen) == names
    assert described(chosen) == word
    spec = chosen.optimizer
    if isinstance(spec, SandblasterSpec):
        assert list(saved_names(spec.method, history=spec.history)) == names


def test_a_resumed_method_stands_where_the_checkpoint_says() -> None:
    positions = {0: Position(7), 1: Position(), 2: Position()}
    begun = leader(positions=positions, method={"passes": 9.5}, examples=950, seconds=2.0)
    assert begun.figures.steps == 7
    assert begun.figures.epochs == 9.5
    assert extra_of(begun) == {METHOD: {"state": None, "passes": 9.5}}
    assert extra_of(leader(DOWNPOUR)) == {}


def test_the_methods_first_request_is_the_loss_at_the_start() -> None:
    for method in ("lbfgs", "gradient_descent", "conjugate_gradient"):
        begun = leader(f"optimizer.method={method}")
        (first, *_) = begun.start(0.0)
        assert (first.to, type(first.message).__name__) == ("shard-0", "Begin")
        assert first.message.point == "parameters"


def test_memory_of_a_shard_grows_with_the_history() -> None:
    def of(history: int) -> int:
        chosen = replace(experiment(f"optimizer.history={history}"), replicas=1)
        plan = make_plan(chosen, rows=100, test_rows=0, cores=2)
        return plan.of_role("shard")[0].memory_bytes

    n_parameters = 15
    assert of(11) - of(10) == 2 * 2 * 4 * n_parameters  # twice: what is written meanwhile


def test_a_portion_larger_than_the_data_takes_no_more_memory_than_the_data() -> None:
    def of(portion: int) -> int:
        plan = make_plan(experiment(f"optimizer.portion={portion}"), rows=100, test_rows=0, cores=2)
        return plan.of_role("worker")[0].memory_bytes

    assert of(10**9) == of(100) > of(99)


def test_open_files_of_a_shard_are_counted_with_its_vectors() -> None:
    def of(*overrides: str) -> int:
        plan = make_plan(experiment(*overrides), rows=100, test_rows=0, cores=2)
        name, n_files = files_needed(plan)
        assert name == "shard-0"
        return n_files

    assert of("optimizer.history=60") - of("optimizer.history=50") == 2 * 2 * 10
    cut = of("optimizer.history=60", "partition.count=3", "replicas=1")
    assert cut > 2.5 * of("optimizer.history=60", "replicas=1")
