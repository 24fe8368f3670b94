"""`dbctl resume`: a run goes on from its newest good checkpoint (docs/reliability.md, G9 and G18).

Rules of this file: everything that can be wrong is found before a file is written (statistics of
the rows aside) or a process is started; a run never starts over silently. Theory of operation: the
manifest has one row a replica and one update count, and everything random is a function, so the
same count of replicas goes on where each stood. With another count the rows belong to others: all
begin after the whole epochs that were done on average, and a part of one is done again
(positions.py). Shards are cuts of one vector: any count of them reads the same checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from dbctl.checkpoint.layout import Manifest
from dbctl.checkpoint.reader import Checkpoint, newest_good
from dbctl.data.sources import Source, digest
from dbctl.errors import CheckpointError, ExperimentError, RunError, UsageError
from dbctl.experiment.changes import describe_changes
from dbctl.experiment.read import load
from dbctl.experiment.resolve import to_yaml
from dbctl.experiment.shape import fields_of, keys_below
from dbctl.experiment.specs import Experiment, StopSpec
from dbctl.experiment.words import nearest, unknown_key
from dbctl.model.network import tensors
from dbctl.plan import Plan
from dbctl.progress.display import Display
from dbctl.progress.text import Summary, counted
from dbctl.run.bootstrap import bootstrapped
from dbctl.run.clusters import Cluster, overrides_on, standing_on
from dbctl.run.doubts import fewer_shards
from dbctl.run.find import find
from dbctl.run.hosts import wire
from dbctl.run.life import EXIT_CODES, Life, gave_up
from dbctl.run.methods import METHOD, described, state_vectors
from dbctl.run.positions import beginnings
from dbctl.run.preflight import needs_of
from dbctl.run.room import check_processes, check_room
from dbctl.run.setting import (
    LEASE_S,
    STATISTICS,
    Origin,
    keep_statistics,
    network_digest,
    open_data,
    plan_of,
    statistics_stand,
)
from dbctl.run.shipments import shipments_of
from dbctl.run.signals import Interrupted, Signals
from dbctl.run.wiring import Wiring
from dbctl.rundir import RunDir
from dbctl.wire import Position

CHANGEABLE = (
    "stop",
    "replicas",
    "min_replicas",
    "shards",
    "partition",
    "evaluate",
    "checkpoint",
    "cluster",
    "data.train.ship",
    "data.test.ship",
)


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """What a run goes on with. `rows_again`: the work that another count of replicas repeats.

    `finished`: the checkpoint is the last one of a run that reached its stop, and no later one is
    given, or at or past a stop set anew. `train` and `test` are the rows, `data` is the digest of
    those of `train`. `changed`: what is set anew, in words.
    """

    plan: Plan
    origin: Origin
    checkpoint: Checkpoint
    warnings: list[str]
    rows_again: int
    finished: bool
    changed: list[str]
    train: Source
    test: Source | None
    data: str
    wiring: Wiring

    @property
    def lives(self) -> int:
        """How many made the figures of the checkpoint."""
        return int(self.checkpoint.manifest.extra.get("lives", 1))


def resume(
    path: str,
    overrides: Sequence[str] = (),
    *,
    display: Display,
    bootstrap: bool = False,
    lease_s: float = LEASE_S,
    factories: Mapping[str, str] | None = None,
    cluster: Cluster | None = None,
) -> int:
    """Another life of the run in directory `path`; its exit status. `cluster`: where it goes on.

    `bootstrap`: dbctl is brought to the hosts first.

    UsageError: no run directory, one whose run is going on, or a key that may not change.
    CheckpointError: nothing was saved, nothing good was, or it is of another network or data.
    """
    overrides = overrides_on(cluster, overrides)
    with Signals() as signals, contextlib.suppress(Interrupted), find(path) as run_dir:
        run_dir.lock()
        found = prepare(run_dir, overrides, between=signals.check)
        for warning in found.warnings:
            display.warn(warning)
        if found.finished:
            display.finished(_already_finished(run_dir, found))
            display.close()
            return 0
        if bootstrap:
            tell = partial(display.event, "bootstrap")
            plan = bootstrapped(found.plan, signals, tell=tell)
            if plan is None:
                return EXIT_CODES[signals.status]
            found = replace(found, plan=plan)
        splits, between = (found.train, found.test), signals.check
        shipments = shipments_of(found.plan, *splits, directory=run_dir.path, between=between)
        run_dir.logs.mkdir(exist_ok=True)  # somebody may have cleaned up
        _tell(display, found)
        life = Life(
            found.plan,
            run_dir,
            display,
            origin=found.origin,
            data=found.data,
            wiring=found.wiring,
            shipments=shipments,
            needs=needs_of(found.plan, found.train, found.test, encrypted=found.wiring.encrypted),
            standing=standing_on(cluster, found.plan.experiment, run_dir.path),
            lives=found.lives + 1,
            settings=to_yaml(found.plan.experiment),
        )
        life.coordinator.figures.first_loss = found.checkpoint.manifest.extra.get("first_loss")
        return life.run(signals, lease_s=lease_s, factories=factories)
    return gave_up(signals, display)


def prepare(
    run_dir: RunDir, overrides: Sequence[str] = (), *, between: Callable[[], None] = lambda: None
) -> Resumption:
    """What `resume` would go on with. Nothing is started, and nothing is written but statistics of
    the training rows that are missing or damaged.

    `between` is called before each block of data that is read, and for each replica: what it raises
    ends this.
    """
    check_overrides(overrides)
    checkpoint, warnings = newest_good(run_dir.checkpoints)
    experiment = load(str(run_dir.resolved), overrides)
    check_network(checkpoint, experiment)
    _check_rule(checkpoint, experiment)
    check_processes(experiment)
    train, test = open_data(experiment, between=between)
    data = digest(experiment.data.train)
    _check_data(checkpoint, data)
    plan = plan_of(experiment, train, test, between=between)
    wiring = wire(plan)
    warnings = [*warnings, *fewer_shards(plan), *check_room(plan, train, test)]
    manifest = checkpoint.manifest
    positions, again = beginnings(manifest, plan)
    finished = _is_finished(manifest, experiment.stop, _epoch_of_all(positions))
    if not statistics_stand(experiment, train, run_dir):
        # Of the same data: to the same bits. Those of a finished run `eval` needs.
        warnings = [*warnings, f"{run_dir.path / STATISTICS}: missing or damaged, is made again"]
        keep_statistics(experiment, train, run_dir, between=between)
    origin = Origin(
        restore=str(checkpoint.path.absolute()),
        positions=positions,
        examples=manifest.examples,
        seconds=manifest.seconds,
        method=manifest.extra.get(METHOD, {}),
    )
    return Resumption(
        plan=plan,
        origin=origin,
        checkpoint=checkpoint,
        warnings=warnings,
        rows_again=again,
        finished=finished,
        changed=_changed(run_dir, experiment),
        train=train,
        test=test,
        data=data,
        wiring=wiring,
    )


# ---------------------------------------------------------------------------------- what must fit


def check_overrides(overrides: Sequence[str]) -> None:
    """UsageError for a key that makes another run of it; what else is wrong the reader says."""
    for override in overrides:
        key, equals, _ = override.partition("=")
        parts = key.strip().split(".")
        asked = {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
        if equals and not asked & set(CHANGEABLE):
            raise UsageError(
                f"--set {override}: {_meant(parts)}resume can change only {', '.join(CHANGEABLE)}; "
                "for anything else train a new run"
            )


def _meant(parts: Sequence[str]) -> str:
    """Of a key that no experiment has, what `train` says of it; "" of one that there is."""
    top, message = fields_of(Experiment), ""
    if parts[0] not in top:
        message, _ = unknown_key(parts[0], (), top)
    elif parts[-1] not in keys_below(Experiment) and (near := nearest(".".join(parts), CHANGEABLE)):
        message = f"unknown key; did you mean `{near}`?"
    return message and message + (" " if message.endswith("?") else "; ")


def check_network(checkpoint: Checkpoint, experiment: Experiment) -> None:
    """CheckpointError unless the checkpoint is of this network: layers, shapes and functions."""
    checkpoint.check(tensors(experiment.network))
    if checkpoint.manifest.network != network_digest(experiment):
        raise CheckpointError(
            str(checkpoint.path),
            "is of another network: the shapes agree, but an activation, the loss, an init or the "
            "form of the input was changed; give the network that it was trained with",
        )


def _check_rule(checkpoint: Checkpoint, experiment: Experiment) -> None:
    wanted, saved = state_vectors(experiment), list(checkpoint.manifest.vectors)
    if saved != wanted:
        raise CheckpointError(
            str(checkpoint.path),
            f"holds the state of another rule ({', '.join(saved)}), expected that of "
            f"{described(experiment)} ({', '.join(wanted)}); give the rule it was "
            "trained with",
        )


def _check_data(checkpoint: Checkpoint, data: str) -> None:
    saved = checkpoint.manifest.extra.get("data")
    if saved not in (None, data):
        raise CheckpointError(
            str(checkpoint.path),
            "was trained on other data than data.train names now (their digests differ): put the "
            "same data back, or train a new run",
        )


# ------------------------------------------------------------------------------------ what is told


def _changed(run_dir: RunDir, experiment: Experiment) -> list[str]:
    """What of `experiment` is not as the life before had it; nothing where that is not readable."""
    with contextlib.suppress(ExperimentError):  # what was wrong in it may have been set anew
        return describe_changes(load(str(run_dir.resolved)), experiment)
    return []


# ------------------------------------------------------------------------------------ a later stop


def _is_finished(manifest: Manifest, stop: StopSpec, epoch: int = 0) -> bool:
    """Whether the run had reached its stop, or is at or past one set anew: `stop` asks no more.

    `epoch`: which all replicas would begin with.
    """
    if manifest.extra.get("stop") == asdict(stop):
        return bool(manifest.extra.get("finished"))  # if not, its end is still to be measured
    return bool(_reached(manifest, stop, epoch))


def _reached(manifest: Manifest, stop: StopSpec, epoch: int) -> list[str]:
    """The keys of `stop` that the checkpoint is at or past."""
    done = {
        "steps": manifest.step,
        "epochs": max(epoch, _whole_epochs(manifest)),
        "seconds": manifest.seconds,
        "test_accuracy": manifest.extra.get("test_accuracy") or 0.0,
    }
    limits = asdict(stop)
    return [key for key, at in done.items() if limits[key] is not None and at >= limits[key]]


def _epoch_of_all(positions: Mapping[int, Position]) -> int:
    """Of another count of replicas, how many epochs were done on average (positions.py)."""
    return min((position.epoch for position in positions.values()), default=0)


def _whole_epochs(manifest: Manifest) -> float:
    """What each replica that lived has behind it; of a batch method, without that, all passes."""
    if METHOD in manifest.extra:
        return manifest.epochs
    lost = manifest.extra.get("lost", ())
    rows = [row for row in manifest.rows if row.step and row.replica not in lost]
    return min((row.epoch for row in rows), default=0)


def _what_next(manifest: Manifest, stop: StopSpec, epoch: int) -> str:
    """Which stop keeps the run from going on, and how to set it anew."""
    if manifest.extra.get("status") == "converged":
        return "had converged already: more iterations would change nothing"
    limits = asdict(stop)
    keys = _reached(manifest, stop, epoch) or [key for key in limits if limits[key] is not None]
    met = " and ".join(f"stop.{key} ({limits[key]:g})" for key in keys)
    if keys == ["epochs"] and _whole_epochs(manifest) < limits["epochs"]:
        met += " on average of the replicas"
    sets = " ".join(f"--set stop.{key}=N" for key in keys)
    found = f"had finished already by {met}"
    if not manifest.extra.get("finished"):
        found = f"{met} was reached already"
    return f"{found}: it goes on with a later one, {sets}"


def _already_finished(run_dir: RunDir, found: Resumption) -> Summary:
    """The last line again; what only the last life knew comes from its status, if it is of it."""
    manifest = found.checkpoint.manifest
    epoch = _epoch_of_all(found.origin.positions)
    notes = [_what_next(manifest, found.plan.experiment.stop, epoch)]
    if found.changed:
        notes.append(f"of no effect, as nothing is trained: {', '.join(found.changed)}")
    known: dict[str, float] = {}
    with contextlib.suppress(RunError):  # it is never flushed: a loss of power may cut it
        status = run_dir.read_status()
        if status.get("steps") == manifest.step:
            known = {key: value for key, value in status.items() if isinstance(value, float)}
    return Summary(
        run_dir=str(run_dir.path),
        status=manifest.extra.get("status", "done") if manifest.extra.get("finished") else "done",
        steps=manifest.step,
        epochs=manifest.epochs,
        examples=manifest.examples,
        seconds=manifest.seconds,
        examples_per_second=known.get("examples_per_second"),
        lives=found.lives,
        train_loss=known.get("train_loss"),
        test_loss=known.get("test_loss"),
        test_accuracy=known.get("test_accuracy"),
        notes=tuple(notes),
    )


def _tell(display: Display, found: Resumption) -> None:
    manifest, path = found.checkpoint.manifest, found.checkpoint.path
    dropped = manifest.extra.get("dropped_pushes", 0)
    replicas, again = found.plan.experiment.replicas, found.rows_again
    parts = [f"going on from step {manifest.step:,} ({path.name})"]
    parts += [c for c in found.changed if not (again and c.startswith("replicas "))]
    if dropped:
        parts.append(f"pushes dropped, as not every shard had applied them: {dropped:,}")
    if again:
        epochs = counted(found.origin.positions[0].epoch, "epoch")
        parts.append(
            f"replicas {len(manifest.rows)} -> {replicas}: all begin after {epochs}, which were "
            f"done on average, and the work of {counted(again, 'row')} is done again"
        )
    fields = {
        "step": manifest.step,
        "path": str(path),
        "dropped_pushes": dropped,
        "rows_again": again,
        "changed": found.changed,
    }
    display.event("resume", "; ".join(parts), fields)
