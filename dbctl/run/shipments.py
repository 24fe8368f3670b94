"""`ship: true`: what the hosts of a run are sent of the data, read here as they ask for it.

Rules of this file: rows are read by one thread, one piece after the other; at most READY_MOST
pieces wait to be sent, whatever hosts do. What a node may read is said here and never by a node.

Theory of operation. A worker needs its replica's rows, in batch methods all of them, an evaluator
the split that it measures. Each such set is two files, features and targets (data/packing.py),
whose digests are found before anything starts: a node that has them asks for nothing. The session's
loop brings what nodes ask for (`ask`) and sends what was read (`due`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dbctl.data.file_rows import unmapped
from dbctl.data.order import subset
from dbctl.data.packing import Bytes, Readable, RowsFile, digests, label_rows, unpack
from dbctl.data.rows import ArrayRows, Indices, Rows
from dbctl.data.sources import Source
from dbctl.errors import DbctlError, LaunchError
from dbctl.experiment.specs import SandblasterSpec, SshCluster
from dbctl.plan import Plan
from dbctl.process import one_line
from dbctl.roles.base import Effects, Record, Send
from dbctl.shipment import Sender, Shipment, Shipped
from dbctl.wire_ship import ReadShipment, ShipmentPart

READY_MOST = 4
CLOSE_S = 1.0
DIRECTORY = "data"  # within a host's workdir


class _Rows:
    """Rows that files are made of: those of a source, or its targets; `path` is for messages."""

    def __init__(self, rows: Rows, path: str) -> None:
        self.rows = unmapped(rows)
        self.path = path
        self._readable: Readable | None = None

    def readable(self, directory: str) -> Readable:
        """The same rows, to be read from anywhere."""
        if self._readable is None:
            self._readable = unpack(self.rows, self.path, directory)
        return self._readable


@dataclass(frozen=True, kw_only=True)
class _File:
    """A shipment, and where its bytes are. `split`: train or test; `part`: x or y."""

    shipment: Shipment
    file: RowsFile
    rows: _Rows
    split: str
    part: str


class Shipments:
    """Of one life of a run. `shipped`: what each node is told of its rows.

    `wake` makes the session's loop look at `due`; `directory` has room for what a compressed source
    unpacks to.
    """

    def __init__(
        self,
        shipped: Mapping[str, Shipped],
        files: Mapping[str, _File],
        *,
        host_of: Mapping[str, str],
        directory: str,
    ) -> None:
        self.shipped = shipped
        self.wake: Callable[[], None] = lambda: None
        self._files = files
        self._host_of = host_of
        self._directory = directory
        self._sender = Sender(
            {node: {s.digest: s for s in (t.x, t.y)} for node, t in shipped.items()}
        )
        self._begun: dict[tuple[str, str], int] = {}  # (node, digest) -> from which byte on
        self._ready: deque[Send] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: LaunchError | None = None
        self._closed = False

    # ------------------------------------------------------------ the session's loop

    def ask(self, node: str, asked: ReadShipment) -> Effects:
        """Files what a node asks for; a record when it is the first of a file."""
        with self._changed:
            if self._closed or not self._sender.ask(node, asked):
                return []
            if self._thread is None:
                self._thread = threading.Thread(target=self._read, name="ship", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        key = (node, asked.digest)
        if key in self._begun:
            return []
        self._begun[key] = asked.start
        return [Record("shipment", self._row(node, asked.digest) | {"start": asked.start})]

    def due(self) -> Effects:
        """What was read. LaunchError: the data cannot be read any more."""
        with self._changed:
            if self._error is not None:
                raise self._error
            found = list(self._ready)
            self._ready.clear()
            self._changed.notify_all()
        return list(found)

    def close(self) -> list[Record]:
        """Nothing is read any more; what was sent, file by file."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)  # it may unpack a source: the run's end does not wait for it
        sent = self._sender.sent_bytes.items()
        return [
            Record("shipped", self._row(node, digest) | {"sent_bytes": n})
            for (node, digest), n in sorted(sent)
        ]

    def _row(self, node: str, digest: str) -> dict[str, object]:
        one = self._files[digest]
        return {
            "node": node,
            "host": self._host_of[node],
            "split": one.split,
            "part": one.part,
            "digest": digest,
            "size_bytes": one.shipment.size,
        }

    # ------------------------------------------------------------ the reading thread

    def _read(self) -> None:
        while True:
            with self._changed:
                wanted = None
                while not self._closed and wanted is None:
                    if len(self._ready) < READY_MOST:
                        wanted = self._sender.next()
                    if wanted is None:
                        self._changed.wait()
                if wanted is None:
                    return
            node, asked = wanted
            try:
                data = self._bytes(asked)
            except Exception as error:  # no memory, too: unanswered, the node would ask for ever
                self._fail(node, error)
                return
            with self._changed:
                self._ready.append(Send(node, ShipmentPart(asked.digest, asked.start, data)))
            self.wake()

    def _bytes(self, asked: ReadShipment) -> Bytes:
        one = self._files[asked.digest]
        return one.file.read(one.rows.readable(self._directory), asked.start, asked.n)

    def _fail(self, node: str, error: Exception) -> None:
        with self._changed:
            what = str(error) if isinstance(error, DbctlError) else one_line(error)
            self._error = LaunchError(node, f"cannot be sent its rows: {what}")
        self.wake()


