"""YAML 1.2 text to a tree of values that know their place, strictly.

Rules of this file: it knows YAML and no experiment. Refused, each with line and column: duplicate
keys (both lines), anchors, aliases, tags, merge keys, a second document, keys that are not text,
nesting deeper than MAX_DEPTH, more than MAX_NODES values, files over MAX_BYTES or not UTF-8.

The parser is PyYAML's, used only for its events (`yaml.parse`): PyYAML would resolve scalars by
YAML 1.1, where `on` is true, `1e-3` is text, `1:30` is 90 and `017` is 15. Here a plain scalar is
what the core schema of YAML 1.2.2 (section 10.3.2) says; a quoted one is always text. yaml is
imported inside the function that parses.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dbctl.errors import ExperimentError, Problem
from dbctl.process import escape_line

MAX_BYTES = 1 << 20
MAX_DEPTH = 20
MAX_NODES = 5_000
MAX_DIGITS = 100  # of one number: more is a mistake, and int() of 4300 digits raises

Value = None | bool | int | float | str
Path = tuple[str, ...]


class Place(NamedTuple):
    """Where something stands; line 0 = the command line, and `file` is then its text."""

    file: str
    line: int = 0
    column: int = 0


@dataclass(frozen=True)
class Scalar:
    """`text` is what stood there without its quotes; `quoted`: it had some, or was a block."""

    value: Value
    text: str
    quoted: bool
    place: Place


@dataclass(frozen=True)
class Listing:
    items: list[Tree]
    place: Place


@dataclass(frozen=True)
class Mapping:
    """`keys` holds the place of each key of `items`."""

    items: dict[str, Tree]
    place: Place
    keys: dict[str, Place] = field(default_factory=dict)


Tree = Scalar | Listing | Mapping


def problem(place: Place, path: Path, message: str) -> Problem:
    return Problem(place.file, place.line, place.column, ".".join(map(shown, path)), message)


def shown(text: str, limit: int = 60) -> str:
    """Text from a file as it may stand in one line of a message: escaped, and cut at `limit`."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    return escape_line(cut)


# ---------------------------------------------------------------------------------------- scalars

_NULL = ("", "~", "null", "Null", "NULL")
_TRUE = ("true", "True", "TRUE")
_FALSE = ("false", "False", "FALSE")
_INT = re.compile(r"[-+]?[0-9]+")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITY = re.compile(r"[-+]?(\.inf|\.Inf|\.INF)")
_NAN = (".nan", ".NaN", ".NAN")


