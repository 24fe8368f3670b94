"""One replica in one partition and in two: times, predictions, memory. Two cores are needed.

    python tests/benchmarks/bench_partitions.py [ROUNDS] [--only speech,figure3]

Two things are measured, each with one BLAS thread a partition, counts of partitions in turn:

    passes  forward, backward and exchange without servers: processes that have only a link and one
            partition each, on random numbers
    steps   whole runs through `dbctl train`: also data, gradient check, servers; VmHWM of a worker.
            Between the reports of a worker at a quarter of its steps and at the last one: a run
            of a few seconds begins and ends in half a second, however it is cut

and predicted by `dbctl train --dry-run --partitions`. The peer is the machine: `two copies` is what
two processes get done that each make the whole network's passes and have nothing to do with each
other, in units of what one alone gets done. No cut can be expected to do better. Printed are
medians, ratios of the same round and, of the passes, what a partition computes and how long it
waits. Bars: speech passes 1.75 and steps 1.5, fashion-local 1.6; memory of the speech network's
worker 0.65; predictions within 20 %.
`cpu`: processor time a step of the busiest worker, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = (
    "1"  # before numpy, and for every process started here
)

import numpy as np

from dbctl.experiment.read import load
from dbctl.experiment.specs import Experiment
from dbctl.metrics import of_one_step, read_metrics
from dbctl.model.cut import cut_network
from dbctl.model.layers.dropout import Draw
from dbctl.node.compute import Share
from dbctl.roles.conversation import Conversation
from dbctl.transport.link import Link
from dbctl.transport.memory import allocate

ROOT = Path(__file__).resolve().parents[2]
COUNTS = (1, 2)
COMMON = ("evaluate=off", "checkpoint={every: off}", "threads=1", "replicas=1")
SGD = "optimizer={type: sgd, batch_size: %d, rule: {type: sgd, rate: 0.01}}"
LAYERS = (
    "network.layers=[{type: dense, units: 1024, activation: relu},"
    " {type: dense, units: 1024, activation: relu}, {type: dense, units: 10}]"
)

# Name: experiment, settings, steps of a run, passes. As many shards as partitions compute.
NETWORKS: dict[str, tuple[str, tuple[str, ...], int, int]] = {
    "fashion": ("fashion-sgd", (SGD % 100, LAYERS), 400, 100),
    "speech": ("speech-paper", (SGD % 128,), 20, 8),
    "fashion-local": ("fashion-local", (SGD % 100,), 400, 100),
    "figure3": ("figure3", (SGD % 100,), 150, 40),
    "vision": ("vision-paper", (SGD % 128,), 12, 4),
}


def settings_of(name: str, count: int) -> tuple[str, ...]:
    shards = f"shards={count}"
    return (*NETWORKS[name][1], *COMMON, f"partition={{count: {count}}}", shards)


# ------------------------------------------------------------------------------------ passes


def partner(folder: str, name: str, partition: int, count: int, pipe: Connection) -> None:
    """One partition and its link: sends (seconds, cpu, waited) of each pass when all are done."""
    path = ROOT / "experiments" / f"{NETWORKS[name][0]}.yaml"
    experiment = load(str(path), settings_of(name, count))
    names = {p: f"partition-{p}" for p in range(count) if p != partition}
    with Link(
        run="bench", node=f"partition-{partition}", incarnation=1,
        listen=f"ipc://{folder}/{partition}",
    ) as link:  # fmt: skip
        pipe.send("listening")
        pipe.recv()
        for other, node in names.items():
            link.connect(node, 1, f"ipc://{folder}/{other}")
        work = Work(experiment, partition, count=count)
        talk = Conversation(partition, names, allocate=allocate, resend_s=0.25)
        taken = []
        for _ in range(NETWORKS[name][3] + 3):
            began, cpu, waited = time.perf_counter(), time.thread_time(), talk.waited_s
            one_pass(link, talk, work)
            figures = (time.perf_counter() - began, time.thread_time() - cpu)
            taken.append((*figures, talk.waited_s - waited))
        pipe.send(taken[3:])
        pipe.recv()  # the others may still ask for something again


class Work:
    """A partition's pass on random numbers, ended by the agreement that workers end theirs with."""

    def __init__(self, experiment: Experiment, partition: int, *, count: int) -> None:
        cut, n = cut_network(experiment.network, count=count), experiment.optimizer.batch_size
        self._share = Share(cut, partition, batch_size=n, allocate=allocate)
        random = np.random.default_rng(1)
        features, outputs = int(np.prod(experiment.network.input)), int(np.prod(cut.shapes[-1]))
        self._x = random.standard_normal((features, n), np.float32)
        self._labels = random.integers(outputs, size=n)
        size = self._share.n_parameters
        self._parameters = 0.02 * random.standard_normal(size, np.float32)
        self._out = np.zeros(size, np.float32)

    def passes(self, talk: Conversation) -> Any:
        loss = yield from self._share.gradient(
            self._parameters, self._x, self._labels, out=self._out, draw=Draw(0, 0, 0)
        )
        yield from talk.agree([loss, 1.0])


