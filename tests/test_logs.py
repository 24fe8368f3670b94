"""Logs of other hosts: every byte once and in order, one piece under way, whatever is lost."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from dbctl.envelope import HEADER_BYTES, PROTOCOL_VERSION, Envelope, encode
from dbctl.logs import AGAIN_MOST_S, AGAIN_S, LogFiles, LogSender
from dbctl.wire_logs import TEXT_BYTES, LogFiled, LogText


@pytest.fixture
def there(tmp_path: Path) -> Path:
    (tmp_path / "there").mkdir()
    return tmp_path / "there"


@pytest.fixture
def files(tmp_path: Path) -> LogFiles:
    return LogFiles({name: tmp_path / f"{name}.log" for name in ("a", "b")})


def test_a_piece_fits_a_header_frame() -> None:
    piece = LogText("worker-9999.9999", 1 << 40, b"\xff" * TEXT_BYTES)
    frame = encode(Envelope(PROTOCOL_VERSION, "r" * 100, "agent-99", 1, "controller", piece))
    assert len(frame) < HEADER_BYTES


@pytest.mark.parametrize("seed", range(20))
def test_logs_arrive_whole_over_a_bad_link(
    there: Path, files: LogFiles, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces and answers are lost, repeated and late; the logs grow meanwhile."""
    monkeypatch.setattr("dbctl.logs.TEXT_BYTES", 100)
    random = Random(seed)
    sender = LogSender(there)
    written = {"a": b"", "b": b""}
    late: list[LogText | LogFiled] = []
    now = 0.0
    for step in range(4000):
        now += random.uniform(0.0, AGAIN_S)
        if step < 60:
            name = random.choice("ab")
            text = random.randbytes(random.choice([0, 1, 100, 250]))
            written[name] += text
            with open(there / f"{name}.log", "ab") as file:
                file.write(text)
        said = sender.due(written, now)
        if step > 60 and said is None and not sender.waits:
            break
        late += [said] * random.choice([0, 1, 2]) if said is not None else []
        while late and random.random() < 0.7:
            message = late.pop(random.randrange(len(late)))
            if isinstance(message, LogFiled):
                sender.take(message)
            elif answer := files.take(message):
                late += [answer] * random.choice([0, 1, 1, 2])
    assert not sender.waits
    for name, text in written.items():
        assert (tmp_path / f"{name}.log").read_bytes() == text


def test_one_piece_is_under_way_and_is_said_again(there: Path) -> None:
    (there / "a.log").write_bytes(b"x" * (TEXT_BYTES + 5))
    (there / "b.log").write_bytes(b"y")
    sender = LogSender(there)
    first = sender.due("ab", 0.0)
    assert first == LogText("a", 0, b"x" * TEXT_BYTES)
    assert sender.due("ab", AGAIN_S / 2) is None
    times = [now / 4 for now in range(1, 400) if sender.due("ab", now / 4) == first]
    assert times[0] == AGAIN_S
    gaps = [b - a for a, b in pairwise(times)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == AGAIN_MOST_S
    assert times[4] > 10.0, "in the time of a lease a line that stands still gets five"
    sender.take(LogFiled("a", 0))
    assert sender.waits, "an answer that knows less than was asked"
    sender.take(LogFiled("a", TEXT_BYTES))
    assert sender.due("ab", 100.0) == LogText("b", 0, b"y"), "each log in its turn"
    sender.take(LogFiled("b", 1))
    assert sender.due("ab", 100.0) == LogText("a", TEXT_BYTES, b"xxxxx")
    assert sender.due("ab", 100.0 + AGAIN_S) is not None, "the pauses of each piece begin anew"
    sender.take(LogFiled("a", TEXT_BYTES + 5))
    sender.take(LogFiled("a", TEXT_BYTES))
    assert sender.due("ab", 100.0) is None, "an answer that comes late takes nothing back"


def test_only_the_runs_own_files_are_written(files: LogFiles, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    for name in ("c", "../a", "/etc/cron.d/x", ""):
        assert files.take(LogText(name, 0, b"evil")) is None
    assert sorted(tmp_path.rglob("*")) == before


def test_what_was_filed_leaves_no_copy_and_the_rest_stays(there: Path) -> None:
    (there / "a.log").write_bytes(b"xyz")
    (there / "b.log").write_bytes(b"xyz")
    sender = LogSender(there)
    sender.take(LogFiled("a", 3))
    sender.take(LogFiled("b", 2))
    sender.remove("ab")
    assert [path.name for path in there.iterdir()] == ["b.log"]
    sender.take(LogFiled("b", 3))
    sender.remove("ab")
    assert not there.exists()


def test_one_that_cannot_be_removed_keeps_no_other(there: Path) -> None:
    (there / "a.log").mkdir()
    (there / "c.log").write_bytes(b"xyz")
    sender = LogSender(there)
    for name in "abc":
        sender.take(LogFiled(name, 1 << 20))
    sender.remove("abc")
    assert [path.name for path in there.iterdir()] == ["a.log"]


def test_a_log_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    files = LogFiles({"a": tmp_path / "none" / "a.log"})
    assert files.take(LogText("a", 0, b"xyz")) == LogFiled("a", 3)
