"""An experiment file to an `Experiment`, or everything that is wrong with it.

Rules of this file: every problem of a file is found in one reading and raised in one
ExperimentError, each with file:line:column and dotted key. The structure (keys, tags, lists,
short forms) is walked here by the annotations of the specs, so that an error speaks of the one
class that was meant; a single value is judged by itself (leaf.py). yaml is imported inside.

    text -> tree (YAML 1.2, places) -> hosts file, --set -> walk by the specs -> checks between keys

Short forms: `evaluate: off`, and every `every` as text (`30 s`, `1 epoch`, `off`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import isfinite
from typing import Annotated, Any, get_args, get_origin

from dbctl.errors import ExperimentError, Problem
from dbctl.experiment.checks import faults
from dbctl.experiment.hosts import CLUSTER, HOSTS, Inclusion, read_hosts
from dbctl.experiment.leaf import judge
from dbctl.experiment.overrides import apply_overrides
from dbctl.experiment.shape import (
    Shape,
    alternatives,
    fields_of,
    shape_of,
    spec_by_tag,
    tag_of,
    unwrap,
)
from dbctl.experiment.specs import (
    EvaluateSpec,
    Every,
    Experiment,
    HostSpec,
    RelativeToFile,
    SshCluster,
    with_overlap,
)
from dbctl.experiment.tree import (
    Listing,
    Mapping,
    Path,
    Place,
    Scalar,
    Tree,
    parse_tree,
    problem,
    read_text,
)
from dbctl.experiment.words import (
    MAX_INT,
    expected,
    found,
    hint,
    nearest,
    no_mapping,
    unknown_key,
)


def load(path: str, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment file; `overrides` are the texts of --set, `a.b=v`.

    Relative names of data files start at the file's directory, also those of --set. Raises
    ExperimentError with every problem.
    """
    text = read_text(path)
    return parse(text, file=path, overrides=overrides, directory=os.path.dirname(path) or ".")


def parse(
    text: str, *, file: str = "<text>", overrides: Sequence[str] = (), directory: str = "."
) -> Experiment:
    """`load` for text already in hand; `file` is only what errors call it."""
    problems: list[Problem] = []
    start = Place(file, 1, 1)
    tree = parse_tree(text, start, problems)
    if not isinstance(tree, Mapping):
        if not problems:
            problems.append(no_mapping(tree, start, "that starts with `version: 1`"))
        raise ExperimentError(problems)
    hosts = Inclusion(directory)
    hosts.look(tree)
    for override in overrides:
        apply_overrides(tree, [override], problems)
        hosts.look(tree)  # so that a later one may change one of them
    problems += hosts.problems
    experiment = _read_all(tree, Experiment, (), file=file, directory=directory, problems=problems)
    assert isinstance(experiment, Experiment)
    return with_overlap(experiment)


def load_hosts(path: str) -> tuple[HostSpec, ...]:
    """The hosts of a hosts file by itself; ExperimentError with every problem of it."""
    read_text(path)  # a file that is not there is told as such
    problems: list[Problem] = []
    listing = read_hosts(path, Place(path, 1, 1), problems)
    if listing is None:
        raise ExperimentError(problems)
    annotation = fields_of(SshCluster)["hosts"].annotation
    directory = os.path.dirname(path) or "."
    hosts = _read_all(
        listing, annotation, (CLUSTER, HOSTS), file="", directory=directory, problems=problems
    )
    assert isinstance(hosts, tuple)
    return hosts


def _read_all(
    tree: Tree,
    annotation: Any,
    path: Path,
    *,
    file: str,
    directory: str,
    problems: list[Problem],
) -> Any:
    """The value of `tree`; ExperimentError with all that is wrong with it, after `problems`.

    `file`: the experiment's own, where there is one.
    """
    reader = _Reader(file, os.path.abspath(directory), problems)
    value = reader.read(tree, annotation, path)
    for fault in faults(reader.values):
        reader.refuse(reader.blamed(fault.path, tree.place), fault.path, fault.message)
    if problems:
        raise ExperimentError(problems)
    return value


def locate(path: str, overrides: Sequence[str], key: str) -> Place:
    """Where a key of the top level stands in a file that was read: for what only its use shows."""
    problems: list[Problem] = []
    tree = parse_tree(read_text(path), Place(path, 1, 1), problems)
    if not isinstance(tree, Mapping):  # changed meanwhile
        return Place(path)
    apply_overrides(tree, overrides, problems)
    return tree.items[key].place if key in tree.items else Place(path)


