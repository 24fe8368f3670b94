"""From a source's spec to its rows and labels, checked; and whether a network fits them.

Rules of this file: `open_source` is the only way to data. Whatever is wrong with a file is a
DataError that names it, says what was expected and found, and what to do, before memory is taken
for its rows.

Theory of operation: each format gives `Stored` arrays whose header agrees with the file; here
their counts are compared, `rows` is applied, labels are read and looked at one by one (there is
one a row) while x stays where it is. A bad row of x, say with NaN, is not a fault of the file:
the worker refuses its gradient (docs/reliability.md, G14).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from typing import Literal, final

import numpy as np

from dbctl.data.csv_file import Table, read_csv
from dbctl.data.files import file_digest, open_file
from dbctl.data.idx import open_idx
from dbctl.data.npy import open_npy, open_npz
from dbctl.data.rows import Array, ArrayRows, Extent, Rows, Stored, StreamRows
from dbctl.data.synthetic import SyntheticRows
from dbctl.errors import DataError
from dbctl.experiment.specs import (
    CsvSource,
    DigitsSource,
    IdxSource,
    NpySource,
    NpzSource,
    SourceSpec,
    SyntheticSource,
)
from dbctl.model.network import NetworkSpec, node_shapes

MAX_LABEL = 2.0**53
Place = Callable[[int], str]
DIGITS_PATH = os.path.join(os.path.dirname(__file__), "digits.npz")


def _row(row: int) -> str:
    return f"row {row} (from 0)"


@final
@dataclass(frozen=True)
class Source:
    """Rows and what is wanted of them.

    x: `Rows` of shape (rows, features), as stored; `np.asarray(x)` reads them all.
    y: labels, int64 (rows,), or targets, floats (rows, outputs), maybe mapped.
    shape: of one row as the file has it, such as (28, 28). path: for messages.
    y_extent: where y is in a file, if it is mapped. y_path: for messages, where y has its own file.
    not_whole: for messages, the first label of a csv file that makes y targets. place: for
    messages, where y of a row is in its file.
    """

    path: str
    x: Rows
    y: Array
    shape: tuple[int, ...]
    y_extent: Extent | None = None
    y_path: str = ""
    not_whole: str = ""
    place: Place = _row

    @property
    def rows(self) -> int:
        return len(self.x)

    @property
    def features(self) -> int:
        return self.x.shape[1]

    @property
    def kind(self) -> Literal["labels", "targets"]:
        return "labels" if self.y.ndim == 1 else "targets"


def open_source(
    spec: SourceSpec, *, classes_hint: int | None = None, checked: bool = False
) -> Source:
    """Open what `spec` names. `classes_hint`: labels must be below it, where it is known.
    `checked`: `check_files` was called for it.

    Raises DataError. Paths are taken as they are: relative ones from the working directory.
    """
    if not checked:
        _check_files(files_of(spec))
    match spec:
        case DigitsSource():
            source = _open_digits(spec)
        case IdxSource():
            images = open_idx(spec.images, "data.*.images")
            source = _join(images, open_idx(spec.labels, "data.*.labels"), spec.rows)
        case NpzSource():
            x = open_npz(spec.path, "data.*.path", member=spec.x)
            source = _join(x, open_npz(spec.path, "data.*.path", member=spec.y), spec.rows)
        case NpySource():
            source = _join(open_npy(spec.x, "data.*.x"), open_npy(spec.y, "data.*.y"), spec.rows)
        case CsvSource():
            source = _open_csv(spec)
        case SyntheticSource():
            rows = SyntheticRows(spec)
            source = Source("data source synthetic", rows, rows.labels, (spec.features,))
    if classes_hint is not None and source.kind == "labels":
        _check_labels(source, classes_hint)
    return source


def _open_digits(spec: DigitsSource) -> Source:
    """scikit-learn's digits: test is every row whose index is 4 mod 5 (docs/experiments.md)."""
    x = open_npz(DIGITS_PATH, "data.*.source", member="x")
    y = open_npz(DIGITS_PATH, "data.*.source", member="y")
    whole = _join(x, y, None)
    is_test = np.arange(whole.rows) % 5 == 4
    keep = np.flatnonzero(is_test if spec.split == "test" else ~is_test)
    keep = keep[: _used(f"digits, split {spec.split}", len(keep), spec.rows)]
    x_kept, y_kept = ArrayRows(whole.x.take(keep)), whole.y[keep]
    return Source(whole.path, x_kept, y_kept, (8, 8), y_path=whole.y_path)


