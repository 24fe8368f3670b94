"""Cuts become checkpoints of whole tensors, in a thread that stops nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbctl.checkpoint import writer as writing
from dbctl.checkpoint.layout import Facts
from dbctl.checkpoint.reader import list_checkpoints, open_checkpoint
from dbctl.checkpoint.writer import Writer
from dbctl.errors import CheckpointError
from dbctl.model.cut import NetworkCut, cut_network
from dbctl.model.layers.conv2d import Conv2dSpec
from dbctl.model.layers.dense import DenseSpec
from dbctl.model.layers.local2d import Local2dSpec
from dbctl.model.network import NetworkSpec, tensors
from dbctl.region import Range
from dbctl.roles.base import Array
from dbctl.roles.cuts import CompleteCut
from dbctl.run.parts import FarParts
from dbctl.run.saver import Saved, Saver, put
from dbctl.wire import CutPart, Position

DENSE = NetworkSpec(
    input=(5,),
    layers=(DenseSpec(units=7), DenseSpec(units=3, cut="inputs"), DenseSpec(units=2)),
    loss="softmax",
)
LOCAL = NetworkSpec(
    input=(5, 6, 2),
    layers=(Conv2dSpec(maps=3, kernel=2), Local2dSpec(maps=2, kernel=3), DenseSpec(units=3)),
    loss="softmax",
)
FACTS = Facts(
    run="r", network="n", updates=4, rows=(), replicas=1, partitions=1, shards=1, seconds=0.0,
    epochs=0.0, examples=0,
)  # fmt: skip
WAIT_S = 10.0


def part(start: int, values: Array, vector: str = "parameters") -> CutPart:
    return CutPart(1, vector, 1, 1, start, 4, (), values)


def complete(parts: list[CutPart], step: int = 8) -> CompleteCut:
    rows = {0: Position(step, 0, step)}
    return CompleteCut(number=1, parts=parts, rows=rows, updates=4, dropped=0, final=False)


def flat_of(cut: NetworkCut, whole: dict[str, Array]) -> Array:
    """The cut's flat vector made of whole tensors: the slow, obvious way."""
    flat = np.zeros(cut.pieces[-1].range.stop, np.float32)
    for piece in cut.pieces:
        box = whole[piece.tensor.name].reshape(piece.view)[piece.box.slices()]
        flat[piece.range.slice()] = box.ravel()
    return flat


@pytest.mark.parametrize("spec", [DENSE, LOCAL], ids=["dense", "local"])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("shards", [1, 3])
def test_slices_of_a_cut_are_placed_in_whole_tensors(
    spec: NetworkSpec, count: int, shards: int, tmp_path: Path
) -> None:
    """A checkpoint does not show how its replicas were cut."""
    cut, layout = cut_network(spec, count=count), tensors(spec)
    n = layout[-1].range.stop
    expected = np.arange(n, dtype=np.float32)
    whole = {t.name: expected[t.range.slice()].reshape(t.shape) for t in layout}
    flat = flat_of(cut, whole)
    assert len(flat) == n, "shared weights are held once"
    with Writer(tmp_path, 3, tensors=layout, vectors=["parameters"]) as writer:
        for span in Range(0, n).split(shards):
            for partition in range(cut.count):
                mine = cut.span(partition).intersection(span)
                put(writer, cut, "parameters", at=mine.start, values=flat[mine.slice()])
        path = writer.finish(FACTS)
    np.testing.assert_array_equal(open_checkpoint(path).read("parameters", Range(0, n)), expected)


def test_a_slice_that_is_missing_is_no_checkpoint(tmp_path: Path) -> None:
    cut, layout = cut_network(DENSE, count=2), tensors(DENSE)
    with Writer(tmp_path, 3, tensors=layout, vectors=["parameters"]) as writer:
        put(writer, cut, "parameters", at=0, values=np.zeros(len(cut.span(0)), np.float32))
        with pytest.raises(CheckpointError, match="missing"):
            writer.finish(FACTS)


# ---------------------------------------------------------------------------------- the thread

CUT = cut_network(DENSE)
SIZE = tensors(DENSE)[-1].range.stop


class Desk:
    """A saver and what it woke us for."""

    def __init__(self, directory: Path) -> None:
        self.woken = threading.Semaphore(0)
        self.saver = Saver(
            directory,
            cut=CUT,
            vectors=["parameters"],
            keep=2,
            wake=self.woken.release,
            far=FarParts((), self.woken.release),
        )

    def answer(self) -> Saved:
        assert self.woken.acquire(timeout=WAIT_S)
        return self.saver.answers.get_nowait()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Callable[[], Desk]]:
    made: list[Desk] = []

    def make() -> Desk:
        made.append(Desk(tmp_path / "checkpoints"))
        return made[-1]

    yield make
    for each in made:
        each.saver.close(WAIT_S)


def test_a_cut_is_written_and_answered(desk: Callable[[], Desk], tmp_path: Path) -> None:
    this = desk()
    values = np.arange(SIZE, dtype=np.float32)
    this.saver.save(complete([part(0, values)]), FACTS)
    saved = this.answer()
    assert (saved.step, saved.error) == (8, "")
    assert saved.path == list_checkpoints(tmp_path / "checkpoints")[0]
    read = open_checkpoint(saved.path).read("parameters", Range(0, SIZE))
    np.testing.assert_array_equal(read, values)


def test_numbers_that_are_not_finite_are_not_kept(desk: Callable[[], Desk], tmp_path: Path) -> None:
    this = desk()
    values = np.zeros(SIZE, np.float32)
    values[-1] = np.nan
    this.saver.save(complete([part(0, values)]), FACTS)
    assert this.answer() == Saved(8, None, "parameters: not finite at step 8")
    assert list_checkpoints(tmp_path / "checkpoints") == []


def test_a_disk_that_fails_is_an_answer_and_the_next_cut_is_written(
    desk: Callable[[], Desk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this = desk()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writing, "_write_all", full)
        this.saver.save(complete([part(0, np.zeros(SIZE, np.float32))]), FACTS)
        failed = this.answer()
    assert failed.path is None
    assert "no space left on device" in failed.error
    this.saver.save(complete([part(0, np.zeros(SIZE, np.float32))], step=9), FACTS)
    assert this.answer().error == ""
    assert len(list_checkpoints(tmp_path / "checkpoints")) == 1


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
def test_whatever_fails_is_an_answer(
    desk: Callable[[], Desk],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    """The run waits for it: a saver that died without one had it wait for ever."""
    this = desk()

    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(writing, "hash_file", fail)
        this.saver.save(complete([part(0, np.zeros(SIZE, np.float32))]), FACTS)
        failed = this.answer()
    assert failed.path is None
    assert type(error).__name__ in failed.error
    assert list((tmp_path / "checkpoints").iterdir()) == []
    this.saver.save(complete([part(0, np.zeros(SIZE, np.float32))], step=9), FACTS)
    assert this.answer().error == ""


def test_parts_are_let_go_when_they_were_written(desk: Callable[[], Desk]) -> None:
    """They are other processes' memory, mapped."""
    import gc
    import weakref

    this = desk()
    values = np.zeros(SIZE, np.float32)
    held = weakref.ref(values)
    this.saver.save(complete([part(0, values)]), FACTS)
    del values
    this.answer()
    gc.collect()
    assert held() is None


def test_close_lets_the_write_in_hand_end(desk: Callable[[], Desk]) -> None:
    this = desk()
    this.saver.save(complete([part(0, np.zeros(SIZE, np.float32))]), FACTS)
    this.saver.close(WAIT_S)
    assert this.answer().error == ""
    assert not this.saver._thread.is_alive()
