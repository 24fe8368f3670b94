"""The program that `--bootstrap` sends to a host: it makes a virtual environment with dbctl there.

Rules of this file: it is sent as text and run by the host's own Python, so it is whole in itself,
imports the standard library only, and is readable to Pythons that are too old (3.6), so that they
say it: hence annotations in quotes. It may be broken off at any point and repeated: the digest that
says what is installed is taken away first and written last. Who comes while another is at it waits
and finds it done. Every wait has an end, which is also that of the ssh: then nobody reads standard
output any more, and what was started here is killed.

Standard input: a line of JSON (`workdir`, `env`, the `name` and `digest` of a wheel), then it. The
answer is the last line of standard output; pip's own words go to standard error.
"""

import fcntl
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time

OLDEST = (3, 11)
LIMIT_S = 840.0  # of all that is done here; a minute before the other end gives up
LOOK_S = 0.2
# With less than that left, what failed may have failed for it: numpy alone has 1,000 files.
FEW_FILES = 5000
FEW_BYTES = 200 << 20


class Late(Exception):
    """What took too long, and what to do."""


def main() -> int:
    wanted = json.loads(sys.stdin.buffer.readline().decode("utf-8"))
    if sys.version_info[:2] < OLDEST:
        version = ".".join(str(part) for part in sys.version_info[:3])
        return fail(f"its Python is {version}", "give it a `python` of 3.11 or later")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    deadline = time.monotonic() + LIMIT_S
    os.environ.update(wanted["env"])  # where pip finds its index, and the way there
    workdir = os.path.abspath(os.path.expanduser(wanted["workdir"]))
    try:
        os.makedirs(workdir, exist_ok=True)
        with open(os.path.join(workdir, "venv.lock"), "w") as lock:
            take(lock.fileno(), lock.name, deadline)
            return install(workdir, wanted, deadline)
    except Late as late:
        return fail(*late.args)
    except OSError as error:
        return fail(f"cannot write in {workdir}: {error}", "give it another `workdir`")


def take(fd: int, path: str, deadline: float) -> None:
    """The lock, once nobody else has it."""
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fault = "another bootstrap, which has locked {}, was not done within {:.0f} s"
            do = "end the process that `fuser` shows to have it open there"
            stay(deadline, fault.format(path, LIMIT_S), do)
            time.sleep(LOOK_S)


def install(workdir: str, wanted: "dict[str, str]", deadline: float) -> int:
    """Makes what is not there yet; the exit status."""
    venv = os.path.join(workdir, "venv")
    python = os.path.join(venv, "bin", "python")
    mark = os.path.join(workdir, "venv.sha256")
    known = read(mark)
    if known == wanted["digest"] and works(python, deadline):
        return say(python=python, made=False)
    data = sys.stdin.buffer.read()
    if hashlib.sha256(data).hexdigest() != wanted["digest"]:
        return fail("the wheel did not come whole", "try again")
    if known:
        os.unlink(mark)
    upgrade = bool(known) and works(python, deadline)
    make = [sys.executable, "-I", "-m", "venv", "--clear", venv]
    if not upgrade and run(make, deadline):
        return failed(
            workdir, "cannot make a virtual environment", "install its package python3-venv"
        )
    with tempfile.TemporaryDirectory(dir=workdir, prefix="wheel-") as directory:
        wheel = os.path.join(directory, wanted["name"])
        with open(wheel, "wb") as file:
            file.write(data)
        pip = [python, "-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
        # A wheel of the same version replaces the one that is there only when it is told so.
        again = ["--force-reinstall", "--no-deps"]
        if (upgrade and run([*pip, *again, wheel], deadline)) or run([*pip, wheel], deadline):
            return failed(
                workdir, "pip could not install dbctl", "pip there must reach its index of packages"
            )
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


def works(python: str, deadline: float) -> bool:
    """Whether the environment still runs: its Python may have gone."""
    return os.path.exists(python) and not run([python, "-I", "-c", "import dbctl"], deadline)


def run(words: "list[str]", deadline: float) -> int:
    """The exit status of a program whose words all go to standard error."""
    sys.stderr.flush()
    # Its own session, so that all that it starts in turn can be killed.
    child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
    try:
        while True:
            try:
                return child.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                fault = "`{} ...` was not done within {:.0f} s"
                do = "pip there must reach its index of packages; try again"
                stay(deadline, fault.format(" ".join(words[:5]), LIMIT_S), do)
    finally:
        if child.returncode is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def stay(deadline: float, fault: str, cure: str) -> None:
    """Ends this program where nobody reads its answer any more; Late: after `deadline`."""
    poll = select.poll()
    poll.register(1, 0)  # nothing but the end of its reader
    if poll.poll(0):
        sys.exit(1)
    if time.monotonic() >= deadline:
        raise Late(fault, cure)


def failed(workdir: str, fault: str, cure: str) -> int:
    """`fail`, of a program that says only in its own words whether it had room."""
    there = os.statvfs(workdir)
    free = there.f_bavail * there.f_frsize
    if (there.f_files and there.f_favail < FEW_FILES) or free < FEW_BYTES:
        left = f"{free >> 20:,} MiB"
        if there.f_files:
            left += f" and {there.f_favail:,} inodes"
        fault = f"{fault}: no more than {left} are left in {workdir}"
        cure = f"make room there, or give it another `workdir`; else {cure}"
    return fail(fault, cure)


def say(**answer: "str | bool") -> int:
    # What a login file printed before may have no end of line.
    print("\nBOOTSTRAP " + json.dumps(answer))
    return 0


def fail(fault: str, cure: str) -> int:
    say(fault=fault, cure=cure)
    return 1


if __name__ == "__main__":
    sys.exit(main())
