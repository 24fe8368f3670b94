"""`dbctl doctor [FILE]`: what a run would be told of its hosts, with nothing started.

Rules of this file: it looks as a run does (dbctl/run/preflight.py), with agents that are only
asked; nothing that it writes stays but work directories, empty. FILE is a hosts file, or an
experiment, whose data and size are looked at too. Without one this machine is examined.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import dbctl
from dbctl.errors import LaunchError
from dbctl.examine import Examination, Question, packages
from dbctl.experiment.read import load, load_hosts
from dbctl.experiment.specs import HostSpec
from dbctl.experiment.tree import Mapping as TreeMapping
from dbctl.experiment.tree import Place, parse_tree, read_text
from dbctl.launch.base import Answer, make_runtime
from dbctl.launch.bootstrap import bring, nobody
from dbctl.launch.ssh import SshLauncher
from dbctl.launch.ssh_words import NOT_REACHED
from dbctl.plan import LOCALHOST
from dbctl.process import escape_line
from dbctl.run.findings import Finding, Here, Needs, of_answer, of_error, table
from dbctl.run.hosts import GIVE_ADDRESS, TOKEN_BYTES, find_addresses, members
from dbctl.run.preflight import Members, asked_of, here_for, judge, needs_of
from dbctl.run.room import room_on
from dbctl.run.setting import open_data, plan_of, resolve_threads
from dbctl.run.wiring import wired

HOST_KEYS = ("hosts", "network")
COLUMNS = (
    *("host", "python", "dbctl", "numpy", "cores", "OMP", "memory", "disk", "open files"),
    *("clock", "reaches"),
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What each host said, None where it said nothing; `reached` there is by the others' names."""

    answers: Mapping[str, Answer | None]
    findings: Sequence[Finding]

    @property
    def is_well(self) -> bool:
        return not any(finding.fatal for finding in self.findings)


def doctor(
    path: str | None, *, bootstrap: bool = False, tell: Callable[[str], object] = nobody
) -> Report:
    """Examines the hosts of a file, or this machine. `bootstrap`: brings dbctl to them first.

    `tell` is told what takes its time.
    DbctlError: the file is bad, or the experiment's data or plan is.
    """
    if path is None:
        return _this_machine(Needs())
    if is_hosts_file(path):
        hosts: Sequence[HostSpec] = load_hosts(path)
        agents = [f"agent-{number}" for number in range(len(hosts))]
        needs = {host.name: Needs(encrypted=len(hosts) > 1) for host in hosts}
    else:
        experiment = resolve_threads(load(path))
        train, test = open_data(experiment)
        plan = plan_of(experiment, train, test)
        if plan.hosts == (LOCALHOST,):
            return _this_machine(Needs(room=room_on(plan, LOCALHOST, train=train, test=test)))
        hosts = [host for _, host in members(plan)]
        agents = [agent for agent, _ in members(plan)]
        needs = needs_of(plan, train, test, encrypted=wired(plan, {}).encrypted)
    outcomes = bring(hosts, tell=tell) if bootstrap else hosts
    asked = [
        (agent, one)
        for agent, one in zip(agents, outcomes, strict=True)
        if isinstance(one, HostSpec)
    ]
    report = examine(asked, needs)
    failed = [of_error(one) for one in outcomes if isinstance(one, LaunchError)]
    answers = {host.name: report.answers.get(host.name) for host in hosts}
    return Report(answers=answers, findings=[*failed, *report.findings])


def is_hosts_file(path: str) -> bool:
    """Whether it holds hosts and no experiment; ExperimentError: it cannot be read."""
    tree = parse_tree(read_text(path), Place(path, 1, 1), [])
    hosts, network = HOST_KEYS
    return isinstance(tree, TreeMapping) and hosts in tree.items and network not in tree.items


def _this_machine(needs: Needs) -> Report:
    host = HostSpec(name=LOCALHOST, workdir=".")
    asked_s = time.time()
    with Examination(Question(workdir=host.workdir)) as looked:
        facts = looked.facts
    answer = Answer(facts=facts, reached={}, asked_s=asked_s, heard_s=time.time())
    here = Here(packages=packages(), files={})
    findings = list(of_answer(host, answer, needs, here=here, names={}))
    if shutil.which("ssh") is None:
        what = "there is no ssh here: hosts cannot be reached"
        findings.append(Finding(host=LOCALHOST, about="ssh", what=what, fatal=False))
    return Report(answers={LOCALHOST: answer}, findings=findings)


