"""The leak check itself: it must see each kind of thing that a test can leave. And the turns."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ALONE, KINDS, QUIET, TOGETHER, Census, Turns, children

ROOT = Path(__file__).parent.parent


def test_nothing_is_seen_where_nothing_was_left() -> None:
    assert Census().left_after(0.0) == []


def test_a_descriptor_is_seen_until_it_is_closed() -> None:
    census = Census()
    read_fd, write_fd = os.pipe()
    try:
        assert census.left_after(0.05) == ["2 x open pipe"]
    finally:
        os.close(read_fd)
        os.close(write_fd)
    assert census.left_after(0.0) == []


def test_a_thread_is_seen_until_it_ends() -> None:
    census = Census()
    event = threading.Event()
    thread = threading.Thread(target=event.wait, name="left-over")
    thread.start()
    try:
        assert census.left_after(0.05) == ["thread left-over"]
    finally:
        event.set()
        thread.join()
    assert census.left_after(0.0) == []


def test_a_child_is_seen_also_when_it_is_dead_and_not_reaped() -> None:
    census = Census()
    child = subprocess.Popen(["sleep", "60"])
    try:
        # The kernel closes what Popen waits for a moment before it gives the child its name.
        deadline = time.monotonic() + 10.0
        while Path(f"/proc/{child.pid}/comm").read_text() != "sleep\n":
            assert time.monotonic() < deadline
        assert census.left_after(0.0) == [f"child {child.pid} sleep"]
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert census.left_after(0.0) == [f"child {child.pid} sleep"]
    finally:
        child.kill()
        child.wait()
    assert census.left_after(0.0) == []


def test_a_child_that_ends_just_now_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    read_text = Path.read_text
    with subprocess.Popen(["sleep", "60"]) as ends, subprocess.Popen(["sleep", "60"]) as stays:

        def read(path: Path, *words: Any, **named: Any) -> str:
            if str(path) == f"/proc/{ends.pid}/comm":
                raise ProcessLookupError(path)
            return read_text(path, *words, **named)

        monkeypatch.setattr(Path, "read_text", read)
        try:
            pids = {child.split()[0] for child in children()}
            assert str(ends.pid) not in pids
            assert str(stays.pid) in pids
        finally:
            ends.kill()
            stays.kill()


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm on this system")
def test_named_shared_memory_is_seen() -> None:
    census = Census()
    with tempfile.NamedTemporaryFile(prefix="dbctl-", dir="/dev/shm") as file:
        assert f"/dev/shm/{Path(file.name).name}" in census.left_since()
    assert census.left_after(0.0) == []


# ------------------------------------------------------------------------- tests side by side

# Takes a turn, says so, and gives it back when it is told to.
TAKER = """import sys
from tests.conftest import Turns
turns = Turns(sys.argv[1])
print("waits", flush=True)
turns.take(sys.argv[2])
print("has it", flush=True)
sys.stdin.readline()
turns.give()
print("gave it back", flush=True)
sys.stdin.readline()
"""


class Taker:
    """A neighbour: another process that takes a turn."""

    def __init__(self, directory: Path, how: str) -> None:
        words = [sys.executable, "-c", TAKER, str(directory), how]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(words, cwd=ROOT, text=True, **pipes)
        self.hears("waits")

    def hears(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{line}\n"

    def waits(self) -> bool:
        """It is held up by the kernel, in flock(2)."""
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        return any(
            line[1:3] == ["->", "FLOCK"] and line[5] == str(self.process.pid) for line in locks
        )

    def give(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture
def taker(tmp_path: Path) -> Iterator[Callable[[str], Taker]]:
    with contextlib.ExitStack() as stack:

        def make(how: str) -> Taker:
            one = Taker(tmp_path, how)
            stack.callback(one.process.communicate)
            stack.callback(one.process.kill)
            return one

        yield make


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_who_wants_to_be_alone_waits_for_all_and_all_that_come_later_wait_for_it(
    taker: Callable[[str], Taker],
) -> None:
    first, second = taker(TOGETHER), taker(TOGETHER)
    first.hears("has it")
    second.hears("has it")
    alone = taker(ALONE)
    until(alone.waits)
    late = taker(TOGETHER)
    until(late.waits)
    first.give()
    first.hears("gave it back")
    until(alone.waits)
    second.give()
    alone.hears("has it")
    until(late.waits)
    alone.give()
    late.hears("has it")


def test_those_that_mostly_wait_wait_for_others_and_not_for_each_other(
    taker: Callable[[str], Taker],
) -> None:
    first = taker(TOGETHER)
    first.hears("has it")
    quiet = taker(QUIET)
    until(quiet.waits)
    first.give()
    quiet.hears("has it")
    taker(QUIET).hears("has it")
    late = taker(TOGETHER)
    until(late.waits)
    quiet.give()
    quiet.hears("gave it back")
    until(late.waits)


def test_a_turn_of_a_worker_that_died_is_free(taker: Callable[[str], Taker]) -> None:
    dead = taker(ALONE)
    dead.hears("has it")
    next_one = taker(ALONE)
    until(next_one.waits)
    dead.process.kill()
    next_one.hears("has it")


def test_a_turn_can_be_changed_for_one_alone(tmp_path: Path, taker: Callable[[str], Taker]) -> None:
    """Two that do so at the same time do not wait for each other."""
    turns, other = Turns(str(tmp_path)), taker(TOGETHER)
    try:
        turns.take(TOGETHER)
        other.hears("has it")
        other.give()
        turns.take(ALONE)
        late = taker(TOGETHER)
        until(late.waits)
        turns.give()
        late.hears("has it")
    finally:
        turns.close()


@pytest.mark.alone
def test_one_that_is_alone_has_its_turn_to_itself(turns_directory: Path) -> None:
    """The marker reaches the lock: nobody else could take it now."""
    assert held(turns_directory) == {ALONE: fcntl.LOCK_EX}


def test_others_share_theirs(turns_directory: Path) -> None:
    assert held(turns_directory) == {TOGETHER: fcntl.LOCK_SH}


@pytest.mark.quiet
def test_those_that_mostly_wait_share_another(turns_directory: Path) -> None:
    assert held(turns_directory) == {QUIET: fcntl.LOCK_SH}


def held(directory: Path) -> dict[str, int]:
    """The locks that somebody has, by kind: shared, or by one."""
    found = {}
    for kind in KINDS:
        for how in (fcntl.LOCK_EX, fcntl.LOCK_SH):
            with open(directory / kind) as file, contextlib.suppress(BlockingIOError):
                fcntl.flock(file, how | fcntl.LOCK_NB)
                break
            found[kind] = fcntl.LOCK_SH if how == fcntl.LOCK_EX else fcntl.LOCK_EX
    return found


def test_ctrl_c_reaches_what_a_test_starts() -> None:
    """A worker that ignored it would hand that on."""
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == b"True\n"


SUITE = """import fcntl
import pytest

