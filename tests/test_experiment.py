"""The experiment file: what is taken, what is refused, and what the refusal says."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dbctl.errors import ExperimentError, Problem
from dbctl.experiment.read import load, parse
from dbctl.experiment.resolve import from_json, to_json, to_yaml
from dbctl.experiment.schema import schema
from dbctl.experiment.specs import (
    CheckpointSpec,
    CsvSource,
    DataSpec,
    DigitsSource,
    DownpourSpec,
    EvaluateSpec,
    Every,
    Experiment,
    IdxSource,
    LocalCluster,
    NpySource,
    NpzSource,
    PartitionSpec,
    SgdSpec,
    StopSpec,
    SyntheticSource,
    Warmstart,
)
from dbctl.experiment.tree import MAX_BYTES, resolve_scalar
from dbctl.model.layers.conv2d import Conv2dSpec
from dbctl.model.layers.dense import DenseSpec
from dbctl.model.layers.local2d import Local2dSpec
from dbctl.model.layers.pool import PoolSpec
from dbctl.model.network import NetworkSpec
from dbctl.optim.rules import AdagradRuleSpec, AdamRuleSpec, MomentumRuleSpec, SgdRuleSpec
from dbctl.optim.schedules import ScheduleSpec

EXAMPLE = """\
version: 1
name: digits-downpour
seed: 7
data:
  train: {source: digits, split: train}      # digits ships with dbctl
  test:  {source: digits, split: test}
network:
  input: [8, 8, 1]                           # height, width, channels
  layers:
    - {type: dense, units: 256, activation: sigmoid}
    - {type: dense, units: 10}
  loss: softmax                              # or logistic, squared
partition: {count: 1}
replicas: 2
shards: 2
optimizer:
  type: downpour
  batch_size: 32
  rule: {type: adagrad, rate: 0.05}
  n_fetch: 1
  n_push: 1
  warmstart: {steps: 100}
stop: {epochs: 20}
evaluate: {every: 1 epoch}                   # or off
checkpoint: {every: 30 s, keep: 3}
cluster: {launcher: local}
"""

EXAMPLE_SPEC = Experiment(
    version=1,
    name="digits-downpour",
    seed=7,
    data=DataSpec(train=DigitsSource(split="train"), test=DigitsSource(split="test")),
    network=NetworkSpec(
        input=(8, 8, 1),
        layers=(DenseSpec(units=256, activation="sigmoid"), DenseSpec(units=10)),
        loss="softmax",
    ),
    partition=PartitionSpec(count=1),
    replicas=2,
    shards=2,
    optimizer=DownpourSpec(
        batch_size=32,
        rule=AdagradRuleSpec(rate=0.05),
        warmstart=Warmstart(steps=100),
        overlap=False,  # all on one host
    ),
    stop=StopSpec(epochs=20),
    evaluate=EvaluateSpec(every=Every(amount=1.0, unit="epochs")),
    checkpoint=CheckpointSpec(every=Every(amount=30.0, unit="seconds"), keep=3),
    cluster=LocalCluster(),
)


def problems(text: str, *overrides: str) -> list[Problem]:
    """Everything wrong with `text`; [] where it is good."""
    try:
        parse(text, file="x.yaml", overrides=overrides)
    except ExperimentError as error:
        return error.problems
    return []


def only(text: str, *overrides: str) -> str:
    """The one problem of `text`, as it is printed."""
    found = problems(text, *overrides)
    assert len(found) == 1, [str(one) for one in found]
    return str(found[0])


def changed(old: str, new: str) -> str:
    assert EXAMPLE.count(old) == 1, old
    return EXAMPLE.replace(old, new)


# ----------------------------------------------------------------------------- what is taken


def test_the_example_of_the_design() -> None:
    assert parse(EXAMPLE) == EXAMPLE_SPEC


def test_the_shortest_file_takes_every_default() -> None:
    text = """
