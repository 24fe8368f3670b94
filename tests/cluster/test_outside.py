"""A run as the machine and the user's terminal see it: threads, ports, text, names."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.runs import ENDLESS, TrainRun, digits, synthetic, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(60)]


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def environment(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_bytes().decode()
    return dict(item.split("=", 1) for item in text.split("\0") if item)


def internet_sockets(pids: list[int]) -> list[str]:
    """The lines of /proc/net/{tcp,udp}* that belong to these processes, as `ss -ltunp` shows."""
    mine = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                target = os.readlink(fd)
                if target.startswith("socket:["):
                    mine.add(target[8:-1])
    assert mine, "they have unix sockets at least"
    found = []
    for name in ("tcp", "tcp6", "udp", "udp6"):
        path = Path(f"/proc/net/{name}")
        lines = path.read_text().splitlines()[1:] if path.exists() else []
        found += [f"{name} {line}" for line in lines if line.split()[9] in mine]
    return found


@pytest.fixture(params=["unset", "3"])
def eight(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[TrainRun, int]]:
    """Eight replicas in the middle of training, and the count of threads each should have."""
    cores = len(os.sched_getaffinity(0))
    given = {} if request.param == "unset" else {"OMP_NUM_THREADS": request.param}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        with TrainRun(tmp_path, digits(replicas=8, stop=ENDLESS), env=given) as run:
            run.until_join()
            run.node("worker-7.0")
            run.until_train(1)
            yield run, int(given.get("OMP_NUM_THREADS", max(1, cores // 8)))
            run.signal(15)
            assert run.finish(10.0) == 75


def test_threads_and_ports(eight: tuple[TrainRun, int]) -> None:
    """pytorch#22260: cores over processes, or the user's number; ps-lite#117: no port."""
    run, wanted = eight
    found = run.processes()
    counts = {name: threads(pid) for name, pid in found.items()}
    for name in (f"worker-{i}.0" for i in range(8)):
        assert environment(found[name])["OMP_NUM_THREADS"] == str(wanted)
        assert environment(found[name])["OPENBLAS_NUM_THREADS"] == str(wanted)
    for name in ("shard-0", "shard-1"):
        assert environment(found[name])["OMP_NUM_THREADS"] == "1"
    workers = {counts[f"worker-{i}.0"] for i in range(8)}
    # Beside what every node has: BLAS threads but one, never more than the machine has cores.
    spare = max(workers) - counts["shard-0"]
    assert 0 <= spare <= wanted - 1, counts
    assert max(counts.values()) < 8 + wanted, counts
    assert internet_sockets(list(found.values())) == []
    assert "threads: " + str(wanted) in (run.dir / "resolved.yaml").read_text()


def test_into_a_file(tmp_path: Path) -> None:
    """tqdm#1342: plain lines, no carriage return, the result alone on standard output."""
    with TrainRun(tmp_path, digits(stop={"epochs": 6})) as run:
        assert run.finish() == 0
        for data in (run.out_path.read_bytes(), run.err_path.read_bytes()):
            assert b"\r" not in data
            assert b"\x1b" not in data
        assert run.out.count("\n") == 1
        assert run.out.startswith("done: ")
        told, first, *_ = run.err.splitlines()
        assert told == f"run directory: {run.dir}"
        assert first.startswith("epoch 0.00/6  step 0")
        assert "warning" not in run.err
        assert len(run.err.splitlines()) < 20


@pytest.mark.parametrize("locale", ["C", "POSIX"])
def test_names_that_are_not_ascii(tmp_path: Path, locale: str) -> None:
    """Whatever the locale says, files and screen are UTF-8."""
    folder = tmp_path / "données d'été"
    folder.mkdir()
    env = {"LC_ALL": locale, "LANG": locale, "PYTHONCOERCECLOCALE": "0"}
    experiment = synthetic(rows=100, name="réseau №1 “x”")
    with TrainRun(folder, experiment, env=env, name="expérience") as run:
        assert run.finish() == 0
        assert str(run.dir) in run.out
        assert "réseau №1" in (run.dir / "resolved.yaml").read_text(encoding="utf-8")
        assert run.checkpoints() == [16]


def test_a_path_that_is_no_text(tmp_path: Path) -> None:
    """Refused before anything is started: no record could name it."""
    with TrainRun(tmp_path, synthetic(rows=100), run_dir=tmp_path / "\udcff") as run:
        assert run.finish() == 2
        assert "has bytes that are not UTF-8" in run.err
        assert not run.dir.exists()


@pytest.mark.parametrize(("hard", "status"), [(None, 130), (30, 3)])
def test_few_open_files_allowed(tmp_path: Path, hard: int | None, status: int) -> None:
    """`ulimit -Sn 30` is raised by every process; a hard limit that is too small is told."""
    experiment = digits(replicas=4, stop=ENDLESS, evaluate="off")
    with TrainRun(tmp_path, experiment) as run:
        most = resource.prlimit(run.pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(run.pid, resource.RLIMIT_NOFILE, (30, hard or most))
        if status == 130:
            found = {"controller": run.pid, "agent": run.node("agent"), "": run.node("shard-0")}
            run.until_train()
            for pid in found.values():
                assert resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] == most
            # The last of the replicas may only have begun.
            shard = Path(f"/proc/{found['']}/fd")
            wait_for(lambda: len(os.listdir(shard)) > 30, "that it needs more than that")
            run.signal(signal.SIGINT)
        assert run.finish() == status
        if status == 3:
            assert "shard-0 needs about 36, and the hard limit is 30" in run.err
            assert not run.dir.exists()
