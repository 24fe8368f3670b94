"""What a run leaves behind and shows: metrics.jsonl, status.json, the display.

Rules of this file: it only writes; a full disk warns once and never stops the training. Every line
of metrics.jsonl has `event` and `time` (seconds of training, earlier lives of the run included).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import floor, isfinite
from typing import Any

from dbctl.errors import RunError
from dbctl.experiment.specs import Every
from dbctl.metrics import Metrics
from dbctl.progress.display import Display
from dbctl.progress.text import Snapshot, counted
from dbctl.roles.base import Record
from dbctl.roles.cuts import replica_of
from dbctl.roles.leader import UNMEASURED, Leader, Phase
from dbctl.run.nodes import Node, Nodes, describe_end, tail_beside
from dbctl.run.saver import Saved
from dbctl.rundir import RunDir
from dbctl.wire import Exited

STATUS_S = 1.0
STUCK_S = 30.0
_STARTED = re.compile(r"incarnation \d+ of run \w+, pid \d+$")  # what each log begins with


class RunRecords:
    """For `dbctl train` and `resume`. `now` is the clock of the coordinator's figures."""

    def __init__(
        self,
        run_dir: RunDir,
        display: Display,
        coordinator: Leader,
        *,
        run: str,
        now: Callable[[], float],
    ) -> None:
        self._run = run
        self._run_dir = run_dir
        self._display = display
        self._coordinator = coordinator
        self._now = now
        self._metrics = Metrics(run_dir.metrics)
        self._status_at = 0.0
        self._steps: dict[str, tuple[int, float]] = {}  # of each worker, and since when
        self._warned: set[str] = set()
        self._told: dict[str, dict[str, Any]] = {}  # the last report of each node
        self.n_evaluations = 0
        self.measured: dict[str, Any] = {}  # steps and epochs done at the last one
        self.checkpoint: Saved | None = None
        self.save_error = ""

    def close(self) -> None:
        self._metrics.close()

    def append(self, event: str, **fields: Any) -> None:
        seconds = round(self._coordinator.figures.seconds(self._now()), 6)
        try:
            self._metrics.append({"event": event, "time": seconds, **fields})
        except RunError as error:
            self._warn_once("metrics", f"{error}; training goes on without this record")

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            self._display.warn(text)

    # ------------------------------------------------------------------------ what happens

    def record(self, record: Record) -> None:
        fields = dict(record.fields)
        fields.pop("measured", None)
        self.append(record.event, **fields)
        if record.event in ("worker", "shard"):
            self._told[fields["node"]] = fields
        match record.event:
            case "evaluation":
                self.n_evaluations += 1
                self.measured = {f"measured_{key}": fields.get(key) for key in ("steps", "epochs")}
                self._warn_test_loss(fields["loss"])
                self._display.event("evaluation", _describe_measured(fields), fields)
            case "worker" if fields.get("refused"):
                self._warn_refused(fields)
            case "shard" if self._coordinator.figures.refused_pushes():
                self._warn_once(
                    "refused pushes",
                    "a shard refused a push that is not finite, of gradients that were, each by "
                    "itself; what it summed is not used, and later ones are counted",
                )
            case "shipment":
                self._display.event("shipment", _describe_shipment(fields), fields)

    def _warn_refused(self, fields: dict[str, Any]) -> None:
        self._warn_once(
            f"refused {fields['node']}",
            f"replica {fields['replica']} refused a gradient that is not finite, at "
            f"{fields['refused_where']}; such a gradient is not used, and later ones are counted",
        )

    def _warn_test_loss(self, loss: float) -> None:
        if not isfinite(loss) and not self._coordinator.figures.diverged():
            text = (
                f"the test loss is {loss}: a row of data.test is not finite (mend or leave out "
                f"such rows), or the training diverged"
            )
            self._warn_once("test loss", text)

    def node_died(self, name: str, exited: Exited) -> None:
        self.append("death", node=name, status=exited.status, word=exited.word)
        if name.startswith("shard-"):
            return  # the run ends by it, and its error says the same with more of the log
        text = f"{name} {describe_end(exited)}"
        said = [line for line in tail_beside(exited).splitlines() if not _STARTED.search(line)]
        if said and said[-1].strip():
            text += f"; its log ends with: {said[-1].strip()}"
        self._display.warn(f"{text} (log: {self._run_dir.log_path(name)})")

    def saved(self, saved: Saved) -> None:
        if saved.path is None:
            self.save_error = saved.error
            self.append("checkpoint", step=saved.step, error=saved.error)
            self._display.warn(f"no checkpoint: {saved.error}; the next one is tried as usual")
            return
        self.checkpoint, self.save_error = saved, ""
        self.append("checkpoint", step=saved.step, path=str(saved.path))
        fields = {"step": saved.step, "path": str(saved.path)}
        self._display.event("checkpoint", f"checkpoint at step {saved.step:,}", fields)

    def stopping(self) -> None:
        text = "stopping: a final checkpoint is made; once more to stop at once"
        self._display.event("stopping", text)

    def tell_left_out(
        self, every: Every | None, *, begun_at: tuple[float, float], status: str
    ) -> int | None:
        """How many evaluations were due in this life, by steps or epochs, and were not made.

        `begun_at`: steps and epochs done when it began. None where they are not due at points: by
        the clock the next counts from the one before. That the evaluator was lost is told already.
        """
        if every is None or every.unit == "seconds" or self._coordinator.unmeasured:
            return None
        figures, which = self._coordinator.figures, int(every.unit == "epochs")
        ended_at = figures.steps, figures.epochs
        begun, ended = (floor(at[which] / every.amount + 1e-9) for at in (begun_at, ended_at))
        due = ended - begun
        # The end is measured in any case, also where none is due there.
        is_due_there = ended_at[which] / every.amount - ended < 1e-9
        is_measured = self.measured.get(f"measured_{every.unit}") == ended_at[which]
        is_extra = is_measured and not is_due_there and status not in UNMEASURED
        n_made = self.n_evaluations - is_extra
        # A run that is stopped does not wait for the last one.
        n_left_out = max(0, due - n_made - (status in UNMEASURED))
        if n_left_out and self.n_evaluations < due:  # fewer than were asked for, the end's too
            besides = " besides the one at the end" if is_extra else ""
            text = (
                f"{n_made:,} of {counted(due, 'measurement')} made{besides}: one that is due while"
                f" the one before is made, or passed between two reports, is left out"
            )
            fields = {"left_out": n_left_out, "due": due}
            self._display.event("evaluations_left_out", text, fields)
        return n_left_out

    # --------------------------------------------------------------------- what is going on

    def tick(self, now: float, nodes: Nodes) -> None:
        self._display.progress(self.snapshot(now))
        if now >= self._status_at:
            self._status_at = now + STATUS_S
            self._watch_stuck(now, nodes)
            self.watch_divergence()
            self.write_status(now, nodes, "running")

    def snapshot(self, now: float) -> Snapshot:
        figures, stop = self._coordinator.figures, self._coordinator.stop
        return Snapshot(
            steps=figures.steps,
            total_steps=stop.steps,
            epochs=figures.epochs,
            total_epochs=figures.reachable_epochs(stop.epochs) if stop.epochs else None,
            seconds=figures.seconds(now),
            total_seconds=stop.seconds,
            loss=figures.loss(last_epoch=False),
            gradient_norm=figures.gradient_norm,
            test_accuracy=figures.test_accuracy,
            examples=figures.examples,
            examples_per_second=figures.examples_per_second(now),
            staleness_mean=figures.mean_staleness(),
            fetch_wait_share=figures.fetch_wait_share(),
            replicas_live=figures.n_replicas - len(figures.dead),
            replicas=figures.n_replicas,
        )

    def write_status(
        self, now: float, nodes: Nodes, state: str, *, reason: str | None = None
    ) -> None:
        """Replaces status.json; `reason`: why the run failed."""
        figures = self._coordinator.figures
        status = {
            "run": self._run,
            "state": state,
            "reason": reason,
            **figures.summary(now),
            "staleness": figures.staleness(),
            "refused": figures.refused(),
            "refused_pushes": figures.refused_pushes(),
            "checkpoint": str(self.checkpoint.path) if self.checkpoint else None,
            "nodes": {
                # The shards' last word of a worker's staleness often comes after its own report.
                name: node_fields(
                    node, self._told.get(name, {}) | {"staleness": figures.staleness_of(name)}
                )
                for name, node in nodes.nodes.items()
            },
        }
        try:
            self._run_dir.write_status(status)
        except RunError as error:
            self._warn_once("status", f"{error}; training goes on")

    def watch_divergence(self) -> str:
        """A warning and a record, once; what the last line says of it, "" where it is well."""
        figures = self._coordinator.figures
        if not figures.diverged():
            return ""
        loss, first = figures.loss(last_epoch=True), figures.first_loss
        began = "" if first is None else f" after {first:.4g} at the start"
        text = (
            f"the training diverged: train loss {loss:.4g}{began}; take a lower optimizer.rule.rate"
        )
        if "diverged" not in self._warned:
            self.append("diverged", loss=loss, first_loss=first)
        self._warn_once("diverged", text)
        return text

    def _watch_stuck(self, now: float, nodes: Nodes) -> None:
        """Work without a step done: a warning only; one gradient may take minutes.

        The steps are those reported: what a loop does for its timers is no progress.
        """
        leader = self._coordinator
        is_running = leader.phase is Phase.RUNNING  # who has halted has steps left, and does none
        for name, node in nodes.nodes.items():
            if not name.startswith("worker-") or not node.alive:
                continue
            step = leader.figures.position(replica_of(name)).step
            before, since = self._steps.get(name, (-1, now))
            if step != before or not is_running or not leader.is_working(name):
                self._steps[name] = (step, now)
                self._warned.discard(f"stuck {name}")
            elif now - since > STUCK_S:
                self._warn_once(f"stuck {name}", f"{name} has made no step for {STUCK_S:.0f} s")


