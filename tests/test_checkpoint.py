"""A checkpoint gives back what was put in, whoever wrote which part, and says whose it is."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from dbctl import __version__
from dbctl.checkpoint.layout import Facts, ReplicaRow, plan_layout, seal, step_of, unseal
from dbctl.checkpoint.reader import list_checkpoints, newest_good, open_checkpoint
from dbctl.checkpoint.writer import Writer, clean
from dbctl.errors import CheckpointError
from dbctl.model.layers.dense import DenseSpec
from dbctl.model.network import NetworkSpec, tensors
from dbctl.region import Range
from dbctl.wire import Position


class Row(NamedTuple):
    name: str
    shape: tuple[int, ...]
    range: Range


def table(shapes: Sequence[tuple[int, ...]]) -> list[Row]:
    rows, at = [], 0
    for index, shape in enumerate(shapes):
        kind = "weight" if len(shape) > 1 else "bias"
        rows.append(Row(f"layers.{index // 2}.{kind}", shape, Range(at, at + prod(shape))))
        at = rows[-1].range.stop
    return rows


TABLE = table([(4, 6), (4,), (3, 4), (3,)])
N = 24 + 4 + 12 + 3
VECTORS = ("parameters", "sum")


def facts(**changes: Any) -> Facts:
    given_: dict[str, Any] = {
        "run": "run-é", "network": "ab12", "updates": 77, "rows": (ReplicaRow(0, 600, 3, 17),),
        "replicas": 1, "partitions": 1, "shards": 2, "seconds": 1.5, "epochs": 3.25,
        "examples": 19200,
    }  # fmt: skip
    return Facts(**given_ | changes)


def vector(seed: int, n: int = N, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(n).astype(dtype)


def save(directory: Path, step: int, *, seed: int = 0, **settings_: Any) -> Path:
    with Writer(directory, step, tensors=TABLE, vectors=VECTORS, **settings_) as writer:
        for number, name in enumerate(VECTORS):
            writer.put(name, 0, vector(seed + number))
        return writer.finish(facts())


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# -------------------------------------------------------------------------------- round trip


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    shape = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)
    rows = table(draw(st.lists(shape, min_size=1, max_size=5)))
    # Pairs share a layer, so two of one kind would share a name.
    rows = [row._replace(name=f"layers.{i}.weight") for i, row in enumerate(rows)]
    n = rows[-1].range.stop

    def cuts() -> list[tuple[int, int]]:
        inner = sorted(draw(st.lists(st.integers(0, n), max_size=4)))
        return draw(st.permutations(list(zip([0, *inner], [*inner, n], strict=True))))

    vectors = ["parameters", "first", "second"][: draw(st.integers(1, 3))]
    return {
        "rows": rows, "n": n, "vectors": vectors,
        "dtype": draw(st.sampled_from(["float32", "float64"])),
        "cut_bytes": draw(st.integers(1, 400)),
        "puts": {name: cuts() for name in vectors},
        "reads": [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for _ in range(4)],
    }  # fmt: skip


@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_any_cut_of_puts_and_reads_is_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, case: dict[str, Any]
) -> None:
    directory = tmp_path_factory.mktemp("any")
    n, dtype = case["n"], case["dtype"]
    data = {name: vector(i, n, dtype) for i, name in enumerate(case["vectors"])}
    with Writer(
        directory, 5, tensors=case["rows"], vectors=case["vectors"], dtype=dtype,
        cut_bytes=case["cut_bytes"],
    ) as writer:  # fmt: skip
        for name, puts in case["puts"].items():
            for start, stop in puts:
                writer.put(name, start, data[name][start:stop])
        path = writer.finish(facts())

    saved = open_checkpoint(path)
    for name, whole in data.items():
        for start, stop in case["reads"]:
            part = saved.read(name, Range(start, stop))
            assert part.dtype == whole.dtype
            assert part.tobytes() == whole[start:stop].tobytes()
    files = list(path.glob("*.safetensors"))
    loaded: dict[str, Any] = {}
    for file in files:
        loaded |= safetensors.numpy.load_file(file)
    assert len(loaded) == len(case["rows"]) * len(case["vectors"])
    for name, whole in data.items():
        prefix = "" if name == "parameters" else f"{name}."
        for row in case["rows"]:
            expected = whole[row.range.slice()].reshape(row.shape)
            np.testing.assert_array_equal(loaded[prefix + row.name], expected, strict=True)


def test_files_are_named_and_indexed_as_the_hub_does(tmp_path: Path) -> None:
    """docs/architecture.md, checkpoints: whole tensors, cut between files only between tensors."""
    path = save(tmp_path, 1200, cut_bytes=110)
    assert path.name == "step-000001200"
    assert names(path) == [
        "manifest.json",
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "optimizer-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors",
        "optimizer.safetensors.index.json",
    ]  # fmt: skip
    index = json.loads((path / "model.safetensors.index.json").read_text("utf-8"))
    assert index["metadata"] == {"total_size": N * 4}
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(path / file, framework="np") as opened:
            assert name in opened.keys()  # noqa: SIM118  no mapping
            assert opened.metadata() == {"format": "pt"}
    state = json.loads((path / "optimizer.safetensors.index.json").read_text("utf-8"))
    assert set(state["weight_map"]) == {f"sum.{name}" for name in index["weight_map"]}


def test_headers_begin_the_elements_at_a_multiple_of_eight(tmp_path: Path) -> None:
    for file in plan_layout(TABLE, VECTORS, dtype="float32", cut_bytes=50).files:
        if file.name.endswith(".safetensors"):
            assert len(file.head) % 8 == 0
            assert int.from_bytes(file.head[:8], "little") == len(file.head) - 8
            header = json.loads(file.head[8:])
            offsets = [v["data_offsets"] for k, v in header.items() if k != "__metadata__"]
            assert offsets == sorted(offsets)


def test_torch_loads_a_network_by_its_own_names(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    spec = NetworkSpec(input=(6,), layers=(DenseSpec(units=4), DenseSpec(units=3)), loss="softmax")
    rows = tensors(spec)
    whole = vector(3, rows[-1].range.stop)
    with Writer(tmp_path, 1, tensors=rows, vectors=["parameters"]) as writer:
        writer.put("parameters", 0, whole)
        path = writer.finish(facts())
    assert not list(path.glob("optimizer*"))
    found = safetensors.numpy.load_file(path / "model-00001-of-00001.safetensors")
    layer = torch.nn.Linear(6, 4)
    layer.load_state_dict({k: torch.from_numpy(found[f"layers.0.{k}"]) for k in ("weight", "bias")})
    x = vector(4, 6)
    expected = found["layers.0.weight"] @ x + found["layers.0.bias"]
    np.testing.assert_allclose(layer(torch.from_numpy(x)).detach().numpy(), expected, atol=1e-6)
    assert np.array_equal(found["layers.0.weight"], whole[:24].reshape(4, 6))


def test_a_transposed_array_is_read_back_equal(tmp_path: Path) -> None:
    """safetensors#825: the library's own writer takes the memory as it lies."""
    weights = vector(0, 24).reshape(6, 4).T
    assert not weights.flags.c_contiguous
    with Writer(tmp_path, 1, tensors=TABLE[:1], vectors=["parameters"]) as writer:
        writer.put("parameters", 0, weights)
        path = writer.finish(facts())
    found = safetensors.numpy.load_file(path / "model-00001-of-00001.safetensors")
    assert np.array_equal(found["layers.0.weight"], weights)


