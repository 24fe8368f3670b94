"""A thread that waits is not a process that stands still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from dbctl.run.pulse import PULSE_S, Pulse
from tests.cluster.harness import state, wait_until

ASKS = """
import sys, time
from dbctl.run.pulse import Pulse
pulse = Pulse()
pulse.start()
print("ready", flush=True)
sys.stdin.readline()
print(pulse.standstill(), pulse.standstill(), flush=True)
pulse.close()
"""


def test_a_main_thread_that_waits_is_no_standstill() -> None:
    pulse = Pulse()
    pulse.start()
    try:
        time.sleep(1.0)
        assert pulse.standstill() < 0.6
    finally:
        pulse.close()


@pytest.mark.timeout(30)
def test_a_stopped_process_stood_still_and_says_so_once() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ASKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == b"ready\n"
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: state(process.pid) == "T")
        time.sleep(1.0)
        process.stdin.write(b"\n")
        os.kill(process.pid, signal.SIGCONT)
        first, second = map(float, process.stdout.readline().split())
    assert 1.0 <= first < 5.0
    assert second < PULSE_S


def test_closed_before_it_is_started() -> None:
    Pulse().close()
