"""All partitions of a network in one thread, and the same network uncut beside them.

Rules of this file: plain numpy; what the exchange promises is asserted here, for whoever uses it:
each array is given at most once a pass to each partition, is not written before it was taken (what
is taken to be used in place: before the pass is over everywhere), and is taken. Theory of
operation: `run` carries on whichever pass can go on, in an order that a seed says; nothing may
depend on it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dbctl.model.cut import NetworkCut
from dbctl.model.exchange import Give, Key, Take
from dbctl.model.layers.dropout import Draw
from dbctl.model.network import NetworkSpec, n_parameters, node_shapes
from dbctl.model.part import PartNetwork, box_of_rows
from dbctl.model.part_loss import PartMeasurement
from dbctl.model.passes import Measurement, Network
from dbctl.roles.base import PlainBuffer

COPIED = {"states", "back"}  # phases whose arrays are done with when the pass goes on
Array = NDArray[Any]
Passes = Sequence[Generator[Any, Any, Any]]


class Ran(NamedTuple):
    results: list[Any]
    sent: Counter[tuple[Key, int, int]]  # elements by exchange, sender and receiver

    def of_phase(self, phase: str) -> int:
        return sum(n for (key, _, _), n in self.sent.items() if key.phase == phase)


class _Desk:
    """What lies for one partition: arrays by exchange and sender, and what it waits for."""

    def __init__(self, work: Generator[Any, Any, Any]) -> None:
        self.work = work
        self.mail: dict[tuple[Key, int], Array] = {}
        self.as_given: dict[tuple[Key, int], Array] = {}
        self.waiting: Take | None = None

    @property
    def can_go_on(self) -> bool:
        wait = self.waiting
        return wait is None or all((wait.key, p) in self.mail for p in wait.of)

    def go_on(self) -> Give | Take:
        wait, self.waiting = self.waiting, None
        answer = wait and {p: self._taken(wait.key, p) for p in wait.of}
        item: Give | Take = self.work.send(answer)
        self.waiting = item if isinstance(item, Take) else None
        return item

    def _taken(self, key: Key, sender: int) -> Array:
        array = self.mail.pop((key, sender))
        unchanged = array.tobytes() == self.as_given[key, sender].tobytes()
        assert unchanged, f"{key} of {sender} was written before it was taken"
        return array


def run(passes: Passes, *, seed: int = 0) -> Ran:
    """Carries the passes of all partitions out, partition i's in place i."""
    desks = dict(enumerate(map(_Desk, passes)))
    going, choose = set(desks), random.Random(seed)
    results: dict[int, Any] = {}
    sent: Counter[tuple[Key, int, int]] = Counter()
    given: list[tuple[Array, Array]] = []
    while going:
        able = sorted(p for p in going if desks[p].can_go_on)
        assert able, f"all wait: {[(p, desks[p].waiting) for p in sorted(going)]}"
        partition = choose.choice(able)
        try:
            item = desks[partition].go_on()
        except StopIteration as end:
            results[partition] = end.value
            going.remove(partition)
            continue
        if isinstance(item, Take):
            continue
        assert item.to, f"{item.key} is given to nobody"
        for receiver, (outbox, start, stop) in item.to.items():
            assert (item.key, partition, receiver) not in sent, "given twice"
            array = outbox.array[start:stop].view()
            assert len(array) == stop - start > 0, f"nothing is given: {item.key}"
            array.flags.writeable = False
            desks[receiver].mail[item.key, partition] = array
            desks[receiver].as_given[item.key, partition] = array.copy()
            sent[item.key, partition, receiver] = stop - start
            if item.key.phase not in COPIED:
                given.append((array, array.copy()))
    left = [(p, key) for p, desk in desks.items() for key in desk.mail]
    assert not left, f"given but not taken: {left}"
    for array, before in given:
        assert array.tobytes() == before.tobytes(), "an outbox was written during the pass"
    return Ran([results[p] for p in sorted(results)], sent)


# --------------------------------------------------------------------------- flat vectors