def shared(directory):
    with open(directory / "alone") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

@pytest.mark.flaky(reruns=1)
def test_twice(request, turns_directory):
    n = request.node.execution_count
    assert shared(turns_directory) == (n == 1)
    assert n == 2, "on purpose"

@pytest.mark.alone
@pytest.mark.parametrize("n", range(3))
def test_alone(turns_directory, n):
    assert not shared(turns_directory)

def test_counts(record_property):
    record_property("counted", "ledger: 7 histories")
"""


def suite(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A run of the tests in a directory, held to what all here are held to."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", *words, str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_second_try_is_alone_and_one_worker_has_all_that_are(tmp_path: Path) -> None:
    """With two workers, as they are in a run of everything."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    for name in "ab":
        (tmp_path / f"test_{name}.py").write_text(SUITE)
    done = suite(tmp_path, "-v", "-n", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"= 10 passed, .*2 rerun in", done.stdout), done.stdout
    assert "\nledger: 7 histories\n" in done.stdout, "what a test has counted is shown"
    assert len(set(re.findall(r"(gw\d)\].* PASSED .*::test_alone", done.stdout))) == 1


LATE = """import time
import pytest

@pytest.mark.flaky(reruns=1)
@pytest.mark.timeout(0.3)
def test_hangs_at_the_second_try(request):
    assert request.node.execution_count == 2, "on purpose"
    time.sleep(50)
"""


