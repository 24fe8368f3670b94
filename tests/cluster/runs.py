"""`python -m dbctl train` as a user starts it, and eyes for whatever it starts and leaves.

Theory of operation. Every process of a run inherits its environment, and the one given here holds a
word that no other run has: whatever process still has it belongs to the run, whoever its parent is
by now. Nodes are found by name, faults are proved by the state of the process, and `rest` measures
how long after a fault the last trace of the run was gone.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from dbctl.checkpoint.reader import open_checkpoint
from dbctl.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
MARK = "DBCTL_TEST_RUN"
LIMIT_S = 40.0  # of every wait: far above what any of them takes
Found = dict[str, int]


def digits(**changes: Any) -> dict[str, Any]:
    """The README's experiment with some keys changed."""
    text = (ROOT / "experiments/digits-downpour.yaml").read_text(encoding="utf-8")
    return {**yaml.safe_load(text), **changes}


def synthetic(*, rows: int, batch_size: int = 16, **changes: Any) -> dict[str, Any]:
    """Clusters of points, a tiny network: what a test wants to count, not to learn."""
    source = {"source": "synthetic", "rows": rows, "features": 8, "classes": 4}
    return {
        "version": 1,
        "name": "synthetic",
        "seed": 3,
        "data": {"train": source, "test": {**source, "rows": 40, "split": "test"}},
        "network": {
            "input": [8],
            "layers": [{"type": "dense", "units": 16}, {"type": "dense", "units": 4}],
            "loss": "softmax",
        },
        "replicas": 2,
        "shards": 2,
        "optimizer": {
            "type": "downpour",
            "batch_size": batch_size,
            "rule": {"type": "sgd", "rate": 0.01},
        },
        "stop": {"epochs": 2},
        **changes,
    }


ENDLESS = {"steps": 100_000_000}


