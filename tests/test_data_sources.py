"""Each format is read right, compared with a network, and known again by its digest."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
import pytest

from dbctl.data import files
from dbctl.data.sources import check, digest, open_source
from dbctl.errors import DataError
from dbctl.experiment.specs import (
    DigitsSource,
    IdxSource,
    NpySource,
    SourceSpec,
    SyntheticSource,
)
from dbctl.model.layers.dense import DenseSpec
from dbctl.model.network import NetworkSpec
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

FASHION = Path("/usr/share/datasets/fashion-mnist")


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


@pytest.mark.parametrize("label", [2**53, 99_999_999_999_999_999_999, -(2**60)])
def test_a_csv_label_that_no_float_holds_is_no_label(tmp_path: Path, label: int) -> None:
    """It was rounded, or another number and a warning of numpy's."""
    where = r"line 2, column 1 \(from 0\)"
    said = where + r": expected a label below 2\^53, found -?(9.01e\+15|1e\+20|1.15e\+18);"
    with pytest.raises(DataError, match=said):
        open_source(write_csv(tmp_path, f"1,2\n3,{label}\n5,1", 1))
    source = open_source(write_csv(tmp_path, f"1,2\n3,{2**53 - 1}", 1))
    assert source.y.tolist() == [2, 2**53 - 1]


def test_csv_with_quoted_fields(tmp_path: Path) -> None:
    text = '"a","y"\n"-4.005","2"\n"1e3"," 0"\n'
    source = open_source(write_csv(tmp_path, text, "y"))
    assert np.asarray(source.x).tolist() == [[-4.005], [1000.0]]
    assert source.y.tolist() == [2, 0]
    assert source.kind == "labels"


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


def test_what_is_wrong_with_labels_names_their_file(tmp_path: Path) -> None:
    """Not that of the features: row, value found and what is expected are of the labels."""
    x, targets = np.arange(30.0).reshape(5, 6), np.ones((5, 2))
    labels = r"row 1 \(from 0\) has label 2, but the last layer has 2 units \(labels 0 to 1\)"
    csv = "1,2,3,4,5,6,0\n1,2,3,4,5,6,2\n"
    for spec, file in (
        (write_idx(tmp_path, idx_bytes(X), idx_bytes(Y)), "labels"),
        (write_npz(tmp_path, x=X, y=Y), r"data\.npz\[y\]"),
        (write_csv(tmp_path, csv, 6), r"data\.csv"),
    ):
        where = labels.replace("row 1", "line 2, column 6") if file.endswith("csv") else labels
        with pytest.raises(DataError, match=rf"/{file}: {where}"):
            check(open_source(spec), network(units=2))
    with pytest.raises(DataError, match=r"digits\.npz\[y\]: row \d+ \(from 0\) has label 9"):
        check(open_source(DigitsSource(split="train")), network(features=64, units=5))
    source = open_source(write_npy(tmp_path, x, targets))
    with pytest.raises(DataError, match=r"/y\.npy: has 2 targets a row"):
        check(source, network(units=3, loss="squared"))
    with pytest.raises(DataError, match=r"/y\.npy: has float targets"):
        check(source, network(units=2))


def test_check_of_targets(tmp_path: Path) -> None:
    source = open_source(write_npy(tmp_path, X, np.ones((5, 2))))
    check(source, network(units=2, loss="squared"))
    with pytest.raises(DataError, match="has 2 targets a row, but the last layer has 3 units"):
        check(source, network(units=3, loss="squared"))
    for loss in ("softmax", "logistic"):
        with pytest.raises(DataError, match=f"float targets, but loss {loss} takes"):
            check(source, network(units=2, loss=loss))


@pytest.mark.parametrize("column", [0, 2])
@pytest.mark.parametrize("label", ["1.0", "1.5", '"1."', "1e0"])
def test_the_label_that_makes_float_targets_is_told(
    column: int, label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its line in the file, whichever block that is in; as targets it is fine."""
    monkeypatch.setattr("dbctl.data.csv_file.BLOCK_BYTES", 12)
    rows = [["5", "6"] for _ in range(5)]
    for row, y in zip(rows, ["0", "1", "0", label, "2.5"], strict=True):
        row.insert(column, y)
    head = ["a", "b"]
    head.insert(column, "kind")
    text = "\n\n".join(",".join(row) for row in [head, *rows])
    source = open_source(write_csv(tmp_path, text, "kind"))
    with pytest.raises(DataError) as caught:
        check(source, network(features=2, units=3))
    assert str(caught.value) == (
        f"{source.path}: line 9, column {column} (from 0): {label!r} makes float targets, but loss "
        "softmax takes whole-number labels; store them as integers, or use loss: squared"
    )
    check(source, network(features=2, units=1, loss="squared"))


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
        monkeypatch.setattr("dbctl.data.files.DIGEST_BYTES", limit)
        monkeypatch.setattr("dbctl.data.files.END_BYTES", 20)
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


@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_a_csv_label_that_no_output_is_for_is_named_by_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    """As other faults of the file: blank lines and the header count."""
    monkeypatch.setattr("dbctl.data.csv_file.BLOCK_BYTES", block_bytes)
    source = open_source(write_csv(tmp_path, "y,a\n0,1\n\n7,1\n1,1\n", "y", rows=2))
    with pytest.raises(DataError, match=r"csv: line 4, column 0 \(from 0\) has label 7, but"):
        check(source, network(features=1, units=2))


def test_labels_that_begin_at_1_are_told_to_begin_at_0(tmp_path: Path) -> None:
    source = open_source(write_csv(tmp_path, "0.5,1\n0.5,3\n0.5,2\n", 1))
    words = r"number them from 0, they begin at 1, or give it at least 4 units"
    with pytest.raises(DataError, match=words):
        check(source, network(features=1, units=3))
    with pytest.raises(DataError, match=r"\(labels 0 to 1\); give it at least 4 units"):
        check(source, network(features=1, units=2))
