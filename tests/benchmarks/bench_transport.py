"""How fast the link is: small round trips, and push + pull with an update at the shard.

    python tests/benchmarks/bench_transport.py [--seconds 1]

Two processes on one host. `memory`: the payload stays where it is and a message is the doorbell;
`inline`: the payload goes through the sockets in pieces; `memcpy`: one np.copyto of the same bytes,
the measure of the host. A push + pull moves the payload twice: the shard subtracts the pushed
gradient from its parameters, the worker copies the parameters that come back. Medians; the ways
are interleaved. `busy`: both cores are computing meanwhile.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from dbctl.roles.base import View
from dbctl.transport.link import Link
from dbctl.transport.memory import allocate
from dbctl.wire import Ack, Fetch, Finish, Params, Position, Push, Return

SIZES = {"1 MB": 1 << 18, "16 MB": 1 << 22}


def serve(folder: str, bulk: str, n_elements: int) -> None:
    """A shard: applies each push and hands its parameters out; answers Fetch with Ack."""
    parameters = allocate(n_elements, "<f4")
    link = Link(
        run="bench", node="shard", incarnation=1, listen=f"ipc://{folder}/{bulk}{n_elements}",
        bulk=bulk, assembly_bytes=256 << 20,
    )  # fmt: skip
    with link:
        while True:
            for peer, message in link.receive(None):
                if isinstance(message, Finish):
                    return
                if isinstance(message, Fetch):
                    link.send(peer.node, Ack(1, message.number, 0))
                if isinstance(message, Push):
                    array = parameters.array
                    np.subtract(array, message.payload, out=array)
                    view = View(parameters, 0, n_elements)
                    link.send(peer.node, Params(1, message.seq, message.seq, 0, 0, 0, view))


class Worker:
    """The other side of one shard, in this process."""

    def __init__(self, folder: str, bulk: str, n_elements: int) -> None:
        self.process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(folder, bulk, n_elements)
        )
        self.process.start()
        self.n_elements = n_elements
        self.slot = allocate(n_elements, "<f4")
        self.local = np.zeros(n_elements, "<f4")
        self.seq = 0
        path = Path(folder) / f"{bulk}{n_elements}"
        while not path.exists():
            time.sleep(0.01)
        self.link = Link(
            run="bench", node="worker", incarnation=1, listen=None, bulk=bulk,
            assembly_bytes=256 << 20,
        ).start()  # fmt: skip
        self.link.connect("shard", 1, f"ipc://{path}")
        self.ping()

    def ping(self) -> float:
        self.seq += 1
        start = time.perf_counter()
        self.link.send("shard", Fetch(1, self.seq, 0, 0))
        while not self.link.receive(5.0):
            pass
        return time.perf_counter() - start

    def push_pull(self) -> float:
        self.seq += 1
        start = time.perf_counter()
        view = View(self.slot, 0, self.n_elements)
        self.link.send("shard", Push(1, self.seq, 0, 0, 1, Position(), 0, 0, view))
        while not (messages := self.link.receive(10.0)):
            pass
        params = messages[0][1]
        assert isinstance(params, Params), params
        np.copyto(self.local, params.payload)
        self.link.send("shard", Return(self.seq))
        return time.perf_counter() - start

    def copy(self) -> float:
        start = time.perf_counter()
        np.copyto(self.local, self.slot.array)
        return time.perf_counter() - start

    def close(self) -> None:
        self.link.send("shard", Finish())
        self.link.close()
        self.process.join()


def spin(stop: float) -> None:
    a = np.ones((256, 256), "<f4")
    while time.monotonic() < stop:
        a @ a


def measure(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, n_elements in SIZES.items():
            memory = Worker(folder, "memory", n_elements)
            inline = Worker(folder, "inline", n_elements)
            ways = {"memory": memory.push_pull, "inline": inline.push_pull, "memcpy": memory.copy}
            times: dict[str, list[float]] = {way: [] for way in ways}
            stop = time.monotonic() + 2 * seconds
            while time.monotonic() < stop:
                for way, run in ways.items():
                    times[way].append(run())
            for way, taken in times.items():
                moved = 4 * n_elements * (1 if way == "memcpy" else 2)
                rate = moved / statistics.median(taken[1:]) / 1e9
                print(f"push + pull, {name:>5}, {way:6}: {rate:5.2f} GB/s")
            inline.close()
            if name == "1 MB":
                report_pings(memory, seconds)
            memory.close()


def report_pings(worker: Worker, seconds: float) -> None:
    for kind in ("idle", "busy"):
        stop = time.monotonic() + seconds
        spinners = []
        if kind == "busy":
            context = multiprocessing.get_context("spawn")
            spinners = [context.Process(target=spin, args=(stop + 1,)) for _ in range(2)]
            for process in spinners:
                process.start()
            time.sleep(0.7)
        times = []
        while time.monotonic() < stop + (0.7 if spinners else 0):
            times.append(worker.ping())
        for process in spinners:
            process.join()
        times.sort()
        median, late = times[len(times) // 2], times[len(times) * 99 // 100]
        print(
            f"round trip of a small message, {kind}: {median * 1e6:.0f} us, 99 %: {late * 1e6:.0f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0)
    measure(parser.parse_args().seconds)
    assert threading.active_count() >= 1