version: 1
name: short
data: {train: {source: digits, split: train}}
network: {input: [64], layers: [{type: dense, units: 10}], loss: softmax}
optimizer: {type: sgd, batch_size: 8, rule: {type: sgd, rate: 1}}
stop: {steps: 5}
"""
    experiment = parse(text)
    assert experiment.replicas == experiment.shards == experiment.min_replicas == 1
    assert experiment.evaluate == EvaluateSpec(every=None)
    assert experiment.checkpoint == CheckpointSpec()
    assert experiment.optimizer == SgdSpec(batch_size=8, rule=SgdRuleSpec(rate=1.0))


@pytest.mark.parametrize(
    ("settings", "overlap"),
    [
        ((), False),
        (("optimizer.overlap=null",), False),
        (("cluster={launcher: ssh, hosts: [{name: a}]}",), False),
        (("cluster={launcher: ssh, hosts: [{name: a}, {name: b}]}",), True),
        (("optimizer.overlap=true",), True),
        (
            ("optimizer.overlap=false", "cluster={launcher: ssh, hosts: [{name: a}, {name: b}]}"),
            False,
        ),
    ],
)
def test_workers_overlap_where_the_file_says_so_and_else_between_hosts(
    settings: tuple[str, ...], overlap: bool
) -> None:
    optimizer = parse(EXAMPLE, overrides=settings).optimizer
    assert isinstance(optimizer, DownpourSpec)
    assert optimizer.overlap is overlap


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("1 step", Every(amount=1.0, unit="steps")),
        ("200 steps", Every(amount=200.0, unit="steps")),
        ("1 epoch", Every(amount=1.0, unit="epochs")),
        ("3 epochs", Every(amount=3.0, unit="epochs")),
        ("30 s", Every(amount=30.0, unit="seconds")),
        ("0.5 s", Every(amount=0.5, unit="seconds")),
        ("2 min", Every(amount=120.0, unit="seconds")),
        ("2min", Every(amount=120.0, unit="seconds")),
        ('"30 s"', Every(amount=30.0, unit="seconds")),
        ("off", None),
    ],
)
def test_every(text: str, every: Every | None) -> None:
    assert parse(changed("every: 30 s", f"every: {text}")).checkpoint.every == every


@pytest.mark.parametrize(
    "text",
    ["30", "0 s", "-1 s", "1.5 steps", "0.5 epochs", "s", "30 h", "1e999 s", "false", "null", "[]"],
)
def test_what_every_refuses(text: str) -> None:
    message = only(changed("every: 30 s", f"every: {text}"))
    assert message.startswith("x.yaml:25:21: checkpoint.every: expected `N steps`, `N epochs`")


def test_evaluate_off() -> None:
    assert parse(changed("{every: 1 epoch}", "off")).evaluate == EvaluateSpec(every=None)
    assert parse(changed("{every: 1 epoch}", "{every: off}")).evaluate.every is None
    assert "found `false`" in only(changed("{every: 1 epoch}", "false"))


def test_every_source(tmp_path: Path) -> None:
    file = tmp_path / "ünï.yaml"
    sources = {
        "{source: idx, images: a/i.gz, labels: /l}": IdxSource(
            images=str(tmp_path / "a/i.gz"), labels="/l"
        ),
        "{source: npz, path: ../d.npz, x: x, y: y}": NpzSource(
            path=str(tmp_path) + "/../d.npz", x="x", y="y"
        ),
        "{source: npy, x: ä.npy, y: y.npy, rows: 5}": NpySource(
            x=str(tmp_path / "ä.npy"), y=str(tmp_path / "y.npy"), rows=5
        ),
        "{source: csv, path: d.csv, label: 4, standardize: true}": CsvSource(
            path=str(tmp_path / "d.csv"), label=4, standardize=True
        ),
        "{source: csv, path: d.csv, label: kind, scale: 2}": CsvSource(
            path=str(tmp_path / "d.csv"), label="kind", scale=2.0
        ),
        "{source: synthetic, rows: 9, features: 2, classes: 3}": SyntheticSource(
            rows=9, features=2, classes=3
        ),
    }
    for text, spec in sources.items():
        alone = changed("  test:  {source: digits, split: test}\n", "").replace("1 epoch", "off")
        file.write_text(alone.replace("{source: digits, split: train}", text), encoding="utf-8")
        assert load(str(file)).data.train == spec


def test_a_rate_is_a_number_or_a_schedule() -> None:
    schedule = "{type: step, initial: 1, every: 100, factor: .5}"
    optimizer = parse(changed("rate: 0.05", f"rate: {schedule}")).optimizer
    expected = ScheduleSpec(type="step", initial=1.0, every=100, factor=0.5)
    assert optimizer.rule == AdagradRuleSpec(rate=expected)
    message = only(changed("rate: 0.05", "rate: {type: step, initial: 1, evry: 100, factor: 1}"))
    assert message.endswith("optimizer.rule.rate.evry: unknown key; did you mean `every`?")


@pytest.mark.parametrize(
    "text", ["\ufeff" + EXAMPLE, EXAMPLE.replace("\n", "\r\n"), "---\n" + EXAMPLE]
)
def test_byte_order_mark_crlf_and_document_mark(text: str, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes(text.encode())
    assert load(str(file)) == EXAMPLE_SPEC


@pytest.mark.parametrize("name", ["größe", "数字", "a b", "100%", "🙂"])
def test_names_need_not_be_ascii(name: str) -> None:
    assert parse(changed("digits-downpour", name)).name == name


# ----------------------------------------------------------------------------- scalars


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1e3", 1e3),
        ("1E3", 1e3),
        (".5", 0.5),
        ("5.", 5.0),
        ("+.5", 0.5),
        ("-0", 0),
        ("0o17", 15),
        ("0x1F", 31),
        ("017", 17),
        ("0b11", "0b11"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2001-01-01", "2001-01-01"),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("No", "No"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("tRUE", "tRUE"),
        ("null", None),
        ("~", None),
        ("", None),
        ("nan", "nan"),
        (".", "."),
        ("e3", "e3"),
        ("1e", "1e"),
        ("٣", "٣"),
        ("-.inf", -float("inf")),
    ],
)
def test_core_schema_of_yaml_12(text: str, value: Any) -> None:
    found = resolve_scalar(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1e-3", 1e-3), ("1e3", 1e3), (".5", 0.5), ("1", 1.0), ("0x10", 16.0), ("+1.5", 1.5)],
)
def test_rates_that_are_numbers(text: str, rate: float) -> None:
    """cases: `rate: 1e-3` is a number (LlamaFactory#4014)."""
    found = parse(changed("rate: 0.05", f"rate: {text}")).optimizer.rule.rate
    assert found == rate
    assert type(found) is float


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('"0.1"', 'found the text "0.1"; write it without quotes'),
        ("'0.1'", 'found the text "0.1"; write it without quotes'),
        ("true", "found `true`"),
        ("null", "found nothing (null)"),
        ("", "found nothing (null)"),
        (".nan", "found `.nan`"),
        (".inf", "found `.inf`"),
        ("1e999", "found `1e999`"),
        ("0", "found `0`"),
        ("-1", "found `-1`"),
        ("1e-999", "found `1e-999`"),
        ("1_0", "found the text `1_0`"),
        ("1:30", "found the text `1:30`"),
        ("on", "found the text `on`"),
        ("[0.1]", "found a list of 1"),
    ],
)
def test_rates_that_are_none(text: str, said: str) -> None:
    message = only(changed("rate: 0.05", f"rate: {text}"))
    assert "optimizer.rule.rate: expected a number greater than 0" in message
    assert said in message


