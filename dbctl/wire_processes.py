"""What keeps the processes of a run going: docs/protocol.md, section 7.

Rules of this file: as wire.py's. No role says or hears any of these: they are between the links,
the agents and the controller. Of the end of a process roles hear too: `Finish` and `Exited` are in
wire.py.
"""

from __future__ import annotations

from dbctl.wire import Message


class Ready(Message, frozen=True):
    """A node listens on `endpoint` and its role is built; for other hosts on `tcp_endpoint`."""

    endpoint: str
    pid: int
    tcp_endpoint: str = ""


class Peers(Message, frozen=True):
    """Where those listen that this node talks to, and the TCP keys in force from now on."""

    nodes: tuple[tuple[str, int, str], ...]  # (node, incarnation, endpoint)
    keys: tuple[tuple[str, int, str], ...] = ()  # (node, incarnation, public key)


class Beat(Message, frozen=True):
    """Sent each second by the link thread; `steps` counts what the loop has done."""

    number: int
    steps: int
    rss_bytes: int


class Lease(Message, frozen=True):
    """The answer to Beat `number`: valid from when that beat was *sent*, on its sender's clock."""

    number: int


class Failed(Message, frozen=True):
    """A node's own word about why it ends."""

    what: str


class Start(Message, frozen=True):
    """Controller to agent: start this node. `spec` goes to its standard input."""

    node: str
    incarnation: int
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    spec: str
    nice: int = 0


class Started(Message, frozen=True):
    node: str
    incarnation: int
    pid: int


class Kill(Message, frozen=True):
    """Controller to agent: end this node's process group. `gently`: by its input's end first."""

    node: str
    incarnation: int
    gently: bool = False


ProcessMessage = Ready | Peers | Beat | Lease | Failed | Start | Started | Kill
