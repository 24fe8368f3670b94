"""What a worker counts, and its report of it: totals since its incarnation began.

Rules of this file: pure. Losses are kept by epoch, everything else from the beginning.
"""

from __future__ import annotations

from dbctl.roles.base import BatchResult
from dbctl.roles.conversation import Conversation
from dbctl.roles.local import LocalCopy
from dbctl.wire import Loss, Position, Report


class Totals:
    def __init__(self) -> None:
        self.examples = 0
        self.gradients = 0
        self.loss_sum = 0.0
        self.rows = 0
        self.last_epoch = Loss()
        self.compute_s = 0.0
        self.fetch_wait_s = 0.0
        self.push_wait_s = 0.0
        self.refused = 0
        self.refused_in_a_row = 0
        self.refused_where = ""
        self.news = False  # something that the coordinator should hear at once

    def accepted(self, result: BatchResult) -> None:
        self.examples += result.rows
        self.gradients += 1
        self.loss_sum += result.loss_sum
        self.rows += result.rows
        self.refused_in_a_row = 0

    def refused_one(self, where: str) -> None:
        self.refused += 1
        self.refused_in_a_row += 1
        self.refused_where = where
        self.news = True

    def end_epoch(self) -> None:
        self.last_epoch = Loss(self.loss_sum, self.rows)
        self.loss_sum, self.rows = 0.0, 0

    def report(
        self,
        state: str,
        position: Position,
        *,
        until: int,
        local: LocalCopy,
        talk: Conversation,
    ) -> Report:
        return Report(
            state=state,
            position=position,
            until=until,
            pushed=local.pushed,
            acked=local.acked,
            examples=self.examples,
            gradients=self.gradients,
            epoch_loss=Loss(self.loss_sum, self.rows),
            last_epoch_loss=self.last_epoch,
            compute_s=self.compute_s,
            fetch_wait_s=self.fetch_wait_s,
            push_wait_s=self.push_wait_s,
            exchange_wait_s=talk.waited_s,
            bytes_pushed=local.bytes_pushed,
            bytes_fetched=local.bytes_fetched,
            bytes_exchanged=talk.bytes_sent,
            refused=self.refused,
            refused_in_a_row=self.refused_in_a_row,
            refused_where=self.refused_where,
        )
