"""G1 and G2 over seeded histories, and mutants that must be caught (docs/reliability.md)."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from dbctl.roles.base import Effects, Send
from dbctl.roles.conversation import AGREEMENT, Conversation
from dbctl.roles.downpour import Downpour
from dbctl.roles.handouts import Handouts
from dbctl.roles.shard import Shard
from dbctl.transport.pieces import Assembler
from dbctl.wire import Ack, Boxes, Peer, Push
from tests.ledger import History

N_HISTORIES = 1000
FAULTS = (
    "message lost",
    "message repeated",
    "piece lost",
    "piece repeated",
    "overtaken",
    "pause",
    "kill",
)
CIRCUMSTANCES = ("replicas are cut", "partition killed", "interrupt", "two read in place")


def run_history(seed: int) -> tuple[int, list[str], Counter[str], int]:
    history = History(seed)
    wrong = history.run()
    happened = history.net.happened
    happened["replicas are cut"] = history.cut
    happened["partition killed"] = history.cut and bool(history.killed)
    happened["interrupt"] = history.interrupted
    happened["two read in place"] = history.in_place and history.replicas == 2
    return seed, wrong, happened, len(history.saved)


@pytest.mark.timeout(300)
def test_ledger_is_exact_in_every_history(record_property: Callable[[str, str], None]) -> None:
    """Every push is applied once, whatever is lost, repeated, reordered, paused or killed."""
    held: Counter[str] = Counter()
    failures: list[str] = []
    n_cuts = 0
    context = get_context("spawn")
    with ProcessPoolExecutor(max_workers=os.cpu_count(), mp_context=context) as pool:
        for seed, wrong, happened, cuts in pool.map(run_history, range(N_HISTORIES), chunksize=50):
            held.update(kind for kind in (*FAULTS, *CIRCUMSTANCES) if happened[kind])
            n_cuts += cuts
            failures += [f"seed {seed}: {each}" for each in wrong[:1]]
    counts = ", ".join(f"{kind} {held[kind]}" for kind in (*FAULTS, *CIRCUMSTANCES))
    counted = f"ledger: {N_HISTORIES} histories, {n_cuts} cuts; held {counts}"
    record_property("counted", counted)
    assert not failures, f"{len(failures)} histories failed:\n" + "\n".join(failures[:10])
    assert all(held[kind] >= 300 for kind in FAULTS), held
    *usual, rare = CIRCUMSTANCES
    assert all(held[kind] >= 100 for kind in usual), held
    assert held[rare] >= 50, held
    assert n_cuts > N_HISTORIES


def caught(seeds: range, **options: Any) -> int | None:
    """The first seed whose history shows the fault; None if the mutant passes unseen."""
    for seed in seeds:
        history = History(seed, **options)
        try:
            if history.run(limit_s=100):
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


def test_a_buffer_that_is_written_while_it_is_read_in_place_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mutant shard that counts hand-outs to evaluators and of cuts only."""
    hand_out = Handouts.hand_out

    def of_workers_uncounted(self: Handouts, reader: Peer, buffer: Any) -> int:
        number = hand_out(self, reader, buffer)
        if reader.node.startswith("worker"):
            self._holders[id(buffer)] -= 1
            self._held[reader].pop(number)
        return number

    monkeypatch.setattr(Handouts, "hand_out", of_workers_uncounted)
    monkeypatch.setattr(Handouts, "is_out", lambda self, reader, number: True)
    seen = 0
    for seed in range(600):
        history = History(seed)
        if history.in_place:
            seen += any("hand-out" in fault for fault in history.run(limit_s=100))
    assert seen >= 5


def test_pieces_of_two_pushes_mixed_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant assembler that keys what it puts together by sender and not by message."""
    add = Assembler.add

    def mixed(self: Assembler, peer: Any, inline: Any, frame: Any) -> Any:
        same = type(inline)(1, inline.piece, inline.of, inline.n_elements, inline.dtype)
        self._delivered = OrderedDict()
        return add(self, peer, same, frame)

    monkeypatch.setattr(Assembler, "add", mixed)
    assert caught(range(200)) is not None


# ------------------------------------------------------------------------------- cut replicas


def no_agreement(self: Conversation, own: list[float]) -> Generator[Any, Any, list[list[float]]]:
    """Goes on at the end of a pass without a word to the other partitions."""
    others = len(self._names)
    return [list(own)] * (1 + others)
    yield


def test_a_box_that_is_written_before_the_agreement_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Conversation, "agree", no_agreement)
    assert caught(range(200), cut=True) is not None


def test_a_box_of_an_old_pass_that_is_taken_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = Conversation.receive

    def careless(self: Conversation, sender: str, message: Any) -> Effects:
        if isinstance(message, Boxes) and message.phase != AGREEMENT:
            message = Boxes(self._number, message.phase, message.layer, message.payload)
        return receive(self, sender, message)

    monkeypatch.setattr(Conversation, "receive", careless)
    assert caught(range(200), cut=True) is not None


def test_partitions_that_are_not_asked_again_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    resend = Conversation.resend

    def silent(self: Conversation, now: float) -> Effects:
        resend(self, now)
        return []

    monkeypatch.setattr(Conversation, "resend", silent)
    assert caught(range(200), cut=True) is not None


def test_a_halt_that_does_not_name_a_step_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each partition would stop where it stands, and one could wait for the other for ever."""
    monkeypatch.setattr(Downpour, "_step_bound", lambda self: self._grant.until)
    must_end = Downpour._must_end
    monkeypatch.setattr(
        Downpour, "_must_end", lambda self: self._halt is not None or must_end(self)
    )
    assert caught(range(400), cut=True) is not None