class _Failed:
    """Stands for a value that could not be read; its problem is recorded."""


_FAILED = _Failed()


def _plain(tree: Tree) -> Any:
    """`tree` as JSON data, or _FAILED: a mapping, or a number that JSON or a run cannot hold."""
    if isinstance(tree, Listing):
        items = [_plain(item) for item in tree.items]
        return _FAILED if any(item is _FAILED for item in items) else items
    if isinstance(tree, Mapping):
        return _FAILED
    value = tree.value
    if isinstance(value, float) and not isfinite(value):
        return _FAILED
    if isinstance(value, int) and abs(value) > MAX_INT:
        return _FAILED
    return value


def _judge(annotation: Any, data: Any) -> Any:
    try:
        return judge(annotation, data)
    except ValueError:
        return _FAILED


def _items_of(annotation: Any, count: int) -> tuple[Any, ...]:
    """What each item of a tuple of `count` may be; nothing where none of that length may stand."""
    for member in alternatives(annotation):
        inner, _ = unwrap(member)
        if get_origin(inner) is tuple:
            args = get_args(inner)
            items = args[:1] * count if args[-1] is Ellipsis else args
            return items if len(items) == count else ()
    return ()


def _is_null(tree: Tree) -> bool:
    return isinstance(tree, Scalar) and tree.value is None


def _kin(spec: type, specs: tuple[type, ...]) -> dict[str, str]:
    """The keys that only other types than `spec` have, and of which types each is a key."""
    tag = tag_of(spec)
    if tag is None:
        return {}
    types: dict[str, list[str]] = {}
    for value, other in spec_by_tag(specs)[1].items():
        for key in fields_of(other):
            types.setdefault(key, []).append(f"{tag.key} {value}")
    return {
        key: f"is a key of {' and '.join(of)}, not of {tag.key} {tag.value}"
        for key, of in types.items()
        if key not in fields_of(spec)
    }


