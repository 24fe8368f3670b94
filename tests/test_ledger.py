"""G1 and G2 over seeded histories, and mutants that must be caught (docs/reliability.md)."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from dbctl.roles.base import Effects, Send
from dbctl.roles.handouts import Handouts
from dbctl.roles.shard import Shard
from dbctl.transport.pieces import Assembler
from dbctl.wire import Ack, Push
from tests.ledger import History

N_HISTORIES = 1200
FAULTS = (
    "message lost",
    "message repeated",
    "piece lost",
    "piece repeated",
    "overtaken",
    "pause",
    "kill",
)


def run_history(seed: int) -> tuple[int, list[str], Counter[str], int]:
    history = History(seed)
    wrong = history.run()
    return seed, wrong, history.net.happened, len(history.saved)


@pytest.mark.timeout(300)
def test_ledger_is_exact_in_every_history(capsys: pytest.CaptureFixture[str]) -> None:
    """Every push is applied once, whatever is lost, repeated, reordered, paused or killed."""
    held: Counter[str] = Counter()
    failures: list[str] = []
    n_cuts = 0
    context = get_context("spawn")
    with ProcessPoolExecutor(max_workers=os.cpu_count(), mp_context=context) as pool:
        for seed, wrong, happened, cuts in pool.map(run_history, range(N_HISTORIES), chunksize=50):
            held.update(kind for kind in FAULTS if happened[kind])
            n_cuts += cuts
            failures += [f"seed {seed}: {each}" for each in wrong[:1]]
    with capsys.disabled():
        counts = ", ".join(f"{kind} {held[kind]}" for kind in FAULTS)
        print(f"\n  ledger: {N_HISTORIES} histories, {n_cuts} cuts; held {counts}")
    assert not failures, f"{len(failures)} histories failed:\n" + "\n".join(failures[:10])
    assert all(held[kind] >= 300 for kind in FAULTS), held
    assert n_cuts > N_HISTORIES


def caught(seeds: range, **options: Any) -> int | None:
    """The first seed whose history shows the fault; None if the mutant passes unseen."""
    for seed in seeds:
        history = History(seed, **options)
        try:
            if history.run():
                return seed
        except (AssertionError, ValueError):
            return seed
    return None


class NoDedup(Shard):
    """Applies whatever push comes, again if it comes again."""

    def _on_push(self, client: Any, push: Push) -> Effects:
        client.filed = push.seq - 1
        client.applied = min(client.applied, push.seq - 1)
        return super()._on_push(client, push)


class AckBeforeApply(Shard):
    """Acknowledges a push when it is filed."""

    def _on_push(self, client: Any, push: Push) -> Effects:
        effects = super()._on_push(client, push)
        return [*effects, Send(client.peer.node, Ack(self.term, client.filed, self.version))]


class OutOfOrder(Shard):
    """Files any later push, not only the next."""

    def _on_push(self, client: Any, push: Push) -> Effects:
        if push.seq > client.filed:
            client.filed = push.seq - 1
        return super()._on_push(client, push)


@pytest.mark.parametrize("mutant", [NoDedup, AckBeforeApply, OutOfOrder])
def test_mutant_shards_are_caught(mutant: type[Shard]) -> None:
    assert caught(range(200), make_shard=mutant) is not None


def test_a_handed_out_buffer_that_is_written_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handouts, "held", lambda self, buffer: False)
    assert caught(range(200)) is not None


def test_pieces_of_two_pushes_mixed_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant assembler that keys what it puts together by sender and not by message."""
    add = Assembler.add

    def mixed(self: Assembler, peer: Any, inline: Any, frame: Any) -> Any:
        same = type(inline)(1, inline.piece, inline.of, inline.n_elements, inline.dtype)
        self._delivered = OrderedDict()
        return add(self, peer, same, frame)

    monkeypatch.setattr(Assembler, "add", mixed)
    assert caught(range(200)) is not None
