"""dbctl/transport/memory.py: who writes a buffer owns it, the other side maps it read-only."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from dbctl.envelope import Shared
from dbctl.errors import PeerError, RunError
from dbctl.roles.base import PlainBuffer, View
from dbctl.transport import memory
from dbctl.transport.memory import Mappings, SharedBuffer, allocate, describe
from dbctl.wire import Peer

PEER = Peer("worker-0.0", 1)


@pytest.fixture
def buffer() -> Iterator[SharedBuffer]:
    buffer = SharedBuffer(1_000, "<f4")
    buffer.array[:] = np.arange(1_000)
    yield buffer
    buffer.close()


def n_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_a_reader_sees_what_the_owner_writes(buffer: SharedBuffer) -> None:
    array = Mappings().open(describe(View(buffer, 10, 20)), PEER)
    assert array.tolist() == list(range(10, 20))
    buffer.array[10] = 99
    assert array[0] == 99


def test_a_reader_cannot_write(buffer: SharedBuffer) -> None:
    array = Mappings().open(describe(View(buffer, 0, 10)), PEER)
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True


def test_the_kernel_refuses_a_second_writer_and_another_size(buffer: SharedBuffer) -> None:
    import mmap

    fd = os.open(f"/proc/self/fd/{buffer.fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, buffer.size_bytes)
        for size in (0, buffer.size_bytes * 2):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)


@pytest.mark.parametrize("dtype", ["<f4", "<f8"])
@pytest.mark.parametrize("n_elements", [0, 1, 5_000])
def test_a_buffer_is_zero_flat_and_writable(dtype: str, n_elements: int) -> None:
    buffer = allocate(n_elements, dtype)
    assert isinstance(buffer, SharedBuffer)
    assert buffer.array.shape == (n_elements,)
    assert buffer.array.dtype.str == buffer.dtype == dtype
    assert not buffer.array.any()
    buffer.array[:] = 1
    shared = describe(View(buffer, 0, n_elements))
    assert Mappings().open(shared, PEER).tolist() == [1] * n_elements
    buffer.close()


def test_memory_that_the_host_has_not_is_an_error_at_once() -> None:
    before = n_descriptors()
    with pytest.raises(MemoryError, match="does not fit"):
        SharedBuffer(1 << 50, "<f8")
    assert n_descriptors() == before


def test_a_full_file_system_is_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryError, match="does not fit"):
        SharedBuffer(10, "<f8")


def test_a_limit_of_the_size_of_files_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(fd: int, start: int, size: int) -> None:
        raise OSError(27, "File too large")

    monkeypatch.setattr(os, "posix_fallocate", too_large)
    monkeypatch.setattr(memory.resource, "getrlimit", lambda which: (4096, 4096))
    with pytest.raises(RunError, match=r"of 8,000 bytes .*\(`ulimit -f`, 4,096 bytes\); raise"):
        SharedBuffer(1000, "<f8")


def test_without_memfd_a_buffer_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert not memory.has_memfd()
    assert isinstance(allocate(10, "<f4"), PlainBuffer)


def test_each_page_is_reserved() -> None:
    buffer = SharedBuffer(1 << 20, "<f4")
    assert os.fstat(buffer.fd).st_blocks * 512 >= 4 << 20
    buffer.close()


def test_close_gives_back_descriptors_and_keeps_arrays_alive() -> None:
    before = n_descriptors()
    buffer = SharedBuffer(100, "<f4")
    array = buffer.array
    array[:] = 7
    buffer.close()
    buffer.close()
    assert array.sum() == 700
    with pytest.raises(AssertionError):
        _ = buffer.array
    del array
    assert n_descriptors() == before


@pytest.mark.parametrize("what", ["os.open", "mmap.mmap"])
@pytest.mark.parametrize(
    ("number", "lack", "cure"),
    [
        (errno.EMFILE, "descriptor left for", "raise `ulimit -n`, here "),
        (errno.ENFILE, "descriptor left for", "close some"),
        (errno.ENOMEM, "room to map", "raise `ulimit -v` or vm.max_map_count"),
    ],
)
def test_what_this_process_lacks_is_no_fault_of_the_peer(
    buffer: SharedBuffer,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    number: int,
    lack: str,
    cure: str,
) -> None:
    """A message that were dropped for it would be waited for."""

    def none_left(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    before, shared, mappings = n_descriptors(), describe(View(buffer, 0, 10)), Mappings()
    with monkeypatch.context() as patch:
        patch.setattr(f"dbctl.transport.memory.{what}", none_left)
        with pytest.raises(RunError, match=os.strerror(number).lower()) as caught:
            mappings.open(shared, PEER)
    said = f"process {os.getpid()} has no {lack} the memory of {PEER}: "
    assert str(caught.value).startswith(said)
    assert f"; {cure}" in str(caught.value)
    assert n_descriptors() == before
    assert mappings.open(shared, PEER).tolist() == list(range(10))


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESRCH, errno.EACCES, errno.EPERM])
def test_a_path_that_leads_nowhere_is_the_peers_fault(
    buffer: SharedBuffer, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("dbctl.transport.memory.os.open", refuse)
    with pytest.raises(PeerError, match="cannot be opened"):
        Mappings().open(describe(View(buffer, 0, 10)), PEER)


def test_a_buffer_that_nobody_holds_leaves_no_descriptor() -> None:
    before = n_descriptors()
    SharedBuffer(100, "<f4")
    assert n_descriptors() == before


def test_it_has_no_name_in_any_file_system(buffer: SharedBuffer) -> None:
    assert os.readlink(f"/proc/self/fd/{buffer.fd}").endswith("(deleted)")


def test_a_buffer_is_mapped_once(buffer: SharedBuffer) -> None:
    mappings = Mappings()
    for start in range(100):
        mappings.open(describe(View(buffer, start, 200)), PEER)
    assert len(mappings) == 1
    mappings.open(describe(View(buffer, 0, 1)), Peer("worker-0.0", 2))
    assert len(mappings) == 2


def test_forget_drops_the_mapping_not_the_arrays(buffer: SharedBuffer) -> None:
    before = n_descriptors()
    mappings = Mappings()
    array = mappings.open(describe(View(buffer, 0, 10)), PEER)
    mappings.forget(PEER)
    assert len(mappings) == 0
    assert array.tolist() == list(range(10))
    del array
    assert n_descriptors() == before


def test_mappings_of_a_peer_are_bounded() -> None:
    mappings = Mappings(max_per_peer=3)
    buffers = [SharedBuffer(10, "<f4") for _ in range(5)]
    arrays = [mappings.open(describe(View(buffer, 0, 10)), PEER) for buffer in buffers]
    assert len(mappings) == 3
    for number, buffer in enumerate(buffers):
        buffer.array[:] = number
    assert [int(array[0]) for array in arrays] == [0, 1, 2, 3, 4]
    for buffer in buffers:
        buffer.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"inode": 1},
        {"size_bytes": 4_004, "n_elements": 1},
        {"size_bytes": 1 << 62, "n_elements": 1 << 59},
        {"n_elements": 1_001},
        {"n_elements": -1},
        {"offset_bytes": 3},
        {"offset_bytes": -4},
        {"offset_bytes": 3_996, "n_elements": 2},
        {"dtype": "|O8"},
        {"dtype": ">f4"},
        {"dtype": "<i8"},
        {"dtype": ""},
        {"fd": -1},
        {"fd": 1 << 40},
        {"pid": 0},
        {"pid": 1 << 40},
    ],
)
def test_a_lie_is_the_peers_error(buffer: SharedBuffer, changes: dict[str, object]) -> None:
    shared = msgspec.structs.replace(describe(View(buffer, 0, 1_000)), **changes)
    mappings = Mappings()
    with pytest.raises(PeerError, match=r"worker-0\.0#1"):
        mappings.open(shared, PEER)
    mappings.open(describe(View(buffer, 0, 1_000)), PEER)
    with pytest.raises(PeerError, match=r"worker-0\.0#1"):
        mappings.open(shared, PEER)


def of_descriptor(fd: int) -> Shared:
    status = os.fstat(fd)
    return Shared(os.getpid(), fd, status.st_ino, status.st_size, 0, 1, "<f4")


def test_a_pipe_a_device_and_a_plain_file_are_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    reader, writer = os.pipe()
    zero = os.open("/dev/zero", os.O_RDONLY)
    plain = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    os.write(plain, b"12345678")
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, 8)
    for fd in (reader, zero, plain, unsealed):
        with pytest.raises(PeerError):
            Mappings().open(of_descriptor(fd), PEER)
    for fd in (reader, writer, zero, plain, unsealed):
        os.close(fd)


def test_a_descriptor_that_is_another_buffer_by_now() -> None:
    """reliability: a PID can be another process by then, a descriptor another file."""
    first = SharedBuffer(10, "<f4")
    shared = describe(View(first, 0, 10))
    first.close()
    second = SharedBuffer(10, "<f4")
    assert second.fd == shared.fd
    with pytest.raises(PeerError, match="another file"):
        Mappings().open(shared, PEER)
    second.close()


OWNER = """
import sys
from dbctl.roles.base import View
from dbctl.transport.memory import SharedBuffer, describe
import msgspec
buffer = SharedBuffer(1000, "<f8")
buffer.array[:] = 3
print(msgspec.json.encode(describe(View(buffer, 0, 1000))).decode(), flush=True)
sys.stdin.read()
"""


def test_another_process_and_its_death() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    shared = msgspec.json.decode(owner.stdout.readline(), type=Shared)
    mappings = Mappings()
    array = mappings.open(shared, PEER)
    owner.kill()
    owner.wait()
    owner.stdin.close()
    owner.stdout.close()
    assert array.sum() == 3_000
    mappings.forget(PEER)
    with pytest.raises(PeerError, match="cannot be opened"):
        mappings.open(shared, PEER)


def test_before_linux_5_1_size_is_sealed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def old(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_ADD_SEALS and argument & 0x10:
            raise OSError(22, "Invalid argument")
        return real(fd, command, argument)

    monkeypatch.setattr(memory.fcntl, "fcntl", old)
    buffer = SharedBuffer(10, "<f4")
    assert Mappings().open(describe(View(buffer, 0, 10)), PEER).tolist() == [0] * 10
    buffer.close()
