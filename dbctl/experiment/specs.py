"""The experiment file: YAML text to frozen types, every error at once with file:line:column.

Specs of layers live in model/, of rules in optim/, the rest here. yaml and pydantic are imported
inside the functions that read a file: nodes get the resolved JSON and never load them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, MaxLen, MinLen

from dbctl.model.network import NetworkSpec
from dbctl.optim.rules import RuleSpec

Count = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0)]


# ------------------------------------------------------------------------------------------ data


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """Every source: `scale` multiplies, or `standardize`; `rows` keeps the first."""

    scale: Positive | None = None
    standardize: bool = False
    rows: Count | None = None


@dataclass(frozen=True, kw_only=True)
class DigitsSource(_Prepared):
    """scikit-learn's copy of the UCI digits; test is every row whose index is 4 mod 5."""

    source: Literal["digits"] = "digits"
    split: Literal["train", "test"]


@dataclass(frozen=True, kw_only=True)
class IdxSource(_Prepared):
    source: Literal["idx"] = "idx"
    images: str
    labels: str


@dataclass(frozen=True, kw_only=True)
class NpzSource(_Prepared):
    source: Literal["npz"] = "npz"
    path: str
    x: str
    y: str


@dataclass(frozen=True, kw_only=True)
class NpySource(_Prepared):
    """Two .npy files, memory-mapped."""

    source: Literal["npy"] = "npy"
    x: str
    y: str


@dataclass(frozen=True, kw_only=True)
class CsvSource(_Prepared):
    """`label` names a column of the header line, or is its number from 0."""

    source: Literal["csv"] = "csv"
    path: str
    label: str | Annotated[int, Ge(0)]


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
SOURCE_SPECS = {
    "digits": DigitsSource,
    "idx": IdxSource,
    "npz": NpzSource,
    "npy": NpySource,
    "csv": CsvSource,
    "synthetic": SyntheticSource,
}


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


@dataclass(frozen=True, kw_only=True)
class DownpourSpec:
    """Paper A, section 4.1 and appendix 7.1; keys that are ours: docs/experiments.md."""

    type: Literal["downpour"] = "downpour"
    batch_size: Count
    rule: RuleSpec
    n_fetch: Count = 1
    n_push: Count = 1
    warmstart: Warmstart | None = None
    overlap: bool = True
    clip: Positive | None = None
    l2: Annotated[float, Ge(0)] = 0.0
    max_lead: Count | None = None
    staleness_scaling: bool = False
    slots: Annotated[int, Ge(2), Le(16)] = 2


OptimizerSpec = SgdSpec | DownpourSpec
OPTIMIZER_SPECS = {"sgd": SgdSpec, "downpour": DownpourSpec}


# ------------------------------------------------------------------------------------------- run


@dataclass(frozen=True, kw_only=True)
class Every:
    """`amount` of `unit`: N steps | N epochs | N s | N min (minutes are kept as 60 s)."""

    amount: Positive
    unit: Literal["steps", "epochs", "seconds"]


@dataclass(frozen=True, kw_only=True)
class PartitionSpec:
    count: Count = 1


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


@dataclass(frozen=True, kw_only=True)
class LocalCluster:
    launcher: Literal["local"] = "local"


ClusterSpec = LocalCluster


@dataclass(frozen=True, kw_only=True)
class Experiment:
    version: Literal[1]
    name: Annotated[str, MinLen(1), MaxLen(100)]
    seed: Annotated[int, Ge(0), Le(2**63 - 1)] = 0
    data: DataSpec
    network: NetworkSpec
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
