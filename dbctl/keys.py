"""What a node is told about TCP: where it listens, its own key, and whose keys it takes. Pure.

Rules of this file: a secret is in `Tcp` and nowhere else, and no text is ever made of it. `Tcp`
travels only inside a NodeSpec (`Start.spec`), through the agents' private channel and a pipe.

Keys are CURVE's, 40 characters of Z85 each, one pair for each life of each node of a run. A row
without a key stands for a life that is known, in a run without encryption.
"""

from __future__ import annotations

import msgspec

KeyRow = tuple[str, int, str]
"""(node, incarnation, public key)."""


class Tcp(msgspec.Struct, frozen=True, kw_only=True):
    """`address`: this host's own, to listen on; "" for a node that only connects.

    `public`, `secret`: this life's key pair, both "" without encryption. `keys`: whom it talks to
    over TCP, until `Peers` says otherwise.
    """

    address: str = ""
    public: str = ""
    secret: str = ""
    keys: tuple[KeyRow, ...] = ()

    @property
    def encrypted(self) -> bool:
        return bool(self.secret)

    def __repr__(self) -> str:
        how = "encrypted" if self.encrypted else "not encrypted"
        return f"Tcp({self.address!r}, {how}, {len(self.keys)} keys)"
