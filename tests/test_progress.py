"""The display: what is shown where and when, and that no reader ends or stops a run."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbctl.progress.display import BAR_S, LINE_S, Display, make_display
from dbctl.progress.stream import MAX_WAITING, Stream
from dbctl.progress.text import (
    FINISHED,
    Snapshot,
    Summary,
    describe_bar,
    describe_duration,
    describe_summary,
    to_json,
)

SNAPSHOT = Snapshot(
    steps=250,
    total_steps=1000,
    epochs=1.5,
    total_epochs=20,
    loss=0.41234,
    test_accuracy=0.953,
    examples=8000,
    examples_per_second=7012.4,
    staleness_mean=1.017,
    fetch_wait_share=0.12,
    replicas_live=2,
    replicas=2,
)
SUMMARY = Summary(
    run_dir="runs/digits/1",
    status="done",
    steps=1000,
    epochs=20.0,
    examples=32000,
    seconds=4.25,
    examples_per_second=7529.4,
    train_loss=0.01,
    test_loss=0.1,
    test_accuracy=0.9722,
)


class Clock:
    """Time that goes on when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


END = "<end>"


def on_terminal(
    *, columns: int, clock: Clock, snapshots: list[Snapshot | str], new: str = ""
) -> tuple[str, list[str]]:
    """What a terminal of `columns` receives, and the lines of standard output. Text: an event."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    out = io.StringIO()
    with open(slave, "w") as err:
        display = make_display(json=False, stderr_is_tty=True, out=out, err=err, clock=clock)
        if new:
            display.begins(new)
        for item in snapshots:
            if isinstance(item, str):
                display.event("checkpoint", item)
            else:
                display.progress(item)
                clock.now += 1
        display.finished(SUMMARY)
        display.close()
        # What is written comes through bit by bit: the kernel hands it over in its own time.
        err.write(END)
        err.flush()
        text = ""
        while not text.endswith(END):
            text += os.read(master, 1 << 16).decode()
    os.close(master)
    text = text.removesuffix(END)
    return text, out.getvalue().splitlines()


# ----------------------------------------------------------------------------------------- lines


def make_lines(*, quiet: bool = False) -> tuple[Display, io.StringIO, io.StringIO, Clock]:
    out, err, clock = io.StringIO(), io.StringIO(), Clock()
    display = make_display(
        json=False, stderr_is_tty=False, quiet=quiet, out=out, err=err, clock=clock
    )
    return display, out, err, clock


def test_a_log_file_gets_the_first_line_at_once_and_then_one_every_few_seconds() -> None:
    display, out, err, clock = make_lines()
    for _ in range(81):  # ten seconds of eight snapshots a second
        display.progress(SNAPSHOT)
        clock.now += 0.125
    lines = err.getvalue().splitlines()
    assert len(lines) == 1 + int(10 / LINE_S)
    assert lines[0] == (
        "epoch 1.50/20  step 250/1,000  loss 0.4123  accuracy 95.30 %  7,012 examples/s"
        "  staleness 1.02  fetch wait 12 %"
    )
    assert out.getvalue() == ""


def test_a_log_file_never_holds_a_carriage_return() -> None:
    """cases: `dbctl train x.yaml > log 2>&1` (tqdm#1342)."""
    display, out, err, clock = make_lines()
    for _ in range(3):
        display.progress(SNAPSHOT)
        clock.now += LINE_S
    display.event("checkpoint", "checkpoint at\rstep 12")
    display.warn("worker-0.0 says \r\x1b[2J")
    display.finished(replace(SUMMARY, run_dir="runs/a\rb"))
    display.close()
    text = err.getvalue() + out.getvalue()
    assert "\r" not in text
    assert "\x1b" not in text
    assert "warning: worker-0.0 says \\r\\x1b[2J\n" in text


def test_events_are_shown_at_once_and_results_go_to_standard_output() -> None:
    display, out, err, _ = make_lines()
    display.progress(SNAPSHOT)
    display.event("evaluation", "test accuracy 95.30 %", {"accuracy": 0.953})
    display.warn("replica 1 is gone")
    assert err.getvalue().splitlines()[1:] == [
        "test accuracy 95.30 %",
        "warning: replica 1 is gone",
    ]
    display.finished(SUMMARY)
    assert out.getvalue() == (
        "done: 1,000 steps, 20.00 epochs, 32,000 examples in 4.2 s (7,529 examples/s)"
        " · train loss 0.01 · test loss 0.1 · test accuracy 97.22 % · runs/digits/1\n"
    )


def test_where_a_new_run_is_kept_is_told_to_people() -> None:
    display, out, err, _ = make_lines()
    display.begins("runs/a\rb")
    assert (out.getvalue(), err.getvalue()) == ("", "run directory: runs/a\\rb\n")
    for display, out, err, _ in (make_lines(quiet=True), make_json()):
        display.begins("runs/x")
        display.close()
        assert (out.getvalue(), err.getvalue()) == ("", "")
    assert (
        "run directory: runs/x"
        in on_terminal(columns=80, clock=Clock(), snapshots=[], new="runs/x")[0]
    )


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({}, "in 35.1 s (363 examples/s) · r"),
        (
            {"lives": 2, "life_examples": 4000, "life_seconds": 11.0},
            "in 35.1 s in 2 lives; this one 4,000 in 11.0 s, 363 examples/s · r",
        ),
        ({"lives": 3}, "in 35.1 s in 3 lives; the last one 363 examples/s · r"),
        ({"lives": 3, "examples_per_second": None}, "in 35.1 s in 3 lives · r"),
    ],
)
def test_after_a_resume_the_last_line_says_what_is_of_this_life(
    known: dict[str, Any], said: str
) -> None:
    """The totals are of all lives, the rate is not."""
    summary = Summary(
        run_dir="r", status="stopped", steps=750, epochs=1.5, examples=12000, seconds=35.1
    )
    summary = replace(summary, **{"examples_per_second": 363.2, **known})
    assert describe_summary(summary) == f"stopped: 750 steps, 1.50 epochs, 12,000 examples {said}"


