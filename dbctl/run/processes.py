"""The processes of one life of a run: brought up, spoken with, and brought down.

Rules of this file: it decides nothing; what a message means for the training, and when all is over,
its caller (session.py) says. Only this file has the link to the agents. `close` leaves nothing
running, whatever happened.

Theory of operation. Agents first, then one link to all of them, then the nodes, which Nodes
(nodes.py) keeps the book of. Of what comes, `hear` takes what concerns the processes themselves:
beats, addresses, the logs of other hosts. Everybody is told to end; whoever does not is killed.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from dbctl.errors import LaunchError, RunError
from dbctl.launch.base import AgentHandle, Launcher
from dbctl.logs import LogFiles
from dbctl.process import beat_s
from dbctl.rights import CONTROLLER, Rights
from dbctl.run.nodes import Node, Nodes, died, why_orphaned
from dbctl.transport.link import Link
from dbctl.wire import Exited, Finish, Message, Peer
from dbctl.wire_logs import LogText
from dbctl.wire_processes import Beat, Lease, Ready, Started

GOODBYE_S = 3.0  # how long nodes may take to end by themselves
SHORT_GOODBYE_S = 0.5  # after a second signal (G11: 2 s)
LAST_LOGS_S = 3.0  # how long agents of other hosts may take for the rest of their logs

_now = time.monotonic


class Processes:
    """`runtime`: the private directory for sockets, which ends with them."""

    def __init__(
        self,
        *,
        run: str,
        runtime: str,
        launcher: Launcher,
        lease_s: float,
        log_path: Callable[[str], str],
    ) -> None:
        self.lease_s = lease_s
        self.nodes = Nodes({}, lease_s=lease_s)
        self._run_id = run
        self._runtime = runtime
        self._launcher = launcher
        self._log_path = log_path
        self._agents: list[AgentHandle] = []
        self._open: Link | None = None
        self._logs = LogFiles({})

    # ------------------------------------------------------------------------------------- up

    def bring_agents(self) -> None:
        """Until all are ready, and the link leads to them. LaunchError: one does not come up."""
        self._agents = self._launcher.start()
        link = self._open = Link(
            run=self._run_id,
            node=CONTROLLER,
            incarnation=1,
            listen=None,
            lease_s=self.lease_s,
            beat_s=beat_s(self.lease_s),
            allow=Rights(CONTROLLER).may,
        )
        link.answer_beats = True
        link.start()
        for agent in self._agents:
            link.connect(agent.name, agent.incarnation, agent.endpoint)
            link.send(agent.name, Lease(0))  # it knows the way to here from now on

    def plan_nodes(self, make_nodes: Callable[[Sequence[AgentHandle]], Mapping[str, Node]]) -> None:
        """Which there will be, now that the agents are known; none is started."""
        self.nodes = Nodes(make_nodes(self._agents), lease_s=self.lease_s)
        # Logs are taken of agents of other hosts, and only those of this run's nodes.
        senders = {agent.name for agent in self._agents if agent.keeps_logs}
        mine = [name for name, node in self.nodes.nodes.items() if node.agent in senders]
        self._logs = LogFiles({name: Path(self._log_path(name)) for name in mine})

    def start(self, now: float) -> None:
        self.send(self.nodes.start(now))

    def step_start(self, now: float) -> None:
        """Until all are ready. LaunchError: a node, or an agent, does not come up."""
        self.nodes.check_start(now, self._log_path)
        self.step(now)
        if (error := self.failure(now)) is not None:
            raise error

    def begin(self, now: float) -> None:
        """All needed are ready: they are introduced, and the others start."""
        self.send(self.nodes.begin(now))

    # ------------------------------------------------------------------------------- meanwhile

    @property
    def _link(self) -> Link:
        assert self._open is not None, "agents come first"
        return self._open

    def wake(self) -> None:
        """Ends the wait of `receive`; from any thread."""
        self._link.wake()

    def receive(self, wait_s: float) -> list[tuple[Peer, Message]]:
        """All that has come; `hear` takes its own part of it."""
        return self._link.receive(wait_s)

    def hear(self, now: float, peer: Peer, message: Message) -> bool:
        """Whether it was about the processes, and nobody else has to hear of it."""
        match message:
            case Ready() | Beat():
                self.send(self.nodes.receive(now, peer.node, message))
            case Started(node):
                self.send(self.nodes.receive(now, node, message))
            case LogText():
                self._file(peer, message)
            case _:
                return False
        return True

    def bury(self, now: float, exited: Exited) -> Exited | None:
        """Its end as it is to be told; None: it is no node of this life, or was told already."""
        known = self.nodes.nodes.get(exited.node)
        if known is None or not known.alive:
            return None
        self.send(self.nodes.receive(now, exited.node, exited))
        return known.exited or exited

    def why_orphaned(self, exited: Exited) -> LaunchError | None:
        """The end of the agent, where that has ended this node; it may take a moment."""
        return why_orphaned(self.nodes.nodes[exited.node], exited, self._launcher.failure)

    def death(self, exited: Exited) -> LaunchError:
        """A node's end as an error, with where its log is."""
        host = self.nodes.nodes[exited.node].host
        return died(exited.node, exited, host=host, log_path=self._log_path(exited.node))

    def send(self, sends: Iterable[tuple[str, Message]]) -> None:
        """To whom nothing leads yet nothing is said: totals are said again."""
        for to, message in sends:
            if self.nodes.heard_of(to):
                self._link.send(to, message)

    def answer(self, peer: Peer, message: Message) -> None:
        """To whoever has just spoken, be it that it has not beaten yet."""
        self._link.send(peer.node, message)

    def step(self, now: float) -> None:
        """Says again what was not answered; ends what is silent."""
        self.send(self.nodes.step(now))

    def failure(self, now: float) -> LaunchError | None:
        """Of an agent that has ended, or does not answer any more."""
        return self._launcher.failure() or self.nodes.unanswered(now)

    def _file(self, agent: Peer, piece: LogText) -> None:
        node = self.nodes.nodes.get(piece.node)
        answer = self._logs.take(piece) if node and node.agent == agent.node else None
        if answer is not None:
            self.answer(agent, answer)

    # ----------------------------------------------------------------------------------- down

    def say_goodbye(self, *, orderly: bool, quick: bool, pressed: Callable[[], bool]) -> bool:
        """Nodes end by themselves when the run was orderly; else, and after a while, are killed.

        `quick`: nobody waits long. Returns `quick`, or True where `pressed` became true meanwhile.
        Whatever ended the link is raised, unless it is a LaunchError or a RunError, which was told
        or comes too late to matter; it is closed all the same.
        """
        if self._open is None:
            return quick
        with contextlib.ExitStack() as at_end:
            at_end.callback(self._open.close, 0.2)
            at_end.enter_context(contextlib.suppress(LaunchError, RunError))
            deadline = _now() + (GOODBYE_S if orderly else SHORT_GOODBYE_S)
            self.send(self.nodes.finish() if orderly else self.nodes.kill())
            while not self.nodes.all_ended() and _now() < deadline:
                came = self._open.receive(0.1)
                for peer, message in came:
                    if isinstance(message, Exited):
                        self.nodes.receive(_now(), message.node, message)
                    elif isinstance(message, LogText):
                        self._file(peer, message)
                if pressed():
                    quick = True
                    break
                if not came and self._launcher.all_ended():
                    break  # nobody is left who could tell of a node's end
            for agent in self._agents:
                self._open.send(agent.name, Finish())
            # What other hosts still have of their logs comes before their agents end.
            deadline = _now() + (SHORT_GOODBYE_S if quick else LAST_LOGS_S)
            remote = any(agent.keeps_logs for agent in self._agents)
            while remote and not self._launcher.all_ended() and _now() < deadline:
                for peer, message in self._open.receive(0.05):
                    if isinstance(message, LogText):
                        self._file(peer, message)
                if not quick and pressed():
                    quick = True
                    deadline = min(deadline, _now() + SHORT_GOODBYE_S)
        return quick

    def close(self) -> None:
        self._launcher.stop(2.0)
        shutil.rmtree(self._runtime, ignore_errors=True)
