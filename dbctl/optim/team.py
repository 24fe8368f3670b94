"""One element-wise job over a long vector, cut over threads.

Rules of this file: what a job does to an element depends on no other, so no bit shows how the
vector was cut. The kernels of numpy, BLAS and numba let go of the interpreter while they work.
A process that has a team at work does not fork: its child would wait for threads that it has not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Executor

T = TypeVar("T")

# Elements that a further thread must have: waking it takes 0.05 to 0.1 ms, in which one core
# updates some 100,000.
LEAST = 1 << 19
# The threads share one memory, which four cores use up on most machines.
MOST = 4
_LINE = 1024  # elements: a cut between threads is at a cache line, of every dtype


def size_of_team(cores: int, *, busy: int, teams: int) -> int:
    """How many threads each of `teams` has a core for where `busy` threads of others compute."""
    return max(1, min(MOST, (cores - busy) // teams))


class Team:
    """`threads` count the caller's own. Used by one thread; the others begin when first needed.

    Where the system allows no more threads the caller does it all.
    """

    def __init__(self, threads: int = 1) -> None:
        assert threads >= 1
        self._threads = threads
        self._others: Executor | None = None

    def each(self, n_elements: int, job: Callable[[slice], T]) -> list[T]:
        """What `job` returns of each part of `n_elements`, in order; all are over by then.

        What it raises of a part is raised here.
        """
        n_parts = max(1, min(self._threads, n_elements // LEAST))
        others = self._begun() if n_parts > 1 else None
        if others is None:
            return [job(slice(0, n_elements))]
        ends = [n_elements * i // n_parts // _LINE * _LINE for i in range(n_parts)] + [n_elements]
        first, *rest = (slice(a, b) for a, b in pairwise(ends))
        futures = [others.submit(job, part) for part in rest]
        try:
            found = [job(first)]
        finally:
            # Nobody writes to the vector any more when this returns, whatever became of a part.
            for future in futures:
                future.exception()
        return found + [future.result() for future in futures]

    def _begun(self) -> Executor | None:
        """All other threads at once, so that giving out parts cannot fail; None: there are none."""
        if self._others is None and self._threads > 1:
            from concurrent.futures import ThreadPoolExecutor

            pool = ThreadPoolExecutor(self._threads - 1, thread_name_prefix="update")
            all_begun = threading.Event()
            try:
                for _ in range(self._threads - 1):
                    pool.submit(all_begun.wait)
                self._others = pool
            except RuntimeError:
                self._threads = 1
                pool.shutdown(wait=False)
            finally:
                all_begun.set()
        return self._others


ALONE = Team()