@pytest.mark.parametrize("status", FINISHED)
def test_every_end_of_a_runs_own_is_done(status: str) -> None:
    assert describe_summary(replace(SUMMARY, status=status)) == describe_summary(SUMMARY)


@pytest.mark.parametrize("status", ["interrupted", "stopped", "failed", "done"])
@pytest.mark.parametrize("loss", [0.1, None])
def test_a_run_that_did_not_measure_its_end_says_when_it_measured(
    status: str, loss: float | None
) -> None:
    """What it measured last is of a moment before."""
    accuracy = None if loss is None else 0.9
    changes: dict[str, Any] = {"measured_steps": 1920, "measured_epochs": 4.0}
    line = describe_summary(
        replace(SUMMARY, status=status, test_loss=loss, test_accuracy=accuracy, **changes)
    )
    said = " · test accuracy 90.00 % · measured at step 1,920, epoch 4.00 · runs/digits/1"
    assert line.endswith(said) == (status != "done" and loss is not None)
    assert ("measured" in line) == (status != "done" and loss is not None)


def test_time_left_is_by_the_speed_since_the_first_snapshot() -> None:
    """A resumed run starts at half: half of the rest took 10 s, so 10 s are left."""
    display, _, err, clock = make_lines()
    display.progress(replace(SNAPSHOT, steps=500))
    clock.now += 10
    display.progress(replace(SNAPSHOT, steps=750))
    first, second = err.getvalue().splitlines()
    assert "eta" not in first
    assert second.endswith("  eta 0:10")


def test_the_limit_that_comes_first_counts() -> None:
    assert replace(SNAPSHOT, steps=10, epochs=5).fraction == 0.25
    assert replace(SNAPSHOT, steps=900, epochs=5).fraction == 0.9
    assert replace(SNAPSHOT, total_steps=None, total_epochs=None).fraction is None
    assert replace(SNAPSHOT, steps=1003).fraction == 1.0
    by_time = replace(SNAPSHOT, steps=10, total_epochs=1e6, seconds=30.0, total_seconds=40.0)
    assert by_time.fraction == 0.75


