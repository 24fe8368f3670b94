"""The node's loop over a scripted link: order, lease, endings. Real processes: test_agent.py."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any, cast

import pytest

from dbctl.errors import DataError, RunError
from dbctl.keys import KeyRow, Tcp
from dbctl.launch.base import python_command, python_environment
from dbctl.node import loop
from dbctl.node.loop import Ended, Loop, assembly_bytes, build_role, run_node
from dbctl.plan import NodeSpec
from dbctl.process import EXIT_DONE, EXIT_FAILED, EXIT_FENCED, EXIT_ORPHANED, read_line
from dbctl.roles.base import NEVER, NOW, Done, Effects, Record, Send
from dbctl.shards import ShardSpan
from dbctl.wire import Ack, Cut, Finish, Gone, Grant, Message, Peer, Return
from dbctl.wire_processes import Peers, Ready
from tests.cluster.factories import Echo

CONTROLLER = Peer("controller", 1)
WORKER = Peer("worker-0.0", 1)
PEERS = (CONTROLLER, Peers((("shard-0", 2, "ipc:///x/shard-0.2.sock"),)))
FINISH = (CONTROLLER, Finish())


class ScriptedLink:
    """Hands out one batch a call of `receive`; what the loop does to it is in `story`, in order."""

    endpoint = "ipc:///x/me.1.sock"
    tcp_endpoint = "tcp://10.0.0.1:4000"

    def __init__(self, *batches: list[tuple[Peer, Message]]) -> None:
        self.batches = list(batches)
        self.story: list[Any] = []
        self.waits: list[float] = []
        self.steps = 0
        self.closed_by_parent = False
        self.lease = True

    def receive(self, timeout_s: float) -> list[tuple[Peer, Message]]:
        self.waits.append(timeout_s)
        assert self.batches, f"the loop asked for more than the script has; story {self.story}"
        return self.batches.pop(0)

    def send(self, to: str, message: Message) -> None:
        self.story.append((to, message))

    def connect(self, node: str, incarnation: int, endpoint: str) -> None:
        self.story.append(("connect", node, incarnation, endpoint))

    def replace_keys(self, rows: tuple[KeyRow, ...]) -> None:
        if rows:
            self.story.append(("keys", rows))

    def forget(self, peer: Peer) -> None:
        self.story.append(("forget", *peer))

    def lease_in_force(self, now: float) -> bool:
        return self.lease


class ScriptedRole:
    """Says `due` and does what `on_step` says; tells the link's story what it was given."""

    def __init__(self, link: ScriptedLink, due: float = NEVER) -> None:
        self.link = link
        self.due = due
        self.effects: Effects = []

    def start(self, now: float) -> Effects:
        self.link.story.append("start")
        return []

    def receive(self, now: float, sender: Peer, message: Message) -> Effects:
        self.link.story.append(("receive", sender.node, message))
        return []

    def step(self, now: float) -> Effects:
        self.link.story.append("step")
        return self.effects


def run(link: ScriptedLink, role: Any) -> Ended:
    with pytest.raises(Ended) as caught:
        Loop(cast(Any, link), role, "shard-1").run()
    return caught.value


def test_ready_is_said_first_and_with_it_where_the_node_listens() -> None:
    link = ScriptedLink([PEERS, FINISH])
    assert run(link, ScriptedRole(link)).status == EXIT_DONE
    assert link.story[0] == ("controller", Ready(link.endpoint, os.getpid(), link.tcp_endpoint))


def test_peers_are_connected_before_the_role_starts_whatever_came_first() -> None:
    link = ScriptedLink([(WORKER, Cut(1)), PEERS], [FINISH])
    run(link, ScriptedRole(link))
    assert link.story[1:] == [
        ("connect", "shard-0", 2, "ipc:///x/shard-0.2.sock"),
        "start",
        ("receive", "worker-0.0", Cut(1)),
    ]


def test_the_list_of_keys_is_in_force_before_anybody_is_connected_to() -> None:
    rows = (("shard-0", 2, "key"),)
    peers = Peers((("shard-0", 2, "tcp://10.0.0.2:4000"),), rows)
    link = ScriptedLink([(CONTROLLER, peers)], [FINISH])
    run(link, ScriptedRole(link))
    assert link.story[1:3] == [("keys", rows), ("connect", "shard-0", 2, "tcp://10.0.0.2:4000")]


def test_a_node_does_not_connect_to_itself() -> None:
    link = ScriptedLink([(CONTROLLER, Peers((("shard-1", 1, "ipc:///x/me.1.sock"),)))], [FINISH])
    run(link, ScriptedRole(link))
    assert link.story[1:] == ["start"]


