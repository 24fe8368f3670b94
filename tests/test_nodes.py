"""dbctl/run/nodes.py: processes as the controller sees them; times are arguments."""

from __future__ import annotations

from typing import Any

import pytest

from dbctl.errors import LaunchError
from dbctl.process import EXIT_FAILED, EXIT_ORPHANED
from dbctl.run.nodes import (
    END_S,
    REPEAT_S,
    START_LIMIT_S,
    Node,
    Nodes,
    describe_end,
    died,
    tail_beside,
    why_orphaned,
)
from dbctl.wire import Exited, Finish
from dbctl.wire_processes import Beat, Kill, Peers, Ready, Start, Started

AGENT = "agent-0"
LEASE_S = 10.0


def node(name: str, **changes: Any) -> Node:
    given: dict[str, Any] = {"talks_to": (), "agent": AGENT}
    return Node(order=Start(name, 1, ("true",), (), ""), **(given | changes))


def made(**nodes: Node) -> Nodes:
    return Nodes({node.order.node: node for node in nodes.values()}, lease_s=LEASE_S)


def pair(**changes: Any) -> Nodes:
    """Replica 0 in two partitions, and replica 1 whole."""
    return made(
        a=node("worker-0.0", partners=("worker-0.1",), **changes),
        b=node("worker-0.1", partners=("worker-0.0",), **changes),
        c=node("worker-1.0", **changes),
    )


def joined(nodes: Nodes) -> Nodes:
    """All have been ordered, and have said Ready."""
    nodes.start(0.0)
    for name in nodes.nodes:
        nodes.receive(0.0, name, Ready(f"ipc://{name}", 7))
    nodes.begin(0.0)
    return nodes


def beat(nodes: Nodes, now: float, *names: str) -> None:
    for name in names:
        nodes.receive(now, name, Beat(1, 5, 1 << 20))


def exited(name: str, status: int = -9, word: str = "") -> Exited:
    return Exited(name, 1, status, "", word)


# --------------------------------------------------------------------------------------- joining


def test_an_order_is_said_again_until_its_node_is_ready() -> None:
    nodes = made(a=node("shard-0"))
    order = (AGENT, nodes.nodes["shard-0"].order)
    assert nodes.start(0.0) == [order]
    assert nodes.step(REPEAT_S / 2) == []
    assert nodes.step(REPEAT_S) == [order]
    nodes.receive(REPEAT_S, "shard-0", Ready("ipc://there", 7))
    assert nodes.step(3 * REPEAT_S) == []


def test_who_is_not_needed_is_started_when_the_others_are_ready() -> None:
    nodes = made(a=node("shard-0"), b=node("evaluator-0", talks_to=("shard-0",), needed=False))
    assert [order.node for _, order in nodes.start(0.0) if isinstance(order, Start)] == ["shard-0"]
    nodes.receive(0.0, "shard-0", Ready("ipc://s", 7))
    assert nodes.ready
    assert nodes.begin(0.0) == [
        ("shard-0", Peers(())),
        (AGENT, nodes.nodes["evaluator-0"].order),
    ]
    assert nodes.receive(0.1, "evaluator-0", Ready("ipc://e", 8)) == [
        ("evaluator-0", Peers((("shard-0", 1, "ipc://s"),)))
    ]


def test_of_two_partners_the_first_is_told_when_the_second_is_up() -> None:
    """Else it could answer the other only by the way that its messages came."""
    one, two = "evaluator-0.0", "evaluator-0.1"
    nodes = made(
        a=node("shard-0"),
        b=node(one, talks_to=("shard-0", two), needed=False),
        c=node(two, talks_to=("shard-0", one), needed=False),
    )
    nodes.start(0.0)
    nodes.receive(0.0, "shard-0", Ready("ipc://s", 7))
    nodes.begin(0.0)
    shard = ("shard-0", 1, "ipc://s")
    assert nodes.receive(0.1, one, Ready("ipc://1", 8)) == [(one, Peers((shard,)))]
    assert nodes.receive(0.2, two, Ready("ipc://2", 9)) == [
        (two, Peers((shard, (one, 1, "ipc://1")))),
        (one, Peers((shard, (two, 1, "ipc://2")))),
    ]