def test_what_was_not_measured_is_left_out_and_a_lost_replica_is_told() -> None:
    display, _, err, _ = make_lines()
    display.progress(
        Snapshot(
            steps=0, epochs=0.0, examples=0, examples_per_second=None, replicas_live=1, replicas=2
        )
    )
    assert err.getvalue() == "epoch 0.00  step 0  loss -  1 of 2 replicas\n"
    summary = Summary(
        run_dir="r", status="failed", steps=0, epochs=0, examples=0, seconds=0, notes=("a\nb",)
    )
    assert describe_summary(summary) == (
        "failed: 0 steps, 0.00 epochs, 0 examples in 0.0 s · a\\nb · r"
    )


def test_quiet_leaves_warnings_and_the_summary() -> None:
    display, out, err, _ = make_lines(quiet=True)
    display.progress(SNAPSHOT)
    display.event("checkpoint", "saved")
    display.warn("look")
    display.finished(SUMMARY)
    assert err.getvalue() == "warning: look\n"
    assert out.getvalue().startswith("done: ")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (65, "1:05"), (3599.6, "1:00:00"), (86399, "23:59:59")]
)
def test_durations(seconds: float, text: str) -> None:
    assert describe_duration(seconds) == text


# ------------------------------------------------------------------------------------------ JSON


def make_json(*, quiet: bool = False) -> tuple[Display, io.StringIO, io.StringIO, Clock]:
    out, err, clock = io.StringIO(), io.StringIO(), Clock()
    display = make_display(
        json=True, stderr_is_tty=True, quiet=quiet, out=out, err=err, clock=clock
    )
    return display, out, err, clock


def test_json_lines_end_with_finished_and_hold_the_promised_keys() -> None:
    display, out, err, clock = make_json()
    for _ in range(11):
        display.progress(SNAPSHOT)
        clock.now += 1
    display.event("checkpoint", "saved", {"step": np.int64(12), "event": "not this"})
    display.warn("look")
    display.finished(replace(SUMMARY, test_loss=None))
    display.close()
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["event"] for line in lines] == [
        *["progress"] * 3,
        "checkpoint",
        "warning",
        "finished",
    ]
    assert lines[0]["examples_per_second"] == 7012.4
    assert lines[3] == {"event": "checkpoint", "text": "saved", "step": 12}
    assert lines[-1] == {
        "event": "finished",
        "run_dir": "runs/digits/1",
        "status": "done",
        "steps": 1000,
        "epochs": 20.0,
        "examples": 32000,
        "seconds": 4.25,
        "examples_per_second": 7529.4,
        "lives": 1,
        "life_examples": None,
        "life_seconds": None,
        "train_loss": 0.01,
        "test_loss": None,
        "test_accuracy": 0.9722,
        "measured_steps": None,
        "measured_epochs": None,
        "evaluations_left_out": None,
        "error": None,
        "notes": [],
    }
    assert err.getvalue() == ""


def test_json_has_null_where_a_number_is_none() -> None:
    display, out, _, _ = make_json()
    display.finished(replace(SUMMARY, train_loss=nan, test_loss=inf, test_accuracy=None))
    line = json.loads(out.getvalue(), parse_constant=lambda name: pytest.fail(name))
    assert line["train_loss"] is line["test_loss"] is line["test_accuracy"] is None


def test_json_values_of_numpy_and_of_foreign_kinds() -> None:
    value = {"a": np.float32(nan), "b": (np.int8(3), True), 4: ValueError("x"), "c": None}
    assert to_json(value) == {"a": None, "b": [3, True], "4": "x", "c": None}


def test_json_is_one_ascii_line_whatever_the_text() -> None:
    display, out, _, _ = make_json()
    display.event("log", "\u2028é\x9b\udc80\n", {"path": "é"})
    line = out.getvalue()
    assert line.isascii()
    assert line.count("\n") == 1
    assert json.loads(line) == {"event": "log", "text": "\u2028é\x9b\udc80\n", "path": "é"}


def test_quiet_json_still_finishes() -> None:
    display, out, _, _ = make_json(quiet=True)
    display.progress(SNAPSHOT)
    display.event("checkpoint", "saved")
    display.finished(SUMMARY)
    assert json.loads(out.getvalue())["event"] == "finished"


# -------------------------------------------------------------------------------------- terminal


