"""Ways to train one network beside each other, in turns of half a second.

    python tests/benchmarks/bench_turns.py [SECONDS] [WAY ...]

A WAY is `--set` settings between semicolons, `sgd` or `downpour` before them, and `@DIRECTORY` for
another tree of dbctl: `downpour;optimizer.overlap=true`, `sgd;@/tmp/before`. All are started, and
then one goes on while the processes of the others are stopped; each has SECONDS in all. So a
machine that changes its speed within minutes does so for all of them: ratios to the first way are
steady to 2 or 3 %, where whole runs one after the other differ by a third. Printed with them is the
processor time of a step, of all processes of the run together.

The network is that of bench_train.py, 784-1024-1024-10 on Fashion-MNIST, batch 100. Without a WAY:
Downpour with two replicas, overlapping and waiting, n_fetch = n_push = 1 and 5 (docs/decisions.md).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_train import DOWNPOUR, EXPERIMENT, ROOT

TURN_S = 0.5
TICKS = os.sysconf("SC_CLK_TCK")
N5 = "optimizer.n_fetch=5;optimizer.n_push=5"
DEFAULT = [
    "downpour;optimizer.overlap=true",
    "downpour;optimizer.overlap=false",
    f"downpour;optimizer.overlap=true;{N5}",
    f"downpour;optimizer.overlap=false;{N5}",
]


def fields(pid: int) -> list[str]:
    """Of /proc/PID/stat, those after the name: state, parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def family(pid: int) -> list[int]:
    """A process and all below it."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(entry.name)] = int(fields(int(entry.name))[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


class Run:
    """One way, as a run of its own that stands still unless it has its turn."""

    def __init__(self, way: str, directory: Path) -> None:
        kind, *given = way.split(";")
        tree = next((word[1:] for word in given if word.startswith("@")), str(ROOT))
        settings = [word for word in given if not word.startswith("@")]
        self.way, self._dir = way, directory
        directory.mkdir()
        (directory / "bench.yaml").write_text(EXPERIMENT)
        words = [sys.executable, "-m", "dbctl", "train", str(directory / "bench.yaml")]
        words += ["--json", "--run-dir", str(directory / "run")]
        for setting in ("stop.steps=1000000", *(DOWNPOUR if kind == "downpour" else ()), *settings):
            words += ["--set", setting]
        env = {**os.environ, "PYTHONPATH": tree}
        self._controller = subprocess.Popen(words, cwd=tree, env=env, stdout=subprocess.DEVNULL)
        while self.steps() < 100:
            assert self._controller.poll() is None, f"{way}: ended"
            time.sleep(0.1)
        self._pids = family(self._controller.pid)
        self._signal(signal.SIGSTOP)
        self.begin()

    def begin(self) -> None:
        self._had, self._had_ticks, self._seconds = self.steps(), self._ticks(), 0.0

    def turn(self) -> None:
        began = time.perf_counter()
        self._signal(signal.SIGCONT)
        time.sleep(TURN_S)
        self._signal(signal.SIGSTOP)
        self._seconds += time.perf_counter() - began

    def figures(self) -> tuple[float, float]:
        """Steps a second of all replicas, and processor seconds of a step."""
        assert self._controller.poll() is None, f"{self.way}: ended"
        steps = self.steps() - self._had
        ticks = sum(now - self._had_ticks[pid] for pid, now in self._ticks().items())
        return steps / self._seconds, ticks / TICKS / steps

    def steps(self) -> int:
        """As last reported: twice a second, which is why there are many turns."""
        done: dict[str, int] = {}
        with contextlib.suppress(OSError):
            for line in (self._dir / "run" / "metrics.jsonl").read_text().splitlines():
                with contextlib.suppress(ValueError):  # a line that is being written
                    record = json.loads(line)
                    if "compute_s" in record:
                        done[record["node"]] = record["step"]
        return sum(done.values())

    def close(self) -> None:
        for pid in family(self._controller.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._controller.terminate()
        self._controller.wait()

    def _signal(self, number: int) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _ticks(self) -> dict[int, int]:
        """Of processor time, of each process that is still there: a template ends after a while."""
        found = {}
        for pid in self._pids:
            with contextlib.suppress(OSError):
                found[pid] = sum(map(int, fields(pid)[11:13]))
        return found


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as directory:
        try:
            for number, way in enumerate(sys.argv[2:] or DEFAULT):
                runs.append(Run(way, Path(directory) / str(number)))
                for run in runs:  # who stands still for a lease is given up
                    run.turn()
            for turn in range(3 + round(seconds / TURN_S)):
                if turn == 3:  # what stood in queues when it was stopped is through
                    for run in runs:
                        run.begin()
                for run in random.sample(runs, len(runs)):
                    run.turn()
            first_rate, first_cpu_s = runs[0].figures()
            for run in runs:
                rate, cpu_s = run.figures()
                print(
                    f"{rate:7.1f} steps/s {rate / first_rate:6.3f}   "
                    f"{1e3 * cpu_s:6.2f} ms of a processor a step {cpu_s / first_cpu_s:6.3f}   "
                    f"{run.way}"
                )
        finally:
            for run in runs:
                run.close()


if __name__ == "__main__":
    main()
