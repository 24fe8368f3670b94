"""What is wrong with hosts, from what they said of themselves: judged, and told in one table.

Rules of this file: pure. Everything wrong is told at once, each fault in a row with its cure; what
a run can live with is a warning.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dbctl.errors import LaunchError
from dbctl.examine import Facts, FileFacts
from dbctl.experiment.specs import HostSpec
from dbctl.launch.base import Answer
from dbctl.launch.ssh_words import checkout, how_to_bring
from dbctl.process import escape
from dbctl.run.room import Room, cores_fault, files_fault, is_too_large, memory_fault

SMALL_DISK_BYTES = 1 << 30
CLOCK_LIMIT_S = 1.0
SAID_LINES = 5  # of an agent's last words, in a table of many


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong with one host. `said`: its own last words; `log`: where all are."""

    host: str
    about: str
    what: str
    cure: str = ""
    fatal: bool = True
    said: str = ""
    log: str = ""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What is wanted of one host; by default nothing but dbctl itself.

    `files`: data files that it must have as they are here; `threads`: of all its workers together;
    `listens`: others come to it; `reaches`: the hosts that it must reach, None: all of them.
    """

    files: tuple[str, ...] = ()
    room: Room | None = None
    threads: int = 0
    encrypted: bool = False
    listens: bool = True
    reaches: frozenset[str] | None = None

    def must_reach(self, host: str) -> bool:
        return self.reaches is None or host in self.reaches


@dataclass(frozen=True, kw_only=True)
class Here:
    """What hosts are compared with: versions by distribution, and data files by path."""

    packages: Mapping[str, str]
    files: Mapping[str, FileFacts]


def of_error(error: LaunchError) -> Finding:
    """A host whose agent did not come up."""
    return Finding(
        host=error.host,
        about=error.about or "agent",
        what=error.what,
        cure=error.cure,
        said=error.log_tail,
        log=error.log_path,
    )


def of_answer(
    host: HostSpec, answer: Answer, needs: Needs, *, here: Here, names: Mapping[str, HostSpec]
) -> Iterator[Finding]:
    """What is wrong with a host whose agent came up; `names`: the host of each agent."""
    facts = answer.facts

    def found(about: str, what: str, do: str, *, fatal: bool = True) -> Finding:
        return Finding(host=host.name, about=about, what=what, cure=do, fatal=fatal)

    for row in _of_packages(host, facts, needs, here=here.packages):
        yield found(*row[:3], fatal=row[3])
    if facts.workdir_fault:
        what = f"cannot write in {facts.workdir}: {facts.workdir_fault.lower()}"
        yield found("workdir", what, "make room there, or give the host another `workdir`")
    elif facts.free is not None and facts.free < SMALL_DISK_BYTES:
        what = f"{facts.free >> 20} MiB are free in {facts.workdir}"
        yield found("disk", what, "logs and data that are sent lie there", fatal=False)
    if needs.room is not None:
        for row in _of_room(facts, needs.room):
            yield found(*row[:3], fatal=row[3])
    if needs.threads > facts.cores:
        what = f"{needs.threads} threads of workers for {facts.cores} cores"
        yield found("threads", what, "lower `threads`, or the host's `slots`", fatal=False)
    if offset := clock_offset(answer):
        what = f"its clock differs by {offset:+.1f} s"
        yield found("clock", what, "nothing depends on it but the times in logs", fatal=False)
    for path in needs.files:
        for row in _of_file(host, path, facts, here=here.files):
            yield found(*row[:3], fatal=row[3])
    if facts.address_fault:
        what = f"cannot listen on its address: {facts.address_fault.lower()}"
        yield found("address", what, "give it the `address` that is its own")
    for agent, fault in answer.reached.items():
        if fault and agent in names and needs.must_reach(names[agent].name):
            other = names[agent]
            what = f"does not reach {other.name} at {other.reached_at}: {fault.lower()}"
            do = f"let TCP through between them, or give {other.name} another `address`"
            yield found("ports", what, do)


Row = tuple[str, str, str, bool]


def _of_packages(
    host: HostSpec, facts: Facts, needs: Needs, *, here: Mapping[str, str]
) -> Iterator[Row]:
    bring = how_to_bring(host, checkout())
    missing = [name for name, version in facts.packages.items() if not version]
    if missing:
        yield "dbctl", f"{', '.join(missing)}, which dbctl needs, is not there", bring, True
    if needs.encrypted and not facts.curve and "pyzmq" not in missing:
        what = "its pyzmq was built without CURVE, and nothing between hosts is encrypted"
        yield "pyzmq", what, "install pyzmq from its wheel there", True
    there = facts.packages.get("numpy", "")
    if there and there != here.get("numpy"):
        what = f"numpy {there} there, {here.get('numpy')} here"
        yield "numpy", what, "results may differ in their last bits", False
    if not facts.memfd:
        yield "memory", "no memfd: processes of this host share no memory", "", False


def _of_room(facts: Facts, room: Room) -> Iterator[Row]:
    if facts.memory is not None and (said := memory_fault(room, facts.memory)):
        said, _, do = said.rpartition("; ")
        if is_too_large(room, facts.memory):
            yield "memory", f"has too little for this run: {said}", do, True
        else:
            yield "memory", f"may not suffice: {said}", do, False
    if said := files_fault(room, facts.open_files):
        said, _, do = said.rpartition("; ")
        yield "open files", said, do, True
    if said := cores_fault(room, facts.cores):
        said, _, do = said.rpartition("; ")
        yield "cores", said, do, True


def _of_file(
    host: HostSpec, path: str, facts: Facts, *, here: Mapping[str, FileFacts]
) -> Iterator[Row]:
    """Whether a data file is there as it is here."""
    ours = here.get(path)
    theirs = next((one for one in facts.files if one.path == path), None)
    if ours is None or theirs is None or ours.fault:
        return
    do = f"run `{send(host, path)}`, or say `ship: true` in its source"
    if theirs.fault:
        yield "data", f"{path}: {theirs.fault}", do, True
    elif theirs.size != ours.size:
        yield "data", f"{path}: {theirs.size:,} bytes there, {ours.size:,} here", do, True
    elif theirs.late or ours.late:
        yield "data", f"{path}: too slow to be compared with the one here", "", False
    elif theirs.digest != ours.digest:
        yield "data", f"{path}: other bytes than here, as many", do, True


def send(host: HostSpec, path: str) -> str:
    """The command that brings a file to the same path there, as one types it here."""
    folder, _, _ = path.rpartition("/")
    there = f"mkdir -p {shlex.quote(folder or '/')} && cat > {shlex.quote(path)}"
    return f"{shlex.join(['ssh', '--', host.destination, there])} < {shlex.quote(path)}"


def clock_offset(answer: Answer) -> float:
    """Seconds by which its clock surely differs from that here; 0.0: less than CLOCK_LIMIT_S."""
    said = answer.facts.clock
    if said < answer.asked_s - CLOCK_LIMIT_S:
        return said - answer.asked_s
    if said > answer.heard_s + CLOCK_LIMIT_S:
        return said - answer.heard_s
    return 0.0


# ---------------------------------------------------------------------------------- for people


def table(findings: Sequence[Finding]) -> list[str]:
    """Lines: host, what it is about, what is wrong; below it the cure, and its own last words.

    What is wrong with several hosts alike is one row, with the names of the others below it.
    """
    if not findings:
        return []
    hosts = max(len(one.host) for one in findings)
    abouts = max(len(one.about) for one in findings)
    lines = []
    margin = " " * (hosts + abouts + 6)
    for one, others in _alike(findings):
        lines.append(f"  {one.host:<{hosts}}  {one.about:<{abouts}}  {escape(one.what)}")
        if others:
            lines.append(f"{margin}also: {', '.join(others)}")
        if one.cure:
            lines.append(f"{margin}do: {escape(one.cure)}")
        lines += [f"{margin}| {line}" for line in one.said.splitlines()[-SAID_LINES:]]
        if one.said and one.log:
            lines.append(f"{margin}its log: {escape(one.log)}")
    return lines


def _alike(findings: Sequence[Finding]) -> list[tuple[Finding, list[str]]]:
    """Each with the other hosts that it is true of word for word, in the order of the first."""
    groups: dict[Finding, tuple[Finding, list[str]]] = {}
    for one in findings:
        key = one if one.said else replace(one, host="")
        if key in groups:
            groups[key][1].append(one.host)
        else:
            groups[key] = (one, [])
    return list(groups.values())


def refusal(findings: Iterable[Finding], n_hosts: int) -> LaunchError | None:
    """The one error that tells of all that is wrong, if a run cannot begin."""
    fatal = [one for one in findings if one.fatal]
    if not fatal:
        return None
    n_bad = len({one.host for one in fatal})
    who = f"{n_bad} of {n_hosts} hosts" if n_hosts > 1 else fatal[0].host
    verb = "is" if n_bad == 1 else "are"
    return LaunchError(
        who, "\n".join([f"{verb} not ready, and nothing was started", *table(fatal)])
    )


def sentence(finding: Finding) -> str:
    """A warning in one line."""
    do = f"; {finding.cure}" if finding.cure else ""
    return f"host {finding.host}: {finding.about}: {finding.what}{do}"
