"""The table of a comparison and its plain values (dbctl/progress/comparison.py)."""

from __future__ import annotations

from typing import Any

from dbctl.progress.comparison import Entry, as_object, compare, lines
from dbctl.progress.history import read_history

TABLE = """\
run    optimizer         replicas  partitions  shards  status  steps  examples  seconds\
     best     last
slow   downpour adagrad         2           1       3    done  1,234     3,000     30.0\
  86.00 %  86.00 %
quick  downpour adagrad         2           1       3    done  1,234     2,000     20.0\
  90.00 %  90.00 %

to an accuracy of 86.00 % of the test rows, the greatest that all runs reached:

run    seconds  replica-s  examples   bytes
slow      30.0       60.0     3,000  7.5 MB
quick     20.0       40.0     2,000  5.0 MB"""


def entry(label: str, *accuracies: float | None, status: str = "done", **start: Any) -> Entry:
    """One evaluation each ten seconds."""
    made = {"event": "start", "time": 0.0, "replicas": 2, "partitions": 1, "shards": 3, **start}
    records = [{"optimizer": "downpour", "method": "adagrad", "name": label, **made}]
    for number, accuracy in enumerate(accuracies, 1):
        node = {"node": "worker-0.0", "replica": 0, "time": 10.0 * number}
        totals = {"examples": 1000 * number, "bytes_pushed": 2_500_000 * number}
        records.append({"event": "worker", **node, **totals})
        records.append({"event": "evaluation", "time": 10.0 * number, "accuracy": accuracy})
    seconds = 10.0 * len(accuracies)
    records.append({"event": "finished", "time": seconds, "status": status, "steps": 1234})
    history = read_history(records)
    return Entry(label=label, run_dir=f"runs/{label}", status=status, history=history)


def test_the_default_is_the_greatest_accuracy_that_all_reached() -> None:
    text = list(lines(compare([entry("slow", 0.5, 0.6, 0.86), entry("quick", 0.85, 0.9)])))
    assert "\n".join(text) == TABLE


def test_a_run_that_never_arrives_says_so() -> None:
    """Paper A, section 5, figure 5: with a fixed rate Downpour often never arrives."""
    runs = [entry("a", 0.9), entry("fixed", 0.5), entry("on", 0.4, status="running")]
    text = list(lines(compare([*runs, entry("blind")], 0.85)))
    assert "to an accuracy of 85.00 % of the test rows:" in text
    assert [line.split() for line in text[-6:-3]] == [
        [name, "-", "-", "-", "-"] for name in ("fixed", "on", "blind")
    ]
    assert text[-3:] == [
        "fixed: never arrives, its best is 50.00 %",
        "on: not yet, its best is 40.00 %",
        "blind: never arrives, it measured none",
    ]


def test_runs_that_measured_nothing_are_named() -> None:
    text = list(lines(compare([entry("a", 0.9), entry("blind"), entry("float", None)])))
    assert (
        "to an accuracy of 90.00 % of the test rows, the greatest that all runs reached "
        "(blind, float measured none):"
    ) in text
    text = list(lines(compare([entry("blind"), entry("float", None)])))
    assert text[-1].startswith("no run has measured an accuracy")


def test_what_is_not_known_is_a_dash_and_foreign_text_is_escaped() -> None:
    odd = entry("a\x1b[31m", 0.5, optimizer=None, method=None, replicas=None, shards="many")
    text = list(lines(compare([odd, entry("b", 0.5)])))
    assert text[1].split()[:5] == [r"a\x1b[31m", "-", "-", "1", "-"]
    assert all(line.isprintable() for line in text)


def test_the_object_has_every_figure() -> None:
    found = as_object(compare([entry("slow", 0.5, 0.86), entry("never", 0.1)], 0.8))
    assert (found["event"], found["accuracy"], found["accuracy_given"]) == ("comparison", 0.8, True)
    slow, never = found["runs"]
    assert slow == {
        "label": "slow",
        "run_dir": "runs/slow",
        "name": "slow",
        "optimizer": "downpour adagrad",
        "replicas": 2,
        "partitions": 1,
        "shards": 3,
        "status": "done",
        "steps": 1234,
        "seconds": 20.0,
        "replica_seconds": 40.0,
        "examples": 2000,
        "bytes": 5_000_000,
        "best_accuracy": 0.86,
        "last_accuracy": 0.86,
        "reached": {
            "seconds": 20.0, "replica_seconds": 40.0, "examples": 2000, "bytes": 5_000_000,
        },
    }  # fmt: skip
    assert never["reached"] is None
    assert as_object(compare([entry("blind"), entry("none")]))["accuracy"] is None
