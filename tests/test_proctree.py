"""proctree.py: what /proc says of a process, whatever it is called."""

from __future__ import annotations

import subprocess
from pathlib import Path

from dbctl.proctree import start_of


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