def wait_for(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    """The first true value of `condition`; an assertion names `what` did not come."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {limit_s} s for: {what}"
        time.sleep(0.005)
    return value


def state(pid: int) -> str:
    """The letter of /proc/PID/stat; "" where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def session(pid: int) -> int:
    return _number(pid, 3)


def parent(pid: int) -> int:
    return _number(pid, 1)


def _number(pid: int, field: int) -> int:
    """A field of /proc/PID/stat, counted from the state; -1 where there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[field])
    except OSError:
        return -1


def _words(pid: int) -> list[str]:
    return _read(f"/proc/{pid}/cmdline").decode().split("\0")


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _pids() -> Iterable[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


class TrainRun:
    """One controller process. A context manager: on the way out nothing of it is alive.

    `factories`: role -> function of tests/cluster/roles.py that builds it, `lease_s`, `held_up_s`,
    and `keys`: through tests/cluster/drive.py, which is the command line with these added.
    """

    def __init__(
        self,
        tmp_path: Path,
        experiment: Mapping[str, Any],
        *words: str,
        factories: Mapping[str, str] | None = None,
        lease_s: float | None = None,
        held_up_s: float | None = None,
        keys: Path | None = None,
        env: Mapping[str, str] | None = None,
        name: str = "run",
        run_dir: Path | None = None,
        default_dir: bool = False,
        ignored: int | None = None,
    ) -> None:
        self.file = tmp_path / f"{name}.yaml"
        self.file.write_text(json.dumps(experiment, ensure_ascii=False), encoding="utf-8")
        self.dir = run_dir or tmp_path / name
        self.out_path = tmp_path / f"{name}.out"
        self.err_path = tmp_path / f"{name}.err"
        self.mark = secrets.token_hex(8)
        self.seen: set[int] = set()  # sessions of its nodes
        module = ["dbctl"]
        if factories or lease_s or held_up_s or keys:
            settings = {
                "factories": factories or {},
                "lease_s": lease_s,
                "held_up_s": held_up_s,
                "keys": str(keys) if keys else None,
            }
            module = ["tests.cluster.drive", json.dumps(settings)]
        place = [] if default_dir else ["--run-dir", str(self.dir)]
        self._words = [sys.executable, "-m", *module, "train", str(self.file), *place, *words]
        self._env = {**os.environ, "PYTHONPATH": str(ROOT), MARK: self.mark, **(env or {})}
        self._cwd = tmp_path
        self._ignored = ignored

    def __enter__(self) -> TrainRun:
        before = signal.getsignal(self._ignored) if self._ignored else None
        if self._ignored:
            signal.signal(self._ignored, signal.SIG_IGN)  # as nohup(1) does for its child
        try:
            with open(self.out_path, "wb") as out, open(self.err_path, "wb") as err:
                self.process = subprocess.Popen(
                    self._words,
                    env=self._env,
                    cwd=self._cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
        finally:
            if self._ignored:
                signal.signal(self._ignored, before)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pid in [self.process.pid, *self.processes().values()]:
            if state(pid) not in ("", "Z"):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        if error is not None:
            print(self.story())

    # ------------------------------------------------------------------------- what there is

    @property
    def pid(self) -> int:
        return self.process.pid

    def processes(self) -> Found:
        """The living processes that have this run's mark: `controller`, `agent`, nodes by name."""
        found: Found = {}
        for pid in _pids():
            if f"{MARK}={self.mark}".encode() not in _read(f"/proc/{pid}/environ").split(b"\0"):
                continue
            words = _words(pid)
            if state(pid) in ("", "Z"):
                continue
            name = f"other {pid}"
            if pid == self.pid:
                name = "controller"
            elif words[3:5] == ["dbctl", "agent"]:
                # A child that an agent has just forked still has its command line.
                name = name if _words(parent(pid)) == words else "agent"
            elif words[3:5] == ["dbctl", "node"]:
                name = words[5]
            found[name] = pid
            if pid != self.pid:
                self.seen.add(session(pid))
        return found

    def node(self, name: str) -> int:
        """The process number of a node, waited for."""
        return int(wait_for(lambda: self.processes().get(name), f"a process {name}"))

    @property
    def out(self) -> str:
        return self.out_path.read_text(encoding="utf-8")

    @property
    def err(self) -> str:
        return self.err_path.read_text(encoding="utf-8")

    def log(self, node: str) -> str:
        path = self.dir / "logs" / f"{node}.log"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def metrics(self, event: str) -> list[dict[str, Any]]:
        found = read_metrics(self.dir / "metrics.jsonl")
        return [record for record in found if record["event"] == event]

    def step(self, worker: str) -> int:
        """The last step that a worker reported."""
        return max((r["step"] for r in self.metrics("worker") if r["node"] == worker), default=0)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.dir / "status.json").read_text())
        return found

    @property
    def runtime(self) -> Path | None:
        try:
            return Path(json.loads((self.dir / "run.json").read_text())["control"])
        except (OSError, ValueError):
            return None

    def checkpoints(self) -> list[int]:
        """The steps of the visible checkpoints, each verified byte for byte."""
        found = []
        for path in sorted((self.dir / "checkpoints").glob("step-*")):
            assert open_checkpoint(path, verify=True).manifest.step >= 0
            found.append(int(path.name.removeprefix("step-")))
        return found

    def story(self) -> str:
        parts = [f"== {' '.join(self._words)}\n{self.out}", f"== stderr\n{self.err}"]
        logs = sorted((self.dir / "logs").glob("*.log"))
        parts += [f"== {path.name}\n{path.read_text()[-3000:]}" for path in logs]
        return "\n".join(parts)

    # ------------------------------------------------------------------------------- phases

    def until_spawn(self) -> None:
        """The agent is there, and no node yet, or only just."""
        self.node("agent")

    def until_join(self) -> None:
        wait_for(lambda: "worker-0.0#1 started" in self.log("agent-0"), "the order for a worker")
        self.node("worker-0.0")
        assert not self.metrics("worker"), "nobody trains yet"

    def until_train(self, step: int = 20) -> None:
        workers = [name for name in self.processes() if name.startswith("worker-")]
        wait_for(self._trains(workers, step), f"step {step} of {workers}")

    def _trains(self, workers: list[str], step: int) -> Callable[[], bool]:
        def check() -> bool:
            assert self.process.poll() is None, self.story()
            steps = {r["node"]: r["step"] for r in self.metrics("worker")}
            return bool(steps) and all(steps.get(w, 0) >= step for w in workers or steps)

        return check

    def until_checkpoint(self) -> None:
        """One is being written, behind an earlier one; the controller is stopped in the middle."""
        self.until_train()
        place = self.dir / "checkpoints"
        while True:
            wait_for(
                lambda: list(place.glob("step-*")) and list(place.glob(".tmp-*")),
                "a half written one",
            )
            os.kill(self.pid, signal.SIGSTOP)
            wait_for(lambda: state(self.pid) == "T", "a stopped controller")
            if list(place.glob(".tmp-*")):
                return
            os.kill(self.pid, signal.SIGCONT)

    def until_finish(self) -> None:
        """Every replica is at its end; the final evaluation is under way."""

        def check() -> bool:
            last = {r["node"]: r["state"] for r in self.metrics("worker")}
            return bool(last) and set(last.values()) == {"finished"}

        wait_for(check, "all replicas at their end")
        assert self.process.poll() is None, self.story()

    def reach(self, phase: str) -> None:
        getattr(self, f"until_{phase}")()
        self.processes()

    # ------------------------------------------------------------------------------ the end

    def signal(self, number: int, *, to_all: bool = False) -> None:
        """To the controller, or as a terminal does: to its process group."""
        (os.killpg if to_all else os.kill)(self.pid, number)

    def finish(self, limit_s: float = LIMIT_S) -> int:
        """Its exit status, which must come within `limit_s`; nothing of it may be left then."""
        begin = time.monotonic()
        try:
            status = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended after {limit_s} s: {self.processes()}") from None
        self.took_s = time.monotonic() - begin
        self.assert_nothing_left()
        return status

    def left(self) -> list[str]:
        found = [f"process {name} {pid}" for name, pid in self.processes().items()]
        others = (p for p in _pids() if session(p) in self.seen and state(p) not in ("", "Z"))
        found += [f"process {pid} of its sessions" for pid in others]
        if self.runtime is not None and self.runtime.exists():
            found.append(f"{self.runtime} with {os.listdir(self.runtime)}")
        found += [str(path) for path in Path(os.environ["XDG_RUNTIME_DIR"]).rglob("dbctl-*")]
        return found

    def assert_nothing_left(self) -> None:
        left = self.left()
        assert not left, f"left behind: {left}\n{self.story()}"

    def rest(self, limit_s: float) -> float:
        """Seconds until no process, socket or directory of the run was left."""
        begin = time.monotonic()
        self.process.wait(limit_s)
        while left := self.left():
            assert time.monotonic() - begin < limit_s, f"left after {limit_s} s: {left}"
            time.sleep(0.02)
        return time.monotonic() - begin

    def step_to_resume(self) -> int:
        """What the last line says about resume; its checkpoint must be there."""
        match = re.search(r"resume \S+` goes on from step ([0-9,]+)", self.out)
        assert match, self.story()
        step = int(match[1].replace(",", ""))
        assert step in self.checkpoints(), self.checkpoints()
        return step


def finish_all(*runs: TrainRun) -> None:
    """All that go on at once end well, and nothing of any of them is left then."""
    for run in runs:
        assert run.process.wait(LIMIT_S) == 0, run.story()
    for run in runs:
        run.assert_nothing_left()


def stop(pid: int) -> None:
    """SIGSTOP, proved."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: state(pid) == "T", f"{pid} to be stopped", 5.0)


def go_on(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: state(pid) != "T", f"{pid} to go on", 5.0)


def kill(pid: int) -> None:
    """SIGKILL, proved: the process is gone, or waits to be reaped."""
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: state(pid) in ("", "Z", "X"), f"{pid} to be dead", 5.0)
