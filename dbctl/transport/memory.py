"""Shared memory between the processes of one host: who writes a buffer owns it, others only map it.

Rules of this file: no message and no socket; a buffer has no name in any file system, so nothing is
left whoever dies; nothing that a peer says about memory is believed before it is checked. What is
the peer's fault is PeerError, and its message is dropped; where this process lacks a descriptor or
room to map it, it is RunError, because whoever waits for that message would do so for ever.

Theory of operation: the owner makes a memfd, reserves all of it (`posix_fallocate`: lack of memory
is an error here and never a SIGBUS later), maps it, and seals it: its size is fixed, and the kernel
refuses every other writable mapping (F_SEAL_FUTURE_WRITE). A message names it as /proc/PID/fd/FD
with its inode and size (`envelope.Shared`). The reader opens that, checks both on what it *opened*
(by then PID may be another process, FD another file), checks the seals (an unsealed file could
shrink under the mapping), and maps it read-only. It maps a buffer once, and keeps the mapping for
as long as that incarnation of the peer lives: page tables cost more than the doorbell.
When a buffer may be written again is not known here: roles hand out and take back.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import stat
import weakref
from collections import OrderedDict
from pathlib import Path

from dbctl.envelope import Shared
from dbctl.errors import PeerError, RunError, reason
from dbctl.roles.base import Array, Buffer, PlainBuffer, View
from dbctl.transport.pieces import ITEM_BYTES
from dbctl.wire import Peer

MAPPINGS_PER_PEER = 64
MAPPED_PEERS = 1024

# Not in Python 3.11's fcntl: linux/fcntl.h, since Linux 5.1.
_F_SEAL_FUTURE_WRITE = 0x0010
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SharedBuffer:
    """A flat array of `n_elements` of `dtype` that other processes of this host can map read-only.

    MemoryError: the host has not that much left. RunError: `ulimit -f` is lower. OSError: there is
    no memfd here.
    """

    def __init__(self, n_elements: int, dtype: str) -> None:
        assert dtype in ITEM_BYTES, f"a buffer is {set(ITEM_BYTES)}, not {dtype}"
        self.dtype = dtype
        # mmap takes no empty file; one element is reserved and not shown.
        self.size_bytes = max(1, n_elements) * ITEM_BYTES[dtype]
        self.pid = os.getpid()
        self.fd = os.memfd_create("dbctl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self.fd)
        try:
            _reserve(self.fd, self.size_bytes)
            # Populated: the first touch of a page is slow (docs/architecture.md), so it is now.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            mapped = mmap.mmap(self.fd, self.size_bytes, flags=flags)
            _seal(self.fd)
        except BaseException:
            self._close()
            raise
        self.inode = os.fstat(self.fd).st_ino
        self._array = _flat(mapped, dtype, n_elements)

    @property
    def array(self) -> Array:
        assert self._close.alive, "this buffer was closed"
        return self._array

    def close(self) -> None:
        """Gives the descriptor back, and the memory once no array of it is left; twice is fine."""
        self._close()
        self._array = self._array[:0].copy()


def _flat(mapped: mmap.mmap, dtype: str, n_elements: int, *, offset_bytes: int = 0) -> Array:
    import numpy as np  # not above: an agent maps nothing, and starts without it

    return np.frombuffer(mapped, dtype, n_elements, offset_bytes)


def _reserve(fd: int, size_bytes: int) -> None:
    available = _available_bytes()
    shortage = MemoryError(
        f"a shared buffer of {size_bytes} bytes does not fit in this host's memory "
        f"({available} bytes available); use more shards or hosts"
    )
    # Asked first: near the limit the kernel would rather end processes than refuse.
    if size_bytes > available:
        raise shortage
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if error.errno == errno.EFBIG and limit != resource.RLIM_INFINITY:
            raise RunError(
                f"a shared buffer of {size_bytes:,} bytes is larger than a file may be here "
                f"(`ulimit -f`, {limit:,} bytes); raise that limit"
            ) from error
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise shortage from error
        raise


def _available_bytes() -> int:
    """What this host can still give, by /proc/meminfo, or the container's limit if that is less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return available
    # `memory.current` counts caches that would go, so it is not taken off the limit.
    return available if limit == "max" else min(available, int(limit))


def _seal(fd: int) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | _F_SEAL_FUTURE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)  # before Linux 5.1
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)


def has_memfd() -> bool:
    """Whether this system can share memory as above: memfd, seals, and a /proc to open it by."""
    if not hasattr(os, "memfd_create"):
        return False
    try:
        buffer = SharedBuffer(1, "<f4")
    except OSError:
        return False
    try:
        return Path(f"/proc/{buffer.pid}/fd/{buffer.fd}").exists()
    finally:
        buffer.close()


def allocate(n_elements: int, dtype: str) -> Buffer:
    """A zeroed buffer, each page touched: shared where the system can, else plain (sent inline)."""
    return SharedBuffer(n_elements, dtype) if has_memfd() else PlainBuffer(n_elements, dtype)


