"""dbctl/run/shipments.py and dbctl/node/arrival.py: what nodes get is what they would have read."""

from __future__ import annotations

import fcntl
import gzip
import os
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from dbctl import pace
from dbctl import shipment as shipment_module
from dbctl.data.dataset import Dataset
from dbctl.data.order import subset
from dbctl.data.packing import RowsFile, digests
from dbctl.data.prepare import statistics
from dbctl.errors import DataError, LaunchError
from dbctl.experiment.read import parse
from dbctl.experiment.specs import Experiment
from dbctl.launch.base import AgentHandle
from dbctl.node.build import build
from dbctl.node.distant import Distant
from dbctl.pace import Pace
from dbctl.plan import NodeSpec, Plan, make_evaluation_plan
from dbctl.roles.base import PlainBuffer, Record, Send
from dbctl.run import shipments as shipments_module
from dbctl.run.setting import (
    Origin,
    beginnings,
    keep_statistics,
    make_nodes,
    open_data,
    plan_of,
    vectors_of,
)
from dbctl.run.shipments import READY_MOST, Shipments, shipments_of
from dbctl.rundir import RunDir
from dbctl.shipment import Shipment
from dbctl.wire import Message, Peer
from dbctl.wire_files import ReadVector
from dbctl.wire_ship import ReadShipment, ShipmentPart
from tests.data_files import idx_bytes

CONTROLLER = Peer("controller", 1)
N, FEATURES = 53, 12
RNG = np.random.default_rng(4)
PIXELS = RNG.integers(0, 256, (N, 4, 3), dtype=np.uint8)
LABELS = np.arange(N) % 4
TEXT = """
version: 1
name: sent
seed: 11
data:
  train: {train}
  test: {test}
network:
  input: [12]
  layers: [{{type: dense, units: 4}}]
  loss: {loss}
replicas: {replicas}
threads: 1
optimizer: {optimizer}
stop: {{steps: 3}}
evaluate: {{every: 1 epoch}}
cluster: {{launcher: ssh, hosts: [{{name: a, workdir: {workdir}}}]}}
"""
DOWNPOUR = "{type: downpour, batch_size: 8, rule: {type: sgd, rate: 0.1}}"
SANDBLASTER = "{type: sandblaster, portion: 10}"


