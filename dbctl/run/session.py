"""One life of a run: its processes up, the coordinator's effects carried out, all down again.

Rules of this file: it decides nothing about training (roles/coordinator.py does), nothing about
files (saver, records), and knows no link (processes.py); it moves messages and time, and says when
and how the run ends. Theory of operation: a loop over what the processes say, the saver's answers,
signals and the clock. The first signal asks the coordinator to stop (a final checkpoint, bounded);
the second, or the bound, ends everything at once. Once a signal has come it says how the run ends,
whatever fails after it: that is only why there is no final checkpoint. The first end is the run's:
after it nobody is heard but in the book of nodes, by which the goodbye waits. `_close` always runs,
and to its end: the agents end with the controller whatever happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Protocol

from dbctl.errors import DbctlError, LaunchError, RunError
from dbctl.launch.base import AgentHandle
from dbctl.process import beat_s
from dbctl.roles.base import Done, Effects, Record, Save, Send
from dbctl.roles.leader import UNMEASURED, Leader
from dbctl.run.nodes import ORPHANED_S, Node, Nodes
from dbctl.run.processes import GOODBYE_S, SHORT_GOODBYE_S, Processes
from dbctl.run.pulse import Pulse
from dbctl.run.saver import Saved, Saver
from dbctl.run.shipments import Shipments
from dbctl.run.signals import Signals
from dbctl.run.vectors import Vectors
from dbctl.wire import Exited, Message, Peer
from dbctl.wire_files import PartData, ReadVector
from dbctl.wire_ship import ReadShipment

TICK_S = 0.25
FINAL_LIMIT_S = 28.0  # from the first signal to the end of the final checkpoint (G11: 30 s)
HELD_UP_S = 1.0  # a round of the loop that took longer
WITHOUT = "{} ended: the run cannot go on without it"

_now = time.monotonic


class Records(Protocol):
    """What the session tells of: lines for metrics.jsonl, the display, status.json."""

    def record(self, record: Record) -> None: ...

    def node_died(self, name: str, exited: Exited) -> None: ...

    def saved(self, saved: Saved) -> None: ...

    def stopping(self) -> None: ...

    def tick(self, now: float, nodes: Nodes) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`reason` and `error`: why the run failed, or why a stopped one has no final checkpoint."""

    status: str
    reason: str = ""
    error: DbctlError | None = None