# ---------------------------------------------------------------------------- what is needed


@dataclass(frozen=True)
class _Need:
    """A node's rows: of `split`, those of the replica `owner` (None: all)."""

    node: str
    split: str
    owner: int | None


def shipments_of(
    plan: Plan,
    train: Source | None,
    test: Source | None,
    *,
    split: str = "test",
    directory: Path | str,
    between: Callable[[], None] = lambda: None,
) -> Shipments:
    """What the nodes of the plan need of data with `ship`; reads that once, for the digests.

    `split`: what evaluators measure. The sources of splits that nobody reads may be None.
    `between` is called before each block that is read: what it raises ends this.
    """
    cluster, sources = plan.experiment.cluster, {"train": train, "test": test}
    host_of = {node.node: node.host for node in plan.nodes}
    files: dict[str, _File] = {}
    shipped: dict[str, Shipped] = {}
    if isinstance(cluster, SshCluster):
        there = {host.name: f"{host.workdir}/{DIRECTORY}" for host in cluster.members}
        needs = _needs(plan, split)
        made = {
            name: _pack(plan, sources[name], needs, split=name, between=between)
            for name in _splits(needs)
        }
        for need in needs:
            source = sources[need.split]
            assert source is not None
            x, y = made[need.split][need.owner]
            files |= {one.shipment.digest: one for one in (x, y)}
            shipped[need.node] = Shipped(
                x=x.shipment,
                y=y.shipment,
                rows=source.rows,
                directory=there[host_of[need.node]],
            )
    return Shipments(shipped, files, host_of=host_of, directory=str(directory))


def _needs(plan: Plan, split: str) -> list[_Need]:
    data = plan.experiment.data
    batch = isinstance(plan.experiment.optimizer, SandblasterSpec)
    found = []
    for node in plan.nodes:
        mine = "train" if node.role == "worker" else split
        spec = data.train if mine == "train" else data.test
        if node.role != "shard" and spec is not None and spec.ship:
            own = node.role == "worker" and not batch
            found.append(_Need(node.node, mine, node.replica if own else None))
    return found


def sets_for(plan: Plan, host: str) -> list[str]:
    """Which sets of rows a host is sent, if it does not have them, in words."""
    hosts = {node.node: node.host for node in plan.nodes}
    mine = dict.fromkeys(
        (need.split, need.owner) for need in _needs(plan, "test") if hosts[need.node] == host
    )
    return [
        f"data.{split}, "
        + ("all rows" if owner is None else f"{plan.rows[owner]:,} rows of replica {owner}")
        for split, owner in mine
    ]


def _splits(needs: list[_Need]) -> list[str]:
    return list(dict.fromkeys(need.split for need in needs))


def _pack(
    plan: Plan,
    source: Source | None,
    needs: list[_Need],
    *,
    split: str,
    between: Callable[[], None],
) -> dict[int | None, tuple[_File, _File]]:
    """The files x and y of each owner of rows of the split."""
    assert source is not None, f"no rows of {split}"
    owners = list(dict.fromkeys(need.owner for need in needs if need.split == split))
    picked = [_rows_of(plan, owner, source.rows) for owner in owners]
    labelled = source.kind == "labels"
    x = _Rows(source.x, source.path)
    targets = label_rows(source.y) if labelled else ArrayRows(source.y, source.y_extent)
    y = _Rows(targets, source.path)
    made = [
        _files(rows, picked, flat=rows is y and labelled, split=split, part=part, between=between)
        for part, rows in (("x", x), ("y", y))
    ]
    return dict(zip(owners, zip(*made, strict=True), strict=True))


def _rows_of(plan: Plan, owner: int | None, n_rows: int) -> Indices | None:
    """The owner's rows in rising order; the first one for a replica that has none: no file is
    empty."""
    if owner is None:
        return None
    experiment = plan.experiment
    rows = subset(n_rows, experiment.seed, replica=owner, replicas=experiment.replicas)
    return np.sort(rows) if len(rows) else np.zeros(1, np.int64)


def _files(
    rows: _Rows,
    picked: list[Indices | None],
    *,
    flat: bool,
    split: str,
    part: str,
    between: Callable[[], None],
) -> list[_File]:
    files = [RowsFile(rows.rows, one, flat=flat) for one in picked]
    named = zip(digests(rows.rows, files, between=between), files, strict=True)
    return [
        _File(shipment=Shipment(digest, file.size), file=file, rows=rows, split=split, part=part)
        for digest, file in named
    ]