class _Reader:
    """One walk. `values` and `places` hold what was read, by path, for the checks."""

    def __init__(self, file: str, directory: str, problems: list[Problem]) -> None:
        self.file = file
        self.directory = directory
        self.problems = problems
        # Where the YAML was refused already; a value that stands there is not judged again.
        self.told = {(one.file, one.line, one.column) for one in problems if one.line}
        self.values: dict[Path, Any] = {}
        self.places: dict[Path, Place] = {}

    def refuse(self, place: Place, path: Path, message: str) -> None:
        self.problems.append(problem(place, self.named(path, place), message))

    def named(self, path: Path, place: Place) -> Path:
        """`path` as the file has it where it stands: the hosts file knows no `cluster`."""
        elsewhere = place.line > 0 and place.file != self.file
        return path[1:] if elsewhere and path[:2] == (CLUSTER, HOSTS) else path

    def place(self, path: Path, default: Place) -> Place:
        """Where the value of `path` stands, or the nearest that holds it."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, default)

    def blamed(self, path: Path, default: Place) -> Place:
        """Where `path` is to be mended: the --set that emptied one of its keys, or its place."""
        for below, place in self.places.items():
            if below[:-1] == path and not place.line and self.values.get(below) is None:
                return place
        return self.place(path, default)

    def read(self, tree: Tree, annotation: Any, path: Path) -> Any:
        """The value of `tree` as `annotation`, or _FAILED."""
        self.places[path] = tree.place
        shape = shape_of(annotation)
        if Every in shape.specs:
            value = self._every(tree, annotation, path)
        elif EvaluateSpec in shape.specs and isinstance(tree, Scalar) and tree.value == "off":
            value = EvaluateSpec()
        elif isinstance(tree, Mapping) and shape.specs:
            value = self._spec(tree, shape, path)
        elif isinstance(tree, Listing) and shape.items is not None:
            value = self._items(tree, annotation, path)
        elif shape.leaf is not None or (shape.optional and _is_null(tree)):
            value = self._leaf(tree, annotation, path)
        else:
            value = self._wrong(tree, annotation, path)
        if value is not _FAILED:
            self.values[path] = value
        return value

    def _wrong(self, tree: Tree, annotation: Any, path: Path) -> _Failed:
        if tree.place in self.told:
            return _FAILED
        wanted, got = expected(annotation), found(tree)
        self.refuse(tree.place, path, f"expected {wanted}, found {got}{hint(annotation, tree)}")
        return _FAILED

    def _spec(self, tree: Mapping, shape: Shape, path: Path) -> Any:
        spec = self._choose(tree, shape, path)
        if spec is None:
            return _FAILED
        fields = fields_of(spec)
        n_problems = len(self.problems)
        meant = {
            self._unknown(key, spec, path, specs=shape.specs, place=tree.keys[key])
            for key in tree.items
        }
        given: dict[str, Any] = {}
        for name, field in fields.items():
            below = (*path, name)
            if name in tree.items:
                given[name] = self.read(tree.items[name], field.annotation, below)
            elif not field.required:
                self.values[below] = field.default
            elif name not in meant:
                message = f"is required and missing: expected {expected(field.annotation)}"
                self.refuse(tree.place, below, message)
        # A value may have been refused before: as an anchor, an alias, a tag.
        if len(self.problems) > n_problems or any(v is _FAILED for v in given.values()):
            return _FAILED
        return spec(**given)

    def _choose(self, tree: Mapping, shape: Shape, path: Path) -> type | None:
        """The spec that the tag names; a wrong tag is the only problem told of its mapping."""
        key, by_tag = spec_by_tag(shape.specs)
        if not key:
            return shape.specs[0]
        names = list(by_tag)
        wanted = f"expected {'one of ' if len(names) > 1 else ''}{', '.join(names)}"
        tag = tree.items.get(key)
        if tag is None:
            self.refuse(tree.place, (*path, key), f"is required and missing: {wanted}")
            return None
        if isinstance(tag, Scalar) and isinstance(tag.value, str) and tag.value in by_tag:
            return by_tag[tag.value]
        near = nearest(tag.text, names) if isinstance(tag, Scalar) else ""
        meant = f"; did you mean `{near}`?" if near else ""
        self.refuse(tag.place, (*path, key), f"{wanted}, found {found(tag)}{meant}")
        return None

    def _unknown(
        self, key: str, spec: type, path: Path, *, specs: tuple[type, ...], place: Place
    ) -> str:
        """Refuse `key` where `spec` has none of that name; the key that was perhaps meant."""
        fields = fields_of(spec)
        if key in fields:
            return ""
        near = ""
        kin = _kin(spec, specs)
        if key in kin:
            message = kin[key]
        else:
            message, near = unknown_key(key, self.named(path, place), fields, kin=kin)
        self.refuse(place, (*path, key), message)
        return near

    def _items(self, tree: Listing, annotation: Any, path: Path) -> Any:
        shape = shape_of(annotation)
        values = [
            self.read(item, shape.items, (*path, str(index)))
            for index, item in enumerate(tree.items)
        ]
        # The length alone, against the limits of the whole list.
        lengths: Any = Annotated[(tuple[Any, ...], *shape.metadata, None)]
        if _judge(lengths, [None] * len(values)) is _FAILED:
            return self._wrong(tree, annotation, path)
        return _FAILED if any(v is _FAILED for v in values) else tuple(values)

    def _leaf(self, tree: Tree, annotation: Any, path: Path) -> Any:
        shape = shape_of(annotation)
        leaf = type(None) if shape.leaf is None else shape.leaf
        data = _plain(tree)
        if data is _FAILED or tree.place in self.told:
            return self._wrong(tree, annotation, path)
        value = _judge(leaf | None if shape.optional else leaf, data)
        if value is not _FAILED:
            return self._file_name(value, tree, annotation, path=path)
        if not isinstance(tree, Listing):
            return self._wrong(tree, annotation, path)
        items = _items_of(leaf, len(data))
        at = [i for i, item in enumerate(items) if _judge(item, data[i]) is _FAILED]
        for index in at:
            self._wrong(tree.items[index], items[index], (*path, str(index)))
        return _FAILED if at else self._wrong(tree, annotation, path)

    def _file_name(self, value: Any, tree: Tree, annotation: Any, *, path: Path) -> Any:
        """The absolute name where `value` names a file, else `value`.

        `..` is kept as it stands: taking it out would go wrong behind a symbolic link.
        """
        marks = [mark for member in alternatives(annotation) for mark in unwrap(member)[1]]
        is_name = any(isinstance(mark, RelativeToFile) for mark in marks)
        if not is_name or not isinstance(value, str):
            return value
        if "\0" in value:
            return self._wrong(tree, annotation, path)
        return os.path.join(self.directory, os.path.expanduser(value))

    def _every(self, tree: Tree, annotation: Any, path: Path) -> Any:
        text = tree.value if isinstance(tree, Scalar) else None
        if isinstance(text, str):
            every = Every.from_text(text)
            if every is not None or (text == "off" and shape_of(annotation).optional):
                return every
        return self._wrong(tree, annotation, path)
