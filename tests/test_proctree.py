"""proctree.py: what /proc says of a process, whatever it is called."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from dbctl.proctree import children_of, start_of
from tests.cluster.harness import state, wait_until


def test_the_start_time_is_found_behind_any_process_name(tmp_path: Path) -> None:
    """proc(5): the name is in parentheses and may hold anything."""
    name = tmp_path / "a) R 1 (b"
    name.symlink_to(subprocess.run(["which", "sleep"], capture_output=True, text=True).stdout[:-1])
    with subprocess.Popen(["sleep", "60"]) as plain, subprocess.Popen([name, "60"]) as process:
        start, before = (start_of(p.pid) for p in (process, plain))
        assert start is not None
        assert before is not None
        assert 0 <= start - before < 60 * 100  # ticks of the clock
        for one in (plain, process):
            one.kill()


def test_living_children_with_their_words_and_sizes() -> None:
    with subprocess.Popen(["sleep", "30"]) as child:
        wait_until(lambda: _words(child.pid) == ["sleep", "30"])
        [found] = [one for one in children_of([os.getpid()])[os.getpid()] if one.pid == child.pid]
        assert found.rss_bytes > 4096
        assert 0.0 <= found.age_s < 20.0
        child.kill()
        wait_until(lambda: state(child.pid) == "Z")
        assert child.pid not in [one.pid for one in children_of([os.getpid()])[os.getpid()]]
    assert children_of([2**30]) == {2**30: []}


def _words(pid: int) -> list[str]:
    return next((o.words for o in children_of([os.getpid()])[os.getpid()] if o.pid == pid), [])
