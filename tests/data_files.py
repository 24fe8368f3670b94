"""Small data files of every format, for the tests of dbctl/data.

Rules of this file: written by numpy, gzip and struct, never by dbctl.
"""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np

from dbctl.data.sources import open_source
from dbctl.experiment.specs import (
    CsvSource,
    IdxSource,
    NpySource,
    NpzSource,
    SourceSpec,
)
from dbctl.model.layers.dense import DenseSpec
from dbctl.model.network import NetworkSpec

X = np.arange(5 * 6, dtype=np.uint8).reshape(5, 2, 3)
Y = np.array([0, 2, 1, 2, 0], np.uint8)


def idx_bytes(array: Any, code: int = 0x08, dtype: str = "u1") -> bytes:
    head = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(dtype).tobytes()


def write_idx(folder: Path, images: bytes, labels: bytes, suffix: str = "") -> IdxSource:
    pack = gzip.compress if suffix == ".gz" else bytes
    (folder / f"images{suffix}").write_bytes(pack(images))
    (folder / f"labels{suffix}").write_bytes(pack(labels))
    return IdxSource(images=str(folder / f"images{suffix}"), labels=str(folder / f"labels{suffix}"))


def write_npy(folder: Path, x: Any, y: Any) -> NpySource:
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    return NpySource(x=str(folder / "x.npy"), y=str(folder / "y.npy"))


def write_npz(folder: Path, *, compressed: bool = True, **arrays: Any) -> NpzSource:
    (np.savez_compressed if compressed else np.savez)(folder / "data.npz", **arrays)
    return NpzSource(path=str(folder / "data.npz"), x="x", y="y")


def write_csv(folder: Path, text: str | bytes, label: str | int = "y", **more: Any) -> CsvSource:
    data = text if isinstance(text, bytes) else text.encode()
    (folder / "data.csv").write_bytes(data)
    return CsvSource(path=str(folder / "data.csv"), label=label, **more)


def network(features: int = 6, units: int = 3, loss: str = "softmax") -> NetworkSpec:
    return NetworkSpec(input=(features,), layers=(DenseSpec(units=units),), loss=loss)  # type: ignore[arg-type]


def read_all(spec: SourceSpec) -> tuple[Any, Any]:
    source = open_source(spec)
    return np.asarray(source.x), source.y