def resolve_scalar(text: str) -> Value:
    """What a plain scalar is by the core schema of YAML 1.2; ValueError: a number too long."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if text in _NAN:
        return float("nan")
    if _INFINITY.fullmatch(text):
        return float(text.replace(".", ""))
    if not (_INT.fullmatch(text) or _BASED.fullmatch(text) or _FLOAT.fullmatch(text)):
        return text
    if len(text) > MAX_DIGITS:
        raise ValueError(f"expected a number of at most {MAX_DIGITS} characters")
    if _INT.fullmatch(text):
        return int(text)
    return int(text, 0) if _BASED.fullmatch(text) else float(text)


# ------------------------------------------------------------------------------------------ files


def _without_waiting(path: str, flags: int) -> int:
    """Else the opening of a named pipe waits for a writer, deaf to signals."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_text(path: str) -> str:
    """The text of a UTF-8 file, with or without a byte order mark."""

    def refuse(message: str, line: int = 0, column: int = 0) -> ExperimentError:
        return ExperimentError([Problem(path, line, column, "", message)])

    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise refuse("not a regular file; write it to one, it is read more than once")
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise refuse(f"cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in the path
        raise refuse(f"cannot be read: {error}") from None
    if len(raw) > MAX_BYTES:
        raise refuse(f"expected an experiment file of at most {MAX_BYTES} bytes, found more")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line = before.count(b"\n") + 1
        column = error.start - (before.rfind(b"\n") + 1) + 1
        message = f"expected UTF-8 text, found byte 0x{raw[error.start]:02x}; save it as UTF-8"
        raise refuse(message, line, column) from None


def parse_tree(text: str, place: Place, problems: list[Problem]) -> Tree | None:
    """The one document of `text`; what is wrong is added to `problems`.

    Places are in file `place.file`; with `place.line` 0 everything stands at `place`: the value of
    a --set, where only a scalar or a flow collection is taken. None: not parseable, or empty.
    """
    import yaml

    builder = _Builder(place, problems)
    try:
        return builder.document(yaml.parse(text.removeprefix("\ufeff"), Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        builder.refuse(mark, (), _syntax(error))
    except yaml.reader.ReaderError as error:
        before = text.removeprefix("\ufeff")[: error.position]
        line = before.count("\n") + 1
        at = Place(place.file, line, len(before) - before.rfind("\n")) if place.line else place
        code = error.character if isinstance(error.character, int) else ord(error.character)
        message = f"expected text, found the control character U+{code:04X}"
        problems.append(problem(at, (), message))
    except _Stop:
        pass
    return None


def _syntax(error: Any) -> str:
    what = str(error.problem or error.context or "not YAML")
    if "\\t" in what:
        return "expected spaces, found a tab: YAML is indented with spaces only"
    context = f"{error.context}: " if error.context and error.problem else ""
    return shown(f"not YAML: {context}{what}", 300)


class _Stop(Exception):
    """The document cannot be read further; the reason is already among the problems."""


class _Builder:
    """Events to a tree, top down; it goes on after every fault that leaves the structure clear."""

    def __init__(self, place: Place, problems: list[Problem]) -> None:
        self.at = place
        self.problems = problems
        self.n_nodes = 0

    def place(self, mark: Any) -> Place:
        if not self.at.line or mark is None:
            return self.at
        return Place(self.at.file, mark.line + 1, mark.column + 1)

    def refuse(self, mark: Any, path: Path, message: str) -> None:
        self.problems.append(problem(self.place(mark), path, message))

    def document(self, events: Iterator[Any]) -> Tree | None:
        import yaml

        tree: Tree | None = None
        n_documents = 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                n_documents += 1
                if n_documents > 1:
                    self.refuse(event.start_mark, (), "expected one document, found a second")
                    raise _Stop
                if event.version not in (None, (1, 2)):
                    self.refuse(event.start_mark, (), "expected YAML 1.2, found another version")
                tree = self.node(next(events), events, ())
        return tree

    def node(self, event: Any, events: Iterator[Any], path: Path) -> Tree:
        import yaml

        self.n_nodes += 1
        if self.n_nodes > MAX_NODES:
            self.refuse(event.start_mark, path, f"expected at most {MAX_NODES} values, found more")
            raise _Stop
        if len(path) > MAX_DEPTH:
            self.refuse(event.start_mark, path, f"expected at most {MAX_DEPTH} levels, found more")
            raise _Stop
        self.plain(event, path)
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event, path)
        if isinstance(event, yaml.AliasEvent):
            return Scalar(None, "", False, self.place(event.start_mark))
        if not self.at.line and not event.flow_style:
            self.refuse(
                event.start_mark, path, "expected one value, found block YAML; use {} or []"
            )
        if isinstance(event, yaml.SequenceStartEvent):
            return self.listing(event, events, path)
        return self.mapping(event, events, path)

    def plain(self, event: Any, path: Path) -> None:
        """Refuse what makes a value mean more than is written at its place."""
        if getattr(event, "anchor", None) is not None:
            what = f"found the anchor or alias `{shown(event.anchor)}`"
            self.refuse(event.start_mark, path, f"expected the value itself, {what}; write it out")
        if getattr(event, "tag", None) is not None:
            what = f"found the tag `{shown(event.tag)}`"
            self.refuse(event.start_mark, path, f"expected a plain value, {what}; remove it")

    def scalar(self, event: Any, path: Path) -> Scalar:
        quoted = event.style is not None
        value: Value = event.value
        try:
            event.value.encode()
            value = event.value if quoted else resolve_scalar(event.value)
        except UnicodeEncodeError:
            self.refuse(event.start_mark, path, "expected text, found half of a surrogate pair")
        except ValueError as error:
            self.refuse(event.start_mark, path, f"{error}, found {len(event.value)}")
        return Scalar(value, event.value, quoted, self.place(event.start_mark))

    def listing(self, event: Any, events: Iterator[Any], path: Path) -> Listing:
        import yaml

        tree = Listing([], self.place(event.start_mark))
        while not isinstance(following := next(events), yaml.SequenceEndEvent):
            tree.items.append(self.node(following, events, (*path, str(len(tree.items)))))
        return tree

    def mapping(self, event: Any, events: Iterator[Any], path: Path) -> Mapping:
        import yaml

        tree = Mapping({}, self.place(event.start_mark))
        while not isinstance(following := next(events), yaml.MappingEndEvent):
            key = self.node(following, events, (*path, "?"))
            name = key.value if isinstance(key, Scalar) else None
            below = (*path, name if isinstance(name, str) else "?")
            value = self.node(next(events), events, below)
            if not isinstance(name, str):
                text = f"`{shown(key.text)}`" if isinstance(key, Scalar) else "a collection"
                message = f"expected the name of a key, found {text}"
                self.problems.append(problem(key.place, path, message))
            elif name == "<<":
                message = "merge keys are not part of YAML 1.2; write the keys out"
                self.problems.append(problem(key.place, below, message))
            elif name in tree.items:
                first = tree.keys[name]
                where = f": lines {first.line} and {key.place.line}" if first.line else ""
                message = f"duplicate key{where}; remove one"
                self.problems.append(problem(key.place, below, message))
            else:
                tree.items[name] = value
                tree.keys[name] = key.place
        return tree
