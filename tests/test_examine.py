"""What a host finds when it looks at itself, and which others it reaches; all of it bounded."""

from __future__ import annotations

import errno
import io
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec import convert, to_builtins
from msgspec import json as msgspec_json

from dbctl import examine
from dbctl.data.files import file_digest
from dbctl.examine import REQUIRED, Examination, Facts, Question, look_at, probe, reach


def test_the_facts_are_those_of_this_machine(tmp_path: Path) -> None:
    workdir = tmp_path / "é" / "work"
    with Examination(Question(workdir=str(workdir))) as looked:
        facts = looked.facts
    assert facts.python == ".".join(map(str, sys.version_info[:3]))
    import numpy as np

    assert facts.packages["numpy"] == np.__version__
    assert all(facts.packages.values())
    assert facts.curve
    assert facts.cores == len(os.sched_getaffinity(0))
    assert abs(facts.clock - time.time()) < 5.0
    assert (facts.workdir_fault, facts.address_fault, facts.port) == ("", "", 0)
    assert workdir.is_dir(), "the work directory is made"
    assert list(workdir.iterdir()) == [], "and nothing in it"
    assert facts.free is not None
    assert convert(json.loads(json.dumps(to_builtins(facts))), Facts) == facts
    assert len(msgspec_json.encode(facts)) < 2000, "a READY line is far below its limit"


def test_what_nodes_import_is_what_is_asked_for() -> None:
    """A distribution that dbctl comes to need must be among REQUIRED, or its lack is a crash."""
    code = (
        "import sys, json, dbctl.agent, dbctl.node.main, dbctl.node.build\n"
        "import dbctl.checkpoint.reader, dbctl.run.train\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30, check=True)
    loaded = set(json.loads(done.stdout)) - set(sys.stdlib_module_names)
    from importlib.metadata import packages_distributions

    known = packages_distributions()
    needed = {known[name][0] for name in loaded if name in known} - {"dbctl"}
    by_others = {"setuptools", "typing_extensions", "tqdm"}  # what those bring along, or begin with
    assert needed - by_others <= set(REQUIRED), needed


@pytest.mark.parametrize("module", ["numpy", "zmq"])
def test_what_is_missing_is_a_fact(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    find = examine.find_spec
    monkeypatch.setattr(examine, "find_spec", lambda name: None if name == module else find(name))
    missing = [name for name, version in examine.packages().items() if not version]
    assert missing == [name for name, imported in REQUIRED.items() if imported == module]


# ------------------------------------------------------------------------------------ directories


def test_a_work_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "exists" in probe(tmp_path / "file").lower()
    assert "not a directory" in probe(tmp_path / "file" / "below").lower()
    assert "no such file" in probe(Path("/proc/none")).lower()


def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*words: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    assert probe(tmp_path) == "No space left on device"


# ------------------------------------------------------------------------------------------- data


def test_files_are_looked_at(tmp_path: Path) -> None:
    good, empty = tmp_path / "good", tmp_path / "empty"
    good.write_bytes(b"abc")
    empty.touch()
    one, two, three, four = look_at((str(good), str(empty), str(tmp_path), str(tmp_path / "no")))
    assert (one.size, one.digest, one.fault) == (3, file_digest(str(good), "x").hex(), "")
    assert (two.size, two.fault) == (0, "")
    assert two.digest != one.digest
    assert three.fault == "not a regular file"
    assert "no such file" in four.fault.lower()
    assert look_at(("a\0b",))[0].fault


def test_a_slow_disk_does_not_hold_up_the_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "big").write_bytes(bytes(3 << 20))
    monkeypatch.setattr(examine, "FILES_LIMIT_S", -1.0)
    (found,) = look_at((str(tmp_path / "big"),))
    assert (found.late, found.size, found.digest) == (True, 3 << 20, "")


@pytest.mark.parametrize("where", ["stat", "read"])
def test_a_file_server_that_is_lost_is_a_fault_and_not_late(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    """ETIMEDOUT of a network file system is a TimeoutError to Python."""
    lost = TimeoutError(errno.ETIMEDOUT, "Connection timed out")
    (tmp_path / "x").write_bytes(b"abc")

    class File(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise lost

    def stat(path: object) -> os.stat_result:
        raise lost

    with monkeypatch.context() as patch:
        if where == "stat":
            patch.setattr("os.stat", stat)
        else:
            patch.setattr("dbctl.data.files.open_file", lambda path, key: File(path))
        (found,) = look_at((str(tmp_path / "x"),))
    assert "timed out" in found.fault
    assert (found.late, found.digest) == (False, "")


# ----------------------------------------------------------------------------------- other hosts


def test_hosts_that_listen_are_reached_and_others_are_not() -> None:
    with Examination(Question(workdir="/tmp", address="127.0.0.1")) as one:
        there = {"b": ("127.0.0.1", one.facts.port), "c": ("127.0.0.1", 1)}
        assert one.facts.port > 0
        assert reach(there) == {"b": "", "c": "Connection refused"}
    assert reach(there) == {"b": "Connection refused", "c": "Connection refused"}


def test_ipv6_is_an_address_too() -> None:
    with Examination(Question(workdir="/tmp", address="::1")) as one:
        if one.facts.address_fault:
            pytest.skip("this machine has no IPv6")
        assert reach({"b": ("::1", one.facts.port)}) == {"b": ""}


def test_an_address_of_somebody_else_is_told() -> None:
    with Examination(Question(workdir="/tmp", address="192.0.2.7")) as looked:
        assert looked.facts.address_fault == "Cannot assign requested address"
        assert looked.facts.port == 0


def test_who_does_not_answer_is_waited_for_in_vain_but_not_long() -> None:
    """A listener whose queue is full answers no further connection."""
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for one in (first, second):
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        begin = time.monotonic()
        found = reach({"a": full.getsockname(), "b": full.getsockname()}, limit_s=0.3)
        assert time.monotonic() - begin < 1.0
    assert set(found) == {"a", "b"}
    assert "no answer within 0.3 s" in found.values()
