"""dbctl's own roles with one thing wrong: named in TrainRun's `factories`, run by its nodes.

Settings come by the environment, which every process of a run inherits: DBCTL_TEST_NODE is the one
node that misbehaves (each of the role where it is not set), DBCTL_TEST_SECONDS how long a nap is.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Generator
from typing import Any

from dbctl.node.build import NetworkGradient, NetworkMeasure, NetworkPortions, build
from dbctl.plan import NodeSpec
from dbctl.roles.base import Allocate, Role


def _is_meant(spec: NodeSpec) -> bool:
    return os.environ.get("DBCTL_TEST_NODE", spec.node) == spec.node


def _nap() -> None:
    time.sleep(float(os.environ.get("DBCTL_TEST_SECONDS", "20")))


def slow_start(spec: NodeSpec, allocate: Allocate) -> Role:
    """Takes its time before it is ready."""
    if _is_meant(spec):
        _nap()
    return build(spec, allocate)


def raises_at_start(spec: NodeSpec, allocate: Allocate) -> Role:
    if _is_meant(spec):
        raise ValueError("no such table")
    return build(spec, allocate)


def exits_at_start(spec: NodeSpec, allocate: Allocate) -> Role:
    """Ends without a word of its own, as a library that calls exit() does."""
    if _is_meant(spec):
        print("last words", file=sys.stderr, flush=True)
        os._exit(7)
    return build(spec, allocate)


def slow_gradient(spec: NodeSpec, allocate: Allocate) -> Role:
    """Every gradient of the node that is meant takes a nap longer."""
    if not _is_meant(spec):
        return build(spec, allocate)
    plain = NetworkGradient.compute

    def compute(self: NetworkGradient, *args: Any) -> Generator[Any, Any, Any]:
        _nap()
        return (yield from plain(self, *args))

    NetworkGradient.compute = compute  # type: ignore[method-assign]
    return build(spec, allocate)


def slow_measure(spec: NodeSpec, allocate: Allocate) -> Role:
    """Every batch of an evaluation takes a nap longer."""
    plain = NetworkMeasure.measure

    def measure(self: NetworkMeasure, *args: Any, **more: Any) -> Any:
        _nap()
        return plain(self, *args, **more)

    NetworkMeasure.measure = measure  # type: ignore[method-assign]
    return build(spec, allocate)


def raises_in_a_step(spec: NodeSpec, allocate: Allocate) -> Role:
    """Works for 30 steps, then its role raises."""
    role = build(spec, allocate)
    if not _is_meant(spec):
        return role
    plain, count = role.step, 0

    def step(now: float) -> Any:
        nonlocal count
        count += 1
        if count > 30:
            raise ArithmeticError("a step went wrong")
        return plain(now)

    role.step = step  # type: ignore[method-assign]
    return role


def watched(spec: NodeSpec, allocate: Allocate) -> Role:
    """dbctl's own role in a process that tells of every use of pickle."""
    watch_pickle(spec.node)
    return build(spec, allocate)


def watch_pickle(node: str) -> None:
    """From here on whatever is unpickled in this process is a line in DBCTL_TEST_AUDIT.

    The first line is the proof that the hook sees it.
    """
    path = os.environ.get("DBCTL_TEST_AUDIT")
    if path is None:
        return
    file = open(path, "a", buffering=1)  # noqa: SIM115 - for the life of the process

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "pickle.find_class":
            file.write(f"{node} {args[0]}.{args[1]}\n")

    sys.addaudithook(hook)
    assert pickle.loads(b"cbuiltins\nrepr\n.") is repr


def slow_portions(spec: NodeSpec, allocate: Allocate) -> Role:
    """The node that is meant computes portions at a twentieth of its speed."""
    if not _is_meant(spec):
        return build(spec, allocate)
    plain = NetworkPortions.compute

    def compute(self: NetworkPortions, *args: Any, **more: Any) -> Generator[Any, Any, Any]:
        began = time.perf_counter()
        result = yield from plain(self, *args, **more)
        time.sleep(19 * (time.perf_counter() - began))
        return result

    NetworkPortions.compute = compute  # type: ignore[method-assign]
    return build(spec, allocate)
