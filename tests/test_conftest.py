"""The leak check itself: it must see each kind of thing that a test can leave."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tests.conftest import Census


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


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm on this system")
def test_named_shared_memory_is_seen() -> None:
    census = Census()
    with tempfile.NamedTemporaryFile(prefix="dbctl-", dir="/dev/shm") as file:
        assert f"/dev/shm/{Path(file.name).name}" in census.left_since()
    assert census.left_after(0.0) == []