def test_a_number_of_thousands_of_digits() -> None:
    for key in ("replicas: 2", "shards: 2"):
        text = key[:-1] + "9" * 5000
        assert "expected a number of at most 100 characters, found 5000" in only(changed(key, text))
    big = "9" * 20
    assert f"found `{big}`" in only(changed("replicas: 2", f"replicas: {big}"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2.0", "found `2.0`; write `2`"),
        ("1e3", "found `1e3`; write `1000`"),
        ("2.5", "found `2.5`"),
        ("true", "found `true`"),
        ('"2"', 'found the text "2"; write it without quotes'),
        ("0", "found `0`"),
        ("-1", "found `-1`"),
        ("{a: 1}", "found a mapping"),
    ],
)
def test_counts(text: str, said: str) -> None:
    message = only(changed("replicas: 2", f"replicas: {text}"))
    assert message == f"x.yaml:14:11: replicas: expected a whole number of at least 1, {said}"


def test_flags_and_texts() -> None:
    downpour = EXAMPLE.replace("n_fetch: 1", "overlap: yes")
    message = "optimizer.overlap: expected true or false, found the text `yes`; write `true`"
    assert message in only(downpour)
    assert "expected true or false, found `1`" in only(EXAMPLE.replace("n_fetch: 1", "overlap: 1"))
    assert "name: expected text" in only(changed("digits-downpour", "123"))
    assert 'found `123`; write "123" in quotes' in only(changed("digits-downpour", "123"))
    assert parse(changed("digits-downpour", '"123"')).name == "123"
    assert parse(changed("digits-downpour", "on")).name == "on"


@pytest.mark.parametrize("text", ["true", "1.0", '"1"', "2"])
def test_version(text: str) -> None:
    assert "version: expected `1`, found" in only(changed("version: 1", f"version: {text}"))


# ----------------------------------------------------------------------------- keys

REQUIRED = [
    ("version: 1\n", "version"),
    ("name: digits-downpour\n", "name"),
    ("  train: {source: digits, split: train}      # digits ships with dbctl\n", "data.train"),
    (", split: train", "data.train.split"),
    ("  input: [8, 8, 1]                           # height, width, channels\n", "network.input"),
    ("  loss: softmax                              # or logistic, squared\n", "network.loss"),
    (", units: 256", "network.layers.0.units"),
    ("type: dense, units: 10", "network.layers.1.type"),
    ("  type: downpour\n", "optimizer.type"),
    ("  batch_size: 32\n", "optimizer.batch_size"),
    ("  rule: {type: adagrad, rate: 0.05}\n", "optimizer.rule"),
    ("type: adagrad, ", "optimizer.rule.type"),
    (", rate: 0.05", "optimizer.rule.rate"),
    ("steps: 100", "optimizer.warmstart.steps"),
    ("stop: {epochs: 20}\n", "stop"),
    ("launcher: local", "cluster.launcher"),
]


@pytest.mark.parametrize(("old", "key"), REQUIRED)
def test_each_required_key_removed(old: str, key: str) -> None:
    message = only(changed(old, "units: 10" if old == "type: dense, units: 10" else ""))
    assert re.match(
        rf"x\.yaml:\d+:\d+: {re.escape(key)}: is required and missing: expected", message
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("replicas: 2", "replcas: 2", "14:1: replcas: unknown key; did you mean `replicas`?"),
        ("replicas: 2", "min-replicas: 2", "unknown key; did you mean `min_replicas`?"),
        (
            "  batch_size: 32",
            "  batchsize: 32",
            "18:3: optimizer.batchsize: unknown key; did you mean `batch_size`?",
        ),
        (
            "replicas: 2",
            "rate: 2",
            "14:1: rate: unknown key here; it belongs under `network.layers` or under "
            "`optimizer.rule`",
        ),
        ("replicas: 2", "n_push: 2", "unknown key here; it belongs under `optimizer`"),
        (
            "  n_push: 1",
            "  shards: 1",
            "optimizer.shards: unknown key here; it belongs at the top level",
        ),
        # `unit` is a key of `every`, but a key of the same mapping is nearer.
        ("units: 10", "unit: 10", "unknown key; did you mean `units`?"),
        ("replicas: 2", "batchsize: 2", "unknown key; did you mean `optimizer.batch_size`?"),
        ("keep: 3", "zzz: 3", "checkpoint.zzz: unknown key; `checkpoint` takes every, keep"),
        ("replicas: 2", "zzz: 3", "unknown key; the top level takes version, name, seed"),
        (
            "rate: 0.05",
            "rate: 0.05, momentum: 0.9",
            "is a key of type momentum, not of type adagrad",
        ),
        (
            "rate: 0.05",
            "rate: 0.05, momentun: 0.9",
            "unknown key; `momentum` is a key of type momentum, not of type adagrad",
        ),
        ("replicas: 2", "1: 2", "14:1: expected the name of a key, found `1`"),
        ("replicas: 2", "[a]: 2", "14:1: expected the name of a key, found a collection"),
        ("replicas: 2", "<<: {replicas: 2}", "merge keys are not part of YAML 1.2"),
        ("replicas: 2", '"a\\nb\\e[31m": 2', "14:1: a\\nb\\x1b[31m: unknown key"),
    ],
)
def test_keys_that_are_not_known(old: str, new: str, said: str) -> None:
    """cases: `replcas: 4`, a key at the wrong level (unsloth#10452)."""
    assert said in only(changed(old, new))


