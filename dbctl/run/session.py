"""One life of a run: agents up, nodes up, the coordinator's effects carried out, all down again.

Rules of this file: it decides nothing about training (roles/coordinator.py does) and nothing about
files (saver, records); it moves messages and time. Theory of operation: a loop over the link's
messages, the saver's answers, signals and the clock. The first signal asks the coordinator to stop
(a final checkpoint, bounded); the second, or the bound, ends everything at once. Once a signal has
come it says how the run ends, whatever fails after it: that is only why there is no final
checkpoint. `close` always runs: the agents end with the controller whatever happened.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from dbctl.errors import DbctlError, LaunchError
from dbctl.launch.base import AgentHandle, Launcher
from dbctl.logs import LogFiles
from dbctl.process import beat_s
from dbctl.rights import Rights
from dbctl.roles.base import Done, Effects, Record, Save, Send
from dbctl.roles.leader import Leader
from dbctl.run.nodes import Node, Nodes, died, why_orphaned
from dbctl.run.pulse import Pulse
from dbctl.run.saver import Saved, Saver
from dbctl.run.shipments import Shipments
from dbctl.run.signals import Signals
from dbctl.run.vectors import Vectors
from dbctl.transport.link import Link
from dbctl.wire import Exited, Finish, Message, Peer
from dbctl.wire_files import PartData, ReadVector
from dbctl.wire_logs import LogText
from dbctl.wire_processes import Beat, Lease, Ready, Started
from dbctl.wire_ship import ReadShipment

CONTROLLER = "controller"
TICK_S = 0.25
FINAL_LIMIT_S = 28.0  # from the first signal to the end of the final checkpoint (G11: 30 s)
HELD_UP_S = 1.0  # a round of the loop that took longer
GOODBYE_S = 3.0  # how long nodes may take to end by themselves
LAST_LOGS_S = 3.0  # how long agents of other hosts may take for the rest of their logs
WITHOUT = "{} ended: the run cannot go on without it"
SHORT_GOODBYE_S = 0.5  # after a second signal (G11: 2 s)

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
    """`make_nodes` gets the agents once they are ready; the runtime directory ends with it."""

    def __init__(
        self,
        *,
        run: str,
        runtime: str,
        launcher: Launcher,
        coordinator: Leader,
        records: Records,
        signals: Signals,
        lease_s: float,
        vectors: Vectors,
        shipments: Shipments,
        save: Callable[[Saver, Save], None] | None = None,
        log_path: Callable[[str], str],
    ) -> None:
        self._run_id = run
        self._runtime = runtime
        self._launcher = launcher
        self._coordinator = coordinator
        self._records = records
        self._signals = signals
        self._lease_s = lease_s
        self._vectors = vectors
        self._shipments = shipments
        self._save = save
        self._log_path = log_path
        self._link: Link | None = None
        self._nodes = Nodes({}, lease_s=lease_s)
        self._agents: list[AgentHandle] = []
        self._logs = LogFiles({})
        self._saver: Saver | None = None
        self._outcome: Outcome | None = None
        self._hard_at: float | None = None
        self._n_signals = 0
        self._hurry = False
        self._pulse = Pulse()
        self._looked_at = 0.0
        self._slept_s = 0.0  # the longest that this process stood still

    def run(
        self,
        make_nodes: Callable[[Sequence[AgentHandle]], Mapping[str, Node]],
        make_saver: Callable[[Callable[[], None]], Saver] | None = None,
    ) -> Outcome:
        """From the agents' READY to the end; LaunchError where the nodes do not come up."""
        try:
            self._agents = self._launcher.start()
            self._link = Link(
                run=self._run_id,
                node=CONTROLLER,
                incarnation=1,
                listen=None,
                lease_s=self._lease_s,
                beat_s=beat_s(self._lease_s),
                allow=Rights(CONTROLLER).may,
            )
            self._link.answer_beats = True
            self._link.start()
            for agent in self._agents:
                self._link.connect(agent.name, agent.incarnation, agent.endpoint)
                self._link.send(agent.name, Lease(0))  # it knows the way to here from now on
            self._pulse.start()
            self._signals.wake = self._shipments.wake = self._link.wake
            self._nodes = Nodes(make_nodes(self._agents), lease_s=self._lease_s)
            self._logs = LogFiles(self._log_copies())
            if not self._join():
                return self._outcome or Outcome(status=self._signals.status)
            if make_saver is not None:
                self._saver = make_saver(self._link.wake)
            return self._train()
        except LaunchError:
            if self._signals.count:  # who asked it to end does not wait for it to come up
                return Outcome(status=self._signals.status)
            raise
        finally:
            self._close()

    def _log_copies(self) -> dict[str, Path]:
        """Where the logs go that agents of other hosts send: only those of this run's nodes."""
        keepers = {agent.name for agent in self._agents if agent.keeps_logs}
        nodes = self._nodes.nodes.items()
        return {name: Path(self._log_path(name)) for name, n in nodes if n.agent in keepers}

    @property
    def nodes(self) -> Nodes:
        return self._nodes

    # -------------------------------------------------------------------------------- joining

    def _join(self) -> bool:
        """Until all needed nodes are ready; False if a signal, or the end, came first."""
        self._looked_at = _now()
        self._send_all(self._nodes.start(self._looked_at))
        while not self._nodes.ready:
            self._take()
            if self._signals.count or self._outcome is not None:
                return False
            now = _now()
            if self._overslept(now):
                return False
            self._nodes.check_start(now, self._log_path)
            self._send_all(self._nodes.step(now))
            if (error := self._agent_failure(now)) is not None:
                raise error
        self._send_all(self._nodes.begin(_now()))
        return True

    # ------------------------------------------------------------------------------- training

    def _train(self) -> Outcome:
        self._act(self._coordinator.start(_now()))
        while self._outcome is None:
            self._take()
            now = _now()
            if self._overslept(now):
                break
            self._take_saved(now)
            if self._coordinator.due <= now:
                self._act(self._coordinator.step(now))
            self._send_all(self._nodes.step(now))
            self._heed_signals(now)
            self._check_agent(now)
            self._records.tick(now, self._nodes)
        assert self._outcome is not None
        return self._outcome

    def _take(self) -> None:
        assert self._link is not None
        wait = min(TICK_S, max(0.0, self._coordinator.due - _now()))
        messages = self._link.receive(wait)
        if self._overslept(_now()):
            return
        for peer, message in messages:
            self._dispatch(peer, message)
        self._act(self._shipments.due())

    def _overslept(self, now: float) -> bool:
        """Ctrl-Z, or a machine that swaps: nobody renewed the nodes' lease, and they have ended.

        Not so where only this thread was held up, by a slow disk: the link went on with all leases.
        """
        asleep_s = self._pulse.standstill()
        self._slept_s = max(self._slept_s, asleep_s)
        held_up_s, self._looked_at = now - self._looked_at, now
        if held_up_s > HELD_UP_S:
            self._nodes.excuse(now)
        if asleep_s <= self._lease_s:
            return False
        self._fail(self._asleep(asleep_s))
        return True

    def _asleep(self, asleep_s: float) -> str:
        return (
            f"this process was stopped for {asleep_s:.1f} s, as long as the lease of"
            f" {self._lease_s:g} s: its nodes have ended by themselves"
        )

    def _fail(self, reason: str, error: DbctlError | None = None) -> None:
        """The run cannot go on; nothing if it is over already."""
        status = self._signals.status or "failed"
        self._outcome = self._outcome or Outcome(status=status, reason=reason, error=error)

    def _dispatch(self, peer: Peer, message: Message) -> None:
        now = _now()
        match message:
            case Ready() | Beat():
                self._send_all(self._nodes.receive(now, peer.node, message))
                return
            case Started():
                return
            case LogText():
                self._file(peer, message)
                return
            case PartData():
                if self._saver is not None:
                    self._saver.far.take(now, peer.node, message)
                return
            case ReadVector():
                self._send_part(peer, message)
                return
            case ReadShipment():
                self._act(self._shipments.ask(peer.node, message))
                return
            case Exited(node):
                known = self._nodes.nodes.get(node)
                if known is None or not known.alive:
                    return
                self._send_all(self._nodes.receive(now, node, message))
                self._heed_orphan(known, message)
                message = known.exited or message
                if self._outcome is not None or not self._nodes.ready:
                    return
                self._records.node_died(node, message)
        self._act(self._coordinator.receive(now, peer, message))
        if isinstance(message, Exited) and self._outcome is not None:
            self._blame(message)

    def _file(self, agent: Peer, piece: LogText) -> None:
        node = self._nodes.nodes.get(piece.node)
        answer = self._logs.take(piece) if node and node.agent == agent.node else None
        if answer is not None:
            assert self._link is not None
            self._link.send(agent.node, answer)

    def _send_part(self, peer: Peer, asked: ReadVector) -> None:
        part = self._vectors.answer(peer, asked)
        if part is not None:
            assert self._link is not None
            self._link.send(peer.node, part)

    def _heed_orphan(self, node: Node, exited: Exited) -> None:
        """A node that ended because its agent does is no death: the run ends by the agent's."""
        if (error := why_orphaned(node, exited, self._launcher.failure)) is not None:
            self._fail(WITHOUT.format(error.node), error)

    def _blame(self, exited: Exited) -> None:
        """The run ends because of this death: its outcome says so with the log's tail."""
        assert self._outcome is not None
        if self._outcome.status != "done" and self._outcome.reason:
            host = self._nodes.nodes[exited.node].host
            error = died(exited.node, exited, host=host, log_path=self._log_path(exited.node))
            self._outcome = replace(self._outcome, error=error)

    def _take_saved(self, now: float) -> None:
        if self._saver is None:
            return
        self._send_all(self._saver.far.due(now))
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
        if self._outcome is None and (self._n_signals > 1 or late):
            self._hurry = True
            reason = f"it took longer than {FINAL_LIMIT_S:g} s" if late else "stopped at once"
            self._fail(reason)

    def _agent_failure(self, now: float) -> LaunchError | None:
        return self._launcher.failure() or self._nodes.unanswered(now)

    def _check_agent(self, now: float) -> None:
        error = self._agent_failure(now)
        # An agent's lease counts from its last beat: it may run out in a little less than a lease.
        if error is not None and self._slept_s > self._lease_s - 2 * beat_s(self._lease_s):
            self._fail(self._asleep(self._slept_s))
        if error is not None:
            self._fail(WITHOUT.format(error.node), error)

    # -------------------------------------------------------------------------------- effects

    def _act(self, effects: Effects) -> None:
        assert self._link is not None
        for effect in effects:
            match effect:
                case Send(to, message):
                    self._send_all([(to, message)])
                case Record():
                    self._records.record(effect)
                case Save():
                    assert self._saver is not None
                    assert self._save is not None
                    self._save(self._saver, effect)
                case Done("failed", reason):
                    self._fail(reason)
                case Done(status, reason):
                    self._outcome = Outcome(status=status, reason=reason)

    def _send_all(self, sends: list[tuple[str, Message]]) -> None:
        """To whom nothing leads yet nothing is said: totals are said again."""
        assert self._link is not None
        for to, message in sends:
            if self._nodes.heard_of(to):
                self._link.send(to, message)

    # -------------------------------------------------------------------------------- the end

    def _close(self) -> None:
        if self._link is not None:
            with contextlib.suppress(LaunchError):
                self._say_goodbye(self._link)
            self._link.close(0.2)
        if self._saver is not None:
            self._saver.close(SHORT_GOODBYE_S if self._hurry else GOODBYE_S)
            while not self._saver.answers.empty():  # it may have ended with the run
                self._records.saved(self._saver.answers.get())
        for record in self._shipments.close():
            self._records.record(record)
        self._pulse.close()
        self._launcher.stop(2.0)
        shutil.rmtree(self._runtime, ignore_errors=True)

    def _say_goodbye(self, link: Link) -> None:
        """Nodes end by themselves when the run was orderly; else, and after a while, are killed."""
        orderly = self._outcome is not None and not self._hurry and not self._outcome.error
        deadline = _now() + (GOODBYE_S if orderly else SHORT_GOODBYE_S)
        self._send_all(self._nodes.finish() if orderly else self._nodes.kill())
        while not self._nodes.all_ended() and _now() < deadline:
            for peer, message in link.receive(0.1):
                if isinstance(message, Exited):
                    self._nodes.receive(_now(), message.node, message)
                elif isinstance(message, LogText):
                    self._file(peer, message)
            if self._signals.count > max(1, self._n_signals):
                self._hurry = True
                break
        for agent in self._agents:
            link.send(agent.name, Finish())
        # What other hosts still have of their logs comes before their agents end.
        deadline = _now() + (SHORT_GOODBYE_S if self._hurry else LAST_LOGS_S)
        remote = any(agent.keeps_logs for agent in self._agents)
        while remote and not self._launcher.all_ended() and _now() < deadline:
            for peer, message in link.receive(0.05):
                if isinstance(message, LogText):
                    self._file(peer, message)
