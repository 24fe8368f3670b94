"""A run of an experiment in the in-process network: dbctl's own roles, data and checkpoints.

What differs from `dbctl train`: no process, no socket, a seeded network in virtual time, and
checkpoints that are written at once by the test's own thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from dbctl.checkpoint.layout import Facts
from dbctl.checkpoint.writer import Writer
from dbctl.data.sources import digest
from dbctl.errors import DbctlError
from dbctl.experiment.read import parse
from dbctl.experiment.resolve import to_yaml
from dbctl.launch.base import AgentHandle
from dbctl.launch.inproc import Faults, Network
from dbctl.node.build import build
from dbctl.plan import NodeSpec, Plan
from dbctl.progress.text import Summary
from dbctl.rights import CONTROLLER
from dbctl.roles.base import Done, Effects, PlainBuffer, Record, Save
from dbctl.roles.cuts import CompleteCut
from dbctl.run.initial_run import settle
from dbctl.run.life import Life
from dbctl.run.methods import state_vectors
from dbctl.run.nodes import Nodes
from dbctl.run.records import RunRecords
from dbctl.run.resume import prepare
from dbctl.run.saver import Saved, put
from dbctl.run.session import Outcome
from dbctl.run.setting import (
    Origin,
    beginnings,
    keep_statistics,
    make_nodes,
    open_data,
    plan_of,
)
from dbctl.run.shipments import shipments_of
from dbctl.run.wiring import wired
from dbctl.rundir import RunDir, RunInfo, create

LIMIT_S = 100_000.0


class SilentDisplay:
    """progress.display.Display that keeps what it is told."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.summary: Summary | None = None

    def begins(self, run_dir: str) -> None:
        pass

    def progress(self, snapshot: object) -> None:
        pass

    def event(self, name: str, text: str, fields: Any = None) -> None:
        self.events.append((name, {**(fields or {}), "text": text}))

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def finished(self, summary: Summary) -> None:
        self.summary = summary

    def close(self) -> None:
        pass


class InprocRun:
    """One life of a run. `records` are the coordinator's; `saved` the steps of its checkpoints."""

    def __init__(
        self,
        plan: Plan,
        run_dir: RunDir,
        *,
        origin: Origin,
        lives: int = 1,
        seed: int = 0,
        faults: Faults | None = None,
    ) -> None:
        data = digest(plan.experiment.data.train)
        wiring = wired(plan, {})
        self.life = Life(
            plan,
            run_dir,
            SilentDisplay(),
            origin=origin,
            data=data,
            wiring=wiring,
            shipments=shipments_of(plan, None, None, directory=run_dir.path),
            needs={},
            lives=lives,
        )
        self.coordinator = self.life.coordinator
        self.records: list[Record] = []
        self.saved: list[int] = []
        self.net = Network(
            seed,
            faults,
            on_save=self._on_save,
            on_record=lambda now, record: self.records.append(record),
        )
        agent = AgentHandle("agent-0", "localhost", "", 0)
        nodes = make_nodes(plan, [agent], run="run", run_dir=run_dir.path, origin=origin)
        for name, node in nodes.items():
            spec = msgspec.json.decode(node.order.spec, type=NodeSpec)
            self.net.add(name, build(spec, PlainBuffer))
        self.net.add(CONTROLLER, self.coordinator)

    def _on_save(self, now: float, save: Save) -> Effects:
        self.life.save(self, save)  # type: ignore[arg-type]
        return self.coordinator.saved(now, "")

    def save(self, cut: CompleteCut, facts: Facts) -> None:
        """The saver's part: writes at once."""
        vectors = state_vectors(self.life.experiment)
        tensors = self.life.plan.tensors
        where = self.life.run_dir.checkpoints
        with Writer(where, cut.step, tensors=tensors, vectors=vectors, keep=9) as writer:
            for part in cut.parts:
                cut_ = self.life.plan.cut
                put(writer, cut_, part.vector, at=part.start, values=part.payload)
            writer.finish(facts)
        self.saved.append(cut.step)

    def run(self, *, interrupt_at: int | None = None) -> Done:
        """To the end; `interrupt_at`: Ctrl-C once the coordinator knows of so many steps."""
        if interrupt_at is not None:
            figures = self.coordinator.figures
            assert self.net.run(until=lambda: figures.steps >= interrupt_at, limit_s=LIMIT_S)
            effects = self.coordinator.interrupt(self.net.now, "interrupted")
            self.net.perform(CONTROLLER, effects)
        ended = self.net.run(until=lambda: CONTROLLER in self.net.done, limit_s=LIMIT_S)
        assert ended, f"not done after {self.net.now:.0f} virtual seconds"
        return self.net.done[CONTROLLER]

    def end(self, done: Done, *, error: DbctlError | None = None) -> Summary:
        """What the last line of the life says; its last checkpoint is that of `saved`."""
        life, display = self.life, SilentDisplay()
        life.display = display
        records = RunRecords(
            life.run_dir, display, self.coordinator, run="run", now=lambda: self.net.now
        )
        for record in self.records:
            if record.event == "evaluation":
                records.record(record)
        records.saved(Saved(step=self.saved[-1], path=life.run_dir.checkpoints))
        outcome = Outcome(status=done.status, reason=done.reason, error=error)
        life._finish(records, Nodes({}, lease_s=1.0), outcome)
        records.close()
        assert display.summary is not None
        return display.summary


def begin(
    text: str, directory: Path, *, overrides: Sequence[str] = (), **more: Any
) -> tuple[RunDir, InprocRun]:
    """The first life of a run of the experiment `text`, in a new run directory."""
    experiment = parse(text, overrides=["threads=1", *overrides])
    train, test = open_data(experiment)
    experiment, initial = settle(experiment, warn=print)
    plan = plan_of(experiment, train, test)
    run_dir = create(directory, experiment.name)
    run_dir.write_experiment(text.encode())
    run_dir.write_resolved(to_yaml(experiment))
    run_dir.write_info(RunInfo.of_this_process("run", control="", command=[]))
    run_dir.close()
    keep_statistics(experiment, train, run_dir)
    origin = Origin(initialize=initial, positions=beginnings(experiment.replicas))
    return run_dir, InprocRun(plan, run_dir, origin=origin, **more)


def go_on(run_dir: RunDir, overrides: Sequence[str] = (), **more: Any) -> InprocRun:
    """The next life, as `dbctl resume` prepares it."""
    found = prepare(run_dir, overrides)
    run_dir.write_resolved(to_yaml(found.plan.experiment))
    return InprocRun(found.plan, run_dir, origin=found.origin, lives=found.lives + 1, **more)
