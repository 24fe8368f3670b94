"""Finds, proves and reads checkpoints (reliability.md G9, G18).

Rules of this file: nothing of a checkpoint is believed before its SHA-256 was seen to match, no
memory is asked for before the sizes on disk agree with the shapes, and no file name comes from the
manifest: the layout is planned again from the tensors' table and must be the one on the disk.

Theory of operation. `newest_good` goes from the newest step to the oldest: the manifest's own
seal, its version and fields, sizes, then the hash of every file. The first that holds is taken,
each that does not becomes a warning. `Checkpoint.read` gives any slice of a flat vector and reads
only its bytes, so that each node of any new cut takes its own part.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbctl.checkpoint.layout import (
    MANIFEST,
    MANIFEST_LIMIT_BYTES,
    Layout,
    Manifest,
    Tensor,
    plan_layout,
    step_of,
    unseal,
)
from dbctl.checkpoint.writer import ASIDE, hash_file
from dbctl.errors import CheckpointError, reason
from dbctl.region import Range


class Checkpoint:
    """A checkpoint whose manifest and sizes were checked; made by `open_checkpoint`."""

    def __init__(self, path: Path, manifest: Manifest, layout: Layout) -> None:
        self.path = path
        self.manifest = manifest
        self._layout = layout
        self._dtype = np.dtype(manifest.dtype).newbyteorder("<")

    @property
    def n_elements(self) -> int:
        """Length of each flat vector."""
        return self._layout.n_elements

    @property
    def vectors(self) -> Sequence[str]:
        return self.manifest.vectors

    @property
    def updates(self) -> int:
        return self.manifest.updates

    def read_each(self, vector: str, spans: Sequence[Range]) -> Iterator[NDArray[Any]]:
        """As `read`, for each of `spans`."""
        return (self.read(vector, span) for span in spans)

    def read(self, vector: str, span: Range) -> NDArray[Any]:
        """Elements `span` of a flat vector: a new array (len(span),) of the checkpoint's dtype.

        CheckpointError where there is no such vector, or a file was cut or removed meanwhile.
        """
        assert span.stop <= self.n_elements, f"{span} of {self.n_elements} elements"
        if vector not in self._layout.segments:
            raise CheckpointError(
                str(self.path),
                f"has no vector {vector!r}, only {', '.join(self.manifest.vectors)}; "
                "was the optimizer's rule changed?",
            )
        out = np.empty(len(span), self._dtype)
        octets = out.view(np.uint8).data
        for place in self._layout.places(vector, span):
            name = self._layout.files[place.file].name
            self._read_into(octets[place.octets], name, place.offset_bytes)
        return out

    def check(self, tensors: Sequence[Tensor]) -> None:
        """CheckpointError, naming layer and both shapes, unless the network has these tensors."""
        saved = {tensor.name: tuple(tensor.shape) for tensor in self.manifest.tensors}
        wanted = {tensor.name: tuple(tensor.shape) for tensor in tensors}
        faults = [
            f"{name} is {saved.get(name, 'missing')} in the checkpoint and "
            f"{wanted.get(name, 'missing')} in the experiment"
            for name in wanted | saved
            if saved.get(name) != wanted.get(name)
        ]
        if not faults and list(saved) != list(wanted):
            old, new = next(pair for pair in zip(saved, wanted, strict=True) if len({*pair}) > 1)
            faults = [f"{old} stands in the checkpoint where {new} stands in the experiment"]
        if faults:
            more = f" (and {len(faults) - 1} more tensors differ)" if len(faults) > 1 else ""
            raise CheckpointError(
                str(self.path), f"is of another network: {faults[0]}{more}; give the same layers"
            )

    def verify(self) -> None:
        """CheckpointError names the first file whose SHA-256 is not the manifest's."""
        for entry in self.manifest.files:
            path = self.path / entry.name
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    found = hash_file(fd)
                finally:
                    os.close(fd)
            except OSError as error:
                raise CheckpointError(str(path), f"cannot be read: {reason(error)}") from error
            if found != entry.sha256:
                raise CheckpointError(
                    str(path),
                    f"is damaged: SHA-256 {found[:12]}..., expected {entry.sha256[:12]}...",
                )

    def _read_into(self, octets: memoryview, name: str, offset: int) -> None:
        path = self.path / name
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                while octets:
                    n_read = os.preadv(fd, [octets], offset)
                    if not n_read:
                        raise CheckpointError(str(path), f"was cut at byte {offset} meanwhile")
                    octets = octets[n_read:]
                    offset += n_read
            finally:
                os.close(fd)
        except OSError as error:
            raise CheckpointError(str(path), f"cannot be read: {reason(error)}") from error


