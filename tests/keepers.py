"""A Python whose keepers live in a directory of the test: those of others, in /tmp, stay alone."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from dbctl.keeper_start import PREFIX

ROOT = Path(__file__).parent.parent
PROGRAM = """import sys
from dbctl import keeper_start
keeper_start.PARENT = {parent!r}
from dbctl.__main__ import main
sys.argv = ["dbctl", *sys.argv[4:]]  # after `-P -m dbctl`
sys.exit(main())
"""


class Keepers:
    """`python` is the program, in `directory`; the keepers' place has a short name, for sockets."""

    def __init__(self, directory: Path) -> None:
        self.parent = Path(tempfile.mkdtemp(prefix="k-", dir="/tmp"))
        program = directory / "keepers.py"
        program.write_text(PROGRAM.format(parent=str(self.parent)))
        self.python = directory / "keepers-python"
        self.python.write_text(
            f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -P {program} "$@"\n'
        )
        self.python.chmod(0o755)

    def found(self) -> list[Path]:
        """The directories of keepers, also of those that were killed."""
        return sorted(self.parent.glob(f"{PREFIX}*"))

    def close(self) -> None:
        shutil.rmtree(self.parent)
