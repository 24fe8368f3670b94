"""Figure 3 of the paper: speed-up of one mini-batch against partitions, predicted and measured.

    python experiments/figure3.py [FILE.yaml ...] [--predict 1,2,4,8,16,32,64] [--measure 1,2]
                                  [--csv figure3.csv] [--png figure3.png]

Each experiment file (default: figure3, speech-paper and vision-paper) is predicted by `dbctl train
--dry-run --partitions` from the speed of this machine, as if each partition had a core of its own,
and measured by `dbctl train` for as many partitions as there are cores. A table goes to standard
output and, with --csv, to a file; --png needs matplotlib (`pip install
'.[plot]'` in a clone).

Source: Dean et al. 2012, figure 3: mean time of one mini-batch of SGD, one replica on N machines.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from dbctl.metrics import of_one_step, read_metrics

HERE = Path(__file__).parent
FILES = [HERE / f"{name}.yaml" for name in ("figure3", "speech-paper", "vision-paper")]
SETTINGS = ("replicas=1", "evaluate=off", "checkpoint={every: off}", "threads=1")


def dbctl(file: Path, *words: str, settings: tuple[str, ...] = ()) -> list[str]:
    """The lines that `dbctl train FILE --json` prints."""
    command = [sys.executable, "-m", "dbctl", "train", str(file), "--json", *words]
    for setting in (*SETTINGS, *settings):
        command += ["--set", setting]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()


def predict(file: Path, counts: str) -> dict[int, float]:
    """Seconds of one mini-batch by count of partitions."""
    forecast = json.loads(dbctl(file, "--dry-run", "--partitions", counts)[-1])["forecast"]
    return {table["count"]: table["seconds"] for table in forecast["partitions"]}


def measure(file: Path, count: int) -> float:
    """Seconds of one mini-batch, without a run's beginning and end."""
    with tempfile.TemporaryDirectory() as directory:
        words = ("--run-dir", f"{directory}/run")
        dbctl(file, *words, settings=(f"partition={{count: {count}}}",))
        records = list(read_metrics(Path(directory, "run", "metrics.jsonl")))
    try:
        return of_one_step(records, "worker-0.0", "time")
    except ValueError as error:
        raise SystemExit(f"{file.name}: {error}; raise stop.steps") from error


def rows_of(files: list[Path], counts: str, measured: list[int]) -> list[dict[str, object]]:
    """One row a network and count; speed-ups are against one partition, found the same way."""
    rows: list[dict[str, object]] = []
    for file in files:
        for kind, seconds in (
            ("predicted", predict(file, counts)),
            ("measured", {count: measure(file, count) for count in measured}),
        ):
            for count, of_one in seconds.items():
                speed_up = round(seconds[1] / of_one, 3) if 1 in seconds else ""
                row = {"network": file.stem, "kind": kind, "partitions": count}
                rows.append({**row, "seconds": round(of_one, 6), "speed_up": speed_up})
    return rows


def draw(rows: list[dict[str, object]], path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for number, network in enumerate(dict.fromkeys(row["network"] for row in rows)):
        for kind, style in (("predicted", "-"), ("measured", "o")):
            chosen = [r for r in rows if (r["network"], r["kind"]) == (network, kind)]
            points = [(r["partitions"], r["speed_up"]) for r in chosen if r["speed_up"] != ""]
            if points:
                label = f"{network}, {kind}"
                axes.plot(*zip(*points, strict=True), style, color=f"C{number}", label=label)
    axes.set(xlabel="partitions of one replica", ylabel="speed-up of a mini-batch", xscale="log")
    axes.set_xticks(sorted({row["partitions"] for row in rows}))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.minorticks_off()
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, default=FILES)
    parser.add_argument("--predict", default="1,2,4,8,16,32,64")
    cores = len(os.sched_getaffinity(0))
    few = ",".join(str(2**i) for i in range(cores.bit_length()))
    parser.add_argument("--measure", default=few, help="empty: nothing is run")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--png", type=Path)
    arguments = parser.parse_args()
    if arguments.png and find_spec("matplotlib") is None:  # measuring takes minutes
        parser.error("--png needs matplotlib: pip install '.[plot]'")
    measured = [int(word) for word in arguments.measure.split(",") if word]
    rows = rows_of(arguments.files, arguments.predict, measured)
    for row in rows:
        print("".join(f"{value!s:>14}" for value in row.values()))
    if arguments.csv:
        with arguments.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    if arguments.png:
        draw(rows, arguments.png)


if __name__ == "__main__":
    main()
