"""run/processes.py over a link that only notes what is said: who is spoken to, and how all end."""

from __future__ import annotations

from collections.abc import Sequence
from errno import EMFILE
from math import inf
from pathlib import Path
from typing import Any

import pytest

from dbctl.errors import DbctlError, LaunchError, RunError
from dbctl.launch.base import AgentHandle
from dbctl.run import processes as module
from dbctl.run.nodes import Node
from dbctl.run.processes import LAST_LOGS_S, SHORT_GOODBYE_S, Processes
from dbctl.wire import Cut, Exited, Finish, Message, Peer
from dbctl.wire_logs import LogFiled, LogText
from dbctl.wire_processes import Beat, Kill, Lease, Ready, Start, Started

HERE = AgentHandle("agent-0", "here", "ipc:///a", 1)
THERE = AgentHandle("agent-1", "there", "ipc:///b", 2, keeps_logs=True)
SHARD, FAR = Peer("shard-0", 1), Peer("shard-1", 1)


class NotingLink:
    """In the place of the link: `said` to whom, `comes` one list a call of `receive`."""

    def __init__(self, **_: Any) -> None:
        self.said: list[tuple[str, Message]] = []
        self.comes: list[list[tuple[Peer, Message]]] = []
        self.error: Exception | None = None
        self.closed = False

    def start(self) -> None:
        """No thread."""

    def connect(self, *_: object) -> None:
        """Nobody is there."""

    def send(self, to: str, message: Message) -> None:
        self.said.append((to, message))

    def receive(self, wait_s: float) -> list[tuple[Peer, Message]]:
        if self.error is not None:
            raise self.error
        return self.comes.pop(0) if self.comes else []

    def close(self, linger_s: float) -> None:
        self.closed = True


class Agents:
    """In the place of a launcher."""

    def __init__(self) -> None:
        self.error: LaunchError | None = None
        self.over = True
        self.stopped = False

    def start(self) -> list[AgentHandle]:
        return [HERE, THERE]

    def failure(self) -> LaunchError | None:
        return self.error

    def all_ended(self) -> bool:
        return self.over

    def stop(self, timeout_s: float) -> None:
        self.stopped = True


class Staged:
    """Processes with one shard on each host; `link` and `agents` are what is in their place."""

    def __init__(self, path: Path) -> None:
        self.logs = path / "logs"
        self.logs.mkdir()
        self.runtime = path / "sockets"
        self.runtime.mkdir()
        self.agents = Agents()
        self.processes = Processes(
            run="r",
            runtime=str(self.runtime),
            launcher=self.agents,  # type: ignore[arg-type]
            lease_s=5.0,
            log_path=lambda node: str(self.logs / f"{node}.log"),
        )

    def bring_up(self) -> None:
        self.processes.bring_agents()
        self.processes.plan_nodes(_nodes)
        self.processes.start(0.0)
        self.link.said.clear()

    @property
    def link(self) -> NotingLink:
        link = self.processes._open
        assert isinstance(link, NotingLink)
        return link


def _nodes(agents: Sequence[AgentHandle]) -> dict[str, Node]:
    return {
        f"shard-{i}": Node(Start(f"shard-{i}", 1, ("x",), (), ""), agent.name, (), host=agent.host)
        for i, agent in enumerate(agents)
    }


@pytest.fixture
def staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Staged:
    monkeypatch.setattr(module, "Link", NotingLink)
    return Staged(tmp_path)


def never() -> bool:
    return False


def test_agents_are_told_the_way_before_nodes_are_ordered(staged: Staged) -> None:
    staged.processes.bring_agents()
    assert staged.link.said == [("agent-0", Lease(0)), ("agent-1", Lease(0))]
    staged.processes.plan_nodes(_nodes)
    assert len(staged.link.said) == 2
    staged.processes.start(0.0)
    assert [to for to, order in staged.link.said if isinstance(order, Start)] == [
        "agent-0",
        "agent-1",
    ]


def test_to_whom_nothing_leads_yet_only_its_own_question_is_answered(staged: Staged) -> None:
    staged.bring_up()
    staged.processes.send([("shard-0", Cut(1))])
    assert staged.link.said == []
    staged.processes.answer(SHARD, Cut(2))
    assert staged.processes.hear(1.0, SHARD, Beat(1, 0, 0))
    staged.processes.send([("shard-0", Cut(3))])
    assert staged.link.said == [("shard-0", Cut(2)), ("shard-0", Cut(3))]


def test_what_concerns_the_processes_nobody_else_has_to_hear(staged: Staged) -> None:
    staged.bring_up()
    for message in (Ready("ipc://s", 7), Beat(1, 0, 0), Started("shard-0", 1, 7)):
        assert staged.processes.hear(0.0, SHARD, message)
    for other in (Cut(1), Exited("shard-0", 1, 0, "")):
        assert not staged.processes.hear(0.0, SHARD, other)


def test_a_log_is_taken_of_its_own_agent_on_another_host(staged: Staged) -> None:
    staged.bring_up()
    for agent, node in (("agent-0", "shard-0"), ("agent-0", "shard-1"), ("agent-1", "shard-0")):
        staged.processes.hear(0.0, Peer(agent, 1), LogText(node, 0, b"false"))
    staged.processes.hear(0.0, Peer("agent-1", 1), LogText("../x", 0, b"false"))
    assert staged.link.said == []
    staged.processes.hear(0.0, Peer("agent-1", 1), LogText("shard-1", 0, b"true"))
    assert staged.link.said == [("agent-1", LogFiled("shard-1", 4))]
    assert [path.read_text() for path in staged.logs.iterdir()] == ["true"]


