"""`dbctl status` and `dbctl logs`: what status.json holds, and how it is shown."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dbctl.cli.main import main
from dbctl.errors import RunError, UsageError
from dbctl.experiment.specs import HostSpec, StopSpec
from dbctl.progress.display import make_display
from dbctl.roles.base import Record
from dbctl.roles.coordinator import Coordinator, CoordinatorStart
from dbctl.roles.figures import Part
from dbctl.roles.records import shard_fields
from dbctl.run import show_logs
from dbctl.run.cluster_hosts import NodeSaid, RunSaid, Said, Seen
from dbctl.run.clusters import Cluster
from dbctl.run.nodes import Node, Nodes
from dbctl.run.records import RunRecords, node_fields
from dbctl.run.show import Shown, cluster_lines, cluster_object, cluster_rows, look
from dbctl.run.show_logs import logs
from dbctl.run.show_run import aligned, of_run, run_lines, run_object
from dbctl.rundir import RunDir, RunInfo, create
from dbctl.wire import Exited, ShardReport
from dbctl.wire_processes import Start

WORKER = {
    "node": "worker-0.0",
    "state": "running",
    "step": 460,
    "examples_per_second": 1234.5,
    "bytes_pushed": 100,
    "bytes_exchanged": 11,
    "bytes_fetched": 200,
    "staleness": {0: 1, 2: 3},
}
SHARD = {
    "node": "shard-0",
    "updates": 920,
    "bytes_in": 7,
    "bytes_out": 9,
    "staleness": {"worker-0.0": {0: 1, 2: 3}},
}


def node(**changes: Any) -> Node:
    order = Start("shard-0", 1, ("x",), (), "{}")
    known = {"endpoint": "ipc:///x", "pid": 17, "rss_bytes": 3 << 20}
    return Node(order, "agent-1", (), host="left", **(known | changes))


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[RunDir]:
    with create(tmp_path / "run", "x") as found:
        found.write_info(RunInfo.of_this_process("r", control="/c", command=["dbctl"]))
        yield found


# ---------------------------------------------------------------------------------- status.json


def test_a_worker_in_status_json() -> None:
    assert node_fields(node(), WORKER) == {
        "host": "left",
        "agent": "agent-1",
        "state": "running",
        "pid": 17,
        "alive": True,
        "steps": 460,
        "examples_per_second": 1234.5,
        "staleness": 1.5,
        "rss_bytes": 3 << 20,
        "bytes_in": 200,
        "bytes_out": 111,
    }


def test_a_shard_in_status_json() -> None:
    """Its steps are updates. Staleness is the workers': a shard has none of its own."""
    found = node_fields(node(), SHARD)
    assert found["steps"] == 920
    assert (found["state"], found["staleness"], found["examples_per_second"]) == ("up", None, None)
    assert (found["bytes_in"], found["bytes_out"]) == (7, 9)


@pytest.mark.parametrize(
    ("changes", "state", "alive"),
    [
        ({"endpoint": ""}, "starting", True),
        ({}, "up", True),
        ({"exited": Exited("a", 1, 0, "")}, "ended", False),
        ({"exited": Exited("a", 1, -9, "")}, "was killed by SIGKILL", False),
        (
            {"exited": Exited("a", 1, 1, "", "no\nroom")},
            "ended with exit status 1: no\nroom",
            False,
        ),
    ],
)
def test_the_state_of_a_node(changes: dict[str, Any], state: str, alive: bool) -> None:
    found = node_fields(node(**changes), {})
    assert (found["state"], found["alive"]) == (state, alive)
    assert found["bytes_in"] is None
    assert found["bytes_out"] is None


def test_the_last_report_of_each_node_is_in_status_json(run_dir: RunDir) -> None:
    start = CoordinatorStart(
        workers={0: ("worker-0.0",)},
        parts={0: Part(rows=4, steps_per_epoch=2)},
        shards=["shard-0"],
        stop=StopSpec(steps=1),
    )
    display = make_display(json=False, stderr_is_tty=False, out=io.StringIO(), err=io.StringIO())
    records = RunRecords(run_dir, display, Coordinator(start), run="r", now=lambda: 0.0)
    for rate in (1.0, 2.0):
        records.record(Record("worker", WORKER | {"examples_per_second": rate}))
    records.record(Record("shard", SHARD))
    nodes = Nodes({"worker-0.0": node(), "shard-0": node(), "evaluator-0": node()}, lease_s=1.0)
    records.write_status(0.0, nodes, "running")
    assert run_dir.read_status()["reason"] is None
    records.write_status(0.0, nodes, "failed", reason="shard-0 died")
    assert run_dir.read_status()["reason"] == "shard-0 died"
    records.close()
    found = run_dir.read_status()["nodes"]
    assert found["worker-0.0"]["examples_per_second"] == 2.0
    assert found["shard-0"]["bytes_in"] == 7
    assert found["evaluator-0"]["state"] == "up"


