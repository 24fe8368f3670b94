"""caller.py, to a real keeper on this machine, and where there is none."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dbctl.caller import ANSWER, GONE, NO_KEEPER, Call
from tests.cluster.harness import wait_gone
from tests.one_keeper import LIMIT_S, Standing, agent_pid, dbctl, let_go, say


@pytest.fixture
def standing(tmp_path: Path) -> Iterator[Standing]:
    with Standing(tmp_path) as one:
        yield one


def call(path: str, data: bytes) -> tuple[int, str, str]:
    process = dbctl("caller", path, stderr=subprocess.PIPE)
    out, err = process.communicate(data, LIMIT_S)
    return process.returncode, out.decode(), err.decode()


def test_the_caller_prints_an_answer(standing: Standing) -> None:
    status, out, _ = call(standing.path, b'{"do": "status"}\n')
    assert status == 0
    [line] = [line for line in out.splitlines() if line.startswith(ANSWER)]
    assert json.loads(line.removeprefix(ANSWER))["cluster"] == "tests"
    status, out, _ = call(standing.path, b'{"do": "stop"}\n')
    assert f'{ANSWER}{{"stopped": true, "runs": 0}}' in out
    wait_gone(standing.pid, limit_s=5.0)


def test_an_answer_that_comes_at_once_is_heard(
    standing: Standing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper has closed already when the caller goes on from its request."""
    send = socket.send_fds

    def send_slowly(*words: Any) -> int:
        n_sent = send(*words)
        time.sleep(0.2)
        return n_sent

    monkeypatch.setattr(socket, "send_fds", send_slowly)
    with standing.connect() as connection:
        assert Call(connection, b'{"do": "status"}\n').hold() == 0


def test_the_caller_says_that_nobody_is_there(tmp_path: Path) -> None:
    status, _, err = call(str(tmp_path / "none.sock"), b'{"do": "status"}\n')
    assert status == GONE
    assert f"{NO_KEEPER}: FileNotFoundError" in err


def test_only_where_it_knows_the_caller_says_that_nobody_is_there(tmp_path: Path) -> None:
    path = str(tmp_path / "none.sock")
    here = os.uname().nodename
    for node, status, word in ((here, GONE, NO_KEEPER), ("b", 1, f"is on b, and this is {here}")):
        process = dbctl("caller", path, node, stderr=subprocess.PIPE)
        _, err = process.communicate(b'{"do": "status"}\n', LIMIT_S)
        assert (process.returncode, word in err.decode()) == (status, True), err
    (tmp_path / "file").touch()
    status, _, told = call(str(tmp_path / "file" / "none.sock"), b'{"do": "status"}\n')
    assert status == 1
    assert "cannot be reached: NotADirectoryError" in told
    assert NO_KEEPER not in told


def test_the_caller_says_what_was_refused(standing: Standing) -> None:
    status, out, err = call(standing.path, b'{"do": "dance"}\n')
    assert (status, out) == (1, "")
    assert "refused: expected to do run, status or stop, found 'dance'" in err


def test_the_caller_needs_a_request(standing: Standing) -> None:
    status, _, err = call(standing.path, b"")
    assert status == 1
    assert "no request of at most" in err


def test_what_is_said_later_reaches_the_agent_whole(standing: Standing, tmp_path: Path) -> None:
    """Its standard input stays one: an agent that reads on gets every byte, in order."""
    with standing.run(tmp_path) as process:
        say(process, b"x" * 300_000)
        assert process.poll() is None
        assert agent_pid(standing)
        assert let_go(process) == 0
