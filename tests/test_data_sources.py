"""Each format is read right, and each wrong file is named with what was expected and found."""

from __future__ import annotations

import gzip
import os
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbctl.data import files
from dbctl.data.sources import check, digest, open_source
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
from dbctl.model.layers.dense import DenseSpec
from dbctl.model.network import NetworkSpec

FASHION = Path("/usr/share/datasets/fashion-mnist")
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


# ------------------------------------------------------------------------------- what is right


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("rows", [None, 3])
def test_idx(tmp_path: Path, suffix: str, rows: int | None) -> None:
    spec = write_idx(tmp_path, idx_bytes(X), idx_bytes(Y), suffix)
    spec = IdxSource(images=spec.images, labels=spec.labels, rows=rows)
    source = open_source(spec)
    assert (source.rows, source.features, source.shape) == (rows or 5, 6, (2, 3))
    assert source.kind == "labels"
    assert source.y.dtype == np.int64
    np.testing.assert_array_equal(np.asarray(source.x), X.reshape(5, 6)[:rows])
    np.testing.assert_array_equal(source.y, Y[:rows])
    np.testing.assert_array_equal(source.x.take(np.array([2, 0, 2])), X.reshape(5, 6)[[2, 0, 2]])
    check(source, network())


@pytest.mark.parametrize(
    ("code", "dtype"), [(9, "i1"), (11, ">i2"), (12, ">i4"), (13, ">f4"), (14, ">f8")]
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_of_every_type(tmp_path: Path, code: int, dtype: str, suffix: str) -> None:
    values = np.array([[-3, 100], [7, 0]])
    spec = write_idx(tmp_path, idx_bytes(values, code, dtype), idx_bytes(Y[:2]), suffix)
    np.testing.assert_array_equal(read_all(spec)[0], values)


def test_gz_of_several_members_and_blocks(tmp_path: Path) -> None:
    """bgzip and `cat a.gz b.gz` write several members; rows go over the edges of blocks."""
    x = np.random.default_rng(0).integers(0, 256, (9, 1 << 20), np.uint8)
    spec = write_idx(tmp_path, idx_bytes(x), idx_bytes(np.zeros(9)), ".gz")
    data = idx_bytes(x)
    parts = (data[: 1 << 20], data[1 << 20 :])
    Path(spec.images).write_bytes(b"".join(gzip.compress(part, 1) for part in parts))
    source = open_source(spec)
    np.testing.assert_array_equal(source.x.take(np.array([8, 3, 4])), x[[8, 3, 4]])


@pytest.mark.parametrize("dtype", ["u1", "i2", "f2", "<f4", ">f4", "f8", "i8", "?"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("kind", ["npy", "npz", "npz stored"])
def test_npy_and_npz(tmp_path: Path, dtype: str, order: str, kind: str) -> None:
    x = np.array(X % 2 if dtype == "?" else X, dtype, order=order)  # type: ignore[call-overload]
    y = Y.astype(np.int32)[:, None]
    spec: SourceSpec
    if kind == "npy":
        spec = write_npy(tmp_path, x, y)
    else:
        spec = write_npz(tmp_path, compressed=kind == "npz", x=x, y=y)
    source = open_source(spec)
    assert source.shape == (2, 3)
    np.testing.assert_array_equal(np.asarray(source.x), x.reshape(5, 6))
    np.testing.assert_array_equal(source.y, Y)
    np.testing.assert_array_equal(
        np.concatenate([b.copy() for b in source.x.blocks()]), x.reshape(5, 6)
    )
    check(source, network())


def test_npy_is_mapped_and_read_only(tmp_path: Path) -> None:
    source = open_source(write_npy(tmp_path, X, Y))
    assert source.x.mapped
    assert not next(source.x.blocks()).flags.writeable


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_float_targets(tmp_path: Path, width: int, kind: str) -> None:
    y = np.linspace(-1, 1, 5 * width).reshape(5, width)
    flat = y[:, 0] if width == 1 else y
    spec: SourceSpec = (write_npy if kind == "npy" else lambda f, x, y: write_npz(f, x=x, y=y))(
        tmp_path, X, flat
    )
    source = open_source(spec)
    assert source.kind == "targets"
    np.testing.assert_array_equal(source.y, y)
    check(source, network(units=width, loss="squared"))


@pytest.mark.parametrize("label", ["y", 1])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv(tmp_path: Path, label: str | int, end: str) -> None:
    lines = ["\ufeffa,y, b", "1.5,0,-2", " 1e-3 ,2,nan", "", "inf,1,+4"]
    source = open_source(write_csv(tmp_path, end.join(lines), label))
    np.testing.assert_array_equal(np.asarray(source.x), [[1.5, -2], [1e-3, np.nan], [np.inf, 4]])
    assert source.y.tolist() == [0, 2, 1]
    assert source.kind == "labels"


def test_csv_without_header_and_with_float_targets(tmp_path: Path) -> None:
    source = open_source(write_csv(tmp_path, "1,2.0\n3,4.0\n5,6.0", 1, rows=2))
    assert source.kind == "targets"
    assert source.y.tolist() == [[2.0], [4.0]]
    assert np.asarray(source.x).tolist() == [[1.0], [3.0]]


def test_csv_equals_numpy_over_many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dbctl.data.csv_file.BLOCK_BYTES", 100)
    x = np.random.default_rng(1).normal(size=(50, 3))
    text = "\n".join(f"{a!r},{b!r},{i % 4},{c!r}" for i, (a, b, c) in enumerate(x.tolist()))
    got, y = read_all(write_csv(tmp_path, text, 2, rows=45))
    np.testing.assert_array_equal(got, x[:45])
    assert y.tolist() == [i % 4 for i in range(45)]


def test_digits() -> None:
    """1,797 rows; the test split is every row whose index is 4 mod 5."""
    train, test = (open_source(DigitsSource(split=s)) for s in ("train", "test"))  # type: ignore[arg-type]
    assert (train.rows, test.rows, train.shape) == (1438, 359, (8, 8))
    x = np.empty((1797, 64), np.uint8)
    x[np.arange(1797) % 5 == 4] = np.asarray(test.x)
    x[np.arange(1797) % 5 != 4] = np.asarray(train.x)
    assert x.min() == 0
    assert x.max() == 16
    # scikit-learn's load_digits: its first image, its sum, the count of each digit.
    assert x[0, :16].tolist() == [0, 0, 5, 13, 9, 1, 0, 0, 0, 0, 13, 15, 10, 15, 5, 0]
    assert x.sum(dtype=int) == 561718
    counts = np.bincount(np.concatenate([train.y, test.y]))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    check(train, NetworkSpec(input=(8, 8, 1), layers=(DenseSpec(units=10),), loss="softmax"))
    assert open_source(DigitsSource(split="test", rows=20)).y.tolist() == test.y[:20].tolist()


@pytest.mark.skipif(not FASHION.exists(), reason="Debian package dataset-fashion-mnist")
def test_fashion_mnist() -> None:
    spec = IdxSource(
        images=str(FASHION / "t10k-images-idx3-ubyte.gz"),
        labels=str(FASHION / "t10k-labels-idx1-ubyte.gz"),
    )
    source = open_source(spec)
    assert (source.rows, source.shape) == (10000, (28, 28))
    assert np.bincount(source.y).tolist() == [1000] * 10
    whole = gzip.decompress(Path(spec.images).read_bytes())[16:]
    rows = np.array([9999, 0, 5000])
    expected = np.frombuffer(whole, np.uint8).reshape(-1, 784)[rows]
    np.testing.assert_array_equal(source.x.take(rows), expected)


# ------------------------------------------------------------------------------ what is wrong

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
        ("a,y\n1,2\n,4\n", "y", "line 3, column 0 (from 0): expected a number, found ''"),
        ("1,2\n1_0,4\n", 1, "line 2, column 0 (from 0): expected a number, found '1_0'"),
        ("a,y\n1,2\n", "z", "expected one column 'z' in the first line, found 0 among 'a', 'y'"),
        ("y,y\n1,2\n", "y", "found 2 among"),
        ("1,2\n", 2, "has no column 2: the first line has 2, counted from 0"),
        ("1;2\n", 0, "found one column in the first line: '1;2'"),
        ("a,y\n1,nan\n", "y", "row 0 (from 0): expected finite targets"),
        ("a,y\n1,-1\n", "y", "row 0 (from 0): expected a label of 0 or more, found -1"),
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


# ---------------------------------------------------------------------------- against a network


def test_check_says_both_numbers(tmp_path: Path) -> None:
    source = open_source(write_npy(tmp_path, X, Y))
    for loss in ("softmax", "logistic", "squared"):
        check(source, network(loss=loss))
        with pytest.raises(DataError, match=r"row 1 \(from 0\) has label 2.* has 2 units"):
            check(source, network(units=2, loss=loss))
    with pytest.raises(DataError, match=r"has 6 features a row \(2 x 3\).*\[7\] takes 7"):
        check(source, network(features=7))
    with pytest.raises(DataError, match=r"has label 2.*at least 3 units"):
        open_source(write_npy(tmp_path, X, Y), classes_hint=2)


def test_check_of_targets(tmp_path: Path) -> None:
    source = open_source(write_npy(tmp_path, X, np.ones((5, 2))))
    check(source, network(units=2, loss="squared"))
    with pytest.raises(DataError, match="has 2 targets a row, but the last layer has 3 units"):
        check(source, network(units=3, loss="squared"))
    for loss in ("softmax", "logistic"):
        with pytest.raises(DataError, match=f"float targets, but loss {loss} takes"):
            check(source, network(units=2, loss=loss))


def test_labels_beyond_int64(tmp_path: Path) -> None:
    source = open_source(write_npy(tmp_path, X, np.full(5, 2**64 - 1, np.uint64)))
    with pytest.raises(DataError, match=re.escape(f"label {2**63 - 1}")):
        check(source, network())


# ----------------------------------------------------------------------------------- identity


def test_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_npy(tmp_path, X, Y)
    first = digest(spec)
    assert re.fullmatch("[0-9a-f]{64}", first)
    (tmp_path / "moved").mkdir()
    assert digest(write_npy(tmp_path / "moved", X, Y)) == first
    assert digest(NpySource(x=spec.x, y=spec.y, rows=4)) != first
    for limit in (files.FREE_BYTES, 10):
        monkeypatch.setattr("dbctl.data.sources.DIGEST_BYTES", limit)
        monkeypatch.setattr("dbctl.data.sources.END_BYTES", 20)
        write_npy(tmp_path, X, Y)
        before = digest(spec)
        changed = X.copy()
        changed[4, 1, 2] ^= 1
        write_npy(tmp_path, changed, Y)
        assert digest(spec) != before


def test_digests_of_what_is_computed_or_shipped() -> None:
    specs: list[SourceSpec] = [
        DigitsSource(split="train"),
        DigitsSource(split="test"),
        SyntheticSource(rows=5, features=2, classes=2),
        SyntheticSource(rows=5, features=2, classes=2, seed=1),
        SyntheticSource(rows=5, features=2, classes=2, split="test"),
    ]
    assert len({digest(spec) for spec in specs}) == 5