def test_a_death_is_told_once_and_with_its_place(staged: Staged) -> None:
    staged.bring_up()
    exited = Exited("shard-1", 1, 3, "the tail")
    assert staged.processes.bury(1.0, exited) == exited
    assert staged.processes.bury(1.0, exited) is None
    assert staged.processes.bury(1.0, Exited("shard-9", 1, 3, "")) is None
    error = staged.processes.death(exited)
    assert "shard-1 on there ended with exit status 3" in str(error)
    assert error.log_path == str(staged.logs / "shard-1.log")


def test_while_they_come_up_the_end_of_an_agent_is_the_end(staged: Staged) -> None:
    staged.bring_up()
    staged.processes.step_start(0.1)
    staged.agents.error = LaunchError("agent-1", "ended early")
    with pytest.raises(LaunchError, match="agent-1 ended early"):
        staged.processes.step_start(0.1)


# ------------------------------------------------------------------------------------------- down


@pytest.mark.parametrize("orderly", [True, False])
def test_nodes_end_before_their_agents(staged: Staged, orderly: bool) -> None:
    staged.bring_up()
    for peer in (SHARD, FAR):
        staged.processes.hear(0.0, peer, Beat(1, 0, 0))
    ends = [Exited(peer.node, 1, 0, "") for peer in (SHARD, FAR)]
    staged.link.comes = [[(Peer("agent-0", 1), ends[0])], [(Peer("agent-1", 1), ends[1])]]
    assert not staged.processes.say_goodbye(orderly=orderly, quick=False, pressed=never)
    first, second = (
        [("shard-0", Finish()), ("shard-1", Finish())]
        if orderly
        else [("agent-0", Kill("shard-0", 1)), ("agent-1", Kill("shard-1", 1))]
    )
    assert staged.link.said == [first, second, ("agent-0", Finish()), ("agent-1", Finish())]
    assert staged.link.closed


def test_where_all_agents_have_ended_nobody_is_waited_for(
    staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they had said by then is taken all the same."""
    now, ended = 1000.0, Exited("shard-0", 1, 0, "")
    comes = [[(Peer("agent-1", 1), LogText("shard-1", 0, b"a"))], [(Peer("agent-0", 1), ended)]]

    def receive(wait_s: float) -> list[tuple[Peer, Message]]:
        nonlocal now
        now += wait_s
        return comes.pop(0) if comes else []

    staged.bring_up()
    monkeypatch.setattr(module, "_now", lambda: now)
    monkeypatch.setattr(staged.link, "receive", receive)
    assert not staged.processes.say_goodbye(orderly=True, quick=False, pressed=never)
    assert now - 1000.0 < 0.5
    assert staged.processes.nodes.nodes["shard-0"].exited == ended


def test_who_is_pressed_waits_no_longer(staged: Staged) -> None:
    staged.bring_up()
    assert staged.processes.say_goodbye(orderly=True, quick=False, pressed=lambda: True)
    assert staged.link.said[-2:] == [("agent-0", Finish()), ("agent-1", Finish())]


@pytest.mark.parametrize("after_s", [0.0, LAST_LOGS_S - 0.1])
def test_who_is_pressed_while_the_last_logs_come_waits_no_longer(
    staged: Staged, monkeypatch: pytest.MonkeyPatch, after_s: float
) -> None:
    """G11: a second signal ends everything in 2 s, however late it comes; nor does it add to it."""
    now, told_at = 1000.0, inf

    def receive(wait_s: float) -> list[tuple[Peer, Message]]:
        nonlocal now, told_at
        if ("agent-1", Finish()) in staged.link.said:
            told_at = min(told_at, now)
        now += wait_s
        return []

    staged.bring_up()
    staged.agents.over = False
    monkeypatch.setattr(module, "_now", lambda: now)
    monkeypatch.setattr(staged.link, "receive", receive)
    assert staged.processes.say_goodbye(
        orderly=False, quick=False, pressed=lambda: now > told_at + after_s
    )
    wanted_s = min(after_s + SHORT_GOODBYE_S, LAST_LOGS_S)
    assert now - told_at == pytest.approx(wanted_s, abs=0.15)


def test_the_rest_of_a_log_comes_before_its_agent_ends(
    staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHORT_GOODBYE_S", 0.05)
    staged.bring_up()
    staged.agents.over = False
    staged.link.comes = [[], [(Peer("agent-1", 1), LogText("shard-1", 0, b"last words"))]]
    staged.processes.say_goodbye(orderly=False, quick=True, pressed=lambda: True)
    assert (staged.logs / "shard-1.log").read_text() == "last words"


@pytest.mark.parametrize(
    "error", [LaunchError("controller", "is cut off"), RunError("no descriptor left")]
)
def test_a_link_that_fails_keeps_nothing_from_its_end(staged: Staged, error: DbctlError) -> None:
    """What the session has of it, or what comes when nothing depends on it any more."""
    staged.bring_up()
    staged.link.error = error
    assert staged.processes.say_goodbye(orderly=False, quick=True, pressed=never)
    assert staged.link.closed


def test_what_ended_the_link_is_told_and_the_link_is_closed(staged: Staged) -> None:
    staged.bring_up()
    staged.link.error = OSError(EMFILE, "too many open files")
    with pytest.raises(OSError, match="too many open files"):
        staged.processes.say_goodbye(orderly=True, quick=False, pressed=never)
    assert staged.link.closed


def test_before_anything_was_brought_up_there_is_only_a_directory_to_remove(staged: Staged) -> None:
    assert not staged.processes.say_goodbye(orderly=True, quick=False, pressed=never)
    staged.processes.close()
    assert staged.agents.stopped
    assert not staged.runtime.exists()
