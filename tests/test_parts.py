"""dbctl/run/parts.py and the shard's side: a cut of another host, written from pieces."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from dbctl.checkpoint.reader import open_checkpoint
from dbctl.pace import WINDOW_MOST
from dbctl.region import Range
from dbctl.roles.base import PlainBuffer, Send, View
from dbctl.roles.cut_parts import CutParts
from dbctl.roles.handouts import Handouts
from dbctl.run import parts
from dbctl.run.parts import FarParts
from dbctl.run.saver import Saved, Saver
from dbctl.shards import ShardSpan
from dbctl.wire import CutPart, Peer
from dbctl.wire_files import PartData, ReadPart
from tests.test_saver import CUT, FACTS, SIZE, complete

WAIT_S = 10.0
HALF = SIZE // 2
SPANS = (ShardSpan("shard-0", 0, HALF), ShardSpan("shard-1", HALF, SIZE))
CONTROLLER = Peer("controller", 1)


class Held:
    """What CutParts needs of a slice."""

    version = 4

    def __init__(self, span: Range, values: np.ndarray[Any, Any]) -> None:
        self.span = span
        self.buffer = PlainBuffer(len(values), "<f4")
        self.buffer.array[:] = values

    def vectors(self) -> list[tuple[str, View]]:
        return [("parameters", View(self.buffer, 0, len(self.span)))]


class Far:
    """Two shards that lend, a saver, and the loop between: `lost` counts what is lost of each."""

    def __init__(self, directory: Path, values: np.ndarray[Any, Any], *, lost: int = 0) -> None:
        self.woken = threading.Semaphore(0)
        self.far = FarParts(SPANS, self.woken.release)
        self.saver = Saver(
            directory,
            cut=CUT,
            vectors=["parameters"],
            keep=2,
            wake=self.woken.release,
            far=self.far,
        )
        self.lost = lost
        self.most_under_way = self.most_waiting = 0
        self.asked: list[ReadPart] = []
        self.shards: dict[str, CutParts] = {}
        self.parts: list[CutPart] = []
        for span in SPANS:
            shard = CutParts(Handouts(), controller=CONTROLLER, resend_s=0.5, lends=True)
            held: Any = Held(Range(span.start, span.stop), values[span.start : span.stop])
            effects = shard.make(0.0, 1, held, n_slices=1, table=())
            self.parts += [e.message for e in effects if isinstance(e, Send)]  # type: ignore[misc]
            self.shards[span.node] = shard

    def turn(self, now: float) -> None:
        """What the session's loop does."""
        due = self.far.due(now)
        self.most_under_way = max(self.most_under_way, len(self.far._pace._asked))
        self.most_waiting = max(self.most_waiting, len(self.far._values))
        for shard, asked in due:
            assert isinstance(asked, ReadPart)
            self.asked.append(asked)
            self.lost -= 1
            if self.lost < 0:
                [answer] = self.shards[shard].read(asked)
                assert isinstance(answer, Send)
                assert isinstance(answer.message, PartData)
                data = answer.message
                got = PartData(data.handout, data.start, data.payload.array.copy())
                self.far.take(now, shard, got)
                self.far.take(now, shard, got)

    def finish(self) -> Saved:
        for now in range(5_000):
            self.woken.acquire(timeout=0.002)
            if not self.saver.answers.empty():
                return self.saver.answers.get()
            self.turn(float(now))
        raise AssertionError("no answer")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PIECE_ELEMENTS", 3)


def test_a_cut_of_another_host_is_written_from_pieces(tmp_path: Path) -> None:
    values = np.arange(SIZE, dtype=np.float32)
    far = Far(tmp_path, values)
    assert [(p.payload, p.size) for p in far.parts] == [(None, HALF), (None, SIZE - HALF)]
    far.saver.save(complete(far.parts), FACTS)
    saved = far.finish()
    far.saver.close(WAIT_S)
    assert saved.path is not None, saved.error
    found = open_checkpoint(saved.path).read("parameters", Range(0, SIZE))
    np.testing.assert_array_equal(found, values)
    assert 1 < far.most_under_way <= WINDOW_MOST
    assert sum(asked.n for asked in far.asked) == SIZE, "each once"
    assert not far.far._values, "nothing is kept"


