"""A controller for tests with real processes: one agent, nodes with roles of tests, what they said.

As a program (`python -m tests.cluster.harness RUNTIME LOGS LEASE_S N`) it is a controller with N
echoing nodes that prints their process numbers and stays, to be killed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from dbctl.launch.base import AgentHandle, make_runtime, start_order
from dbctl.launch.local import LocalLauncher
from dbctl.plan import NodeSpec
from dbctl.process import clear_runtime
from dbctl.transport.link import Link
from dbctl.wire import Exited, Finish, Message, Peer, Return
from dbctl.wire_processes import Peers, Ready, Started

LIMIT_S = 20.0
M = TypeVar("M", bound=Message)


class Cluster:
    """`heard` is everything that came, with its time; beats are answered by the link."""

    def __init__(self, logs: Path, *, lease_s: float = 10.0, runtime: str = "") -> None:
        self.logs = logs
        self.lease_s = lease_s
        self.runtime = runtime or make_runtime()
        self.run = f"test-{os.getpid()}"
        self.launcher = LocalLauncher(
            runtime=self.runtime, run=self.run, logs=logs, lease_s=lease_s
        )
        self.link = Link(run=self.run, node="controller", incarnation=1, listen=None)
        self.heard: list[tuple[float, Peer, Message]] = []
        self.agent: AgentHandle | None = None

    def __enter__(self) -> Cluster:
        self.launcher.start_async()
        self.link.start()
        self.link.answer_beats = True
        [self.agent] = self.launcher.wait_ready()
        self.link.connect(self.agent.name, self.agent.incarnation, self.agent.endpoint)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.link.close(0.0)
        self.launcher.stop(5.0)
        clear_runtime(self.runtime)

    @property
    def agent_pid(self) -> int:
        assert self.agent is not None
        return self.agent.pid

    def spec(self, node: str, factory: str, incarnation: int = 1, **settings: Any) -> NodeSpec:
        assert self.agent is not None
        return NodeSpec(
            run=self.run,
            node=node,
            role="worker",
            incarnation=incarnation,
            runtime=self.runtime,
            agent=self.agent.endpoint,
            lease_s=self.lease_s,
            threads=1,
            experiment=json.dumps(settings),
            shards=(),
            factory=f"tests.cluster.factories:{factory}",
        )

    def start(self, node: str, factory: str = "echo", *, incarnation: int = 1, **more: Any) -> int:
        """Starts a node and waits for its Started; its process number."""
        self.link.send("agent-0", start_order(self.spec(node, factory, incarnation, **more)))
        return self.wait(Started, node, incarnation).pid

    def join(self, node: str, incarnation: int = 1) -> Ready:
        """Waits for a node's Ready and tells it its peers (none); it answers Return(0)."""
        ready = self.wait(Ready, node, incarnation)
        self.link.send(node, Peers(()))
        self.wait(Return, node, incarnation)
        return ready

    def wait(
        self,
        kind: type[M],
        node: str,
        incarnation: int = 1,
        *,
        limit_s: float = LIMIT_S,
        where: Callable[[M], bool] = lambda message: True,
    ) -> M:
        """The first such message of (or, of the agent's, about) that life of `node`."""
        deadline = time.monotonic() + limit_s
        seen = 0
        while True:
            for _, peer, message in self.heard[seen:]:
                about = (
                    (message.node, message.incarnation)
                    if isinstance(message, Exited | Started)
                    else tuple(peer)
                )
                if isinstance(message, kind) and about == (node, incarnation) and where(message):
                    return message
            seen = len(self.heard)
            left_s = deadline - time.monotonic()
            assert left_s > 0.0, f"no {kind.__name__} of {node} in {limit_s} s: {self.story()}"
            now = time.monotonic()
            self.heard += [(now, *item) for item in self.link.receive(min(left_s, 0.5))]

    def story(self) -> str:
        """What was heard, and every log: for a failed assertion."""
        heard = [f"{peer} {message}" for _, peer, message in self.heard[-30:]]
        logs = [f"== {path.name}\n{path.read_text()}" for path in sorted(self.logs.glob("*.log"))]
        return "\n".join([*heard, *logs])


def state(pid: int) -> str:
    """The letter of /proc/PID/stat: R, S, D, T (stopped), Z (dead, not reaped); "" = no such."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def wait_until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> float:
    """Seconds until `condition` held; an assertion fails when it does not in time."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < limit_s, f"did not happen in {limit_s} s"
        time.sleep(0.005)
    return time.monotonic() - begin


def wait_gone(*pids: int, limit_s: float) -> float:
    """Seconds until none of `pids` runs (dead and not reaped counts as gone)."""
    return wait_until(lambda: all(state(pid) in ("", "Z") for pid in pids), limit_s)


def main() -> None:
    runtime, logs, lease_s, n = sys.argv[1:]
    with Cluster(Path(logs), lease_s=float(lease_s), runtime=runtime) as cluster:
        nodes = [f"worker-{i}.0" for i in range(int(n))]
        pids = [cluster.start(node) for node in nodes]
        for node in nodes:
            cluster.join(node)
        cluster.link.send("nobody", Finish())
        print(json.dumps({"agent": cluster.agent_pid, "nodes": pids}), flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
