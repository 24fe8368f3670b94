"""The loop of a node: messages and time into its role, the role's effects out.

Rules of this file: the loop knows no socket (the link's), no file, and nothing of what its role
computes. It is on the path of every training step: one call of the link and one of the role.

Theory of operation. Build the role, say Ready each second until somebody speaks, then go round:
wait for messages or for the role's `due`, give the messages to the role, then let it do one bounded
step. Between a wait or a step and what follows from it lies a check of the lease, because this
process may have been stopped for an hour there: without a lease it says and applies nothing more
(docs/reliability.md). A watcher thread ends the process when the loop itself cannot see that the
lease or the parent is gone, in a product that takes a minute.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn, cast

from dbctl.errors import DbctlError, LaunchError
from dbctl.plan import NodeSpec
from dbctl.process import EXIT_DONE, EXIT_FAILED, EXIT_FENCED, EXIT_ORPHANED, beat_s, log, one_line
from dbctl.rights import CONTROLLER, Rights
from dbctl.roles.base import Allocate, Done, Effects, Role, Send
from dbctl.transport.line import socket_name
from dbctl.transport.link import Link
from dbctl.transport.memory import allocate
from dbctl.wire import Finish, Gone, Message, Peer
from dbctl.wire_processes import Failed, Peers, Ready

READY_AGAIN_S = 1.0
WAIT_MAX_S = 0.5  # the longest wait: how late the end of a lease is seen
GRACE_S = 1.0  # from the end of lease or parent to the watcher's SIGKILL

_now = time.monotonic


class Ended(Exception):
    """The loop is over: `status` is the process's exit status, `reason` one line for the log."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status, reason)
        self.status = status
        self.reason = reason


def run_node(spec: NodeSpec) -> int:
    """The whole life of a node after its spec; returns its exit status."""
    agent = Path(spec.agent).stem  # it listens on RUNTIME/NAME.sock
    link = Link(
        run=spec.run,
        node=spec.node,
        incarnation=spec.incarnation,
        listen=f"ipc://{spec.runtime}/{socket_name(Peer(spec.node, spec.incarnation))}",
        keeper=agent,
        keeper_endpoint=spec.agent,
        lease_s=spec.lease_s,
        beat_s=beat_s(spec.lease_s),
        watch_fd=0,
        assembly_bytes=assembly_bytes(spec),
        tcp=spec.tcp,
        far=spec.far,
        allow=Rights(
            spec.node, partners=[name for _, name in spec.partners], starts=spec.starts
        ).may,
        on_trouble=partial(log, spec.node),
    )
    try:
        link.start()
    except LaunchError as error:
        log(spec.node, str(error))
        return EXIT_FAILED
    threading.Thread(target=_watch, args=(link, spec.node), name="watch", daemon=True).start()
    linger_s = 0.0
    try:
        role = build_role(spec, link)
        gc.collect()
        gc.freeze()
        Loop(link, role, spec.node).run()
    except Ended as end:
        log(spec.node, end.reason)
        linger_s = 1.0 if end.status == EXIT_DONE else 0.0
        return end.status
    except Exception as error:
        log(spec.node, f"failed{_told(error)}")
        # To the agent too: it tells the controller of this death, with this word.
        with suppress(Exception):  # a link that has failed raises why, maybe not this error
            for to in (CONTROLLER, agent):
                link.send(to, Failed(one_line(error)))
        linger_s = 1.0
        return EXIT_FAILED
    finally:
        link.close(linger_s)


def _told(error: Exception) -> str:
    """A sentence where a file or a peer is at fault: a place in our source would say nothing."""
    if isinstance(error, DbctlError):
        return f": {one_line(error)}"
    return f"\n{traceback.format_exc().rstrip()}"


def assembly_bytes(spec: NodeSpec) -> int:
    """Two of the largest payloads of each that sends some in pieces: its slots, or an answer twice.

    With less, those that are sent at once would wait for each other's memory.
    """
    n_elements = max((s.stop - s.start for s in spec.shards), default=0)
    n_senders = len(spec.tcp.keys) if spec.tcp is not None else 0
    return max(64 << 20, 2 * 4 * n_elements * max(2, n_senders))


