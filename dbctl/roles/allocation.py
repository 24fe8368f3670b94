"""Which replica computes which bundle of an evaluation: affinity, stealing, backup copies.

Rules of this file: pure; no messages. Theory of operation (paper A, section 4.2): each replica has
an interval of consecutive bundles, the same in every evaluation as long as the same replicas live,
and takes them in order, so that its rows stay near it. One that is done takes over the rear half of
the longest interval left: fast replicas do more. When no bundle is left to begin, copies of those
that are still out go to replicas that have nothing to do; the first answer counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

N_AHEAD = 2  # orders of a replica: the one in hand, and the next so that its rows can be fetched


class Allocation:
    """One evaluation of `n_bundles` bundles over the replicas that live. `backup`: copies or not.

    `losses` are of the portions of each bundle that was computed.
    """

    def __init__(self, n_bundles: int, replicas: Iterable[int], *, backup: bool) -> None:
        self._n_bundles = n_bundles
        self._backup = backup
        self._left = _shares(n_bundles, sorted(replicas))
        self._again: list[int] = []  # of replicas that died: to be begun anew, the lowest first
        self._out: dict[int, list[int]] = {}  # who computes it, in the order of handing out
        self._holding: dict[int, list[int]] = {replica: [] for replica in self._left}
        self.losses: dict[int, Sequence[float]] = {}
        self.n_backups = 0

    @property
    def complete(self) -> bool:
        return len(self.losses) == self._n_bundles

    @property
    def portion_losses(self) -> list[float]:
        """Of every portion of the batch in order."""
        return [loss for bundle in range(self._n_bundles) for loss in self.losses[bundle]]

    def next(self, replica: int) -> int | None:
        """The bundle that this replica, which has room for one more, is to compute."""
        holding = self._holding[replica]
        if len(holding) >= N_AHEAD:
            return None
        bundle = self._unbegun(replica)
        if bundle is None:
            bundle = self._copy(replica)
            self.n_backups += bundle is not None
        if bundle is not None:
            self._out.setdefault(bundle, []).append(replica)
            holding.append(bundle)
        return bundle

    def _unbegun(self, replica: int) -> int | None:
        if self._again:
            return self._again.pop(0)
        if not self._left[replica]:
            self._steal(replica)
        own = self._left[replica]
        if not own:
            return None
        self._left[replica] = own[1:]
        return own[0]

    def _steal(self, replica: int) -> None:
        """The rear half of the longest interval; all of it where it is one bundle."""
        longest = max(self._left, key=lambda r: (len(self._left[r]), -r))
        interval = self._left[longest]
        kept = len(interval) // 2
        self._left[longest], self._left[replica] = interval[:kept], interval[kept:]

    def _copy(self, replica: int) -> int | None:
        """Of the bundles still out, one with the fewest copies, and of those the longest out."""
        if not self._backup or self._holding[replica]:
            return None
        waiting = [b for b, replicas in self._out.items() if replica not in replicas]
        return min(waiting, key=lambda b: len(self._out[b]), default=None)

    def done(self, replica: int, bundle: int, losses: Sequence[float]) -> None:
        """An answer; the first one of a bundle counts. `replica` has room again."""
        self._holding[replica].remove(bundle)
        if bundle not in self.losses:
            self.losses[bundle] = losses
            self._out.pop(bundle, None)

    def give_up(self, replica: int, bundle: int) -> None:
        """The replica does not compute this bundle: somebody else must, if nobody else does."""
        self._holding[replica].remove(bundle)
        replicas = self._out.get(bundle)
        if replicas is None:
            return
        replicas.remove(replica)
        if not replicas:
            del self._out[bundle]
            self._again = sorted({*self._again, bundle})

    def lose(self, replica: int) -> None:
        """The replica died: what only it had goes to the others."""
        for bundle in list(self._holding[replica]):
            self.give_up(replica, bundle)
        del self._holding[replica]
        self._again = sorted({*self._again, *self._left.pop(replica)})


def _shares(n_bundles: int, replicas: Sequence[int]) -> dict[int, range]:
    """Consecutive bundles for each replica, as even as whole bundles allow."""
    of = len(replicas)
    bounds = [n_bundles * i // of for i in range(of + 1)] if of else [0]
    return {r: range(bounds[i], bounds[i + 1]) for i, r in enumerate(replicas)}