def write(folder: Path, kind: str) -> str:
    """The data as a file of that kind; its source without the closing brace."""
    (folder / "images").write_bytes(idx_bytes(PIXELS))
    (folder / "labels").write_bytes(idx_bytes(LABELS.astype(np.uint8)))
    for name in ("images", "labels"):
        (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
    (folder / "big").write_bytes(idx_bytes(PIXELS * 0.37, 0x0D, ">f4"))
    np.savez_compressed(folder / "f.npz", x=np.asfortranarray(PIXELS / 7.0), y=LABELS)
    np.savez(folder / "h.npz", x=(PIXELS / 9).astype(np.float16), y=LABELS.astype(np.uint16))
    np.save(folder / "x.npy", (PIXELS / 3.0).astype(np.float32))
    np.save(folder / "y.npy", PIXELS.reshape(N, -1)[:, :4] / 255.0)
    rows = np.column_stack([PIXELS.reshape(N, -1) / 8.0, LABELS]).tolist()
    (folder / "d.csv").write_text(
        "\n".join(",".join([*map(str, row[:-1]), str(int(row[-1]))]) for row in rows)
    )
    return {
        "idx": f"{{source: idx, images: {folder}/images, labels: {folder}/labels",
        "gz": f"{{source: idx, images: {folder}/images.gz, labels: {folder}/labels.gz",
        "idx float": f"{{source: idx, images: {folder}/big, labels: {folder}/labels",
        "npz": f"{{source: npz, path: {folder}/f.npz, x: x, y: y",
        "half": f"{{source: npz, path: {folder}/h.npz, x: x, y: y",
        "targets": f"{{source: npy, x: {folder}/x.npy, y: {folder}/y.npy",
        "csv": f"{{source: csv, path: {folder}/d.csv, label: 12",
    }[kind]


OPEN: list[Shipments] = []


@pytest.fixture(autouse=True)
def close_all() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


class Sent:
    """A run's shipments, and each of its nodes built over a line that loses and repeats."""

    def __init__(
        self,
        tmp_path: Path,
        kind: str = "idx",
        how: str = "scale: 0.1",
        *,
        seed: int = 0,
        **more: Any,
    ) -> None:
        folder = tmp_path / "files"
        folder.mkdir(exist_ok=True)
        source = f"{write(folder, kind)}, {how}, ship: true}}"
        fields = {
            "replicas": 2,
            "optimizer": DOWNPOUR,
            "loss": "squared" if kind == "targets" else "softmax",
            "train": source,
            "test": source,
            "workdir": tmp_path / "there",
        }
        self.experiment: Experiment = parse(TEXT.format(**(fields | more)))
        self.train, self.test = open_data(self.experiment)
        self.plan: Plan = plan_of(self.experiment, self.train, self.test)
        (tmp_path / "run").mkdir(exist_ok=True)
        run_dir = RunDir(tmp_path / "run")
        keep_statistics(self.experiment, self.train, run_dir)
        self.origin = Origin(positions=beginnings(self.experiment.replicas))
        self.vectors = vectors_of(self.origin, run_dir.path)
        self.shipments = shipments_of(self.plan, self.train, self.test, directory=tmp_path)
        OPEN.append(self.shipments)
        runtime = tmp_path / "runtime"
        runtime.mkdir(exist_ok=True)
        agent = AgentHandle("agent-0", "a", "", 0, runtime=str(runtime), keeps_logs=True)
        self.nodes = make_nodes(
            self.plan,
            [agent],
            run="r",
            run_dir=run_dir.path,
            origin=self.origin,
            shipped=self.shipments.shipped,
        )
        self.woken = threading.Event()
        self.shipments.wake = self.woken.set
        self.random = Random(seed)
        self.lost = self.repeated = 0.0
        self.records: list[Record] = []

    def spec(self, name: str) -> NodeSpec:
        return msgspec.json.decode(self.nodes[name].order.spec, type=NodeSpec)

    def build(self, name: str) -> Any:
        return build(self.spec(name), PlainBuffer, self.way_of(name))

    def way_of(self, name: str) -> Distant:
        answers: list[tuple[Peer, Message]] = []

        def send(message: Message) -> None:
            if isinstance(message, ReadVector):
                part = self.vectors.answer(Peer(name, 1), message)
                assert part is not None
                answers.append((CONTROLLER, part))
            elif self.random.random() >= self.lost:
                assert isinstance(message, ReadShipment)
                found = self.shipments.ask(name, message)
                self.records += [one for one in found if isinstance(one, Record)]

        def hear(wait_s: float) -> Sequence[tuple[Peer, Message]]:
            if not answers:
                self.woken.wait(min(wait_s, 0.05))
            self.woken.clear()
            for effect in self.shipments.due():
                assert isinstance(effect, Send)
                assert effect.to == name
                copies = 0 if self.random.random() < self.lost else 1
                copies += self.random.random() < self.repeated
                answers.extend([(CONTROLLER, self.changed(effect.message))] * copies)
            self.random.shuffle(answers)
            found, answers[:] = answers[:], []
            return found

        return Distant(self.spec(name).sent, send=send, hear=hear)  # type: ignore[arg-type]

    def changed(self, message: Message) -> Message:
        return message

    def sent_bytes(self) -> int:
        return sum(int(record.fields["sent_bytes"]) for record in self.shipments.close())


def rows_in(role: Any) -> Dataset:
    """The dataset of a worker or an evaluator."""
    holder = getattr(role, "_measure", None) or role._gradient
    found = holder._rows
    assert isinstance(found, Dataset)
    return found


def all_of(dataset: Dataset) -> tuple[bytes, bytes]:
    every = np.arange(len(dataset))
    batch = dataset.batch(every, np.empty((dataset.features, len(dataset)), dataset.dtype))
    return batch.tobytes(), np.ascontiguousarray(dataset.targets(every)).tobytes()


def locally(sent: Sent, replica: int | None) -> tuple[bytes, bytes]:
    """What a node reads that has the files."""
    spec, seed = sent.experiment.data.train, sent.experiment.seed
    rows = None
    if replica is not None:
        rows = subset(sent.train.rows, seed, replica=replica, replicas=sent.experiment.replicas)
    known = statistics(sent.train) if spec.standardize else None
    return all_of(Dataset(sent.train, spec, statistics=known, rows=rows))


KINDS = ("idx", "gz", "idx float", "npz", "half", "targets", "csv")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["scale: 0.00392", "standardize: true", "rows: 41"])
def test_each_replica_reads_its_own_rows_to_the_bit(tmp_path: Path, kind: str, how: str) -> None:
    sent = Sent(tmp_path, kind, how)
    for name, replica in (("worker-0.0", 0), ("worker-1.0", 1), ("evaluator-0", None)):
        assert all_of(rows_in(sent.build(name))) == locally(sent, replica)
    files = sorted((tmp_path / "there" / "data").iterdir())
    assert [path.suffix for path in files] == [".npy"] * 6
    assert sent.sent_bytes() == sum(path.stat().st_size for path in files)


