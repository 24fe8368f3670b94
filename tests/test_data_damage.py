"""Each wrong file is named, with what was expected, what was found, and what to do."""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbctl.data import files
from dbctl.data.sources import check, check_files, open_source
from dbctl.errors import DataError
from dbctl.experiment.specs import (
    CsvSource,
    DigitsSource,
    IdxSource,
    NpySource,
    NpzSource,
    SourceSpec,
)
from tests.data_files import (
    X,
    Y,
    idx_bytes,
    network,
    read_all,
    write_csv,
    write_idx,
    write_npy,
    write_npz,
)


def read_through(spec: SourceSpec) -> None:
    source = open_source(spec)
    check(source, network(source.features, 1000))


def refused(spec: SourceSpec, *parts: str, whole: bool = False) -> str:
    """Opening (`whole`: and reading) fails with a message that holds `parts`; the message."""
    with pytest.raises(DataError) as raised:
        read_through(spec) if whole else open_source(spec)
    message = str(raised.value)
    for part in parts:
        assert part in message
    assert not message.endswith(".")
    assert message.isprintable()
    return message


IdxDamage = Callable[[bytes], bytes]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda b: b[:-1], "truncated"),
        (lambda b: b[:10], "truncated"),
        (lambda b: b"", "truncated"),
        (lambda b: b + b"x", "bytes"),
        (lambda b: b"\x93NUM" + b[4:], "expected a magic number like 00000803 (images)"),
        (lambda b: b[:2] + b"\x07" + b[3:], "found 00000703"),
        (lambda b: b[:3] + b"\xff" + b[4:], "not an idx file"),
        (lambda b: b[:4] + b"\0\0\0\0" + b[8:], "empty: its header says 0 x 2 x 3"),
    ],
)
def test_damaged_idx(tmp_path: Path, suffix: str, damage: IdxDamage, words: str) -> None:
    spec = write_idx(tmp_path, damage(idx_bytes(X)), idx_bytes(Y), suffix)
    refused(spec, spec.images, words, whole=True)


def test_wrong_length_says_both_sizes(tmp_path: Path) -> None:
    spec = write_idx(tmp_path, idx_bytes(X)[:-1], idx_bytes(Y))
    refused(spec, "its header 5 x 2 x 3 needs 46 bytes, found 45; get the file again")


@pytest.mark.parametrize("cut", [1, 8, 9, 30])
def test_cut_gz(tmp_path: Path, cut: int) -> None:
    """Its checksum and length, the last 8 bytes, are part of it."""
    spec = write_idx(tmp_path, idx_bytes(X), idx_bytes(Y), ".gz")
    data = Path(spec.images).read_bytes()
    Path(spec.images).write_bytes(data[:-cut])
    refused(spec, "truncated or damaged: the compressed file ends too early", whole=True)


def test_gz_with_a_wrong_checksum_or_bytes_after_it(tmp_path: Path) -> None:
    spec = write_idx(tmp_path, idx_bytes(X), idx_bytes(Y), ".gz")
    data = Path(spec.images).read_bytes()
    Path(spec.images).write_bytes(data[:-8] + bytes([data[-8] ^ 1]) + data[-7:])
    refused(spec, "truncated or damaged", "incorrect data check", whole=True)
    Path(spec.images).write_bytes(data + b"more")
    refused(spec, "truncated or damaged", whole=True)


def test_gz_that_expands_beyond_its_header(tmp_path: Path) -> None:
    spec = write_idx(tmp_path, idx_bytes(X) + bytes(1 << 20), idx_bytes(Y), ".gz")
    refused(spec, "holds more bytes than its header says", whole=True)


def test_header_that_claims_too_much_is_not_believed(tmp_path: Path) -> None:
    """3 GB out of some bytes: refused before memory is taken."""
    head = bytes([0, 0, 8, 3]) + struct.pack(">3I", 60000, 223, 223)
    spec = write_idx(tmp_path, head, idx_bytes(np.zeros(60000)), ".gz")
    refused(spec, "promises 2,983,740,016 bytes", "store it uncompressed")


def test_counts_that_differ(tmp_path: Path) -> None:
    spec = write_idx(tmp_path, idx_bytes(X), idx_bytes(Y[:4]))
    refused(spec, spec.images, spec.labels, "holds 5 rows", "4 labels")


def test_more_rows_than_there_are(tmp_path: Path) -> None:
    spec = write_idx(tmp_path, idx_bytes(X), idx_bytes(Y))
    limited = IdxSource(images=spec.images, labels=spec.labels, rows=6)
    refused(limited, "expected 6, found 5; lower data.*.rows to 5")
    refused(write_csv(tmp_path, "1,2\n", 1, rows=2), "expected 2, found 1")
    refused(DigitsSource(split="test", rows=360), "expected 360, found 359")


