"""dbctl/run/vectors.py and dbctl/node/distant.py: a checkpoint read by a host that has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dbctl.checkpoint.reader import Checkpoint, newest_good
from dbctl.data.prepare import Statistics
from dbctl.errors import LaunchError
from dbctl.node import distant
from dbctl.node.build import build
from dbctl.node.distant import Distant
from dbctl.pace import WINDOW_MOST
from dbctl.plan import NodeSpec
from dbctl.region import Range
from dbctl.roles.base import PlainBuffer
from dbctl.roles.shard import Shard
from dbctl.run.setting import make_nodes, vectors_of
from dbctl.run.vectors import Vectors
from dbctl.wire import Message, Peer
from dbctl.wire_files import DEVIATION, MEAN, PIECE_ELEMENTS, ReadVector, VectorPart
from dbctl.wire_processes import Lease
from tests.inproc_run import begin, go_on
from tests.test_resume import TEXT
from tests.test_setting import agents_of

ME, CONTROLLER = Peer("shard-0", 1), Peer("controller", 1)
Answer = Callable[[ReadVector], VectorPart | None]


class Wire:
    """To the controller and back. `lost`: numbers of what is asked that do not come back."""

    def __init__(self, answer: Answer, lost: tuple[int, ...] = ()) -> None:
        self.answer = answer
        self.lost = lost
        self.asked: list[ReadVector] = []
        self.coming: list[tuple[Peer, Message]] = [(CONTROLLER, Lease(0))]

    def send(self, message: Message) -> None:
        assert isinstance(message, ReadVector)
        self.asked.append(message)
        part = self.answer(message)
        if part is not None and len(self.asked) not in self.lost:
            self.coming.append((CONTROLLER, part))

    def hear(self, wait_s: float) -> list[tuple[Peer, Message]]:
        coming, self.coming = self.coming, []
        return coming


def node(vectors: Vectors, me: Peer = ME, *, lost: tuple[int, ...] = ()) -> tuple[Distant, Wire]:
    wire = Wire(lambda asked: vectors.answer(me, asked), lost)
    return Distant(vectors.sent, send=wire.send, hear=wire.hear), wire


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    changes = ["optimizer.rule={type: adam, rate: 0.01}"]
    run_dir, run = begin(TEXT, tmp_path_factory.mktemp("saved") / "run", overrides=changes)
    assert run.run().status == "done"
    return newest_good(run_dir.checkpoints)[0]


def of(checkpoint: Checkpoint, statistics: str = "") -> Vectors:
    return Vectors(checkpoint=str(checkpoint.path), statistics=statistics)


def test_every_vector_comes_as_it_is_in_parts(
    saved: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distant, "PIECE_ELEMENTS", 100)
    span = Range(7, saved.n_elements - 3)
    far, wire = node(of(saved))
    assert (tuple(far.vectors), far.updates) == (tuple(saved.vectors), saved.updates)
    assert len(far.vectors) == 3
    for name in far.vectors:
        [found] = far.read_each(name, [span])
        assert found.tobytes() == saved.read(name, span).tobytes()
    assert max(asked.n for asked in wire.asked) == 100
    assert sum(asked.n for asked in wire.asked) == 3 * len(span)


def test_what_is_lost_or_late_is_asked_for_again(
    saved: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distant, "PIECE_ELEMENTS", 300)
    monkeypatch.setattr(distant, "AGAIN_S", 0.001)
    whole = Range(0, saved.n_elements)
    far, wire = node(of(saved), lost=(1, 3))
    old = VectorPart("parameters", 300, np.zeros(300, np.float32))
    short = VectorPart("parameters", 0, np.zeros(299, np.float32))
    wire.coming += [(CONTROLLER, old), (CONTROLLER, short), (Peer("shard-1", 1), old)]
    [found] = far.read_each("parameters", [whole])
    assert found.tobytes() == saved.read("parameters", whole).tobytes()
    assert len(wire.asked) >= -(-len(whole) // 300) + 2


def test_only_the_controller_is_believed(saved: Checkpoint) -> None:
    far, wire = node(of(saved))
    span = Range(0, 8)
    wire.coming.append((Peer("shard-1", 1), VectorPart("parameters", 0, np.ones(8, np.float32))))
    [found] = far.read_each("parameters", [span])
    assert found.tobytes() == saved.read("parameters", span).tobytes()


def test_little_is_held_while_one_part_is_late(
    saved: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distant, "WINDOW_MOST", 4)
    monkeypatch.setattr(distant, "AGAIN_S", 0.01)
    spans = [Range(start, start + 5) for start in range(0, 640, 8)]
    far, wire = node(of(saved), lost=(1,))
    before = set()
    answer = wire.answer

    def counted(asked: ReadVector) -> VectorPart | None:
        if sum(one.start == 0 for one in wire.asked) < 2:
            before.add(asked)
        return answer(asked)

    far._window = 32
    wire.answer = counted
    assert len(list(far.read_each("parameters", spans))) == len(spans)
    assert len(before) == 4


def test_the_window_is_kept_from_one_vector_to_the_next(saved: Checkpoint) -> None:
    far, wire = node(of(saved))
    spans = [Range(start, start + 5) for start in range(0, 640, 8)]
    assert len(list(far.read_each("parameters", spans))) == len(spans)
    wire.asked.clear()
    next(far.read_each("parameters", spans))
    assert len(wire.asked) >= WINDOW_MOST


def test_many_short_runs_are_asked_for_ahead(saved: Checkpoint) -> None:
    """A partition's part of a weight matrix is many rows; each cost a round trip once."""
    far, wire = node(of(saved))
    spans = [Range(start, start + 5) for start in range(0, 640, 8)]
    rounds, hear = [], far.hear

    def counted(wait_s: float) -> Sequence[tuple[Peer, Message]]:
        rounds.append(len(wire.coming))
        return hear(wait_s)

    far.hear = counted
    for span, found in zip(spans, far.read_each("parameters", spans), strict=True):
        assert found.tobytes() == saved.read("parameters", span).tobytes()
    assert len(wire.asked) == len(spans)
    assert len(rounds) < 20
    assert max(rounds) <= WINDOW_MOST


