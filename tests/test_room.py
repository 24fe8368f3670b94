"""Memory, files and processes: an error where a run cannot fit, a warning where it is tight."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import numpy as np
import pytest

from dbctl import examine
from dbctl.cli.main import main
from dbctl.data.rows import ArrayRows
from dbctl.data.sources import Source
from dbctl.errors import LaunchError
from dbctl.experiment.read import load
from dbctl.plan import Plan, make_evaluation_plan, make_plan
from dbctl.run import room
from tests.inproc_run import begin

FILE = Path(__file__).parent.parent / "experiments" / "digits-downpour.yaml"
MIB = 1 << 20
LOCAL = [
    "network.layers=[{type: local2d, maps: 2, kernel: 3}, {type: dense, units: 10}]",
    "network.input=[8, 8, 1]",
]
N_ROWS, N_TEST_ROWS = 90_000, 30_000


def make(*overrides: str) -> Plan:
    experiment = load(str(FILE), overrides)
    return make_plan(experiment, rows=N_ROWS, test_rows=N_TEST_ROWS, cores=2)


def source(rows: int, dtype: str = "float32", *, path: Path | None = None) -> Source:
    if path is None:
        x = np.broadcast_to(np.zeros(1, dtype), (rows, 64))
    else:
        x = np.memmap(path, dtype, "w+", shape=(rows, 64))
    return Source("x", ArrayRows(x), np.zeros(rows, np.int64), (64,))


def give(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, n_bytes: int) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 999999999 kB\nMemAvailable: {n_bytes >> 10} kB\n")
    monkeypatch.setattr(examine, "MEMINFO", meminfo)


def total(plan: Plan, train: Source, test: Source) -> int:
    held = sum(room.memory_bytes(plan, train, test).values())
    return held + room.OWN_BYTES * (len(plan.nodes) + 1)


# ---------------------------------------------------------------------------------- memory


def test_what_cannot_fit_is_refused_with_the_arithmetic(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan, train, test = make("replicas=3"), source(N_ROWS), source(N_TEST_ROWS)
    needed = total(plan, train, test)
    give(monkeypatch, tmp_path, needed - 4096)
    with pytest.raises(LaunchError) as caught:
        room.check_room(plan, train, test)
    said = str(caught.value)
    assert caught.value.exit_code == 3
    assert "for the shards + " in said
    assert " for the workers + " in said
    assert "7 processes x 9 MiB" in said, "2 shards, 3 workers, an evaluator, the agent"
    assert f"= {needed / 2**30:.2f} GiB; {needed / 2**30:.2f} GiB are available" in said
    assert "fewer replicas" in said


@pytest.mark.parametrize(("share", "n_warnings"), [(0.81, 1), (0.79, 0)])
def test_above_80_percent_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, share: float, n_warnings: int
) -> None:
    plan, train, test = make(), source(N_ROWS), source(N_TEST_ROWS)
    give(monkeypatch, tmp_path, int(total(plan, train, test) / share))
    warnings = room.check_room(plan, train, test)
    assert len(warnings) == n_warnings
    assert all("memory may not suffice: it needs" in warning for warning in warnings)


@pytest.mark.parametrize("text", [None, "MemTotal: 5 kB\n", "MemAvailable:\n", "MemAvailable: x"])
def test_nothing_is_said_where_the_system_does_not_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "meminfo").write_text(text)
    monkeypatch.setattr(examine, "MEMINFO", tmp_path / "meminfo")
    assert room.check_room(make(), source(N_ROWS), source(N_TEST_ROWS)) == []


def test_rows_count_as_they_are_kept(tmp_path: Path) -> None:
    """All rows once over the replicas; a byte where a byte is stored, nothing where it is mapped.

    A mapped file may be larger than the memory: a run on it must not be refused.
    """
    plan = make("replicas=3")
    needed = [
        room.memory_bytes(plan, source(N_ROWS, dtype, path=path), source(N_TEST_ROWS))["worker"]
        for dtype, path in [("float32", None), ("uint8", None), ("float32", tmp_path / "x")]
    ]
    assert needed[0] - needed[2] == 4 * 64 * N_ROWS
    assert needed[1] - needed[2] == 64 * N_ROWS
    evaluator = [
        room.memory_bytes(plan, None, source(N_TEST_ROWS, dtype))["evaluator"]
        for dtype in ("float64", "uint8")
    ]
    assert evaluator[0] - evaluator[1] == 3 * 64 * N_TEST_ROWS


def test_an_evaluation_is_asked_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = make_evaluation_plan(load(str(FILE)), rows=N_TEST_ROWS, evaluators=2)
    give(monkeypatch, tmp_path, 1 << 20)
    with pytest.raises(LaunchError, match="for the evaluators"):
        room.check_room(plan, None, source(N_TEST_ROWS))


def test_train_and_resume_start_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    give(monkeypatch, tmp_path, MIB)
    assert main(["train", str(FILE), "--run-dir", str(tmp_path / "run")]) == 3
    assert "has too little memory for this run" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_this_host_is_read() -> None:
    available = examine.available_bytes()
    assert available is None or available > MIB


def test_mere_processes_are_refused_before_anything_is_read_or_planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan of a million replicas took 40 seconds, deaf to signals."""

    def read(*_: object, **__: object) -> None:
        raise AssertionError("read")

    monkeypatch.setattr("dbctl.run.train.open_data", read)
    monkeypatch.setattr(room, "raise_descriptor_limit", lambda: resource.RLIM_INFINITY)
    give(monkeypatch, tmp_path, 16 << 30)
    many = ["train", str(FILE), "--set", "replicas=1000000"]
    for words in (many, [*many, "--dry-run"]):
        assert main(words) == 3
        said = capsys.readouterr().err
        assert "it needs 1,000,004 processes x 9 MiB = 8789.10 GiB; 16.00 GiB are" in said
    monkeypatch.setattr(room, "raise_descriptor_limit", lambda: 20_000)
    assert main(many) == 3
    said = capsys.readouterr().err
    assert "agent-0 needs about 2,000,022, and the hard limit is 20,000 (`ulimit -Hn`)" in said


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["partition.count=3", "replicas=2", "shards=5"],
        ["partition={grid: [2, 1]}", *LOCAL],
        ["evaluate=off"],
        ["shards=1000000000"],
    ],
)
def test_mere_processes_are_as_many_as_those_of_the_plan(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    seen: list[room.Room] = []
    monkeypatch.setattr(room, "_check", lambda one: seen.append(one) or [])
    room.check_processes(load(str(FILE), overrides))
    room.check_room(make(*overrides), None, None)
    early, late = seen
    assert early.n_processes == late.n_processes
    assert early.most_files[1] <= late.most_files[1]


def test_hosts_that_are_not_known_refuse_nothing_yet() -> None:
    hosts = "cluster={launcher: ssh, hosts: [{name: a}]}"
    room.check_processes(load(str(FILE), ["replicas=1000000", hosts]))


@pytest.mark.parametrize(
    ("replicas", "threads", "warns"), [(2, 1, 0), (4, 1, 0), (5, 1, 1), (2, 3, 1)]
)
def test_workers_that_only_take_turns_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, replicas: int, threads: int, warns: int
) -> None:
    """A laptop with two cores and two workers, or four, is told nothing."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    found = room.check_room(make(f"replicas={replicas}", f"threads={threads}"), None, None)
    said = (
        "5 processes of 1 thread on 2 cores"
        if threads == 1
        else ("2 processes of 3 threads on 2 cores")
    )
    assert found == [f"{said}: they share them"] * warns


def test_replicas_without_rows_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    experiment = load(str(FILE), ["replicas=30"])

    def warnings(rows: int) -> list[str]:
        return room.check_room(make_plan(experiment, rows=rows, test_rows=9, cores=2), None, None)

    assert warnings(30) == []
    train_nothing = "data.train has {}; they train nothing"
    assert warnings(29) == [f"replica 29 has no rows: {train_nothing.format(29)}"]
    assert warnings(3) == [f"replicas 3 to 29 have no rows: {train_nothing.format(3)}"]


def test_a_batch_takes_no_more_than_the_rows_that_it_has(tmp_path: Path) -> None:
    """Arrays for a batch of 10^12 rows are no more than what their replica has."""
    text = FILE.read_text().replace("batch_size: 32", "batch_size: 1000000000000")
    _, run = begin(text, tmp_path / "run", overrides=["stop={steps: 2}", "evaluate=off"])
    run.run()
    assert run.coordinator.status == "done"


# --------------------------------------------------------------------------------- processes


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host with two cores and plenty of all else."""
    give(monkeypatch, tmp_path, 256 << 30)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(room, "raise_descriptor_limit", lambda: resource.RLIM_INFINITY)
    monkeypatch.setattr(room, "threads_allowed", lambda: (2**62, ""))


