"""The forecast: arithmetic by hand, and the shape of paper A, figure 3."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dbctl.errors import PlanError
from dbctl.experiment.read import load
from dbctl.experiment.specs import Experiment
from dbctl.forecast import (
    LayerSpeed,
    Speeds,
    Table,
    as_object,
    cuts_of,
    lines,
    parse_counts,
    tables,
)
from dbctl.model.network import tensors

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


def experiment(name: str, *overrides: str) -> Experiment:
    return load(str(EXPERIMENTS / f"{name}.yaml"), overrides)


def speeds(n_layers: int, **other: float) -> Speeds:
    """A machine of 50 GFLOP/s, links of 1 GB/s: what the paper's were like, by order."""
    usual = {
        "company": 1.0,
        "loss_s": 0.0,
        "batch_s": 0.0,
        "latency_s": 1e-4,
        "server_latency_s": 3e-4,
        "message_s": 2e-5,
        "link_bytes_per_s": 1e9,
        "check_s": 0.0,
        "copy_s": 0.0,
        "shard_s": 0.0,
    }
    layer = LayerSpeed(overhead_s=0.0, flops_per_s=5e10)
    return Speeds(layers=(layer,) * n_layers, **{**usual, **other})


def found(name: str, counts: list[int], *overrides: str, **other: float) -> list[Table]:
    of = experiment(name, *overrides)
    return tables(of, cuts_of(of, counts), speeds(len(of.network.layers), **other))


def test_one_partition_is_operations_over_rate_and_the_rest() -> None:
    """Speech, batch 128: 6 operations a weight, 4 in the first layer."""
    (table,) = found(
        "speech-paper", [1], "shards=1", loss_s=0.003, batch_s=0.002, check_s=1e-9, shard_s=2e-9
    )
    flops = 128 * (6 * (41_777_152 - 4 * 2560 - 8192) - 2 * 440 * 2560)
    assert table.forecast.compute_s == pytest.approx(flops / 5e10 + 0.005)
    assert table.forecast.exchange_s == 0
    assert table.forecast.servers_s == pytest.approx(41_777_152 * 2e-9 + 3e-4)
    assert table.forecast.speed_up == 1.0


def test_two_partitions_exchange_what_the_costs_say() -> None:
    (table,) = found("speech-paper", [2])
    slowest = sum(
        max(
            128 * s.bytes_sent / 1e9 + 2e-5 * max(0, s.messages - layer.rounds)
            for s in layer.shares
        )
        for layer in table.costs
    )
    rounds = sum(layer.rounds for layer in table.costs) + 1  # and the agreement
    assert table.forecast.exchange_s == pytest.approx(slowest + rounds * 1e-4)


def test_in_company_computing_takes_longer_and_alone_it_does_not() -> None:
    """A quarter longer where another partition computes as well; what crosses does not change."""
    counts = [1, 2]
    alone, two = found("speech-paper", counts, "shards=1", batch_s=0.002)
    same, slower = found("speech-paper", counts, "shards=1", batch_s=0.002, company=1.25)
    assert same.forecast == alone.forecast
    assert slower.forecast.compute_s == pytest.approx(1.25 * two.forecast.compute_s)
    assert slower.forecast.exchange_s == two.forecast.exchange_s
    assert slower.forecast.servers_s == two.forecast.servers_s


def test_overheads_do_not_get_smaller_with_more_partitions() -> None:
    of = experiment("speech-paper")
    layer = LayerSpeed(overhead_s=0.01, flops_per_s=1e15)
    slow = replace(speeds(5), layers=(layer,) * 5)
    one, eight = tables(of, cuts_of(of, [1, 8]), slow)
    assert eight.forecast.compute_s == pytest.approx(one.forecast.compute_s, rel=0.01)
    assert eight.forecast.speed_up < 1


def test_hosts_share_the_servers_part_and_shards_of_one_host_do_not() -> None:
    (one,) = found("speech-paper", [1], "shards=1", shard_s=1e-9, server_latency_s=0.0)
    (four,) = found("speech-paper", [1], "shards=4", shard_s=1e-9, server_latency_s=0.0)
    assert four.forecast.servers_s == one.forecast.servers_s
    hosts = "cluster={launcher: ssh, hosts: [{name: a}, {name: b}, {name: c}, {name: d}]}"
    (spread,) = found("speech-paper", [1], "shards=4", hosts, shard_s=1e-9, server_latency_s=0.0)
    assert spread.forecast.servers_s == pytest.approx(one.forecast.servers_s / 4)
    (few,) = found("speech-paper", [1], "shards=2", hosts, shard_s=1e-9, server_latency_s=0.0)
    assert few.forecast.servers_s == pytest.approx(one.forecast.servers_s / 2)


def test_a_workers_part_is_divided_only_where_its_partitions_are_placed_apart() -> None:
    """They are put on one host while it has room; what a host does not take goes to another."""
    apart = "cluster={launcher: ssh, hosts: [{name: a, slots: %d}, {name: b, slots: %d}]}"
    split = (
        "cluster={launcher: ssh, hosts: [{name: a, slots: 1}, {name: b, slots: 1},"
        " {name: c, labels: [shard]}]}"
    )
    one_each = "cluster={launcher: ssh, hosts: [{name: a}, {name: b, labels: [shard]}]}"
    copying = (
        "optimizer={type: downpour, batch_size: 128, overlap: true, rule: {type: sgd, rate: 0.1}}"
    )
    for settings, divided in (
        ((), 1),
        ((apart % (8, 8),), 1),
        ((split,), 2),
        ((apart % (1, 1),), 1),  # not enough for all: no bound
        ((one_each,), 1),
    ):
        (two,) = found(
            "speech-paper", [2], "shards=2", copying, *settings,
            copy_s=2e-9, server_latency_s=0.0,
        )  # fmt: skip
        whole_s = 2e-9 * 41_777_152
        assert two.forecast.servers_s == pytest.approx(whole_s / divided, rel=0.01)


