"""`initialize_from`: the run whose checkpoint a new run's parameters come from.

Rules of this file: it finds and proves; shards read (dbctl/node/build.py), each its own range, so
no process holds the whole. Only the tensors must be the same, by name and shape: another
activation, rule, count or method is what a comparison from one warmstart is about (Dean et al.
2012, figure 4).

`DIRECTORY@STEP`: a `@` with digits after it at the end is a step. A directory that ends so is
written with a slash, `old@5/`. What was found is kept in the experiment with its step, so the run
says by itself what it began from.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dbctl.checkpoint.layout import MANIFEST, step_of
from dbctl.checkpoint.reader import Checkpoint, checkpoints_by_step, newest_good, open_checkpoint
from dbctl.errors import CheckpointError, UsageError
from dbctl.experiment.specs import Experiment
from dbctl.model.network import tensors
from dbctl.run.find import find


def split(name: str) -> tuple[str, int | None]:
    """The directory and the step of `DIRECTORY[@STEP]`; None: the newest good one."""
    match = re.fullmatch(r"(.+)@([0-9]{1,18})", name, flags=re.DOTALL)
    return (match[1], int(match[2])) if match else (name, None)


def settle(experiment: Experiment, *, warn: Callable[[str], None]) -> tuple[Experiment, str]:
    """The experiment with the step that was found, and that checkpoint's directory.

    ("" where it asks for none.) Every file of it is hashed. `warn` is told of newer checkpoints
    that are not good. UsageError: no run, no such checkpoint, or one of other tensors.
    CheckpointError: the one that was asked for is damaged.
    """
    if experiment.initialize_from is None:
        return experiment, ""
    directory, step = split(experiment.initialize_from)
    checkpoint = _choose(directory, step, warn)
    try:
        checkpoint.check(tensors(experiment.network))
    except CheckpointError as error:
        raise UsageError(str(error)) from error
    name = f"{directory}@{checkpoint.manifest.step}"
    return replace(experiment, initialize_from=name), str(checkpoint.path.absolute())


def absent(experiment: Experiment) -> str:
    """What of `initialize_from` is not there yet, for who starts nothing; "" if nothing is missing.

    Only names are looked at: a file may be checked before the run that it begins from has ended.
    """
    if experiment.initialize_from is None:
        return ""
    try:
        _places(*split(experiment.initialize_from))
    except UsageError as error:
        return f"initialize_from: {error}"
    return ""


def _places(directory: str, step: int | None) -> dict[int, Path]:
    """The checkpoints of the run in `directory`; UsageError where `step` or any is missing."""
    path = Path(directory)
    of_checkpoint = step_of(path.name)
    if of_checkpoint is not None and (path / MANIFEST).exists():
        raise UsageError(
            f"{directory}: is a checkpoint, expected the directory of its run: "
            f"{path.parent.parent}@{of_checkpoint}"
        )
    found = checkpoints_by_step(find(directory).checkpoints)
    if not found:
        raise UsageError(f"{directory}: this run has saved no checkpoint")
    if step is not None and step not in found:
        have = ", ".join(map(str, reversed(found)))
        raise UsageError(f"{directory}: has no checkpoint of step {step}, only of {have}")
    return found


def _choose(directory: str, step: int | None, warn: Callable[[str], None]) -> Checkpoint:
    found = _places(directory, step)
    if step is not None:
        return open_checkpoint(found[step])
    checkpoint, warnings = newest_good(next(iter(found.values())).parent)
    for warning in warnings:
        warn(warning)
    return checkpoint
