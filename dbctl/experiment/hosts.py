"""`cluster: {hosts: FILE.yaml}`: what the file holds takes the place of its name.

Rules of this file: trees only. It looks at the form of the hosts file (`version`, `hosts`, no other
key); the hosts themselves are read with the rest, so each fault is told at its line of that file,
all at once, and `--set cluster.hosts.0.slots=4` changes a host whichever file it stands in.

    version: 1
    hosts:
      - {name: left, ssh: me@left.example, slots: 8}
"""

from __future__ import annotations

import os

from dbctl.errors import ExperimentError, Problem
from dbctl.experiment.tree import (
    Listing,
    Mapping,
    Place,
    Scalar,
    Tree,
    parse_tree,
    problem,
    read_text,
)
from dbctl.experiment.words import found, no_mapping, unknown_key

CLUSTER, HOSTS = "cluster", "hosts"
KEYS = ("version", HOSTS)


class Inclusion:
    """Of one experiment; `problems` is what is wrong with the hosts file that it names by now."""

    def __init__(self, directory: str) -> None:
        self.problems: list[Problem] = []
        self._directory = directory  # relative names start there
        self._seen: Tree | None = None  # what the problems are of

    def look(self, tree: Mapping) -> None:
        """Puts the hosts in place of their file's name, if `tree` has one.

        To be asked again after each --set: one may name another file, and then nobody needs the
        first, or change a host of it, and then what was wrong with it stays.
        """
        cluster = tree.items.get(CLUSTER)
        hosts = cluster.items.get(HOSTS) if isinstance(cluster, Mapping) else None
        if self._seen is not None and (hosts is self._seen or isinstance(hosts, Mapping)):
            return
        self.problems, self._seen = [], None
        if not isinstance(hosts, Scalar) or not isinstance(hosts.value, str) or not hosts.value:
            return
        assert isinstance(cluster, Mapping)
        if "\0" in hosts.value:  # the reader refuses it with the rest
            return
        name = os.path.join(self._directory, os.path.expanduser(hosts.value))
        listing = read_hosts(name, hosts.place, self.problems)
        self._seen = cluster.items[HOSTS] = hosts if listing is None else listing


def read_hosts(name: str, asked: Place, problems: list[Problem]) -> Listing | None:
    """The list of hosts in the file; None, and problems, where there is none.

    A file that is not there is a fault of `asked`, the place that names it.
    """
    try:
        text = read_text(name)
    except ExperimentError as error:
        for one in error.problems:
            if one.line:
                problems.append(problem(Place(one.file, one.line, one.column), (), one.message))
            else:
                problems.append(problem(asked, (CLUSTER, HOSTS), f"{name}: {one.message}"))
        return None
    start = Place(name, 1, 1)
    before = len(problems)
    tree = parse_tree(text, start, problems)
    if tree is None and len(problems) > before:
        return None
    if not isinstance(tree, Mapping):
        problems.append(no_mapping(tree, start, "with `version: 1` and `hosts`"))
        return None
    for key, place in tree.keys.items():
        if key not in KEYS:
            problems.append(problem(place, (key,), unknown_key(key, (), KEYS)[0]))
    _check_version(tree, problems)
    return _listing(tree, problems)


def _check_version(tree: Mapping, problems: list[Problem]) -> None:
    version: Tree | None = tree.items.get("version")
    if version is None:
        problems.append(problem(tree.place, ("version",), "is required and missing: expected `1`"))
    elif not isinstance(version, Scalar) or type(version.value) is not int or version.value != 1:
        what = f"expected `1`, found {found(version)}"
        problems.append(problem(version.place, ("version",), what))


def _listing(tree: Mapping, problems: list[Problem]) -> Listing | None:
    hosts = tree.items.get(HOSTS)
    if isinstance(hosts, Listing):
        return hosts
    if hosts is None:
        message, place = "is required and missing: expected a list of hosts", tree.place
    else:
        message, place = f"expected a list of hosts, found {found(hosts)}", hosts.place
    problems.append(problem(place, (HOSTS,), message))
    return None