def test_steps_of_memory_and_read_only_arrays_are_taken(tmp_path: Path) -> None:
    strided = vector(0, 2 * N)[::2]
    strided.flags.writeable = False
    with Writer(tmp_path, 1, tensors=TABLE, vectors=["parameters"]) as writer:
        writer.put("parameters", 0, strided)
        path = writer.finish(facts())
    assert np.array_equal(open_checkpoint(path).read("parameters", Range(0, N)), strided)


@pytest.mark.parametrize("shards", [1, 3, 5, N + 4])
def test_saved_by_two_shards_read_by_any_number(tmp_path: Path, shards: int) -> None:
    """DeepSpeed#2898: the files do not show who wrote them."""
    whole = vector(0)
    one, two = tmp_path / "one", tmp_path / "two"
    save(one, 1)
    with Writer(two, 1, tensors=TABLE, vectors=VECTORS) as writer:
        for span in reversed(Range(0, N).split(2)):
            for number, name in enumerate(VECTORS):
                writer.put(name, span.start, vector(number)[span.slice()])
        path = writer.finish(facts())
    for file in names(path):
        assert (one / path.name / file).read_bytes() == (path / file).read_bytes()
    saved = open_checkpoint(path, verify=False)
    parts = [saved.read("parameters", span) for span in Range(0, N).split(shards)]
    assert np.concatenate(parts).tobytes() == whole.tobytes()


# ---------------------------------------------------------------------------------- manifest


