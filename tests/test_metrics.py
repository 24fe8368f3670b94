"""metrics.jsonl is read and gone on with whatever cut its last line."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from dbctl.errors import RunError
from dbctl.metrics import Metrics, of_one_step, read_metrics


def test_metrics_go_on_after_a_resume(tmp_path: Path) -> None:
    """ray#46814."""
    path = tmp_path / "metrics.jsonl"
    assert list(read_metrics(path)) == []
    for start in (0, 3):
        with Metrics(path) as metrics:
            for step in range(start, start + 3):
                metrics.append({"step": step, "name": "é", "loss": float("inf")})
                assert [r["step"] for r in read_metrics(path)] == list(range(step + 1))
    assert path.read_text("utf-8").splitlines()[5] == '{"step":5,"name":"é","loss":null}'


@pytest.mark.parametrize(
    ("tail", "n_kept"),
    [
        (b'{"step":1', 1),
        (b'{"step":1}', 2),  # only the newline was cut
        (b"\0" * 9, 1),
        (b'{"step":"\xc3', 1),
        (b'{"x":"' + b"y" * (3 << 16), 1),
        (b"1", 1),
    ],
)
def test_a_cut_last_line_is_left_out_and_ended_before_the_next(
    tmp_path: Path, tail: bytes, n_kept: int
) -> None:
    path = tmp_path / "metrics.jsonl"
    first = b'{"step":0}\n'
    path.write_bytes(first + tail)
    assert len(list(read_metrics(path))) == n_kept
    with Metrics(path) as metrics:
        metrics.append({"step": 9})
    assert [r["step"] for r in read_metrics(path)] == [*range(n_kept), 9]
    assert all(isinstance(json.loads(line), dict) for line in path.read_bytes().splitlines())


def test_a_file_that_is_one_cut_line_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"st')
    with Metrics(path) as metrics:
        metrics.append({"step": 0})
    assert path.read_bytes() == b'{"step":0}\n'


def test_each_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a kill leaves at most one cut line."""
    real, writes = os.write, []

    def write(fd: int, data: bytes) -> int:
        writes.append(bytes(data))
        return real(fd, data)

    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        monkeypatch.setattr(os, "write", write)
        metrics.append({"step": 0})
        metrics.append({"step": 1})
        monkeypatch.undo()
    assert writes == [b'{"step":0}\n', b'{"step":1}\n']


def test_a_line_that_does_not_fit_leaves_nothing_of_itself(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Metrics(path) as metrics:
        metrics.append({"step": 0})
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, old[1]))
        try:
            with pytest.raises(RunError, match=r"jsonl: cannot be written: file too large"):
                metrics.append({"text": "x" * 200})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
        assert path.read_bytes() == b'{"step":0}\n'
        metrics.append({"step": 1})
    assert [record["step"] for record in read_metrics(path)] == [0, 1]


def test_metrics_that_cannot_be_opened_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot be written: is a directory"):
        Metrics(tmp_path)
    with pytest.raises(RunError, match=r"cannot be read: is a directory"):
        list(read_metrics(tmp_path))


def test_a_step_is_timed_without_a_run_s_beginning_and_end() -> None:
    """Nor does a worker at rest count, which reports on while the last checkpoint is written."""
    reports = [(0, 0.0, 0.0), (1, 9.0, 5.0), (4, 10.0, 6.0), (10, 16.0, 9.0), (16, 22.0, 12.0)]
    records: list[dict[str, Any]] = [
        {"event": "worker", "node": "worker-0.0", "step": step, "time": time, "compute_s": compute}
        for step, time, compute in [*reports, (16, 30.0, 12.0), (16, 40.0, 12.0)]
    ]
    others = [{"event": "evaluation", "time": 1.0}, {**records[1], "node": "worker-1.0"}]
    mixed = [record for pair in zip(others * 4, records, strict=False) for record in pair]
    assert of_one_step(mixed, "worker-0.0", "time") == 1.0
    assert of_one_step(mixed, "worker-0.0", "compute_s") == 0.5
    for few in ([], records[:1], records[-1:], others):
        with pytest.raises(ValueError, match="too few"):
            of_one_step(few, "worker-0.0", "time")
