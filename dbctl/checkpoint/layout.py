"""What a checkpoint looks like: its files, where each element lies, and its manifest. Pure.

Rules of this file: no I/O. A layout is a function of the tensors' table, the vectors' names, the
dtype and the size at which files are cut, so the reader plans again what the writer planned and
takes no file name, size or offset from anywhere else.

Theory of operation. The flat vector of a checkpoint holds whole tensors, one after another, and a
file holds whole tensors of it in the same order; so a file is a safetensors header followed by a
few `Segment`s, each one contiguous slice of one flat vector. Who held which slice in the run does
not show: shards and partitions are cuts of the same vector (docs/architecture.md). Parameters are
named as in the network (`layers.0.weight`), optimiser state by vector and tensor
(`sum.layers.0.weight`), in files and with an index as the Hugging Face hub lays them out.

The manifest is JSON whose first entry is the SHA-256 of all bytes after it (`seal`). That line is
part of every format version, so that a damaged manifest and one of another version differ.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec

from dbctl.region import Range
from dbctl.wire import Position

FORMAT = 1
CUT_BYTES = 1 << 30
PARAMETERS = "parameters"
MANIFEST = "manifest.json"
MANIFEST_LIMIT_BYTES = 256 << 20

_STEP_NAME = re.compile(r"step-([0-9]{9,18})")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_SAFETENSORS_DTYPES = {"float32": ("F32", 4), "float64": ("F64", 8)}

Count = Annotated[int, msgspec.Meta(ge=0)]


class Tensor(Protocol):
    """One row of a tensors' table: `range` is its place in the flat vector, C order."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def range(self) -> Range: ...


# ---------------------------------------------------------------------------------- manifest


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor of the network as the manifest keeps it; `start` is in elements."""

    name: str
    shape: tuple[Count, ...]
    dtype: str
    start: Count

    @property
    def range(self) -> Range:
        return Range(self.start, self.start + prod(self.shape))


class FileEntry(msgspec.Struct, frozen=True):
    name: str
    size_bytes: Count
    sha256: str


class ReplicaRow(msgspec.Struct, frozen=True):
    """Where one replica stood: its own steps done, its epoch, mini-batches done in that epoch."""

    replica: Count
    step: Count
    epoch: Count
    index: Count

    @classmethod
    def at(cls, replica: int, position: Position) -> ReplicaRow:
        return cls(replica, position.step, position.epoch, position.index)

    @property
    def position(self) -> Position:
        return Position(self.step, self.epoch, self.index)


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller of the writer knows about the moment that a checkpoint holds.

    `network` is a digest of the network's spec; `updates` the greatest of the shards' counts, so
    that no rate schedule goes back; `replicas`, `partitions` and `shards` say who wrote it and bind
    nobody; `extra` is anything that JSON can hold.
    """

    run: str
    network: str
    updates: Count
    rows: tuple[ReplicaRow, ...]
    replicas: Count
    partitions: Count
    shards: Count
    seconds: float
    epochs: float
    examples: Count
    extra: dict[str, Any] = {}


class Manifest(Facts, frozen=True, kw_only=True):
    """The manifest: `Facts`, and all that finds and proves the files beside it."""

    format: int
    dbctl: str
    step: Count
    dtype: str
    cut_bytes: Count
    vectors: tuple[str, ...]
    tensors: tuple[TensorEntry, ...]
    files: tuple[FileEntry, ...]


class _Version(msgspec.Struct):
    format: int


def seal(manifest: Manifest) -> bytes:
    """The manifest as the bytes of its file."""
    body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)[1:] + b"\n"
    return _sealed_head(body) + body


def unseal(data: bytes) -> Manifest:
    """The manifest in `data`; ValueError says what is wrong with it. Newer fields are left out."""
    head, line_end, body = data.partition(b",")
    if head + line_end != _sealed_head(body):
        raise ValueError("it is cut or damaged: its own SHA-256 does not match")
    try:
        version = msgspec.json.decode(data, type=_Version)
        if version.format != FORMAT:
            raise ValueError(
                f"format version {version.format}, expected {FORMAT}: use the dbctl that wrote it"
            )
        return msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is no manifest: {error}") from error


def _sealed_head(body: bytes) -> bytes:
    return b'{"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'",'


# ------------------------------------------------------------------------------------ layout


class Segment(NamedTuple):
    """Elements `range` of a flat vector lie in file `file` of the layout from `offset_bytes`."""

    range: Range
    file: int
    offset_bytes: int


class Place(NamedTuple):
    """Bytes `octets` of a caller's array lie in file `file` of the layout from `offset_bytes`."""

    octets: slice
    file: int
    offset_bytes: int


class PlannedFile(NamedTuple):
    """A file of `size_bytes` in all; `head` is what stands before its elements."""

    name: str
    head: bytes
    size_bytes: int


@dataclass(frozen=True)
class Layout:
    """All files of a checkpoint but the manifest, and each vector's segments in order."""

    files: tuple[PlannedFile, ...]
    segments: dict[str, tuple[Segment, ...]]
    n_elements: int
    item_bytes: int

    def places(self, vector: str, span: Range) -> Iterator[Place]:
        """Where elements `span` of a vector lie, in order."""
        for segment in self.segments[vector]:
            part = span.intersection(segment.range)
            if part:
                local = part.shift(-span.start)
                yield Place(
                    slice(local.start * self.item_bytes, local.stop * self.item_bytes),
                    segment.file,
                    segment.offset_bytes + (part.start - segment.range.start) * self.item_bytes,
                )