def test_a_second_try_has_a_limit_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "test_late.py").write_text(LATE)
    done = suite(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search("= 1 failed, .*1 rerun in", done.stdout), done.stdout
    assert "Timeout (>0.3s)" in done.stdout


LATE_END = """import time
from pathlib import Path
import pytest

@pytest.fixture
def slow(request):
    yield
    time.sleep(2)
    Path(__file__).with_name(f"slept-{request.node.name}").touch()

@pytest.fixture
def broken(slow):
    pytest.fail("on purpose")

@pytest.mark.flaky(reruns=1)
@pytest.mark.timeout(0.3)
def test_fails(slow):
    pytest.fail("on purpose")

@pytest.mark.timeout(0.3)
def test_does_not_begin(broken):
    pass

@pytest.mark.timeout(0.3, func_only=True)
def test_has_a_limit_of_its_own_only(slow):
    pytest.fail("on purpose")
"""


def test_the_end_of_a_failed_test_has_its_limit_too(tmp_path: Path) -> None:
    (tmp_path / "test_late_end.py").write_text(LATE_END)
    done = suite(tmp_path)
    assert re.search("= 2 failed, 3 errors, 2 rerun in", done.stdout), done.stdout
    slept = [path.name for path in tmp_path.glob("slept-*")]
    assert slept == ["slept-test_has_a_limit_of_its_own_only"], done.stdout


WAITS = """import fcntl
import threading
import pytest
import tests.conftest

tests.conftest.GRACE_S = 0.1

@pytest.mark.flaky(reruns=1)
@pytest.mark.timeout(1)
def test_waits_for_its_second_turn(request, turns_directory):
    if request.node.execution_count == 1:
        neighbour = open(turns_directory / "together")
        fcntl.flock(neighbour, fcntl.LOCK_SH)
        threading.Timer(2.0, neighbour.close).start()
        pytest.fail("on purpose")
"""


def test_to_wait_for_a_second_try_is_not_its_time(tmp_path: Path) -> None:
    (tmp_path / "test_waits.py").write_text(WAITS)
    done = suite(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search("= 1 passed, .*1 rerun in", done.stdout), done.stdout


LEAKS = """import os
import pytest
import tests.conftest

tests.conftest.GRACE_S = 0.1

@pytest.fixture
def broken_later(request):
    if request.node.execution_count == 2:
        os.open("/dev/null", os.O_RDONLY)
        pytest.fail("on purpose")

@pytest.mark.flaky(reruns=1)
def test_leaves_something_at_each_try(request):
    os.open("/dev/null", os.O_RDONLY)
    assert request.node.execution_count == 2, "on purpose"

@pytest.mark.flaky(reruns=1)
def test_does_not_begin_at_the_second_try(broken_later):
    pytest.fail("on purpose")
"""


def test_a_second_try_is_held_to_leave_nothing(tmp_path: Path) -> None:
    """That the first one failed excuses only what that one left."""
    (tmp_path / "test_leaks.py").write_text(LEAKS)
    done = suite(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search("= 1 passed, 3 errors, 2 rerun in", done.stdout), done.stdout
    told = re.findall(
        r"^E +AssertionError: left behind: \['1 x open /dev/null'\]", done.stdout, re.M
    )
    assert len(told) == 2, done.stdout
