"""Hosts that are all this machine, reached by a program named `ssh` that runs the command here."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dbctl.run import clusters
from dbctl.run.cluster_hosts import end_keepers
from dbctl.run.clusters import Cluster
from tests.cluster.harness import wait_until
from tests.keepers import Keepers

ROOT = Path(__file__).parent.parent
SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
[ -e "$DIRECTORY/$2" ] && . "$DIRECTORY/$2"
exec sh -c "$3"
"""


class Place:
    """Hosts `a`, `b`, ... that are all this machine; `spoil` gives one a fault."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path / "lab.yaml"
        self._keepers = Keepers(path)
        self.python = str(self._keepers.python)
        self.keepers = self._keepers.found
        self.close = self._keepers.close

    def spoil(self, host: str, script: str) -> None:
        (self.path / "hosts" / host).write_text(script)

    def mend(self, host: str) -> None:
        (self.path / "hosts" / host).unlink()

    def hosts(self, *names: str) -> str:
        there = {"python": self.python, "workdir": str(self.path / "work")}
        rows = [{"name": name, **there} for name in names]
        self.file.write_text(json.dumps({"version": 1, "hosts": rows}))
        return str(self.file)


@contextlib.contextmanager
def hosts_here(tmp_path: Path) -> Iterator[Place]:
    """Where the clusters of a test are known; its keepers end with it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("bin", "hosts"):
            (tmp_path / name).mkdir()
        ssh = tmp_path / "bin" / "ssh"
        ssh.write_text(SSH)
        ssh.chmod(0o755)
        patch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("DIRECTORY", str(tmp_path / "hosts"))
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        this = Place(tmp_path)
        yield this
        assert clusters.directory().is_relative_to(tmp_path), "not those of whoever runs the tests"
        for name in clusters.known():
            cluster = clusters.read(name)
            if any(Path(one.socket).exists() for one in cluster.keepers):
                end_keepers(cluster, force=True)
        wait_until(lambda: not this.keepers(), 5.0)
        this.close()


def a_cluster(*names: str, **changes: Any) -> Cluster:
    """One that nobody launched."""
    keepers = [
        {
            "host": {"name": name, "slots": 4, "env": ["A=it's #1"]},
            "socket": f"/tmp/dbctl-keeper-{name}/control.sock",
            "pid": 1,
            "python": "/p",
        }
        for name in names
    ]
    values = {
        "version": 1, "name": "lab", "dbctl": "0.1.0", "protocol": 2, "launched": "now",
        "keepers": keepers, **changes,
    }  # fmt: skip
    path = clusters.directory() / "lab.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))
    return clusters.read("lab")
