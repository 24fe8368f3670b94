"""Training and hold-out curves of finished runs, against passes over the data and against time.

    python experiments/curves.py RUN_DIR ... --out curves.svg

Reads metrics.jsonl and resolved.yaml of each run directory. Needs matplotlib
(`pip install '.[plot]' in a clone`). Source of the form: Dean et al. 2012, figure 4.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import yaml


def curve(run_dir: Path) -> tuple[str, list[tuple[float, float, float]]]:
    """The run's name, and (epochs, seconds, accuracy) of each evaluation."""
    name = yaml.safe_load((run_dir / "resolved.yaml").read_text(encoding="utf-8"))["name"]
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    points = [
        (record["epochs"], record["time"], record["accuracy"])
        for record in found
        if record["event"] == "evaluation"
    ]
    return name, points


def draw(run_dirs: list[Path], out: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for run_dir in run_dirs:
        name, points = curve(run_dir)
        epochs, seconds, accuracy = zip(*points, strict=True)
        for axis, x in zip(axes, (epochs, seconds), strict=True):
            axis.plot(x, [100 * a for a in accuracy], marker=".", label=name)
    axes[0].set(xlabel="passes over the training rows", ylabel="accuracy on the test rows, %")
    axes[1].set(xlabel="seconds of training")
    axes[0].legend(loc="lower right")
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, default=Path("curves.svg"))
    options = parser.parse_args()
    draw(options.run_dirs, options.out)


if __name__ == "__main__":
    main()
