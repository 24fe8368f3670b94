"""What every test is held to: it leaves nothing behind (docs/reliability.md, G11)."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

CLUSTER = Path(__file__).parent / "cluster"
TOGETHER, QUIET, ALONE = KINDS = ("together", "quiet", "alone")  # of tests, the later the later
FOUND = "kinds"  # a file: those of tests that are not together
COUNTED = "counted"
N_WORKERS = 2
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
        pids: list[str] = []
        # A thread, or a child, may end between two lines of this.
        with contextlib.suppress(OSError):
            pids = (task / "children").read_text().split()
        for pid in pids:
            with contextlib.suppress(OSError):
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
    if report.when != "teardown":
        # Said anew at each try: the second one has the first one's item.
        item.failed_call = report.failed and report.when == "call"  # type: ignore[attr-defined]
        item.stash[UNLIMITED] = report.failed
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests have counted (record_property): a worker of pytest-xdist has no terminal."""
    told = {
        str(text)
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, text in getattr(report, "user_properties", ())
        if name == COUNTED
    }
    for text in sorted(told):
        terminalreporter.write_line(text)


# ------------------------------------------------------------------------- tests side by side


class Turns:
    """Any number of tests of a kind at a time, or one that is alone: locks that all workers have.

    Everybody comes through a turnstile, and who waits there for those of another kind lets nobody
    else pass: no stream of them keeps it from its turn. The kernel gives back what a dead worker
    had.
    """

    def __init__(self, directory: str) -> None:
        self._turnstile, *places = (
            os.open(f"{directory}/{name}", os.O_RDWR | os.O_CREAT, 0o600)
            for name in ("turnstile", *KINDS)
        )
        self._places = dict(zip(KINDS, places, strict=True))

    def take(self, kind: str) -> None:
        """Waits for a turn; one that is had already is given back first."""
        self.give()
        fcntl.flock(self._turnstile, fcntl.LOCK_EX)
        try:
            for place in (place for other, place in self._places.items() if other != kind):
                fcntl.flock(place, fcntl.LOCK_EX)  # all who share it are gone
                fcntl.flock(place, fcntl.LOCK_UN)
            fcntl.flock(self._places[kind], fcntl.LOCK_EX if kind == ALONE else fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._turnstile, fcntl.LOCK_UN)

    def give(self) -> None:
        # Said, and not left to close(2): a test may have forked.
        for place in self._places.values():
            fcntl.flock(place, fcntl.LOCK_UN)

    def close(self) -> None:
        for descriptor in (self._turnstile, *self._places.values()):
            os.close(descriptor)


TURNS = pytest.StashKey[Turns]()
DIRECTORY = pytest.StashKey[str]()
LIMIT = pytest.StashKey[Any]()  # a test's, in pytest-timeout's own form
UNLIMITED = pytest.StashKey[bool]()  # by a failure


def pytest_configure(config: pytest.Config) -> None:
    given = getattr(config, "workerinput", {})
    if given:
        # pytest-xdist writes its own, which whatever a test starts would inherit.
        os.environ["PYTHONPATH"] = given["pythonpath"]
        if not given["pythonpath"]:
            del os.environ["PYTHONPATH"]
    config.stash[DIRECTORY] = given["turns"] if given else tempfile.mkdtemp(prefix="turns-")
    config.stash[TURNS] = Turns(config.stash[DIRECTORY])


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[TURNS].close()
    if not hasattr(config, "workerinput"):
        shutil.rmtree(config.stash[DIRECTORY])


@pytest.fixture
def turns_directory(pytestconfig: pytest.Config) -> Path:
    """Where the locks of this run's workers are."""
    return Path(pytestconfig.stash[DIRECTORY])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A worker of pytest-xdist is about to start."""
    node.workerinput["turns"] = node.config.stash[DIRECTORY]
    node.workerinput["pythonpath"] = os.environ.get("PYTHONPATH", "")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Workers for the whole suite; what is named on the command line runs in this process."""
    return N_WORKERS if config.args_source is config.ArgsSource.TESTPATHS else 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker takes a whole file, whose hosts are set up once; one takes all that are alone."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        _kinds: Mapping[str, str] = {}

        def schedule(self) -> None:
            # Only workers collect: what they found lies beside their locks. No such file: nothing.
            with contextlib.suppress(FileNotFoundError):
                text = Path(config.stash[DIRECTORY], FOUND).read_text(encoding="utf-8")
                self._kinds = json.loads(text)
            super().schedule()

        def _split_scope(self, nodeid: str) -> str:
            kind = self._kinds.get(nodeid, TOGETHER)
            return kind if kind == ALONE else f"{kind} {nodeid.partition('::')[0]}"

    return Scheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The slow ones first; last those that are alone, when there is nobody to wait for."""
    for item in items:
        if item.path.is_relative_to(CLUSTER):
            # Real processes against the clock, on a machine that others load: one more try, shown.
            item.add_marker(pytest.mark.flaky(reruns=1))
    items.sort(key=lambda item: (KINDS.index(kind(item)), not item.path.is_relative_to(CLUSTER)))
    found = Path(config.stash[DIRECTORY], f"{FOUND}-{os.getpid()}")
    found.write_text(json.dumps({i.nodeid: kind(i) for i in items if kind(i) != TOGETHER}))
    found.replace(found.with_name(FOUND))  # each worker writes the same


def pytest_collection_finish() -> None:
    """What all tests have loaded is looked through by no collection of garbage: that took 0.1 s."""
    gc.collect()
    gc.freeze()


def kind(item: pytest.Item) -> str:
    """What may run beside it: the closest of the markers alone and quiet, or anything."""
    return next((mark.name for mark in item.iter_markers() if mark.name in KINDS), TOGETHER)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Around all of a test and its fixtures, and around its time limit: waiting is not its time."""
    turns = item.config.stash[TURNS]
    turns.take(kind(item))
    try:
        return (yield)
    finally:
        turns.give()


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    """Keeps a test's limit, to be set again; pytest-timeout sets it after this."""
    item.stash[LIMIT] = settings


def limit_again(item: pytest.Item) -> None:
    """A failure takes pytest-timeout's limit off; without one all others might wait for ever."""
    settings = item.stash.get(LIMIT, None)
    if settings is not None and not settings.func_only:
        item.config.hook.pytest_timeout_set_timer(item=item, settings=settings)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A second try is alone: what fails then is no neighbour's doing."""
    if getattr(item, "execution_count", 1) > 1:
        item.config.stash[TURNS].take(ALONE)
        limit_again(item)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """What a failed test's fixtures do at its end has the test's limit once more."""
    if not item.stash.get(UNLIMITED, False) or LIMIT not in item.stash:
        return (yield)
    limit_again(item)
    try:
        return (yield)
    finally:
        # A second try may follow, and wait for its turn first: that is not its time.
        item.config.hook.pytest_timeout_cancel_timer(item=item)
