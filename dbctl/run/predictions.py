"""`dbctl eval --predictions FILE`: each row's prediction, in row order, in bounded memory.

Rules of this file: the file appears complete or not at all; every row comes exactly once or it is
an error. Theory of operation: evaluators answer in any order, so each piece is put at its rows'
places in an unnamed file of fixed records beside the target (reserved at full size, so that a full
disk shows at once); at the end that is read in order, and the text replaces the target.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbctl.errors import RunError, UsageError, reason
from dbctl.wire import Predictions

HEADER = "row,label,predicted,score\n"
RECORD = np.dtype([("label", "<f8"), ("predicted", "<f8"), ("score", "<f8")])
BLOCK_ROWS = 10_000


class PredictionsFile:
    """For `n_rows` rows; a context manager. UsageError where `path` cannot be written."""

    def __init__(self, path: Path, n_rows: int, *, labelled: bool) -> None:
        self._given = path  # what the user knows it by
        path = self._path = Path(os.path.realpath(path))  # a link stays one
        self._labelled = labelled
        self._seen = np.zeros(n_rows, np.uint8)  # 2: twice or more
        if path.is_dir():
            raise UsageError(
                f"{self._given}: is a directory; give --predictions the name of a file"
            )
        if path.exists() and not path.is_file():  # /dev/stdout would be replaced by a file
            raise UsageError(f"{self._given}: not a file; give --predictions the name of a new one")
        try:
            self._file = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115
        except OSError as error:
            error.filename = None  # it is of no file that the user knows
            raise UsageError(f"{self._given}: cannot be written: {reason(error)}") from error
        try:
            os.posix_fallocate(self._file.fileno(), 0, max(1, n_rows) * RECORD.itemsize)
        except OSError as error:
            self._file.close()
            raise UsageError(f"{self._given}: cannot be written: {reason(error)}") from error
        self._records: NDArray[Any] = np.memmap(self._file, RECORD, "r+", shape=(max(1, n_rows),))

    def __enter__(self) -> PredictionsFile:
        return self

    def __exit__(self, *_: object) -> None:
        del self._records
        self._file.close()

    def add(self, message: Predictions) -> None:
        """RunError for a row that is none."""
        rows = np.array(message.rows, np.int64)
        odd = rows[(rows < 0) | (rows >= len(self._seen))]
        if len(odd):
            raise RunError(f"predictions of row {odd[0]}, but there are {len(self._seen)} rows")
        self._seen[rows] = np.minimum(self._seen[rows] + 1, 2)
        self._records["label"][rows] = message.labels
        self._records["predicted"][rows] = message.predicted
        self._records["score"][rows] = message.scores

    def finish(self) -> None:
        """Writes the file; RunError where a row is missing or came twice, or the disk fails."""
        for count, fault in ((0, "did not come"), (2, "came twice")):
            at_fault = np.flatnonzero(self._seen == count)
            if len(at_fault):
                raise RunError(
                    f"{self._given}: not written: the predictions of {len(at_fault):,} rows {fault}"
                    f", the first is row {at_fault[0]}; run it again"
                )
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "w", encoding="ascii", newline="") as file:
                file.write(HEADER)
                for start in range(0, len(self._seen), BLOCK_ROWS):
                    file.writelines(self._lines(start))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise RunError(f"{self._given}: cannot be written: {reason(error)}") from error

    def _lines(self, start: int) -> list[str]:
        block = self._records[start : min(start + BLOCK_ROWS, len(self._seen))]
        number = "{:.0f}" if self._labelled else "{:.9g}"
        text = f"{{}},{number},{number},{{:.9g}}\n"
        return [text.format(start + i, *record) for i, record in enumerate(block.tolist())]