def test_duplicate_keys_tell_both_lines() -> None:
    """cases: two `rate:` (pyyaml#165)."""
    message = only(changed("seed: 7", "seed: 7\nname: other"))
    assert message == "x.yaml:4:1: name: duplicate key: lines 2 and 4; remove one"
    assert "duplicate key" in only(changed("rate: 0.05", "rate: 0.05, rate: 0.1"))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "replicas: 2",
            "replicas: &n 2",
            "14:11: replicas: expected the value itself, found the anchor",
        ),
        ("replicas: 2", "replicas: *n", "found the anchor or alias `n`; write it out"),
        ("replicas: 2", "replicas: !!int 2", "found the tag `tag:yaml.org,2002:int`; remove it"),
        ("replicas: 2", "replicas: !!python/name:os.system 2", "found the tag"),
        ("replicas: 2", "replicas: ! 2", "found the tag `!`; remove it"),
        (
            "cluster: {launcher: local}",
            "cluster: {launcher: local}\n---\nversion: 1",
            "27:1: expected one document, found a second",
        ),
        ("version: 1", "%YAML 1.1\n---\nversion: 1", "expected YAML 1.2, found another version"),
        ("seed: 7", "seed: 7\n\treplicas: 2", "expected spaces, found a tab"),
        ("seed: 7", "seed: [7", "not YAML"),
        ("seed: 7", "seed: \x007", "found the control character U+0000"),
        ("digits-downpour", '"\\ud800"', "found half of a surrogate pair"),
        ("seed: 7", "seed: " + "[" * 100_000, "expected at most 20 levels"),
        ("seed: 7", "seed: [" + "1," * 30_000 + "]", "expected at most 5000 values"),
    ],
)
def test_yaml_that_is_refused(old: str, new: str, said: str) -> None:
    assert said in only(changed(old, new))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "found nothing: the file is empty"),
        ("# only a comment\n", "found nothing: the file is empty"),
        ("---\n", "found nothing (null)"),
        (
            "- a\n",
            "x.yaml:1:1: expected a mapping that starts with `version: 1`, found a list of 1",
        ),
        ("hello", "found the text `hello`"),
    ],
)
def test_not_a_mapping(text: str, said: str) -> None:
    assert said in only(text)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"version: 1\nname: \xe9\n", ":2:7: expected UTF-8 text, found byte 0xe9"),
        ("version: 1".encode("utf-16"), ":1:1: expected UTF-8 text, found byte 0xff"),
        (b"#" * (MAX_BYTES + 1), f"expected an experiment file of at most {MAX_BYTES} bytes"),
    ],
)
def test_bytes_that_are_refused(raw: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes(raw)
    with pytest.raises(ExperimentError) as caught:
        load(str(file))
    assert said in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, said in [("no.yaml", "No such file"), ("", "Is a directory"), ("a\0", "null")]:
        with pytest.raises(ExperimentError, match=said):
            load(f"{tmp_path}/{path}")


def test_every_problem_at_once_in_the_order_of_lines() -> None:
    text = (
        EXAMPLE.replace("seed: 7", "seed: -1")
        .replace("[8, 8, 1]", '[8, 0, "1"]')
        .replace("sigmoid", "sigmod")
        .replace("replicas: 2", "replcas: 2")
        .replace("type: downpour", "type: sgd")
        .replace("epochs: 20", "epochs: on")
        .replace("keep: 3", "keep: true")
    )
    found = problems(text)
    assert [(one.line, one.key) for one in found] == [
        (3, "seed"),
        (8, "network.input.1"),
        (8, "network.input.2"),
        (10, "network.layers.0.activation"),
        (14, "replcas"),
        (20, "optimizer.n_fetch"),
        (21, "optimizer.n_push"),
        (22, "optimizer.warmstart"),
        (23, "stop.epochs"),
        (25, "checkpoint.keep"),
    ]
    assert "did you mean `sigmoid`?" in str(found[3])
    assert "is a key of type downpour, not of type sgd" in str(found[5])


def test_the_line_search_needs_c1_below_c2() -> None:
    """c2 that is not given is the method's own."""
    start, stop = EXAMPLE.index("optimizer:"), EXAMPLE.index("stop:")

    def with_method(name: str) -> str:
        search = "line_search: {c1: 0.2}"
        optimizer = f"optimizer: {{type: sandblaster, method: {name}, {search}}}\n"
        return EXAMPLE[:start] + optimizer + EXAMPLE[stop:]

    parse(with_method("lbfgs"))
    message = only(with_method("conjugate_gradient"))
    assert "optimizer.line_search.c1: expected less than c2, 0.1, found 0.2" in message


@pytest.mark.parametrize("kind", ["sandblast", "sgdd", "[]", "1"])
def test_a_wrong_type_lists_those_that_exist(kind: str) -> None:
    message = only(changed("type: downpour", f"type: {kind}"))
    assert "optimizer.type: expected one of sgd, downpour, sandblaster, found" in message


def test_a_wrong_launcher_or_layer() -> None:
    message = only(changed("launcher: local", "launcher: slurm, hosts: [a]"))
    assert "cluster.launcher: expected one of local, ssh, found the text `slurm`" in message
    message = only(changed("type: dense, units: 10", "type: dens, units: 10"))
    assert "network.layers.1.type: expected" in message
    assert "did you mean `dense`?" in message


def test_empty_lists() -> None:
    text = EXAMPLE.replace("[8, 8, 1]", "[]")
    assert "network.input: expected a list of at least one" in only(text)
    lines = EXAMPLE.splitlines(keepends=True)
    lines[8:11] = ["  layers: []\n"]
    assert "network.layers: expected a list of at least one" in only("".join(lines))


# ----------------------------------------------------------------------------- between keys

CROSS = [
    ("stop: {epochs: 20}", "stop: {}", "23:7: stop: expected at least one of epochs, steps"),
    ("stop: {epochs: 20}", "stop: {epochs: null}", "stop: expected at least one of"),
    ("replicas: 2", "replicas: 2\nmin_replicas: 3", "15:15: min_replicas: expected at most"),
    (
        "{type: dense, units: 10}",
        "{type: dense, units: 1}",
        "network.layers.1.units: expected at least 2 in the last layer",
    ),
    (
        "units: 10}",
        "units: 10, activation: relu}",
        "network.layers.1.activation: expected linear in the last layer",
    ),
    (
        "rate: 0.05",
        "rate: {type: step, initial: 1, every: 9}",
        "optimizer.rule.rate.factor: is required by type step",
    ),
    (
        "rate: 0.05",
        "rate: {type: inverse_time, initial: 1, every: 9, factor: 2}",
        "19:82: optimizer.rule.rate.factor: inverse_time",
    ),
    (
        "  test:  {source: digits, split: test}\n",
        "  test:  {source: digits, split: test, scale: 2, standardize: true}\n",
        "data.test.standardize: expected scale or standardize",
    ),
    ("  test:  {source: digits, split: test}\n", "", "evaluate: needs data.test"),
    ("digits-downpour", "a/b", "2:7: name: expected a name that can be a directory's, found a `/`"),
    ("digits-downpour", ".hidden", "name: expected a name that does not start with a dot"),
    ("digits-downpour", "..", "name: expected a name that does not start with a dot"),
    ("digits-downpour", '"a "', "nor start or end with a space"),
    ("digits-downpour", '"a\\0"', "found the character U+0000"),
    ("digits-downpour", '"a\\n"', "found the character U+000A"),
    ("digits-downpour", '""', "name: expected text of 1 to 100 characters"),
    ("digits-downpour", "x" * 101, "name: expected text of 1 to 100 characters"),
    ("digits-downpour", "字" * 100, "name: expected at most 255 bytes of UTF-8, found 300"),
]


@pytest.mark.parametrize(("old", "new", "said"), CROSS)
def test_one_key_against_another(old: str, new: str, said: str) -> None:
    assert said in only(changed(old, new))


FIRST_LAYER = [
    (
        "{type: pool, kind: max, size: [2, 9]}",
        "network.layers.0.size: expected a window within the 8 columns below, found 9: "
        "(8 - 9) / 9 + 1 is less than 1",
    ),
    (
        "{type: pool, kind: mean, size: 9, stride: 4}",
        "network.layers.0.size: expected a window within the 8 rows below, found 9: "
        "(8 - 9) / 4 + 1 is less than 1",
    ),
    (
        "{type: conv2d, maps: 4, kernel: [2, 9]}",
        "network.layers.0.kernel: expected a kernel within the 8 columns below, found 9: "
        "(8 - 9) / 1 + 1 is less than 1; or use padding: same",
    ),
    (
        "{type: local2d, maps: 4, kernel: 10, stride: 5}",
        "network.layers.0.kernel: expected a kernel within the 8 rows below, found 10: "
        "(8 - 10) / 5 + 1 is less than 1; or use padding: same",
    ),
    (
        "{type: local2d, maps: 4, kernel: 3, padding: full}",
        "network.layers.0.padding: expected one of `valid`, `same`",
    ),
    ("{type: conv2d, kernel: 3}", "network.layers.0.maps: is required"),
    ("{type: conv2d, maps: 4, kernel: 0}", "network.layers.0.kernel: expected a whole number"),
    ("{type: lcn, window: 4}", "network.layers.0.window: expected an odd number, found 4; write 3"),
    ("{type: pool, kind: min}", "network.layers.0.kind: expected one of `max`, `mean`, `l2`"),
    ("{type: pool, kind: max, size: 0}", "network.layers.0.size: expected a whole number"),
    ("{type: dropout, rate: 1}", "network.layers.0.rate: expected a number greater than 0"),
]


@pytest.mark.parametrize(("layer", "said"), FIRST_LAYER)
def test_a_layer_that_cannot_stand_on_the_nodes_below(layer: str, said: str) -> None:
    assert said in only(changed("{type: dense, units: 256, activation: sigmoid}", layer))


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (
            "[{type: dense, units: 9}, {type: lcn}, {type: dense, units: 2}]",
            "network.layers.1.type: expected rows, columns and maps below lcn, found [9]",
        ),
        (
            "[{type: dense, units: 9}, {type: pool, kind: l2}, {type: dense, units: 2}]",
            "network.layers.1.type: expected rows, columns and maps below pool, found [9]",
        ),
        (
            "[{type: dense, units: 9}, {type: local2d, maps: 1, kernel: 1}]",
            "network.layers.1.type: expected rows, columns and maps below local2d, found [9]",
        ),
        (
            "[{type: conv2d, maps: 10, kernel: 3}]",
            "network.layers.0.type: expected outputs in one row, found nodes of shape [6, 6, 10]",
        ),
        (
            "[{type: pool, kind: max, size: 5}, {type: pool, kind: max}, {type: dense, units: 2}]",
            "network.layers.1.size: expected a window within the 1 rows below, found 2",
        ),
        ("[{type: lcn}, {type: dropout}]", "network.layers: expected a layer with parameters"),
    ],
)
def test_layers_one_on_another(layers: str, said: str) -> None:
    lines = EXAMPLE.splitlines(keepends=True)
    lines[8:11] = [f"  layers: {layers}\n"]
    assert said in only("".join(lines))


