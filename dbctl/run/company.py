"""How much longer computing takes in company: while another core of this machine computes as well.

Rules of this file: wall time, in turns with the same work done alone; a second or so.

Theory of operation. Partitions of one host share its memory, its caches and its power, and a round
is over when the slower one is through: what one process by itself does is no measure of it. Two
processes, of which `python -m dbctl.run.company` is the other one, do the same piece of the network
at the same time and wait for each other; the mean over the rounds, not the median, is what a run of
many rounds takes.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable

from dbctl.errors import LaunchError
from dbctl.experiment.resolve import from_json, to_json
from dbctl.experiment.specs import Experiment
from dbctl.launch.base import thread_variables
from dbctl.process import read_line
from dbctl.run.partner import LIMIT_S, partner, say
from dbctl.run.samples import Sample, typical

BUDGET_S = 1.0  # of all rounds
ROUNDS = range(6, 60)
LINE_BYTES_MAX = 1 << 24
GO, DONE = b"g", b"d"
OTHER = "the second process that measures company"


def measure_company(experiment: Experiment, *, threads: int) -> float:
    """Seconds in company over seconds alone, at least 1. LaunchError: no other process."""
    sample = _sample(experiment)
    with partner(
        "dbctl.run.company", env=dict(thread_variables(threads)), line=to_json(experiment)
    ) as other:
        return _ratio(sample, lambda: _started(other), lambda: _done(other))


def _sample(experiment: Experiment) -> Sample:
    return typical(experiment.network, n_batch=experiment.optimizer.batch_size)


def _ratio(sample: Sample, start: Callable[[], None], wait: Callable[[], None]) -> float:
    alone_s = together_s = 0.0
    until = time.perf_counter() + BUDGET_S
    for count in range(ROUNDS.stop):
        sample.prepare()
        began = time.perf_counter()
        sample.run()
        between = time.perf_counter()
        sample.prepare()
        again = time.perf_counter()
        start()
        sample.run()
        wait()
        ended = time.perf_counter()
        if count:  # the first touches all memory
            alone_s += between - began
            together_s += ended - again
        if count >= ROUNDS.start and ended > until:
            break
    return max(1.0, together_s / alone_s)


def _started(other: subprocess.Popen[bytes]) -> None:
    assert other.stdin is not None
    try:
        os.write(other.stdin.fileno(), GO)
    except BrokenPipeError:
        raise LaunchError(OTHER, "has ended: try again") from None


def _done(other: subprocess.Popen[bytes]) -> None:
    assert other.stdout is not None
    fd = other.stdout.fileno()
    if not select.select([fd], [], [], LIMIT_S)[0]:
        raise LaunchError(OTHER, f"did not answer in {LIMIT_S:g} s: try again")
    if not os.read(fd, 1):
        raise LaunchError(OTHER, "has ended: try again")


def main() -> None:
    """The other process: a piece of the network each time that it is told to."""
    line = read_line(0, LINE_BYTES_MAX)
    if line is None:
        sys.exit("no experiment on standard input")
    sample = _sample(from_json(line.decode()))
    sample.prepare()
    sample.run()
    say(b"ready\n")
    while os.read(0, 1):
        sample.run()
        say(DONE)
        sample.prepare()


if __name__ == "__main__":
    main()
