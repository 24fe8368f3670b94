"""The habits of the code, as numbers: sizes, names, what no source may hold, links, layers.

Each check is a function from a source text to its faults, so that it is itself tested: a habit
whose check cannot fail is no habit.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path

import pytest

from dbctl.experiment.read import load

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "dbctl").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
DOCS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.yaml"))

MAX_FUNCTION_LINES = 70
MAX_MODULE_LINES = 400
MAX_COLUMNS = 100
MAX_POSITIONAL = 3
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "core", "manager", "misc"}
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
PICKLES |= {"multiprocessing"}  # its connections pickle
EVALUATORS = {"eval", "exec", "compile", "__import__"}
UNSAFE_CALLS = {
    *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
}
PICKLING_METHODS = {"send_pyobj", "recv_pyobj", "send_serialized", "recv_serialized"}
# What a role may not know (docs/architecture.md): it is told the time and given its memory.
IMPURE = {
    *("socket", "os", "time", "threading", "logging", "subprocess", "io", "pathlib", "select"),
    *("signal", "asyncio", "tempfile", "datetime", "multiprocessing", "zmq", "random", "secrets"),
}

Check = Callable[[str], Iterator[str]]


# ---------------------------------------------------------------------------------------- checks


def long_parts(source: str) -> Iterator[str]:
    """Functions, modules and lines over their limits."""
    lines = source.splitlines()
    if len(lines) > MAX_MODULE_LINES:
        yield f"1: {len(lines)} lines in a module, at most {MAX_MODULE_LINES}"
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS:
            yield f"{number}: {len(line)} columns, at most {MAX_COLUMNS}"
    for function in functions(source):
        size = (function.end_lineno or 0) - function.lineno + 1
        if size > MAX_FUNCTION_LINES:
            yield f"{function.lineno}: {function.name} has {size} lines"


def many_positionals(source: str) -> Iterator[str]:
    """More than three parameters that a call may give by place only; `self` does not count."""
    for function in functions(source):
        names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
        count = len(names) - (names[:1] in (["self"], ["cls"]))
        if count > MAX_POSITIONAL:
            yield f"{function.lineno}: {function.name} has {count} positional parameters"


def no_docstring(source: str) -> Iterator[str]:
    module = nodes_of(source)[0]
    assert isinstance(module, ast.Module)
    if not ast.get_docstring(module):
        yield "1: a module opens with a docstring that says its rules"


def unsafe_parts(source: str) -> Iterator[str]:
    """Pickle, evaluation of text, a shell, a YAML loader that builds objects (G13), host keys."""
    for node in nodes_of(source):
        for name in imported(node):
            if name.split(".")[0] in PICKLES:
                yield f"{node.lineno}: imports {name}"
        if isinstance(node, ast.Constant) and "StrictHostKeyChecking" in str(node.value):
            yield f"{node.lineno}: host keys are for the user's own ssh settings to judge"
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in EVALUATORS:
            yield f"{node.lineno}: calls {node.func.id}"
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func) in UNSAFE_CALLS:
            yield f"{node.lineno}: calls {ast.unparse(node.func)}"
        if isinstance(node.func, ast.Attribute) and node.func.attr in PICKLING_METHODS:
            yield f"{node.lineno}: calls {node.func.attr}"
        for keyword in node.keywords:
            refused = keyword.arg in ("shell", "allow_pickle")
            if refused and not (
                isinstance(keyword.value, ast.Constant) and not keyword.value.value
            ):
                yield f"{node.lineno}: passes {keyword.arg}"


def impure_parts(source: str) -> Iterator[str]:
    for node in nodes_of(source):
        for name in imported(node):
            if name.split(".")[0] in IMPURE:
                yield f"{node.lineno}: imports {name}"


def knows_roles(source: str) -> Iterator[str]:
    for node in nodes_of(source):
        for name in imported(node):
            if re.match(r"dbctl\.(roles|wire|node|transport|plan|experiment)\b", name):
                yield f"{node.lineno}: imports {name}"


@lru_cache(maxsize=1)
def nodes_of(source: str) -> list[ast.AST]:
    """All of them, the module first: parsed once for all checks of one source."""
    return list(ast.walk(ast.parse(source)))


def functions(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes_of(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def imported(node: ast.AST) -> list[str]:
    """The modules that a statement imports: `from a import b` is a.b, which may be a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module or ''}.{alias.name}" for alias in node.names]
    return []


@cache
def faults_of(path: Path) -> dict[Check, list[str]]:
    """By every check, also one that does not hold for this source; of a test, no docstring."""
    source = path.read_text(encoding="utf-8")
    checks = CHECKS if path in SOURCES else (no_docstring,)
    return {check: list(check(source)) for check in checks}


def faults(check: Check, paths: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{fault}" for path in paths for fault in faults_of(path)[check]
    ]


CHECKS: tuple[Check, ...] = (
    long_parts,
    many_positionals,
    no_docstring,
    unsafe_parts,
    impure_parts,
    knows_roles,
)


# --------------------------------------------------------------------------------- on the project


