"""A shard's side of a cut: its slices' vectors, handed out to the controller until they are back.

Rules of this file: pure (roles/base.py). Theory of operation (docs/protocol.md, cuts): each slice
makes a cut of a number once, and none that is older than the newest of the shard. Parts that were
not given back are sent again; who asks for a newer cut has given back all earlier ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from dbctl.roles.base import NEVER, Effects, Send, View
from dbctl.roles.handouts import Handouts
from dbctl.roles.slice import ShardSlice
from dbctl.wire import CutPart, Peer, WorkerRow
from dbctl.wire_files import PartData, ReadPart


class CutParts:
    """`lends`: the controller maps nothing of this host; it reads what is handed out (ReadPart)."""

    def __init__(
        self, handouts: Handouts, *, controller: Peer, resend_s: float, lends: bool = False
    ) -> None:
        self._handouts = handouts
        self._controller = controller
        self._numbers: dict[int, int] = {}  # slice -> number of its last cut
        self._out: list[CutPart] = []
        self._lends = lends
        self._lent: dict[int, View] = {}  # by hand-out
        self._resend_s = resend_s
        self.due = NEVER

    def make(
        self,
        now: float,
        number: int,
        held: ShardSlice,
        *,
        n_slices: int,
        table: Sequence[WorkerRow],
    ) -> Effects:
        """The parts of one slice (paper A2; ours): none where it has made this cut."""
        start, newest = held.span.start, max(self._numbers.values(), default=0)
        # A newer cut was begun in another slice: this one is given up, and to hand out parts of it
        # would make the controller give back the newer one's.
        if number < newest or number == self._numbers.get(start):
            return []
        if number > newest:
            # Whoever asks for a cut has given back all earlier ones: this mends a lost Return.
            self._handouts.take_back_all(self._controller)
            self._out = []
            self._lent = {}
        self._numbers[start] = number
        vectors = held.vectors()
        parts = [
            CutPart(
                number,
                name,
                len(vectors) * n_slices,
                self._handouts.hand_out(self._controller, view.buffer),
                start,
                held.version,
                tuple(table),
                None if self._lends else view,
                len(view.array),
            )
            for name, view in vectors
        ]
        if self._lends:
            views = (view for _, view in vectors)
            self._lent |= {part.handout: v for part, v in zip(parts, views, strict=True)}
        self._out += parts
        self.due = now + self._resend_s
        return [Send(self._controller.node, part) for part in parts]

    def returned(self, returned: int) -> None:
        """The controller has given back every hand-out up to `returned`."""
        self._out = [part for part in self._out if part.handout > returned]
        self._lent = {handout: v for handout, v in self._lent.items() if handout > returned}
        if not self._out:
            self.due = NEVER

    def read(self, asked: ReadPart) -> Effects:
        """Elements of what is handed out; nothing of what was given back."""
        view = self._lent.get(asked.handout)
        if view is None or not 0 <= asked.start < asked.start + asked.n <= len(view.array):
            return []
        first = view.start + asked.start
        piece = View(view.buffer, first, first + asked.n)
        return [Send(self._controller.node, PartData(asked.handout, asked.start, piece))]

    def send_again(self, now: float) -> Effects:
        self.due = now + self._resend_s
        return [Send(self._controller.node, part) for part in self._out]