def test_missing_files(tmp_path: Path) -> None:
    spec = write_idx(tmp_path, idx_bytes(X), idx_bytes(Y), ".gz")
    near = IdxSource(images=spec.images.removesuffix(".gz"), labels=spec.labels)
    refused(near, f"no such file; there is {spec.images}: give that in data.*.images")
    none = str(tmp_path / "none")
    refused(NpySource(x=none, y=none), f"{none}: no such file; give another path in data.*.x")
    refused(CsvSource(path=none, label=0), "no such file")
    refused(
        IdxSource(images=none, labels=f"{none}.labels"),
        f"{none}: no such file; give another path in data.*.images",
        f"; and {none}.labels: no such file; give another path in data.*.labels",
    )
    with pytest.raises(DataError) as raised:
        check_files(CsvSource(path=none, label=0), CsvSource(path=f"{none}.csv", label=0))
    assert str(raised.value) == (
        f"{none}: no such file; give another path in data.train.path; and "
        f"{none}.csv: no such file; give another path in data.test.path"
    )
    same = CsvSource(path=none, label=0)
    with pytest.raises(DataError) as raised:
        check_files(same, same)
    assert str(raised.value) == f"{none}: no such file; give another path in data.train.path"
    fashion = "/usr/share/datasets/fashion-mnist/none"
    refused(IdxSource(images=fashion, labels=none), "apt-get install dataset-fashion-mnist")


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        refused(CsvSource(path=str(path), label=0), "not a regular file")
    refused(CsvSource(path=str(tmp_path / "pipe" / "x"), label=0), "not a directory")
    with pytest.raises(DataError, match="cannot be read"):
        open_source(CsvSource(path="a\0b", label=0))


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    objects = np.array([Bomb(tmp_path / "made")], object)
    np.save(tmp_path / "x.npy", objects, allow_pickle=True)
    (tmp_path / "y.npy").write_bytes(objects.dumps())
    np.save(tmp_path / "good.npy", Y[:1])
    x, y, good = (str(tmp_path / f"{name}.npy") for name in ("x", "y", "good"))
    refused(NpySource(x=x, y=good), x, "holds Python objects, which are never loaded")
    refused(NpySource(x=good, y=y), y, "expected it to begin with 934e554d5059")
    np.savez(tmp_path / "data.npz", allow_pickle=True, x=objects, y=Y[:1])
    npz = NpzSource(path=str(tmp_path / "data.npz"), x="x", y="y")
    refused(npz, "data.npz[x]: holds Python objects")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (X, np.array(["a"] * 5), "y.npy: expected integers or floats"),
        (X.astype(complex), Y, "found dtype dtype('complex128')"),
        (np.zeros(5, "M8[s]"), Y, "expected integers or floats"),
        (np.zeros(5, [("a", "i4")]), Y, "expected integers or floats"),
        (X.astype(np.longdouble), Y, "at most 8 bytes"),
        (np.float64(3), Y, "found an array of shape ()"),
        (X[:0], Y[:0], "found an array of shape (0, 2, 3)"),
        (X, np.eye(5, 3, dtype=int), "expected one whole-number label a row"),
        (X, np.array([0, 1, -1, 0, -2]), "row 2 (from 0): expected a label of 0 or more, found -1"),
        (X, np.array([0, 1, np.nan, 0, 1]), "row 2 (from 0): expected finite targets, found [nan]"),
        (X, np.array([0, 1, 1, np.inf, 1]), "row 3 (from 0): expected finite targets"),
    ],
)
def test_arrays_that_are_no_data(tmp_path: Path, x: Any, y: Any, words: str) -> None:
    refused(write_npy(tmp_path, x, y), words)
    if x.ndim:
        refused(write_npz(tmp_path, x=x, y=y), words.removeprefix("y.npy: "))


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:20], lambda b: b[:3]])
def test_cut_npy(tmp_path: Path, damage: IdxDamage) -> None:
    spec = write_npy(tmp_path, X, Y)
    Path(spec.x).write_bytes(damage(Path(spec.x).read_bytes()))
    refused(spec, spec.x)


def test_npy_with_extra_bytes(tmp_path: Path) -> None:
    spec = write_npy(tmp_path, X, Y)
    with open(spec.y, "ab") as file:
        file.write(b"x")
    refused(spec, spec.y, "has extra bytes", "needs 133 bytes, found 134")


@pytest.mark.parametrize("compressed", [True, False])
def test_a_flipped_bit_in_npz_is_found(tmp_path: Path, compressed: bool) -> None:
    """Bits all over the file flipped in turn: an error, or the same numbers."""
    spec = write_npz(tmp_path, compressed=compressed, x=X, y=Y)
    data = Path(spec.path).read_bytes()
    found = 0
    for at in range(0, len(data), 5):
        Path(spec.path).write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        try:
            x, y = read_all(spec)
        except DataError:
            found += 1
            continue
        np.testing.assert_array_equal(x, X.reshape(5, 6))
        np.testing.assert_array_equal(y, Y)
    assert found > 20