def test_the_manifest_says_all_that_a_resume_needs(tmp_path: Path) -> None:
    """reliability.md G18: parameters, update count and positions from one manifest."""
    rows = (ReplicaRow.at(0, Position(600, 3, 17)), ReplicaRow.at(1, Position(590, 3, 7)))
    extra = {"note": "é", "nested": [1, {"a": None}]}
    with Writer(tmp_path, 1190, tensors=TABLE, vectors=VECTORS) as writer:
        for name in VECTORS:
            writer.put(name, 0, vector(0))
        path = writer.finish(facts(rows=rows, replicas=2, extra=extra))
    manifest = open_checkpoint(path).manifest
    assert manifest.step == 1190
    assert manifest.updates == 77
    assert [row.position for row in manifest.rows] == [Position(600, 3, 17), Position(590, 3, 7)]
    assert (manifest.dbctl, manifest.run, manifest.extra) == (__version__, "run-é", extra)
    assert [(t.name, t.shape, t.range) for t in manifest.tensors] == [tuple(row) for row in TABLE]
    plain = json.loads((path / "manifest.json").read_text("utf-8"))
    assert plain["format"] == 1
    assert {entry["name"] for entry in plain["files"]} == set(names(path)) - {"manifest.json"}


def test_newer_fields_are_left_out_and_another_version_is_refused(tmp_path: Path) -> None:
    manifest = open_checkpoint(save(tmp_path, 3)).manifest
    body = seal(manifest).partition(b",")[2]
    newer = body.replace(b'"format":', b'"of_tomorrow": 1, "format":')
    assert unseal(reseal(newer)) == manifest
    other = body.replace(b'"format": 1', b'"format": 2')
    with pytest.raises(ValueError, match="format version 2, expected 1: use the dbctl that wrote"):
        unseal(reseal(other))
    with pytest.raises(ValueError, match="`int`, got `str`"):
        unseal(reseal(body.replace(b'"updates": 77', b'"updates": "77"')))


def reseal(body: bytes) -> bytes:
    return b'{"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'",' + body


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (b'"model-00001-of-00001', b'"../../model-00001-of-1', "not those of its tensors"),
        (b'"layers.0.weight"', b'"../weight"', "no name of a tensor"),
        (b'"layers.0.weight"', b'"layers.1.weight"', "two tensors are called"),
        (b'"start": 24\n', b'"start": 25\n', "expected at"),
        (b'"start": 24\n', b'"start": -1\n', "`int` >= 0"),
        (b'"step": 3,', b'"step": 4,', "of step 4"),
        (b'"dtype": "float32",\n "cut', b'"dtype": "object",\n "cut', "dtype 'object'"),
        (b'"sum"', b'"parameters"', "vectors"),
        (b'"cut_bytes": 1073741824', b'"cut_bytes": 0', "cut at 0 bytes"),
    ],
)
def test_a_manifest_that_asks_for_anything_odd_is_refused(
    tmp_path: Path, old: bytes, new: bytes, match: str
) -> None:
    path = save(tmp_path, 3)
    body = (path / "manifest.json").read_bytes().partition(b",")[2]
    assert old in body
    (path / "manifest.json").write_bytes(reseal(body.replace(old, new)))
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(path)


def test_shapes_are_compared_with_the_size_before_memory_is_asked_for(tmp_path: Path) -> None:
    huge = table([(1 << 40, 1 << 20)])
    layout = plan_layout(huge, ["parameters"], dtype="float32", cut_bytes=1 << 30)
    assert layout.files[0].size_bytes > 1 << 60
    path = save(tmp_path, 3)
    os.truncate(path / "model-00001-of-00001.safetensors", 100)
    with pytest.raises(CheckpointError, match=r"model-00001.*: is cut or damaged: 100 bytes, exp"):
        open_checkpoint(path, verify=False)


# ------------------------------------------------------------------------------ another model


def changed(name: str, shape: tuple[int, ...]) -> list[Row]:
    return [row._replace(shape=shape) if row.name == name else row for row in TABLE]


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        (
            changed("layers.1.weight", (5, 4)),
            r"layers\.1\.weight is \(3, 4\) in the checkpoint and \(5, 4\) in the experiment; give",
        ),
        (TABLE[:2], r"layers\.1\.weight is \(3, 4\) in .* and missing in .* \(and 1 more tensors"),
        ([*TABLE[1::-1], *TABLE[2:]], r"layers\.0\.weight stands .* where layers\.0\.bias stands"),
    ],
)
def test_a_changed_layer_is_one_message_with_both_shapes(
    tmp_path: Path, rows: list[Row], match: str
) -> None:
    """DALLE-pytorch#211."""
    saved = open_checkpoint(save(tmp_path, 1))
    saved.check(TABLE)
    with pytest.raises(CheckpointError, match=match) as caught:
        saved.check(rows)
    assert len(str(caught.value).splitlines()) == 1


def test_a_vector_of_another_rule_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no vector 'mean', only parameters, sum"):
        open_checkpoint(save(tmp_path, 1)).read("mean", Range(0, 1))


# -------------------------------------------------------------------------- what is not whole


