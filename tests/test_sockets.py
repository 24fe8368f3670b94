"""dbctl/transport/sockets.py: docs/reliability.md, section 3, option by option."""

from __future__ import annotations

import os
import socket as unix
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from dbctl.envelope import PIECE_BYTES
from dbctl.errors import LaunchError
from dbctl.keys import Tcp
from dbctl.transport import sockets
from dbctl.transport.curve import make_keys


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Iterator[zmq.Context]:
    """A context whose sockets live as long as the test, whether or not it keeps them."""
    opened = []
    configure = sockets.configure
    monkeypatch.setattr(sockets, "configure", lambda s: opened.append(configure(s)) or s)
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


COMMON = {
    zmq.MAXMSGSIZE: (1 << 20) + (64 << 10),
    zmq.SNDHWM: 16,
    zmq.RCVHWM: 16,
    zmq.HEARTBEAT_IVL: 0,
    zmq.HANDSHAKE_IVL: 3_000,
    zmq.LINGER: 0,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 5_000,
    zmq.IPV6: 1,
}


def test_every_option_is_set_on_a_dealer(context: zmq.Context, folder: Path) -> None:
    dealer = sockets.open_dealer(context, f"ipc://{folder}/a", node="n")
    for option, value in COMMON.items():
        assert dealer.getsockopt(option) == value, zmq.SocketOption(option).name
    assert dealer.getsockopt(zmq.IMMEDIATE) == 1
    assert dealer.getsockopt(zmq.ROUTING_ID) == b""


def test_every_option_is_set_on_a_router(context: zmq.Context, folder: Path) -> None:
    router, _ = sockets.open_router(context, f"ipc://{folder}/a", node="n")
    for option, value in COMMON.items():
        assert router.getsockopt(option) == value, zmq.SocketOption(option).name
    # ROUTER_MANDATORY cannot be read back; its effect can be seen.
    with pytest.raises(sockets.Gone):
        sockets.send(router, [b"nobody", b"x"])


TCP = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 4,
    zmq.TCP_KEEPALIVE_INTVL: 1,
    zmq.TCP_KEEPALIVE_CNT: 5,
    zmq.TCP_MAXRT: 10_000,
    zmq.CONNECT_TIMEOUT: 3_000,
}


def test_every_option_is_set_over_tcp(context: zmq.Context) -> None:
    """Before bind or connect: `watch` is called between the two."""
    early: list[dict[int, object]] = []

    def watch(socket: zmq.Socket) -> None:
        early.append({option: socket.getsockopt(option) for option in COMMON | TCP})

    (public, secret), (other, _) = make_keys(), make_keys()
    tcp = Tcp(public=public, secret=secret)
    router, endpoint = sockets.open_router(
        context, "tcp://127.0.0.1:0", node="n", tcp=tcp, watch=watch
    )
    dealer = sockets.open_dealer(
        context, endpoint, node="n", tcp=tcp, server_key=other, watch=watch
    )
    assert early == [COMMON | TCP] * 2
    assert router.getsockopt(zmq.ZAP_DOMAIN) == b"dbctl"
    assert router.getsockopt(zmq.ZAP_ENFORCE_DOMAIN) == 1
    assert router.getsockopt(zmq.CURVE_SERVER) == 1
    assert dealer.getsockopt(zmq.CURVE_SERVER) == 0
    assert dealer.getsockopt(zmq.IMMEDIATE) == 1
    for socket in (router, dealer):
        assert socket.getsockopt(zmq.MECHANISM) == zmq.CURVE


def test_without_encryption_the_handler_is_asked_too(context: zmq.Context) -> None:
    router, _ = sockets.open_router(context, "tcp://[::1]:0", node="n", tcp=Tcp())
    assert router.getsockopt(zmq.MECHANISM) == zmq.NULL
    assert router.getsockopt(zmq.ZAP_ENFORCE_DOMAIN) == 1


@pytest.mark.parametrize("address", ["*", "0.0.0.0", "[::]", "localhost", "eth0", "224.0.0.1"])
def test_it_listens_on_one_address_of_this_host(context: zmq.Context, address: str) -> None:
    with pytest.raises(LaunchError, match=r"expected .*address of this host"):
        sockets.open_router(context, f"tcp://{address}:0", node="n", tcp=Tcp())


def test_a_piece_and_its_header_fit(context: zmq.Context, folder: Path) -> None:
    router, endpoint = sockets.open_router(context, f"ipc://{folder}/a", node="n")
    dealer = sockets.open_dealer(context, endpoint, node="n")
    dealer.poll(2_000, zmq.POLLOUT)
    assert sockets.send(dealer, [bytes(1 << 16), bytes(PIECE_BYTES)])
    assert router.poll(2_000)
    frames = sockets.receive(router)
    assert frames is not None
    assert [len(frame) for frame in frames[1:]] == [1 << 16, PIECE_BYTES]


