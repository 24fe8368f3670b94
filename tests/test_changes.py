"""dbctl/experiment/changes.py: what is set anew, in words."""

from __future__ import annotations

import pytest

from dbctl.experiment.changes import describe_changes
from dbctl.experiment.read import parse


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], []),
        (["shards=3", "replicas=2"], ["replicas 1 -> 2", "shards 1 -> 3"]),
        (["stop={epochs: 2}"], ["stop.epochs none -> 2", "stop.steps 9 -> none"]),
        (["stop.steps=20000", "name=b"], ["name a -> b", "stop.steps 9 -> 20,000"]),
        (["evaluate={every: 1 epoch}"], ["evaluate.every none -> 1 epoch"]),
        (["checkpoint.every=5 steps"], ["checkpoint.every 30 s -> 5 steps"]),
        (["partition.count=2"], ["partition.count 1 -> 2"]),
        (["cluster={launcher: ssh, hosts: [{name: a}]}"], ["another cluster"]),
        (["network.layers=[{type: dense, units: 3}]"], ["another network.layers"]),
    ],
)
def test_changes_name_the_key_and_both_values(overrides: list[str], said: list[str]) -> None:
    text = (
        "version: 1\nname: a\ndata:\n  train: {source: digits, split: train}\n"
        "  test: {source: digits, split: test}\n"
        "network: {input: [64], layers: [{type: dense, units: 10}], loss: softmax}\n"
        "optimizer: {type: downpour, batch_size: 4, overlap: true, rule: {type: sgd, rate: 0.1}}\n"
        "stop: {steps: 9}\nevaluate: off\n"
    )
    assert describe_changes(parse(text), parse(text, overrides=overrides)) == said
