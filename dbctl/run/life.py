"""One life of a run in its directory: its session, what its checkpoints say, and its last lines.

Rules of this file: everything that can be wrong with a request was found before (train.py,
resume.py); whatever becomes of the session, metrics, status and the last lines say it, and the exit
status is that of the outcome.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial

from msgspec.structs import replace

from dbctl.checkpoint.layout import Facts, ReplicaRow
from dbctl.errors import DbctlError, LaunchError, RunError
from dbctl.experiment.specs import Experiment, SshCluster
from dbctl.launch.base import Launcher, make_runtime
from dbctl.launch.ssh_words import NOWHERE, Standing
from dbctl.plan import Plan
from dbctl.progress.display import Display
from dbctl.progress.text import (
    FAILED,
    FINISHED,
    SEARCH_FAILED,
    STOPPED,
    UNFINISHED,
    Summary,
    counted,
    way_on,
)
from dbctl.roles.base import Save
from dbctl.roles.cuts import CompleteCut
from dbctl.roles.leader import UNMEASURED
from dbctl.run.findings import Needs
from dbctl.run.hosts import launcher_of
from dbctl.run.methods import extra_of, leader_of, state_vectors
from dbctl.run.nodes import Nodes
from dbctl.run.parts import FarParts
from dbctl.run.processes import Processes
from dbctl.run.records import RunRecords
from dbctl.run.saver import Saver
from dbctl.run.session import Outcome, Session
from dbctl.run.setting import (
    LEASE_S,
    Origin,
    describe,
    make_nodes,
    network_digest,
    new_run_id,
    vectors_of,
)
from dbctl.run.shipments import Shipments
from dbctl.run.signals import Signals
from dbctl.run.wiring import UNENCRYPTED, Wiring
from dbctl.rundir import RunDir, RunInfo
from dbctl.wire import Position

EXIT_CODES = {
    **dict.fromkeys(FINISHED, 0),
    **dict.fromkeys(FAILED, 1),
    "stopped": 75,
    "interrupted": 130,
}


def gave_up(signals: Signals, display: Display) -> int:
    """The exit status of a life that a signal ended before anything was started."""
    display.warn(f"{signals.status} while the data were read: nothing was started")
    display.close()
    return EXIT_CODES[signals.status]


class Life:
    """One life of a run in its directory: `train` begins the first, each `resume` another.

    `data` is the digest of the training data: every checkpoint keeps it. `wiring`: which nodes
    share a host. `shipments`: what hosts are sent of the data; `needs`: what they must have.
    `standing`: who starts the agents there, of a cluster that stays up. `lives`: how many made the
    run's figures, this one with them. `settings`: of resolved.yaml from when all have come up.
    """

    def __init__(
        self,
        plan: Plan,
        run_dir: RunDir,
        display: Display,
        *,
        origin: Origin,
        data: str,
        wiring: Wiring,
        shipments: Shipments,
        needs: Mapping[str, Needs],
        standing: Standing = NOWHERE,
        lives: int = 1,
        settings: str = "",
    ) -> None:
        self.plan = plan
        self.shipments = shipments
        self.wiring = wiring
        self.needs = needs
        self.standing = standing
        self.run_dir = run_dir
        self.display = display
        self.origin = origin
        self.lives = lives
        self._settings = settings
        self.run_id = new_run_id()
        self.coordinator = leader_of(plan, origin)
        self._begun_at = self.coordinator.figures.steps, self.coordinator.figures.epochs
        self._cut_at: tuple[int, Mapping[int, Position]] = (0, {})  # the last one's step and rows
        self._digest = network_digest(plan.experiment)
        self._data = data

    @property
    def experiment(self) -> Experiment:
        return self.plan.experiment

    def run(
        self,
        signals: Signals,
        *,
        lease_s: float = LEASE_S,
        factories: Mapping[str, str] | None = None,
    ) -> int:
        with contextlib.ExitStack() as at_end:
            at_end.callback(self.display.close)
            runtime = make_runtime()
            at_end.callback(shutil.rmtree, runtime, ignore_errors=True)
            records = RunRecords(
                self.run_dir, self.display, self.coordinator, run=self.run_id, now=time.monotonic
            )
            at_end.callback(records.close)
            info = RunInfo.of_this_process(self.run_id, control=runtime, command=sys.argv)
            self.run_dir.write_info(
                replace(
                    info,
                    initialize_from=self.experiment.initialize_from,
                    encryption=self.wiring.encryption,
                )
            )
            if not self.origin.restore:
                self.display.begins(str(self.run_dir.path))
            processes = Processes(
                run=self.run_id,
                runtime=runtime,
                launcher=self._launcher(signals, runtime=runtime, lease_s=lease_s),
                lease_s=lease_s,
                log_path=lambda node: str(self.run_dir.log_path(node)),
            )
            session = Session(
                processes=processes,
                coordinator=self.coordinator,
                records=records,
                signals=signals,
                vectors=vectors_of(self.origin, self.run_dir.path),
                shipments=self.shipments,
                save=self.save,
            )
            if self.wiring.encryption == "off":
                self.display.warn(UNENCRYPTED)
            records.append(
                "start",
                run=self.run_id,
                restore=self.origin.restore or None,
                initialize=self.origin.initialize or None,
                **describe(self.plan),
            )
            nodes = partial(
                make_nodes,
                self.plan,
                run=self.run_id,
                run_dir=self.run_dir.path.absolute(),
                origin=self.origin,
                lease_s=lease_s,
                factories=factories,
                wiring=self.wiring,
                shipped=self.shipments.shipped,
            )
            try:
                outcome = session.run(nodes, self._begin)
            except LaunchError as error:
                self._finish(records, processes.nodes, Outcome(status="failed", error=error))
                return error.exit_code
            return self._finish(records, processes.nodes, outcome)

    def _launcher(self, signals: Signals, *, runtime: str, lease_s: float) -> Launcher:
        return launcher_of(
            self.plan,
            run=self.run_id,
            runtime=runtime,
            logs=self.run_dir.logs,
            lease_s=lease_s,
            interrupted=lambda: signals.count > 0,
            needs=self.needs,
            wiring=self.wiring,
            warn=self.display.warn,
            standing=self.standing,
        )

    def _begin(self, wake: Callable[[], None]) -> Saver:
        """All are there: what a resume has changed is the run's from here on."""
        if self._settings:
            self.run_dir.write_resolved(self._settings)
        return self._make_saver(wake)

    def _make_saver(self, wake: Callable[[], None]) -> Saver:
        return Saver(
            self.run_dir.checkpoints,
            cut=self.plan.cut,
            vectors=state_vectors(self.experiment),
            keep=self.experiment.checkpoint.keep,
            wake=wake,
            far=FarParts(self.plan.shards, wake),
        )

    def save(self, saver: Saver, save: Save) -> None:
        """Hands a complete cut to the writer, with all that its manifest says."""
        cut: CompleteCut = save.cut
        self._cut_at = cut.step, cut.rows
        now, figures = time.monotonic(), self.coordinator.figures
        saver.save(
            cut,
            Facts(
                run=self.run_id,
                network=self._digest,
                updates=cut.updates,
                rows=tuple(ReplicaRow.at(r, p) for r, p in sorted(cut.rows.items())),
                replicas=self.experiment.replicas,
                partitions=self.plan.cut.count,
                shards=len(self.plan.shards),
                seconds=figures.seconds(now),
                epochs=figures.epochs,
                examples=figures.examples_at(cut.rows),
                extra={
                    "dropped_pushes": cut.dropped,
                    "status": self.coordinator.status,
                    "finished": cut.final and self.coordinator.status in FINISHED,
                    "lives": self.lives,
                    "stop": asdict(self.experiment.stop),
                    "data": self._data,
                    "test_accuracy": figures.test_accuracy,
                    "first_loss": figures.first_loss,
                    "lost": sorted(figures.dead),
                    **extra_of(self.coordinator),
                },
            ),
        )

    # ------------------------------------------------------------------------------- the end

    def _finish(self, records: RunRecords, nodes: Nodes, outcome: Outcome) -> int:
        now, figures = time.monotonic(), self.coordinator.figures
        step, rows = self._cut_at
        if records.checkpoint is not None and records.checkpoint.step == step > figures.steps:
            figures.reach(rows)
        summary = figures.summary(now)
        error = _error(outcome)
        cause = None if error is None else str(error).partition("\n")[0]
        # One thing: of a run that failed `reason` and `error` are the cause that status.json has.
        reason = cause or outcome.reason
        left_out = records.tell_left_out(
            self.experiment.evaluate.every, begun_at=self._begun_at, status=outcome.status
        )
        records.append(
            "finished",
            status=outcome.status,
            reason=reason,
            error=cause,
            evaluations_left_out=left_out,
            **summary,
        )
        records.write_status(now, nodes, outcome.status, reason=cause)
        if error is not None:
            self.display.event("error", f"dbctl: error: {error}", {"message": str(error)})
        elif outcome.error is not None:
            self.display.warn(f"no final checkpoint: {outcome.error}")
        notes = tuple(self._notes(outcome, records))
        self.display.finished(
            Summary(
                run_dir=str(self.run_dir.path),
                status=outcome.status,
                error=cause,
                notes=notes,
                lives=self.lives,
                life_examples=figures.examples - self.origin.examples,
                life_seconds=figures.seconds(now) - self.origin.seconds,
                evaluations_left_out=left_out,
                **(records.measured if figures.test_loss is not None else {}),
                **summary,
            )
        )
        return EXIT_CODES[outcome.status]

    def _notes(self, outcome: Outcome, records: RunRecords) -> list[str]:
        figures, notes = self.coordinator.figures, []
        for replica, rows in figures.left_out().items():
            notes.append(f"replica {replica} was lost: its {rows:,} rows were left out")
        if figures.refused():
            notes.append(f"{figures.refused()} gradients that were not finite were refused")
        if figures.refused_pushes():
            notes.append(f"shards refused {figures.refused_pushes()} pushes that were not finite")
        if self.coordinator.unmeasured and outcome.status not in UNMEASURED:
            notes.append("the evaluator was lost: the end was not measured; `dbctl eval` does that")
        if outcome.status in STOPPED and outcome.reason:
            unsaved = "" if self.coordinator.is_saved else "the final checkpoint was not taken: "
            notes.append(f"{unsaved}{outcome.reason}")
        if outcome.status in FINISHED and outcome.reason:
            notes.append(self._why_done(outcome))
        if (error := _error(outcome)) is not None:
            notes.append(str(error).partition("\n")[0])
        if diverged := records.watch_divergence():
            notes.append(diverged)
        if records.save_error:
            notes.append(f"the last checkpoint failed: {records.save_error}")
        if outcome.status in UNFINISHED:
            notes.append(self._how_to_go_on(outcome.status, records))
        if left := self._left_on(outcome.error):
            notes.append(f"logs that could not be sent stay there: {left}")
        return notes

    def _why_done(self, outcome: Outcome) -> str:
        """Of a run that reached an end of its own, which one."""
        if outcome.status == "converged":
            return f"converged: {outcome.reason}"
        limit = getattr(self.experiment.stop, outcome.reason)
        return f"stop.{outcome.reason} ({limit:,}) was reached"

    def _left_on(self, error: DbctlError | None) -> str:
        """Where logs of hosts lie whose agents ended early, or whom this process cannot hear any
        more (RunError); "" where there are none.
        """
        cluster = self.experiment.cluster
        if not isinstance(cluster, SshCluster):
            return ""
        hosts = list(cluster.members)
        if isinstance(error, LaunchError) and error.node.startswith("agent-"):
            hosts = [h for h in hosts if error.about == "cluster" or h.name == error.host]
        elif not isinstance(error, RunError):
            return ""
        return ", ".join(f"{host.name}:{host.workdir}/{self.run_id}" for host in hosts)

    def _how_to_go_on(self, status: str, records: RunRecords) -> str:
        if not self.run_dir.resolved.exists():
            gone = "the run directory was removed meanwhile, and nothing is left to resume"
            return f"{gone}: train it anew"
        if status == SEARCH_FAILED and (records.checkpoint or self.origin.restore):
            return way_on(status, str(self.run_dir.path))
        resume = f"`dbctl resume {shlex.quote(str(self.run_dir.path))}`"
        if records.checkpoint is not None:
            step = records.checkpoint.step
            return f"{resume} goes on from step {step:,}{self._again(step, records)}"
        if self.origin.restore:
            return f"{resume} goes on from the earlier checkpoint"
        return "nothing was saved: train it anew"

    def _again(self, step: int, records: RunRecords) -> str:
        """Which of the steps counted a resume from `step` does once more; "" where none."""
        n_again = self.coordinator.figures.steps - step
        if n_again <= 0:
            return ""
        is_newest = self.coordinator.is_saved and not records.save_error
        why = ", whose pushes were not sent" if is_newest else ""
        return f" and does {counted(n_again, 'step')} again{why}"


def _error(outcome: Outcome) -> DbctlError | str | None:
    """Why the run failed; None where it did not."""
    return (outcome.error or outcome.reason) if EXIT_CODES[outcome.status] == 1 else None