def test_little_waits_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "WINDOW_MOST", 2)
    far = Far(tmp_path, np.zeros(SIZE, np.float32))
    far.saver.save(complete(far.parts), FACTS)
    assert far.finish().path is not None
    far.saver.close(WAIT_S)
    assert far.most_waiting == 2


def test_what_is_lost_is_asked_for_again(tmp_path: Path) -> None:
    values = np.arange(SIZE, dtype=np.float32)
    far = Far(tmp_path, values, lost=5)
    far.saver.save(complete(far.parts), FACTS)
    saved = far.finish()
    far.saver.close(WAIT_S)
    assert saved.path is not None, saved.error
    assert len({(a.handout, a.start) for a in far.asked}) < len(far.asked)
    found = open_checkpoint(saved.path).read("parameters", Range(0, SIZE))
    np.testing.assert_array_equal(found, values)


def test_what_is_not_finite_is_no_checkpoint(tmp_path: Path) -> None:
    values = np.arange(SIZE, dtype=np.float32)
    values[HALF + 4] = np.nan
    far = Far(tmp_path, values)
    far.saver.save(complete(far.parts, step=8), FACTS)
    assert far.finish() == Saved(8, None, "parameters: not finite at step 8")
    far.saver.close(WAIT_S)
    assert list(tmp_path.iterdir()) == []
    assert not far.far._values


def test_the_end_of_the_run_ends_the_waiting(tmp_path: Path) -> None:
    far = Far(tmp_path, np.zeros(SIZE, np.float32))
    far.saver.save(complete(far.parts), FACTS)
    assert far.woken.acquire(timeout=WAIT_S)
    far.saver.close(WAIT_S)
    saved = far.saver.answers.get(timeout=WAIT_S)
    assert "was asked for its parameters when the run ended" in saved.error
    assert list(tmp_path.iterdir()) == []


def test_a_shard_lends_only_what_is_out() -> None:
    far = CutParts(Handouts(), controller=CONTROLLER, resend_s=0.5, lends=True)
    held: Any = Held(Range(10, 20), np.arange(10, dtype=np.float32))
    [send] = far.make(0.0, 1, held, n_slices=1, table=())
    assert isinstance(send, Send)
    part = send.message
    assert isinstance(part, CutPart)
    [answer] = far.read(ReadPart(part.handout, 2, 3))
    assert isinstance(answer, Send)
    assert isinstance(answer.message, PartData)
    assert answer.message.payload.array.tolist() == [2.0, 3.0, 4.0]
    for wrong in ((0, 0, 1), (1, -1, 2), (1, 0, 0), (1, 9, 2), (2, 0, 1)):
        assert far.read(ReadPart(*wrong)) == []
    far.returned(part.handout)
    assert far.read(ReadPart(part.handout, 0, 1)) == []


@pytest.mark.parametrize(
    ("start", "size"), [(0, HALF + 1), (0, 1 << 62), (-1, 2), (SIZE, 1), (3, -1), (HALF, 0)]
)
def test_a_part_that_no_shard_holds_is_no_checkpoint(tmp_path: Path, start: int, size: int) -> None:
    """A size is not believed: nothing is asked for, and no memory taken."""
    far = Far(tmp_path, np.zeros(SIZE, np.float32))
    wrong = replace(far.parts[0], start=start, size=size)
    far.saver.save(complete([wrong, far.parts[1]], step=8), FACTS)
    said = f"parameters: elements {start} to {start + size} were handed out, which no shard holds"
    assert far.finish() == Saved(8, None, said)
    far.saver.close(WAIT_S)
    assert far.asked == []
    assert list(tmp_path.iterdir()) == []


def test_what_nobody_waits_for_is_not_kept() -> None:
    far = FarParts(SPANS, lambda: None)
    far.take(0.0, "shard-0", PartData(1, 0, np.zeros(3, np.float32)))
    assert far.due(0.0) == []
    assert not far._values