def test_all_layers_together_are_taken_and_written_again() -> None:
    lines = EXAMPLE.splitlines(keepends=True)
    stack = (
        "{type: conv2d, maps: 4, kernel: 5, padding: same}, "
        "{type: local2d, maps: 2, kernel: [2, 3], stride: [2, 1], activation: relu, init: he}, "
        "{type: lcn, window: 3}, {type: pool, kind: max, size: [2, 3], stride: 1}, {type: dropout}"
    )
    lines[8:11] = [f"  layers: [{stack}, {{type: dense, units: 10}}]\n"]
    experiment = parse("".join(lines))
    assert experiment.network.layers[0] == Conv2dSpec(maps=4, kernel=5, padding="same")
    assert experiment.network.layers[1] == Local2dSpec(
        maps=2, kernel=(2, 3), stride=(2, 1), activation="relu", init="he"
    )
    assert experiment.network.layers[3] == PoolSpec(kind="max", size=(2, 3), stride=1)
    assert from_json(to_json(experiment)) == experiment
    assert parse(to_yaml(experiment)) == experiment


def test_both_splits_are_standardized_or_none() -> None:
    text = changed("split: train}", "split: train, standardize: true}")
    assert "6:10: data.test.standardize: expected true as in data.train, found false" in only(text)
    assert problems(text.replace("split: test}", "split: test, standardize: true}")) == []