def open_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint:
    """The checkpoint in directory `path`; CheckpointError names the file that is not good.

    `verify=False` leaves out the hashes of the files (not the manifest's seal and the sizes): for
    nodes, when the controller has verified already.
    """
    path = Path(path)
    try:
        manifest = unseal(_read_manifest(path / MANIFEST))
        step = step_of(path.name.removeprefix(ASIDE))
        if manifest.step != step:
            raise ValueError(f"it is of step {manifest.step}, expected that of its directory")
        layout = plan_layout(
            manifest.tensors, manifest.vectors, dtype=manifest.dtype, cut_bytes=manifest.cut_bytes
        )
        planned = [(file.name, file.size_bytes) for file in layout.files]
        if planned != [(entry.name, entry.size_bytes) for entry in manifest.files]:
            raise ValueError("its files are not those of its tensors")
    except ValueError as error:
        raise CheckpointError(str(path / MANIFEST), f"cannot be used: {error}") from error
    for name, size_bytes in planned:
        _check_size(path / name, size_bytes)
    checkpoint = Checkpoint(path, manifest, layout)
    if verify:
        checkpoint.verify()
    return checkpoint


NOTHING_SAVED = (
    "nothing was saved: there is no checkpoint to go on from; start again with "
    "`dbctl train FILE --run-dir OTHER`"
)


def checkpoints_by_step(directory: Path) -> dict[int, Path]:
    """The visible checkpoints in `checkpoints/`, newest first; none where it does not exist.

    One that a killed writer was about to replace counts as long as nothing has taken its place.
    """
    try:
        names = {path.name for path in Path(directory).iterdir()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(str(directory), f"cannot be read: {reason(error)}") from error
    found = {step: name for name in names if (step := step_of(name)) is not None}
    for name in names:
        step = step_of(name.removeprefix(ASIDE))
        if step is not None:
            found.setdefault(step, name)
    return {step: Path(directory) / found[step] for step in sorted(found, reverse=True)}


def list_checkpoints(directory: Path) -> list[Path]:
    """What `checkpoints_by_step` finds, without the steps."""
    return list(checkpoints_by_step(directory).values())


def newest_good(directory: Path, *, verify: bool = True) -> tuple[Checkpoint, list[str]]:
    """The newest checkpoint that can be used, and one warning for each newer one that cannot.

    CheckpointError where nothing was saved, and where none is good (it names what is wrong with
    each): a run never starts over silently.
    """
    faults: list[str] = []
    for path in list_checkpoints(directory):
        try:
            checkpoint = open_checkpoint(path, verify=verify)
        except CheckpointError as error:
            faults.append(str(error))
        else:
            return checkpoint, [f"{fault}; falling back to {path.name}" for fault in faults]
    if not faults:
        raise CheckpointError(str(directory), NOTHING_SAVED)
    raise CheckpointError(str(directory), "no checkpoint is good: " + " · ".join(faults))


def _read_manifest(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for
            raise ValueError("it is not a regular file")
        with open(path, "rb") as file:
            data = file.read(MANIFEST_LIMIT_BYTES + 1)
    except OSError as error:
        raise CheckpointError(str(path), f"cannot be read: {reason(error)}") from error
    if len(data) > MANIFEST_LIMIT_BYTES:
        raise ValueError(f"it is larger than {MANIFEST_LIMIT_BYTES} bytes")
    return data


def _check_size(path: Path, size_bytes: int) -> None:
    try:
        status = os.stat(path)
    except OSError as error:
        raise CheckpointError(str(path), f"cannot be read: {reason(error)}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(str(path), "is not a regular file")
    if status.st_size != size_bytes:
        raise CheckpointError(
            str(path), f"is cut or damaged: {status.st_size} bytes, expected {size_bytes}"
        )
