"""gloo groups with several connections between each two ranks.

A gloo *device* has one thread, which moves all bytes of its connections; a process group connects all ranks once for each of its devices,
and a message uses the device with the number tag mod devices. With two devices a ring of 64 MiB takes three quarters of the time if every rank
has two cores, and 0.9 of the time if every rank has one. Ranks that share cores gain nothing.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from torch import distributed

from meshwright.comm.transport.point_to_point import PointToPoint

CONNECTIONS = 2  # of ranks that have a core each


def connect(store: Any, rank: int, size: int, timeout: timedelta, connections: int) -> PointToPoint:
    """Point-to-point messages of a new gloo group. All ranks call it with the same number of connections."""
    gloo: Any = distributed.ProcessGroupGloo
    if connections == 1:
        return PointToPoint(gloo(store, rank, size, timeout), rank, size, timeout)
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [device for _ in range(connections) for device in devices(gloo)]
    options._threads = 2 * len(options._devices)  # as torch does
    return PointToPoint(gloo(store, rank, size, options), rank, size, timeout, connections=len(options._devices))


def devices(gloo: Any) -> list[Any]:
    """A new device for each interface in GLOO_SOCKET_IFNAME, which torch reads too, or for the interface of the host's name."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]
