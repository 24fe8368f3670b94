"""Reports as the fields of a line of metrics.jsonl (docs/experiments.md, records).

Rules of this file: pure; all values are totals since the node's incarnation began.
"""

from __future__ import annotations

from dbctl.roles.cuts import replica_of
from dbctl.roles.figures import Figures
from dbctl.wire import Report, ShardReport


def worker_fields(worker: str, report: Report, *, figures: Figures) -> dict[str, object]:
    loss = report.epoch_loss if report.epoch_loss.rows else report.last_epoch_loss
    replica = replica_of(worker)
    return {
        "node": worker,
        "replica": replica,
        "state": report.state,
        "step": report.position.step,
        "epoch": report.position.epoch,
        "index": report.position.index,
        "examples": report.examples,
        "examples_per_second": figures.rate(replica),
        "loss": loss.sum / loss.rows if loss.rows else None,
        "compute_s": report.compute_s,
        "fetch_wait_s": report.fetch_wait_s,
        "push_wait_s": report.push_wait_s,
        "exchange_wait_s": report.exchange_wait_s,
        "bytes_pushed": report.bytes_pushed,
        "bytes_fetched": report.bytes_fetched,
        "bytes_exchanged": report.bytes_exchanged,
        "staleness": figures.staleness_of(worker),
        "refused": report.refused,
        "refused_where": report.refused_where,
    }


def shard_fields(shard: str, report: ShardReport) -> dict[str, object]:
    staleness: dict[str, dict[int, int]] = {}
    for worker, value, count in report.staleness:
        staleness.setdefault(worker, {})[value] = count
    return {
        "node": shard,
        "version": report.version,
        "updates": report.updates,
        "bytes_in": report.bytes_in,
        "bytes_out": report.bytes_out,
        "refused": report.refused,
        "staleness": staleness,
    }