def test_a_node_that_ends_before_it_is_ready_is_named() -> None:
    nodes = made(a=node("shard-0"))
    nodes.start(0.0)
    nodes.check_start(0.1, str)
    nodes.receive(0.1, "shard-0", exited("shard-0", 1, "DataError: no such file"))
    with pytest.raises(LaunchError, match=r"shard-0.*exit status 1: DataError: no such file"):
        nodes.check_start(0.1, str)


def test_a_node_that_neither_beats_nor_is_ready_is_late() -> None:
    nodes = made(a=node("shard-0"))
    nodes.start(0.0)
    beat(nodes, START_LIMIT_S, "shard-0")
    nodes.check_start(START_LIMIT_S + 1, str)  # it lives: loading takes its time
    with pytest.raises(LaunchError, match=r"shard-0.*was not ready"):
        nodes.check_start(START_LIMIT_S + LEASE_S + 1, str)


# ---------------------------------------------------------------------------------------- deaths


def test_one_dead_partition_ends_its_replica_and_only_that() -> None:
    """reliability.md, G4; paper A, section 3: the partitions of a replica compute together."""
    nodes = joined(pair())
    kill = (AGENT, Kill("worker-0.0", 1))
    assert nodes.receive(1.0, "worker-0.1", exited("worker-0.1")) == [kill]
    beat(nodes, 1.0 + REPEAT_S, "worker-0.0", "worker-1.0")  # the order was lost
    assert nodes.step(1.0 + REPEAT_S / 2) == []
    assert nodes.step(1.0 + REPEAT_S) == [kill]
    assert nodes.receive(2.5, "worker-0.0", exited("worker-0.0")) == []
    assert nodes.nodes["worker-0.0"].exited == exited(
        "worker-0.0", word="its replica ended with worker-0.1"
    )
    assert nodes.nodes["worker-1.0"].alive
    assert nodes.step(3.0) == []


def test_who_does_not_beat_for_a_lease_is_ended_and_told_as_silent() -> None:
    nodes = joined(made(a=node("worker-0.0"), b=node("worker-1.0")))
    beat(nodes, 1.0, "worker-0.0", "worker-1.0")
    beat(nodes, 9.0, "worker-1.0")
    assert nodes.step(1.0 + LEASE_S) == []
    late = 2.0 + LEASE_S
    assert nodes.step(late) == [(AGENT, Kill("worker-0.0", 1))]
    assert nodes.unanswered(late + LEASE_S) is None
    beat(nodes, late + LEASE_S, "worker-1.0")
    error = nodes.unanswered(late + LEASE_S + 0.1)
    assert error is not None
    assert error.node == AGENT
    nodes.receive(late, "worker-0.0", exited("worker-0.0"))
    word = nodes.nodes["worker-0.0"].exited
    assert word is not None
    assert word.word == "nothing was heard of it for 10 s"
    assert nodes.unanswered(late + LEASE_S + 0.1) is None


def test_a_node_that_ends_because_its_agent_does_is_no_death() -> None:
    """What is told is the agent's end, which is known a moment later."""
    answers: list[LaunchError | None] = [None, None, LaunchError(AGENT, "its cluster was stopped")]
    nodes = joined(pair())
    a, b, _ = nodes.nodes.values()
    error = why_orphaned(a, exited("worker-0.0", EXIT_ORPHANED), lambda: answers.pop(0))
    assert str(error) == f"{AGENT} its cluster was stopped"
    assert answers == []

    def never() -> LaunchError:
        raise AssertionError("asked")

    assert why_orphaned(a, exited("worker-0.0", EXIT_FAILED), never) is None
    nodes.receive(1.0, "worker-0.0", exited("worker-0.0", EXIT_FAILED))
    assert b.killed_at == 1.0, "with its partner"
    assert why_orphaned(b, exited("worker-0.1", EXIT_ORPHANED), never) is None


