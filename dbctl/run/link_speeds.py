"""How fast two processes of this machine talk: what a partition and a shard are waited for.

Rules of this file: real processes, as those of a run; two seconds at most; nothing is left of it.

Theory of operation. `python -m dbctl.run.link_speeds` is the other process. Two partitions work for
about as long as a layer takes, and then each sends and waits for what the other sends: what a round
takes besides that work is what an exchange costs, with all its waking up and falling behind, which
messages that go there and back without a pause do not show. A shard sleeps while its worker works,
and is woken by a push and a fetch: it checks the gradient, updates, and hands out the parameters,
which the worker copies. Of one parameter that is all waking up; what more of them take besides is
what one takes, with gradients and parameters in the caches of the core that wrote them last.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dbctl.errors import LaunchError
from dbctl.launch.base import make_runtime
from dbctl.optim.gradients import is_finite
from dbctl.optim.rules import RULE_SPECS
from dbctl.optim.updates import make_rule
from dbctl.process import how_ended
from dbctl.roles.base import View
from dbctl.run.partner import LIMIT_S, partner, say
from dbctl.transport.line import socket_name
from dbctl.transport.link import Link
from dbctl.transport.memory import allocate
from dbctl.wire import Boxes, Fetch, Message, Peer

OTHER, ASKING = Peer("worker-0.1", 1), Peer("worker-0.0", 1)
ROUNDS = 40
FEW_ROUNDS = 12  # of what takes milliseconds
BURST = 16
LARGE = 1 << 18  # elements
WORK = 1 << 15  # elements; about as long as a small layer, when done `WORKS` times
WORKS = 16
SWAP, SERVE, COPY, OVER = "swap", "serve", "copy", "over"


class LinkSpeeds(NamedTuple):
    """`latency_s`: of an exchange; `server_latency_s`: of a push and a fetch, there and back.

    `message_s`: of each further message of an exchange; `bytes_per_s`: into shared memory and out.
    Of one parameter: `check_s`, of its gradient at a worker; `copy_s`, of the answer; `shard_s`, at
    a shard that it waits for.
    """

    latency_s: float
    server_latency_s: float
    message_s: float
    bytes_per_s: float
    check_s: float
    copy_s: float
    shard_s: float


class Serving(NamedTuple):
    """A shard of `size` parameters under the rule of this name, at least one.

    `touched`: numbers that a worker uses between two pushes.
    """

    rule: str
    size: int
    touched: int


def measure_links(serving: Serving) -> LinkSpeeds:
    """The medians of some rounds each. LaunchError: the other process does not come up, or ends."""
    runtime = make_runtime()
    try:
        words = (runtime, serving.rule, str(serving.size))
        with _link(runtime, ASKING) as link, partner("dbctl.run.link_speeds", words) as other:
            link.connect(OTHER.node, 1, _endpoint(runtime, OTHER))
            return _Asking(link, serving, ended=other.poll).measure()
    finally:
        shutil.rmtree(runtime, ignore_errors=True)


def _endpoint(runtime: str, peer: Peer) -> str:
    return f"ipc://{runtime}/{socket_name(peer)}"


def _link(runtime: str, me: Peer) -> Link:
    return Link(run="speeds", node=me.node, incarnation=1, listen=_endpoint(runtime, me))


class _End:
    """One of the two processes: what both do alike."""

    def __init__(self, link: Link, to: Peer, *, size: int) -> None:
        self.link = link
        self.to = to.node
        size = max(LARGE, size)
        self._outbox = allocate(size, "<f4")
        self._own = np.ones(size, np.float32)
        self._other = np.zeros(size, np.float32)
        self._inbox: deque[Message] = deque()
        self._until = time.monotonic() + LIMIT_S

    @property
    def over(self) -> bool:
        """Nothing more is heard of the other process."""
        return self.link.closed_by_parent

    def work(self) -> None:
        for _ in range(WORKS):
            np.add(self._own[:WORK], 1.0, out=self._other[:WORK])

    def give(self, phase: str, number: int, *, size: int = 1) -> None:
        np.copyto(self._outbox.array[:size], self._own[:size])
        self.link.send(self.to, Boxes(number, phase, 0, View(self._outbox, 0, size)))

    def next(self) -> Message | None:
        """The next message; None: there will be none."""
        while not self._inbox:
            if self.over or time.monotonic() > self._until:
                return None
            self._inbox += [message for _, message in self.link.receive(0.5)]
        return self._inbox.popleft()

    def copy(self, message: Message | None) -> None:
        """Copies its payload out."""
        if isinstance(message, Boxes):
            np.copyto(self._other[: len(message.payload)], message.payload)

    def take(self) -> Message | None:
        message = self.next()
        self.copy(message)
        return message

    def swap(self, number: int) -> None:
        """What partitions do in each layer."""
        self.work()
        self.give(SWAP, number)
        self.take()


class _Asking(_End):
    """`ended`: the exit status of the other process, None while it lives."""

    def __init__(self, link: Link, serving: Serving, *, ended: Callable[[], int | None]) -> None:
        super().__init__(link, OTHER, size=serving.size)
        self._ended = ended
        self._serving = serving
        self._elsewhere = np.zeros(serving.touched, np.float32)

    @property
    def over(self) -> bool:
        return self._ended() is not None

    def next(self) -> Message:
        message = super().next()
        if message is None:
            status = self._ended()
            how = f"did not answer in {LIMIT_S:g} s" if status is None else how_ended(status)
            raise LaunchError("the second process that measures link speeds", f"{how}: try again")
        return message

    def measure(self) -> LinkSpeeds:
        self.give(COPY, 0)  # the first goes by the socket
        self.take()
        work_s = self._median(lambda n: self.work())
        self.give(SWAP, ROUNDS + 1)
        swap_s = self._median(self.swap)
        one, many = self._steps(1), self._steps(self._serving.size)
        small_s = self._median(lambda n: self._there_and_back(1, size=1))
        burst_s = self._median(lambda n: self._there_and_back(BURST, size=1))
        large_s = self._median(lambda n: self._there_and_back(1, size=LARGE))
        return LinkSpeeds(
            latency_s=max(swap_s - work_s, 1e-6),
            server_latency_s=max(one.waited_s, 1e-6),
            message_s=max(0.0, burst_s - small_s) / (BURST - 1),
            bytes_per_s=4 * LARGE / max(large_s - small_s, 1e-6),
            check_s=many.checked_s / self._serving.size,
            copy_s=many.copied_s / self._serving.size,
            shard_s=max(many.waited_s - one.waited_s, 0.0) / self._serving.size,
        )

    def _median(self, run: Callable[[int], None]) -> float:
        times = []
        for number in range(ROUNDS + 1):
            began = time.perf_counter()
            run(number)
            times.append(time.perf_counter() - began)
        return float(np.median(times[1:]))

    def _steps(self, size: int) -> _Step:
        steps = [self._step(number, size=size) for number in range(FEW_ROUNDS + 1)]
        return _Step(*(float(np.median(column)) for column in zip(*steps[1:], strict=True)))

    def _step(self, number: int, *, size: int) -> _Step:
        """What a worker does after each gradient, which is the last thing that it has written."""
        np.add(self._elsewhere, 1.0, out=self._elsewhere)
        gradient = self._outbox.array[:size]
        np.copyto(gradient, self._own[:size])
        began = time.perf_counter()
        is_finite(gradient)
        checked = time.perf_counter()
        self.link.send(self.to, Boxes(number, SERVE, 0, View(self._outbox, 0, size)))
        self.link.send(self.to, Fetch(1, number, 0, 0))
        answer = self.next()
        came = time.perf_counter()
        self.copy(answer)
        return _Step(checked - began, time.perf_counter() - came, came - checked)

    def _there_and_back(self, count: int, *, size: int) -> None:
        for number in range(count):
            self.give(COPY if number == count - 1 else OVER, number, size=size)
        self.take()


class _Step(NamedTuple):
    """Seconds of a worker's own work on its parameters, and of waiting for its shard."""

    checked_s: float
    copied_s: float
    waited_s: float