def test_there_is_something_to_check() -> None:
    assert len(SOURCES) > 30
    assert len(DOCS) == 8
    assert len(EXPERIMENTS) >= 4


def test_sizes() -> None:
    assert faults(long_parts, SOURCES) == []


def test_three_positional_parameters_then_keywords() -> None:
    # numba compiles for types by place: what it compiles has no keywords.
    sources = [path for path in SOURCES if path != ROOT / "dbctl/optim/fast.py"]
    assert faults(many_positionals, sources) == []


def test_modules_say_their_rules() -> None:
    sources = [path for path in (*SOURCES, *TESTS) if path.name != "__init__.py"]
    assert faults(no_docstring, sources) == []


def test_nothing_unsafe() -> None:
    """reliability.md, G13."""
    assert faults(unsafe_parts, SOURCES) == []


def test_roles_know_no_world() -> None:
    roles = [path for path in SOURCES if "roles" in path.parts]
    assert roles
    assert faults(impure_parts, [*roles, ROOT / "dbctl/plan.py"]) == []


def test_model_and_optim_know_no_role_and_no_message() -> None:
    sources = [path for path in SOURCES if {"model", "optim"} & set(path.parts)]
    assert sources
    assert faults(knows_roles, sources) == []


def test_packages_are_empty_and_names_say_something() -> None:
    for path in SOURCES:
        if path.name == "__init__.py":
            text = path.read_text(encoding="utf-8")
            allowed = r'__version__ = "[0-9.]+"\n' if path.parent.name == "dbctl" else ""
            assert re.fullmatch(allowed, text), f"{path} is not empty"
        parts = path.relative_to(ROOT).with_suffix("").parts
        assert not VAGUE_NAMES & set(parts), f"{path} has a name that says nothing"


def test_layers() -> None:
    """The import contracts of pyproject.toml."""
    code = "import sys; from importlinter.cli import lint_imports_command as c; sys.exit(c())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.name)
def test_experiment_files_are_valid_and_named_like_their_file(path: Path) -> None:
    assert load(str(path)).name == path.stem


# ------------------------------------------------------------------------------------------ docs


def links(text: str) -> list[str]:
    """Targets of inline links, without those in code."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", prose)


def anchors(text: str) -> set[str]:
    """What a heading is called in a link, as GitHub makes it."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ +(.+?) *$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_of_the_docs_lead_somewhere(path: Path) -> None:
    for link in links(path.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{path.name} links to {link}: no such file"
        if anchor:
            there = anchors(target.read_text(encoding="utf-8"))
            assert anchor in there, f"{path.name} links to {link}: no such heading"


def test_paths_that_the_docs_name_exist() -> None:
    """`dbctl/...` and `tests/...` in the docs: a module that moved takes its sentence along."""
    for path in DOCS:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"`((?:dbctl|tests|experiments|docs)/[\w./-]+)`", text):
            assert (ROOT / name).exists(), f"{path.name} names {name}: no such file"


# --------------------------------------------------------------------------- the checks themselves

LONG = "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (long_parts, "x = 1\n" * 400, "x = 1\n" * 401),
        (long_parts, "#" * 100, "#" * 101),
        (long_parts, LONG.rsplit("\n", 2)[0], LONG),
        (many_positionals, "class A:\n def f(self, a, b, c): pass", "def f(a, b, c, d): pass"),
        (many_positionals, "def f(a, b, c, *, d): pass", "def f(a, b, /, c, d=1): pass"),
        (no_docstring, '"""Rules."""', "import os"),
        (unsafe_parts, "re.compile('a')", "compile('a')"),
        (unsafe_parts, "yaml.safe_load(f)", "yaml.load(f)"),
        (unsafe_parts, "run(a, shell=False)", "run(a, shell=True)"),
        (unsafe_parts, "run(a, shell=False)", "run(a, shell=flag)"),
        (unsafe_parts, "np.load(p, allow_pickle=False)", "np.load(p, allow_pickle=True)"),
        (unsafe_parts, "import msgspec", "from pickle import loads"),
        (unsafe_parts, "socket.send(b)", "socket.send_pyobj(b)"),
        (unsafe_parts, "evaluate(x)", "eval(x)"),
        (unsafe_parts, "x = 'BatchMode=yes'", "x = ['-o', 'StrictHostKeyChecking=no']"),
        (impure_parts, "import numpy", "import os.path"),
        (impure_parts, "from math import inf", "from time import monotonic"),
        (knows_roles, "from dbctl import region", "from dbctl import wire"),
        (knows_roles, "import dbctl.region", "from dbctl.roles.base import Role"),
    ],
)
def test_a_check_finds_its_fault(check: Check, good: str, bad: str) -> None:
    assert list(check(good)) == []
    assert list(check(bad)) != []


def test_links_and_anchors_are_found() -> None:
    assert links("[a](b.md#c) `[x](y)` [d](https://e)") == ["b.md#c", "https://e"]
    assert anchors("# Life of a run\n## `--json`, or not?\n") == {"life-of-a-run", "--json-or-not"}
