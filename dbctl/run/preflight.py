"""Before a run: every host is asked by its agent, and nothing starts unless all are ready.

Rules of this file: the questions go and come with what brings up the agents, so there is no further
connection; what is wrong is judged in dbctl/run/findings.py. Theory of operation: a launcher around
another one. While the agents come up the data files here are looked at, for comparison. When all
hosts have answered, or failed, everything wrong is raised as one error and all agents are let go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from dbctl.data.sources import Source, files_of
from dbctl.errors import LaunchError
from dbctl.examine import look_at, packages
from dbctl.experiment.specs import DigitsSource, HostSpec, SourceSpec
from dbctl.launch.base import AgentHandle, Gathering
from dbctl.launch.ssh_words import Asked
from dbctl.plan import LOCALHOST, Plan
from dbctl.run.findings import Finding, Here, Needs, of_answer, of_error, refusal, sentence
from dbctl.run.room import room_on
from dbctl.run.wiring import talks_to

Members = Sequence[tuple[str, HostSpec]]


def needs_of(
    plan: Plan,
    train: Source | None,
    test: Source | None,
    *,
    encrypted: bool,
    split: str = "test",
) -> dict[str, Needs]:
    """What a plan of hosts wants of each, by its name; nothing of a plan of this machine.

    `train`: what the workers read, `test`: what the evaluators read, which is the split `split`.
    """
    if plan.hosts == (LOCALHOST,):
        return {}
    host_of = {node.node: node.host for node in plan.nodes}
    reaches = {
        host: {
            host_of[name]
            for node in plan.nodes
            if node.host == host
            for name in talks_to(plan, node)
        }
        - {host}
        for host in plan.hosts
    }
    needs = {}
    data = plan.experiment.data
    for host in plan.hosts:
        nodes = [node for node in plan.nodes if node.host == host]
        roles = {node.role for node in nodes}
        files = [*(files_there(data.train) if "worker" in roles else ())]
        if "evaluator" in roles:
            files += files_there(data.train if split == "train" else data.test)
        needs[host] = Needs(
            files=tuple(dict.fromkeys(files)),
            room=room_on(plan, host, train=train, test=test),
            threads=sum(node.threads for node in nodes if node.role == "worker"),
            encrypted=encrypted,
            listens=any(host in targets for targets in reaches.values()),
            reaches=frozenset(reaches[host]),
        )
    return needs


def files_there(source: SourceSpec | None) -> list[str]:
    """The files that a host must have of its own: not what dbctl brings along or is sent."""
    if source is None or isinstance(source, DigitsSource) or source.ship:
        return []
    return [path for path, _ in files_of(source)]


def asked_of(
    members: Members,
    needs: Mapping[str, Needs],
    address_of: Mapping[str, str],
    *,
    only: bool = False,
) -> Asked:
    """The questions; `address_of` each host is empty where there is one only."""
    questions = {}
    for agent, host in members:
        wanted = needs.get(host.name, Needs())
        address = address_of.get(host.name, "") if wanted.listens else ""
        questions[agent] = {"address": address, "files": wanted.files}
    return Asked(questions=questions, only=only)


def judge(
    outcomes: Sequence[AgentHandle | LaunchError],
    members: Members,
    needs: Mapping[str, Needs],
    *,
    here: Here,
) -> Iterator[Finding]:
    """What is wrong with all hosts; `outcomes` in the order of `members`."""
    names = dict(members)
    for (_, host), outcome in zip(members, outcomes, strict=True):
        if isinstance(outcome, LaunchError):
            yield of_error(outcome)
        elif outcome.answer is not None:
            wanted = needs.get(host.name, Needs())
            yield from of_answer(host, outcome.answer, wanted, here=here, names=names)


def here_for(needs: Mapping[str, Needs]) -> Here:
    """Of this machine, what the hosts are compared with."""
    paths = tuple(dict.fromkeys(path for one in needs.values() for path in one.files))
    return Here(packages=packages(), files={one.path: one for one in look_at(paths)})


class Preflight:
    """A launcher: `launcher`, and no agent unless every host is ready.

    `needs` by the host's name. `warn` is told what a run can live with.
    """

    def __init__(
        self,
        launcher: Gathering,
        members: Members,
        needs: Mapping[str, Needs],
        *,
        warn: Callable[[str], None],
    ) -> None:
        self._launcher = launcher
        self._members = members
        self._needs = needs
        self._warn = warn

    def start_async(self) -> None:
        self._launcher.start_async()

    def wait_ready(self) -> list[AgentHandle]:
        here = here_for(self._needs)
        outcomes = self._launcher.wait_all()
        findings = list(judge(outcomes, self._members, self._needs, here=here))
        if (error := refusal(findings, len(self._members))) is not None:
            self.stop(1.0)
            raise error
        for finding in findings:
            self._warn(sentence(finding))
        return [one for one in outcomes if isinstance(one, AgentHandle)]

    def start(self) -> list[AgentHandle]:
        self.start_async()
        return self.wait_ready()

    def failure(self) -> LaunchError | None:
        return self._launcher.failure()

    def all_ended(self) -> bool:
        return self._launcher.all_ended()

    def stop(self, timeout_s: float) -> None:
        self._launcher.stop(timeout_s)
