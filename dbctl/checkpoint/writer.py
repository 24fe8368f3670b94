"""Writes a checkpoint so that it is complete and safe, or was never there (reliability.md G8, G10).

Rules of this file: a checkpoint becomes visible by one rename, after every byte of it is on the
disk; an earlier one is removed only after that; a failed fsync is never tried again, since the
kernel may already have dropped what it could not write.

Theory of operation. All files are made at full size in a hidden directory beside the target, so
that a full disk shows before anything is copied. `put` writes each slice that a shard sends into
its place, in any order and any cut. `finish` checks that every element came once, hashes each file
from the page cache while another thread flushes it, writes the manifest, flushes it and the
directory, renames, flushes the parent. Any failure removes the hidden directory and is one
CheckpointError; training goes on and tries again with a new `Writer`.

Two checkpoints of one step (the last one of a run may meet a periodic one): the newer is written
whole, the older steps aside under a hidden name that readers still know (`.old-step-...`), and is
removed last. So at every moment a kill leaves one that is good.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbctl import __version__
from dbctl.checkpoint.layout import (
    CUT_BYTES,
    FORMAT,
    MANIFEST,
    Facts,
    FileEntry,
    Manifest,
    Tensor,
    TensorEntry,
    plan_layout,
    seal,
    step_name,
    step_of,
    unseal,
)
from dbctl.errors import CheckpointError, reason
from dbctl.region import Range

CHUNK_BYTES = 1 << 20
ASIDE = ".old-"
_TEMPORARY = ".tmp-"


class Writer:
    """One checkpoint in the making; a context manager that aborts unless `finish` succeeded.

    `directory` is the run's `checkpoints/`, made if missing. `tensors` cover the flat vector
    without a gap; `vectors` are `parameters` and the optimiser's state names; all are of `dtype`.
    After success only the newest `keep` checkpoints stay.
    """

    def __init__(
        self,
        directory: Path,
        step: int,
        *,
        tensors: Sequence[Tensor],
        vectors: Sequence[str],
        dtype: str = "float32",
        keep: int = 3,
        cut_bytes: int = CUT_BYTES,
    ) -> None:
        assert keep >= 1, f"keep {keep}"
        assert 0 <= step < 10**18, f"step {step}"
        self.directory = Path(directory)
        self.path = self.directory / step_name(step)
        self._step = step
        self._keep = keep
        self._cut_bytes = cut_bytes
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._tensors = tuple(
            TensorEntry(t.name, tuple(t.shape), dtype, t.range.start) for t in tensors
        )
        self._vectors = tuple(vectors)
        self._layout = plan_layout(tensors, vectors, dtype=dtype, cut_bytes=cut_bytes)
        self._placed: dict[str, list[Range]] = {vector: [] for vector in vectors}
        self._temporary = self.directory / f"{_TEMPORARY}{self.path.name}-{secrets.token_hex(4)}"
        self._fds: list[int] = []
        self._open = True
        with self._all_or_nothing():
            self._create_files()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def put(self, vector: str, start: int, array: NDArray[Any]) -> None:
        """Elements of `vector` from `start` on; `array` has the writer's dtype, any shape, C order.

        CheckpointError (and all is undone) where the vector has no such elements or the disk fails.
        """
        assert self._open, "put after the end"
        assert array.dtype.newbyteorder("<") == self._dtype, f"{array.dtype}, not {self._dtype}"
        # The library's own writer takes a transposed array's memory as it lies; ours must not.
        data = np.ascontiguousarray(array, self._dtype).reshape(-1)
        with self._all_or_nothing():
            if vector not in self._placed or not 0 <= start <= self._layout.n_elements - data.size:
                raise CheckpointError(
                    str(self.path),
                    f"got elements [{start}, {start + data.size}) of vector {vector!r}, expected "
                    f"within [0, {self._layout.n_elements}) of one of {', '.join(self._vectors)}",
                )
            span = Range(start, start + data.size)
            octets = data.view(np.uint8).data
            for place in self._layout.places(vector, span):
                _write_all(self._fds[place.file], octets[place.octets], place.offset_bytes)
            self._placed[vector].append(span)

    def finish(self, facts: Facts) -> Path:
        """Makes the checkpoint visible and returns its directory; then removes the oldest.

        CheckpointError where an element is missing or came twice, or the disk fails; then this
        checkpoint does not exist and the earlier ones are as they were.
        """
        assert self._open, "finish after the end"
        with self._all_or_nothing():
            self._check_cover()
            self._write_manifest(facts, self._flush_and_hash())
            self._close_files()
            _fsync_directory(self._temporary)
            self._publish()
        self._open = False
        self._prune()
        return self.path

    def abort(self) -> None:
        """Removes all that is not finished; safe to call at any time, and again."""
        if not self._open:
            return
        self._open = False
        while self._fds:
            with contextlib.suppress(OSError):
                os.close(self._fds.pop())
        with contextlib.suppress(OSError):  # it lets some through all the same
            shutil.rmtree(self._temporary, ignore_errors=True)

    # ------------------------------------------------------------------------------ its parts

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = reason(error)  # before what is there goes, and with it the reason
            self.abort()
            raise CheckpointError(
                str(self.path),
                f"cannot be saved: {why}; earlier checkpoints are untouched",
            ) from error
        except BaseException:
            self.abort()
            raise

    def _create_files(self) -> None:
        self.directory.mkdir(exist_ok=True)
        self._temporary.mkdir()
        for file in self._layout.files:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fds.append(os.open(self._temporary / file.name, flags, 0o644))
            os.posix_fallocate(self._fds[-1], 0, file.size_bytes)
            _write_all(self._fds[-1], memoryview(file.head), 0)

    def _check_cover(self) -> None:
        for vector, spans in self._placed.items():
            at = 0
            for span in sorted(span for span in spans if span):
                if span.start > at:
                    self._refuse(vector, Range(at, span.start), "are missing")
                if span.start < at:
                    self._refuse(vector, Range(span.start, min(at, span.stop)), "came twice")
                at = span.stop
            if at < self._layout.n_elements:
                self._refuse(vector, Range(at, self._layout.n_elements), "are missing")

    def _refuse(self, vector: str, span: Range, what: str) -> None:
        raise CheckpointError(
            str(self.path), f"not saved: elements {span} of vector {vector!r} {what}"
        )

    def _flush_and_hash(self) -> tuple[FileEntry, ...]:
        """One thread waits for the disk while this one hashes from the page cache."""
        pool = ThreadPoolExecutor(1, "checkpoint-fsync")
        try:
            flushed = [pool.submit(os.fsync, fd) for fd in self._fds]
            entries = tuple(
                FileEntry(file.name, file.size_bytes, hash_file(fd))
                for file, fd in zip(self._layout.files, self._fds, strict=True)
            )
            for each in flushed:
                each.result()
        finally:
            pool.shutdown(cancel_futures=True)
        return entries

    def _write_manifest(self, facts: Facts, files: tuple[FileEntry, ...]) -> None:
        manifest = Manifest(
            **{name: getattr(facts, name) for name in Facts.__struct_fields__},
            format=FORMAT,
            dbctl=__version__,
            step=self._step,
            dtype=self._dtype.name,
            cut_bytes=self._cut_bytes,
            vectors=self._vectors,
            tensors=self._tensors,
            files=files,
        )
        data = seal(manifest)
        unseal(data)  # facts that cannot be read back (a negative count, a nan) are caught here
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fds.append(os.open(self._temporary / MANIFEST, flags, 0o644))
        _write_all(self._fds[-1], memoryview(data), 0)
        os.fsync(self._fds[-1])

    def _close_files(self) -> None:
        # A network file system may report a full quota only here, hence no suppression.
        while self._fds:
            os.close(self._fds.pop())

    def _publish(self) -> None:
        aside = self.directory / (ASIDE + self.path.name)
        replaces = self.path.exists()
        if replaces:
            _remove(aside)
            os.rename(self.path, aside)
        try:
            os.rename(self._temporary, self.path)
            _fsync_directory(self.directory)
        except BaseException:
            if not self._temporary.exists():
                os.rename(self.path, self._temporary)
            if replaces:
                os.rename(aside, self.path)
            raise

    def _prune(self) -> None:
        """Removes the one that was replaced and those beyond `keep`, oldest first.

        A later step than ours is of a future that was given up (the run had to fall back to before
        it), so it goes before all others.
        """
        with contextlib.suppress(OSError):  # the new one is safe; the next save tries again
            _remove(self.directory / (ASIDE + self.path.name))
            paths = {step_of(path.name): path for path in self.directory.iterdir()}
            steps = [step for step in paths if step is not None]
            steps.sort(key=lambda step: (step <= self._step, step), reverse=True)
            for step in steps[self._keep :]:
                # Out of sight by one rename: a kill must not leave half a checkpoint to be seen.
                doomed = self.directory / f"{_TEMPORARY}gone-{secrets.token_hex(4)}"
                os.rename(paths[step], doomed)
                _remove(doomed)


def clean(directory: Path) -> None:
    """At the start of a run, its lock held: removes what killed writers left in `checkpoints/`.

    A checkpoint that was about to be replaced gets its name back.
    """
    if not directory.is_dir():
        return
    try:
        for path in sorted(directory.iterdir()):
            if path.name.startswith(ASIDE):
                final = directory / path.name.removeprefix(ASIDE)
                if step_of(final.name) is not None and not final.exists():
                    os.rename(path, final)
                    continue
            if path.name.startswith((ASIDE, _TEMPORARY)):
                _remove(path)
    except OSError as error:
        raise CheckpointError(
            str(directory), f"leftovers of a killed run cannot be removed: {reason(error)}"
        ) from error


def _remove(path: Path) -> None:
    """A directory with all in it; of a link to one (a checkpoint moved elsewhere) only the link."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def hash_file(fd: int) -> str:
    """SHA-256 of a whole open file, in chunks."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    at = 0
    while n_read := os.preadv(fd, [buffer], at):
        digest.update(buffer[:n_read])
        at += n_read
    return digest.hexdigest()


def _write_all(fd: int, octets: memoryview, offset: int) -> None:
    # One call writes at most 2 GiB less a page, and less when the disk fills or a signal comes.
    while octets:
        n_written = os.pwrite(fd, octets, offset)
        octets = octets[n_written:]
        offset += n_written


def _fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