def test_ready_is_said_again_each_second_until_somebody_speaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr("dbctl.node.loop._now", lambda: clock[0])

    class Slow(ScriptedLink):
        def receive(self, timeout_s: float) -> list[tuple[Peer, Message]]:
            clock[0] += timeout_s
            return super().receive(timeout_s)

    link = Slow([], [], [], [], [], [PEERS], [FINISH])
    run(link, ScriptedRole(link))
    said = [entry for entry in link.story if isinstance(entry, tuple) and entry[0] == "controller"]
    assert len(said) == 3  # at 0, 1 and 2 seconds; spoken to at 3.0
    assert max(link.waits) <= 0.5


def test_messages_come_before_the_step_and_one_step_a_round() -> None:
    link = ScriptedLink([PEERS], [(WORKER, Cut(1)), (WORKER, Cut(2))], [(WORKER, Cut(3))], [FINISH])
    run(link, ScriptedRole(link, due=NOW))
    assert link.story[2:] == [
        "start",
        ("receive", "worker-0.0", Cut(1)),
        ("receive", "worker-0.0", Cut(2)),
        "step",
        ("receive", "worker-0.0", Cut(3)),
        "step",
    ]
    assert link.steps == 2
    assert link.waits[1:] == [0.0, 0.0, 0.0]


def test_a_role_that_is_not_due_is_not_stepped_and_the_wait_is_bounded() -> None:
    link = ScriptedLink([PEERS], [], [], [FINISH])
    run(link, ScriptedRole(link, due=NEVER))
    assert "step" not in link.story
    assert link.waits[1:] == [0.5, 0.5, 0.5]


def test_the_wait_ends_when_the_role_is_due() -> None:
    link = ScriptedLink([PEERS], [], [FINISH])
    run(link, ScriptedRole(link, due=time.monotonic() + 0.25))
    assert 0.2 < link.waits[1] <= 0.25


def test_effects_become_messages() -> None:
    link = ScriptedLink([PEERS], [(CONTROLLER, Grant(1, 1))], [FINISH])
    run(link, Echo())
    assert link.story[2:] == [("controller", Return(0)), ("controller", Ack(0, 1, 0))]


def test_after_done_a_role_answers_but_is_not_stepped() -> None:
    link = ScriptedLink([PEERS], [], [(WORKER, Cut(9))], [FINISH])
    role = ScriptedRole(link, due=NOW)
    role.effects = [Done("done")]
    assert run(link, role).status == EXIT_DONE
    assert link.story.count("step") == 1
    assert link.story[-1] == ("receive", "worker-0.0", Cut(9))
    assert link.waits[-1] == 0.5  # it waits for Finish, it does not spin


def test_gone_reaches_link_and_role() -> None:
    link = ScriptedLink([PEERS], [(CONTROLLER, Gone("worker-0.0", 1))], [FINISH])
    run(link, ScriptedRole(link))
    assert link.story[-2:] == [
        ("forget", "worker-0.0", 1),
        ("receive", "controller", Gone("worker-0.0", 1)),
    ]


@pytest.mark.parametrize("message", [Finish(), Gone("shard-0", 1), PEERS[1]])
def test_only_the_controller_gives_orders(message: Message) -> None:
    link = ScriptedLink([PEERS], [(WORKER, message)], [FINISH])
    run(link, ScriptedRole(link))
    assert link.story[2:] == ["start"], "nothing was done or passed on"
    assert not link.batches, "and the node went on"


def test_a_node_may_not_write_metrics() -> None:
    link = ScriptedLink([PEERS], [])
    role = ScriptedRole(link, due=NOW)
    role.effects = [Record("progress", {})]
    with pytest.raises(AssertionError, match="may only send, found Record"):
        Loop(cast(Any, link), role, "shard-1").run()


# ---------------------------------------------------------------- the lease (reliability.md, 2)


def test_without_a_lease_nothing_that_came_is_acted_on() -> None:
    class Stopped(ScriptedLink):
        def receive(self, timeout_s: float) -> list[tuple[Peer, Message]]:
            batch = super().receive(timeout_s)
            self.lease = bool(batch and batch[0] == PEERS)  # SIGSTOP for an hour, then SIGCONT
            return batch

    link = Stopped([PEERS], [(WORKER, Cut(1))])
    end = run(link, ScriptedRole(link, due=NOW))
    assert end.status == EXIT_FENCED
    assert "lease" in end.reason
    assert link.story[2:] == ["start"]


def test_a_lease_that_ends_during_a_step_keeps_its_effects_from_everybody() -> None:
    link = ScriptedLink([PEERS], [])

    class Long(ScriptedRole):
        def step(self, now: float) -> Effects:
            link.lease = False
            return [Send("worker-0.0", Ack(0, 1, 1))]

    assert run(link, Long(link, due=NOW)).status == EXIT_FENCED
    assert not any(isinstance(e, tuple) and isinstance(e[1], Ack) for e in link.story)
    assert link.steps == 1  # it was done, and is counted; it is not said


def test_a_lease_that_ends_while_messages_are_taken_stops_between_two() -> None:
    link = ScriptedLink([PEERS], [(WORKER, Cut(1)), (WORKER, Cut(2))])

    class Long(ScriptedRole):
        def receive(self, now: float, sender: Peer, message: Message) -> Effects:
            link.lease = False
            return super().receive(now, sender, message)

    assert run(link, Long(link)).status == EXIT_FENCED
    assert [e for e in link.story if e[0] == "receive"] == [("receive", "worker-0.0", Cut(1))]