@pytest.mark.parametrize(
    ("puts", "match"),
    [
        ([(0, 10), (11, N)], r"elements \[10, 11\) of vector 'parameters' are missing"),
        ([(0, 10), (9, N)], r"elements \[9, 10\) of vector 'parameters' came twice"),
        ([(0, N), (3, 5)], r"elements \[3, 5\) of vector 'parameters' came twice"),
        ([(0, N - 1)], rf"elements \[{N - 1}, {N}\) .* are missing"),
        ([], rf"elements \[0, {N}\) .* are missing"),
    ],
)
def test_gaps_and_overlaps_save_nothing(
    tmp_path: Path, puts: list[tuple[int, int]], match: str
) -> None:
    with Writer(tmp_path, 1, tensors=TABLE, vectors=VECTORS) as writer:
        writer.put("sum", 0, vector(0))
        for start, stop in puts:
            writer.put("parameters", start, vector(0)[start:stop])
        with pytest.raises(CheckpointError, match=match):
            writer.finish(facts())
    assert names(tmp_path) == []


@pytest.mark.parametrize(("name", "start"), [("parameters", N - 2), ("parameters", -1), ("x", 0)])
def test_what_no_vector_has_is_refused(tmp_path: Path, name: str, start: int) -> None:
    writer = Writer(tmp_path, 1, tensors=TABLE, vectors=VECTORS)
    with pytest.raises(CheckpointError, match=rf"got elements \[{start}, {start + 3}\)"):
        writer.put(name, start, vector(0)[:3])
    assert names(tmp_path) == []


def test_leaving_without_finish_leaves_nothing(tmp_path: Path) -> None:
    with Writer(tmp_path, 1, tensors=TABLE, vectors=VECTORS):
        assert [name[:20] for name in names(tmp_path)] == [".tmp-step-000000001-"]
    assert names(tmp_path) == []


def test_facts_that_could_not_be_read_back_are_never_saved(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 1, tensors=TABLE, vectors=["parameters"])
    writer.put("parameters", 0, vector(0))
    with pytest.raises(ValueError, match="seconds"):
        writer.finish(facts(seconds=float("nan")))
    assert names(tmp_path) == []


# ------------------------------------------------------------------------ which ones are kept


def steps(directory: Path) -> list[int | None]:
    return [step_of(path.name) for path in list_checkpoints(directory)]


def test_the_oldest_beyond_keep_go(tmp_path: Path) -> None:
    for step in (100, 200, 300, 400):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-000000300", "step-000000400"]
    assert steps(tmp_path) == [400, 300]


def test_steps_beyond_nine_digits_stay_in_order(tmp_path: Path) -> None:
    for step in (999_999_999, 1_000_000_000, 0):
        save(tmp_path, step, keep=9)
    assert steps(tmp_path) == [1_000_000_000, 999_999_999, 0]
    (tmp_path / "step-0000000001").mkdir()  # no name that we give
    (tmp_path / "step-1").mkdir()
    assert len(steps(tmp_path)) == 3


def test_a_step_of_a_future_that_was_given_up_goes_first_and_never_the_new_one(
    tmp_path: Path,
) -> None:
    for step in (100, 200, 300):
        save(tmp_path, step)
    save(tmp_path, 250, keep=3)
    assert steps(tmp_path) == [250, 200, 100]
    save(tmp_path, 150, keep=1)
    assert steps(tmp_path) == [150]


def test_the_same_step_again_is_replaced_whole(tmp_path: Path) -> None:
    save(tmp_path, 100, seed=1)
    path = save(tmp_path, 100, seed=2)
    assert names(tmp_path) == ["step-000000100"]
    assert np.array_equal(open_checkpoint(path).read("parameters", Range(0, N)), vector(2))


def test_what_killed_writers_left_is_cleaned(tmp_path: Path) -> None:
    save(tmp_path, 100)
    save(tmp_path, 200)
    for name in (".tmp-step-000000300-ab", ".tmp-gone-ab", ".old-step-000000100"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x")
    (tmp_path / "step-000000200").rename(tmp_path / ".old-step-000000200")
    saved, warnings = newest_good(tmp_path)
    assert (saved.manifest.step, warnings) == (200, [])
    clean(tmp_path)
    assert names(tmp_path) == ["step-000000100", "step-000000200"]
    clean(tmp_path / "none")


def test_of_a_checkpoint_moved_elsewhere_only_the_link_goes(tmp_path: Path) -> None:
    """Else it stayed under a hidden name, and no later run could clean up."""
    home, away = tmp_path / "checkpoints", tmp_path / "away"
    save(home, 100).rename(away)
    (home / "step-000000100").symlink_to(away)
    (home / ".tmp-gone-cd").symlink_to(away)
    (home / ".tmp-gone-ef").write_bytes(b"x")
    assert newest_good(home)[0].manifest.step == 100
    clean(home)
    save(home, 200, keep=1)
    assert names(home) == ["step-000000200"]
    assert {file.name for file in away.iterdir()} >= {"manifest.json"}
