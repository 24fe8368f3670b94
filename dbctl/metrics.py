"""metrics.jsonl of a run: one JSON object a line, only ever appended.

Rules of this file: UTF-8 whatever the locale; each line is one write, so a kill leaves at most one
cut line, which the next run takes off. Readers pass over what is no JSON object.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from dbctl.errors import file_at_fault

_BLOCK_BYTES = 1 << 16


class Metrics:
    """Appends to metrics.jsonl, each record at once; a context manager. For the lock's holder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with file_at_fault(path, "written"):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                _mend_tail(self._fd)
            except BaseException:
                os.close(self._fd)
                raise

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, record: Mapping[str, Any]) -> None:
        """One line; numbers that are not finite become null. RunError leaves no half line."""
        line = msgspec.json.encode(record) + b"\n"
        with file_at_fault(self._path, "written"):
            before = os.fstat(self._fd).st_size
            try:
                n_written = os.write(self._fd, line)
                if n_written < len(line):  # the disk is full; the rest says so, or goes in
                    os.write(self._fd, line[n_written:])
            except OSError:
                os.ftruncate(self._fd, before)
                raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of metrics.jsonl in order; none where there is no file.

    A line that is no JSON object is left out: a kill, or another process that is still writing,
    cuts the last one.
    """
    if not path.exists():
        return
    with file_at_fault(path, "read"), open(path, "rb") as file:
        for line in file:
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                yield msgspec.json.decode(line, type=dict[str, Any])


def of_one_step(records: Iterable[Mapping[str, Any]], node: str, figure: str) -> float:
    """What a step of worker `node` adds to a figure of its reports; `time`: how long it takes, s.

    Between its reports at a quarter of its steps and at the last step, so that how a run begins,
    and what it writes at its end, is left out. ValueError: it made too few steps, or reported none.
    """
    own = [r for r in records if r.get("event") == "worker" and r["node"] == node]
    n_steps = own[-1]["step"] if own else 0
    reached = (next((r for r in own if r["step"] >= at), None) for at in (n_steps / 4, n_steps))
    first, last = reached
    if first is None or last is None or first["step"] == n_steps:
        raise ValueError(f"{node}: {n_steps} steps are too few to tell what one takes")
    return float((last[figure] - first[figure]) / (n_steps - first["step"]))


def _mend_tail(fd: int) -> None:
    """Takes off a last line that a kill cut; ends it where only the newline is missing."""
    size = os.fstat(fd).st_size
    start, tail = size, b""
    while start and b"\n" not in tail:
        step = min(start, _BLOCK_BYTES)
        start -= step
        tail = os.pread(fd, step, start) + tail
    tail = tail.rpartition(b"\n")[2]
    if not tail:
        return
    try:
        msgspec.json.decode(tail, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        os.ftruncate(fd, size - len(tail))
    else:
        os.write(fd, b"\n")