def _open_csv(spec: CsvSource) -> Source:
    table = read_csv(spec.path, "data.*.path", label=spec.label, limit=spec.rows)
    _used(spec.path, len(table.y), spec.rows)
    y = table.y[:, None] if table.not_whole else _as_labels(spec.path, table)
    _check_values(spec.path, y, table.places)
    return Source(
        spec.path,
        ArrayRows(table.x),
        y,
        table.x.shape[1:],
        not_whole=table.not_whole,
        place=table.places,
    )


def _as_labels(path: str, table: Table) -> Array:
    """int64. DataError: a number that a float64 may not hold as it was written."""
    fits = np.abs(table.y) < MAX_LABEL
    if not fits.all():
        row = int(np.argmin(fits))
        raise DataError(
            path,
            f"{table.places(row)}: expected a label below 2^53, found {table.y[row]:.3g}; mend or "
            f"leave out the row",
        )
    return table.y.astype(np.int64)


def _join(x: Stored, y: Stored, limit: int | None) -> Source:
    """The first `limit` rows of two arrays that must be equally long."""
    if x.shape[0] != y.shape[0]:
        raise DataError(
            x.path,
            f"holds {x.shape[0]:,} rows, but {y.path} {y.shape[0]:,} labels; "
            f"give two that belong together",
        )
    n = _used(x.path, x.shape[0], limit)
    outputs = prod(y.shape[1:])
    if y.dtype.kind != "f" and outputs != 1:
        raise DataError(
            y.path,
            f"expected one whole-number label a row, or rows of float targets, found {y.dtype} of "
            f"shape {y.shape}; save numbers of classes, or targets as floats",
        )
    stored = y.load(n)
    # Mapped targets stay in their file: those of an autoencoder are as large as x.
    values = stored.array if isinstance(stored, ArrayRows) else np.asarray(stored)
    if y.dtype == np.uint64:
        values = np.minimum(values, np.uint64(2**63 - 1))  # still above any count of classes
    if y.dtype.kind != "f":
        values = values.reshape(-1).astype(np.int64)
    _check_values(y.path, values)
    extent = stored.extent if y.dtype.kind == "f" else None
    return Source(x.path, x.load(n), values, x.shape[1:] or (1,), extent, y.path)


def _used(path: str, n: int, limit: int | None) -> int:
    """How many of `n` rows are used."""
    if limit is not None and limit > n:
        raise DataError(path, f"rows: expected {limit:,}, found {n:,}; lower data.*.rows to {n}")
    return n if limit is None else limit


def _check_values(path: str, y: Array, place: Place = _row) -> None:
    """No label is negative, no target nan or infinite."""
    start = 0
    for block in ArrayRows(y).blocks():
        good = block >= 0 if y.ndim == 1 else np.isfinite(block)
        if not good.all():
            row = start + int(np.argmin(good.all(axis=1)))
            wanted = "a label of 0 or more" if y.ndim == 1 else "finite targets"
            raise DataError(
                path,
                f"{place(row)}: expected {wanted}, found {y[row]}; mend or leave out the row",
            )
        start += len(block)


