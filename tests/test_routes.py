"""dbctl/transport/routes.py: where a node is reached, and which of its lives counts."""

from __future__ import annotations

from typing import Any, cast

from dbctl.transport import routes as routes_module
from dbctl.transport.outlet import Outlet
from dbctl.transport.routes import SILENT_S, Routes
from dbctl.transport.sockets import Socket
from dbctl.wire import Peer

ROUTER = cast(Socket, object())


def outlet(**rest: Any) -> Outlet:
    return Outlet(ROUTER, **rest)


def test_connection_then_last_message_then_keeper() -> None:
    routes = Routes("agent-0")
    assert routes.find("a") is None
    keeper = routes.connections["agent-0"] = outlet()
    assert routes.find("a") is keeper
    caller = routes.caller(ROUTER, b"1")
    routes.hear("a", caller, 0.0)
    assert routes.find("a") is caller
    other = routes.caller(ROUTER, b"2")
    routes.hear("a", other, SILENT_S)
    assert routes.find("a") is other
    own = routes.connections["a"] = outlet(incarnation=1)
    assert routes.find("a") is own


def test_one_way_back_for_one_routing_id() -> None:
    routes = Routes(None)
    assert routes.caller(ROUTER, b"1") is routes.caller(ROUTER, b"1")


def test_ways_that_nobody_is_reached_by_are_dropped() -> None:
    routes = Routes(None)
    for number in range(100):
        routes.hear("a", routes.caller(ROUTER, str(number).encode()), number * SILENT_S / 3)
    assert len(routes.outlets()) == 2, "the first, and that which counts"
    for way in routes.outlets():
        routes.lose(way)
    assert routes.outlets() == []
    assert routes.find("a") is None


def test_a_way_that_speaks_is_not_given_up_for_another_that_does() -> None:
    """Two that have one key, the second of which stole it: what is answered goes to the first."""
    routes = Routes(None)
    first, second = (routes.caller(ROUTER, route) for route in (b"1", b"2"))
    for tick in range(40):
        routes.hear("a", first, tick * SILENT_S / 2)
        routes.hear("a", routes.caller(ROUTER, b"2"), (tick + 0.5) * SILENT_S / 2)
        assert routes.find("a") is first
    assert routes.outlets() == [first], "nothing is kept for the other"
    routes.hear("a", second, 22 * SILENT_S)
    assert routes.find("a") is second, "the first is silent: its connection may be broken"


def test_the_first_way_takes_its_place_back_when_it_speaks() -> None:
    """A worker may compute for longer than SILENT_S; a thief who waits for that gains nothing."""
    routes = Routes(None)
    first, third = routes.caller(ROUTER, b"1"), routes.caller(ROUTER, b"3")
    for tick in range(3):
        now = 2 * tick * SILENT_S
        routes.hear("a", first, now)
        assert routes.find("a") is first
        routes.hear("a", routes.caller(ROUTER, b"2"), now + SILENT_S)
        assert routes.find("a") is not first
    routes.hear("a", third, 6 * SILENT_S)
    assert routes.find("a") is third
    assert routes.outlets() == [first, third], "one is kept that may come back"
    routes.hear("a", first, 6 * SILENT_S)
    assert (routes.find("a"), routes.outlets()) == (first, [first])


def test_a_first_way_that_is_lost_or_whose_life_is_over_is_kept_no_longer() -> None:
    routes = Routes(None)
    first, second = (routes.caller(ROUTER, route) for route in (b"1", b"2"))
    routes.hear("a", first, 0.0)
    routes.hear("a", second, SILENT_S)
    routes.lose(first)
    assert routes.outlets() == [second]
    first = routes.caller(ROUTER, b"1")
    routes.hear("a", first, 2 * SILENT_S)
    routes.end(Peer("a", 1))
    assert routes.outlets() == []


def test_a_way_that_leads_to_two_stays_for_the_other() -> None:
    """The controller is reached, and reaches all nodes of a host, by one way."""
    routes = Routes(None)
    shared = routes.caller(ROUTER, b"1")
    routes.hear("a", shared, 0.0)
    routes.hear("b", shared, 0.0)
    routes.end(Peer("a", 1))
    assert routes.find("b") is shared
    assert routes.outlets() == [shared]


def test_lives() -> None:
    routes = Routes(None)
    assert routes.admit(Peer("a", 2))
    assert routes.admit(Peer("a", 2))
    assert not routes.admit(Peer("a", 1))
    assert routes.superseded(Peer("a", 2)) is None
    assert routes.superseded(Peer("b", 5)) is None
    assert routes.superseded(Peer("a", 3)) == Peer("a", 2)
    assert routes.admit(Peer("a", 3))


def test_the_end_of_a_life_closes_only_its_own_connection() -> None:
    routes = Routes("agent-0")
    keeper = routes.connections["agent-0"] = outlet()
    newer = routes.connections["a"] = outlet(incarnation=2)
    assert routes.end(Peer("a", 1)) is None
    assert routes.end(Peer("agent-0", 1)) is None
    assert routes.connections == {"agent-0": keeper, "a": newer}
    assert routes.end(Peer("a", 2)) is newer
    assert not routes.admit(Peer("a", 2))
    assert routes.admit(Peer("a", 3))


def test_names_are_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(routes_module, "MAX_NODES", 3)
    routes = Routes(None)
    assert [routes.admit(Peer(str(number), 1)) for number in range(5)] == [True] * 3 + [False] * 2
    assert routes.admit(Peer("0", 1))