def test_a_terminal_has_one_bar_that_is_drawn_over_itself() -> None:
    text, results = on_terminal(
        columns=200, clock=Clock(), snapshots=[SNAPSHOT, replace(SNAPSHOT, steps=500)]
    )
    frames = [frame.rstrip() for frame in text.split("\r") if frame.strip()]
    assert any(frame.startswith("epoch 1.50/20  step 250/1,000  25%|█████  ") for frame in frames)
    assert "step 500/1,000  50%|██████████          |" in frames[-1]
    assert "loss 0.4123  accuracy 95.30 %  7,012 examples/s  staleness 1.02" in frames[-1]
    assert frames[-1].endswith("fetch wait 12 %")  # the time left is of no use any more
    assert any(frame.endswith("eta 0:02") for frame in frames)
    assert text.count("\n") == 1  # left on the screen at the end, once
    assert results == [describe_summary(SUMMARY)]


def test_a_narrow_terminal_cuts_the_bar_and_never_wraps() -> None:
    text, _ = on_terminal(columns=60, clock=Clock(), snapshots=[SNAPSHOT])
    assert all(len(frame) <= 60 for frame in text.replace("\n", "\r").split("\r"))


@pytest.mark.parametrize("replicas_live", [2, 1])
@pytest.mark.parametrize("steps", [250, 12_345])
def test_eighty_columns_hold_every_figure_that_matters(replicas_live: int, steps: int) -> None:
    """The bar and the rest give way; nothing is cut in the middle."""
    snapshot = replace(
        SNAPSHOT, steps=steps, total_steps=None, total_epochs=20, replicas_live=replicas_live
    )
    text, _ = on_terminal(columns=80, clock=Clock(), snapshots=[snapshot])
    frame = [frame.rstrip() for frame in text.split("\r") if frame.strip()][-1]
    assert len(frame) < 80
    for figure in (f"step {steps:,}", "1.50/20", "loss 0.4123", "acc 95.3%", "7,012 ex", "1.02"):
        assert figure in frame
    assert ("1/2 live" in frame) == (replicas_live == 1)


def test_the_fields_go_by_rank_and_the_place_stays() -> None:
    for columns in range(10, 200):
        line = describe_bar(SNAPSHOT, columns=columns, elapsed="0:10", eta="eta 0:02")
        assert len(line) < columns
        assert "  , " not in line
        shown = [word in line for word in ("ep", "loss", " acc", " ex", "stale", "eta")]
        assert shown == sorted(shown, reverse=True)
        assert "loss 0.4123" in line or columns < 39
    assert all(shown)
    assert "|█████               |" in line


def test_a_terminal_without_a_width_gets_plain_lines() -> None:
    text, _ = on_terminal(columns=0, clock=Clock(), snapshots=[SNAPSHOT])
    assert text.startswith("epoch 1.50/20  step 250/1,000  loss 0.4123")
    assert "\r" not in text.replace("\r\n", "")


def test_after_an_interrupt_no_time_left_is_shown() -> None:
    clock, err = Clock(), io.StringIO()
    display = make_display(json=False, stderr_is_tty=True, out=io.StringIO(), err=err, clock=clock)
    for steps in (250, 500):
        display.progress(replace(SNAPSHOT, steps=steps))
        clock.now += 1
    assert "eta 0:0" in err.getvalue()
    at = len(err.getvalue())
    display.event("stopping", "stopping")
    display.progress(replace(SNAPSHOT, steps=600))
    display.finished(SUMMARY)
    assert "eta" not in err.getvalue()[at:]
    assert "600/1,000" in err.getvalue()[at:]


def test_events_push_the_bar_up() -> None:
    text, _ = on_terminal(columns=100, clock=Clock(), snapshots=[SNAPSHOT, "saved at step 12"])
    before, after = text.split("saved at step 12\r\n")
    assert before.endswith(" \r")  # the bar was wiped
    assert "step 250/1,000" in after


def test_without_a_limit_there_is_no_bar_but_the_figures() -> None:
    open_ended = replace(SNAPSHOT, total_steps=None, total_epochs=None)
    text, _ = on_terminal(columns=100, clock=Clock(), snapshots=[open_ended])
    assert "epoch 1.50  step 250" in text
    assert "%|" not in text
    assert "eta" not in text


