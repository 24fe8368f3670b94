"""Who may speak over TCP: CURVE keys made for the run, and the ZAP handler that asks for them.

Rules of this file: a key is one life of one node; the list in force is replaced whole; nothing that
a peer says about itself counts. A secret is handed to libzmq and is in no text.

Theory of operation. ZAP (ZeroMQ RFC 27) asks the handler of domain `dbctl` once a handshake, with
the key that the client has proved to own, and gives the connection the User-Id `node#incarnation`.
A list that looked only at handshakes would let a life that is over go on with its connection, so
**every message is checked against the list in force** too: User-Id is read from the header frame,
must be in the list, and must be what the header claims. A message that comes by a connection made
from here has no User-Id: CURVE has proved that the listener owns the key of the life connected to.

Without encryption nobody proves anything (the network is trusted, by a written setting); headers
are then checked against the list alone, which fences lives that are over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import zmq
from zmq.utils import z85

from dbctl.keys import KeyRow, Tcp
from dbctl.transport.parcel import Refused
from dbctl.transport.sockets import ZAP_DOMAIN, Context, Socket, open_zap, receive
from dbctl.wire import Peer

ZAP_FRAMES = 8  # routing id, delimiter, version, request, domain, address, identity, mechanism
MAX_REQUESTS_A_TURN = 64


def make_keys() -> tuple[str, str]:
    """A new key pair: (public, secret)."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


class Guard:
    """The list in force of one process, its ZAP handler, and the check of each message."""

    def __init__(self, tcp: Tcp) -> None:
        self.tcp = tcp
        self._zap: Socket | None = None
        self._keys: dict[str, str] = {}
        self._lives: dict[str, str] = {}
        self._former: dict[str, str] = {}  # every key that was ever in the list: for words only
        self.replace(tcp.keys)

    # ------------------------------------------------------------ the list

    def replace(self, rows: Iterable[KeyRow]) -> None:
        """From here on these lives, with these keys, and no others."""
        keys = {str(Peer(node, incarnation)): key for node, incarnation, key in rows}
        self._lives = {key: life for life, key in keys.items() if key}
        self._former |= self._lives
        self._keys = keys

    def revoke(self, peer: Peer) -> None:
        """That life is over, whatever the list said."""
        key = self._keys.pop(str(peer), None)
        if key is not None:
            self._lives.pop(key, None)

    def key_of(self, peer: Peer) -> str | None:
        return self._keys.get(str(peer))

    # ------------------------------------------------------------ handshakes

    def open(self, context: Context) -> Socket:
        """The handler's socket; before the first bind, or libzmq lets anybody in."""
        self._zap = open_zap(context)
        return self._zap

    def answer(self) -> list[str]:
        """Answers the handshakes that wait; says whom it refused, a line each."""
        assert self._zap is not None
        refused = []
        for _ in range(MAX_REQUESTS_A_TURN):
            frames = receive(self._zap, max_frames=16)
            if frames is None:
                break
            request = [frame.bytes for frame in frames]
            if len(request) >= ZAP_FRAMES:
                user, word = self._judge(request)
                status = [b"200", b"", user.encode()] if user is not None else [b"400", b"", b""]
                # A ROUTER routes by the first frame; the second is the delimiter of a REP.
                self._zap.send_multipart([*request[:4], *status, b""], zmq.NOBLOCK)
                if user is None:
                    refused.append(word)
        return refused

    def _judge(self, request: Sequence[bytes]) -> tuple[str | None, str]:
        """(User-Id, "") or (None, why not)."""
        domain, mechanism = request[4], request[7]
        address = request[5].decode("ascii", "replace").removeprefix("::ffff:")
        if domain != ZAP_DOMAIN:
            return None, f"{address} asked for the domain {domain!r}"
        if not self.tcp.encrypted:
            return (
                ("", "") if mechanism == b"NULL" else (None, f"{address} came with {mechanism!r}")
            )
        if mechanism != b"CURVE" or len(request) != ZAP_FRAMES + 1 or len(request[8]) != 32:
            return None, f"{address} came with {mechanism!r}, expected CURVE"
        key = z85.encode(request[8]).decode()
        life = self._lives.get(key)
        if life is not None:
            return life, ""
        former = self._former.get(key)
        whose = f"the old key of {former}" if former is not None else "a key of nobody in this run"
        return None, f"{address} came with {whose}"

    # ------------------------------------------------------------ messages

    def check(self, claimed: Peer, frame: zmq.Frame, *, connected_to: Peer | None) -> None:
        """Refused unless the header's claim is who it came from, and that life is in the list.

        `frame`: the header frame as it was received; `connected_to`: the life at the other end of a
        connection made from here, None for one that was accepted.
        """
        who = str(claimed)
        if connected_to is not None:
            who = str(connected_to)
        elif self.tcp.encrypted:
            who = _user_id(frame)
        if who not in self._keys:
            raise Refused("revoked", f"a message of {who}, who is not in the list of keys")
        if who != str(claimed):
            raise Refused("identity", f"{who} says that it is {claimed}")


def _user_id(frame: zmq.Frame) -> str:
    """Who the handler said it is, for this connection."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return "nobody"  # no handler was asked, which our options do not allow
