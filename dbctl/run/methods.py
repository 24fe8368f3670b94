"""Who leads a run, by its optimizer: Downpour's coordinator, or that of a batch method.

Rules of this file: no I/O; it puts specs, plan and pure roles together. What a batch method keeps
of its own in a checkpoint's manifest (`Facts.extra`) is written and read here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dbctl.bundles import Batch
from dbctl.data.order import steps_per_epoch
from dbctl.experiment.specs import DownpourSpec, Experiment, OnlineSpec, SandblasterSpec
from dbctl.optim.commands import Method
from dbctl.optim.methods import make_method, saved_names
from dbctl.optim.updates import make_rule
from dbctl.plan import Plan
from dbctl.roles.coordinator import Coordinator, CoordinatorStart
from dbctl.roles.figures import Part
from dbctl.roles.leader import Leader
from dbctl.roles.sandblaster import Sandblaster, SandblasterStart
from dbctl.run.setting import Origin, evaluator_groups

METHOD = "method"  # the key of `extra`


def leader_of(plan: Plan, origin: Origin) -> Leader:
    """The coordinator of a run that begins, or goes on, at `origin`."""
    if isinstance(plan.experiment.optimizer, SandblasterSpec):
        return Sandblaster(sandblaster_start(plan, origin, plan.experiment.optimizer))
    return Coordinator(coordinator_start(plan, origin, plan.experiment.optimizer))


def coordinator_start(plan: Plan, origin: Origin, optimizer: OnlineSpec) -> CoordinatorStart:
    downpour = optimizer if isinstance(optimizer, DownpourSpec) else None
    return CoordinatorStart(
        **_common(plan, origin),
        parts={
            replica: Part(
                rows=rows,
                steps_per_epoch=steps_per_epoch(rows, optimizer.batch_size),
                begin=origin.positions[replica],
                batch_size=optimizer.batch_size,
            )
            for replica, rows in enumerate(plan.rows)
        },
        warmstart=downpour.warmstart.steps if downpour and downpour.warmstart else 0,
        max_lead=downpour.max_lead if downpour else None,
    )


def sandblaster_start(plan: Plan, origin: Origin, optimizer: SandblasterSpec) -> SandblasterStart:
    rows = plan.rows[0]  # of each replica: all of them
    return SandblasterStart(
        **_common(plan, origin),
        method=_method(optimizer),
        rows=rows,
        batch=batch_of(optimizer, rows),
        sampled=optimizer.batch is not None,
        backup=optimizer.backup,
        state=origin.method.get("state"),
        iteration=sum(position.step for position in origin.positions.values()),
        passes=origin.method.get("passes", 0.0),
    )


def _common(plan: Plan, origin: Origin) -> dict[str, Any]:
    experiment = plan.experiment
    return {
        "workers": {
            replica: [node.node for node in plan.replica_of(replica)]
            for replica in range(experiment.replicas)
        },
        "shards": [span.node for span in plan.shards],
        "evaluators": evaluator_groups(plan),
        "stop": experiment.stop,
        "evaluate": experiment.evaluate.every,
        "checkpoint": experiment.checkpoint.every,
        "min_replicas": experiment.min_replicas,
        "examples": origin.examples,
        "seconds": origin.seconds,
    }


def batch_of(optimizer: SandblasterSpec, rows: int) -> Batch:
    """The batch of one evaluation, of training data of so many rows."""
    return Batch(optimizer.batch or rows, optimizer.portion, optimizer.send_every)


def _method(optimizer: SandblasterSpec) -> Callable[[dict[str, Any] | None], Method]:
    return lambda state: make_method(
        optimizer.method,
        optimizer.line_search,
        history=optimizer.history,
        tolerance=optimizer.tolerance,
        state=state,
        resample=optimizer.batch is not None,
    )


def state_vectors(experiment: Experiment) -> list[str]:
    """The vectors of a checkpoint: parameters, then the state of the rule or method."""
    optimizer = experiment.optimizer
    if not isinstance(optimizer, SandblasterSpec):
        return ["parameters", *make_rule(optimizer.rule, fast=False).state_names]
    return list(saved_names(optimizer.method, history=optimizer.history))


def described(experiment: Experiment) -> str:
    """The rule or method whose state a checkpoint holds, in a word or two."""
    optimizer = experiment.optimizer
    if not isinstance(optimizer, SandblasterSpec):
        return optimizer.rule.type
    history = f" with history {optimizer.history}" if optimizer.method == "lbfgs" else ""
    return f"{optimizer.method}{history}"


def evaluation_lines(plan: Plan) -> Iterator[str]:
    """What an evaluation of a batch method is, for people; nothing where there is none."""
    optimizer = plan.experiment.optimizer
    if isinstance(optimizer, SandblasterSpec):
        batch = batch_of(optimizer, plan.rows[0])
        whose = "all" if optimizer.batch is None else "a sample of each iteration"
        backup = "backup copies" if optimizer.backup else "no backup copies"
        yield f"method      {described(plan.experiment)}"
        yield (
            f"evaluation  {batch.rows:,} rows ({whose}): {batch.n_portions:,} portions of"
            f" {batch.portion:,} in {batch.n_bundles:,} bundles of {batch.send_every:,}; {backup}"
        )


def extra_of(leader: Leader) -> dict[str, Any]:
    """What the manifest keeps of the leader beside the vectors: a batch method's scalars."""
    if not isinstance(leader, Sandblaster):
        return {}
    return {METHOD: {"state": leader.state, "passes": leader.figures.passes}}