def test_statistics(tmp_path: Path, saved: Checkpoint) -> None:
    there = Statistics(np.arange(5.0), np.arange(1.0, 6.0))
    there.save(str(tmp_path / "s.npz"))
    far, wire = node(of(saved, str(tmp_path / "s.npz")), Peer("worker-0.0", 1))
    found = far.statistics(5)
    assert (found.mean == there.mean).all()
    assert (found.deviation == there.deviation).all()
    assert [asked.vector for asked in wire.asked] == [MEAN, DEVIATION]
    with pytest.raises(LaunchError, match="the same data, at the same path"):
        far.statistics(6)


@pytest.mark.parametrize(
    "asked",
    [
        ReadVector("parameters", -1, 2),
        ReadVector("parameters", 0, 0),
        ReadVector("parameters", 0, PIECE_ELEMENTS + 1),
        ReadVector("parameters", 1 << 40, 1),
        ReadVector("../../etc/passwd", 0, 1),
        ReadVector(MEAN, 0, 1),
    ],
)
def test_what_is_not_there_ends_the_start(saved: Checkpoint, asked: ReadVector) -> None:
    with pytest.raises(LaunchError, match=r"shard-0.* asked for elements .* which are not there"):
        of(saved).answer(ME, asked)


def test_at_most_a_piece_is_read_at_once(
    saved: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dbctl.run.vectors.PIECE_ELEMENTS", 7)
    assert of(saved).answer(ME, ReadVector("parameters", 0, 7)) is not None
    with pytest.raises(LaunchError, match="elements 0 to 8 of parameters, which are not there"):
        of(saved).answer(ME, ReadVector("parameters", 0, 8))


def test_parameters_are_for_shards_only(saved: Checkpoint) -> None:
    for name in ("worker-0.0", "evaluator-0", "agent-0"):
        assert of(saved).answer(Peer(name, 1), ReadVector("parameters", 0, 1)) is None
    assert of(saved).answer(ME, ReadVector("parameters", 0, 1)) is not None


def test_a_checkpoint_that_goes_away_is_told(tmp_path: Path) -> None:
    gone = Vectors(checkpoint=str(tmp_path / "step-5"), statistics="")
    with pytest.raises(LaunchError, match=r"cannot be sent what it begins with: .*step-5"):
        gone.answer(ME, ReadVector("parameters", 0, 1))
    (tmp_path / "s.npz").write_bytes(b"PK")
    damaged = Vectors(checkpoint="", statistics=str(tmp_path / "s.npz"))
    with pytest.raises(LaunchError, match=r"cannot be sent what it begins with: .*s\.npz"):
        damaged.answer(Peer("worker-0.0", 1), ReadVector(MEAN, 0, 1))


def test_a_shard_begins_with_the_same_state_wherever_its_checkpoint_is(
    saved: Checkpoint, tmp_path: Path
) -> None:
    run_dir, run = begin(TEXT, tmp_path / "run", overrides=["shards=2"])
    assert run.run().status == "done"
    life = go_on(run_dir, ["stop.steps=40"]).life
    plan, origin = life.plan, life.origin
    found = {}
    for keeps_logs in (False, True):
        agents = [replace(agent, keeps_logs=keeps_logs) for agent in agents_of(plan)]
        nodes = make_nodes(plan, agents, run="r", run_dir=run_dir.path, origin=origin)
        spec = msgspec.json.decode(nodes["shard-1"].order.spec, type=NodeSpec)
        assert (spec.sent is not None) == keeps_logs
        other = node(vectors_of(origin, run_dir.path))[0] if keeps_logs else None
        role = build(spec, PlainBuffer, other)
        assert isinstance(role, Shard)
        found[keeps_logs] = (role.values.tobytes(), role.version)
    assert found[True] == found[False]