def test_nobody_is_silent_while_nobody_reads() -> None:
    """A loop that waited for its disk counts the silence from the end of that."""
    nodes = joined(pair())
    late = 3 * LEASE_S
    nodes.excuse(late)
    assert nodes.step(late + LEASE_S - 0.1) == []
    assert {kill.node for _, kill in nodes.step(late + LEASE_S + 0.1) if isinstance(kill, Kill)}
    assert nodes.unanswered(late + 2 * LEASE_S + 0.2) is not None
    nodes.excuse(late + 2 * LEASE_S)
    assert nodes.unanswered(late + 3 * LEASE_S - 0.1) is None, "the agent's answer may wait unread"
    assert nodes.unanswered(late + 3 * LEASE_S + 0.1) is not None


def test_an_agent_that_starts_nothing_for_a_lease_is_told() -> None:
    """It was stopped: one that is slow says of each node that it is started, and goes on."""
    nodes = pair()
    nodes.start(0.0)
    assert nodes.unanswered(LEASE_S + END_S - 0.1) is None, "its own lease ends it, and it says so"
    nodes.receive(LEASE_S - 0.1, "worker-0.0", Started("worker-0.0", 1, 7))
    assert nodes.unanswered(LEASE_S + END_S + 0.1) is None
    error = nodes.unanswered(2 * LEASE_S + END_S)
    assert error is not None
    assert "told to start worker-0.0 12 s ago" in str(error)
    nodes.excuse(2 * LEASE_S)
    assert nodes.unanswered(3 * LEASE_S - 0.1) is None, "its answer may wait unread"
    for name in ("worker-0.1", "worker-1.0"):
        nodes.receive(2 * LEASE_S, name, Started(name, 1, 7))
    assert nodes.unanswered(3 * LEASE_S + END_S - 0.1) is None, "the nodes are loading"


def test_an_agent_that_is_stopped_while_its_nodes_load_is_told() -> None:
    """And not, a minute later, a node of it. Orders are said again, and answered each time."""
    nodes = pair()
    nodes.start(0.0)
    for name in nodes.nodes:
        nodes.receive(0.1, name, Started(name, 1, 7))
    for now in (LEASE_S, 2 * LEASE_S, 3 * LEASE_S):
        nodes.receive(now, "worker-1.0", Started("worker-1.0", 1, 7))
        assert nodes.unanswered(now + LEASE_S) is None, "the nodes are loading"
    error = nodes.unanswered(4 * LEASE_S + END_S + 0.1)
    assert error is not None
    assert error.node == AGENT
    for name in nodes.nodes:
        nodes.receive(3 * LEASE_S, name, Ready(f"ipc://{name}", 7))
    assert nodes.unanswered(9 * LEASE_S) is None, "no order waits for an answer"


def test_an_agent_that_does_not_end_a_node_that_loads_is_told_after_a_lease() -> None:
    """Its partner died: that node will not be ready, and its agent does not answer for it."""
    nodes = pair()
    nodes.start(0.0)
    for name in nodes.nodes:
        nodes.receive(0.1, name, Started(name, 1, 7))
    assert nodes.receive(1.0, "worker-0.0", exited("worker-0.0")) == [
        (AGENT, Kill("worker-0.1", 1))
    ]
    assert nodes.unanswered(1.0 + LEASE_S) is None
    error = nodes.unanswered(1.0 + LEASE_S + 0.1)
    assert error is not None
    assert "told to end worker-0.1 10 s ago" in str(error)


def test_the_first_beat_of_many_may_be_late() -> None:
    """Thirty-two interpreters that load on two cores."""
    nodes = made(a=node("worker-0.0"))
    nodes.start(0.0)
    kills = [m for _, m in nodes.step(LEASE_S + 1) if isinstance(m, Kill)]
    assert kills == []
    assert (AGENT, Kill("worker-0.0", 1)) in nodes.step(START_LIMIT_S + 1)


# --------------------------------------------------------------------------------------- the end


