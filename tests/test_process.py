"""Logs, their tails in errors, and the private directory's end."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbctl.process import (
    clear_runtime,
    escape,
    escape_line,
    log,
    one_line,
    raise_descriptor_limit,
    read_line,
    tail,
)
from tests.cluster.harness import state, wait_until


def test_a_log_line_says_when_and_who(capsys: pytest.CaptureFixture[str]) -> None:
    log("shard-0", "ready")
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} shard-0 ready\n", capsys.readouterr().err)


def test_a_log_that_cannot_be_written_does_not_end_the_run() -> None:
    code = "from dbctl.process import log; log('shard-0', 'ready'); print('went on')"
    with open("/dev/full", "w") as full:
        with pytest.raises(OSError, match="No space"):  # the fault is there
            os.write(full.fileno(), b"x")
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full)
    assert done.stdout == b"went on\n"


@given(st.text())
def test_escaped_text_cannot_move_a_cursor(text: str) -> None:
    shown = escape(text)
    assert all(c == "\n" or c.isprintable() for c in shown)
    shown.encode()  # lone surrogates are gone too


def test_escape_keeps_what_people_read() -> None:
    assert escape("naïve 線 ok\n\x1b[2J\rx\ty\u202e") == "naïve 線 ok\n\\x1b[2J\\rx   y\\u202e"


def test_a_line_stays_one_line() -> None:
    assert escape_line("a\tb\n\x7f\u202e\ud800ä") == "a\\tb\\n\\x7f\\u202e\\ud800ä"


@pytest.mark.parametrize("half", [b"", b'{"a": '])
def test_a_line_that_never_ends_is_given_up(half: bytes) -> None:
    read_fd, write_fd = os.pipe()
    try:
        os.write(write_fd, half)
        begin = time.monotonic()
        assert read_line(read_fd, 100, limit_s=0.2) is None
        assert 0.2 <= time.monotonic() - begin < 2.0
        os.write(write_fd, b"x\n")
        assert read_line(read_fd, 100, limit_s=0.0) == b"x", "what is there needs no time"
    finally:
        os.close(read_fd)
        os.close(write_fd)


def test_an_error_as_one_bounded_line() -> None:
    assert one_line(ValueError("two\nlines\x1b")) == "ValueError: two lines\\x1b"
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert len(one_line(ValueError("x" * 9999))) == 500


def test_the_tail_is_the_last_lines_of_this_life(tmp_path: Path) -> None:
    path = tmp_path / "shard-0.log"
    path.write_text("of an earlier life\n")
    start = path.stat().st_size
    with path.open("a") as file:
        file.writelines(f"line {i}\n" for i in range(50))
    assert tail(path, start).splitlines() == [f"line {i}" for i in range(30, 50)]
    assert tail(path, path.stat().st_size) == ""
    assert tail(path, 0).count("\n") == 19


def test_the_tail_is_bounded_and_escaped(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"first\n" + b"\x1b\x00\xff" * 100_000 + b"\nend\n")
    text = tail(path)
    assert len(text) <= 4096
    assert text.endswith("end")
    assert text.replace("\n", "").isprintable()


def test_no_log_no_tail(tmp_path: Path) -> None:
    assert tail(tmp_path / "none.log") == ""


def test_the_private_directory_goes_with_its_sockets(tmp_path: Path) -> None:
    runtime = tmp_path / "r"
    runtime.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(runtime / "shard-0.1.sock"))
        os.mkfifo(runtime / "shard-0.1.sock.line")
        clear_runtime(runtime)
    assert not runtime.exists()
    clear_runtime(runtime)  # twice is fine


def test_somebodys_files_are_never_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("four years")
    (tmp_path / "link").symlink_to("thesis.txt")
    clear_runtime(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["link", "thesis.txt"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asked of Linux only")
@pytest.mark.parametrize("stopped", [False, True])
def test_the_kernel_ends_a_child_whose_parent_was_killed(stopped: bool) -> None:
    child = (
        f"import signal, sys, time; sys.path[:] = {sys.path!r};"
        "from dbctl.process import end_with_parent; end_with_parent(signal.SIGKILL);"
        "print('set', flush=True); time.sleep(60)"
    )
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline() == b"set\n"
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        assert len(children) == 1
        pid = int(children[0])
        if stopped:
            os.kill(pid, signal.SIGSTOP)
            wait_until(lambda: state(pid) == "T", 5.0)
        parent.kill()
        parent.wait()
        assert parent.stdout.read() == b"", "its output is closed: it has ended"


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    try:
        assert raise_descriptor_limit() == before[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