@pytest.mark.parametrize(
    ("override", "n_processes"), [("shards=5000", "1,205"), ("replicas=2000", "2,004")]
)
@pytest.mark.usefixtures("large")
def test_more_processes_than_come_up_are_refused_as_a_plan_and_as_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, n_processes: str
) -> None:
    """They were started, for a minute, and then the run gave up."""
    words = ["train", str(FILE), "--set", override, "--run-dir", str(tmp_path / "run")]
    said = set()
    for more in ([], ["--dry-run"]):
        assert main([*words, *more]) == 3
        said.add(capsys.readouterr().err)
    assert len(said) == 1
    needed = f"has too few cores for this run: it needs {n_processes} processes"
    assert f"{needed}, and at most 512 x 2 cores = 1,024 come up in time" in said.pop()
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("large")
def test_crowds_for_study_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    room.check_processes(load(str(FILE), ["replicas=1020"]))
    with pytest.raises(LaunchError, match="1,025 processes"):
        room.check_processes(load(str(FILE), ["replicas=1021"]))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    room.check_processes(load(str(FILE), ["replicas=200"]))


@pytest.mark.usefixtures("large")
def test_the_systems_bound_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "threads_allowed", lambda: (99, "at most 99 are allowed"))
    room.check_room(make("replicas=15"), None, None)
    with pytest.raises(LaunchError) as caught:
        room.check_room(make("replicas=16"), None, None)
    assert caught.value.exit_code == 3
    assert "20 processes x 5 = 100, and at most 99 are allowed; raise it" in str(caught.value)