def test_only_who_lives_is_told_to_finish_or_killed() -> None:
    nodes = joined(pair())
    nodes.receive(1.0, "worker-1.0", exited("worker-1.0"))
    assert nodes.finish() == [("worker-0.0", Finish()), ("worker-0.1", Finish())]
    assert nodes.kill() == [(AGENT, Kill("worker-0.0", 1)), (AGENT, Kill("worker-0.1", 1))]
    assert not nodes.all_ended()
    for name in ("worker-0.0", "worker-0.1"):
        nodes.receive(1.0, name, exited(name, 0))
    assert nodes.all_ended()


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (exited("a", -9), "was killed by SIGKILL"),
        (exited("a", -200), "was killed by signal 200"),
        (exited("a", 3, "MemoryError"), "ended with exit status 3: MemoryError"),
    ],
)
def test_an_end_in_words(end: Exited, said: str) -> None:
    assert describe_end(end) == said


@pytest.mark.parametrize(
    ("tail", "kept"),
    [
        ("begins\n12:00:00 a failed: DataError: d: no room\n", False),
        ("begins\n12:00:00 a failed\nTraceback\nDataError: d: no room\n", True),
        ("begins\n", True),
        ("", True),
    ],
)
def test_what_a_node_said_itself_is_not_told_twice(tail: str, kept: bool) -> None:
    end = Exited("a", 1, 1, tail, "DataError: d: no room")
    error = died("a", end, host="h", log_path="a.log")
    assert str(error).count("no room") == (2 if kept and "no room" in tail else 1)
    assert error.log_tail == (tail if kept else "")
    assert tail_beside(Exited("a", 1, -9, "failed: ")) == "failed: ", "it said nothing"


def test_of_whom_nothing_was_heard_its_agent_ends() -> None:
    """Nothing leads to it yet: what is said to it would be lost with a warning."""
    nodes = made(a=node("shard-0"), b=node("evaluator-0", needed=False), c=node("worker-0.0"))
    nodes.start(0.0)
    nodes.receive(0.0, "shard-0", Ready("ipc://s", 7))
    nodes.receive(0.0, "worker-0.0", exited("worker-0.0"))
    assert nodes.finish() == [("shard-0", Finish())], "who was not started needs no end"
    nodes.begin(0.1)
    assert nodes.finish() == [("shard-0", Finish()), (AGENT, Kill("evaluator-0", 1))]
    assert [nodes.heard_of(n) for n in ("shard-0", "evaluator-0", AGENT)] == [True, False, True]
    beat(nodes, 0.2, "evaluator-0")
    assert nodes.finish() == [("shard-0", Finish()), ("evaluator-0", Finish())]


# ------------------------------------------------------------------------------- other hosts


def test_nodes_of_other_hosts_are_told_tcp_and_the_keys_in_force() -> None:
    """Peers is a total: a death takes the key out of the list of all who let that node in."""
    shard = Node(Start("shard-0", 1, (), (), ""), "agent-0", (), apart=["worker-0.0", "worker-1.0"])
    near, far = (
        Node(Start(f"worker-{r}.0", 1, (), (), ""), "agent-0", ["shard-0"], public=f"key-{r}")
        for r in range(2)
    )
    shard.public = "key-s"
    near.apart = far.apart = ["shard-0"]
    nodes = Nodes({"shard-0": shard, "worker-0.0": near, "worker-1.0": far}, lease_s=10.0)
    nodes.start(0.0)
    for name in nodes.nodes:
        nodes.receive(0.0, name, Ready(f"ipc://{name}", 7, f"tcp://{name}"))
    introduced = dict(nodes.begin(0.0))
    assert introduced["worker-0.0"] == Peers(
        (("shard-0", 1, "tcp://shard-0"),), (("shard-0", 1, "key-s"),)
    )
    rows = (("worker-0.0", 1, "key-0"), ("worker-1.0", 1, "key-1"))
    assert introduced["shard-0"] == Peers((), rows)
    ended = nodes.receive(1.0, "worker-0.0", Exited("worker-0.0", 1, -9, ""))
    assert ended == [("shard-0", Peers((), rows[1:]))]
