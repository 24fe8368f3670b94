"""What an experiment is: frozen types, each with its limits, and nothing that reads or checks.

Rules of this file: a spec is a frozen keyword-only dataclass; a limit is an `annotated_types`
constraint in the annotation; a class that is one of several carries a tag (`type`, `source` or
`launcher`: a `Literal` of one value with that value as default), and the file must give it. Specs
of layers live in model/, of rules in optim/, the rest here. What fields cannot say alone (one key
against another) is in checks.py. No yaml: nodes import this module.

The annotations are the single source: read.py reads a file by them, schema.py writes the JSON
Schema from them, resolve.py rebuilds an experiment by them, and words.py says them in English.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, MaxLen, MinLen

from dbctl.model.network import NetworkSpec
from dbctl.optim.batch import BatchMethod, History, LineSearchSpec, Tolerance
from dbctl.optim.rules import RuleSpec


@dataclass(frozen=True)
class RelativeToFile:
    """Marks text that names a file: a relative one starts at the experiment file's directory.

    `what` is what an error calls it.
    """

    what: str = "the name of a file"


Count = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0)]
Text = Annotated[str, MinLen(1)]
FileName = Annotated[str, MinLen(1), RelativeToFile()]
HostsFile = Annotated[str, MinLen(1), RelativeToFile("the name of a hosts file")]
RunName = Annotated[str, MinLen(1), RelativeToFile("a run directory, or DIRECTORY@STEP")]


# ------------------------------------------------------------------------------------------ data


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """Every source: `scale` multiplies, or `standardize`; `rows` keeps the first.

    `ship`: hosts are sent their rows, and have none of the source's files; of files only.
    """

    scale: Positive | None = None
    standardize: bool = False
    rows: Count | None = None
    ship: bool = False


@dataclass(frozen=True, kw_only=True)
class DigitsSource(_Prepared):
    """scikit-learn's copy of the UCI digits; test is every row whose index is 4 mod 5."""

    source: Literal["digits"] = "digits"
    split: Literal["train", "test"]


@dataclass(frozen=True, kw_only=True)
class IdxSource(_Prepared):
    source: Literal["idx"] = "idx"
    images: FileName
    labels: FileName


@dataclass(frozen=True, kw_only=True)
class NpzSource(_Prepared):
    source: Literal["npz"] = "npz"
    path: FileName
    x: Text
    y: Text


@dataclass(frozen=True, kw_only=True)
class NpySource(_Prepared):
    """Two .npy files, memory-mapped."""

    source: Literal["npy"] = "npy"
    x: FileName
    y: FileName


@dataclass(frozen=True, kw_only=True)
class CsvSource(_Prepared):
    """`label` names a column of the header line, or is its number from 0."""

    source: Literal["csv"] = "csv"
    path: FileName
    label: Text | Annotated[int, Ge(0)]


@dataclass(frozen=True, kw_only=True)
class SyntheticSource(_Prepared):
    """Gaussian clusters, one centre a class, made from the seed: any size, no file."""

    source: Literal["synthetic"] = "synthetic"
    rows: Count
    features: Count
    classes: Count
    noise: Annotated[float, Ge(0)] = 1.0
    seed: Annotated[int, Ge(0)] = 0
    split: Literal["train", "test"] = "train"


SourceSpec = DigitsSource | IdxSource | NpzSource | NpySource | CsvSource | SyntheticSource


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    train: SourceSpec
    test: SourceSpec | None = None


# ------------------------------------------------------------------------------------- optimizer


@dataclass(frozen=True, kw_only=True)
class Warmstart:
    steps: Count


@dataclass(frozen=True, kw_only=True)
class SgdSpec:
    """One replica, blocking, n_fetch = n_push = 1: the baseline of every comparison."""

    type: Literal["sgd"] = "sgd"
    batch_size: Count
    rule: RuleSpec
    clip: Positive | None = None
    l2: Annotated[float, Ge(0)] = 0.0

    @property
    def client(self) -> DownpourSpec:
        """What it is as Downpour: one replica that blocks at each step (docs/paper.md, A2)."""
        return DownpourSpec(batch_size=self.batch_size, rule=self.rule, overlap=False)


@dataclass(frozen=True, kw_only=True)
class DownpourSpec:
    """Paper A, section 4.1 and appendix 7.1; keys that are ours: docs/experiments.md."""

    type: Literal["downpour"] = "downpour"
    batch_size: Count
    rule: RuleSpec
    n_fetch: Count = 1
    n_push: Count = 1
    warmstart: Warmstart | None = None
    overlap: bool | None = None  # None: `with_overlap` says
    clip: Positive | None = None
    l2: Annotated[float, Ge(0)] = 0.0
    max_lead: Count | None = None
    staleness_scaling: bool = False
    slots: Annotated[int, Ge(2), Le(16)] = 2

    @property
    def client(self) -> DownpourSpec:
        """What its workers do."""
        return self

    @property
    def blocking(self) -> bool:
        """A worker does not begin a step before its last push is in the parameters it reads."""
        assert self.overlap is not None, "with_overlap was not asked"
        return not self.overlap and self.n_fetch == 1

    @property
    def slots_used(self) -> int:
        """How many slots a worker has: who waits for each push has one under way."""
        return 1 if self.blocking else self.slots


_LINE_SEARCH = LineSearchSpec()