def test_no_other_kind_of_socket(context: zmq.Context) -> None:
    with pytest.raises(AssertionError), context.socket(zmq.PUB) as publisher:
        sockets.configure(publisher)


def test_a_send_to_nobody_does_not_block(context: zmq.Context, folder: Path) -> None:
    dealer = sockets.open_dealer(context, f"ipc://{folder}/nobody", node="n")
    assert not sockets.send(dealer, [b"x"])


def test_tcp_port_0_gives_the_real_endpoint(context: zmq.Context) -> None:
    _, endpoint = sockets.open_router(context, "tcp://127.0.0.1:0", node="n", tcp=Tcp())
    assert int(endpoint.rpartition(":")[2]) > 0


@pytest.mark.parametrize("size", [107, 108])
def test_an_ipc_path_must_fit_sockaddr_un(context: zmq.Context, folder: Path, size: int) -> None:
    directory = folder
    while size - len(os.fsencode(directory)) - 1 > 60:
        directory = directory / ("d" * 40)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = f"{directory}/{'x' * (size - len(os.fsencode(directory)) - 1)}"
    assert len(path) == size
    if size < 108:
        assert sockets.open_router(context, f"ipc://{path}", node="n")[1] == f"ipc://{path}"
    else:
        with pytest.raises(LaunchError, match="108 bytes, expected fewer than 108"):
            sockets.open_router(context, f"ipc://{path}", node="shard-0")


def test_a_directory_open_to_others_is_refused(context: zmq.Context, folder: Path) -> None:
    folder.chmod(0o755)
    with pytest.raises(LaunchError, match="mode 0700"):
        sockets.open_router(context, f"ipc://{folder}/a", node="n")


def test_a_missing_directory_is_named(context: zmq.Context, folder: Path) -> None:
    with pytest.raises(LaunchError, match="gone"):
        sockets.open_router(context, f"ipc://{folder}/gone/a", node="n")


def test_a_living_listener_is_not_pushed_aside(context: zmq.Context, folder: Path) -> None:
    sockets.open_router(context, f"ipc://{folder}/a", node="n")
    with pytest.raises(LaunchError, match="another process listens"):
        sockets.open_router(context, f"ipc://{folder}/a", node="n")


def test_a_dead_listener_is(context: zmq.Context, folder: Path) -> None:
    with unix.socket(unix.AF_UNIX) as dead:
        dead.bind(f"{folder}/a")
    sockets.open_router(context, f"ipc://{folder}/a", node="n")


@pytest.mark.parametrize("endpoint", ["inproc://a", "udp://127.0.0.1:1", "", "tcp://300.1.1.1:0"])
def test_other_transports_are_refused(context: zmq.Context, endpoint: str) -> None:
    with pytest.raises(LaunchError, match="cannot listen"):
        sockets.open_router(context, endpoint, node="n")


def test_frames_beyond_the_limit_are_not_kept(context: zmq.Context, folder: Path) -> None:
    router, endpoint = sockets.open_router(context, f"ipc://{folder}/a", node="n")
    dealer = sockets.open_dealer(context, endpoint, node="n")
    dealer.poll(2_000, zmq.POLLOUT)
    sockets.send(dealer, [b"x"] * 1_000)
    sockets.send(dealer, [b"next"])
    router.poll(2_000)
    frames = sockets.receive(router)
    assert frames is not None
    assert len(frames) == sockets.MAX_FRAMES + 1
    router.poll(2_000)
    following = sockets.receive(router)
    assert following is not None
    assert following[1].bytes == b"next"


@pytest.mark.parametrize(("size", "copied"), [(1 << 10, True), (PIECE_BYTES, False)])
def test_a_large_frame_is_not_copied(
    context: zmq.Context, folder: Path, size: int, copied: bool
) -> None:
    """What the memory holds is sent when it is sent: here nobody is connected yet."""
    # Not one of ours: it takes messages before it is connected.
    dealer = context.socket(zmq.DEALER)
    memory = bytearray(size)
    dealer.connect(f"ipc://{folder}/late")
    assert sockets.send(dealer, [b"header", memoryview(memory)])
    memory[:] = b"x" * size
    late, _ = sockets.open_router(context, f"ipc://{folder}/late", node="n")
    assert late.poll(2_000)
    frames = sockets.receive(late)
    assert frames is not None
    assert (frames[2].bytes == bytes(size)) == copied
    dealer.close(linger=0)
