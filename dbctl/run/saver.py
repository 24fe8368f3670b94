"""Writes cuts as checkpoints, in a thread of its own: a slow disk stops nobody.

Rules of this file: one cut at a time (the coordinator asks for the next when this one is given
back); the parts are other processes' memory, read-only, and are let go when `answers` says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from dbctl.checkpoint.layout import Facts
from dbctl.checkpoint.writer import Writer, clean
from dbctl.errors import CheckpointError
from dbctl.model.cut import NetworkCut
from dbctl.model.network import tensors
from dbctl.optim.gradients import is_finite
from dbctl.process import one_line
from dbctl.region import Range
from dbctl.roles.base import Array
from dbctl.roles.cuts import CompleteCut
from dbctl.run.parts import FarParts
from dbctl.wire import CutPart


@dataclass(frozen=True)
class Saved:
    """What became of a cut: its step, and either the checkpoint or why there is none."""

    step: int
    path: Path | None
    error: str = ""


class Saver:
    """`wake` is called, from the thread, when an answer has come. `far`: parts of other hosts."""

    def __init__(
        self,
        directory: Path,
        *,
        cut: NetworkCut,
        vectors: Sequence[str],
        keep: int,
        wake: Callable[[], None],
        far: FarParts,
    ) -> None:
        clean(directory)
        self._directory = directory
        self._network = cut
        self._tensors = tensors(cut.spec)
        self._vectors = vectors
        self._keep = keep
        self._wake = wake
        self.far = far
        self._asked: SimpleQueue[tuple[CompleteCut, Facts] | None] = SimpleQueue()
        self.answers: SimpleQueue[Saved] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="saver", daemon=True)
        self._thread.start()

    def save(self, cut: CompleteCut, facts: Facts) -> None:
        self._asked.put((cut, facts))

    def close(self, timeout_s: float) -> None:
        """Lets the write in hand end, for at most `timeout_s`; from other hosts nothing comes."""
        self.far.close()
        self._asked.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (order := self._asked.get()) is not None:
            self.answers.put(self._write(*order))
            del order  # the parts are other processes' memory: let go now
            self._wake()

    def _write(self, cut: CompleteCut, facts: Facts) -> Saved:
        try:
            for part in cut.parts:
                if part.payload is not None and not is_finite(part.payload):
                    return _not_finite(cut, part)
            with Writer(
                self._directory,
                cut.step,
                tensors=self._tensors,
                vectors=self._vectors,
                keep=self._keep,
            ) as writer:
                for part in cut.parts:
                    if part.payload is not None:
                        put(writer, self._network, part.vector, at=part.start, values=part.payload)
                        continue
                    for start, values in self.far.pieces(part):
                        if not is_finite(values):
                            return _not_finite(cut, part)
                        put(writer, self._network, part.vector, at=start, values=values)
                return Saved(cut.step, writer.finish(facts))
        except CheckpointError as error:
            return Saved(cut.step, None, str(error))
        except Exception as error:  # no memory, no thread: unanswered, the run would wait for ever
            return Saved(cut.step, None, f"step {cut.step} cannot be saved: {one_line(error)}")


def _not_finite(cut: CompleteCut, part: CutPart) -> Saved:
    return Saved(cut.step, None, f"{part.vector}: not finite at step {cut.step}")


def put(writer: Writer, cut: NetworkCut, vector: str, *, at: int, values: Array) -> None:
    """Places elements of the cut's flat vector, from `at` on, in the whole tensors."""
    span = Range(at, at + len(values))
    for piece in cut.pieces:
        for start, run in piece.runs(span.intersection(piece.range)):
            writer.put(vector, start, values[run.slice(span.start)])
