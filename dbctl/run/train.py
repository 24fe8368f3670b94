"""`dbctl train`: a new run, from its file to the beginning of its first life (life.py).

Rules of this file: it puts together what the others of this package do; the order of things is the
order in which they can fail (file, data, plan, directory, processes).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from dbctl.data.sources import digest
from dbctl.errors import ExperimentError, UsageError
from dbctl.experiment.read import load, locate
from dbctl.experiment.resolve import to_yaml
from dbctl.experiment.specs import Experiment
from dbctl.experiment.tree import problem
from dbctl.plan import Plan
from dbctl.progress.display import Display
from dbctl.run.bootstrap import bootstrapped
from dbctl.run.clusters import Cluster, overrides_on, standing_on
from dbctl.run.hosts import wire
from dbctl.run.initial_run import settle
from dbctl.run.life import EXIT_CODES, Life, gave_up
from dbctl.run.preflight import needs_of
from dbctl.run.room import check_room
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
from dbctl.rundir import create


def prepare(path: str, overrides: Sequence[str]) -> Plan:
    """The plan of an experiment file, with nothing started and nothing written."""
    experiment = resolve_threads(load(path, overrides))
    return plan_of(experiment, *open_data(experiment))


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
        experiment = resolve_threads(load(path, overrides))
        train_data, test_data = open_data(experiment, between=signals.check)
        experiment, initial = _settled(experiment, path, overrides, warn=display.warn)
        plan = plan_of(experiment, train_data, test_data)
        wiring = wire(plan)
        for warning in check_room(plan, train_data, test_data):
            display.warn(warning)
        if bootstrap:
            prepared = bootstrapped(plan, signals, tell=partial(display.event, "bootstrap"))
            if prepared is None:
                return EXIT_CODES[signals.status]
            plan, experiment = prepared, prepared.experiment
        directory = create(Path(run_dir) if run_dir else None, experiment.name)
        with directory:
            directory.write_experiment(Path(path).read_bytes())
            directory.write_resolved(to_yaml(experiment))
            keep_statistics(experiment, train_data, directory, between=signals.check)
            origin = Origin(initialize=initial, positions=beginnings(experiment.replicas))
            data = digest(experiment.data.train)
            if initial:
                text = f"parameters begin as those of {experiment.initialize_from}"
                display.event("initialize", text, {"path": initial})
            life = Life(
                plan,
                directory,
                display,
                origin=origin,
                data=data,
                wiring=wiring,
                shipments=shipments_of(
                    plan, train_data, test_data, directory=directory.path, between=signals.check
                ),
                needs=needs_of(plan, train_data, test_data, encrypted=wiring.encrypted),
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