def test_the_bar_is_drawn_at_a_pace() -> None:
    clock = Clock()
    err = io.StringIO()
    display = make_display(json=False, stderr_is_tty=True, out=io.StringIO(), err=err, clock=clock)
    display.progress(SNAPSHOT)
    drawn = len(err.getvalue())
    display.progress(replace(SNAPSHOT, steps=999))
    assert len(err.getvalue()) == drawn
    clock.now += BAR_S
    display.progress(replace(SNAPSHOT, steps=999))
    assert len(err.getvalue()) > drawn
    display.close()
    display.close()


# --------------------------------------------------------------------------------------- streams


def test_a_closed_pipe_silences_its_stream_and_nothing_else() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    out = io.StringIO()
    with open(writer, "w") as err:
        display = make_display(json=False, stderr_is_tty=False, out=out, err=err)
        display.warn("nobody reads this")
        display.warn("nor this")
        display.finished(SUMMARY)
        display.close()
    assert out.getvalue().startswith("done")


@pytest.mark.parametrize("json", [False, True])
def test_what_standard_output_does_not_take_is_known_but_for_a_reader_that_is_gone(
    json: bool,
) -> None:
    """`> /dev/full` loses the results, `| head` wanted no more of them."""
    reader, writer = os.pipe()
    os.close(reader)
    for place, why in (("/dev/full", "No space left on device"), (writer, ""), ("/dev/null", "")):
        with open(place, "w") as out, open("/dev/full", "w") as err:
            display = make_display(json=json, stderr_is_tty=False, out=out, err=err)
            display.warn("one line")
            display.finished(SUMMARY)
            display.close()
            assert display.unwritten == why


def test_an_error_of_input_or_output_is_a_reader_that_is_gone_only_of_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master, slave = pty.openpty()
    with open(slave, "w") as terminal, (tmp_path / "file").open("w") as file:
        write = os.write

        def fail(number: int, data: bytes) -> int:
            if number == file.fileno():
                raise OSError(errno.EIO, "Input/output error")
            return write(number, data)

        monkeypatch.setattr("dbctl.progress.stream.os.write", fail)
        streams = [Stream(terminal), Stream(file)]
        os.close(master)
        for stream in streams:
            stream.line("x")
            stream.drain(0.0)
    assert [stream.unwritten for stream in streams] == ["", "Input/output error"]


def test_a_closed_file_is_silent() -> None:
    err = io.StringIO()
    stream = Stream(err)
    err.close()
    stream.line("x")
    assert stream.write("frame") == 5