@pytest.mark.parametrize("kind", ["targets", "gz", "csv"])
def test_a_row_that_is_not_finite_is_named_as_its_file_has_it(tmp_path: Path, kind: str) -> None:
    """Not as the file has it that was sent, of which nobody knows."""
    sent = Sent(tmp_path, kind, "scale: 1.0e+38")
    named = []
    for replica in (0, 1):
        own = subset(N, sent.experiment.seed, replica=replica, replicas=2)
        of_sent = rows_in(sent.build(f"worker-{replica}.0")).blemish(np.arange(len(own)))
        there = Dataset(sent.train, sent.experiment.data.train, rows=own)
        assert of_sent == there.blemish(np.arange(len(own)))
        named.append(of_sent)
    assert all(str(tmp_path / "files") in told for told in named), named


def test_pixels_are_sent_as_bytes_and_each_row_once(tmp_path: Path) -> None:
    sent = Sent(tmp_path)
    sizes = [sent.shipments.shipped[f"worker-{r}.0"].x.size for r in (0, 1)]
    assert sum(sizes) == N * FEATURES + 2 * 128
    assert sent.shipments.shipped["worker-0.0"].y.size == 128 + 27


@pytest.mark.parametrize("seed", range(6))
def test_over_a_bad_line_too(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipment_module, "PIECE_BYTES", 17)
    monkeypatch.setattr(shipment_module, "Pace", partial(Pace, 0.002))
    monkeypatch.setattr(pace, "AGAIN_MOST_S", 0.002)
    sent = Sent(tmp_path, seed=seed)
    sent.lost, sent.repeated = 0.05 * seed, 0.1
    assert all_of(rows_in(sent.build("worker-1.0"))) == locally(sent, 1)


def test_a_batch_method_gets_all_rows_and_shares_them_with_who_measures(tmp_path: Path) -> None:
    sent = Sent(tmp_path, optimizer=SANDBLASTER)
    for name in ("worker-0.0", "worker-1.0", "evaluator-0"):
        assert all_of(rows_in(sent.build(name))) == locally(sent, None)
    assert sent.sent_bytes() == N * FEATURES + N + 2 * 128
    assert len(list((tmp_path / "there" / "data").iterdir())) == 2


def test_what_is_there_is_not_sent_again(tmp_path: Path) -> None:
    first = Sent(tmp_path)
    first.build("worker-0.0")
    assert first.sent_bytes() > 0
    again = Sent(tmp_path)
    assert all_of(rows_in(again.build("worker-0.0"))) == locally(again, 0)
    assert again.sent_bytes() == 0
    assert again.records == []


def test_it_goes_on_where_it_was_broken_off(tmp_path: Path) -> None:
    sent = Sent(tmp_path)
    shipment = sent.shipments.shipped["worker-0.0"].x
    sent.build("worker-0.0")
    whole = tmp_path / "there" / "data" / f"{shipment.digest}.npy"
    data = whole.read_bytes()
    whole.with_suffix(".part").write_bytes(data[:200])
    whole.unlink()
    again = Sent(tmp_path)
    assert all_of(rows_in(again.build("worker-0.0"))) == locally(again, 0)
    assert again.sent_bytes() == shipment.size - 200
    [record] = again.records
    assert record.fields["start"] == 200


