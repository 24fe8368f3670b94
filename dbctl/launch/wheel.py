"""A wheel of the dbctl that runs here, to be installed on another host.

Rules of this file: the files of this very package and nothing else, so that hosts run what runs
here, whether that is a checkout or was installed; the same files give the same bytes. No build tool
and no network is needed. Format: the binary distribution format of the Python packaging
specifications (a ZIP archive with METADATA, WHEEL and RECORD).
"""

from __future__ import annotations

import base64
import io
import re
import tomllib
import zipfile
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import dbctl
from dbctl.errors import LaunchError
from dbctl.launch.ssh_words import checkout
from dbctl.process import one_line

WHEEL = """\
Wheel-Version: 1.0
Generator: dbctl
Root-Is-Purelib: true
Tag: py3-none-any
"""
BEGINNING = (1980, 1, 1, 0, 0, 0)  # of time, in a ZIP archive
LEFT_OUT = ("__pycache__",)


@dataclass(frozen=True)
class Wheel:
    """`name` of the file, which pip takes the version from, and its bytes."""

    name: str
    data: bytes

    @cached_property
    def digest(self) -> str:
        return sha256(self.data).hexdigest()


def make_wheel() -> Wheel:
    """LaunchError: dbctl here is neither a checkout nor an installed distribution, or damaged."""
    package = Path(dbctl.__file__).resolve().parent
    do = "install dbctl here with pip, or run it from its source tree"
    try:
        return _made(package)
    except PackageNotFoundError:
        what = f"in {package} is neither in a source tree nor installed: its needs are not known"
        raise LaunchError("dbctl", what, about="bootstrap", cure=do) from None
    except (OSError, ValueError, KeyError) as error:
        what = f"in {package} cannot be packed for other hosts: {one_line(error)}"
        raise LaunchError("dbctl", what, about="bootstrap", cure=do) from error


def _made(package: Path) -> Wheel:
    info = f"dbctl-{dbctl.__version__}.dist-info"
    files = {
        f"dbctl/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and not set(LEFT_OUT) & set(path.parts)
    }
    files[f"{info}/METADATA"] = _metadata().encode()
    files[f"{info}/WHEEL"] = WHEEL.encode()
    rows = [f"{name},sha256={_base64(data)},{len(data)}\n" for name, data in files.items()]
    files[f"{info}/RECORD"] = "".join([*rows, f"{info}/RECORD,,\n"]).encode()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as into:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, BEGINNING)
            entry.external_attr = 0o644 << 16
            into.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return Wheel(f"dbctl-{dbctl.__version__}-py3-none-any.whl", archive.getvalue())


def _metadata() -> str:
    python, requirements = _requirements()
    lines = [
        "Metadata-Version: 2.1",
        "Name: dbctl",
        f"Version: {dbctl.__version__}",
        f"Requires-Python: {python}",
        *(f"Requires-Dist: {requirement}" for requirement in requirements),
    ]
    return "\n".join(lines) + "\n"


def _requirements() -> tuple[str, list[str]]:
    """What dbctl needs: which Python, and the distributions without those of extras."""
    tree = checkout()
    if tree is not None:
        project = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return project["requires-python"], list(project["dependencies"])
    installed = distribution("dbctl")
    needed = [one for one in installed.requires or [] if not re.search(r";.*\bextra\b", one)]
    return installed.metadata["Requires-Python"] or ">=3.11", needed


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(sha256(data).digest()).rstrip(b"=").decode()