class Session:
    """`save` hands a cut to the saver, with what its manifest says."""

    def __init__(
        self,
        *,
        processes: Processes,
        coordinator: Leader,
        records: Records,
        signals: Signals,
        vectors: Vectors,
        shipments: Shipments,
        save: Callable[[Saver, Save], None] | None = None,
    ) -> None:
        self._processes = processes
        self._coordinator = coordinator
        self._records = records
        self._signals = signals
        self._lease_s = processes.lease_s
        self._vectors = vectors
        self._shipments = shipments
        self._save = save
        self._saver: Saver | None = None
        self._outcome: Outcome | None = None
        self._hard_at: float | None = None
        self._n_signals = 0
        self._hurry = False
        self._pulse = Pulse()
        self._looked_at = 0.0
        self._slept_s = self._slept_at = 0.0  # the last standstill that an agent may have ended of

    def run(
        self,
        make_nodes: Callable[[Sequence[AgentHandle]], Mapping[str, Node]],
        make_saver: Callable[[Callable[[], None]], Saver] | None = None,
    ) -> Outcome:
        """From the agents' READY to the end; LaunchError where the nodes do not come up.

        `make_nodes` gets the agents once they are ready.
        """
        processes = self._processes
        try:
            processes.bring_agents()
            self._pulse.start()
            self._signals.wake = self._shipments.wake = processes.wake
            processes.plan_nodes(make_nodes)
            if not self._join():
                return self._outcome or Outcome(status=self._signals.status)
            if make_saver is not None:
                self._saver = make_saver(processes.wake)
            return self._train()
        except LaunchError:
            if self._signals.count:  # who asked it to end does not wait for it to come up
                return Outcome(status=self._signals.status)
            raise
        except RunError as error:  # this process cannot take what it is sent, or not keep it
            self._fail(str(error), error)
            assert self._outcome is not None
            return self._outcome
        finally:
            self._close()

    # -------------------------------------------------------------------------------- joining

    def _join(self) -> bool:
        """Until all needed nodes are ready; False if a signal, or the end, came first."""
        self._looked_at = _now()
        self._processes.start(self._looked_at)
        while not self._processes.nodes.ready:
            self._take()
            if self._signals.count or self._is_over:
                return False
            now = _now()
            if self._overslept(now):
                return False
            self._processes.step_start(now)
        self._processes.begin(_now())
        return True

    # ------------------------------------------------------------------------------- training

    def _train(self) -> Outcome:
        self._act(self._coordinator.start(_now()))
        while not self._is_over:
            self._take()
            now = _now()
            if self._is_over or self._overslept(now):
                break
            self._take_saved(now)
            if self._coordinator.due <= now:
                self._act(self._coordinator.step(now))
            self._processes.step(now)
            self._heed_signals(now)
            self._check_agent(now)
            self._records.tick(now, self._processes.nodes)
        assert self._outcome is not None
        return self._outcome

    def _take(self) -> None:
        wait = min(TICK_S, max(0.0, self._coordinator.due - _now()))
        messages = self._processes.receive(wait)
        if self._overslept(_now()):
            return
        for peer, message in messages:
            self._dispatch(peer, message)
        if not self._is_over:
            self._act(self._shipments.due())

    def _overslept(self, now: float) -> bool:
        """Ctrl-Z, or a machine that swaps: nobody renewed the nodes' lease, and they have ended.

        Not so where only this thread was held up, by a slow disk: the link went on with all leases.
        """
        asleep_s = self._note_standstill(now)
        held_up_s, self._looked_at = now - self._looked_at, now
        if held_up_s > HELD_UP_S:
            self._processes.nodes.excuse(now)
        if asleep_s <= self._lease_s:
            return False
        self._fail(self._asleep(asleep_s))
        return True

    def _note_standstill(self, now: float) -> float:
        """Seconds of the longest one since the last call. The newest that an agent may end of is
        kept, for as long as one may be found to have done so: an hour later it is no reason.
        """
        asleep_s = self._pulse.standstill()
        # An agent's lease counts from its last beat: it may run out in a little less than a lease.
        if asleep_s > self._lease_s - 2 * beat_s(self._lease_s):
            self._slept_s, self._slept_at = asleep_s, now
        elif now - self._slept_at > self._lease_s + ORPHANED_S:
            self._slept_s = 0.0
        return asleep_s

    def _asleep(self, asleep_s: float) -> str:
        return (
            f"this process was stopped for {asleep_s:.1f} s, as long as the lease of"
            f" {self._lease_s:g} s: its nodes have ended by themselves"
        )

    def _fail(self, reason: str, error: DbctlError | None = None) -> None:
        """The run cannot go on; nothing if it is over already."""
        status = self._signals.status or "failed"
        self._end(Outcome(status=status, reason=reason, error=error))

    def _end(self, outcome: Outcome) -> None:
        """The first one stays."""
        self._outcome = self._outcome or outcome

    @property
    def _is_over(self) -> bool:
        return self._outcome is not None

    def _dispatch(self, peer: Peer, message: Message) -> None:
        now = _now()
        if self._processes.hear(now, peer, message):
            return
        told = self._processes.bury(now, message) if isinstance(message, Exited) else message
        if told is None or self._is_over:
            return
        match told:
            case PartData():
                if self._saver is not None:
                    self._saver.far.take(now, peer.node, told)
                return
            case ReadVector():
                if (part := self._vectors.answer(peer, told)) is not None:
                    self._processes.answer(peer, part)
                return
            case ReadShipment():
                self._act(self._shipments.ask(peer.node, told))
                return
            case Exited():
                self._heed_orphan(told)
                if self._is_over or not self._processes.nodes.ready:
                    return
                self._records.node_died(told.node, told)
        self._act(self._coordinator.receive(now, peer, told))
        if isinstance(told, Exited) and self._is_over:
            self._blame(told)

    def _heed_orphan(self, exited: Exited) -> None:
        """A node that ended because its agent does is no death: the run ends by the agent's."""
        if (error := self._processes.why_orphaned(exited)) is not None:
            self._lose(error)

    def _blame(self, exited: Exited) -> None:
        """The run ends because of this death: its outcome says so with the log's tail.

        Not so where only the final evaluation was missing: the method had ended before.
        """
        assert self._outcome is not None
        if self._outcome.status in UNMEASURED and self._outcome.reason:
            self._outcome = replace(self._outcome, error=self._processes.death(exited))

    def _take_saved(self, now: float) -> None:
        if self._saver is None:
            return
        self._processes.send(self._saver.far.due(now))
        while not self._saver.answers.empty():
            saved = self._saver.answers.get()
            self._records.saved(saved)
            self._act(self._coordinator.saved(now, saved.error))

    def _heed_signals(self, now: float) -> None:
        if self._signals.count > self._n_signals:
            self._n_signals = self._signals.count
            if self._n_signals == 1:
                self._hard_at = now + FINAL_LIMIT_S
                self._records.stopping()
                self._act(self._coordinator.interrupt(now, self._signals.status))
        late = self._hard_at is not None and now >= self._hard_at
        if not self._is_over and (self._n_signals > 1 or late):
            self._hurry = True
            reason = f"it took longer than {FINAL_LIMIT_S:g} s" if late else "stopped at once"
            self._fail(reason)

    def _check_agent(self, now: float) -> None:
        error = self._processes.failure(now)
        if error is not None:
            self._lose(error)

    def _lose(self, error: LaunchError) -> None:
        """An agent has ended, or does not answer: of itself, or since this process stood still."""
        # The standstill may have come since it was looked for, a few lines before.
        self._note_standstill(_now())
        if self._slept_s:
            self._fail(self._asleep(self._slept_s))
        self._fail(WITHOUT.format(error.node), error)

    # -------------------------------------------------------------------------------- effects

    def _act(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case Send(to, message):
                    self._processes.send([(to, message)])
                case Record():
                    self._records.record(effect)
                case Save():
                    assert self._saver is not None
                    assert self._save is not None
                    self._save(self._saver, effect)
                case Done("failed", reason):
                    self._fail(reason)
                case Done(status, reason):
                    self._end(Outcome(status=status, reason=reason))

    # -------------------------------------------------------------------------------- the end

    def _close(self) -> None:
        """Saver, shipments, pulse, processes; what fails is raised once all of them are closed."""
        outcome = self._outcome
        with ExitStack() as at_end:
            at_end.callback(self._processes.close)
            at_end.callback(self._pulse.close)
            at_end.callback(self._close_shipments)
            at_end.callback(self._close_saver)
            self._hurry = self._processes.say_goodbye(
                orderly=outcome is not None and not self._hurry and not outcome.error,
                quick=self._hurry,
                pressed=lambda: self._signals.count > max(1, self._n_signals),
            )

    def _close_saver(self) -> None:
        if self._saver is None:
            return
        self._saver.close(SHORT_GOODBYE_S if self._hurry else GOODBYE_S)
        while not self._saver.answers.empty():  # it may have ended with the run
            self._records.saved(self._saver.answers.get())

    def _close_shipments(self) -> None:
        for record in self._shipments.close():
            self._records.record(record)
