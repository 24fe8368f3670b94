"""csv files: numbers, commas, one row a line, one column the label.

Rules of this file: every line has as many fields as the first; a field is a number, maybe quoted
(nan and inf too, but not as a label); a line is at most `MAX_LINE_BYTES`. Errors name the line.

Theory of operation: lines are gathered in blocks of about 1 MiB and each block is parsed by
numpy's C reader. Only when that refuses a block are its lines gone through one by one, to say which
is wrong and why. For large data use .npy, which is mapped and not parsed by every process.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, NamedTuple

import numpy as np

from dbctl.data.files import open_file, shown
from dbctl.data.rows import Array
from dbctl.errors import DataError

MAX_LINE_BYTES = 16 << 20
BLOCK_BYTES = 1 << 20

Line = tuple[int, str]  # its number from 1, and its text without the end


@dataclass(frozen=True)
class Places:
    """Called with a row, where its label is. `lines`: int64 (rows,), from 1; `column`: from 0."""

    lines: Array
    column: int

    def __call__(self, row: int) -> str:
        return f"line {self.lines[row]}, column {self.column} (from 0)"


class Table(NamedTuple):
    """x float64 (rows, features); y float64 (rows,).

    `not_whole`: the first label that is written otherwise than as a whole number; "": none is.
    `places`: for messages about labels.
    """

    x: Array
    y: Array
    not_whole: str
    places: Places


def read_csv(path: str, key: str, *, label: str | int, limit: int | None) -> Table:
    """Read the first `limit` rows (None: all). `label`: a name in the header line, or its number.

    Raises DataError: no such file or column, no rows, ragged lines, what is no number.
    """
    with open_file(path, key) as file:
        blocks = _blocks(_lines(file, path))
        first = next(blocks, None)
        if first is None:
            raise DataError(path, "empty: expected a line of numbers a row, found none")
        names = _names(path, first[0][1])
        has_header = isinstance(label, str) or not all(_is_number(name) for name in names)
        column = _label_column(path, names, label)
        if has_header:
            first = first[1:]
        xs: list[Array] = []
        ys: list[Array] = []
        numbers: list[Array] = []
        not_whole = ""
        n = 0
        while first is not None and (limit is None or n < limit):
            lines = first if limit is None else first[: limit - n]
            if lines:
                block = _parse(path, lines, n_columns=len(names), label=column)
                xs.append(np.delete(block, column, axis=1))
                ys.append(block[:, column].copy())
                numbers.append(np.array([number for number, _ in lines]))
                not_whole = not_whole or _not_whole(lines, column)
                n += len(lines)
            first = next(blocks, None)
    if not n:
        raise DataError(path, "empty: expected a line of numbers a row, found only a header line")
    places = Places(np.concatenate(numbers), column)
    return Table(np.concatenate(xs), np.concatenate(ys), not_whole, places)


def _names(path: str, line: str) -> list[str]:
    """The fields of the first line; names may be quoted."""
    try:
        return next(csv.reader([line]))
    except csv.Error as error:
        message = f"the first line is no line of csv ({shown(error)}); mend that line"
        raise DataError(path, message) from None


def _label_column(path: str, names: list[str], label: str | int) -> int:
    if len(names) < 2:
        raise DataError(
            path,
            f"expected features and a label separated by commas, found one column in the first "
            f"line: {shown(names[0])}",
        )
    if isinstance(label, int):
        if label >= len(names):
            raise DataError(
                path,
                f"has no column {label}: the first line has {len(names)}, counted from 0; "
                f"change data.*.label",
            )
        return label
    stripped = [name.strip() for name in names]
    if stripped.count(label) != 1:
        found = ", ".join(shown(name, 30) for name in stripped[:20])
        count = stripped.count(label)
        raise DataError(
            path,
            f"expected one column {shown(label)} in the first line, found {count} among {found}; "
            f"change data.*.label (a number counts columns from 0)",
        )
    return stripped.index(label)


def _lines(file: IO[bytes], path: str) -> Iterator[Line]:
    """The lines that are not blank, decoded."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            message = f"line {number} is longer than {MAX_LINE_BYTES:,} bytes; is it a csv file"
            raise DataError(path, message)
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError:
            message = f"line {number} is not UTF-8 text; save the file as UTF-8"
            raise DataError(path, message) from None
        if text:
            yield number, text


def _blocks(lines: Iterator[Line]) -> Iterator[list[Line]]:
    block: list[Line] = []
    size = 0
    for line in lines:
        block.append(line)
        size += len(line[1])
        if size >= BLOCK_BYTES:
            yield block
            block, size = [], 0
    if block:
        yield block


def _parse(path: str, lines: list[Line], *, n_columns: int, label: int) -> Array:
    """float64 (lines, n_columns)."""
    texts = [text for _, text in lines]
    quote = '"' if any('"' in text for text in texts) else None
    try:
        block = np.loadtxt(
            texts, np.float64, delimiter=",", comments=None, ndmin=2, quotechar=quote
        )
    except ValueError:
        block = np.empty((0, 0))
    if block.shape != (len(lines), n_columns):
        raise _fault(path, lines, n_columns=n_columns, label=label)
    return block


def _fault(path: str, lines: list[Line], *, n_columns: int, label: int) -> DataError:
    """The first line of a refused block that is wrong, and why."""
    for number, text in lines:
        fields = _fields(text)
        if len(fields) != n_columns:
            return DataError(
                path,
                f"line {number}: expected {n_columns} columns as in the first line, "
                f"found {len(fields)}; mend that line",
            )
        for column, field in enumerate(fields):
            if not _is_number(field):
                classes = " (classes that are text: number them from 0)" if column == label else ""
                return DataError(
                    path,
                    f"line {number}, column {column} (from 0): expected a number, "
                    f"found {shown(field)}; mend that line{classes}",
                )
    span = f"lines {lines[0][0]} to {lines[-1][0]}"
    return DataError(path, f"{span}: expected {n_columns} numbers a line, separated by commas")


def _fields(text: str) -> list[str]:
    if '"' in text:
        with suppress(csv.Error):
            return next(csv.reader([text]))
    return text.split(",")


def _is_number(text: str) -> bool:
    if "_" in text:
        return False  # Python reads 1_000 as a number, csv writers never mean it
    try:
        float(text)
    except ValueError:
        return False
    return True


def _not_whole(lines: list[Line], column: int) -> str:
    """The first label that reads 3.0 and not 3: a point makes it a column of float targets."""
    if lines[0][1].count(",") == column:  # the last column, as is usual: no need to cut the line up
        fields = (text[text.rfind(",") + 1 :] for _, text in lines)
    else:
        fields = (text.split(",", column + 1)[column] for _, text in lines)
    for (number, _), field in zip(lines, fields, strict=True):
        if not field.strip().strip('"').strip().lstrip("+-").isdigit():
            return f"line {number}, column {column} (from 0): {shown(field.strip())}"
    return ""