def test_the_staleness_of_a_worker_is_what_the_shards_said_last(run_dir: RunDir) -> None:
    """They say it a second later than it reports, or at the end of a run that lasts less."""
    start = CoordinatorStart(
        workers={0: ("worker-0.0",)},
        parts={0: Part(rows=4, steps_per_epoch=2)},
        shards=["shard-0"],
        stop=StopSpec(steps=1),
    )
    coordinator = Coordinator(start)
    display = make_display(json=False, stderr_is_tty=False, out=io.StringIO(), err=io.StringIO())
    records = RunRecords(run_dir, display, coordinator, run="r", now=lambda: 0.0)
    records.record(Record("worker", WORKER | {"staleness": {}}))
    counts = (("worker-0.0", 0, 1), ("worker-0.0", 2, 3))
    report = ShardReport(1, 4, 4, 7, 9, 0, (), counts)
    coordinator.figures.shard_report("shard-0", report)
    records.record(Record("shard", shard_fields("shard-0", report)))
    nodes = Nodes({"worker-0.0": node(), "shard-0": node()}, lease_s=1.0)
    records.write_status(0.0, nodes, "done")
    records.close()
    found = run_dir.read_status()["nodes"]
    assert (found["worker-0.0"]["staleness"], found["shard-0"]["staleness"]) == (1.5, None)


# ---------------------------------------------------------------------------------------- a run

STATUS: dict[str, Any] = {
    "run": "r",
    "state": "running",
    "steps": 1200,
    "epochs": 3.25,
    "examples_per_second": 24000.4,
    "test_accuracy": 0.975,
    "nodes": {"worker-0.0": node_fields(node(), WORKER), "shard-0": node_fields(node(), SHARD)},
}


def test_a_run_that_is_going_on(run_dir: RunDir) -> None:
    run_dir.write_status(STATUS)
    seen = of_run(run_dir)
    assert (seen.state, seen.is_over) == ("running", False)
    first, head, worker, shard = run_lines(seen)
    assert first == (
        f"{run_dir.path}: running, step 1,200, epoch 3.25, 24,000 examples/s, test accuracy 97.50 %"
    )
    assert head.split() == [
        "node", "host", "state", "steps", "examples/s", "staleness", "memory", "received", "sent",
    ]  # fmt: skip
    assert worker.split() == [
        "worker-0.0", "left", "running", "460", "1,234", "1.50", "3.0", "MiB", "200", "B", "111",
        "B",
    ]  # fmt: skip
    assert shard.split() == [
        "shard-0", "left", "up", "920", "-", "-", "3.0", "MiB", "7", "B", "9", "B",
    ]  # fmt: skip


@pytest.mark.parametrize("state", ["done", "failed", "interrupted", "converged"])
def test_a_run_that_is_over(run_dir: RunDir, state: str) -> None:
    run_dir.write_status(STATUS | {"state": state})
    assert of_run(run_dir).is_over
    shown = "done (converged)" if state == "converged" else state
    assert f": {shown}, " in next(iter(run_lines(of_run(run_dir))))


@pytest.mark.parametrize("state", ["failed", "interrupted", "done", "running"])
def test_what_nodes_were_when_their_run_ended_is_told_as_that(run_dir: RunDir, state: str) -> None:
    """Who was killed with its agent, say, was never told to have ended."""
    ended = node_fields(node(), SHARD) | {"state": "ended"}
    run_dir.write_status(STATUS | {"state": state, "nodes": STATUS["nodes"] | {"s": ended}})
    worker, shard, last = list(run_lines(of_run(run_dir)))[-3:]
    before = "" if state == "running" else "was "
    assert f" {before}running " in worker
    assert f" {before}up " in shard
    assert " ended " in last
    assert " was ended" not in last