def examine(asked: Members, needs: Mapping[str, Needs]) -> Report:
    """Of hosts that ssh reaches, by their agents' names, all at once."""
    hosts = [host for _, host in asked]
    found, faults = find_addresses(hosts) if len(hosts) > 1 else ({}, {})
    runtime, logs = make_runtime(), tempfile.mkdtemp(prefix="dbctl-doctor-")
    launcher = SshLauncher(
        hosts=asked,
        runtime=runtime,
        run=secrets.token_hex(TOKEN_BYTES),
        logs=logs,
        token=secrets.token_hex(TOKEN_BYTES),
        asked=asked_of(asked, needs, found, only=True),
    )
    try:
        launcher.start_async()
        here = here_for(needs)
        outcomes = launcher.wait_all()
    finally:
        launcher.stop(1.0)
        for directory in (runtime, logs):
            shutil.rmtree(directory, ignore_errors=True)
    # Its log is not kept: its last words are in the table.
    findings = [replace(one, log="") for one in judge(outcomes, asked, needs, here=here)]
    findings += _of_addresses(faults, findings)
    names = {agent: host.name for agent, host in asked}
    answers: dict[str, Answer | None] = {}
    for host, outcome in zip(hosts, outcomes, strict=True):
        answer = None if isinstance(outcome, LaunchError) else outcome.answer
        if answer is not None:
            ways = {names[agent]: way for agent, way in answer.reached.items() if agent in names}
            answer = replace(answer, reached=ways)
        answers[host.name] = answer
    return Report(answers=answers, findings=findings)


def _of_addresses(faults: Mapping[str, str], findings: Sequence[Finding]) -> list[Finding]:
    """After `findings`, as the next thing to mend; not of hosts that ssh did not get to."""
    away = {one.host for one in findings if one.about in NOT_REACHED}
    return [
        Finding(host=name, about="address", what=fault, cure=GIVE_ADDRESS)
        for name, fault in faults.items()
        if name not in away
    ]


# ---------------------------------------------------------------------------------- for people


def lines(report: Report) -> Iterator[str]:
    """What hosts said of themselves, then what is wrong."""
    rows = [COLUMNS, *(_row(name, answer) for name, answer in report.answers.items())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    for row in rows:
        text = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        yield escape_line(text.rstrip())
    for title, fatal in (("not ready", True), ("to be known", False)):
        some = [finding for finding in report.findings if finding.fatal == fatal]
        if some:
            yield ""
            yield f"{title}:"
            yield from table(some)
    if report.is_well:
        yield ""
        n = len(report.answers)
        yield f"all {n} hosts are ready" if n > 1 else f"{next(iter(report.answers))} is ready"


def _row(name: str, answer: Answer | None) -> tuple[str, ...]:
    if answer is None:
        return (name, *["-"] * (len(COLUMNS) - 1))
    facts, ways = answer.facts, answer.reached
    n_good = sum(not fault for fault in ways.values())
    return (
        name,
        facts.python,
        dbctl.__version__,
        facts.packages.get("numpy") or "-",
        str(facts.cores),
        facts.threads.get("OMP_NUM_THREADS", "-"),
        _gib(facts.memory),
        _gib(facts.free),
        f"{facts.open_files:,}" if facts.open_files >= 0 else "any",
        _offset(answer),
        f"{n_good} of {len(ways)}" if ways else "-",
    )


def _offset(answer: Answer) -> str:
    """Of its clock, as well as is known."""
    middle, doubt = (answer.asked_s + answer.heard_s) / 2, (answer.heard_s - answer.asked_s) / 2
    off_s = answer.facts.clock - middle
    return "as here" if abs(off_s) <= doubt else f"{off_s:+.1f} s"


def _gib(n_bytes: int | None) -> str:
    return "-" if n_bytes is None else f"{n_bytes / (1 << 30):.1f} GiB"


def as_object(report: Report) -> dict[str, object]:
    """The report as plain values."""
    from msgspec import to_builtins

    return {
        "event": "doctor",
        "ready": report.is_well,
        "hosts": [
            {"name": name, **(to_builtins(answer) if answer is not None else {})}
            for name, answer in report.answers.items()
        ],
        "findings": [asdict(finding) for finding in report.findings],
    }
