"""`dbctl train`: a new run, from its file to the beginning of its first life (life.py).

Rules of this file: it puts together what the others of this package do; the order of things is the
order in which they can fail (file, data, plan, directory, processes).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dbctl.data.sources import Source, digest
from dbctl.errors import ExperimentError, UsageError
from dbctl.experiment.read import load, locate
from dbctl.experiment.resolve import to_yaml
from dbctl.experiment.specs import Experiment
from dbctl.experiment.tree import problem
from dbctl.plan import Plan
from dbctl.progress.display import Display
from dbctl.run.bootstrap import bootstrapped
from dbctl.run.clusters import Cluster, overrides_on, standing_on
from dbctl.run.doubts import fewer_shards, unlike_splits
from dbctl.run.hosts import wire
from dbctl.run.initial_run import absent, settle
from dbctl.run.life import EXIT_CODES, Life, gave_up
from dbctl.run.preflight import needs_of
from dbctl.run.room import check_processes, check_room
from dbctl.run.setting import (
    LEASE_S,
    Origin,
    beginnings,
    keep_statistics,
    open_data,
    plan_of,
    resolve_threads,
)
from dbctl.run.shipments import shipments_of
from dbctl.run.signals import Interrupted, Signals
from dbctl.run.wiring import Wiring
from dbctl.rundir import check_new, create


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What a run is made of before anything is started or written.

    `initial`: the directory of the checkpoint of initialize_from, or "".
    """

    plan: Plan
    train: Source
    test: Source | None
    initial: str


def prepare(
    path: str,
    overrides: Sequence[str],
    *,
    run_dir: str | None,
    warn: Callable[[str], None],
    starts: bool = True,
    between: Callable[[], None] = lambda: None,
) -> Beginning:
    """What a run can be refused for on this machine, with nothing started or written: all but an
    address of a host that is not found, and rows that cannot be standardized.

    `warn` is told what a run can live with. `starts`: False where nobody will start it, so the run
    of initialize_from may not be there yet. `between` is called before each block of data that is
    read, and for each replica: what it raises ends this.
    DbctlError: the file, the data, the plan, the run directory, or too little memory.
    """
    experiment = resolve_threads(load(path, overrides))
    check_processes(experiment)
    train, test = open_data(experiment, between=between)
    initial = ""
    if not starts and (missing := absent(experiment)):
        warn(missing)
    else:
        experiment, initial = _settled(experiment, path, overrides, warn=warn)
    plan = plan_of(experiment, train, test, between=between)
    doubts = (*unlike_splits(experiment), *fewer_shards(plan))
    for warning in (*doubts, *check_room(plan, train, test)):
        warn(warning)
    check_new(Path(run_dir) if run_dir else None, experiment.name)
    return Beginning(plan=plan, train=train, test=test, initial=initial)


def train(
    path: str,
    overrides: Sequence[str] = (),
    *,
    run_dir: str | None,
    display: Display,
    bootstrap: bool = False,
    lease_s: float = LEASE_S,
    factories: Mapping[str, str] | None = None,
    wire: Callable[[Plan], Wiring] = wire,
    cluster: Cluster | None = None,
) -> int:
    """A new run; its exit status. DbctlError where it cannot begin.

    `bootstrap`: dbctl is brought to the hosts first. `wire` says which nodes share a host;
    `cluster`, whose hosts it is on instead of the file's.
    """
    overrides = overrides_on(cluster, overrides)
    with Signals() as signals, contextlib.suppress(Interrupted):
        begun = prepare(path, overrides, run_dir=run_dir, warn=display.warn, between=signals.check)
        plan, experiment = begun.plan, begun.plan.experiment
        wiring = wire(plan)
        if bootstrap:
            prepared = bootstrapped(plan, signals, tell=partial(display.event, "bootstrap"))
            if prepared is None:
                return EXIT_CODES[signals.status]
            plan, experiment = prepared, prepared.experiment
        directory = create(Path(run_dir) if run_dir else None, experiment.name)
        with directory:
            directory.write_experiment(Path(path).read_bytes())
            directory.write_resolved(to_yaml(experiment))
            keep_statistics(experiment, begun.train, directory, between=signals.check)
            origin = Origin(initialize=begun.initial, positions=beginnings(experiment.replicas))
            data = digest(experiment.data.train)
            if begun.initial:
                text = f"parameters begin as those of {experiment.initialize_from}"
                display.event("initialize", text, {"path": begun.initial})
            life = Life(
                plan,
                directory,
                display,
                origin=origin,
                data=data,
                wiring=wiring,
                shipments=shipments_of(
                    plan, begun.train, begun.test, directory=directory.path, between=signals.check
                ),
                needs=needs_of(plan, begun.train, begun.test, encrypted=wiring.encrypted),
                standing=standing_on(cluster, experiment, directory.path),
            )
            return life.run(signals, lease_s=lease_s, factories=factories)
    return gave_up(signals, display)


def _settled(
    experiment: Experiment, path: str, overrides: Sequence[str], *, warn: Callable[[str], None]
) -> tuple[Experiment, str]:
    """What initialize_from is now; ExperimentError at its place where that cannot be used."""
    try:
        return settle(experiment, warn=warn)
    except UsageError as error:
        key = "initialize_from"
        place = locate(path, overrides, key)
        raise ExperimentError([problem(place, (key,), str(error))]) from error
