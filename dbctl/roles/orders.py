"""What replicas were told to do: go on to a step, or halt; and which of their workers are at rest.

Rules of this file: pure. Theory of operation: roles/grants.py says how far a replica may go, from
here all its partitions are told, under one number that grows. What is said is the whole of it, so
it may be said again. The partitions of a cut replica halt at one step, what all were granted: one
that stopped earlier would leave the others waiting in the middle of the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dbctl.roles.base import Effects, Send
from dbctl.wire import Grant, Halt, Position, Report


class Orders:
    """`workers`: for each replica the workers of its partitions. `begins`: where each stood."""

    def __init__(
        self, workers: Mapping[int, Sequence[str]], begins: Mapping[int, Position]
    ) -> None:
        self._workers = workers
        self._sent = {n: Grant(0, begin.step) for n, begin in begins.items()}
        self._push_at_halt: bool | None = None  # None: nobody was told to halt
        self._resting: set[str] = set()

    def until(self, replica: int) -> int:
        return self._sent[replica].until

    def is_last(self, replica: int) -> bool:
        return self._sent[replica].last

    def grant(
        self, replica: int, until: int, *, last: bool, mark: tuple[int, int], again: bool
    ) -> Effects:
        """Nothing if that was said before, unless it is to be said `again`."""
        old = self._sent[replica]
        if (until, last, mark[0]) != (old.until, old.last, old.mark):
            self._sent[replica] = Grant(old.number + 1, until, last, *mark)
            self.wake(replica)
        elif not again:
            return []
        return [Send(worker, self._sent[replica]) for worker in self._workers[replica]]

    def halt(self, replicas: Iterable[int], *, push: bool) -> Effects:
        self._push_at_halt = push
        self._resting.clear()
        return self.halt_again(replicas)

    def halt_again(self, replicas: Iterable[int]) -> Effects:
        assert self._push_at_halt is not None
        effects: Effects = []
        for replica in replicas:
            # A partition that has seen a last grant has pushed at its end: so all of them push.
            cut = len(self._workers[replica]) > 1
            halt = Halt(self._push_at_halt or cut, self._sent[replica].until if cut else 0)
            effects += [Send(worker, halt) for worker in self._workers[replica]]
        return effects

    # -------------------------------------------------------------------------------------- rest

    def wake(self, replica: int) -> None:
        """What its workers said of their rest counts no more."""
        self._resting.difference_update(self._workers[replica])

    def heard(self, worker: str, replica: int, report: Report) -> None:
        if self._is_at_rest(replica, report):
            self._resting.add(worker)

    def _is_at_rest(self, replica: int, report: Report) -> bool:
        """Everything that was asked of the worker is done and acknowledged.

        A late report of an earlier rest must not count once more was granted.
        """
        if report.acked < report.pushed:
            return False
        if self._push_at_halt is not None:
            return report.state == "halted"
        granted = self._sent[replica]
        done = report.position.step >= granted.until
        return report.state == "finished" and granted.last and done

    def at_rest(self, replicas: Iterable[int]) -> bool:
        """Whether all workers of these replicas are."""
        return self._resting.issuperset(w for n in replicas for w in self._workers[n])