def test_what_hosts_make_themselves_is_not_sent() -> None:
    text = changed("split: train}", "split: train, ship: true}")
    said = only(text)
    assert "data.train.ship: digits needs none: it is part of dbctl, and so on every host" in said
    made = "{source: synthetic, rows: 9, features: 64, classes: 10, ship: true}"
    said = only(changed("{source: digits, split: train}", made))
    assert "data.train.ship: synthetic needs none: every host makes its rows" in said
    csv = changed("{source: digits, split: train}", "{source: csv, path: d, label: 0, ship: true}")
    assert problems(csv) == []
    assert parse(csv).data.train.ship
    assert not parse(csv).data.test.ship  # type: ignore[union-attr]


def test_test_accuracy_needs_test_data_and_evaluation() -> None:
    text = changed("{epochs: 20}", "{test_accuracy: 0.9}")
    assert problems(text) == []
    off = text.replace("{every: 1 epoch}", "off")
    assert "23:23: stop.test_accuracy: needs evaluate, which is off" in only(off)
    off = off.replace("  test:  {source: digits, split: test}\n", "")
    assert len(problems(off)) == 2


def test_sgd_is_one_replica() -> None:
    lines = [line for line in EXAMPLE.splitlines() if not re.search("n_fetch|n_push|warm", line)]
    text = "\n".join(lines).replace("downpour\n", "sgd\n")
    assert "14:11: replicas: expected 1 with type sgd, found 2" in only(text)
    assert parse(text.replace("replicas: 2", "replicas: 1")).replicas == 1
    assert parse(text.replace("replicas: 2\n", "")).replicas == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("units: 256", "units: &a "),
        ("units: 256", "units: *a"),
        ("type: dense, units: 256", "type: lcn, window: *a"),
        ("type: dense, units: 256", "type: conv2d, maps: 2, kernel: !x "),
    ],
)
def test_a_value_that_is_no_plain_one_is_told_once_and_checked_no_further(
    old: str, new: str
) -> None:
    """The checks of layers once met what stands for a value that could not be read."""
    assert old in EXAMPLE
    with pytest.raises(ExperimentError) as caught:
        parse(EXAMPLE.replace(old, new, 1))
    assert [p.key for p in caught.value.problems if "network.layers.0" in p.key]


def test_checks_between_keys_come_with_the_other_problems() -> None:
    text = EXAMPLE.replace("replicas: 2", "replicas: 2\nmin_replicas: 3").replace(
        "seed: 7", "seed: x"
    )
    assert [one.key for one in problems(text)] == ["seed", "min_replicas"]


# ----------------------------------------------------------------------------- --set


def test_overrides() -> None:
    experiment = parse(
        EXAMPLE,
        overrides=[
            "optimizer.n_push=5",
            "network.layers.0.units=64",
            "stop={steps: 10}",
            "stop.seconds=1e3",
            "name=on",
            "evaluate.every=2 epochs",
            "optimizer.warmstart=null",
            "network.input=[4, 16]",
            "seed=1",
            "seed=2",
        ],
    )
    assert isinstance(experiment.optimizer, DownpourSpec)
    assert experiment.optimizer.n_push == 5
    assert experiment.optimizer.warmstart is None
    assert experiment.network.layers[0].units == 64
    assert experiment.network.input == (4, 16)
    assert experiment.stop == StopSpec(steps=10, seconds=1000.0)
    assert experiment.name == "on"
    assert experiment.evaluate.every == Every(amount=2.0, unit="epochs")
    assert experiment.seed == 2


def test_an_override_makes_the_mappings_on_its_way() -> None:
    text = EXAMPLE.replace("  warmstart: {steps: 100}\n", "").replace("{every: 1 epoch}", "off")
    experiment = parse(text, overrides=["optimizer.warmstart.steps=7", "evaluate.every=5 s"])
    assert isinstance(experiment.optimizer, DownpourSpec)
    assert experiment.optimizer.warmstart == Warmstart(steps=7)
    assert experiment.evaluate.every == Every(amount=5.0, unit="seconds")


def test_an_override_mends_the_file() -> None:
    assert parse(changed("seed: 7", "seed: x"), overrides=["seed=7"]) == EXAMPLE_SPEC


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("replcas=4", "--set replcas=4: replcas: unknown key; did you mean `replicas`?"),
        ("optimizer.n_psh=4", "optimizer.n_psh: unknown key; did you mean `n_push`?"),
        (
            "rate=4",
            "rate: unknown key here; it belongs under `network.layers` or under `optimizer.rule`",
        ),
        ("replicas=x", "--set replicas=x: replicas: expected a whole number of at least 1"),
        ("stop.epochs=", "--set stop.epochs=: stop: expected at least one of epochs"),
        ('replicas="2"', "write it without quotes"),
        ("replicas.x=2", "replicas: expected a whole number of at least 1, found a mapping"),
        (
            "network.layers.2.units=4",
            "expected an index from 0 to 1 of `network.layers`, found `2`",
        ),
        ("network.layers.-1.units=4", "found `-1`"),
        ("network.layers.x=4", "found `x`"),
        ("replicas", "expected KEY.KEY=VALUE"),
        ("=2", "expected KEY.KEY=VALUE"),
        ("a..b=2", "expected KEY.KEY=VALUE"),
        ("replicas=[2", "not YAML"),
        ("stop=epochs: 2", "expected one value, found block YAML"),
        ("replicas=&a 2", "found the anchor or alias `a`"),
        ("seed=#1", "expected a value, found none; quote a `#`"),
        ("seed=", "seed: expected a whole number of at least 0 and at most"),
        ("seed=1\n--- 2", "expected one document"),
    ],
)
def test_overrides_that_are_wrong(override: str, said: str) -> None:
    found = problems(EXAMPLE, override)
    assert said in str(found[0])
    assert str(found[0]).startswith("--set ")
    assert (found[0].line, found[0].column) == (0, 0)


