"""What every test is held to: it leaves nothing behind (docs/reliability.md, G11)."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

CLUSTER = Path(__file__).parent / "cluster"
GRACE_S = 3.0  # threads and children may be on their way out when a test returns


def resource_tracker() -> tuple[int | None, int | None]:
    """(pid, descriptor) of multiprocessing's own helper, which stays as long as this process."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    tracker = getattr(module, "_resource_tracker", None)
    return getattr(tracker, "_pid", None), getattr(tracker, "_fd", None)


def children() -> set[str]:
    """This process's children, dead and unreaped ones too, as `pid name`."""
    found = set()
    tracker_pid, _ = resource_tracker()
    for task in Path("/proc/self/task").iterdir():
        # A thread, or a child, may end between two lines of this.
        with contextlib.suppress(OSError):
            for pid in (task / "children").read_text().split():
                if pid != str(tracker_pid):
                    found.add(f"{pid} {Path(f'/proc/{pid}/comm').read_text().strip()}")
    return found


def descriptors() -> Counter[str]:
    """What this process has open, without numbers that differ between two of a kind."""
    found: Counter[str] = Counter()
    _, tracker_fd = resource_tracker()
    for fd in os.listdir("/proc/self/fd"):
        if fd == str(tracker_fd):
            continue
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the one that listdir itself had open
        kind, _, number = target.partition(":[")
        found[kind if number else target] += 1
    return found


def shared_memory() -> set[str]:
    """Named shared memory of dbctl (it makes none): others use /dev/shm at the same time."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if name.startswith("dbctl")}


class Census:
    """What exists now, to be compared with later."""

    def __init__(self) -> None:
        self.descriptors = descriptors()
        self.threads = set(threading.enumerate())
        self.children = children()
        self.memory = shared_memory()

    def left_since(self) -> list[str]:
        now = Census()
        left = [f"{n} x open {what}" for what, n in (now.descriptors - self.descriptors).items()]
        left += [f"thread {thread.name}" for thread in now.threads - self.threads]
        left += [f"child {child}" for child in now.children - self.children]
        left += [f"/dev/shm/{name}" for name in now.memory - self.memory]
        return sorted(left)

    def left_after(self, grace_s: float) -> list[str]:
        """What is still there once what was ending has ended."""
        deadline = time.monotonic() + grace_s
        while left := self.left_since():
            if time.monotonic() > deadline:
                break
            gc.collect()
            time.sleep(0.02)
        return left


@pytest.fixture(autouse=True, scope="session")
def collector() -> None:
    """pyzmq's own thread, which gives back what was sent without a copy, stays with a process."""
    import zmq

    zmq.Frame(bytes(1 << 17), copy=False)  # the first one starts it


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a descriptor, thread, child, named memory or socket behind."""
    # Of its own, so that runs beside this one are not seen; short, because of sockets' names.
    runtime = tempfile.mkdtemp(prefix="t-", dir="/tmp")
    saved = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = runtime
    census = Census()
    try:
        yield
        left = census.left_after(GRACE_S)
        left += sorted(str(path) for path in Path(runtime).rglob("*"))
    finally:
        if saved is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = saved
        shutil.rmtree(runtime, ignore_errors=True)
    # What a failed test leaves is its failure's doing.
    failed = getattr(request.node, "failed_call", False)
    assert failed or not left, f"left behind: {left}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "call" and report.failed:
        item.failed_call = True  # type: ignore[attr-defined]
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real processes against the clock, on a machine that others load: one more try, shown."""
    for item in items:
        if item.path.is_relative_to(CLUSTER):
            item.add_marker(pytest.mark.flaky(reruns=1))