def plan_layout(
    tensors: Sequence[Tensor], vectors: Sequence[str], *, dtype: str, cut_bytes: int
) -> Layout:
    """The files for `tensors` in each of `vectors`; ValueError where the table is no table.

    `vectors` begins with `parameters`. `tensors` cover the flat vector from 0 without a gap. A
    file is begun anew before the tensor that would carry it over `cut_bytes`.
    """
    fault = _fault(tensors, vectors, dtype=dtype, cut_bytes=cut_bytes)
    if fault:
        raise ValueError(fault)
    code, item_bytes = _SAFETENSORS_DTYPES[dtype]
    planner = _Planner(code, item_bytes, cut_bytes)
    planner.add_group("model", [(PARAMETERS, "", tensor) for tensor in tensors])
    if len(vectors) > 1:
        state = [(vector, f"{vector}.", tensor) for vector in vectors[1:] for tensor in tensors]
        planner.add_group("optimizer", state)
    segments = {vector: tuple(planner.segments.get(vector, ())) for vector in vectors}
    return Layout(tuple(planner.files), segments, tensors[-1].range.stop, item_bytes)


_Member = tuple[str, str, Tensor]  # vector, what goes before the tensor's name, tensor


class _Planner:
    """Cuts groups of tensors into files; `plan_layout` in the making."""

    def __init__(self, code: str, item_bytes: int, cut_bytes: int) -> None:
        self.code = code
        self.item_bytes = item_bytes
        self.cut_bytes = cut_bytes
        self.files: list[PlannedFile] = []
        self.segments: dict[str, list[Segment]] = {}

    def add_group(self, stem: str, members: list[_Member]) -> None:
        """The files `stem-00001-of-...` and their index."""
        parts = self._cut(members)
        weight_map: dict[str, str] = {}
        for number, part in enumerate(parts, 1):
            name = f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors"
            self._add_file(name, part)
            weight_map |= {prefix + tensor.name: name for _, prefix, tensor in part}
        total = sum(len(tensor.range) for _, _, tensor in members) * self.item_bytes
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"
        self.files.append(PlannedFile(f"{stem}.safetensors.index.json", text, len(text)))

    def _cut(self, members: list[_Member]) -> list[list[_Member]]:
        parts: list[list[_Member]] = [[]]
        filled = 0
        for member in members:
            size = len(member[2].range) * self.item_bytes
            if parts[-1] and filled + size > self.cut_bytes:
                parts.append([])
                filled = 0
            parts[-1].append(member)
            filled += size
        return parts

    def _add_file(self, name: str, members: list[_Member]) -> None:
        """One safetensors file: 8 bytes of header length, JSON padded to 8 bytes, elements."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        placed: list[tuple[str, Range, int]] = []
        for vector, prefix, tensor in members:
            stop = at + len(tensor.range) * self.item_bytes
            header[prefix + tensor.name] = {
                "dtype": self.code,
                "shape": list(tensor.shape),
                "data_offsets": [at, stop],
            }
            placed.append((vector, tensor.range, at))
            at = stop
        text = msgspec.json.encode(header)
        text += b" " * (-len(text) % 8)
        head = len(text).to_bytes(8, "little") + text
        for vector, span, offset in placed:
            self._add_segment(vector, Segment(span, len(self.files), len(head) + offset))
        self.files.append(PlannedFile(name, head, len(head) + at))

    def _add_segment(self, vector: str, segment: Segment) -> None:
        """Tensors that follow one another in the vector and the file are one segment."""
        segments = self.segments.setdefault(vector, [])
        if segments and segments[-1].file == segment.file:
            last = segments[-1]
            segments[-1] = last._replace(range=Range(last.range.start, segment.range.stop))
        else:
            segments.append(segment)


def _fault(tensors: Sequence[Tensor], vectors: Sequence[str], *, dtype: str, cut_bytes: int) -> str:
    if dtype not in _SAFETENSORS_DTYPES:
        return f"dtype {dtype!r}, expected one of {', '.join(_SAFETENSORS_DTYPES)}"
    if not tensors or cut_bytes < 1:
        return "no tensors" if not tensors else f"files cut at {cut_bytes} bytes"
    if not vectors or vectors[0] != PARAMETERS or len(set(vectors)) < len(vectors):
        return f"vectors {list(vectors)}, expected '{PARAMETERS}' and then other names, each once"
    names = [tensor.name for tensor in tensors]
    for name in [*vectors, *names]:
        if not _NAME.fullmatch(name) or name == "__metadata__":
            return f"{name!r} is no name of a tensor or vector"
    state = [f"{vector}.{name}" for vector in vectors[1:] for name in names]
    for group in (names, state):
        if len(set(group)) < len(group):
            twice = next(name for name in group if group.count(name) > 1)
            return f"two tensors are called {twice!r}"
    at = 0
    for tensor in tensors:
        if tensor.range != Range(at, at + prod(tensor.shape)):
            return (
                f"tensor {tensor.name} of shape {tuple(tensor.shape)} is at {tensor.range}, "
                f"expected at [{at}, {at + prod(tensor.shape)})"
            )
        at = tensor.range.stop
    return ""


# ------------------------------------------------------------------------------------- names


def step_name(step: int) -> str:
    """`step-000001200`: names sort as their steps do."""
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    """The step in a checkpoint directory's name; None for any other name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None