# ----------------------------------------------------------------------------- resolved text

counts = st.integers(1, 2**31)
widths = st.integers(1, 2**14)  # whose products of four stand below the limit of a network
floats = st.floats(1e-300, 1e300)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
files = texts.filter(lambda text: "\0" not in text).map(lambda text: "/" + text)
names = st.one_of(
    st.sampled_from(["on", "null", "1e3", ".5", "0o7", "~", "- a", "a: b", "#", "1:30", "é", "<<"]),
    st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=60),
).filter(lambda name: "/" not in name and not name.startswith(".") and len(name.encode()) < 256)
rates = st.one_of(
    floats,
    st.builds(
        ScheduleSpec,
        type=st.sampled_from(["step", "exponential"]),
        initial=floats,
        every=counts,
        factor=floats,
    ),
    st.builds(ScheduleSpec, type=st.just("inverse_time"), initial=floats, every=counts),
)
fractions = st.floats(0, 0.999)
rules = st.one_of(
    st.builds(SgdRuleSpec, rate=rates),
    st.builds(MomentumRuleSpec, rate=rates, momentum=fractions),
    st.builds(AdagradRuleSpec, rate=rates, warm_up=st.integers(0, 99)),
    st.builds(AdamRuleSpec, rate=rates, beta1=fractions, beta2=fractions, epsilon=floats),
)
rows = st.none() | counts
sources = st.one_of(
    st.builds(DigitsSource, split=st.sampled_from(["train", "test"]), rows=rows),
    st.builds(IdxSource, images=files, labels=files, standardize=st.booleans()),
    st.builds(NpzSource, path=files, x=texts, y=texts, scale=st.none() | floats),
    st.builds(NpySource, x=files, y=files, rows=rows, ship=st.booleans()),
    st.builds(CsvSource, path=files, label=texts | st.integers(0, 99)),
    st.builds(SyntheticSource, rows=counts, features=counts, classes=counts, noise=floats),
)
whole = counts.map(float)
intervals = st.one_of(
    st.builds(Every, amount=whole, unit=st.sampled_from(["steps", "epochs"])),
    st.builds(Every, amount=floats, unit=st.just("seconds")),
)
layers = st.builds(
    DenseSpec,
    units=st.integers(2, 9999),
    init=st.none() | st.sampled_from(["glorot", "he"]) | floats,
)
optimizers = st.builds(
    DownpourSpec,
    batch_size=counts,
    rule=rules,
    n_fetch=counts,
    n_push=counts,
    warmstart=st.none() | st.builds(Warmstart, steps=counts),
    overlap=st.booleans(),
    clip=st.none() | floats,
    l2=st.just(0.0) | floats,
    max_lead=rows,
    slots=st.integers(2, 16),
)
experiments = st.builds(
    Experiment,
    version=st.just(1),
    name=names,
    seed=st.integers(0, 2**63 - 1),
    data=st.builds(DataSpec, train=sources, test=sources).filter(
        lambda data: data.test is not None and data.train.standardize == data.test.standardize
    ),
    network=st.builds(
        NetworkSpec,
        input=st.lists(widths, min_size=1, max_size=3).map(tuple),
        layers=st.lists(layers, min_size=1, max_size=3).map(tuple),
        loss=st.sampled_from(["softmax", "logistic", "squared"]),
    ),
    replicas=counts,
    shards=counts,
    optimizer=optimizers,
    stop=st.builds(StopSpec, epochs=counts, seconds=st.none() | floats),
    evaluate=st.builds(EvaluateSpec, every=st.none() | intervals),
    checkpoint=st.builds(CheckpointSpec, every=st.none() | intervals, keep=counts),
    threads=rows,
)


@settings(max_examples=60, deadline=None)
@given(experiments)
def test_resolved_text_reads_back_to_an_equal_experiment(experiment: Experiment) -> None:
    text = to_json(experiment)
    assert from_json(text) == experiment
    assert to_json(from_json(text)) == text
    assert parse(to_yaml(experiment)) == experiment


@settings(max_examples=100, deadline=None)
@given(intervals)
def test_the_text_of_an_interval_reads_back(every: Every) -> None:
    assert Every.from_text(str(every)) == every


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=12) | st.text("{}[]:,-#&*!|>'\"%@` \n\tab0.", max_size=24))
def test_any_value_is_read_or_refused_as_a_problem(text: str) -> None:
    """No text makes the reader raise anything but ExperimentError."""
    problems(EXAMPLE.replace("name: digits-downpour", f"name: {text}"))
    problems(EXAMPLE, f"name={text}", f"{text}=1")
    problems(text)


def test_resolved_texts_are_complete() -> None:
    data = json.loads(to_json(EXAMPLE_SPEC))
    assert list(data) == [field.name for field in dataclasses.fields(Experiment)]
    assert data["network"]["input"] == [8, 8, 1]
    assert data["optimizer"]["slots"] == 2
    readable = yaml.safe_load(to_yaml(EXAMPLE_SPEC))
    assert readable["evaluate"] == {"every": "1 epoch"}
    assert readable["checkpoint"] == {"every": "30 s", "keep": 3}
    assert readable["optimizer"]["slots"] == 2
    off = dataclasses.replace(EXAMPLE_SPEC, evaluate=EvaluateSpec(every=None))
    assert yaml.safe_load(to_yaml(off))["evaluate"] == "off"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"shards":2', '"shards":"2"', "shards: Expected `int`, got `str`"),
        ('"shards":2,', "", "shards: missing key"),
        ('"shards":2', '"shards":2,"x":1', "x: unknown key"),
        ('"type":"downpour"', '"type":"other"', "optimizer.type: expected one of sgd, downpour"),
        ('"version"', "version", "not JSON"),
    ],
)
def test_json_of_another_version(old: str, new: str, said: str) -> None:
    text = to_json(EXAMPLE_SPEC)
    assert old in text
    with pytest.raises(ExperimentError, match=re.escape(said)):
        from_json(text.replace(old, new, 1))


