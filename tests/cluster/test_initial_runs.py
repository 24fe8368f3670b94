"""`initialize_from` with real processes: one warmstart, other counts (paper A, figure 4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbctl.checkpoint.reader import newest_good
from dbctl.metrics import read_metrics
from dbctl.region import Range
from dbctl.rundir import RunDir
from tests.cluster.runs import TrainRun, synthetic

pytestmark = pytest.mark.cluster

# A step of this rate is too small for any float32: the end shows the beginning.
STILL = {"type": "downpour", "batch_size": 16, "rule": {"type": "sgd", "rate": 1e-30}}


def parameters(run_dir: Path) -> Any:
    checkpoint, warnings = newest_good(run_dir / "checkpoints")
    assert not warnings
    return checkpoint.read("parameters", Range(0, checkpoint.n_elements))


def test_a_run_begins_where_another_one_ended(tmp_path: Path) -> None:
    """From two shards and two replicas to three shards and one replica of two partitions."""
    with TrainRun(tmp_path, synthetic(rows=160), "--quiet", name="first") as first:
        assert first.finish() == 0
    counts = {"shards": 3, "replicas": 1, "partition": {"count": 2}}
    more = synthetic(rows=160, **counts, optimizer=STILL, initialize_from="first")
    with TrainRun(tmp_path, more, name="second") as second:
        assert second.finish() == 0
    np.testing.assert_array_equal(parameters(second.dir), parameters(first.dir))

    steps = 20  # 2 epochs of 160 rows; the first run's 20 do not count
    assert newest_good(second.dir / "checkpoints")[0].manifest.step == steps
    named = f"{first.dir}@20"
    assert f"parameters begin as those of {named}" in second.err_path.read_text()
    assert RunDir(second.dir).read_info().initialize_from == named
    assert f"initialize_from: {named}\n" in RunDir(second.dir).read_resolved()
    start = next(iter(read_metrics(second.dir / "metrics.jsonl")))
    assert start["initialize"] == f"{first.dir}/checkpoints/step-000000020"
