"""What tests say to a shard of either method, and what they find in what it says."""

from __future__ import annotations

from dbctl.rights import CONTROLLER
from dbctl.roles.base import Effects, Role, Send
from dbctl.wire import CutPart, Fetch, Message, Params, Peer, ShardReport

A, B = Peer("worker-0.0", 1), Peer("worker-1.0", 1)
BOSS = Peer(CONTROLLER, 1)


def messages(effects: Effects) -> list[Message]:
    return [effect.message for effect in effects if isinstance(effect, Send)]


def fetched(
    shard: Role, sender: Peer, number: int, *, after: int = 0, returned: int = 0, start: int = 0
) -> Params:
    """Answered at once, to who asked."""
    [effect] = shard.receive(0.0, sender, Fetch(1, number, after, returned, start))
    assert isinstance(effect, Send)
    assert isinstance(effect.message, Params)
    assert effect.to == sender.node
    return effect.message


def parts(effects: Effects) -> list[CutPart]:
    """Of a cut; they go to the controller."""
    sent = [e for e in effects if isinstance(e, Send) and isinstance(e.message, CutPart)]
    assert all(e.to == CONTROLLER for e in sent)
    return [e.message for e in sent if isinstance(e.message, CutPart)]


def reported(shard: Role, now: float = 0.0) -> ShardReport:
    """All that a step says, when nothing but a report is due."""
    [report] = messages(shard.step(now))
    assert isinstance(report, ShardReport)
    return report