def test_the_process_ends_with_its_own_status_after_a_closed_pipe() -> None:
    """Python would end with 120: it flushes what a broken pipe left in its buffers."""
    code = (
        "import sys; from dbctl.progress.display import make_display\n"
        "d = make_display(json=True, stderr_is_tty=False)\n"
        "sys.stdin.read()\n"
        "d.event('a', 'b'); d.event('a', 'b'); d.close()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, b"")


def test_a_reader_that_does_not_read_neither_stops_a_run_nor_loses_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dbctl.progress.display.CLOSE_S", 0.2)
    reader, writer = os.pipe()
    received: list[str] = []
    with open(reader) as pipe, open(writer, "w") as out:
        display = make_display(json=True, stderr_is_tty=False, out=out)
        start = time.monotonic()
        for i in range(200):  # 200 kB into a pipe that holds 64
            display.event("log", "x" * 1000, {"i": i})
        assert Stream(out).write("a frame of a bar") == 16  # dropped
        display.close()
        assert time.monotonic() - start < 1.0
        assert display.unwritten == "", "to say so could wait as long as the reader does"
        late = threading.Thread(target=lambda: received.extend(pipe))
        late.start()
        display.finished(SUMMARY)
        display.close()
        assert display.unwritten == ""
        out.close()
        late.join()
    lines = [json.loads(line) for line in received]
    assert [line.get("i") for line in lines] == [*range(200), None]


def test_a_terminal_that_nobody_reads_blocks_no_writer_and_loses_no_line() -> None:
    """poll() calls it writable when it takes one byte; the rest of a line would block."""
    master, slave = pty.openpty()
    lines = [f"{i} " + "é" * 100 for i in range(MAX_WAITING)]
    with open(slave, "w") as terminal:
        try:
            stream = Stream(terminal)
            for line in lines:
                stream.line(line)
            assert stream._waiting, "the terminal took everything"
            assert stream.write("a frame of a bar") == 16  # dropped
            start = time.monotonic()
            stream.drain(0.2)
            assert time.monotonic() - start < 2.0
            assert os.get_blocking(slave), "the descriptor is shared with others"
            text = b""
            while text.count(b"\n") < len(lines):
                text += os.read(master, 1 << 16)
                stream.drain(0.0)
        finally:
            os.close(master)  # frees a writer that blocks
    assert text.decode().splitlines() == lines


def test_a_terminal_with_room_for_half_a_line_end_is_not_asked_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n_asked = 0

    def full(number: int, data: bytes) -> int:
        nonlocal n_asked
        n_asked += 1
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    master, slave = pty.openpty()
    with open(slave, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr("dbctl.progress.stream.os.write", full)
        stream = Stream(terminal)
        stream.line("x")
        assert n_asked == 1
        stream.drain(0.2)
        assert 1 < n_asked < 30
        patch.undo()
        stream.drain(0.0)
        assert os.read(master, 100) == b"x\r\n"
    os.close(master)


def test_what_a_terminal_took_the_beginning_of_is_ended_before_all_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = os.write
    master, slave = pty.openpty()
    with open(slave, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr("dbctl.progress.stream.os.write", lambda n, data: write(n, data[:3]))
        stream = Stream(terminal)
        stream.write("éé frame")
        patch.undo()
        stream.line("|next")
        text = b""
        while not text.endswith(b"\n"):
            text += os.read(master, 100)
    os.close(master)
    assert text.decode() == "éé frame|next\r\n"


def test_a_pipe_with_one_free_page_blocks_no_writer_of_escapes() -> None:
    """A lone surrogate becomes six bytes."""
    reader, writer = os.pipe()
    size = fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)
    with open(reader, "rb") as pipe, open(writer, "w") as out:
        for _ in range(size // 4096 - 1):
            os.write(writer, b"y" * 4096)
        stream = Stream(out)
        stream.line("\udcff" * 999)
        assert len(stream._waiting) == 1
        pipe.read(size - 4096)
        stream.drain(0.0)
        assert pipe.read(5995) == b"\\udcff" * 999 + b"\n"


def test_the_newest_lines_are_kept_whole() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with open(reader, "rb") as pipe, open(writer, "w") as out:
        stream = Stream(out)
        for i in range(3 * MAX_WAITING):
            stream.line(f"{i} " + "x" * 1500)
        assert len(stream._waiting) == MAX_WAITING
        text = b""
        while stream._waiting:
            text += os.read(pipe.fileno(), 1 << 20)
            stream.drain(0.0)
        text += os.read(pipe.fileno(), 1 << 20)
    lines = text.decode().splitlines()
    assert {len(line.split(" ")[1]) for line in lines} == {1500}
    assert lines[-1].startswith(f"{3 * MAX_WAITING - 1} ")


@pytest.mark.parametrize("setting", [{"LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}])
def test_utf_8_in_every_locale(setting: dict[str, str]) -> None:
    """cases: `LANG=C`, non-ASCII name and path."""
    code = (
        "from dbctl.progress.display import make_display\n"
        "d = make_display(json=False, stderr_is_tty=False)\n"
        "d.warn(chr(233) + chr(0xDC80)); d.close()\n"
    )
    env = {**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", **setting}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=30)
    assert done.stderr.decode() == "warning: é\\udc80\n"


def test_nothing_heavy_is_imported_before_a_bar_is_drawn() -> None:
    code = (
        "import sys; from dbctl.progress.display import make_display\n"
        "d = make_display(json=False, stderr_is_tty=True)\n"
        "print(sorted({'tqdm', 'numpy', 'zmq', 'multiprocessing'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "[]\n"


def test_a_bar_makes_no_thread_and_no_semaphore() -> None:
    code = (
        "import sys, io, threading; from dbctl.progress.display import make_display\n"
        "from dbctl.progress.text import Snapshot\n"
        "d = make_display(json=False, stderr_is_tty=True, err=io.StringIO())\n"
        "d.progress(Snapshot(steps=1, epochs=1, examples=1, examples_per_second=1,\n"
        "           replicas_live=1, replicas=1))\n"
        "print(threading.active_count(), 'multiprocessing.synchronize' in sys.modules)\n"
        "d.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "1 False\n"