def test_a_node_reads_its_experiment_without_yaml() -> None:
    code = (
        "import sys; from dbctl.experiment.resolve import from_json; from_json(sys.stdin.read());"
        "print(sorted({'yaml', 'click'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=to_json(EXAMPLE_SPEC),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


# ----------------------------------------------------------------------------- JSON Schema


def fits(value: Any, rule: dict[str, Any]) -> bool:
    """A slow obvious validator of the part of JSON Schema that `schema` uses."""
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    kind = rule.get("type")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if "$ref" in rule or "oneOf" in rule or "allOf" in rule:
        raise AssertionError(f"not in this subset: {rule}")
    return (
        ("anyOf" not in rule or any(fits(value, one) for one in rule["anyOf"]))
        and ("const" not in rule or value == rule["const"])
        and ("enum" not in rule or value in rule["enum"])
        and (kind not in kinds or isinstance(value, kinds[kind]))
        and (kind != "number" or number)
        and (kind != "integer" or (number and value % 1 == 0))
        and ("minimum" not in rule or value >= rule["minimum"])
        and ("maximum" not in rule or value <= rule["maximum"])
        and ("exclusiveMinimum" not in rule or value > rule["exclusiveMinimum"])
        and ("exclusiveMaximum" not in rule or value < rule["exclusiveMaximum"])
        and ("minLength" not in rule or len(value) >= rule["minLength"])
        and ("maxLength" not in rule or len(value) <= rule["maxLength"])
        and ("pattern" not in rule or re.search(rule["pattern"], value) is not None)
        and ("minItems" not in rule or len(value) >= rule["minItems"])
        and ("maxItems" not in rule or len(value) <= rule["maxItems"])
        and all(fits(value[i], r) for i, r in enumerate(rule.get("prefixItems", ())))
        and (not rule.get("items") or all(fits(item, rule["items"]) for item in value))
        and all(key in value for key in rule.get("required", ()))
        and (
            "properties" not in rule
            or (rule["additionalProperties"] is False and set(value) <= set(rule["properties"]))
        )
        and all(fits(value[k], r) for k, r in rule.get("properties", {}).items() if k in value)
    )


def test_the_schema_takes_what_the_reader_takes() -> None:
    rule = schema()
    json.dumps(rule)
    assert rule["$schema"].endswith("2020-12/schema")
    example = yaml.safe_load(EXAMPLE)
    assert fits(example, rule)
    assert fits({**example, "evaluate": "off"}, rule)
    assert fits({**example, "checkpoint": {"every": "off"}}, rule)


@pytest.mark.parametrize(
    "change",
    [
        {"replcas": 1},
        {"replicas": 0},
        {"replicas": "2"},
        {"evaluate": "on"},
        {"checkpoint": {"every": "30"}},
        {"cluster": {}},
        {"cluster": {"launcher": "other"}},
        {"optimizer": {"type": "sgd", "batch_size": 1, "rule": {"type": "sgd"}}},
    ],
)
def test_the_schema_refuses_what_the_reader_refuses(change: dict[str, Any]) -> None:
    example = {**yaml.safe_load(EXAMPLE), **change}
    assert not fits(example, schema())
    assert problems(json.dumps(example))


@settings(max_examples=20, deadline=None)
@given(experiments)
def test_the_schema_takes_every_resolved_file(experiment: Experiment) -> None:
    assert fits(yaml.safe_load(to_yaml(experiment)), schema())


@pytest.mark.parametrize(
    ("override", "end"),
    [
        ("name=1.0", 'found `1.0`; write "1.0" in quotes'),
        ("network.layers.0.units=2.0", "found `2.0`; write `2`"),
        ("network.layers.0.activation=2.0", "`linear`, found `2.0`"),
        ("optimizer.overlap=1.0", "expected true or false, found `1.0`"),
        ('data.train.scale="30 s"', 'greater than 0, found the text "30 s"'),
        ('data.train.scale="3e-1"', 'found the text "3e-1"; write it without quotes'),
        ("evaluate.every=true", "or off, found `true`"),
        ("evaluate.every=0", "or off, found `0`"),
        ("evaluate.every=3", "found `3`; say of what, such as `3 s`"),
        ("optimizer.clip=9223372036854775808", "; at most 9223372036854775807 (2^63 - 1) fits"),
        ("optimizer.clip=.inf", "found `.inf`; it must be finite"),
        ("stop={epochs: 3, epochs: 4}", "duplicate key; remove one"),
    ],
)
def test_a_hint_leads_to_what_is_accepted(override: str, end: str) -> None:
    assert only(EXAMPLE, override).endswith(end)


@pytest.mark.parametrize("units", [2**63 - 1, 2**53])
def test_a_network_that_no_number_counts_is_refused_with_the_file(units: int) -> None:
    """It ended in an OverflowError of the plan."""
    what = "nodes" if units > 2**59 else "parameters up to here"
    told = only(EXAMPLE, f"network.layers.0.units={units}")
    assert f"network.layers.0: {what}: expected at most 576,460,752,303,423,488 (2^59)" in told


def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    """Opening one waits for a writer, and whoever waits there hears no signal."""
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ExperimentError, match="not a regular file; write it to one"):
        load(str(tmp_path / "pipe.yaml"))
    with pytest.raises(ExperimentError, match="cannot be read: Is a directory"):
        load(str(tmp_path))