def one_pass(link: Link, talk: Conversation, work: Work) -> None:
    talk.begin(work.passes(talk))
    while True:
        effects, over = talk.go_on(time.monotonic())
        for effect in effects:
            link.send(effect.to, effect.message)
        if over:
            return
        while not talk.can_go_on:
            for peer, message in link.receive(max(0.0, talk.due - time.monotonic())):
                for answer in talk.receive(peer.node, message):
                    link.send(answer.to, answer.message)
            for again in talk.resend(time.monotonic()):
                link.send(again.to, again.message)


def passes(name: str, count: int, *, copies: int = 1) -> tuple[float, float, float]:
    """Medians of a pass: seconds, cpu of the busiest partition, seconds waited for others.

    `copies`: so many cuts at once, none of which knows of the others.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for copy, partition in product(range(copies), range(count)):
            ours, theirs = context.Pipe()
            own = Path(folder, str(copy))
            own.mkdir(mode=0o700, exist_ok=True)
            process = context.Process(
                target=partner, args=(str(own), name, partition, count, theirs)
            )
            process.start()
            theirs.close()  # so that the end of that process ends what is waited for
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            assert pipe.recv() == "listening"
        for pipe in pipes:
            pipe.send("go")
        found = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send("end")
        for process in processes:
            process.join()
    columns = [[median(column) for column in zip(*taken, strict=True)] for taken in found]
    return max(c[0] for c in columns), max(c[1] for c in columns), max(c[2] for c in columns)


# ------------------------------------------------------------------------------------- steps


def command(name: str, count: int, *more: str) -> list[str]:
    path = ROOT / "experiments" / f"{NETWORKS[name][0]}.yaml"
    words = [sys.executable, "-m", "dbctl", "train", str(path), "--json", *more]
    for setting in settings_of(name, count):
        words += ["--set", setting]
    return words


def steps(name: str, count: int) -> dict[str, float]:
    """Seconds of a step of a whole run, the workers' waits, and a worker's greatest memory."""
    n_steps = NETWORKS[name][2]
    with tempfile.TemporaryDirectory() as folder:
        more = ("--run-dir", f"{folder}/run", "--set", f"stop.steps={n_steps}")
        words = command(name, count, *more)
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        greatest = 0
        while process.poll() is None:
            greatest = max([greatest, *map(memory_of, workers_under(process.pid))])
            time.sleep(0.1)
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
        process.stdout.close()
        assert process.returncode == 0, lines
        records = list(read_metrics(Path(folder, "run/metrics.jsonl")))
    waits = ("compute_s", "exchange_wait_s", "fetch_wait_s", "push_wait_s")
    return {
        "memory_bytes": greatest,
        **{
            name: max(of_one_step(records, node, name) for node in nodes_of(records))
            for name in ("time", *waits)
        },
    }


def nodes_of(records: list[dict[str, Any]]) -> set[str]:
    return {r["node"] for r in records if r.get("event") == "worker"}


def workers_under(ancestor: int) -> list[int]:
    """The processes below `ancestor` that are workers."""
    parents, workers = {}, []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
                )
                if b"\0worker-" in (entry / "cmdline").read_bytes():
                    workers.append(int(entry.name))
            except (OSError, IndexError):
                continue

    def below(pid: int) -> bool:
        while pid in parents and pid != ancestor:
            pid = parents[pid]
        return pid == ancestor

    return [pid for pid in workers if below(pid)]


def memory_of(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
    return int(found[0]) * 1024 if found else 0


def predicted(name: str, count: int) -> dict[str, float]:
    counts = ",".join(map(str, COUNTS))
    words = command(name, count, "--dry-run", "--partitions", counts)
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    tables = json.loads(done.stdout)["forecast"]["partitions"]
    return next(table for table in tables if table["count"] == count)


# ------------------------------------------------------------------------------------ report


def report(name: str, rounds: int) -> None:
    copies_s: list[float] = []
    pass_s: dict[int, list[tuple[float, float, float]]] = {count: [] for count in COUNTS}
    runs: dict[int, list[dict[str, float]]] = {count: [] for count in COUNTS}
    forecasts: dict[int, list[dict[str, float]]] = {count: [] for count in COUNTS}
    for _ in range(rounds):
        for count in COUNTS:
            pass_s[count].append(passes(name, count))
            runs[count].append(steps(name, count))
            forecasts[count].append(predicted(name, count))
        copies_s.append(passes(name, 1, copies=2)[0])
    print(f"{name}, {rounds} rounds; ms")
    for count in COUNTS:
        whole, cpu, waited = (1e3 * median(column) for column in zip(*pass_s[count], strict=True))
        part = {k: 1e3 * median(f[k] for f in forecasts[count]) for k in forecasts_of(forecasts)}
        print(f"  {count}: pass {whole:8.2f} (cpu {cpu:.2f}, waited {waited:.2f})", end="")
        print(f", predicted {part['compute_s'] + part['exchange_s']:8.2f}", end="")
        print(f" (compute {part['compute_s']:.2f}, exchange {part['exchange_s']:.2f})")
        run = {k: 1e3 * median(r[k] for r in runs[count]) for k in runs[count][0]}
        ratio = part["seconds"] / run["time"]
        print(
            f"  {count}: step {run['time']:8.2f} (compute {run['compute_s']:.2f}, exchange",
            end="",
        )
        print(f" {run['exchange_wait_s']:.2f}, fetch {run['fetch_wait_s']:.2f}, push", end="")
        print(
            f" {run['push_wait_s']:.2f}), predicted {part['seconds']:8.2f}, {ratio:.2f} of it",
            end="",
        )
        print(f"; memory {run['memory_bytes'] / 1e3 / 2**20:.0f} MiB")
    one, two = COUNTS
    speed_ups = {
        "two copies": median(2 * a[0] / b for a, b in zip(pass_s[one], copies_s, strict=True)),
        "passes": median(a[0] / b[0] for a, b in zip(pass_s[one], pass_s[two], strict=True)),
        "cpu of passes": median(a[1] / b[1] for a, b in zip(pass_s[one], pass_s[two], strict=True)),
        "steps": median(a["time"] / b["time"] for a, b in zip(runs[one], runs[two], strict=True)),
        "predicted": median(f["speed_up"] for f in forecasts[two]),
    }
    print("  2 against 1:", ", ".join(f"{k} {v:.2f}" for k, v in speed_ups.items()), end="")
    memory = [median(r["memory_bytes"] for r in runs[count]) for count in COUNTS]
    print(f"; memory {memory[1] / memory[0]:.2f}", flush=True)


def forecasts_of(forecasts: dict[int, list[dict[str, float]]]) -> list[str]:
    return [key for key in forecasts[COUNTS[0]][0] if key.endswith("_s") or key == "seconds"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", type=int, nargs="?", default=3)
    parser.add_argument("--only", default=",".join(NETWORKS))
    arguments = parser.parse_args()
    for chosen in arguments.only.split(","):
        report(chosen, arguments.rounds)