def test_the_lease_counts_before_the_node_has_joined_too() -> None:
    link = ScriptedLink()
    link.lease = False
    assert run(link, ScriptedRole(link)).status == EXIT_FENCED
    assert link.story == []


def test_the_end_of_the_parent_ends_the_loop() -> None:
    link = ScriptedLink()
    link.closed_by_parent = True
    assert run(link, ScriptedRole(link)).status == EXIT_ORPHANED


# ---------------------------------------------------------------- the process


def spec(**more: Any) -> NodeSpec:
    fields: dict[str, Any] = {
        "run": "r", "node": "shard-1", "role": "shard", "incarnation": 1, "runtime": "/x",
        "agent": "ipc:///x/agent-0.sock", "lease_s": 5.0, "threads": 1, "experiment": "{}",
        "shards": (),
    }  # fmt: skip
    return NodeSpec(**(fields | more))


def test_a_test_may_name_its_own_role() -> None:
    assert isinstance(build_role(spec(factory="tests.cluster.factories:echo"), None), Echo)


def test_the_spec_is_one_line_and_what_follows_stays_in_the_pipe() -> None:
    read_fd, write_fd = os.pipe()
    try:
        os.write(write_fd, b'{"a": 1}\n')
        assert read_line(read_fd, 100) == b'{"a": 1}'
        os.write(write_fd, b"x" * 101)
        assert read_line(read_fd, 100) is None  # bounded
        os.close(write_fd)
        write_fd = -1
        assert read_line(read_fd, 100) is None  # ended before its newline
    finally:
        os.close(read_fd)
        if write_fd >= 0:
            os.close(write_fd)


def start_node(name: str = "shard-1") -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        python_command("node", name),
        env={**os.environ, **python_environment()},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        (b"", EXIT_ORPHANED, b"the agent is gone"),
        (b"not JSON\n", 1, b"is not a NodeSpec"),
        (b'{"run": "r"}\n', 1, b"is not a NodeSpec"),
    ],
)
def test_a_node_without_a_spec_ends_at_once_and_says_why(
    text: bytes, status: int, said: bytes
) -> None:
    node = start_node()
    _, errors = node.communicate(text, timeout=20)
    assert node.returncode == status
    assert said in errors


def test_nothing_heavy_is_imported_before_the_spec_is_read() -> None:
    code = (
        "import sys, io, os; from dbctl.node import main\n"
        "r, w = os.pipe(); os.dup2(r, 0); os.close(w); os.close(r)\n"
        "status = main.main(['shard-1'])\n"
        "print(status, *sorted(m for m in sys.modules if '.' not in m))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, **python_environment()},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    status, *modules = done.stdout.split()
    assert int(status) == EXIT_ORPHANED
    heavy = {
        "numpy",
        "zmq",
        "msgspec",
        "click",
        "yaml",
        "logging",
        "argparse",
        "asyncio",
    }
    assert not heavy & set(modules)


@pytest.mark.parametrize("role_fails", [False, True])
def test_a_node_whose_link_has_failed_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], role_fails: bool
) -> None:
    """It can tell nobody any more; its agent has the end of its log."""

    class FailedLink:
        closed = False

        def __init__(self, **_: Any) -> None: ...

        def start(self) -> None: ...

        def close(self, linger_s: float) -> None:
            FailedLink.closed = True

        def send(self, *_: object) -> None:
            raise RunError("no descriptor left")

    monkeypatch.setattr(loop, "Link", FailedLink)
    monkeypatch.setattr(loop, "_watch", lambda link, node: None)

    def build(spec: NodeSpec, link: FailedLink) -> None:
        if role_fails:
            raise DataError("x.npz", "was cut")
        link.send()

    monkeypatch.setattr(loop, "build_role", build)
    assert run_node(spec()) == EXIT_FAILED
    [line] = capsys.readouterr().err.splitlines()
    error = "DataError: x.npz: was cut" if role_fails else "RunError: no descriptor left"
    assert line.endswith(f" shard-1 failed: {error}")
    assert FailedLink.closed


def test_memory_for_pieces_suffices_for_all_that_send_some_at_once() -> None:
    """8 workers of other hosts, two slots of 40 MB each: with less they would wait for ever."""
    keys = tuple((f"worker-{i}.0", 1, "") for i in range(8))
    shards = (ShardSpan("shard-0", 0, 10_000_000), ShardSpan("shard-1", 10_000_000, 10_000_003))
    assert assembly_bytes(spec(shards=shards, tcp=Tcp(keys=keys))) == 8 * 2 * 40_000_000
    assert assembly_bytes(spec(shards=shards)) == 2 * 2 * 40_000_000
    assert assembly_bytes(spec()) == 64 << 20
