"""The other process of a measurement: for what one process by itself does not show.

Rules of this file: a real process, as those of a run; it ends with its standard input, and nothing
is left of it.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from dbctl.errors import LaunchError
from dbctl.launch.base import python_environment
from dbctl.process import how_ended

LIMIT_S = 20.0  # until it is ready, and of a measurement


@contextlib.contextmanager
def partner(
    module: str, words: Sequence[str] = (), *, env: Mapping[str, str] | None = None, line: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m module words`, to which `line` was said and which has said a line: it is ready.

    LaunchError: it does not come up.
    """
    what = f"the second process that measures {module.rpartition('.')[2].replace('_', ' ')}"
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *words],
        env={**os.environ, **python_environment(), **(env or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):  # it ended, which is told below
            if line:
                os.write(process.stdin.fileno(), line.encode() + b"\n")
        if not select.select([process.stdout], [], [], LIMIT_S)[0]:
            raise LaunchError(what, f"was not ready in {LIMIT_S:g} s: try again")
        if not process.stdout.readline():
            how = how_ended(process.wait())
            raise LaunchError(what, f"{how} before it was ready: try again")
        yield process
    finally:
        process.stdin.close()  # its end
        process.stdout.close()
        try:
            process.wait(2.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def say(text: bytes) -> None:
    """From the other process to the first; its end where there is nobody any more."""
    try:
        os.write(1, text)
    except BrokenPipeError:
        sys.exit(0)
