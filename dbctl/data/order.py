"""Which rows a replica has, and in which order it sees them: pure functions of the seed.

Rules of this file: integers only; no state. Everything is a function of seed, replica and epoch, so
nothing of it is ever stored or sent (reliability.md, G18).

Theory of operation: a permutation is the stable order of random words, one a row (philox.py). Row i
of one permutation belongs to replica i mod R in every epoch (paper A, section 4.1: the training
data is divided into subsets); only its order within the replica changes.

A replica can have no rows (fewer rows than replicas): `subset` is empty then and
`steps_per_epoch` 0; such a replica has nothing to do in any epoch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbctl.philox import stream

Indices = NDArray[np.int64]


def permutation(n: int, seed: int, name: str) -> Indices:
    """A permutation of 0 to n - 1, int64 (n,); the same on every version of numpy."""
    words: NDArray[Any] = stream(f"{seed} {name}").random_raw(n)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def subset(n_rows: int, seed: int, *, replica: int, replicas: int) -> Indices:
    """The rows of `replica`: int64, in the order of the permutation; empty if it has none.

    Every row belongs to exactly one replica; their counts are equal within one.
    """
    assert 0 <= replica < replicas, f"no replica {replica} among {replicas}"
    return permutation(n_rows, seed, "rows")[replica::replicas].copy()


def ranks(rows: Indices) -> Indices:
    """Where each of different `rows` is when they are put into rising order: int64 (len(rows),)."""
    return np.searchsorted(np.sort(rows), rows).astype(np.int64, copy=False)


def epoch_order(n: int, seed: int, *, replica: int, epoch: int) -> Indices:
    """The order in which `replica` sees its `n` rows in `epoch`: positions in its own subset."""
    return permutation(n, seed, f"order {replica} {epoch}")


def steps_per_epoch(n: int, batch_size: int) -> int:
    """Mini-batches of one pass over `n` rows, the last one maybe short; 0 without rows."""
    return -(-n // batch_size)


def batch_rows(order: Indices, index: int, batch_size: int) -> Indices:
    """The rows of mini-batch `index` of an epoch; the last one may be short, never empty."""
    assert 0 <= index < steps_per_epoch(len(order), batch_size), f"no mini-batch {index}"
    return order[index * batch_size : (index + 1) * batch_size]


def sample_rows(n_rows: int, seed: int, *, sample: int, size: int) -> Indices:
    """`size` of `n_rows` rows without repetition: the batch `sample` (from 1) of a batch method.

    int64 (size,), rising, so that they are read from the front.
    """
    assert sample >= 1, f"no sample {sample}"
    assert 1 <= size <= n_rows, f"a batch of {size} of {n_rows} rows"
    return np.sort(permutation(n_rows, seed, f"sample {sample}")[:size])
