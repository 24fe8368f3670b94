"""The one line of JSON on standard input that dbctl's processes on other hosts begin with.

Rules of this file: values of the user go over standard input, never into a command that a shell of
another host takes apart; a line that is not whole, too long or of another form is an error before
anything is made of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

from dbctl.process import one_line, read_line

OPTIONS_BYTES_MAX = 1 << 16

_Form = TypeVar("_Form")


def read_options(form: Callable[[dict[str, Any]], _Form]) -> _Form:
    """What `form` makes of the line; what that has as `env` is in this environment by then.

    ValueError, OSError: no such line, or `form` misses a value.
    """
    line = read_line(0, OPTIONS_BYTES_MAX)
    if line is None:
        raise ValueError(f"no options of at most {OPTIONS_BYTES_MAX} bytes on standard input")
    values = json.loads(line)
    try:
        os.environ.update(values["env"])
        return form(values)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"options of another form: {one_line(error)}") from error