class Loop:
    """Runs one role over one link until `Ended` is raised; anything else raised is the role's."""

    def __init__(self, link: Link, role: Role, node: str) -> None:
        self.link = link
        self.role = role
        self.node = node
        self.done = False

    def run(self) -> NoReturn:
        link, role = self.link, self.role
        first = self._join()
        self._act(role.start(_now()))
        for peer, message in first:
            self._take(peer, message)
        while True:
            due = role.due
            now = _now()
            if due <= now and not self.done:
                wait_s = 0.0
            else:
                wait_s = WAIT_MAX_S if self.done else min(due - now, WAIT_MAX_S)
            for peer, message in link.receive(wait_s):
                self._take(peer, message)
            now = check(self.link)
            if role.due <= now and not self.done:
                effects = role.step(now)
                link.steps += 1
                check(self.link)
                self._act(effects)

    def _join(self) -> list[tuple[Peer, Message]]:
        """Says Ready until somebody speaks; gives back what was said, Peers already followed."""
        ready = Ready(self.link.endpoint, os.getpid(), self.link.tcp_endpoint)
        while True:
            check(self.link)
            self.link.send(CONTROLLER, ready)
            again = _now() + READY_AGAIN_S
            while (wait_s := again - _now()) > 0.0:
                batch = self.link.receive(min(wait_s, WAIT_MAX_S))
                check(self.link)
                if batch:
                    # Peers first, whatever came before it: the role's first effects need its peers.
                    for peer, message in batch:
                        if type(message) is Peers:
                            self._follow(peer, message)
                    return [
                        (peer, message) for peer, message in batch if type(message) is not Peers
                    ]

    def _take(self, peer: Peer, message: Message) -> None:
        now = check(self.link)
        kind = type(message)
        if kind is Peers or kind is Finish or kind is Gone:
            if peer.node != CONTROLLER:
                log(self.node, f"ignored {kind.__name__} of {peer}: only the controller sends it")
                return
            if kind is Finish:
                raise Ended(EXIT_DONE, "finished")
            if kind is Peers:
                self._follow(peer, cast(Peers, message))
                return
            gone = cast(Gone, message)
            self.link.forget(Peer(gone.node, gone.incarnation))
        self._act(self.role.receive(now, peer, message))

    def _follow(self, peer: Peer, peers: Peers) -> None:
        if peer.node != CONTROLLER:
            log(self.node, f"ignored Peers of {peer}: only the controller sends it")
            return
        self.link.replace_keys(peers.keys)
        for node, incarnation, endpoint in peers.nodes:
            if node != self.node:
                self.link.connect(node, incarnation, endpoint)

    def _act(self, effects: Effects) -> None:
        for effect in effects:
            if type(effect) is Send:
                self.link.send(effect.to, effect.message)
            elif type(effect) is Done:
                # No more steps; what others still ask is answered until the controller's Finish.
                self.done = True
                log(self.node, f"done: {effect.status} {effect.reason}".rstrip())
            else:
                raise AssertionError(f"a node's role may only send, found {type(effect).__name__}")


def build_role(spec: NodeSpec, link: Link) -> Role:
    """The role that `spec` asks for: dbctl's own, or what a test names as module:function."""
    if not spec.factory:
        from dbctl.node.build import build
        from dbctl.node.distant import Distant

        if spec.sent is None:
            return build(spec, allocate)
        send = partial(link.send, CONTROLLER)
        return build(spec, allocate, Distant(spec.sent, send=send, hear=partial(_hear, link)))
    module, _, function = spec.factory.partition(":")
    factory = getattr(importlib.import_module(module), function)
    return cast(Callable[[NodeSpec, Allocate], Role], factory)(spec, allocate)


def _hear(link: Link, wait_s: float) -> list[tuple[Peer, Message]]:
    """What has come while the role is built; Ended where there is no use for it any more."""
    batch = link.receive(min(wait_s, WAIT_MAX_S))
    check(link)
    if any(peer.node == CONTROLLER and type(message) is Finish for peer, message in batch):
        raise Ended(EXIT_DONE, "finished before it began")
    return batch


def check(link: Link) -> float:
    """The time, if this node may still act at it; else Ended."""
    now = _now()
    if link.closed_by_parent:
        raise Ended(EXIT_ORPHANED, "standard input ended: the agent is gone, or ends this node")
    if not link.lease_in_force(now):
        raise Ended(EXIT_FENCED, "the lease ran out: nothing was heard of the controller")
    return now


def _watch(link: Link, node: str) -> None:
    """Ends the process, and whatever it started, when the loop does not do so itself in time."""
    while not link.closed_by_parent and link.lease_in_force(_now()):
        time.sleep(0.25)
    time.sleep(GRACE_S)
    log(node, "ended in the middle of a step: the lease or the agent is gone")
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(EXIT_FENCED)