def test_the_least_of_all_bounds_of_threads_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the kernel, of the user, and of each control group from the process's own to the top."""
    kernel, own, groups = tmp_path / "pid_max", tmp_path / "cgroup", tmp_path / "groups"
    monkeypatch.setattr(examine, "THREADS_MAX", (kernel, tmp_path / "not there"))
    monkeypatch.setattr(examine, "OWN_GROUPS", own)
    monkeypatch.setattr(examine, "GROUPS", groups)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("resource.getrlimit", lambda which: (900, 950))
    kernel.write_text("1000\n")
    assert examine.threads_allowed() == (900, "at most 900 are allowed (`ulimit -u`)")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert examine.threads_allowed() == (1000, f"at most 1,000 are allowed ({kernel})")
    for lines, place in (("0::/job/step", groups), ("4:cpu:/\n8:pids:/job/step", groups / "pids")):
        own.write_text(f"{lines}\n")
        (place / "job" / "step").mkdir(parents=True)
        (place / "job" / "step" / "pids.max").write_text("max\n")
        (place / "job" / "pids.max").write_text("800\n")
        for current, left in ((30, 770), (810, 0)):
            (place / "job" / "pids.current").write_text(f"{current}\n")
            said = f"{left} more are allowed ({place / 'job' / 'pids.max'})"
            assert examine.threads_allowed() == (left, said)


def test_this_host_allows_some_threads() -> None:
    assert examine.threads_allowed()[0] > 100


# -------------------------------------------------------------------------------- open files


def test_more_peers_need_more_files() -> None:
    name, few = room.files_needed(make())
    assert name == "shard-0"
    name, many = room.files_needed(make("replicas=20"))
    assert name == "shard-0"
    assert many == few + 3 * 18 > 64
    cut = room.files_needed(make("partition.count=3", "shards=4"))
    assert cut[1] > 59, "measured"
    assert room.files_needed(make("replicas=300", "shards=3"))[1] > 3 * 300


def test_many_replicas_are_counted_in_time_that_grows_with_them() -> None:
    """Not with their square: 20 times as many once took 400 times as long, deaf to signals."""
    plans = [make("replicas=1000"), make("replicas=20000")]

    def seconds(plan: Plan) -> float:
        began = time.thread_time()
        room.files_needed(plan)
        return time.thread_time() - began

    few, many = (min(seconds(plan) for _ in range(2)) for plan in plans)
    assert many < 100 * few


def test_a_hard_limit_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "raise_descriptor_limit", lambda: 64)
    room.check_room(make(), None, None)
    with pytest.raises(LaunchError) as caught:
        room.check_room(make("replicas=20"), None, None)
    assert caught.value.exit_code == 3
    assert "shard-0 needs about 87, and the hard limit is 64 (`ulimit -Hn`)" in str(caught.value)
    monkeypatch.setattr(room, "raise_descriptor_limit", lambda: resource.RLIM_INFINITY)
    room.check_room(make("replicas=20"), None, None)