@pytest.mark.parametrize("where", ["whole", "beginning"])
def test_a_flipped_bit_is_sent_anew(tmp_path: Path, where: str) -> None:
    sent = Sent(tmp_path)
    shipment = sent.shipments.shipped["worker-0.0"].x
    sent.build("worker-0.0")
    path = tmp_path / "there" / "data" / f"{shipment.digest}.npy"
    data = bytearray(path.read_bytes())
    data[150] ^= 1
    path.unlink()
    if where == "whole":
        path.write_bytes(data)
    else:
        path.with_suffix(".part").write_bytes(data[:200])
    again = Sent(tmp_path)
    assert all_of(rows_in(again.build("worker-0.0"))) == locally(again, 0)
    assert again.sent_bytes() == shipment.size + (shipment.size - 200) * (where == "beginning")


def test_one_node_of_a_host_receives_at_a_time(tmp_path: Path) -> None:
    """The credit is that of the host's connection."""
    sent = Sent(tmp_path)
    way = sent.way_of("worker-0.0")
    hear, send = way.hear, way.send
    said: list[Message] = []
    turns = [os.open(tmp_path / "runtime", os.O_RDONLY | os.O_DIRECTORY)]
    fcntl.flock(turns[0], fcntl.LOCK_EX)
    n_heard = 0

    def waiting(wait_s: float) -> Sequence[tuple[Peer, Message]]:
        nonlocal n_heard
        n_heard += 1
        if n_heard == 3:
            assert said == []
            os.close(turns.pop())
        return hear(wait_s)

    def counted(message: Message) -> None:
        said.append(message)
        send(message)

    way.hear, way.send = waiting, counted
    assert all_of(rows_in(build(sent.spec("worker-0.0"), PlainBuffer, way))) == locally(sent, 0)
    assert turns == []


def test_only_the_controller_is_believed(tmp_path: Path) -> None:
    sent = Sent(tmp_path)
    way = sent.way_of("worker-0.0")
    hear = way.hear
    told: list[Message] = []

    def with_lies(wait_s: float) -> Sequence[tuple[Peer, Message]]:
        found = hear(wait_s)
        parts = [m for _, m in found if isinstance(m, ShipmentPart)]
        lies = [ShipmentPart(p.digest, p.start, np.zeros_like(p.payload)) for p in parts]
        told.extend(lies)
        return [*((Peer("shard-0", 1), lie) for lie in lies), *found]

    way.hear = with_lies
    assert all_of(rows_in(build(sent.spec("worker-0.0"), PlainBuffer, way))) == locally(sent, 0)
    assert told
    assert sent.sent_bytes() == sum(s.size for s in sizes_of(sent, "worker-0.0"))


def sizes_of(sent: Sent, name: str) -> list[Shipment]:
    shipped = sent.shipments.shipped[name]
    return [shipped.x, shipped.y]


def test_who_measures_the_training_rows_is_sent_those(tmp_path: Path) -> None:
    """`dbctl eval --split train`."""
    sent = Sent(tmp_path, test=f"{write(tmp_path, 'half')}}}")
    plan = make_evaluation_plan(sent.experiment, rows=N, evaluators=2)
    found = shipments_of(plan, sent.train, None, split="train", directory=tmp_path)
    assert {s.rows for s in found.shipped.values()} == {N}
    assert set(found.shipped) == {"evaluator-0", "evaluator-1"}
    assert shipments_of(plan, None, sent.test, split="test", directory=tmp_path).shipped == {}


def test_a_shipment_is_recorded_once(tmp_path: Path) -> None:
    sent = Sent(tmp_path)
    digest = sent.shipments.shipped["worker-0.0"].x.digest
    first = sent.shipments.ask("worker-0.0", ReadShipment(digest, 10, 1))
    assert [type(one) for one in first] == [Record]
    assert sent.shipments.ask("worker-0.0", ReadShipment(digest, 11, 1)) == []