class _Other(_End):
    def __init__(self, link: Link, rule: str, *, size: int) -> None:
        super().__init__(link, ASKING, size=size)
        self._rule = make_rule(RULE_SPECS[rule](rate=1e-6), size=size)
        self._states = {n: self._rule.new_state(n, "float32") for n in {1, size}}
        self._gradient = np.zeros(1, np.float32)

    def run(self) -> None:
        while (message := self.next()) is not None:
            self._answer(message)

    def _answer(self, message: Message) -> None:
        if isinstance(message, Fetch):
            self._update_and_hand_out(message.number)
            return
        assert isinstance(message, Boxes)
        if message.phase == SERVE:
            self._gradient = message.payload
            return
        self.copy(message)
        if message.phase == COPY:
            self.give(COPY, message.number)
        elif message.phase == SWAP:
            for number in range(message.number):
                self.swap(number)

    def _update_and_hand_out(self, number: int) -> None:
        """What a shard does for a push and a fetch."""
        size = len(self._gradient)
        values = self._outbox.array[:size]
        is_finite(self._gradient)
        state = self._states[size]
        self._rule.update(values, self._gradient, state, n=number, rate=1e-6, out=values)
        self.link.send(self.to, Boxes(number, SERVE, 0, View(self._outbox, 0, size)))


def main(runtime: str, rule: str, size: str) -> None:
    try:
        _answer_all(runtime, rule, size=int(size))
    finally:  # the first process may have been killed
        shutil.rmtree(runtime, ignore_errors=True)


def _answer_all(runtime: str, rule: str, *, size: int) -> None:
    link = Link(
        run="speeds", node=OTHER.node, incarnation=1, listen=_endpoint(runtime, OTHER), watch_fd=0
    )
    with link:
        link.connect(ASKING.node, 1, _endpoint(runtime, ASKING))
        other = _Other(link, rule, size=size)
        say(b"ready\n")
        other.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
