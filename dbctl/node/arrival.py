"""Rows that a node's host was not given as files: from its cache, else from the controller.

Rules of this file: it puts the pure receiver (dbctl/shipment.py), the cache (dbctl/data/cache.py)
and the way to the controller together. It runs while a role is built, before the node says Ready.

Theory of operation: of one run and host one node receives at a time, so that the credit is that of
the host's connection. The turn is a lock of the host's private directory of the run; where another
run receives the same file, that is waited for too, and then nothing is left to do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from dbctl.data.cache import Cache, Partial, wait_for_lock
from dbctl.errors import DataError
from dbctl.experiment.specs import NpySource
from dbctl.node.distant import WAIT_S, Distant
from dbctl.rights import CONTROLLER
from dbctl.shipment import Receiver, Shipment, Shipped
from dbctl.wire_ship import ShipmentPart

Log = Callable[[str], None]


def bring(shipped: Shipped, distant: Distant, *, runtime: str, log: Log) -> NpySource:
    """The files of `shipped`, which are here from now on.

    DataError: this host cannot keep them, or what came is not what was announced.
    """
    cache = Cache(shipped.directory)
    x, y = (_bring(cache, s, distant, runtime=runtime, log=log) for s in (shipped.x, shipped.y))
    return NpySource(x=str(x), y=str(y))


def _bring(cache: Cache, shipment: Shipment, distant: Distant, *, runtime: str, log: Log) -> Path:
    path = cache.find(shipment)
    if path is None:
        _receive(cache, shipment, distant, runtime=runtime, log=log)
        path = cache.path(shipment)
    return path


def _receive(cache: Cache, shipment: Shipment, distant: Distant, *, runtime: str, log: Log) -> None:
    turn = os.open(runtime, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        wait_for_lock(turn, Path(runtime), distant.hear)
        with cache.partial(shipment, distant.hear) as partial:
            if partial is None:
                return
            log(f"receives {partial.path.name} from byte {partial.size:,} of {shipment.size:,} on")
            for _ in range(2):
                _fill(partial, shipment, distant)
                if partial.finish():
                    log(f"has {partial.path.name}")
                    return
                log(f"{partial.path.name} is damaged: it is sent once more from its beginning")
                partial.begin_anew()
            raise DataError(
                str(partial.path),
                "what came twice does not have the SHA-256 that was announced; does something "
                "write the data's file where it is read, or is the disk bad",
            )
    finally:
        os.close(turn)


def _fill(partial: Partial, shipment: Shipment, distant: Distant) -> None:
    receiver = Receiver(shipment, at=partial.size)
    while not receiver.done:
        now = time.monotonic()
        for asked in receiver.ask(now):
            distant.send(asked)
        for peer, message in distant.hear(min(WAIT_S, max(0.0, receiver.due - now))):
            if peer.node == CONTROLLER and isinstance(message, ShipmentPart):
                for data in receiver.take(time.monotonic(), message):
                    partial.append(data.data)
