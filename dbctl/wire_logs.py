"""What an agent and its controller say about logs: docs/protocol.md, section 7.

Rules of this file: as wire.py's. Only an agent whose host may share no file system with the
controller says these; one piece at a time is on its way, so that no beat waits behind a log.
"""

from __future__ import annotations

from dbctl.wire import Message

TEXT_BYTES = 32 << 10  # of one LogText: it fits a header frame


class LogText(Message, frozen=True):
    """Agent to controller: bytes of `node`'s log from byte `start` on; again until it is filed."""

    node: str
    start: int
    text: bytes


class LogFiled(Message, frozen=True):
    """Controller to agent: of `node`'s log everything before byte `upto` has come."""

    node: str
    upto: int


LogMessage = LogText | LogFiled
