"""`dbctl eval`: a checkpoint measured on a data split, by the roles that measure during training.

Rules of this file: the run directory is only read, so a run that is going on, or that is another
user's, can be measured too; logs are in a temporary directory that stays only after a failure.
Theory of operation: shards with the checkpoint's parameters, and evaluators that take every n-th
row each; what they count is summed, so each row counts once for any number of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dbctl.checkpoint.reader import Checkpoint, checkpoints_by_step, newest_good, open_checkpoint
from dbctl.data.sources import Source, check, open_source
from dbctl.errors import CheckpointError, DbctlError, LaunchError, RunError, UsageError
from dbctl.experiment.read import load
from dbctl.experiment.specs import Experiment, StopSpec
from dbctl.launch.base import make_runtime
from dbctl.launch.bootstrap import nobody
from dbctl.plan import Plan, make_evaluation_plan
from dbctl.roles.base import Record
from dbctl.roles.coordinator import Coordinator, CoordinatorStart
from dbctl.roles.evaluations import Measured
from dbctl.run.bootstrap import bootstrapped
from dbctl.run.clusters import Cluster, overrides_on, standing_on
from dbctl.run.eval_figures import Evaluation, Split, evaluation_of
from dbctl.run.find import find
from dbctl.run.hosts import launcher_of, wire
from dbctl.run.nodes import Nodes
from dbctl.run.predictions import PredictionsFile
from dbctl.run.preflight import needs_of
from dbctl.run.processes import Processes
from dbctl.run.resume import check_network
from dbctl.run.room import check_room
from dbctl.run.saver import Saved
from dbctl.run.session import Outcome, Session
from dbctl.run.setting import (
    LEASE_S,
    STATISTICS,
    Origin,
    evaluator_groups,
    make_nodes,
    new_run_id,
    vectors_of,
)
from dbctl.run.shipments import Shipments, shipments_of
from dbctl.run.show_run import of_run
from dbctl.run.signals import Interrupted, Signals
from dbctl.run.wiring import UNENCRYPTED
from dbctl.rundir import RunDir
from dbctl.wire import Exited

MAX_TRIES = 5


@dataclass(frozen=True, kw_only=True)
class Request:
    """`step`: which checkpoint (None: the newest good one); `predictions`: a CSV file to write;
    `bootstrap`: dbctl is brought to the hosts first, and `tell` is told of it.
    `cluster`: where it is measured, instead of where the run was.
    """

    split: Split = "test"
    step: int | None = None
    workers: int = 1
    predictions: Path | None = None
    bootstrap: bool = False
    tell: Callable[[str], object] = nobody
    cluster: Cluster | None = None


def evaluate(
    path: str,
    request: Request,
    *,
    warn: Callable[[str], None],
    lease_s: float = LEASE_S,
) -> tuple[str, Evaluation | None]:
    """How it ended (done, interrupted, stopped) and, when done, what was measured.

    DbctlError where it cannot begin or does not come to its end. `warn` gets what is to be said of
    checkpoints that are not good, and where the logs of an evaluation that failed are.
    """
    logs = tempfile.mkdtemp(prefix="dbctl-eval-")
    try:
        with Signals() as signals:
            found = _evaluate(find(path), request, signals, logs=logs, warn=warn, lease_s=lease_s)
    except Interrupted:
        found = signals.status, None
    except (LaunchError, RunError):
        try:
            os.rmdir(logs)  # only if it is empty: what went wrong may stand there
        except OSError:
            warn(f"what its processes said is kept in {logs}")
        raise
    except BaseException:
        shutil.rmtree(logs, ignore_errors=True)
        raise
    shutil.rmtree(logs, ignore_errors=True)
    return found


def _evaluate(
    run_dir: RunDir,
    request: Request,
    signals: Signals,
    *,
    logs: str,
    warn: Callable[[str], None],
    lease_s: float,
) -> tuple[str, Evaluation | None]:
    experiment = load(str(run_dir.resolved), overrides_on(request.cluster, ()))
    for number in range(1, MAX_TRIES + 1):
        # A run that is going on may remove it meanwhile: `checkpoint: keep`.
        path = next(iter(checkpoints_by_step(run_dir.checkpoints).values()), None)
        try:
            _check_saved(run_dir, experiment)
            checkpoint = _choose(run_dir, request, warn)
            path = checkpoint.path
            check_network(checkpoint, experiment)
            task = _Task(
                run_dir, experiment, request, checkpoint=checkpoint, signals=signals, warn=warn
            )
            for warning in task.warnings():
                warn(warning)
            return task.run(logs=logs, lease_s=lease_s)
        except DbctlError as error:
            if path is None or path.exists():
                raise
            if request.step is not None or number == MAX_TRIES:
                raise _removed(path, number) from error
    raise AssertionError("the last try returns or raises")


def _removed(path: Path, n_tries: int) -> RunError:
    tries = f", {n_tries} times in a row" if n_tries > 1 else ""
    return RunError(
        f"{path}: its run removed it while it was being read{tries}; give the run a greater "
        "checkpoint.keep or checkpoint.every (stop it, then `dbctl resume RUN_DIR --set "
        "checkpoint.keep=N`), or measure once it has ended"
    )


def _check_saved(run_dir: RunDir, experiment: Experiment) -> None:
    """CheckpointError while a run that is going on has saved nothing: a first one may come."""
    if checkpoints_by_step(run_dir.checkpoints):
        return
    with contextlib.suppress(RunError):  # a damaged file: then what is not there says enough
        if of_run(run_dir).is_over:
            return
        every = experiment.checkpoint.every
        when = f"every {every} (checkpoint.every); try again once it has"
        if every is None:
            when = "only at its end (checkpoint.every is off); try again then"
        raise CheckpointError(
            str(run_dir.path),
            f"this run is going on and has not saved a checkpoint yet: it saves one {when}",
        )


def _choose(run_dir: RunDir, request: Request, warn: Callable[[str], None]) -> Checkpoint:
    if request.step is None:
        checkpoint, warnings = newest_good(run_dir.checkpoints)
        for warning in warnings:
            warn(warning)
        return checkpoint
    found = checkpoints_by_step(run_dir.checkpoints)
    if request.step not in found:
        have = ", ".join(map(str, reversed(found)))
        raise UsageError(
            f"--step {request.step}: there is no such checkpoint; there are {have or 'none'}"
        )
    return open_checkpoint(found[request.step])


class _Task:
    """One evaluation: its nodes, its coordinator, what came of it."""

    def __init__(
        self,
        run_dir: RunDir,
        experiment: Experiment,
        request: Request,
        *,
        checkpoint: Checkpoint,
        signals: Signals,
        warn: Callable[[str], None],
    ) -> None:
        self._run_dir = run_dir
        self._experiment = experiment
        self._request = request
        self._checkpoint = checkpoint
        self._signals = signals
        self._warn = warn
        self._source = self._open()
        self._plan = make_evaluation_plan(
            experiment, rows=self._source.rows, evaluators=request.workers
        )
        self._wiring = wire(self._plan)

    def warnings(self) -> list[str]:
        """What is to be said before anything is started; LaunchError: it cannot be."""
        open_to_all = [UNENCRYPTED] if self._wiring.encryption == "off" else []
        return [*open_to_all, *check_room(self._plan, None, self._source)]

    def _open(self) -> Source:
        data, split = self._experiment.data, self._request.split
        spec = data.train if split == "train" else data.test
        if spec is None:
            raise UsageError("the experiment has no data.test: give --split train")
        if spec.standardize and not (self._run_dir.path / STATISTICS).exists():
            raise RunError(
                f"{self._run_dir.path / STATISTICS}: missing, and the data are standardized by it; "
                "dbctl resume makes it again"
            )
        source = open_source(spec)
        check(source, self._experiment.network, between=self._signals.check)
        return source

    def run(self, *, logs: str, lease_s: float) -> tuple[str, Evaluation | None]:
        with ExitStack() as stack:
            predictions = None
            if self._request.predictions is not None:
                labelled = self._source.kind == "labels"
                file = PredictionsFile(
                    self._request.predictions, self._source.rows, labelled=labelled
                )
                predictions = stack.enter_context(file)
            records = _Records(predictions)
            outcome = self._session(records, logs=logs, lease_s=lease_s)
            if outcome.status == "failed":
                raise RunError(str(outcome.error or outcome.reason))
            if outcome.status != "done":
                return outcome.status, None
            assert records.measured is not None
            if records.measured.rows != self._source.rows:
                raise RunError(
                    f"{records.measured.rows:,} rows were measured, expected {self._source.rows:,}"
                )
            if predictions is not None:
                predictions.finish()
            found = evaluation_of(
                records.measured,
                run_dir=self._run_dir.path,
                step=self._checkpoint.manifest.step,
                split=self._request.split,
            )
            return "done", found

    def _session(self, records: _Records, *, logs: str, lease_s: float) -> Outcome:
        request, signals = self._request, self._signals
        if request.bootstrap:
            prepared = bootstrapped(self._plan, signals, tell=request.tell)
            if prepared is None:
                return Outcome(status=signals.status)
            self._plan = prepared
        plan, shipments = self._plan, self._shipments(logs)
        run, runtime = new_run_id(), make_runtime()
        origin = Origin(restore=str(self._checkpoint.path.absolute()), positions={})
        launcher = launcher_of(
            plan,
            run=run,
            runtime=runtime,
            logs=Path(logs),
            lease_s=lease_s,
            interrupted=lambda: signals.count > 0,
            needs=needs_of(
                plan, None, self._source, encrypted=self._wiring.encrypted, split=request.split
            ),
            wiring=self._wiring,
            warn=self._warn,
            standing=standing_on(request.cluster, self._experiment, self._run_dir.path),
        )
        processes = Processes(
            run=run,
            runtime=runtime,
            launcher=launcher,
            lease_s=lease_s,
            log_path=lambda node: str(Path(logs) / f"{node}.log"),
        )
        session = Session(
            processes=processes,
            coordinator=Coordinator(
                evaluation_start(plan, predictions=request.predictions is not None)
            ),
            records=records,
            signals=signals,
            vectors=vectors_of(origin, self._run_dir.path),
            shipments=shipments,
        )
        nodes = partial(
            make_nodes,
            plan,
            run=run,
            run_dir=self._run_dir.path.absolute(),
            origin=origin,
            split=request.split,
            lease_s=lease_s,
            wiring=self._wiring,
            shipped=shipments.shipped,
        )
        try:
            return session.run(nodes)
        finally:
            shutil.rmtree(runtime, ignore_errors=True)

    def _shipments(self, directory: str) -> Shipments:
        split = self._request.split
        sources = {"train": None, "test": None, split: self._source}
        return shipments_of(
            self._plan,
            sources["train"],
            sources["test"],
            split=split,
            directory=directory,
            between=self._signals.check,
        )


def evaluation_start(plan: Plan, *, predictions: bool) -> CoordinatorStart:
    """A coordinator that has nobody train: it measures once and is done."""
    return CoordinatorStart(
        workers={},
        parts={},
        shards=[span.node for span in plan.shards],
        evaluators=evaluator_groups(plan),
        stop=StopSpec(),
        save=False,
        predictions=predictions,
    )


class _Records:
    """run.session.Records: keeps the measurement, files the predictions."""

    def __init__(self, predictions: PredictionsFile | None) -> None:
        self._predictions = predictions
        self.measured: Measured | None = None

    def record(self, record: Record) -> None:
        fields: dict[str, Any] = record.fields
        match record.event:
            case "evaluation":
                self.measured = fields["measured"]
            case "predictions" if self._predictions is not None:
                self._predictions.add(fields["message"])

    def stopping(self) -> None:
        """There is nothing to save: the signal ends it."""

    def node_died(self, name: str, exited: Exited) -> None:
        """The outcome says it."""

    def saved(self, saved: Saved) -> None:
        raise AssertionError("an evaluation saves nothing")

    def tick(self, now: float, nodes: Nodes) -> None:
        """Nothing is shown meanwhile."""