@dataclass(frozen=True, kw_only=True)
class SandblasterSpec:
    """Distributed batch optimisation: paper A, section 4.2; what it leaves open is ours."""

    type: Literal["sandblaster"] = "sandblaster"
    method: BatchMethod = "lbfgs"
    history: History = 10
    portion: Count = 100
    # Each portion's loss is in one header (envelope.HEADER_BYTES).
    send_every: Annotated[int, Ge(1), Le(5000)] = 5
    batch: Count | None = None
    backup: bool = True
    line_search: LineSearchSpec = _LINE_SEARCH
    tolerance: Tolerance = 1e-5
    l2: Annotated[float, Ge(0)] = 0.0

    @property
    def batch_size(self) -> int:
        """Rows of one pass forward and backward."""
        return self.portion


OptimizerSpec = SgdSpec | DownpourSpec | SandblasterSpec
OnlineSpec = SgdSpec | DownpourSpec  # an update a mini-batch, by a rule


# ------------------------------------------------------------------------------------------- run


EVERY_PATTERN = r"([0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?) *(steps?|epochs?|s|min)"


@dataclass(frozen=True, kw_only=True)
class Every:
    """`amount` of `unit`: N steps | N epochs | N s | N min (minutes are kept as 60 s).

    Steps and epochs are whole. In a file this is always text; `str(every)` is that text and
    `Every.from_text` reads it back to an equal value.
    """

    amount: Positive
    unit: Literal["steps", "epochs", "seconds"]

    @classmethod
    def from_text(cls, text: str) -> Every | None:
        """The interval that `text` says, or None where it says none."""
        match = re.fullmatch(EVERY_PATTERN, text)
        if match is None:
            return None
        amount = float(match[1]) * (60.0 if match[2] == "min" else 1.0)
        unit = match[2].rstrip("s") or "s"
        if not 0 < amount < float("inf") or (unit in ("step", "epoch") and amount % 1):
            return None
        if unit == "step":
            return cls(amount=amount, unit="steps")
        return cls(amount=amount, unit="epochs" if unit == "epoch" else "seconds")

    def __str__(self) -> str:
        number = int(self.amount) if self.amount % 1 == 0 and self.amount < 1e15 else self.amount
        unit = "s" if self.unit == "seconds" else self.unit
        return f"{number} {unit[:-1] if number == 1 and unit != 's' else unit}"


@dataclass(frozen=True, kw_only=True)
class PartitionSpec:
    """How one replica is cut: `count` chooses by itself, `grid` is (rows, columns) of parts."""

    count: Count = 1
    grid: tuple[Count, Count] | None = None


@dataclass(frozen=True, kw_only=True)
class StopSpec:
    """Whichever comes first; at least one is given."""

    epochs: Count | None = None
    steps: Count | None = None
    seconds: Positive | None = None
    test_accuracy: Annotated[float, Gt(0), Le(1)] | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluateSpec:
    every: Every | None = None  # None: off


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    every: Every | None = Every(amount=30.0, unit="seconds")  # None: only at the end
    keep: Count = 3


# --------------------------------------------------------------------------------------- cluster


@dataclass(frozen=True, kw_only=True)
class LocalCluster:
    launcher: Literal["local"] = "local"


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """One machine that ssh reaches; what a text may look like is in checks.py."""

    name: Text
    ssh: Text | None = None  # None: the name
    address: Text | None = None  # None: the host in `ssh`
    python: Text = "python3"
    workdir: Text = "~/.local/state/dbctl"
    env: tuple[Text, ...] = ()
    slots: Count | None = None
    threads: Count | None = None
    labels: tuple[Literal["shard", "worker", "evaluator"], ...] = ()

    @property
    def destination(self) -> str:
        """What the user's ssh is given."""
        return self.ssh or self.name

    @property
    def reached_at(self) -> str:
        """What other hosts connect to."""
        if self.address is not None:
            return self.address
        host = self.destination.removeprefix("ssh://").rpartition("@")[2].rstrip("/")
        bracketed = re.fullmatch(r"\[(.*)\](?::[0-9]+)?", host)
        if bracketed is not None:
            return bracketed[1]
        return host.partition(":")[0] if host.count(":") == 1 else host


@dataclass(frozen=True, kw_only=True)
class SshCluster:
    """`hosts` may name a file in the experiment; what that file holds has taken its place here."""

    launcher: Literal["ssh"] = "ssh"
    hosts: Annotated[tuple[HostSpec, ...], MinLen(1)] | HostsFile
    encryption: Literal["on", "off"] = "on"

    @property
    def members(self) -> tuple[HostSpec, ...]:
        assert isinstance(self.hosts, tuple), f"{self.hosts} was not read"
        return self.hosts


ClusterSpec = LocalCluster | SshCluster


@dataclass(frozen=True, kw_only=True)
class Experiment:
    version: Literal[1]
    name: Annotated[str, MinLen(1), MaxLen(100)]
    seed: Annotated[int, Ge(0), Le(2**63 - 1)] = 0
    data: DataSpec
    network: NetworkSpec
    initialize_from: RunName | None = None
    partition: PartitionSpec = PartitionSpec()
    replicas: Count = 1
    min_replicas: Count = 1
    shards: Count = 1
    optimizer: OptimizerSpec
    stop: StopSpec
    evaluate: EvaluateSpec = EvaluateSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    cluster: ClusterSpec = LocalCluster()
    threads: Count | None = None


def with_overlap(experiment: Experiment) -> Experiment:
    """Where a file leaves `overlap` open the hosts decide.

    It hides the way between them. On one host there is none: who waits there gives its core to the
    shard, and need not copy parameters to take its own last push off (docs/decisions.md).
    """
    optimizer = experiment.optimizer
    if not isinstance(optimizer, DownpourSpec) or optimizer.overlap is not None:
        return experiment
    cluster = experiment.cluster
    apart = isinstance(cluster, SshCluster) and len(cluster.members) > 1
    return replace(experiment, optimizer=replace(optimizer, overlap=apart))