def test_what_never_has_its_digest_is_given_up(tmp_path: Path) -> None:
    sent = Sent(tmp_path)

    def zeros(message: Message) -> Message:
        assert isinstance(message, ShipmentPart)
        return ShipmentPart(message.digest, message.start, np.zeros_like(message.payload))

    sent.changed = zeros  # type: ignore[method-assign]
    with pytest.raises(DataError, match=r"\.part: what came twice does not have the SHA-256"):
        sent.build("worker-0.0")


def test_a_replica_without_rows_has_none(tmp_path: Path) -> None:
    sent = Sent(tmp_path, how="rows: 2", replicas=3)
    for replica in range(3):
        rows = rows_in(sent.build(f"worker-{replica}.0"))
        assert len(rows) == (1 if replica < 2 else 0)
        if replica < 2:
            assert all_of(rows) == locally(sent, replica)


def test_nothing_is_sent_that_is_by_path_or_on_this_machine(tmp_path: Path) -> None:
    sent = Sent(tmp_path)
    by_path = f"{write(tmp_path / 'files', 'idx')}}}"
    mixed = Sent(tmp_path, test=by_path)
    assert set(mixed.shipments.shipped) == {"worker-0.0", "worker-1.0"}
    assert mixed.spec("evaluator-0").shipped is None
    assert "shard-0" not in sent.shipments.shipped
    text = TEXT.split("cluster:")[0].format(
        replicas=2,
        optimizer=DOWNPOUR,
        loss="softmax",
        train=by_path.replace("}", ", ship: true}"),
        test=by_path,
    )
    local = parse(text)
    plan = plan_of(local, *open_data(local))
    assert shipments_of(plan, None, None, directory=tmp_path).shipped == {}


def test_the_data_going_away_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Sent(tmp_path, "gz")
    (tmp_path / "files" / "images.gz").unlink()
    with pytest.raises(LaunchError, match=r"worker-0.0 cannot be sent its rows: .*images\.gz"):
        sent.build("worker-0.0")
    assert sent.shipments.close() is not None


@pytest.mark.parametrize(("kind", "name"), [("idx", "images"), ("targets", "y.npy")])
def test_a_file_that_is_cut_while_it_is_sent_is_told(tmp_path: Path, kind: str, name: str) -> None:
    """A mapping of it would end the controller by SIGBUS."""
    sent = Sent(tmp_path, kind)
    os.truncate(tmp_path / "files" / name, 150)
    said = rf"worker-0.0 cannot be sent its rows: .*{name}: was changed while it was in use"
    with pytest.raises(LaunchError, match=said):
        sent.build("worker-0.0")


def test_a_file_that_is_cut_before_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*words: Any, **more: Any) -> list[str]:
        os.truncate(tmp_path / "files" / "images", 150)
        return digests(*words, **more)

    monkeypatch.setattr(shipments_module, "digests", cut)
    with pytest.raises(DataError, match="images: was changed while it was in use"):
        Sent(tmp_path)


def test_no_memory_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody answers, and the node asks for ever."""
    sent = Sent(tmp_path)

    def none_left(*words: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(RowsFile, "read", none_left)
    with pytest.raises(LaunchError, match=r"worker-0\.0 cannot be sent its rows: MemoryError"):
        sent.build("worker-0.0")


def test_little_is_read_ahead_of_the_line(tmp_path: Path) -> None:
    shipments = Sent(tmp_path).shipments
    x = shipments.shipped["worker-0.0"].x
    for start in range(20):
        shipments.ask("worker-0.0", ReadShipment(x.digest, start, 10))
    found: list[int] = []
    while sum(found) < 20:
        threading.Event().wait(0.02)
        found.append(len(shipments.due()))
    assert max(found) == READY_MOST


def test_a_closed_one_reads_nothing(tmp_path: Path) -> None:
    sent = Sent(tmp_path)
    shipments: Shipments = sent.shipments
    x = shipments.shipped["worker-0.0"].x
    assert shipments.close() == []
    assert shipments.ask("worker-0.0", ReadShipment(x.digest, 0, 10)) == []
    assert shipments.due() == []