def test_an_end_of_its_own_is_done_for_people_and_as_it_was_in_json(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in its last line."""
    run_dir.write_status(STATUS | {"state": "max_iterations"})
    seen = of_run(run_dir)
    assert ": done, step " in next(iter(run_lines(seen)))
    monkeypatch.setattr("dbctl.run.show.RUNS", run_dir.path.parent)
    assert "  done  " in look(None).lines[-1]
    assert run_object(seen)["state"] == "max_iterations"


def test_a_run_that_has_said_nothing_yet_is_starting(run_dir: RunDir) -> None:
    assert of_run(run_dir).state == "starting"
    assert list(run_lines(of_run(run_dir))) == [f"{run_dir.path}: starting"]
    run_dir.write_status(STATUS | {"run": "the life before", "state": "done"})
    assert of_run(run_dir).state == "starting", "that was the life before"


def test_no_clock_says_which_life_a_status_is_of(run_dir: RunDir) -> None:
    """Copied without its times, or written by a clock that was set back (G16)."""
    run_dir.write_status(STATUS | {"state": "done"})
    os.utime(run_dir.status, (1.0, 1.0))
    assert of_run(run_dir).state == "done"


@pytest.mark.parametrize(
    "bad",
    [
        {"steps": "3"},
        {"reason": 3},
        {"epochs": None},
        {"nodes": []},
        {"nodes": {"x": {"rss_bytes": "1"}}},
    ],
)
def test_a_status_of_another_form_is_an_error(run_dir: RunDir, bad: dict[str, Any]) -> None:
    run_dir.write_status(STATUS | bad)
    with pytest.raises(RunError, match="is not as dbctl writes it"):
        of_run(run_dir)


def test_a_run_whose_controller_is_gone_is_lost(run_dir: RunDir) -> None:
    run_dir.write_info(dead_info())
    run_dir.write_status(STATUS)
    seen = of_run(run_dir)
    assert (seen.state, seen.is_over) == ("lost", True)
    assert list(run_lines(seen))[1:3] == [
        f"its controller (process {os.getpid()} on {os.uname().nodename}) ended without a word",
        "nothing was saved: train it anew",
    ]
    grow_old(run_dir, 35.0)
    [line] = [line for line in run_lines(of_run(run_dir)) if "without a word" in line]
    assert line.startswith("figures of 35 s ago: its controller (process ")


def test_a_run_that_ends_while_it_is_looked_at_is_not_lost(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_status = RunDir.read_status

    def ends_behind_it(read: RunDir) -> dict[str, Any]:
        found = read_status(read)
        monkeypatch.setattr(RunInfo, "is_alive", lambda info: False)
        return found

    run_dir.write_status(STATUS)
    monkeypatch.setattr(RunDir, "read_status", ends_behind_it)
    seen = of_run(run_dir)
    assert (seen.state, seen.is_over) == ("running", False)


def grow_old(run_dir: RunDir, age_s: float) -> None:
    then = time.time() - age_s
    os.utime(run_dir.status, (then, then))


@pytest.mark.parametrize(
    ("age_s", "line"),
    [
        (1.0, None),
        (6.2, "figures of 6 s ago"),
        (35.0, "figures of 35 s ago: its controller (process {pid} on {host}) does not answer"),
        (125.0, "figures of 2:05 ago: its controller (process {pid} on {host}) does not answer"),
    ],
)
def test_old_figures_are_not_shown_as_new_ones(
    run_dir: RunDir, age_s: float, line: str | None
) -> None:
    run_dir.write_status(STATUS)
    grow_old(run_dir, age_s)
    seen = of_run(run_dir)
    said = [line for line in run_lines(seen) if line.startswith("figures of ")]
    wanted = [line.format(pid=os.getpid(), host=os.uname().nodename)] if line else []
    assert said == wanted
    assert run_object(seen)["age_s"] == pytest.approx(age_s, abs=2.0)
    assert not seen.is_over


def test_the_figures_of_a_run_that_is_over_do_not_grow_old(run_dir: RunDir) -> None:
    run_dir.write_status(STATUS | {"state": "done"})
    grow_old(run_dir, 35.0)
    assert not [line for line in run_lines(of_run(run_dir)) if "ago" in line]
    assert run_object(of_run(run_dir))["age_s"] is None


@pytest.mark.parametrize("state", ["failed", "interrupted", "stopped", "lost"])
@pytest.mark.parametrize("saved", [False, True])
def test_how_a_run_goes_on_that_did_not_end_by_itself(
    run_dir: RunDir, state: str, saved: bool
) -> None:
    run_dir.write_status(STATUS | {"state": "running" if state == "lost" else state})
    if state == "lost":
        run_dir.write_info(dead_info())
    if saved:
        (run_dir.checkpoints / "step-000000040").mkdir()
    resume = f"resume: dbctl resume {run_dir.path}"
    wanted = resume if saved else "nothing was saved: train it anew"
    assert wanted in list(run_lines(of_run(run_dir)))


def test_a_line_search_that_failed_is_not_resumed(run_dir: RunDir) -> None:
    run_dir.write_status(STATUS | {"state": "line_search_failed"})
    assert list(run_lines(of_run(run_dir)))[1] == "nothing was saved: train it anew"
    (run_dir.checkpoints / "step-000000040").mkdir()
    way = list(run_lines(of_run(run_dir)))[1]
    assert way.startswith("a resume would end alike: ")
    assert way.endswith(f"initialize_from: {run_dir.path}")


def test_a_directory_is_told_as_a_shell_reads_it(tmp_path: Path) -> None:
    with create(tmp_path / "my run", "x") as found:
        found.write_info(dead_info())
        (found.checkpoints / "step-000000040").mkdir()
        assert f"resume: dbctl resume '{tmp_path}/my run'" in list(run_lines(of_run(found)))


@pytest.mark.parametrize("state", ["failed", "line_search_failed"])
def test_why_a_run_failed(run_dir: RunDir, state: str) -> None:
    run_dir.write_status(STATUS | {"state": state, "reason": "shard-0 on b was killed\033"})
    assert list(run_lines(of_run(run_dir)))[1] == "cause: shard-0 on b was killed\\x1b"
    run_dir.write_status(STATUS | {"state": state, "reason": None})
    assert not [line for line in run_lines(of_run(run_dir)) if line.startswith("cause")]


def test_a_run_that_goes_on_or_is_done_needs_no_advice(run_dir: RunDir) -> None:
    (run_dir.checkpoints / "step-000000040").mkdir()
    for state in ("running", "done", "converged"):
        run_dir.write_status(STATUS | {"state": state})
        assert len(list(run_lines(of_run(run_dir)))) == 4, "the first line and the nodes"


def dead_info(**changes: Any) -> RunInfo:
    info = RunInfo.of_this_process("r", control="/c", command=["dbctl"])
    return replace(info, pid_start=1, **changes)


def test_of_another_machine_nobody_here_knows_whether_its_controller_lives(run_dir: RunDir) -> None:
    run_dir.write_info(dead_info(host="elsewhere"))
    run_dir.write_status(STATUS)
    assert of_run(run_dir).state == "running"
    grow_old(run_dir, 35.0)
    assert list(run_lines(of_run(run_dir)))[1] == "figures of 35 s ago", "nor whether it answers"


def test_a_damaged_status_is_told(run_dir: RunDir) -> None:
    run_dir.status.write_text("{")
    with pytest.raises(RunError, match="damaged"):
        of_run(run_dir)


def test_what_a_node_said_does_not_steer_the_terminal(run_dir: RunDir) -> None:
    bad = node_fields(node(exited=Exited("a", 1, 1, "", "\033[2J")), {})
    run_dir.write_status(STATUS | {"nodes": {"worker-0.0\033": bad}})
    assert "\033" not in "".join(run_lines(of_run(run_dir)))


def test_columns() -> None:
    rows = [("a", "bb"), ("ccc", "d")]
    assert aligned(rows) == ["a    bb", "ccc  d"]
    assert aligned(rows, right=[1]) == ["a    bb", "ccc   d"]
    assert aligned([]) == []


# ------------------------------------------------------------------------------------- clusters

CLUSTER = Cluster(version=1, name="lab", dbctl="0.1.0", protocol=2, launched="then", keepers=())
RUN = RunSaid(
    run="7f", agent="agent-0", pid=40, seconds=61.0,
    name="digits", run_dir="/r\033", user="me@here",
    nodes=(NodeSaid(node="shard-0", pid=41, rss_bytes=5 << 20, seconds=3.0),),
)  # fmt: skip
SEEN = [
    Seen(
        host=HostSpec(name="a"),
        state="up",
        said=Said(state="up", version="0.1.0", seconds=3600.0, runs=(RUN,)),
    ),
    Seen(host=HostSpec(name="b", ssh="me@b"), state="unreachable", why="refused\033"),
    Seen(host=HostSpec(name="c"), state="gone"),
]


def test_a_cluster_is_shown_with_its_runs_and_their_nodes() -> None:
    assert list(cluster_lines(CLUSTER, SEEN)) == [
        "cluster lab, launched then",
        "a  up, 1 run, for 1:00:00, dbctl 0.1.0",
        "    digits  agent-0 pid 40  1:01  me@here: /r\\x1b",
        "        shard-0  pid 41  5.0 MiB  0:03",
        "b  unreachable: refused\\x1b",
        "c  gone",
    ]
    assert list(cluster_rows(CLUSTER, SEEN)) == [
        ("lab", "a", "up", "1:00:00", "digits"),
        ("lab", "b", "unreachable", "-", "-"),
        ("lab", "c", "gone", "-", "-"),
    ]


def test_a_cluster_as_an_object() -> None:
    found = json.loads(json.dumps(cluster_object(CLUSTER, SEEN)))
    assert found["cluster"] == "lab"
    assert [host["state"] for host in found["hosts"]] == ["up", "unreachable", "gone"]
    assert found["hosts"][0]["runs"][0]["nodes"][0]["node"] == "shard-0"
    assert found["hosts"][1] == {
        "host": "b", "ssh": "me@b", "state": "unreachable", "why": "refused\033",
        "version": None, "seconds": None, "runs": [],
    }  # fmt: skip


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No cluster, and no run here."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("nothing_known")
def test_neither_a_cluster_nor_a_run() -> None:
    with pytest.raises(UsageError, match="neither a cluster nor a run directory; none is known"):
        look("lab")
    with pytest.raises(UsageError, match="no such directory"):
        look("./lab")


@pytest.mark.usefixtures("nothing_known")
def test_a_damaged_file_hides_no_other_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    place = Path(os.environ["XDG_STATE_HOME"]) / "dbctl" / "clusters"
    place.mkdir(parents=True)
    (place / "bad.json").write_text("{")
    (place / "good.json").write_text(
        json.dumps(
            {"version": 1, "name": "good", "dbctl": "0", "protocol": 2, "launched": "then",
             "keepers": []}
        )
    )  # fmt: skip
    assert main(["status"]) == 0
    assert "bad.json: damaged" in capsys.readouterr().out
    assert main(["status", "--json"]) == 0
    bad, good = json.loads(capsys.readouterr().out)["clusters"]
    assert "damaged" in bad["error"]
    assert good["hosts"] == []


@pytest.mark.usefixtures("nothing_known")
def test_a_cluster_that_is_stopped_meanwhile_is_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dbctl.run.clusters.known", lambda: ["lab"])
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"clusters": [], "runs": []}


def make_run(number: int, **status: Any) -> RunDir:
    """runs/x/NUMBER, the newer the greater; a RunDir that holds no lock."""
    with create(Path(f"runs/x/{number}"), "x") as found:
        started = f"2026-01-02T03:04:{number:02d}-05:00"
        info = RunInfo.of_this_process("r", control="/c", command=["dbctl"])
        found.write_info(replace(info, started=started))
        os.utime(found.path / "run.json", (1e9 + number, 1e9 + number))
        found.write_status(STATUS | status)
    return found


@pytest.mark.usefixtures("nothing_known")
def test_runs_of_here_are_listed_newest_first(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(1, state="done", test_accuracy=None)
    grow_old(make_run(3), 35.0)
    make_run(2, state="failed")
    make_run(4).status.write_text("{")
    RunDir(Path("runs/x/1")).path.rename("runs/early")  # --run-dir runs/early
    assert main(["status"]) == 0
    first, between, *rows, damaged = capsys.readouterr().out.splitlines()
    assert first.startswith("no clusters; ")
    assert between == ""
    assert [row.split("  ") for row in (" ".join(row.split()) for row in rows)] == [
        ["run started state steps epochs test accuracy"],
        ["runs/x/3 2026-01-02 03:04:03 running, 35 s ago 1,200 3.25 97.50 %"],
        ["runs/x/2 2026-01-02 03:04:02 failed 1,200 3.25 97.50 %"],
        ["runs/early 2026-01-02 03:04:01 done 1,200 3.25 -"],
    ]
    assert damaged.startswith("runs/x/4/status.json: damaged")
    assert main(["status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["clusters"] == []
    assert [run.get("state") for run in found["runs"]] == [None, "running", "failed", "done"]
    assert "damaged" in found["runs"][0]["error"]
    assert "nodes" not in found["runs"][1]


@pytest.mark.usefixtures("nothing_known")
def test_many_runs_are_not_all_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dbctl.run.show.MOST_RUNS", 2)
    for number in range(5):
        make_run(number, state="done")
    assert main(["status"]) == 0
    *_, fourth, third, rest = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in (fourth, third)] == ["runs/x/4", "runs/x/3"]
    assert rest == "and 3 older runs"


@pytest.mark.usefixtures("nothing_known")
def test_what_is_watched_is_shown_anew_until_it_is_over(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter(["running", "done"])

    def sleep(seconds: float) -> None:
        run_dir.write_status(STATUS | {"state": next(states), "test_accuracy": float("nan")})

    sleep(0.0)
    monkeypatch.setattr("dbctl.cli.status.time.sleep", sleep)
    assert main(["status", str(run_dir.path), "--watch", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["state"] for one in found] == ["running", "done"]
    assert found[0]["test_accuracy"] is None
    assert found[0]["run_dir"] == str(run_dir.path)


@pytest.mark.parametrize(("look_s", "pause_s"), [(0.1, 1.9), (1.4, 0.6), (7.0, 0.5)])
def test_a_look_begins_two_seconds_after_the_one_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], look_s: float,
    pause_s: float,
) -> None:  # fmt: skip
    """As the help says, unless a look takes longer."""
    now, pauses = [100.0], []

    def one_look(what: str | None) -> Shown:
        now[0] += look_s
        return Shown(object={}, lines=["seen"], is_over=len(pauses) == 2)

    def sleep(seconds: float) -> None:
        pauses.append(round(seconds, 6))
        now[0] += seconds

    monkeypatch.setattr("dbctl.run.show.look", one_look)
    monkeypatch.setattr("dbctl.cli.status.time.monotonic", lambda: now[0])
    monkeypatch.setattr("dbctl.cli.status.time.sleep", sleep)
    assert main(["status", "--watch"]) == 0
    assert pauses == [pause_s, pause_s]
    assert capsys.readouterr().out == "seen\n" * 3


def test_who_waits_is_told_what_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dbctl.cli.status.SILENCE_S", 0.05)
    for wait_s, told in ((0.0, ""), (0.5, "hosts are being asked; one that does not answer")):

        def one_look(what: str | None, wait_s: float = wait_s) -> Shown:
            time.sleep(wait_s)
            return Shown(object={}, lines=["seen"])

        monkeypatch.setattr("dbctl.run.show.look", one_look)
        assert main(["status"]) == 0
        out, err = capsys.readouterr()
        assert out == "seen\n"
        assert err.startswith(told)
        assert bool(err) == bool(told)


# -------------------------------------------------------------------------------------------- logs


def write(run_dir: RunDir, **texts: str) -> None:
    for name, text in texts.items():
        with open(run_dir.logs / f"{name}.log", "a", encoding="utf-8", newline="") as file:
            file.write(text)


def test_logs_are_merged_by_time_with_a_prefix(run_dir: RunDir) -> None:
    write(
        run_dir,
        a="10:00:00.000 a begins\n10:00:02.500 a fails\n  with a traceback\n",
        bcd="before\n10:00:01.000 b begins\n10:00:02.500 b too\n10:00:03.000 half",
    )
    assert list(logs(run_dir, None, follow=False)) == [
        "bcd | before",
        "a   | 10:00:00.000 a begins",
        "bcd | 10:00:01.000 b begins",
        "a   | 10:00:02.500 a fails",
        "a   |   with a traceback",
        "bcd | 10:00:02.500 b too",
        "bcd | 10:00:03.000 half",
    ]


def test_logs_over_midnight_stay_in_order(run_dir: RunDir) -> None:
    write(
        run_dir,
        a="23:59:59.000 1\n00:00:01.000 3\n",
        b="23:59:59.500 2\n00:00:01.500 4\n",
    )
    assert [line[-1] for line in logs(run_dir, None, follow=False)] == ["1", "2", "3", "4"]


def test_one_log_has_no_prefix_and_is_escaped(run_dir: RunDir) -> None:
    write(run_dir, a="\033[2J\tx\n", b="not this\n")
    assert list(logs(run_dir, "a", follow=False)) == ["\\x1b[2J    x"]


@pytest.mark.parametrize("block", [1, 3, 8, 20, 1 << 16])
def test_logs_are_read_in_blocks(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """Only a line that is longer than a block is cut."""
    monkeypatch.setattr(show_logs, "BLOCK_BYTES", block)
    texts = {"a": "10:00:00.000 1\n10:00:02.000 3\n", "b": "10:00:01.000 2\n10:00:03.000 4"}
    write(run_dir, **texts)
    found = list(logs(run_dir, None, follow=False))
    if block >= 20:
        assert [line[-1] for line in found] == ["1", "2", "3", "4"]
    for name, text in texts.items():
        mine = [line.partition(" | ")[2] for line in found if line.startswith(name)]
        assert "".join(mine) == text.replace("\n", "")
        longest = max(len(line) for line in mine)
        assert longest <= block


def test_a_long_log_is_not_in_memory(run_dir: RunDir) -> None:
    for name in "ab":
        write(run_dir, **{name: "10:00:00.000 the same line again and again\n" * 200_000})
    tracemalloc.start()
    try:
        lines = logs(run_dir, None, follow=False)
        assert len(list(islice(lines, 10_000))) == 10_000
        assert tracemalloc.get_traced_memory()[1] < 1 << 21
    finally:
        tracemalloc.stop()
    assert next(lines).startswith("a | ")


def test_a_log_that_grows_while_it_is_read_has_an_end(run_dir: RunDir) -> None:
    write(run_dir, a="1\n2\n")
    seen = []
    for line in logs(run_dir, "a", follow=False):
        seen.append(line)
        write(run_dir, a="more\n")
    assert seen == ["1", "2"]


def test_a_node_that_has_no_log_is_told(run_dir: RunDir) -> None:
    write(run_dir, a="x\n", b="x\n")
    with pytest.raises(UsageError, match="there is no log of c; there are a, b"):
        list(logs(run_dir, "c", follow=False))
    with pytest.raises(UsageError, match="there is no log"):
        list(logs(run_dir, "../run", follow=False))


def test_following_shows_what_comes_and_ends_with_the_run(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole lines only, of nodes that begin later too, and the last ones."""
    run_dir.write_status(STATUS)
    write(run_dir, a="1\n2 is ")
    steps = iter(
        [
            lambda: write(run_dir, a="long\n"),
            lambda: write(run_dir, bb="3\n"),
            lambda: write(run_dir, a="4\nthe end"),
            lambda: run_dir.write_status(STATUS | {"state": "done"}),
        ]
    )
    monkeypatch.setattr(show_logs.time, "sleep", lambda seconds: next(steps)())
    found = list(logs(run_dir, None, follow=True))
    assert found == ["a | 1", "a | 2 is long", "bb | 3", "a  | 4", "a  | the end"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGHUP, 75)]
)
@pytest.mark.parametrize("command", ["logs -f", "status --watch"])
def test_what_goes_on_until_ctrl_c_ends_by_it_without_a_word(
    run_dir: RunDir, command: str, number: int, code: int
) -> None:
    run_dir.write_status(STATUS)
    write(run_dir, a="1\n")
    words = [sys.executable, "-m", "dbctl", *command.split(), str(run_dir.path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        time.sleep(0.2)
        process.send_signal(number)
        _, err = process.communicate(timeout=10.0)
    assert process.returncode == code
    assert err == b""


@pytest.mark.usefixtures("nothing_known")
def test_ctrl_c_in_what_has_an_end_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(what: str | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dbctl.run.show.look", interrupted)
    assert main(["status"]) == 130
    assert capsys.readouterr().err.strip() == "dbctl: error: interrupted"
