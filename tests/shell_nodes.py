"""Nodes of a test that are shell scripts, and the children of an agent that are ended with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from dbctl.children import Children
from dbctl.wire_processes import Start
from tests.cluster.harness import wait_until


def shell(script: str, node: str = "shard-0", incarnation: int = 1, spec: str = "{}") -> Start:
    return Start(node, incarnation, ("/bin/sh", "-c", script), (), spec)


@contextlib.contextmanager
def children_in(path: Path) -> Iterator[Children]:
    """Whose logs are in `path`; none of them outlives the test."""
    these = Children(path)
    try:
        yield these
    finally:
        these.end_all(gently=False)
        wait_until(lambda: these.reap() is not None and not these.running)