def describe(view: View) -> Shared:
    """What a message says about elements `view.start` to `view.stop` of a SharedBuffer."""
    buffer = view.buffer
    assert isinstance(buffer, SharedBuffer), "only a shared buffer can be named to others"
    length = len(buffer.array)
    assert 0 <= view.start <= view.stop <= length, f"[{view.start}, {view.stop}) of {length}"
    return Shared(
        pid=buffer.pid,
        fd=buffer.fd,
        inode=buffer.inode,
        size_bytes=buffer.size_bytes,
        offset_bytes=view.start * ITEM_BYTES[buffer.dtype],
        n_elements=view.stop - view.start,
        dtype=buffer.dtype,
    )


_Key = tuple[int, int, int]


class Mappings:
    """What this process has mapped of its peers; not thread-safe.

    An array that was handed out keeps its mapping alive, also after `forget` or eviction.
    """

    def __init__(self, max_per_peer: int = MAPPINGS_PER_PEER) -> None:
        self.max_per_peer = max_per_peer
        self._peers: OrderedDict[Peer, OrderedDict[_Key, mmap.mmap]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(maps) for maps in self._peers.values())

    def open(self, shared: Shared, peer: Peer) -> Array:
        """The payload as a flat read-only array; PeerError when it is not what the header says.

        RunError: this process has no descriptor left to map it by, or no room for a mapping.
        """
        _check_bounds(shared, peer)
        maps = self._peers.setdefault(peer, OrderedDict())
        self._peers.move_to_end(peer)
        if len(self._peers) > MAPPED_PEERS:
            self._peers.popitem(last=False)
        key = (shared.pid, shared.fd, shared.inode)
        mapped = maps.get(key)
        # A memfd's size is sealed, so one inode with two sizes is a lie.
        if mapped is None or len(mapped) != shared.size_bytes:
            mapped = maps[key] = _map_read_only(shared, peer)
        maps.move_to_end(key)
        if len(maps) > self.max_per_peer:
            maps.popitem(last=False)
        return _flat(mapped, shared.dtype, shared.n_elements, offset_bytes=shared.offset_bytes)

    def forget(self, peer: Peer) -> None:
        """That incarnation is over: its memory may go once nobody here holds an array of it."""
        self._peers.pop(peer, None)


def _check_bounds(shared: Shared, peer: Peer) -> None:
    item_bytes = ITEM_BYTES.get(shared.dtype)
    if item_bytes is None:
        raise PeerError(str(peer), f"payload of {shared.dtype!r}, expected {list(ITEM_BYTES)}")
    end = shared.offset_bytes + shared.n_elements * item_bytes
    fits = 0 <= shared.offset_bytes <= end <= shared.size_bytes and shared.n_elements >= 0
    if not fits or shared.offset_bytes % item_bytes or shared.pid <= 0 or shared.fd < 0:
        raise PeerError(str(peer), f"payload outside its own buffer: {shared}")


def _map_read_only(shared: Shared, peer: Peer) -> mmap.mmap:
    path = f"/proc/{shared.pid}/fd/{shared.fd}"
    try:
        # Looked at first: opening a pipe or a device would already do something to it.
        _check_identity(os.stat(path), shared, peer)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise _fault(error, f"its buffer {path} cannot be opened", peer) from error
    try:
        _check_identity(os.fstat(fd), shared, peer)
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SIZE_SEALS != _SIZE_SEALS:
            raise PeerError(str(peer), f"its buffer {path} may still change its size")
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return mmap.mmap(fd, shared.size_bytes, flags=flags, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise _fault(error, f"its buffer {path} cannot be mapped", peer) from error
    finally:
        os.close(fd)


def _fault(error: OSError | ValueError, what: str, peer: Peer) -> PeerError | RunError:
    """The peer's, unless this process lacks something, as it will for the next one too."""
    match error:
        case OSError(errno=errno.EMFILE):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            lack, cure = "descriptor left for", f"raise `ulimit -n`, here {limit:,}"
        case OSError(errno=errno.ENFILE):
            lack, cure = "descriptor left for", "close some"
        case OSError(errno=errno.ENOMEM):  # of the host there is enough: its owner has reserved it
            lack, cure = "room to map", "raise `ulimit -v` or vm.max_map_count"
        case _:
            return PeerError(str(peer), f"{what}: {error}")
    return RunError(
        f"process {os.getpid()} has no {lack} the memory of {peer}: {reason(error)}; "
        f"{cure}, or take fewer replicas or shards"
    )


def _check_identity(found: os.stat_result, shared: Shared, peer: Peer) -> None:
    same = (found.st_ino, found.st_size) == (shared.inode, shared.size_bytes)
    if not same or not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise PeerError(
            str(peer),
            f"its buffer is another file: expected inode {shared.inode} of {shared.size_bytes} "
            f"bytes, found inode {found.st_ino} of {found.st_size}",
        )
