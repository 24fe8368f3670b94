"""Roles of a few lines for tests with real processes: named in NodeSpec.factory, run by a node.

`spec.experiment` is JSON that a factory may read its settings from.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from dbctl.plan import NodeSpec
from dbctl.roles.base import NEVER, Allocate, Done, Effects, Record, Send
from dbctl.wire import Ack, Cut, Evaluate, Grant, Halt, Message, Peer, Return


class Echo:
    """Answers Cut(n) with Return(n). Grant lets it count: an Ack each step, `until` of them.

    Halt: Done. Evaluate(n): one step that sleeps n seconds, then an Ack of -1.
    """

    def __init__(self) -> None:
        self.due = NEVER
        self.count = 0
        self.until = 0
        self.nap_s = 0

    def start(self, now: float) -> Effects:
        return [Send("controller", Return(0))]

    def receive(self, now: float, sender: Peer, message: Message) -> Effects:
        if isinstance(message, Cut):
            return [Send(sender.node, Return(message.number))]
        if isinstance(message, Grant):
            self.until = max(self.until, message.until)
            self.due = 0.0 if self.count < self.until else NEVER
        if isinstance(message, Evaluate):
            self.nap_s = message.number
            self.due = 0.0
        if isinstance(message, Halt):
            return [Done("done", "as asked")]
        return []

    def step(self, now: float) -> Effects:
        if self.nap_s:
            time.sleep(self.nap_s)
            self.nap_s = 0
            self.due = NEVER
            return [Send("controller", Ack(0, -1, 0))]
        self.count += 1
        self.due = 0.0 if self.count < self.until else NEVER
        return [Send("controller", Ack(0, self.count, 0))]


def echo(spec: NodeSpec, allocate: Allocate) -> Echo:
    return Echo()


def fails_to_build(spec: NodeSpec, allocate: Allocate) -> Echo:
    raise ValueError("no such table\x1b[31m\nsecond line")


def dies_silently(spec: NodeSpec, allocate: Allocate) -> Echo:
    print("last words", file=sys.stderr, flush=True)
    os._exit(7)


class FailingStep(Echo):
    def step(self, now: float) -> Effects:
        raise ArithmeticError("step went wrong")


def fails_in_step(spec: NodeSpec, allocate: Allocate) -> FailingStep:
    return FailingStep()


class Recording(Echo):
    def step(self, now: float) -> Effects:
        self.due = NEVER
        return [Record("progress", {})]


def records(spec: NodeSpec, allocate: Allocate) -> Recording:
    return Recording()


def with_grandchild(spec: NodeSpec, allocate: Allocate) -> Echo:
    """Starts `sleep` and writes its number to the file that the settings name."""
    child = subprocess.Popen(["sleep", "300"])
    Path(json.loads(spec.experiment)["file"]).write_text(f"{child.pid}")
    return Echo()


def shows_environment(spec: NodeSpec, allocate: Allocate) -> Echo:
    """Writes what the process is like to the file that the settings name, as JSON."""
    told = {
        "environ": dict(os.environ),
        "nice": os.nice(0),
        "modules": sorted(sys.modules),
        "session": os.getsid(0),
        "pid": os.getpid(),
        "path": sys.path,
    }
    Path(json.loads(spec.experiment)["file"]).write_text(json.dumps(told))
    return Echo()


def builds_slowly(spec: NodeSpec, allocate: Allocate) -> Echo:
    time.sleep(json.loads(spec.experiment)["build_s"])
    return Echo()
