"""What an agent says before it takes orders: its lines, and their order."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dbctl.examine import Facts, FileFacts, Question, reach
from tests.cluster.harness import wait_until


class Told:
    """An agent that is told `options` on its standard input."""

    def __init__(self, home: Path, **options: object) -> None:
        values: dict[str, object] = {
            "runtime": str(home / "sockets"), "run": "r", "name": "agent-0",
            "workdir": str(home / "work"), "lease": 5.0, "env": {},
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dbctl", "agent", "--stdin"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        self.tell(values | options)

    def tell(self, values: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(values).encode() + b"\n")

    def line(self) -> tuple[str, dict[str, Any]]:
        """The next line that it says."""
        assert self.process.stdout is not None
        while not (line := self.process.stdout.readline().decode().strip()):
            assert self.process.poll() is None, "it says no more"
        word, _, fields = line.partition(" ")
        return word, json.loads(fields)

    def end(self) -> str:
        """What it said for its log once its input has ended."""
        _, said = self.process.communicate(timeout=10)
        assert self.process.returncode == 0
        return said.decode()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Any]:
    made: list[Told] = []

    def make(**options: object) -> Told:
        made.append(Told(tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.process.kill()
        one.process.communicate()


def test_one_host_says_ready_with_its_facts(agents: Any, tmp_path: Path) -> None:
    one = agents(examine={"files": [str(tmp_path / "none.npy")]})
    word, fields = one.line()
    assert word == "READY"
    assert fields["facts"]["workdir"] == str(tmp_path / "work")
    assert fields["facts"]["port"] == 0
    assert "no such file" in fields["facts"]["files"][0]["fault"]
    assert (tmp_path / "sockets" / "agent-0.sock").is_socket(), "it takes orders"
    assert "standard input ended" in one.end()
    assert not (tmp_path / "sockets").exists()
    assert list((tmp_path / "work").iterdir()) == [], "not even an empty directory for logs"


def test_of_several_each_says_whom_it_reaches(agents: Any, tmp_path: Path) -> None:
    one = agents(examine={"address": "127.0.0.1"}, reach=True)
    word, fields = one.line()
    port = fields["facts"]["port"]
    assert word == "READY"
    assert not (tmp_path / "sockets" / "agent-0.sock").exists(), "it takes no orders yet"
    others = [["agent-1", "127.0.0.1", port], ["agent-2", "127.0.0.1", 1]]
    one.tell({"reach": others})
    word, reached = one.line()
    assert (word, reached) == ("REACHED", {"agent-1": "", "agent-2": "Connection refused"})
    assert (tmp_path / "sockets" / "agent-0.sock").is_socket()
    assert reach({"it": ("127.0.0.1", port)}) == {"it": ""}, "another one may be late"
    one.end()
    assert reach({"it": ("127.0.0.1", port)}) == {"it": "Connection refused"}


@pytest.mark.parametrize("told", [{"only": True}, {"workdir": "/proc/none"}])
def test_who_is_only_asked_or_cannot_write_takes_no_orders(
    agents: Any, tmp_path: Path, told: dict[str, object]
) -> None:
    one = agents(examine={"address": "127.0.0.1"}, reach=True, **told)
    word, fields = one.line()
    assert word == "READY"
    assert bool(fields["facts"]["workdir_fault"]) == ("workdir" in told)
    one.tell({"reach": []})
    assert one.line() == ("REACHED", {})
    time.sleep(0.2)
    assert one.process.poll() is None, "others may still come to its port"
    one.end()
    assert not (tmp_path / "sockets").exists()


def test_a_controller_that_goes_before_it_asks_is_seen(agents: Any, tmp_path: Path) -> None:
    one = agents(examine={"address": "127.0.0.1"}, reach=True)
    assert one.line()[0] == "READY"
    begin = time.monotonic()
    one.end()
    assert time.monotonic() - begin < 2.0
    assert not (tmp_path / "sockets").exists()


def test_the_port_is_closed_once_orders_come(agents: Any, tmp_path: Path) -> None:
    from dbctl.transport.link import Link
    from dbctl.wire_processes import Kill

    one = agents(examine={"address": "127.0.0.1"}, reach=True, lease=30.0)
    port = one.line()[1]["facts"]["port"]
    one.tell({"reach": []})
    assert one.line()[0] == "REACHED"
    link = Link(run="r", node="controller", incarnation=1, listen=None)
    link.start()
    try:
        link.connect("agent-0", 1, f"ipc://{tmp_path}/sockets/agent-0.sock")
        begin = time.monotonic()
        link.send("agent-0", Kill("shard-0", 1))
        wait_until(lambda: reach({"it": ("127.0.0.1", port)})["it"] != "")
        assert time.monotonic() - begin < 3.0, "long before its lease runs out"
        assert one.process.poll() is None
    finally:
        link.close(0.0)
    one.end()


def test_the_protocol_names_every_field(agents: Any) -> None:
    text = (Path(__file__).parent.parent / "docs" / "protocol.md").read_text(encoding="utf-8")
    section = text.partition("## 10 Launcher and agent")[2]
    said = agents().line()[1]
    names = {*said, *Question.__struct_fields__, *Facts.__struct_fields__}
    names |= {*FileFacts.__struct_fields__}
    assert {name for name in names if f"`{name}`" not in section} == set()


def test_a_question_of_another_form_is_refused(agents: Any) -> None:
    one = agents(examine={"files": 3})
    _, said = one.process.communicate(timeout=10)
    assert one.process.returncode == 1
    assert b"cannot begin: ValidationError" in said