def whole_of(cut: NetworkCut, shares: Sequence[Array]) -> Array:
    """The vector of whole tensors from each partition's flat vector; every element comes once."""
    found = np.full(n_parameters(cut.spec), np.nan, shares[0].dtype)
    for piece in cut.pieces:
        origin = cut.span(piece.partition).start
        for start, run_ in piece.runs(piece.range):
            place = slice(start, start + len(run_))
            assert np.isnan(found[place]).all(), f"{piece} holds what another holds"
            found[place] = shares[piece.partition][run_.slice(origin)]
    return found


def shares_of(cut: NetworkCut, whole: Array) -> list[Array]:
    """Each partition's flat vector from that of whole tensors."""
    shares = [np.full(len(cut.span(p)), np.nan, whole.dtype) for p in range(cut.count)]
    for piece in cut.pieces:
        origin = cut.span(piece.partition).start
        for start, run_ in piece.runs(piece.range):
            shares[piece.partition][run_.slice(origin)] = whole[start : start + len(run_)]
    return shares


# ------------------------------------------------------------------------- cut beside uncut


class Batch(NamedTuple):
    """Numbers for one pass: parameters of whole tensors, x (features, n), targets."""

    parameters: Array
    x: Array
    targets: Array
    draw: Draw | None = None


def make_batch(
    spec: NetworkSpec, n: int, *, seed: int = 0, dtype: str = "float64", floats: bool = False
) -> Batch:
    """Random numbers; targets are labels, or `floats`."""
    rng = np.random.default_rng(seed)
    shapes = node_shapes(spec)
    outputs = int(np.prod(shapes[-1]))
    parameters = 0.4 * rng.standard_normal(n_parameters(spec))
    x = rng.standard_normal((int(np.prod(shapes[0])), n))
    targets: Array = rng.integers(0, outputs, n)
    if floats:
        targets = rng.uniform(0, 1, (outputs, n)).astype(dtype)
    return Batch(parameters.astype(dtype), x.astype(dtype), targets, Draw(seed, 0, 1))


class Parts:
    """All partitions of a cut."""

    def __init__(self, cut: NetworkCut, *, batch_size: int, dtype: str = "float64") -> None:
        self.cut = cut
        self.dtype = dtype
        self.networks = [
            PartNetwork(cut, p, batch_size=batch_size, dtype=dtype, outbox=PlainBuffer)
            for p in range(cut.count)
        ]

    def gradient(self, batch: Batch, *, seed: int = 0) -> tuple[float, Array, Ran]:
        """The sum of the rows' losses, the gradient in whole tensors, and what was sent."""
        shares = shares_of(self.cut, batch.parameters)
        outs = [np.full_like(share, np.nan) for share in shares]
        passes = []
        for network, share, out in zip(self.networks, shares, outs, strict=True):
            share.flags.writeable = False
            x = box_of_rows(batch.x, self.cut.spec.input, network.input_box)
            passes.append(network.gradient(share, x, batch.targets, out=out, draw=batch.draw))
        ran = run(passes, seed=seed)
        return sum(ran.results), whole_of(self.cut, outs), ran

    def measure(self, batch: Batch, *, seed: int = 0) -> list[PartMeasurement]:
        passes = [
            network.measure(
                share,
                box_of_rows(batch.x, self.cut.spec.input, network.input_box),
                batch.targets,
            )
            for network, share in zip(
                self.networks, shares_of(self.cut, batch.parameters), strict=True
            )
        ]
        return run(passes, seed=seed).results


class Uncut:
    """The network in one piece."""

    def __init__(self, spec: NetworkSpec, *, batch_size: int, dtype: str = "float64") -> None:
        self.network = Network(spec, batch_size=batch_size, dtype=dtype)

    def gradient(self, batch: Batch) -> tuple[float, Array]:
        out = np.full_like(batch.parameters, np.nan)
        loss = self.network.gradient(
            batch.parameters, batch.x, batch.targets, out=out, draw=batch.draw
        )
        return loss, out

    def measure(self, batch: Batch) -> Measurement:
        found = self.network.measure(batch.parameters, batch.x, batch.targets)
        return found._replace(predicted=found.predicted.copy(), scores=found.scores.copy())