def node_fields(node: Node, told: Mapping[str, Any]) -> dict[str, Any]:
    """A node in status.json; `told` are the fields of its last report, if it makes any.

    Steps are a worker's mini-batches and a shard's updates; None where nothing was said of them.
    Bytes are those of parameters and gradients, and what a worker gives to other partitions.
    """
    if node.exited is not None:
        state = describe_end(node.exited) if node.exited.status else "ended"
    else:
        state = str(told.get("state", "up" if node.endpoint else "starting"))
    is_worker = "bytes_pushed" in told
    counts = {} if "bytes_in" in told else told.get("staleness", {})
    total = sum(counts.values())
    sent = told["bytes_pushed"] + told["bytes_exchanged"] if is_worker else told.get("bytes_out")
    return {
        "host": node.host,
        "agent": node.agent,
        "state": state,
        "pid": node.pid or None,
        "alive": node.alive,
        "steps": told.get("step", told.get("updates")),
        "examples_per_second": told.get("examples_per_second"),
        "staleness": sum(value * n for value, n in counts.items()) / total if total else None,
        "rss_bytes": node.rss_bytes,
        "bytes_in": told.get("bytes_fetched" if is_worker else "bytes_in"),
        "bytes_out": sent,
    }


def _describe_shipment(fields: dict[str, Any]) -> str:
    left, whole = fields["size_bytes"] - fields["start"], fields["size_bytes"]
    rest = f", the rest of {whole:,}" if left < whole else ""
    what = f"data.{fields['split']} ({fields['part']})"
    return f"sending {left:,} bytes of {what}{rest} to {fields['host']}, for {fields['node']}"


def _describe_measured(fields: dict[str, Any]) -> str:
    accuracy = fields["accuracy"]
    shown = f", accuracy {100 * accuracy:.2f} %" if accuracy is not None else ""
    return (
        f"after {fields['epochs']:.2f} epochs: test loss {fields['loss']:.4f}{shown} "
        f"({fields['examples']:,} rows)"
    )
