"""dbctl/data/cache.py: files of data on a host: whole or not there, whoever is in it at once."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dbctl.data import cache as module
from dbctl.data.cache import Cache, Partial
from dbctl.errors import DataError
from dbctl.shipment import Shipment

DATA = bytes(range(256)) * 40
SHIPMENT = Shipment(hashlib.sha256(DATA).hexdigest(), len(DATA))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(str(tmp_path / "work" / "data"))


def never(seconds: float) -> None:
    raise AssertionError("nobody else is here")


@contextlib.contextmanager
def open_partial(cache: Cache) -> Iterator[Partial]:
    with cache.partial(SHIPMENT, never) as partial:
        assert partial is not None
        yield partial


def names(cache: Cache) -> list[str]:
    return sorted(path.suffix for path in cache.directory.iterdir())


def put(cache: Cache, data: bytes = DATA) -> bool:
    with open_partial(cache) as partial:
        partial.append(memoryview(data)[partial.size :])
        return partial.finish()


def test_a_file_is_there_whole_or_not(cache: Cache) -> None:
    assert cache.find(SHIPMENT) is None
    with open_partial(cache) as partial:
        assert partial.size == 0
        partial.append(memoryview(DATA)[:100])
        assert cache.find(SHIPMENT) is None
        partial.append(memoryview(DATA)[100:])
        assert cache.find(SHIPMENT) is None
        assert partial.finish()
    found = cache.find(SHIPMENT)
    assert found is not None
    assert found.read_bytes() == DATA
    assert names(cache) == [".npy"]
    assert cache.directory.stat().st_mode & 0o777 == 0o700
    assert found.stat().st_mode & 0o077 == 0


def test_it_is_on_the_disk_before_it_has_its_name(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/reliability.md, files: flushed, renamed, its directory flushed."""
    done: list[str] = []
    fsync, rename = os.fsync, os.rename

    def flush(fd: int) -> None:
        done.append(f"flush {Path(os.readlink(f'/proc/self/fd/{fd}')).suffix or 'directory'}")
        fsync(fd)

    def move(old: Path, new: Path) -> None:
        done.append("rename")
        rename(old, new)

    monkeypatch.setattr("os.fsync", flush)
    monkeypatch.setattr("os.rename", move)
    assert put(cache)
    assert done == ["flush .part", "rename", "flush directory"]


def test_each_use_sets_its_time(cache: Cache) -> None:
    """So that a user sees what is old."""
    put(cache)
    path = cache.path(SHIPMENT)
    os.utime(path, (1.0, 1.0))
    assert cache.find(SHIPMENT) == path
    assert path.stat().st_mtime > 1e9


def test_it_goes_on_where_it_stood(cache: Cache) -> None:
    with contextlib.suppress(KeyboardInterrupt), open_partial(cache) as partial:
        partial.append(memoryview(DATA)[:3000])
        raise KeyboardInterrupt
    with open_partial(cache) as partial:
        assert partial.size == 3000
        partial.append(memoryview(DATA)[3000:])
        assert partial.finish()
    assert cache.find(SHIPMENT) is not None


def test_what_came_damaged_is_begun_anew(cache: Cache) -> None:
    with open_partial(cache) as partial:
        partial.append(memoryview(bytes(len(DATA))))
        assert not partial.finish()
        partial.begin_anew()
        assert partial.size == 0
        partial.append(memoryview(DATA))
        assert partial.finish()
    assert cache.find(SHIPMENT) is not None


@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "empty"])
def test_a_damaged_file_is_found_and_sent_anew(cache: Cache, damage: str) -> None:
    put(cache)
    path = cache.path(SHIPMENT)
    data = bytearray(DATA)
    data[5000] ^= 4
    bad = {"flip": data, "cut": DATA[:-1], "longer": DATA + b"x", "empty": b""}[damage]
    path.write_bytes(bad)
    assert cache.find(SHIPMENT) is None
    with open_partial(cache) as partial:
        assert not path.exists()
        assert partial.size == 0
    assert put(cache)
    assert cache.find(SHIPMENT) is not None


def test_more_than_the_whole_is_no_beginning(cache: Cache) -> None:
    cache.path(SHIPMENT).with_suffix(".part").write_bytes(DATA * 2)
    assert put(cache)


def test_one_receives_and_the_others_find_it(cache: Cache) -> None:
    """Eight at once: each byte is written once, whoever comes first."""
    written, found, waited = [], [], []

    def pause(seconds: float) -> None:
        waited.append(seconds)
        threading.Event().wait(0.001)

    def work() -> None:
        with cache.partial(SHIPMENT, pause) as partial:
            if partial is not None:
                while partial.size < len(DATA):
                    n = min(500, len(DATA) - partial.size)
                    partial.append(memoryview(DATA)[partial.size : partial.size + n])
                    written.append(n)
                    threading.Event().wait(0.0005)
                assert partial.finish()
        found.append(cache.find(SHIPMENT))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(written) == len(DATA)
    assert found == [cache.path(SHIPMENT)] * 8
    assert names(cache) == [".npy"]
    assert waited


HOLDER = """
import sys, time
from dbctl.data.cache import Cache
from dbctl.shipment import Shipment
with Cache(sys.argv[1]).partial(Shipment(sys.argv[2], int(sys.argv[3])), print) as partial:
    partial.append(memoryview(b"\\0" * 10))
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_lock_goes_with_its_process(cache: Cache) -> None:
    words = [
        sys.executable,
        "-c",
        HOLDER,
        str(cache.directory),
        SHIPMENT.digest,
        str(SHIPMENT.size),
    ]
    holder = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        waits = []

        def pause(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 3:
                holder.kill()
            if len(waits) > 3:
                holder.wait()

        with cache.partial(SHIPMENT, pause) as partial:
            assert partial is not None
            assert partial.size == 10
        assert len(waits) >= 3
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_no_room_is_told_before_anything_is_written(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Partial, "_free", lambda self: 10_239)
    said = r"\.part: no room for it: 10,240 bytes more are needed, 10,239 are free; make some"
    with pytest.raises(DataError, match=said), cache.partial(SHIPMENT, never):
        pass
    monkeypatch.setattr(Partial, "_free", lambda self: 10_240)
    assert put(cache)


def test_a_disk_that_fills_up_is_told_and_nothing_stays(cache: Cache) -> None:
    with open_partial(cache) as partial:
        partial.append(memoryview(DATA)[:4000])
        full = os.open("/dev/full", os.O_WRONLY)
        kept, partial._fd = partial._fd, full
        try:
            with pytest.raises(DataError, match=r"6,240 bytes more are needed, .* are free"):
                partial.append(memoryview(DATA)[4000:])
        finally:
            partial._fd = kept
            os.close(full)
    assert names(cache) == []


def test_somebody_elses_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(DataError, match="belongs to another user; give this host another workdir"):
        Cache(str(tmp_path))


def test_an_open_directory_is_closed_to_others(tmp_path: Path) -> None:
    there = tmp_path / "data"
    there.mkdir(mode=0o755)
    Cache(str(there))
    assert there.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="file/data: cannot be used for data: not a directory"):
        Cache(str(tmp_path / "file" / "data"))


def test_a_link_in_the_place_of_a_file_is_not_written_through(cache: Cache, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    cache.path(SHIPMENT).with_suffix(".part").symlink_to(victim)
    with pytest.raises(DataError, match="cannot be written"), cache.partial(SHIPMENT, never):
        pass
    assert victim.read_bytes() == b"mine"
