"""The program that `--bootstrap` sends to a host: it makes a virtual environment with dbctl there.

Rules of this file: it is sent as text and run by the host's own Python, so it is whole in itself,
imports the standard library only, and is readable to Pythons that are too old, so that they say it.
It may be broken off at any point and repeated: the digest that says what is installed
is taken away first and written last. Who comes while another is at it waits and finds it done.

Standard input: a line of JSON (`workdir`, `env`, the `name` and `digest` of a wheel), then it. The
answer is the last line of standard output; pip's own words go to standard error.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import tempfile

OLDEST = (3, 11)


def main() -> int:
    wanted = json.loads(sys.stdin.buffer.readline().decode("utf-8"))
    if sys.version_info[:2] < OLDEST:
        version = ".".join(str(part) for part in sys.version_info[:3])
        return fail(f"its Python is {version}", "give it a `python` of 3.11 or later")
    os.environ.update(wanted["env"])  # where pip finds its index, and the way there
    workdir = os.path.abspath(os.path.expanduser(wanted["workdir"]))
    try:
        os.makedirs(workdir, exist_ok=True)
        with open(os.path.join(workdir, "venv.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return install(workdir, wanted)
    except OSError as error:
        return fail(f"cannot write in {workdir}: {error}", "give it another `workdir`")


def install(workdir: str, wanted: dict[str, str]) -> int:
    """Makes what is not there yet; the exit status."""
    venv = os.path.join(workdir, "venv")
    python = os.path.join(venv, "bin", "python")
    mark = os.path.join(workdir, "venv.sha256")
    known = read(mark)
    if known == wanted["digest"] and works(python):
        return say(python=python, made=False)
    data = sys.stdin.buffer.read()
    if hashlib.sha256(data).hexdigest() != wanted["digest"]:
        return fail("the wheel did not come whole", "try again")
    if known:
        os.unlink(mark)
    upgrade = bool(known) and works(python)
    if not upgrade and run([sys.executable, "-I", "-m", "venv", "--clear", venv]):
        return fail("cannot make a virtual environment", "install its package python3-venv")
    with tempfile.TemporaryDirectory(dir=workdir, prefix="wheel-") as directory:
        wheel = os.path.join(directory, wanted["name"])
        with open(wheel, "wb") as file:
            file.write(data)
        pip = [python, "-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
        # A wheel of the same version replaces the one that is there only when it is told so.
        again = ["--force-reinstall", "--no-deps"]
        if (upgrade and run([*pip, *again, wheel])) or run([*pip, wheel]):
            return fail("pip could not install dbctl", "pip there must reach its index of packages")
    with open(mark + ".new", "w") as file:
        file.write(wanted["digest"])
        file.flush()
        os.fsync(file.fileno())
    os.replace(mark + ".new", mark)
    return say(python=python, made=True)


def read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read(100)
    except OSError:
        return ""


def works(python: str) -> bool:
    """Whether the environment still runs: its Python may have gone."""
    return os.path.exists(python) and not run([python, "-I", "-c", "import dbctl"])


def run(words: list[str]) -> int:
    """The exit status of a program whose words all go to standard error."""
    sys.stderr.flush()
    return subprocess.call(words, stdin=subprocess.DEVNULL, stdout=2)


def say(**answer: str | bool) -> int:
    # What a login file printed before may have no end of line.
    print("\nBOOTSTRAP " + json.dumps(answer))
    return 0


def fail(fault: str, cure: str) -> int:
    say(fault=fault, cure=cure)
    return 1


if __name__ == "__main__":
    sys.exit(main())