@pytest.mark.parametrize("form", ["npz", "npy", "idx", "gz", "csv"])
def test_random_damage_is_an_error_or_data(tmp_path: Path, form: str) -> None:
    """Nothing but DataError comes out of 120 damaged files of each form."""
    spec: SourceSpec
    if form == "npz":
        spec = write_npz(tmp_path, x=X, y=Y)
    elif form == "npy":
        spec = write_npy(tmp_path, X, Y)
    elif form == "csv":
        spec = write_csv(tmp_path, 'a,"b",y\n1,2,3\n4.5,nan,6\n')
    else:
        spec = write_idx(tmp_path, idx_bytes(X), idx_bytes(Y), ".gz" if form == "gz" else "")
    names = {"npz": "data.npz", "npy": "x.npy", "csv": "data.csv", "gz": "images.gz"}
    path = tmp_path / names.get(form, "images")
    rng = np.random.default_rng(2)
    good = np.frombuffer(path.read_bytes(), np.uint8)
    refusals = 0
    for _ in range(120):
        bad = good.copy()
        places = rng.integers(0, len(bad), rng.integers(1, 6))
        bad[places] = rng.integers(0, 256, len(places))
        path.write_bytes(bad[: rng.integers(1, 5 * len(bad))].tobytes())
        try:
            read_all(spec)
        except DataError:
            refusals += 1
    assert refusals > 20


@pytest.mark.parametrize("keep", [0, 10, 100, 300])
def test_cut_npz(tmp_path: Path, keep: int) -> None:
    spec = write_npz(tmp_path, x=X, y=Y)
    Path(spec.path).write_bytes(Path(spec.path).read_bytes()[:keep])
    refused(spec, "truncated or damaged")


def test_npz_without_the_member(tmp_path: Path) -> None:
    spec = write_npz(tmp_path, x=X, z=Y)
    refused(spec, "has no array 'y'; it holds 'x', 'z'")


def test_npz_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ratio above the limit is refused above the free size only: equal labels compress well."""
    spec = write_npz(tmp_path, x=np.zeros((5, 1 << 18)), y=Y)
    open_source(spec)
    monkeypatch.setattr(files, "FREE_BYTES", 1 << 20)
    refused(spec, "data.npz[x]: its header promises 10,485,888 bytes out of", "uncompressed")


def test_npz_written_by_another_method(tmp_path: Path) -> None:
    spec = write_npz(tmp_path, x=X, y=Y)
    with zipfile.ZipFile(spec.path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("x.npy", b"")
    refused(spec, "compressed in a way numpy does not use")


@pytest.mark.parametrize(
    ("text", "label", "words"),
    [
        ("", 0, "empty: expected a line of numbers a row"),
        ("\n\n", 0, "empty"),
        ("a,y\n", "y", "found only a header line"),
        ("a,y\n1,2\n\n3\n", "y", "line 4: expected 2 columns as in the first line, found 1"),
        ("a,y\n1,2\n3,4,5\n", "y", "line 3: expected 2 columns"),
        ("a,y\n1,2\nx,4\n", "y", "line 3, column 0 (from 0): expected a number, found 'x'"),
        ("a,y\n1,cat\n", "y", "found 'cat'; mend that line (classes that are text: number them"),
        ('a,y\n"1","2"\n"3","x"\n', "y", "line 3, column 1 (from 0): expected a number, found 'x'"),
        ('a,y\n"1","2"\n"3","4","5"\n', "y", "line 3: expected 2 columns"),
        ("a,y\n1,2\n,4\n", "y", "line 3, column 0 (from 0): expected a number, found ''"),
        ("1,2\n1_0,4\n", 1, "line 2, column 0 (from 0): expected a number, found '1_0'"),
        ("a,y\n1,2\n", "z", "expected one column 'z' in the first line, found 0 among 'a', 'y'"),
        ("y,y\n1,2\n", "y", "found 2 among"),
        ("1,2\n", 2, "has no column 2: the first line has 2, counted from 0"),
        ("1;2\n", 0, "found one column in the first line: '1;2'"),
        ("a,y\n1,nan\n", "y", "line 2, column 1 (from 0): expected finite targets"),
        ("a,y\n1,0\n\n1,-1\n", "y", "line 4, column 1 (from 0): expected a label of 0"),
        ("-1,2\n", 0, "line 1, column 0 (from 0): expected a label of 0 or more, found -1; mend"),
        ("a\rb,y\n1,2\n", "y", "the first line is no line of csv"),
        ('"a,b",y\n1,2,3\n', "y", "line 2: expected 2 columns"),
        (b"a,y\n\xff,1\n", "y", "line 2 is not UTF-8 text"),
        ("a,y\n\x1b[31m,1\n", "y", r"found '\x1b[31m'"),
    ],
)
def test_wrong_csv(tmp_path: Path, text: str | bytes, label: str | int, words: str) -> None:
    refused(write_csv(tmp_path, text, label), words)


def test_csv_line_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dbctl.data.csv_file.MAX_LINE_BYTES", 1000)
    refused(write_csv(tmp_path, "1," * 600, 0), "line 1 is longer than 1,000 bytes")


def test_classes_are_spoken_of_in_the_column_of_the_label_only(tmp_path: Path) -> None:
    message = refused(write_csv(tmp_path, "a,y\ncat,1\n", "y"), "column 0 (from 0)")
    assert message.endswith("found 'cat'; mend that line")
