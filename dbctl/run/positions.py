"""Where each replica of a run goes on: from the rows of a checkpoint, for any count of replicas.

Rules of this file: pure. Theory of operation: the manifest has a row a replica, its place in its
own rows of the data. With the same count each goes on there; with another the rows belong to
others, so that only whole epochs count.
"""

from __future__ import annotations

from dbctl.checkpoint.layout import Manifest, ReplicaRow
from dbctl.data.order import steps_per_epoch
from dbctl.errors import RunError
from dbctl.experiment.specs import SandblasterSpec
from dbctl.plan import Plan
from dbctl.wire import Position


def beginnings(manifest: Manifest, plan: Plan) -> tuple[dict[int, Position], int]:
    """Where each replica begins, and the work of how many rows is done again for it.

    The sum of the steps stays that of the manifest, so that numbers, warmstart and `stop: steps`
    go on. With another count of replicas all begin after the whole epochs done on average, by the
    places or, where work was done again before, by the examples.
    """
    experiment, rows = plan.experiment, manifest.rows
    batch_size = experiment.optimizer.batch_size
    replicas = experiment.replicas
    if isinstance(experiment.optimizer, SandblasterSpec):
        # Iterations are nobody's own: the first row has them all.
        return {r: Position(manifest.step if r == 0 else 0) for r in range(replicas)}, 0
    if replicas == len(rows):
        for row in rows:
            _check_row(row, steps_per_epoch(plan.rows[row.replica], batch_size))
        return {row.replica: row.position for row in rows}, 0
    n_rows, done = sum(plan.rows), 0
    for row in rows:
        own = len(range(row.replica, n_rows, len(rows)))
        _check_row(row, steps_per_epoch(own, batch_size))
        done += own * row.epoch + row.index * batch_size
    epoch, again = divmod(max(done, manifest.examples), n_rows)
    each, more = divmod(manifest.step, replicas)
    return {r: Position(each + (r < more), epoch, 0) for r in range(replicas)}, again


def _check_row(row: ReplicaRow, per_epoch: int) -> None:
    if row.index and row.index >= per_epoch:
        raise RunError(
            f"replica {row.replica} stood at mini-batch {row.index} of its epoch, but its rows "
            f"make {per_epoch}: optimizer.batch_size or the data are not those of the checkpoint"
        )