@pytest.mark.parametrize(("n_fetch", "n_push"), [(1, 1), (1, 10), (10, 1), (5, 2)])
def test_each_part_of_the_servers_has_its_own_beat(n_fetch: int, n_push: int) -> None:
    """Fetches are copied and waited for, pushes are applied."""
    beat = (
        f"optimizer={{type: downpour, batch_size: 128, n_push: {n_push}, n_fetch: {n_fetch},"
        " overlap: true, rule: {type: sgd, rate: 0.1}}"
    )
    (one,) = found(
        "speech-paper", [1], "shards=1", beat,
        copy_s=2e-9, shard_s=3e-9, server_latency_s=0.02,
    )  # fmt: skip
    each = 1e-9 * 41_777_152
    expected = (2 * each + 0.02) / n_fetch + 3 * each / n_push
    assert one.forecast.servers_s == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "copied"),
    [
        ((), False),
        (("optimizer.overlap=false",), False),
        (("optimizer.overlap=true",), True),
        (("optimizer.overlap=false", "optimizer.n_fetch=2"), True),
        (("optimizer.overlap=false", "replicas=2"), False),
        (("optimizer.overlap=false", "replicas=3"), True),
        (("shards=3",), True),
    ],
)
def test_few_replicas_that_block_copy_nothing_from_their_one_shard(
    settings: tuple[str, ...], copied: bool
) -> None:
    if "overlap" in "".join(settings):
        downpour = "optimizer={type: downpour, batch_size: 128, rule: {type: sgd, rate: 0.1}}"
        settings = (downpour, *settings)
    for partitions in (1, 2):
        (table,) = found(
            "speech-paper", [partitions], f"shards={partitions}", *settings,
            copy_s=1.0, server_latency_s=0.0,
        )  # fmt: skip
        assert bool(table.forecast.servers_s) is copied


def test_gradients_that_no_layer_bounds_are_looked_at() -> None:
    """Each but those of dense layers (docs/reliability.md, G14)."""
    (one,) = found("fashion-local", [1], "shards=1", check_s=1e-6, server_latency_s=0.0)
    looked_at = [
        len(tensor.range)
        for tensor in tensors(experiment("fashion-local").network)
        if not tensor.name.startswith("layers.6.")
    ]
    assert one.forecast.servers_s == pytest.approx(1e-6 * sum(looked_at))


def test_figure_3_the_local_network_scales_further_than_the_dense_one() -> None:
    """Paper A, figure 3, without servers: who is best with few is overtaken with many.

    A dense layer's nodes go to everybody, so speech gains nothing from the last doubling; vision
    sends its seams.
    """
    speech, vision = (
        [table.forecast.speed_up for table in found(name, [4, 16, 64])]
        for name in ("speech-paper", "vision-paper")
    )
    assert vision[2] > 1.5 * speech[2]
    assert vision[2] / vision[1] > 1.2 * speech[2] / speech[1]
    slow_link = found("speech-paper", [16, 64], link_bytes_per_s=1.2e8)
    slow = [table.forecast.speed_up for table in slow_link]
    assert slow[1] < 1.2 * slow[0]


def test_counts_are_read_or_named() -> None:
    assert parse_counts("1, 2,16") == [1, 2, 16]
    for text in ("", "1,", "0", "-1", "two", "1.5", "٣"):
        with pytest.raises(PlanError, match="expected counts from 1 up"):
            parse_counts(text)


def test_a_count_that_does_not_fit_is_an_error_before_anything_is_measured() -> None:
    with pytest.raises(PlanError, match=r"^--partitions 9000: expected at most"):
        cuts_of(experiment("speech-paper"), [1, 9000])


def test_the_text_has_each_partition_up_to_eight_and_extremes_beyond() -> None:
    text = list(lines(found("vision-paper", [2, 16]), batch_size=32, cores=4))
    two, sixteen = text[: text.index("")], text[text.index("") :]
    assert two[0].startswith("2 partitions: each partition")
    # 25 columns over 2: 12 and 13, times 25 rows and 36 maps.
    assert any(line.split() == ["nodes", "10,800", "11,700"] for line in two)
    assert any("least to greatest" in line for line in sixteen)
    assert [line.split()[0] for line in text[-3:-1]] == ["2", "16"]
    assert text[-1] == "this machine has 4 cores"


def test_the_object_is_plain_and_whole() -> None:
    of = experiment("speech-paper")
    machine = speeds(5)
    answer = as_object(tables(of, cuts_of(of, [2]), machine), batch_size=128, speeds=machine)
    (two,) = answer["partitions"]  # type: ignore[misc]
    assert two["count"] == 2
    assert sum(sum(layer["parameters"]) for layer in two["layers"]) == 41_777_152
    assert two["seconds"] == pytest.approx(two["compute_s"] + two["exchange_s"] + two["servers_s"])
    assert set(answer["speeds"]) == {  # type: ignore[call-overload]
        "layers", "company", "loss_s", "batch_s", "latency_s", "server_latency_s", "message_s",
        "link_bytes_per_s", "check_s", "copy_s", "shard_s",
    }  # fmt: skip