def check(
    source: Source, network: NetworkSpec, *, between: Callable[[], None] = lambda: None
) -> None:
    """Whether `network` can be trained on `source`; a compressed file is read to its end for it,
    and `between` called before each block: what it raises ends this.

    Raises DataError: another count of features, a label without an output, targets of another width
    or for a loss that takes only labels, a damaged file.
    """
    wanted = prod(network.input)
    if source.features != wanted:
        shape = " x ".join(str(n) for n in source.shape)
        raise DataError(
            source.path,
            f"has {source.features} features a row ({shape}), but network.input "
            f"{list(network.input)} takes {wanted}; change network.input or the data",
        )
    units = prod(node_shapes(network)[-1])
    if source.kind == "labels":
        _check_labels(source, units)
    elif network.loss != "squared":
        found = f"{source.not_whole} makes" if source.not_whole else "has"
        raise DataError(
            source.y_path or source.path,
            f"{found} float targets, but loss {network.loss} takes whole-number labels; "
            f"store them as integers, or use loss: squared",
        )
    elif source.y.shape[1] != units:
        raise DataError(
            source.y_path or source.path,
            f"has {source.y.shape[1]} targets a row, but the last layer has {units} units; "
            f"change its units or the data",
        )
    if isinstance(source.x, StreamRows) and not source.x.verified:
        for _ in source.x.blocks():
            between()


def _check_labels(source: Source, classes: int) -> None:
    least, greatest = int(source.y.min()), int(source.y.max())
    if greatest >= classes:
        row = int(np.argmax(source.y))
        others = ""
        if greatest - least < classes:
            others = f"number them from 0, they begin at {least}, or "
        raise DataError(
            source.y_path or source.path,
            f"{source.place(row)} has label {greatest}, but the last layer has {classes} units "
            f"(labels 0 to {classes - 1}); {others}give it at least {greatest + 1} units",
        )


def check_files(train: SourceSpec, test: SourceSpec | None = None) -> None:
    """Whether all files of both can be opened. Raises DataError that names each that cannot."""
    of_train = [(path, key.replace("*", "train")) for path, key in files_of(train)]
    of_test = [(path, key.replace("*", "test")) for path, key in files_of(test)] if test else []
    named = {path for path, _ in of_train}
    _check_files(of_train + [found for found in of_test if found[0] not in named])


def _check_files(files: list[tuple[str, str]]) -> None:
    faults = []
    for path, key in dict.fromkeys(files):
        try:
            open_file(path, key).close()
        except DataError as error:
            faults.append(error)
    if faults:
        first, *more = faults
        raise DataError(first.path, "; and ".join([first.message, *map(str, more)]))


def files_of(spec: SourceSpec) -> list[tuple[str, str]]:
    """(path, key of the experiment file) of each file that a source is read from."""
    match spec:
        case DigitsSource():
            return [(DIGITS_PATH, "data.*.source")]
        case IdxSource():
            return [(spec.images, "data.*.images"), (spec.labels, "data.*.labels")]
        case NpySource():
            return [(spec.x, "data.*.x"), (spec.y, "data.*.y")]
        case NpzSource() | CsvSource():
            return [(spec.path, "data.*.path")]
        case SyntheticSource():
            return []


def digest(spec: SourceSpec) -> str:
    """A cheap identity of the data, for run.json: SHA-256 over the digests of its files, as hex.

    Names of files do not count, so moved data stays the same; what is picked from them (members,
    column, rows) does. Raises DataError.
    """
    total = sha256()
    picked: tuple[object, ...] = ()
    match spec:
        case DigitsSource():
            picked = (spec.split,)
        case NpzSource():
            picked = (spec.x, spec.y)
        case CsvSource():
            picked = (spec.label,)
        case SyntheticSource():
            picked = (spec.features, spec.classes, spec.noise, spec.seed, spec.split)
    total.update(repr((spec.source, spec.rows, picked)).encode())
    for path, key in files_of(spec):
        total.update(file_digest(path, key))
    return total.hexdigest()
