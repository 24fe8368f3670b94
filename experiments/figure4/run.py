"""Figure 4 of the paper: four methods from one common warmstart, one after the other.

    python experiments/figure4/run.py [--out runs/figure4] [--plot figure4.svg]
                                      [--only sgd,downpour-adagrad] [--set KEY=VALUE ...]

Trains warmstart.yaml, then each method with `initialize_from`, each for as many seconds as its file
says (30), and ends with `dbctl compare`. --set goes to every `dbctl train`, as for a smaller
machine `--set stop.seconds=10 --set data.train.rows=10000`. About three minutes on two cores.
--plot needs matplotlib (`pip install '.[plot]'` in a clone).

Source: Dean et al. 2012, section 5, figure 4: training and hold-out accuracy against time.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
METHODS = ("sgd", "downpour-fixed", "downpour-adagrad", "sandblaster")


def commands(
    out: Path, methods: Sequence[str], *, settings: Sequence[str] = (), plot: Path | None = None
) -> list[list[str]]:
    """The command lines of `dbctl`, in order: the warmstart, the methods, their comparison."""
    begun = (out / "warmstart").absolute()
    first = train("warmstart", out, settings)
    begin = f"initialize_from={begun}"
    made = [first, *(train(method, out, [begin, *settings]) for method in methods)]
    picture = ["--plot", str(plot)] if plot is not None else []
    return [*made, ["compare", *(str(out / method) for method in methods), *picture]]


def train(name: str, out: Path, settings: Sequence[str]) -> list[str]:
    words = ["train", str(HERE / f"{name}.yaml"), "--run-dir", str(out / name), "--quiet"]
    for setting in settings:
        words += ["--set", setting]
    return words


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = HERE.parent.parent / "runs" / "figure4"
    parser.add_argument("--out", type=Path, default=default, help="where the runs are kept")
    parser.add_argument("--plot", type=Path, help="a picture, .png or .svg")
    parser.add_argument("--only", default=",".join(METHODS), help="two or more of the methods")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    methods = arguments.only.split(",")
    if len(methods) < 2 or not set(methods) <= set(METHODS):
        parser.error(f"--only takes two or more of {', '.join(METHODS)}")
    if arguments.plot and find_spec("matplotlib") is None:  # training takes minutes
        parser.error("--plot needs matplotlib: pip install '.[plot]'")
    if arguments.out.exists() and any(arguments.out.iterdir()):
        parser.error(f"{arguments.out} is not empty: give another --out")
    for words in commands(arguments.out, methods, settings=arguments.settings, plot=arguments.plot):
        done = subprocess.run([sys.executable, "-m", "dbctl", *words], check=False)
        if done.returncode != 0:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
