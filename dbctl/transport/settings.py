"""What the link thread is told, in one piece: `Link` documents each, `Switch` does it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dbctl.keys import Tcp
from dbctl.wire import Message, Peer


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a `Switch` is told; `Link` documents each."""

    run: str
    me: Peer
    keeper: str | None
    beat_s: float
    lease_s: float
    relay: bool
    assembly_bytes: int
    tcp: Tcp | None
    reach_s: float
    give_up: Callable[[Peer, str], None]
    allow: Callable[[Peer, Message], bool]
    on_trouble: Callable[[str], None]
    deliver: Callable[[Peer, Message, int], bool]
    steps: Callable[[], int]
    parent_gone: Callable[[], None]
